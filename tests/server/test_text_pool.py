"""Text workers: what they answer, that one job hurts no other, and that none outlives its server."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import json
import mmap
import os
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pageturner.errors import ClientError, refusing
from pageturner.http.error_responses import unforeseen
from pageturner.http.request_info import RequestInfo
from pageturner.server.api.base.body import decode
from pageturner.server.api.base.replies import at_once
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.text_workers import reading, text_jobs, text_pool
from pageturner.server.text_workers.fork_server import ForkServer
from pageturner.server.text_workers.reading import TextReader
from pageturner.server.text_workers.text_pool import TextPool
from pageturner.server.text_workers.text_worker import Job, facts_of, worker_of
from pageturner.text import template_sandbox
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.output_format import KnownGrammars
from support.refusals import client_error

from .conftest import Server
from .test_openai import SERVED

MEMORY = 256 << 20


def takes(raw: bytes, served: ServedModel, doing: text_jobs.Doing) -> bytes:
    """A job for tests: does what it is told, and says which process did."""
    what = json.loads(raw)
    doing(what.get("doing", ""))
    ballast: bytes | mmap.mmap = b""
    if what.get("bytes"):  # mapped anew, whatever this process has freed and kept
        ballast = mmap.mmap(-1, what["bytes"], mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, len(ballast), mmap.PAGESIZE):
            ballast[page] = 1
    time.sleep(what.get("seconds", 0))
    end = time.process_time() + what.get("computes", 0)
    while time.process_time() < end:
        pass
    if what.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{os.getpid()} {len(ballast)}".encode()


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(text_jobs.PAGES, "takes", takes)


@pytest.fixture
def forks() -> Iterator[list[ForkServer]]:
    made: list[ForkServer] = []
    yield made
    for one in made:
        one.close()


@pytest.fixture
def pool(forks: list[ForkServer]) -> TextPool:
    def start() -> ForkServer:
        forks.append(ForkServer(worker_of(SERVED, MEMORY)))
        return forks[-1]

    return TextPool(start, seconds=20, most=1 << 20)


def ask(
    pool: TextPool, key: str = "", name: str = "takes", size: int = 0, **fields: Any
) -> Awaitable[bytes]:
    """A job of at least so many bytes."""
    raw = json.dumps(fields).encode().ljust(size)
    return asyncio.ensure_future(pool.run(Job(name, facts_of(SERVED), 1 << 20), raw, key))


def run(pool: TextPool, work: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        try:
            return await work()
        finally:
            await pool.close()

    return asyncio.run(whole())


def lives(pid: int) -> bool:
    """Whether this process has not ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def refused(asked: Awaitable[bytes]) -> ClientError:
    with client_error() as caught:
        await asked
    return caught.value


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        (
            "chatcmpl",
            {"messages": [{"role": "user", "content": "hi"}], "n": 2, "stop": ["x"], "seed": 3},
        ),
        (
            "cmpl",
            {"prompt": ["ab", "cde"], "n": 2, "best_of": 3, "echo": True, "logprobs": 1, "seed": 3},
        ),
        (
            "cmpl",
            {
                "prompt": "a",
                "structured_outputs": {"choice": ["a"]},
                "logit_bias": {"5": 1},
                "seed": 3,
            },
        ),
        (
            "cmpl",
            {"prompt": [[256, 97]], "stream": True, "request_id": "x", "timings": True, "seed": 3},
        ),
    ],
)
def test_a_call_is_the_same_by_a_worker(pool: TextPool, name: str, fields: dict[str, Any]) -> None:
    here = text_jobs.DIALECTS[name].read(decode(json.dumps(fields).encode()), SERVED)
    told = at_once(text_jobs.unpack_call(run(pool, lambda: ask(pool, name=name, **fields))))
    assert (told.prompts, told.params, told.echoes) == (here.prompts, here.params, here.echoes)
    assert (told.made, told.kept, told.logprobs) == (here.made, here.kept, here.logprobs)
    for field in ("stream", "request_id", "timings", "n"):
        assert getattr(told.body, field) == getattr(here.body, field)
    assert told.body.messages is told.body.prompt is None


def test_a_refusal_is_the_same_by_a_worker(pool: TextPool) -> None:
    error = run(pool, lambda: refused(ask(pool, name="cmpl", prompt="a", temperature=-1)))
    assert (error.status, error.code, error.param) == (400, "invalid_value", "temperature")


def test_one_that_takes_too_long_is_refused_and_the_next_is_not(
    pool: TextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_pool, "GRAMMAR_SECONDS", 0.2)

    async def work() -> tuple[ClientError, bytes]:
        long, next = ask(pool, computes=60, doing="grammar"), ask(pool, "another")
        return await refused(long), await next

    error, answer = run(pool, work)
    assert (error.status, error.code, error.param) == (
        400,
        "grammar_too_expensive",
        "structured_outputs",
    )
    assert answer


def test_the_check_of_a_grammar_has_processor_time_and_not_time_by_the_clock(
    pool: TextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one that is held up for longer costs nothing
    monkeypatch.setattr(text_pool, "GRAMMAR_SECONDS", 0.1)

    async def work() -> bytes:
        return await ask(pool, seconds=0.4, computes=0.01, doing="grammar")

    assert run(pool, work)


def test_one_that_takes_too_much_memory_is_refused_and_the_next_is_not(pool: TextPool) -> None:
    async def work() -> tuple[ClientError, bytes]:
        return await refused(ask(pool, bytes=2 * MEMORY)), await ask(pool)

    error, answer = run(pool, work)
    assert (error.status, error.code) == (400, "too_expensive")
    assert answer


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_who_finds_no_memory_for_a_limit_of_the_server_may_come_again(
    limit: int, forks: list[ForkServer]
) -> None:
    def starved(sock: socket.socket) -> None:
        gc.collect()  # what tests before this one left must not come back later, as room
        ctypes.CDLL(None).malloc_trim(0)
        sizes = [int(pages) << 12 for pages in Path("/proc/self/statm").read_text().split()]
        most = sizes[0 if limit == resource.RLIMIT_AS else 5] + MEMORY // 4
        resource.setrlimit(limit, (most, most))
        worker_of(SERVED, MEMORY)(sock)

    def start() -> ForkServer:
        forks.append(ForkServer(starved))
        return forks[-1]

    pool = TextPool(start, seconds=20, most=1 << 20)

    async def work() -> list[ClientError]:
        told = [await refused(ask(pool, bytes=MEMORY // 2)), await refused(ask(pool, dies=True))]
        assert await ask(pool, bytes=1 << 20)
        return told

    for error in run(pool, work):
        assert (error.status, error.code, error.retry_after) == (503, "out_of_memory", 1.0)


@pytest.mark.parametrize("lack", [MemoryError(), OSError(errno.ENOMEM, "no memory")])
def test_a_lack_of_memory_is_no_fault_of_what_a_library_was_given(lack: Exception) -> None:
    with pytest.raises(type(lack)), refusing(lambda why: ClientError(400, "tokenizer_failed", why)):
        raise lack
    told = unforeseen(lack)
    assert (told.status, told.code) == (503, "out_of_memory")


def test_a_template_that_finds_no_memory_refuses_no_messages() -> None:
    template = ChatTemplate("{{ messages[0] }}")

    class Exhausted(list[dict[str, Any]]):
        def __getitem__(self, _: Any) -> Any:
            raise MemoryError

    with pytest.raises(MemoryError):
        template.render(Exhausted([{"role": "user", "content": "a"}]))


def test_a_template_that_found_no_memory_is_compiled_another_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exhausted(*_: Any) -> Any:
        raise MemoryError

    source = "{{ messages[0].content }}, compiled nowhere else"
    with monkeypatch.context() as scarce:
        scarce.setattr(template_sandbox, "spending", exhausted)
        with pytest.raises(MemoryError):
            ChatTemplate(source)
    assert not ChatTemplate(source).broken


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nobody_an_answer(
    pool: TextPool, forks: list[ForkServer]
) -> None:
    async def work() -> tuple[bytes, bytes]:
        pid = int((await ask(pool)).split()[0])
        asked, next = ask(pool, seconds=0.2), ask(pool, "another")
        await asyncio.sleep(0.1)
        forks[0].kill(pid)
        return await asked, await next

    answers = run(pool, work)
    assert all(answers)


def test_a_job_of_which_two_workers_die_is_refused_and_the_next_is_not(pool: TextPool) -> None:
    async def work() -> tuple[ClientError, bytes]:
        deadly, next = ask(pool, dies=True), ask(pool, "another")
        return await refused(deadly), await next

    error, answer = run(pool, work)
    assert (error.status, error.code) == (400, "too_expensive")
    assert answer


def test_what_the_server_has_no_memory_to_hear_is_asked_again(
    pool: TextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> tuple[ClientError, bytes]:
        await ask(pool)
        with monkeypatch.context() as patch:
            patch.setattr(asyncio.StreamReader, "readexactly", nothing_fits)
            error = await refused(ask(pool))
        return error, await ask(pool)

    error, answer = run(pool, work)
    assert (error.status, error.code) == (503, "out_of_memory")
    assert answer


async def nothing_fits(*_: object) -> bytes:
    raise MemoryError


def test_a_fork_server_that_cannot_be_started_now_is_started_later(forks: list[ForkServer]) -> None:
    failures = [OSError("no memory")] * 2  # a job is tried twice

    def start() -> ForkServer:
        if forks and failures:
            raise failures.pop()
        forks.append(ForkServer(worker_of(SERVED, MEMORY)))
        return forks[-1]

    pool = TextPool(start, seconds=20, most=1 << 20)

    async def work() -> tuple[ClientError, bytes]:
        forks[0].close()
        return await refused(ask(pool)), await ask(pool)

    error, answer = run(pool, work)
    assert (error.status, error.code) == (503, "busy")
    assert answer


def test_a_lost_fork_server_is_replaced(pool: TextPool, forks: list[ForkServer]) -> None:
    async def work() -> bytes:
        worker = int((await ask(pool)).split()[0])
        forks[0].close()
        forks[0].closed = False  # it was not us
        async with asyncio.timeout(30):
            while lives(worker):  # until then it answers, and nobody is missed
                await asyncio.sleep(0.01)
        return await ask(pool)

    assert run(pool, work)
    assert len(forks) == 2


def test_a_fork_server_that_is_stuck_is_replaced(
    forks: list[ForkServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> ForkServer:
        monkeypatch.setattr(text_pool, "START_SECONDS", 30 if forks else 0.5)
        forks.append(ForkServer(worker_of(SERVED, MEMORY)))
        return forks[-1]

    before = set(children(os.getpid()))
    pool = TextPool(start, seconds=20, most=1 << 20)
    (stuck,) = set(children(os.getpid())) - before

    async def work() -> list[bytes]:
        os.kill(stuck, signal.SIGSTOP)
        return await asyncio.gather(ask(pool), ask(pool, size=1 << 17))

    assert all(run(pool, work))
    assert len(forks) == 2
    assert not lives(stuck)


def test_memory_comes_back_with_the_end_of_a_worker_that_has_grown(pool: TextPool) -> None:
    async def one(grows: int) -> bytes:
        """In the lane of the large jobs: in that of the small ones 100 MB may take too long."""
        return (await ask(pool, size=text_pool.SMALL_JOB + 1, bytes=grows)).split()[0]

    async def work() -> list[bytes]:
        return [await one(grows) for grows in (0, 0, 100 << 20, 0)]

    first, second, grown, fresh = run(pool, work)
    assert first == second == grown != fresh


def test_who_has_left_makes_nobody_wait(pool: TextPool) -> None:
    async def work() -> bytes:
        left = ask(pool, seconds=60)
        await asyncio.sleep(0.1)
        left.cancel()  # type: ignore[attr-defined]
        return await asyncio.wait_for(ask(pool), 10)

    assert run(pool, work)


def test_at_the_end_whoever_waits_is_told(pool: TextPool) -> None:
    async def work() -> list[str]:
        asked = [ask(pool, seconds=60), ask(pool, seconds=60)]
        await asyncio.sleep(0.1)
        await pool.close()
        return [(await refused(one)).code for one in asked]

    assert run(pool, work) == ["shutting_down"] * 2


def test_who_has_left_takes_no_place(pool: TextPool) -> None:
    async def work() -> bytes:
        slow = ask(pool, "slow", seconds=0.3)
        gone = [ask(pool, "gone", size=400_000) for _ in range(2)]
        await asyncio.sleep(0.01)
        for one in gone:
            one.cancel()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        answer = await ask(pool, "new", size=700_000)
        await slow
        return answer

    assert run(pool, work)


def test_keys_take_turns(pool: TextPool) -> None:
    async def work() -> list[str]:
        order: list[str] = []

        async def one(key: str, name: str) -> None:
            await ask(pool, key, seconds=0.01)
            order.append(name)

        await asyncio.gather(*(one("many", f"many {i}") for i in range(4)), one("few", "few"))
        return order

    assert run(pool, work) == ["many 0", "few", "many 1", "many 2", "many 3"]


def test_a_small_one_does_not_wait_for_large_ones(pool: TextPool) -> None:
    async def work() -> bool:
        large = [ask(pool, size=1 << 17, seconds=60) for _ in range(3)]
        await asyncio.wait_for(ask(pool), 10)
        return any(one.done() for one in large)  # type: ignore[attr-defined]

    assert not run(pool, work)


def test_a_small_one_that_turns_out_to_be_long_goes_on_in_the_other_lane(pool: TextPool) -> None:
    async def work() -> tuple[bytes, bytes]:
        await ask(pool, size=1 << 17)
        return await asyncio.gather(ask(pool, seconds=text_pool.SMALL_SECONDS + 0.3), ask(pool))

    slow, quick = run(pool, work)
    assert slow.split()[0] != quick.split()[0]


def test_when_too_many_wait_who_has_most_loses(pool: TextPool) -> None:
    async def work() -> tuple[ClientError, ClientError, bytes]:
        first = ask(pool, "greedy", size=300_000, seconds=0.2)
        await asyncio.sleep(0)
        greedy = [ask(pool, "greedy", size=400_000) for _ in range(3)]
        own = await refused(greedy[-1])
        modest = ask(pool, "modest", size=300_000)
        await asyncio.sleep(0.01)
        lost = await refused(greedy[1])
        await asyncio.gather(first, greedy[0])
        return own, lost, await modest

    own, lost, answer = run(pool, work)
    assert (own.status, own.code, lost.status, lost.code) == (503, "busy", 503, "busy")
    assert own.retry_after >= 1 <= lost.retry_after
    assert answer


def test_an_answer_has_a_largest_size(pool: TextPool) -> None:
    error = run(pool, lambda: refused(ask(pool, name="tokenize", prompt="x" * 600_000)))
    assert (error.status, error.code) == (400, "answer_too_large")


# -- in a server ---------------------------------------------------------------------------------------------
PATTERNS = {f"^[a-z]*{i}[a-z]*$": {"type": "integer"} for i in range(1200)}
COSTLY = {
    "prompt": "x",
    "structured_outputs": {"json": {"type": "object", "patternProperties": PATTERNS}},
}


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for child in found for one in (child, *children(int(child)))]


@pytest.mark.slow
def test_a_costly_schema_is_refused_by_name_and_holds_up_nobody(
    start: Callable[..., Server],
) -> None:
    server = start()
    with pytest.raises(Exception, match="timed out"):
        server.http.post("/v1/completions", json=COSTLY, timeout=0.5)
    asked = {"prompt": "x", "max_tokens": 2, "response_format": {"type": "json_object"}}
    assert server.http.post("/v1/completions", json=asked, timeout=10).status_code == 200
    assert server.http.post("/tokenize", json={"prompt": "word"}, timeout=10).json()["count"] == 4
    refusal = server.http.post("/v1/completions", json=COSTLY).json()["error"]
    assert (refusal["reason"], refusal["param"]) == ("grammar_too_expensive", "structured_outputs")


@pytest.mark.slow
def test_a_server_ends_in_time_with_a_check_under_way(start: Callable[..., Server]) -> None:
    server = start()
    with pytest.raises(Exception, match="timed out"):
        server.http.post("/v1/completions", json=COSTLY, timeout=0.5)
    workers = children(server.process.pid)
    assert len(workers) >= 3
    assert server.stop() == 0
    server.until(lambda: not any(Path(f"/proc/{pid}/comm").exists() for pid in workers), 10)


@pytest.mark.slow
def test_no_worker_outlives_a_server_that_is_killed(start: Callable[..., Server]) -> None:
    server = start()
    server.http.post("/tokenize", json={"prompt": "x" * 100_000})
    workers = [pid for pid in children(server.process.pid) if pid != server.engine_pid()]
    assert len(workers) == 2
    server.process.kill()
    server.until(lambda: not any(Path(f"/proc/{pid}/comm").exists() for pid in workers), 10)


def test_large_texts_go_there_and_back(start: Callable[..., Server]) -> None:
    server = start()
    asked = {"prompt": "naïve " * 4000, "return_token_strs": True}
    told = server.http.post("/tokenize", json=asked).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"]) == 28_000
    back = server.http.post("/detokenize", json={"tokens": told["tokens"]}).json()
    assert back["prompt"] == asked["prompt"]


class Here:
    """A pool that does everything itself, and counts."""

    jobs = 0

    async def run(self, job: Job, raw: bytes, key: str) -> bytes:
        self.jobs += 1
        return text_jobs.do(job.name, raw, SERVED)


def test_a_form_that_was_checked_needs_no_worker() -> None:
    here = Here()
    reader = TextReader(here, 1 << 20)  # type: ignore[arg-type]
    scope = {"pageturner": RequestInfo("1")}

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def grammar(**form: Any) -> str | None:
        raw = json.dumps({"prompt": "a", **form}).encode()
        call = await reader.call(text_jobs.DIALECTS["cmpl"], raw, SERVED, scope, receive)
        return call.params[0].structured_outputs

    async def work() -> list[tuple[str | None, int]]:
        forms = [{"regex": "a+"}, {"regex": "a+"}, {"regex": "b+"}, None]
        return [(await grammar(structured_outputs=form), here.jobs) for form in forms]

    first, again, another, none = asyncio.run(work())
    assert first[0] == again[0] != another[0]
    assert [first[1], again[1], another[1], none[1]] == [1, 1, 2, 2]
    assert none[0] is None


def test_known_forms_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownGrammars, "MAX_CHARACTERS", 10)
    known = KnownGrammars()
    for name, made in ((b"1", "xxxx"), (b"2", "xxxx"), (b"1", "xxxxx"), (b"3", "xxxx")):
        known.put(name, made)
    assert [known.get(name) for name in (b"1", b"2", b"3")] == ["xxxxx", None, "xxxx"]


def test_a_crowd_of_short_texts_is_read_one_in_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "ROUND_SECONDS", 0.0)
    reader = TextReader(None, 1 << 20)  # type: ignore[arg-type]  # nothing here is large enough for a pool
    rounds: list[int] = []

    async def one(number: int) -> None:
        await reader.page("tokenize", b'{"prompt": "ab"}', SERVED, {}, None)  # type: ignore[arg-type]
        rounds.append(number)

    async def work() -> None:
        crowd = [asyncio.ensure_future(one(i)) for i in range(5)]
        for seen in range(1, 4):
            await asyncio.sleep(0)
            assert len(rounds) <= seen
        await asyncio.gather(*crowd)

    asyncio.run(work())
    assert rounds == [0, 1, 2, 3, 4]
