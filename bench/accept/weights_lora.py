"""LoRA adapters: their pace beside the model's own, five hundred of them, equal bits, PEFT, bad input.

Owns what is measured: decode steps of SmolLM2 for 32 sequences with 250 tokens each, with adapters and
without in turns, and a server to which 500 adapters were named. Adapters have random values; what is computed
does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parents[1] / "tests")]

import harness  # noqa: E402
from harness import Line, pytest_line  # noqa: E402

from pageturner.formats import hub  # noqa: E402
from pageturner.kernels import peak  # noqa: E402
from pageturner.kernels.adapters import Adapters  # noqa: E402
from pageturner.kernels.base import Batch, Draw  # noqa: E402
from pageturner.kernels.native import NativeOps  # noqa: E402
from pageturner.models.decoder import Decoder  # noqa: E402
from pageturner.models.load import load_model, open_model  # noqa: E402
from support.adapters import ALL, random_weights, shapes_of, write_adapter  # noqa: E402

ROWS, CONTEXT, BLOCK, RANK = 32, 250, 16, 16
PACE_OF_32, PACE_OF_ONE = 0.85, 0.95
NAMED, HOT = 500, 32
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
            self.decoder.choose(hidden, self._draw, adapters=adapters)
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


def most(
    steps: Steps, adapter: Any, seconds: float, limits: peak.Peak, fields: Sequence[str]
) -> str:
    """What this machine allows at most: of 32 adapters, when all but their bytes were free and none of them
    came beside the model's own products, and when all did; of one, when fp32 ran at its limit."""
    rate = 1e9 * limits.read_gb_s["256M"]
    own = sum(size.nbytes for name, size in steps.decoder.sizes.items() if name != "tables")
    reading = ROWS * adapter.nbytes / rate
    apart, beside = seconds / (seconds + reading), seconds / max(seconds, reading + own / rate)
    shapes = shapes_of(steps.decoder.spec)
    values = steps.decoder.spec.layers * RANK * sum(sum(shapes[field]) for field in fields)
    multiplying = 2e-9 * ROWS * values / (limits.fp32_gop_s or float("inf"))
    return (
        f"32: {apart:.1%} ({ROWS * adapter.nbytes / 1e6:.0f} MB at {rate / 1e9:.1f} GB/s behind products,"
        f" {beside:.1%} beside them); one: {seconds / (seconds + multiplying):.1%}"
        f" ({2e-9 * ROWS * values:.2f} GFLOP)"
    )


def pace_lines(rounds: int) -> Iterator[Line]:
    steps = Steps()
    limits = peak.measure(steps.ops.isa, steps.ops.threads, 1.0)
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
            bound = most(steps, many[0], found["32"][0] * found["32"][1], limits, fields)
            yield Line(f"the most that this machine allows ({about})", bound, None)
            del many


# -- five hundred --------------------------------------------------------------------------------------------
def many_folders(root: Path) -> list[Path]:
    """Adapters that differ in their settings alone: their weights are one file."""
    spec = open_model(hub.resolve("smollm2").path)[1]
    first = write_adapter(root / "0", spec, ("q", "v"), 8, kind="F16", size=0.6)
    folders = [first]
    for number in range(1, NAMED):
        folder = root / str(number)
        folder.mkdir()
        os.link(first / "adapter_model.safetensors", folder / "adapter_model.safetensors")
        config = json.loads((first / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(
            json.dumps(config | {"lora_alpha": 4 + number % 97 / 8, "of": number})
        )
        folders.append(folder)
    return folders


def asked(url: str, model: str, tokens: int = 8) -> tuple[str, float]:
    """The answer, and the seconds until it was there."""
    body = {
        "model": model,
        "prompt": "The old house",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["text"], time.monotonic() - begin


def served_lines() -> Iterator[Line]:
    with TemporaryDirectory(dir=os.environ.get("TMPDIR")) as place:
        folders = many_folders(Path(place))
        flags = [flag for n, folder in enumerate(folders) for flag in ("--lora", f"a{n}={folder}")]
        with harness.server(*flags, "--max-loras", str(HOT), "--kv-cache-memory", "256M") as server:
            begin = time.monotonic()
            while server.metric("pageturner:adapters") < NAMED and time.monotonic() < begin + 120:
                time.sleep(0.1)
            ready = time.monotonic() - begin
            with urllib.request.urlopen(f"{server.url}/v1/models", timeout=30) as answer:
                listed = sum(one["parent"] is not None for one in json.load(answer)["data"])
            yield Line(
                f"{NAMED} adapters registered, all listed",
                f"{listed} after {ready:.1f} s",
                listed == NAMED,
            )
            before, most = server.rss_mb(), 0.0
            order = [f"a{(7 * n) % NAMED}" for n in range(NAMED)] * 2
            with ThreadPoolExecutor(HOT) as pool:
                together = []
                for part in range(0, len(order), 100):
                    together += list(
                        pool.map(lambda name: asked(server.url, name), order[part : part + 100])
                    )
                    most = max(most, server.metric("pageturner:adapters_in_memory"))
            loads = server.metric("pageturner:adapter_loads_total")
            grown = server.rss_mb() - before
            figure = f"at most {most:.0f} in memory, {loads:.0f} loads for {len(order)} requests, {grown:+.0f} MB"
            yield Line(
                f"{HOT} hot, by an LRU with a bound",
                figure,
                0 < most <= HOT and loads >= NAMED - HOT,
            )
            alone = {name: asked(server.url, name)[0] for name in order[:40]}
            equal = all(
                text == alone[name]
                for name, (text, _) in zip(order, together, strict=True)
                if name in alone
            )
            different = len(set(alone.values()))
            yield Line(
                "answers equal alone and among 32 at once", f"{equal}, {different} different", equal
            )
            times = sorted(seconds for _, seconds in together)
            figure = f"{statistics.median(times):.2f} s, p99 {times[int(0.99 * len(times))]:.2f} s"
            yield Line(
                "8 tokens, where nearly every request waits for its adapter to be read",
                figure,
                None,
            )


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Every line of adapters."""
    yield from pace_lines(arguments.lora_rounds)
    yield from served_lines()
    yield pytest_line(
        "bits equal alone and mixed, each instruction set, any threads",
        "tests/models/test_lora.py",
        "-k",
        "mix or pieces",
    )
    yield pytest_line(
        "the invariance product with adapters", "tests/e2e/test_invariance.py", "-k", "adapters"
    )
    yield pytest_line(
        "logits equal Transformers with PEFT within 1e-4 (fp32), 12 adapters",
        "tests/models/test_lora.py",
        "-k",
        "transformers",
    )
    yield pytest_line(
        "bad input: another model, shapes, NaN, rank, half written: clear errors",
        "tests/models/test_lora.py",
        "-k",
        "not transformers and not mix and not pieces and not native",
    )
    yield pytest_line(
        "on a server: nobody else affected, unloading finishes first, engine killed",
        "tests/e2e/test_served_adapters.py",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument("--lora-rounds", type=int, default=15, help="pairs of steps for each pace")


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
