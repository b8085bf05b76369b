"""Tiers of KV: conversations that overcommit the KV cache, a restart between turns, a long prefix on disk.

Owns what is measured: an engine of this process, greedy answers, so that bits can be held against each other.
Conversations take turns, so that the one that comes next is the one whose blocks went longest ago.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
from harness import Line  # noqa: E402

from pageturner.config.settings import EngineConfig  # noqa: E402
from pageturner.engine.engine_factory import LoadedEngine, make_engine  # noqa: E402
from pageturner.params import SamplingParams  # noqa: E402
from pageturner.request import Request  # noqa: E402

BLOCK, TURNS, OVERCOMMIT, TOGETHER = 16, 8, 4, 8
QUESTION, ANSWER = 28, 4  # tokens of a turn
FOUND, PRICE = 0.95, 0.10
TOKENS_OF = SamplingParams(temperature=0.0, max_tokens=ANSWER, stop_ids=())


@cache
def block_bytes(model: str) -> int:
    """Of the KV of one block."""
    built = make_engine(EngineConfig(model=model, block_size=BLOCK, kv_cache_memory=64 << 20))
    return built.kv_bytes // (built.num_blocks + 1)


def engine(model: str, tokens: int, longest: int, **settings: Any) -> LoadedEngine:
    """With KV for so many tokens."""
    blocks = max(tokens // BLOCK, longest // BLOCK + 1)
    given = {"kv_cache_memory": blocks * block_bytes(model), "kv_survival": False}
    config = EngineConfig(
        model=model,
        block_size=BLOCK,
        max_num_seqs=TOGETHER,
        max_model_len=longest,
        **given | settings,
    )
    return make_engine(config)


def run(built: LoadedEngine, requests: list[Request]) -> tuple[dict[int, list[int]], float]:
    """Tokens of each, and seconds to the first token of the first."""
    got: dict[int, list[int]] = {request.id: [] for request in requests}
    begin, first = time.perf_counter(), 0.0
    for request in requests:
        refused = built.engine.submit(request)
        assert not refused, refused
    while built.engine.has_work:
        events = built.engine.step()
        if not events and built.engine.wake is not None:
            time.sleep(0.0005)
        for event in events:
            assert event.failure is None, event.failure
            first = first or time.perf_counter() - begin
            got[event.id] += event.tokens
    return got, first


class Talk:
    """Conversations of which each turn begins with all that was said before."""

    def __init__(self, count: int) -> None:
        self.texts = [[1 + n, 100 + n] for n in range(count)]
        self.reusable = self.number = 0

    def turn(self, built: LoadedEngine, turn: int) -> float:
        """One turn of all of them, a few at once. Seconds."""
        begin = time.perf_counter()
        for start in range(0, len(self.texts), TOGETHER):
            each = range(start, min(start + TOGETHER, len(self.texts)))
            requests = []
            for n in each:
                if turn:  # whole blocks of what had KV: the last token of an answer never got any
                    self.reusable += (len(self.texts[n]) - 1) // BLOCK * BLOCK
                self.texts[n] += [3 + (turn * 97 + n * 13 + i * 7) % 250 for i in range(QUESTION)]
                self.number += 1
                requests.append(Request(self.number, tuple(self.texts[n]), TOKENS_OF))
            got, _ = run(built, requests)
            for n, request in zip(each, requests, strict=True):
                self.texts[n] += got[request.id]
        return time.perf_counter() - begin


def talk_lines(model: str, count: int, folder: Path) -> Iterator[Line]:
    length = TURNS * (QUESTION + ANSWER) + 2
    tokens = count * length // OVERCOMMIT
    given = {
        "no tiers": {},
        "host memory": {"kv_host_memory": 4 << 30},
        "file": {"kv_file": str(folder / "talk"), "kv_file_size": 16 << 30},
    }
    built = {
        name: engine(model, tokens, length + BLOCK, **settings) for name, settings in given.items()
    }
    talks = {name: Talk(count) for name in given}
    seconds: dict[str, list[float]] = {name: [] for name in given}
    for turn in range(TURNS):  # in turns: others use this machine too
        for name, one in built.items():
            seconds[name].append(talks[name].turn(one, turn))
    told = f"{count} conversations of {TURNS} turns, KV for 1/{OVERCOMMIT}"
    for name, one in built.items():
        stats, talk = one.engine.stats(), talks[name]
        share = stats["cached_tokens"] / talk.reusable
        passed = None if name == "no tiers" else share >= FOUND
        figure = f"{share:.1%} of {talk.reusable} tokens"
        yield Line(
            f"{told}, {name}: reusable prefix tokens found, at least {FOUND:.0%}", figure, passed
        )
        if name != "no tiers":
            pairs = [a / b for a, b in zip(seconds["no tiers"], seconds[name], strict=True)][1:]
            figure = f"{harness.median(pairs):.2f}x (turns 2 to {TURNS}: {min(pairs):.2f} to {max(pairs):.2f})"
            yield Line(f"{told}, {name}: throughput against no tiers, pairs of turns", figure, None)
    equal = all(talk.texts == talks["no tiers"].texts for talk in talks.values())
    errors = sum(
        one.engine.stats().get(f"kv_{tier}_errors", 0)
        for one in built.values()
        for tier in ("host", "file")
    )
    yield Line(
        "bits equal with and without tiers", f"{equal}, {errors:.0f} errors", equal and not errors
    )
    for one in built.values():
        one.engine.close()


def disk_lines(model: str, tokens: int, folder: Path) -> Iterator[Line]:
    """A long prompt: computed, found on disk by the next engine, damaged there."""
    path, prompt = folder / "long", tuple(3 + (i * i * 31 + i) % 251 for i in range(tokens))
    settings = {"kv_file": str(path), "kv_file_size": 8 << 30, "max_num_batched_tokens": 512}
    first = engine(model, tokens + 64, tokens + 64, **settings)
    want, _ = run(first, [Request(1, prompt, TOKENS_OF)])
    time.sleep(1)  # a server has as long before it is told to end
    first.engine.close()
    again = prompt + tuple(want[1]) + tuple(range(100, 120))
    plain = engine(model, tokens + 64, tokens + 64, max_num_batched_tokens=512)
    expected, recomputed = run(plain, [Request(1, again, TOKENS_OF)])
    second = engine(model, tokens + 64, tokens + 64, **settings)
    got, found = run(second, [Request(1, again, TOKENS_OF)])
    share, cached = found / recomputed, second.engine.stats()["cached_tokens"]
    figure = f"{share:.1%}: {found:.2f} s, and {recomputed:.1f} s to prefill it again; {cached:.0f} tokens found"
    yield Line(
        f"restart, TTFT of the next turn at {tokens} tokens: at most {PRICE:.0%}",
        figure,
        share <= PRICE,
    )
    per_block = (found - recomputed * (len(again) - cached) / len(again)) / (cached / BLOCK)
    figure = (
        f"{per_block * 1e3:.2f} ms a block, {found / recomputed:.1%} of prefilling {tokens} tokens"
    )
    yield Line(
        f"a prefix of {tokens} tokens found on disk: at most {PRICE:.0%}", figure, share <= PRICE
    )
    yield Line("bits equal after the restart", str(got == expected), got == expected)
    second.engine.close()


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Every line of tiers."""
    with TemporaryDirectory(prefix="tiers") as place:
        yield from disk_lines(arguments.tiers_model, arguments.tiers_tokens, Path(place))
        yield from talk_lines(arguments.tiers_model, arguments.tiers_conversations, Path(place))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument("--tiers-model", default="smollm2")
    parser.add_argument("--tiers-conversations", type=int, default=64)
    parser.add_argument("--tiers-tokens", type=int, default=8000)
