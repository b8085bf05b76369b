"""`kill -9` of the engine under 32 mixed streams of every dialect: each goes on and ends as undisturbed.

    python bench/accept/api_crash.py [--models smollm2 qwen2.5-coder] [--rounds 5] [--seed 14]

Owns when engines are killed, and the comparison. Everything is asked once undisturbed, all at the same time,
and recorded; then again with the same ids while the engine is killed: at random moments, in the midst of
prompts, of thoughts and of the arguments of calls. Every byte of every answer must be what it was, but for
times and what was in the cache (dialect_jobs.same_bytes). Then the API process is killed: no stream may look
as if it had ended. What is asked is in dialect_jobs.py.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import dialect_jobs
import harness
from dialect_jobs import CHAT, COMPLETIONS, RESPONSES, Ask
from harness import Line, NotRun, Server

from pageturner.formats import hub

STREAMS = 32
MODELS = {"smollm2": "smollm2", "qwen2.5-coder": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"}
FLAGS = (
    *dialect_jobs.FLAGS,
    "--max-restarts",
    "1000",
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "64",
)
LONG = "It was the best of times, it was the worst of times, it was the age of wisdom. "
ENDS = {
    CHAT: b"[DONE]",
    COMPLETIONS: b"[DONE]",
    RESPONSES: b"response.completed",
    "/v1/messages": b"message_stop",
}
THOUGHTS = (b'"reasoning_content"', b"thinking_delta")
ARGUMENTS = (b'"arguments":"', b"input_json_delta", b"function_call_arguments.delta")
AWAY = 20.0  # seconds in which an engine is there again


@dataclass(slots=True)
class Said:
    """What one request was answered, and how far it was when the engine was first killed.

    status  0: broken off, or no answer at all
    at_kill bytes of the answer by then; None: it had not begun or had ended
    """

    status: int = 0
    raw: bytes = b""
    broken: str = ""
    begun: bool = False
    ended: bool = False
    at_kill: int | None = None


@dataclass(slots=True)
class Round:
    """All requests at once. kills: of engines meanwhile; seconds: until the last one had ended."""

    said: dict[str, Said]
    kills: int = 0
    seconds: float = 0.0
    differ: list[str] = field(default_factory=list)


Watch = Callable[[Ask, bytes], None]  # is told of each piece of an answer as it comes


def mixed(url: str, seed: int) -> list[Ask]:
    """STREAMS requests of every dialect; embeddings and others that are not streamed are in between."""
    known = dialect_jobs.marks(url)
    asks = [dialect_jobs.as_stream(one) for one in dialect_jobs.asks(known, seed, tokens=64)]
    more = [dialect_jobs.as_stream(one) for one in dialect_jobs.asks(known, seed + 1, tokens=64)]
    base = {"temperature": 0.8, "seed": seed, "max_tokens": 64, "stream": True}
    plain = {
        "beams": {"use_beam_search": True, "n": 3, "temperature": None, "max_tokens": 24},
        "several": {"n": 3},
        "logprobs": {"logprobs": 3, "echo": True},
        "a regex": {"structured_outputs": {"regex": "[A-Z][a-z]{2,9}( [a-z]{1,8}){9,16}\\."}},
        "a long prompt": {"prompt": LONG * 40, "prompt_logprobs": 1},
        "another long prompt": {"prompt": "And " + LONG * 60, "cache_salt": "own"},
    }
    completions = [
        Ask(name, COMPLETIONS, {"prompt": f"Once upon a time {seed}", **base, **fields})
        for name, fields in plain.items()
    ]
    chosen = [*asks, *completions, *more][:STREAMS]
    named = [Ask(f"{one.name} {i}", one.path, one.body) for i, one in enumerate(chosen)]
    response = next(one for one in asks if one.path == RESPONSES)
    beside = [
        dialect_jobs.in_background(dialect_jobs.in_one_piece(response)),
        *dialect_jobs.rows(seed),
    ]
    return [*named, *beside]


def at_once(url: str, asks: list[Ask], watch: Watch, meanwhile: Callable[[Round], None]) -> Round:
    """Ask for all of them at the same time, under ids that say which they are."""
    outcome = Round({one.name: Said() for one in asks})
    begin = time.monotonic()

    def work(number: int) -> None:
        if number == len(asks):
            meanwhile(outcome)
            return
        one = asks[number]
        said = outcome.said[one.name]

        def seen(piece: bytes) -> None:
            said.begun = True
            said.raw += piece
            watch(one, piece)

        try:
            said.status, said.raw = dialect_jobs.whole_answer(url, one, f"crash-{number}", seen)
        except (OSError, http.client.HTTPException) as error:
            said.broken = repr(error)[:200]
        said.ended = True
        outcome.seconds = time.monotonic() - begin

    harness.in_threads(len(asks) + 1, work)
    return outcome


def nothing(*_: object) -> None:
    """Nobody is disturbed."""


# -- kills ---------------------------------------------------------------------------------------------------
def kill(server: Server, outcome: Round) -> None:
    """Kill the engine, as soon as there is one."""
    for said in outcome.said.values():
        if not outcome.kills and said.begun and not said.ended:
            said.at_kill = len(said.raw)
    until = time.monotonic() + AWAY
    while True:
        with contextlib.suppress(RuntimeError, ProcessLookupError, FileNotFoundError):
            os.kill(server.engine_pid(), signal.SIGKILL)
            outcome.kills += 1
            return
        if time.monotonic() > until:
            raise RuntimeError("there is no engine to be killed")
        time.sleep(0.01)


def at_times(server: Server, times: list[float]) -> Callable[[Round], None]:
    """Kills so many seconds after the beginning."""

    def meanwhile(outcome: Round) -> None:
        begin = time.monotonic()
        for at in times:
            time.sleep(max(0.0, begin + at - time.monotonic()))
            kill(server, outcome)

    return meanwhile


class Moment:
    """The k-th piece of an answer with one of these marks."""

    def __init__(self, marks: tuple[bytes, ...], k: int) -> None:
        self._marks, self._left = marks, k
        self._lock, self._there = threading.Lock(), threading.Event()

    def watch(self, _: Ask, piece: bytes) -> None:
        if any(mark in piece for mark in self._marks):
            with self._lock:
                self._left -= 1
                if self._left <= 0:
                    self._there.set()

    def kills(self, server: Server) -> Callable[[Round], None]:
        def meanwhile(outcome: Round) -> None:
            if self._there.wait(120):
                kill(server, outcome)

        return meanwhile


# -- the comparison ------------------------------------------------------------------------------------------
def compare(asks: list[Ask], truth: Round, outcome: Round) -> None:
    for one in asks:
        was, now = truth.said[one.name], outcome.said[one.name]
        if now.broken or now.status != was.status:
            outcome.differ.append(f"{one.name}: {now.broken or now.status} {now.raw[:200]!r}")
            continue
        before, after = (
            dialect_jobs.events_of(one, dialect_jobs.same_bytes(said.raw)) for said in (was, now)
        )
        if before != after:
            at = next(
                (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
                len(before),
            )
            outcome.differ.append(
                f"{one.name}: event {at} of {len(before)}: {after[at : at + 1]} was {before[at : at + 1]}"
            )


def _checked(truth: Round) -> None:
    for name, said in truth.said.items():
        if said.broken or said.status != 200 or b'"error":{' in said.raw:
            raise RuntimeError(
                f"{name} is not answered when nothing is disturbed: {said.broken} {said.raw[:300]!r}"
            )


def line_of(what: str, asks: list[Ask], outcome: Round) -> Line:
    midst = sum(said.at_kill is not None for said in outcome.said.values())
    figure = f"{outcome.kills} kills, {midst} of {len(asks)} answers had begun and not ended, "
    figure += f"{len(outcome.differ)} lost or changed, {outcome.seconds:.1f} s"
    figure += "".join(f"; {one}" for one in outcome.differ[:3])
    return Line(what, figure[:1200], outcome.kills > 0 and not outcome.differ)


def under_kills(model: str, server: Server, rounds: int, seed: int) -> Iterator[Line]:
    dice = random.Random(seed)
    asks = mixed(server.url, seed)
    truth = at_once(server.url, asks, nothing, nothing)
    _checked(truth)
    events = sum(len(dialect_jobs.events_of(one, truth.said[one.name].raw)) for one in asks)
    shapes = ", ".join(f"{n} {path}" for path, n in Counter(one.path for one in asks).items())
    again = at_once(server.url, asks, nothing, nothing)
    compare(asks, truth, again)
    figure = f"{len(again.differ)} differ of {len(asks)} with {events} events ({shapes}), {truth.seconds:.1f} s"
    yield Line(
        f"{model}: undisturbed, twice the same",
        figure + "".join(again.differ[:2]),
        not again.differ,
    )
    moments: list[tuple[str, Watch, Callable[[Round], None]]] = []
    for number in range(rounds):
        times = sorted(dice.uniform(0.05, 0.9) * again.seconds for _ in range(dice.randint(1, 3)))
        moments.append((f"at random, round {number + 1}", nothing, at_times(server, times)))
    moments.append(
        ("in the midst of prompts", nothing, at_times(server, [dice.uniform(0.1, 0.25)]))
    )
    for what, marks, k in (
        ("in the midst of thoughts", THOUGHTS, 12),
        ("in the midst of the arguments of calls", ARGUMENTS, 30),
    ):
        moment = Moment(marks, k)
        moments.append((what, moment.watch, moment.kills(server)))
    for what, watch, meanwhile in moments:
        outcome = at_once(server.url, asks, watch, meanwhile)
        compare(asks, truth, outcome)
        yield line_of(f"{model}: kill -9 {what}: every event as undisturbed", asks, outcome)
    lost, poisoned = (
        server.metric(f"pageturner:{name}_total")
        for name in ("engine_restarts", "poisoned_requests")
    )
    yield Line(
        f"{model}: engines lost, requests taken for poison",
        f"{lost:.0f}, {poisoned:.0f}",
        not poisoned,
    )
    yield from of_responses(model, server, asks)


def of_responses(model: str, server: Server, asks: list[Ask]) -> Iterator[Line]:
    """What was stored is there behind all these deaths; what is in the background is cancelled while there
    is no engine."""
    wrong = []
    for number, one in enumerate(asks):
        if one.path == RESPONSES and not one.background:
            asked = Ask("", f"{RESPONSES}/resp_crash-{number}", {})
            status, raw = dialect_jobs.send(server.url, asked, method="GET")
            text = json.loads(raw).get("status") if status == 200 else raw[:200]
            wrong += [] if text in ("completed", "incomplete") else [f"{number}: {status} {text!r}"]
    yield Line(
        f"{model}: stored responses are there behind the deaths",
        f"{len(wrong)} are not {wrong[:2]}",
        not wrong,
    )
    one = next(one for one in asks if one.background)
    told = [dialect_jobs.send(server.url, one, f"cancelled-{n}") for n in range(4)]
    _until(lambda: _healthy(server.url))
    os.kill(server.engine_pid(), signal.SIGKILL)
    _until(lambda: not _healthy(server.url))
    begin, ends = time.monotonic(), []
    for _, raw in told:
        path = f"{RESPONSES}/{json.loads(raw)['id']}"
        status, raw = dialect_jobs.send(server.url, Ask("", f"{path}/cancel", {}))
        ends.append((status, json.loads(raw).get("status")))
    seconds, away = time.monotonic() - begin, not _healthy(server.url)
    figure = (
        f"{ends}, {1000 * seconds:.0f} ms, the next engine {'was not' if away else 'was'} there"
    )
    yield Line(
        f"{model}: cancelled while the engine restarts",
        figure,
        all(end == (200, "cancelled") for end in ends),
    )


def _until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + AWAY
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)


def _healthy(url: str) -> bool:
    return dialect_jobs.send(url, Ask("", "/health", {}), method="GET")[0] == 200


def without_server(model: str, server: Server, seed: int) -> Iterator[Line]:
    """kill -9 of the API process: nothing is promised but that nobody takes a piece for the whole."""
    asks = [one for one in mixed(server.url, seed) if one.streamed]
    _until(lambda: _healthy(server.url))
    engine = server.engine_pid()

    def meanwhile(outcome: Round) -> None:
        while sum(said.begun for said in outcome.said.values()) < STREAMS // 2:
            time.sleep(0.01)
        server.process.kill()

    outcome = at_once(server.url, asks, nothing, meanwhile)
    cut = [one for one in asks if outcome.said[one.name].broken]
    wrong = [
        one.name for one in cut if ENDS.get(one.path, b'"done":true') in outcome.said[one.name].raw
    ]
    _until(lambda: not Path(f"/proc/{engine}").exists())
    gone = not Path(f"/proc/{engine}").exists()
    figure = f"{len(cut)} of {len(asks)} streams cut, {len(wrong)} of them look whole {wrong[:3]}"
    figure += f"; engine gone: {gone}"
    yield Line(
        f"{model}: kill -9 of the API process: no piece looks like the whole",
        figure,
        bool(cut) and not wrong and gone,
    )


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    for model in arguments.models:
        named = MODELS[model]
        path = hub.cache_folder() / named
        if named.endswith(".gguf") and not path.exists():
            raise NotRun(f"no {model} in {path.parent}")
        with harness.server(
            *FLAGS, model=str(path) if named.endswith(".gguf") else named
        ) as server:
            yield from under_kills(model, server, arguments.rounds, arguments.seed)
            yield from without_server(model, server, arguments.seed)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=14)


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
