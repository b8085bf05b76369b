"""How a batch is run: answers that are none are asked again, a full disk and a changed file lose nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pageturner.server.api.batches import batch_runner
from pageturner.server.api.batches.batch_journal import (
    BatchRecord,
    FileRecord,
    Journal,
    JournalError,
)
from pageturner.server.api.batches.batch_lines import Answered, Question
from pageturner.server.api.batches.batch_runner import BatchPaths, BatchRunner

Answer = Callable[[str], Awaitable[Answered]]
WINDOW = 4


class Bench:
    """A batch of lines 0 to n - 1 in a folder, and who answers them."""

    def __init__(self, folder: Path, answer: Answer, n: int = 20, expires: int = 0) -> None:
        self.folder, self.answer, self.most = folder, answer, 0
        self.input = folder / "in.jsonl"
        if not self.input.exists():
            self.input.write_bytes(b"".join(self.line(i) for i in range(n)))
        self.journal = Journal(folder / "journal")
        self.record = self.journal.batch("b") or self.journal.create(
            BatchRecord("b", expires=expires)
        )
        paths = BatchPaths(lambda _: self.input, self.written)
        self.asked: list[str] = []
        self.runner = BatchRunner(self.journal, paths, self.ask, lambda busy: WINDOW - busy, 10_000)

    @staticmethod
    def line(i: int) -> bytes:
        body = {"prompt": str(i)}
        whole = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps(whole).encode() + b"\n"

    def written(self, record: BatchRecord, ok: bool) -> tuple[Path, FileRecord]:
        name = "out" if ok else "err"
        return self.folder / name, FileRecord(f"file-{name}", "", "", name, 0, 0)

    async def ask(self, question: Question, record: BatchRecord) -> Answered:
        self.asked.append(json.loads(question.body)["prompt"])
        self.most = max(self.most, self.runner.under_way)
        return await self.answer(self.asked[-1])

    async def run(self, until: Callable[[], bool] | None = None) -> BatchRecord:
        """To its end, or until something is so."""
        self.runner.begin(self.record)
        if until is None:
            await asyncio.wait_for(self.runner.wait("b"), 20)
        else:
            limit = time.monotonic() + 20
            while not until():
                assert time.monotonic() < limit
                await asyncio.sleep(0.005)
        await self.runner.close()
        record = self.journal.batch("b")
        assert record is not None
        self.journal.close()
        return record

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(text) for text in (self.folder / name).read_bytes().splitlines()]

    def ids(self, name: str) -> list[str]:
        return [one["custom_id"] for one in self.lines(name)]


async def at_once(prompt: str) -> Answered:
    await asyncio.sleep(0)
    return Answered(200, json.dumps({"text": prompt, "usage": {"prompt_tokens": 1}}).encode())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL", "GATHER", "PAUSE", "DISK_PAUSE"):
        monkeypatch.setattr(batch_runner, name, 0.01)


async def test_every_line_is_answered_in_its_place(tmp_path: Path) -> None:

    bench = Bench(tmp_path, at_once, 300)
    record = await bench.run()
    assert (record.status, record.answered, record.failed, record.input_tokens) == (
        "completed",
        300,
        0,
        300,
    )
    assert bench.ids("out") == [f"c{i}" for i in range(300)]
    assert bench.most <= WINDOW
    assert sorted(record.times) == ["completed", "finalizing", "in_progress"]


async def test_what_is_refused_for_now_is_asked_again_and_what_is_refused_is_an_error(
    tmp_path: Path,
) -> None:
    turns = {"3": [429, 503, 200], "5": [400], "6": [504], "7": [500]}

    async def answer(prompt: str) -> Answered:
        status = turns[prompt].pop(0) if turns.get(prompt) else 200
        reason = "deadline_exceeded" if status == 504 else "x"
        return Answered(status, json.dumps({"error": {"reason": reason}}).encode())

    bench = Bench(tmp_path, answer, 10)
    record = await bench.run()
    assert bench.asked.count("3") == 3
    assert (record.answered, record.failed) == (7, 3)
    assert [(one["custom_id"], one["response"]["status_code"]) for one in bench.lines("err")] == [
        ("c5", 400),
        ("c6", 504),
        ("c7", 500),
    ]


async def test_somebody_who_raises_has_answered_500(tmp_path: Path) -> None:
    async def answer(prompt: str) -> Answered:
        if prompt == "2":
            raise RuntimeError("a bug")
        return await at_once(prompt)

    bench = Bench(tmp_path, answer, 5)
    record = await bench.run()
    assert (record.status, bench.ids("err")) == ("completed", ["c2"])


async def test_stopped_in_the_middle_it_goes_on_where_it_was(tmp_path: Path) -> None:
    async def some(prompt: str) -> Answered:
        if int(prompt) >= 10:
            await asyncio.sleep(60)
        return await at_once(prompt)

    first = Bench(tmp_path, some)
    record = await first.run(lambda: len(first.asked) == 10 + WINDOW)
    assert (record.status, record.answered) == ("in_progress", 10)
    second = Bench(tmp_path, at_once)
    record = await second.run()
    assert sorted(map(int, second.asked)) == list(range(10, 20))
    assert second.ids("out") == [f"c{i}" for i in range(20)]


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_told_to_end_it_gives_what_there_is(tmp_path: Path, how: str) -> None:
    async def some(prompt: str) -> Answered:
        if int(prompt) >= 10:
            await asyncio.sleep(60)
        return await at_once(prompt)

    expires = int(time.time()) + 2 if how == "expired" else 0
    bench = Bench(tmp_path, some, expires=expires)

    def end_it() -> bool:
        ten = len(bench.asked) == 10 + WINDOW
        if ten and how == "cancelled":
            bench.journal.move("b", "cancelling", "cancelled")
            bench.runner.end("b")
        return ten

    running = asyncio.create_task(bench.run())
    while not end_it():
        await asyncio.sleep(0.005)
    record = await running
    assert (record.status, record.answered, record.failed) == (how, 10, 10)
    assert {one["error"]["code"] for one in bench.lines("err")} == {f"batch_{how}"}
    assert bench.ids("out") + bench.ids("err") == [f"c{i}" for i in range(20)]


async def test_a_full_disk_is_waited_for_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [False]
    finish, probe = Journal.finish, Journal.probe

    def finishing(journal: Journal, results: Any) -> None:
        if full[0]:
            raise JournalError("disk_full", "journal: database or disk is full")
        finish(journal, results)

    def probing(journal: Journal) -> None:
        if full[0]:
            raise JournalError("disk_full", "journal: database or disk is full")
        probe(journal)

    monkeypatch.setattr(Journal, "finish", finishing)
    monkeypatch.setattr(Journal, "probe", probing)

    bench = Bench(tmp_path, at_once, 50)
    full[0] = True
    running = asyncio.create_task(bench.run())
    while not bench.runner.trouble:
        await asyncio.sleep(0.005)
    before = len(bench.asked)
    await asyncio.sleep(0.1)
    assert len(bench.asked) <= before + WINDOW
    assert bench.runner.trouble
    full[0] = False
    record = await running
    assert (record.status, record.answered) == ("completed", 50)
    assert bench.ids("out") == [f"c{i}" for i in range(50)]
    assert sorted(map(int, bench.asked)) == list(range(50))


async def test_a_file_that_changed_meanwhile_is_noticed(tmp_path: Path) -> None:
    async def some(prompt: str) -> Answered:
        if int(prompt) >= 10:
            await asyncio.sleep(60)
        return await at_once(prompt)

    first = Bench(tmp_path, some)
    await first.run(lambda: len(first.asked) == 10 + WINDOW)
    first.input.write_bytes(first.input.read_bytes().replace(b'"prompt": "15"', b'"prompt": "51"'))
    record = await Bench(tmp_path, at_once).run()
    assert record.status == "failed"
    assert record.problems[-1]["code"] == "input_changed"


@pytest.mark.parametrize(("content", "code"), [(b"\n\n", "empty_file"), (None, "invalid_file")])
async def test_without_lines_it_fails(tmp_path: Path, content: bytes | None, code: str) -> None:

    bench = Bench(tmp_path, at_once)
    if content is None:
        bench.input.unlink()
    else:
        bench.input.write_bytes(content)
    record = await bench.run()
    assert (record.status, record.problems[-1]["code"]) == ("failed", code)


async def test_a_batch_that_must_wait_holds_up_no_other(tmp_path: Path) -> None:
    async def answer(prompt: str) -> Answered:
        return Answered(429, b"{}", 30.0) if "slow" in prompt else await at_once(prompt)

    bench = Bench(tmp_path, answer, 50)
    slow = tmp_path / "slow.jsonl"
    slow.write_bytes(bench.input.read_bytes().replace(b'"prompt": "', b'"prompt": "slow'))
    other = bench.journal.create(BatchRecord("slow"))
    paths = BatchPaths(lambda record: slow if record.id == "slow" else bench.input, bench.written)
    runner = BatchRunner(bench.journal, paths, bench.ask, lambda busy: WINDOW - busy, 10_000)
    bench.runner = runner
    runner.begin(other)
    while len(bench.asked) < WINDOW:
        await asyncio.sleep(0.005)
    assert (await bench.run()).status == "completed"
    assert sum("slow" in one for one in bench.asked) == WINDOW
