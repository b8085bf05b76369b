"""The step log says what happened, keeps to itself what was said, and is never in the engine's way."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TypeVar

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.telemetry import step_log
from pageturner.telemetry.step_log import Arrived, Header, Left, LostRecords, Record, StepRecord
from support.engines import run as answered
from support.refusals import engine_fault

T = TypeVar("T", bound=Record)


def run(path: Path, requests: list[Request], **settings: object) -> dict[int, list[int]]:
    """Answer the requests on the fake engine, logged; the tokens of each."""
    engine = make_engine(EngineConfig(backend="fake", step_log=str(path), **settings)).engine
    found = answered(engine, requests)
    engine.close()
    return found


def some() -> list[Request]:
    params = SamplingParams(max_tokens=20, seed=5, stop_ids=(3,), stop=("secret",), top_k=4)
    shared = tuple(range(100, 148))
    return [
        Request(id, (*shared, 200 + id), params, tenant="alice", priority=id) for id in range(3)
    ]


def by_kind(records: list[Record], kind: type[T]) -> list[T]:
    return [record for record in records if isinstance(record, kind)]


def test_tokens_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    found = run(path, some(), step_log_tokens=True, max_num_batched_tokens=32)
    records = list(step_log.read(path))
    assert [arrived.request() for arrived in by_kind(records, Arrived)] == some()
    steps = by_kind(records, StepRecord)
    for id, tokens in found.items():
        items = [item for step in steps for item in step.items if item.id == id]
        assert [token for item in items for token in item.tokens] == tokens
        assert [item.computed for item in items[1:]] == [
            item.computed + item.n for item in items[:-1]
        ]
    assert all(step.tokens == sum(item.n for item in step.items) <= 32 for step in steps)
    assert all(step.context == sum(item.n + item.computed for item in step.items) for step in steps)
    assert all(step.start <= step.end for step in steps)
    ended = {id: why for step in steps for id, _, why in step.ended}
    assert ended == {id: "stop" if tokens[-1] == 3 else "length" for id, tokens in found.items()}
    assert steps[-1].blocks == steps[-1].running == steps[-1].waiting == 0 < steps[0].blocks


def test_digests_keep_equal_beginnings_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    found = run(path, some())
    records = list(step_log.read(path))
    (header,) = by_kind(records, Header)
    assert header.content == "digests"
    assert EngineConfig(**header.config).step_log == str(path)
    first, second, third = (arrived.request() for arrived in by_kind(records, Arrived))
    assert first.prompt[:48] == second.prompt[:48] == third.prompt[:48]
    assert len({one.prompt[48] for one in (first, second, third)}) == 3
    assert min(first.prompt) >= step_log.DIGEST
    assert len(set(first.prompt)) == 49
    assert first.params.stop == ()
    assert first.params.seed == 5
    assert first.tenant != "alice"
    assert first.tenant == second.tenant
    raw = path.read_bytes()
    assert b"secret" not in raw
    assert b"alice" not in raw
    for id, tokens in found.items():
        logged = [
            token
            for step in by_kind(records, StepRecord)
            for item in step.items
            if item.id == id
            for token in item.tokens
        ]
        assert [token if token == 3 else None for token in tokens] == [
            t if t == 3 else None for t in logged
        ]


def test_a_digest_depends_on_all_before_it_and_on_the_log(tmp_path: Path) -> None:
    prompts = [(1, 2, 3), (1, 2, 4), (9, 2, 3)]
    requests = [
        Request(i, prompt, SamplingParams(max_tokens=1)) for i, prompt in enumerate(prompts)
    ]
    found = []
    for name in ("a", "b"):
        run(tmp_path / name, requests)
        arrived = by_kind(list(step_log.read(tmp_path / name)), Arrived)
        found.append([one.request().prompt for one in arrived])
    one, two, other = found[0]
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert not set(one) & set(other)
    assert not set(one) & set(found[1][0])


def test_aborts_idle_plans_and_restarts_are_there(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    for _ in range(2):
        engine = make_engine(
            EngineConfig(backend="fake", policy="static", step_log=str(path))
        ).engine
        engine.submit(some()[0])
        assert engine.step() == []  # a static batch of one waits for more
        engine.abort(0)
        engine.abort(77)
        engine.close()
    kinds = [type(record) for record in step_log.read(path)]
    assert kinds == [Header, Arrived, StepRecord, Left] * 2


def test_what_a_killed_engine_left_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    run(path, some())
    whole = list(step_log.read(path))
    path.write_bytes(path.read_bytes()[:-3])
    assert list(step_log.read(path)) == whole[:-1]
    step_log.StepLog(path, by_kind(whole, Header)[0]).close()
    assert list(step_log.read(path)) == [*whole[:-1], whole[0]]


def test_a_slow_disk_costs_records_and_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log, "MAX_BUFFERED", 10)
    monkeypatch.setattr(step_log, "WRITE_EVERY", 3600.0)
    path = tmp_path / "steps"
    run(path, some())
    records = list(step_log.read(path))
    assert len(records) == 10
    assert not by_kind(records, LostRecords)
    log = step_log.StepLog(path, by_kind(records, Header)[0])
    for id in range(12):
        log.left(0.0, id)
    log._buffer.clear()
    log.left(0.0, 99)
    log.close()
    assert list(step_log.read(path))[10:] == [LostRecords(3), Left(0.0, 99)]


def test_a_full_disk_ends_the_log_and_not_the_engine(capfd: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(EngineConfig(backend="fake", step_log="/dev/full")).engine
    engine.submit(some()[0])
    events = []
    while engine.has_work:
        events += engine.step()
    engine.close()
    assert "the step log ends here: No space left" in capfd.readouterr().err
    assert events[-1].finish in ("stop", "length")


@pytest.mark.parametrize("room", [5, 400])  # bytes: not even for the beginning, or for some records
def test_a_disk_that_fills_later_ends_the_log_and_not_the_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], room: int
) -> None:
    path = tmp_path / "steps"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        whole = run(path, some())
        assert path.stat().st_size == room
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert whole == run(tmp_path / "another", some())
    said = "pageturner: the step log ends here: File too large"
    assert said[:room] in capfd.readouterr().err  # which is a file too
    before = list(step_log.read(path)) if room > len(step_log.BEGIN) else []
    run(path, some())  # there is room again: behind the last whole record
    records = list(step_log.read(path))
    assert records[: len(before)] == before
    assert len(by_kind(records, Header)) == 1 + bool(by_kind(before, Header))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a step log"),
        (b'{"prompt": 1}', "is not a step log"),
        (step_log.MAGIC + b"\x07", "of version 7, and this program reads version 1"),
        (step_log.MAGIC + b"\x01\xff\xff\xff\xff", "is damaged"),
        (step_log.MAGIC + b"\x01\x02\x00\x00\x00\x92\x09", "is damaged"),
    ],
)
def test_other_files_are_refused_and_kept(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "steps"
    path.write_bytes(content)
    with engine_fault(said):
        list(step_log.read(path))
    if b"damaged" not in said.encode() and content:
        with engine_fault(said):
            make_engine(EngineConfig(backend="fake", step_log=str(path)))
        assert path.read_bytes() == content


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with engine_fault("cannot write the step log"):
        make_engine(EngineConfig(backend="fake", step_log=str(tmp_path / "no" / "steps")))
    with engine_fault("cannot read the step log"):
        list(step_log.read(tmp_path / "absent"))
