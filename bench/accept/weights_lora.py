"""LoRA adapters: their pace beside the model's own.

Decode steps of SmolLM2 for 32 sequences with 250 tokens each run with adapters and without in turns. Adapters
have random values; what is computed does not depend on them. Bits, bounds and bad folders are held by
tests/models/test_lora.py and tests/e2e/test_served_adapters.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from harness import Line

from pageturner.formats import hub
from pageturner.kernels.adapters import Adapters
from pageturner.kernels.base import Batch
from pageturner.kernels.choosing import ChooseArgs, Draw
from pageturner.kernels.cpu.native import NativeOps
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model
from support.adapters import ALL, random_weights

ROWS, CONTEXT, BLOCK, RANK = 32, 250, 16, 16
PACE_OF_32, PACE_OF_ONE = 0.85, 0.95
TARGETS = {
    "q, v (PEFT's own choice for Llama)": ("q", "v"),
    "q, k, v, o": ("q", "k", "v", "o"),
    "all linear": ALL,
}


class Steps:
    """Decode steps of one batch, with any adapters."""

    def __init__(self, rows: int = ROWS) -> None:
        self.ops = NativeOps()
        self.decoder: Decoder = load_model(
            hub.resolve("smollm2").path, self.ops, max_positions=2 * CONTEXT
        )
        width = -(-(CONTEXT + 1) // BLOCK)
        self._kv = self.ops.alloc_kv(self.decoder.kv_spec(rows * width, BLOCK, "float16"))
        table = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
        positions = np.full(rows, CONTEXT, np.int32)
        slots = table[:, CONTEXT // BLOCK] * BLOCK + CONTEXT % BLOCK
        tokens = np.arange(100, 100 + rows, dtype=np.int32)
        starts = np.arange(rows + 1, dtype=np.int32)
        self._batch = Batch(tokens, positions, starts, positions + 1, table, slots, starts[:-1])
        zeros = np.zeros(rows, np.float32)
        self._draw: Draw = (
            zeros,
            np.zeros(rows, np.int32),
            np.ones(rows, np.float32),
            zeros,
            zeros,
        )

    def adapters(self, fields: Sequence[str], kind: str, count: int = ROWS) -> list[Any]:
        made = []
        for seed in range(count):
            weights = random_weights(self.decoder.spec, tuple(fields), RANK, seed, kind)
            made.append(self.decoder.pack_adapter(weights))
        return made

    def seconds(self, adapters: Adapters | None) -> float:
        """The faster of two steps: others use this machine too."""
        self._batch.adapters = adapters
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            hidden = self.decoder.hidden(self._batch, self._kv)
            self.decoder.choose(hidden, ChooseArgs(self._draw, adapters=adapters))
            times.append(time.perf_counter() - begin)
        return min(times)

    def paces(self, variants: dict[str, Adapters], rounds: int) -> dict[str, tuple[float, float]]:
        """Of each: its pace beside the model's own, median over rounds of both in turns; seconds a step."""
        for adapters in (None, *variants.values()):
            self.seconds(adapters)
        pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
        for _ in range(rounds):
            for name, adapters in variants.items():
                base = self.seconds(None)
                self.seconds(adapters)  # what the others left in the caches is not to count
                pairs[name].append((base, self.seconds(adapters)))
        return {
            name: (statistics.median(b / a for b, a in each), statistics.median(a for _, a in each))
            for name, each in pairs.items()
        }


def pace_lines(rounds: int) -> Iterator[Line]:
    steps = Steps()
    for name, fields in TARGETS.items():
        for kind in ("BF16", "F32"):
            many = steps.adapters(fields, kind)
            found = steps.paces(
                {"32": many, "one": [many[0]] * ROWS, "one row": [many[0], *[None] * 31]}, rounds
            )
            size = many[0].nbytes / 1e6
            about = f"{name}, rank {RANK}, {kind}, {size:.1f} MB each"
            for which, least in (("32", PACE_OF_32), ("one", PACE_OF_ONE)):
                pace, seconds = found[which]
                what = f"{'32 adapters' if which == '32' else 'one adapter'} in a batch of {ROWS} ({about})"
                judged = kind == "BF16"
                figure = f"{pace:.1%} of the model's pace, {seconds * 1e3:.1f} ms a step"
                told = f"{what}: at least {least:.0%}" if judged else what
                yield Line(told, figure, pace >= least if judged else None)
            pace, seconds = found["one row"]
            yield Line(
                f"one row of {ROWS} with an adapter ({about})",
                f"{pace:.1%}, {seconds * 1e3:.1f} ms",
                None,
            )
            del many


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Every line of adapters."""
    yield from pace_lines(arguments.lora_rounds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument("--lora-rounds", type=int, default=15, help="pairs of steps for each pace")
