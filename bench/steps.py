"""The whole engine at fixed sizes: prefill of P tokens, decode of B sequences; and where a step's time goes.

    python bench/steps.py [--model smollm2] [--prefill 512] [--batch 1 8 32] [--context 250] [--operators]

A step is timed as it is served: plan, native calls, sampling, commit. With --operators the same steps run a
second time taken apart: each layer by primitives, with a clock around each of them. They are slower by what
fusion saves, so both sums are shown. The floor of an operator is what its operations and its bytes need at
least, by the limits of `pageturner doctor`: weights and KV come as fast as all of both together can be read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.kernels import peak
from pageturner.kernels.base import KV, AttentionShape, Batch, Layer, Ops, Tensor
from pageturner.kernels.choosing import Head
from pageturner.kernels.composites import Composites
from pageturner.kernels.cpu import native_module
from pageturner.lab.bench.bench_kernels import limits_text
from pageturner.lab.bench.kernel_cases import FLOATS, TERMS
from pageturner.lab.reporting import summary
from pageturner.params import SamplingParams
from pageturner.request import Request

STEPS, ROUNDS = 24, 5  # decode steps, prefills; the median counts
SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.05, seed=1)
MARKS = ("<!-- bench/steps.py: begin -->", "<!-- bench/steps.py: end -->")
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_TIMED = ("embed", "norm", "rope", "kv_write", "act_mul", "add", "sample")


@dataclass(slots=True)
class Cost:
    """Of one operator, added up: seconds, int8 and fp32 operations, bytes."""

    seconds: float = 0.0
    integer: float = 0.0
    floats: float = 0.0
    nbytes: float = 0.0


@dataclass(slots=True)
class Book:
    """Seconds by call into the backend; costs by operator; what every packed weight is."""

    seconds: Counter[str] = field(default_factory=Counter)
    costs: dict[str, Cost] = field(default_factory=dict)
    # id: name, terms, of floats
    weights: dict[int, tuple[str, float, bool]] = field(default_factory=dict)
    packed: dict[str, int] = field(default_factory=dict)  # tensor: bytes
    clock: Callable[[], float] = time.perf_counter

    def forget(self) -> None:
        self.seconds.clear()
        self.costs.clear()


class Noted:
    """A backend as it is, with a clock around each call."""

    def __init__(self, ops: Any, book: Book) -> None:
        self._ops, self._book = ops, book

    def pack_weight(self, tensor: Tensor) -> Any:
        packed = self._ops.pack_weight(tensor)
        self._book.weights[id(packed)] = (tensor.name, TERMS[tensor.bits], tensor.kind in FLOATS)
        if len(tensor.shape) == 2:
            self._book.packed[tensor.name] = packed.nbytes
        return packed

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if not callable(value):
            return value

        def timed(*arguments: Any, **named: Any) -> Any:
            begin = self._book.clock()
            try:
                return value(*arguments, **named)
            finally:
                self._book.seconds[name] += self._book.clock() - begin

        setattr(self, name, timed)
        return timed


class Apart(Composites):
    """A backend whose composites are taken apart: the default bodies, with a clock around each primitive."""

    def __init__(self, ops: Any, book: Book) -> None:
        self._ops, self._book = ops, book
        self.name, self.fingerprint = ops.name, ops.fingerprint
        for name in _TIMED:
            setattr(self, name, self._clock(name))

    @property
    def features(self) -> frozenset[str]:
        """Those of the backend, which has all primitives."""
        found: frozenset[str] = self._ops.features
        return found

    def default_activation_bits(self, kind: str) -> int:
        """As the backend says."""
        return int(self._ops.default_activation_bits(kind))

    def __getattr__(self, name: str) -> Any:  # storage, and primitives that no model here has
        return getattr(self._ops, name)

    def pack_weight(self, tensor: Tensor) -> Any:
        return Noted.pack_weight(self, tensor)  # type: ignore[arg-type]

    def prepare_layer(self, layer: Layer) -> None:
        for name in _MATRICES:
            if (weight := getattr(layer, name)) is not None:
                self._book.weights[id(weight)] = (name, *self._book.weights[id(weight)][1:])

    def _clock(self, name: str) -> Callable[..., Any]:
        call = getattr(self._ops, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            given = sum(a.nbytes for a in arguments if isinstance(a, np.ndarray))
            return self._enter(name, Cost(nbytes=given), lambda: call(*arguments, **named))

        return timed

    def _enter(self, name: str, cost: Cost, call: Callable[[], Any]) -> Any:
        begin = self._book.clock()
        out = call()
        entry = self._book.costs.setdefault(name, Cost())
        entry.seconds += self._book.clock() - begin
        entry.integer += cost.integer
        entry.floats += cost.floats
        entry.nbytes += cost.nbytes
        return out

    def linear(self, x: Any, weight: Any, bias: Any = None) -> Any:
        name, terms, floats = self._book.weights[id(weight)]
        done = 2.0 * len(x) * weight.shape[0] * weight.shape[1] * terms
        cost = (
            Cost(nbytes=weight.nbytes, floats=done)
            if floats
            else Cost(nbytes=weight.nbytes, integer=done)
        )
        return self._enter(name, cost, lambda: self._ops.linear(x, weight, bias))

    def attention(self, q: Any, kv: KV, layer: int, batch: Batch, shape: AttentionShape) -> Any:
        seen = float(np.sum(batch.positions.astype(np.int64) + 1))
        token = 2 * shape.kv_heads * shape.head_dim * 2  # fp16
        cost = Cost(floats=4.0 * seen * shape.heads * shape.head_dim)
        cost.nbytes = 2.0 * q.nbytes + token * float(batch.context_len.sum())
        return self._enter(
            "attention", cost, lambda: self._ops.attention(q, kv, layer, batch, shape)
        )

    def logits(self, x: Any, head: Head, adapters: Any = None) -> Any:
        weight = head.weight
        _, terms, floats = self._book.weights[id(weight)]
        done = 2.0 * len(x) * weight.shape[0] * weight.shape[1] * terms
        cost = Cost(floats=done) if floats else Cost(integer=done)
        cost.nbytes = weight.nbytes + 4.0 * len(x) * weight.shape[0]
        return self._enter("head", cost, lambda: self._ops.logits(x, head, adapters))


def engine(model: str, threads: int, wrap: Callable[[Ops], Ops], **settings: Any) -> LoadedEngine:
    """As served, without the prefix cache: what is measured again must be computed again."""
    config = EngineConfig(
        model=model,
        threads=threads,
        enable_prefix_caching=False,
        max_model_len=2048,
        kv_cache_memory=1 << 30,
        **settings,
    )
    return make_engine(config, wrap)


def prompts(count: int, length: int, vocabulary: int) -> list[tuple[int, ...]]:
    dice = np.random.default_rng(count * length)
    return [tuple(row) for row in dice.integers(100, vocabulary - 100, (count, length)).tolist()]


def prefill(built: LoadedEngine, tokens: int, book: Book) -> dict[str, Any]:
    """Prompts of `tokens`, one after the other, each answered by one token."""
    seconds = []
    for number, prompt in enumerate(prompts(ROUNDS + 1, tokens, built.vocab_size)):
        if number == 1:
            book.forget()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        begin = book.clock()
        built.engine.submit(Request(number, prompt, params))
        while built.engine.scheduler.has_work:
            built.engine.step()
        seconds.append(book.clock() - begin)
    figures = _figures(f"prefill {tokens}", seconds[1:], book)
    return figures | {"tokens_per_s": tokens / statistics.median(seconds[1:])}


def decode(
    built: LoadedEngine, batch: int, context: int, params: SamplingParams, book: Book
) -> dict[str, Any]:
    """`batch` sequences that decode together, on average `context` tokens long; every second one greedily."""
    length = max(context - STEPS // 2, 1)
    greedy = SamplingParams(temperature=0.0)
    for number, prompt in enumerate(prompts(batch, length, built.vocab_size)):
        chosen = greedy if number % 2 else params
        wanted = {"max_tokens": STEPS + 3, "ignore_eos": True}
        changed = SamplingParams(**{name: getattr(chosen, name) for name in _SAMPLING}, **wanted)
        built.engine.submit(Request(1000 + number, prompt, changed))
    tokens: Counter[int] = Counter()
    while len(tokens) < batch:
        tokens.update(event.id for event in built.engine.step() if event.tokens)
    built.engine.step()  # the first step of decode alone is not counted
    book.forget()
    seconds = []
    for _ in range(STEPS):
        begin = book.clock()
        events = built.engine.step()
        seconds.append(book.clock() - begin)
        if sum(len(event.tokens) for event in events) != batch:
            raise RuntimeError(f"a step of {batch} sequences brought {len(events)} events")
    figures = _figures(f"decode {batch} x {context}", seconds, book)
    for number in range(batch):
        built.engine.abort(1000 + number)
    return figures | {"tokens_per_s": batch * len(seconds) / sum(seconds)}


_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


def _figures(name: str, seconds: list[float], book: Book) -> dict[str, Any]:
    count = len(seconds)
    return {
        "what": name,
        "steps": count,
        "us": 1e6 * statistics.median(seconds),
        "mean_us": 1e6 * sum(seconds) / count,
        "calls_us": {name: 1e6 * total / count for name, total in book.seconds.items()},
        "operators": {
            name: {
                "us": 1e6 * c.seconds / count,
                "integer": c.integer / count,
                "floats": c.floats / count,
                "nbytes": c.nbytes / count,
            }
            for name, c in book.costs.items()
        },
    }


def floors(operators: dict[str, Any], limits: peak.Peak, weights: float) -> dict[str, float]:
    """us that each operator needs at least. Between two readings of the same weight, or of the same KV, all
    weights and all KV of the step pass: so both come from where so much comes from."""
    found = {}
    passing = weights + operators.get("attention", {"nbytes": 0.0})["nbytes"]
    for name, cost in operators.items():
        streamed = name in (*_MATRICES, "head", "attention")
        read = limits.read_of(passing if streamed else cost["nbytes"])
        compute = cost["integer"] / (limits.integer_gop_s or 1e9) + cost["floats"] / (
            limits.fp32_gop_s or 1e9
        )
        found[name] = 1e-3 * max(compute, cost["nbytes"] / read)
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of every asked size, taken apart too if asked."""
    params = SAMPLED if args.sampled else SamplingParams(temperature=0.0)
    # one thread is timed by processor time: other processes do not count
    book = Book(clock=time.process_time if args.threads == 1 else time.perf_counter)
    threads = args.threads or len(os.sched_getaffinity(0))
    isa = native_module.choose_isa(None)
    before = peak.measure(isa, threads, 1.0) if args.operators else None
    passes: dict[str, list[dict[str, Any]]] = {}
    ways: dict[str, Callable[[Any], Any]] = {"served": lambda ops: Noted(ops, book)}
    if args.operators:
        ways["apart"] = lambda ops: Apart(ops, book)
    for way, wrap in ways.items():
        book.packed.clear()
        runs = passes[way] = []
        for tokens in args.prefill:
            built = engine(args.model, args.threads, wrap, max_num_batched_tokens=tokens)
            runs.append(prefill(built, tokens, book))
        if args.batch:
            # prompts are prefilled in one step, so that all sequences begin to decode together
            built = engine(args.model, args.threads, wrap, max_num_batched_tokens=0)
            runs += [decode(built, batch, args.context, params, book) for batch in args.batch]
    packed = sum(book.packed.values())
    embed = book.packed.get("token_embd.weight", 0) if "output.weight" in book.packed else 0
    figures = {
        "model": args.model,
        "threads": threads,
        "fingerprint": built.fingerprint,
        "packed_bytes": packed,
        "read_bytes": packed - embed,
        "served": passes["served"],
    }
    if (
        before is not None
    ):  # on both sides of the steps: a limit is what the machine reached at any time
        limits = peak.best_of(before, peak.measure(isa, threads, 1.0))
        figures["limits"] = asdict(limits)
        figures["apart"] = passes["apart"]
        for run in passes["apart"]:
            run["floors_us"] = floors(run["operators"], limits, figures["read_bytes"])
    return figures


def render(figures: dict[str, Any]) -> str:
    """Tables in Markdown."""
    kept = f"{figures['model']}, {figures['packed_bytes'] / 1e6:.1f} MB of packed weights"
    about = limits_text(figures) if "limits" in figures else figures["fingerprint"]
    lines = [f"{kept}; {about}", ""]
    head = ["step", "us", "tokens/s", "in native calls", "outside"]
    rows = []
    for run in figures["served"]:
        native = sum(run["calls_us"].values())
        cells = [run["us"], run["tokens_per_s"], native, run["mean_us"] - native]
        rows.append([run["what"], *(f"{cell:,.0f}" for cell in cells)])
    lines += _table(head, rows)
    for served, apart in zip(figures["served"], figures.get("apart", ()), strict=False):
        lines += ["", f"**{apart['what']}**, taken apart:", ""]
        lines += _table(
            ["operator", "us", "share", "floor, us", "of the floor"], _operators(served, apart)
        )
    return "\n".join(lines)


def _operators(served: dict[str, Any], apart: dict[str, Any]) -> list[list[str]]:
    spent = {name: cost["us"] for name, cost in apart["operators"].items()}
    least = apart["floors_us"]
    total, floor = sum(spent.values()), sum(least.values())
    rows = [
        [name, f"{us:,.0f}", f"{us / total:.0%}", f"{least[name]:,.0f}", f"{least[name] / us:.0%}"]
        for name, us in sorted(spent.items(), key=lambda item: -item[1])
    ]
    rows.append(
        ["all operators, apart", f"{total:,.0f}", "100%", f"{floor:,.0f}", f"{floor / total:.0%}"]
    )
    whole = served["mean_us"]
    return [
        *rows,
        ["the step as served", f"{whole:,.0f}", "", f"{floor:,.0f}", f"{floor / whole:.0%}"],
    ]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    every = [head, ["--"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in every]


def inserted(page: str, tables: str) -> str:
    """The page with the tables between its two marks. ValueError where it has none."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}\n{tables}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prefill", type=int, nargs="*", default=[512], metavar="TOKENS")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], metavar="SEQUENCES")
    parser.add_argument(
        "--context", type=int, default=250, help="mean length of the sequences that decode"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="kernel threads; 0: all cores; 1: by processor time"
    )
    parser.add_argument(
        "--sampled", action="store_true", help="every second sequence is sampled, not greedy"
    )
    parser.add_argument("--operators", action="store_true", help="take the steps apart")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--into", type=Path, metavar="PAGE", help="put the tables between the marks of a page"
    )
    args = parser.parse_args()
    figures = measure(args)
    print(render(figures))
    if args.into:
        args.into.write_text(inserted(args.into.read_text(), render(figures)))
    if args.json:
        summary.write_json(args.json, figures)


if __name__ == "__main__":
    main()
