"""Hybrid shapes with random weights: how much of what a prompt repeats is found again, beside llama-server.

    python bench/accept/hybrid_reuse.py [--reuse-shapes qwen3_5_4b] [--reuse-layers 4]

Each server has the same file and meets the same words: a chat in which every turn repeats the prompt before it (answers
of random weights are no text), and prompts that begin as an earlier one does. Shares are of the repeated tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import harness
from harness import Line
from hybrid_speed import model

import prove_claims as claims
from peers import launch

TURNS, SAID, ANSWER = 12, 40, 24  # turns of a chat, words of a question, tokens of an answer
BEGIN = 400  # words before the first turn
CUTS = 6  # prompts that begin as the first does
LEAST = {"chat": 0.97, "cuts": 0.95}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reuse-shapes", nargs="+", default=["qwen3_5_4b"])
    parser.add_argument("--reuse-layers", type=int, default=4)


def lines(options: argparse.Namespace) -> Iterator[Line]:
    for shape in options.reuse_shapes:
        path = model(shape, options.reuse_layers)
        for target in servers(path):
            try:
                target.prepare()
                yield from chat(shape, target, random.Random(1))
                yield from cuts(shape, target, random.Random(2))
            finally:
                target.stop()


def servers(path: Path) -> Iterator[claims.Target]:
    """Ours, and llama-server where it is installed, both with one file."""
    ours = harness.command("serve", str(path), "--port", "{port}")
    yield claims.Target("ours", ours)
    if launch.installed("llama-8"):
        theirs, environment, _ = launch.COMMANDS["llama-8"](0, path)
        theirs[theirs.index("--port") + 1] = "{port}"
        yield claims.Target("llama-server", theirs, environment)


def line(what: str, target: claims.Target, found: int, all_of_it: int, first: list[float]) -> Line:
    """Ours is held to its share; a peer's is told."""
    share = found / all_of_it
    figure = f"{share:.1%} of {all_of_it:,} tokens, TTFT p50 {statistics.median(first):.2f} s"
    least = next(value for name, value in LEAST.items() if name in what)
    passed = share >= least if target.name == "ours" else None
    return Line(f"{what}, {target.name}, at least {least:.0%}", figure, passed)


def chat(shape: str, target: claims.Target, dice: random.Random) -> Iterator[Line]:
    """Every turn is the prompt before it and some words more."""
    text = claims.some_text(dice, BEGIN)
    found, repeated, earlier, first = 0, 0, 0, []
    for _ in range(TURNS):
        answer = claims.ask(target, text, ANSWER)
        if answer.error or answer.cached is None:
            raise RuntimeError(f"{target.name}: {answer.error or 'no cached_tokens'}")
        if earlier:
            found += min(answer.cached, earlier)
            repeated += earlier
            first.append(answer.ttft)
        earlier = answer.prompt_tokens
        text += f" {claims.some_text(dice, SAID)}"
    yield line(f"{shape}: chat of {TURNS} turns", target, found, repeated, first)


def cuts(shape: str, target: claims.Target, dice: random.Random) -> Iterator[Line]:
    """Prompts that share a beginning of a random length with the first, each length asked three times: the third
    time it must be found."""
    words = claims.some_words(dice, claims.LONG)
    claims.ask(target, " ".join(words), 1)
    found, repeated, first = 0, 0, []
    for length in dice.sample(range(claims.LONG // 10, claims.LONG), CUTS):
        for _ in range(3):
            other = claims.some_words(dice, claims.LONG // 4)
            answer = claims.ask(target, " ".join([*words[:length], *other]), 1)
            own = round(answer.prompt_tokens * length / (length + len(other)))
        found += min(answer.cached or 0, own)
        repeated += own
        first.append(answer.ttft)
    yield line(f"{shape}: {CUTS} cuts, each the third time", target, found, repeated, first)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
