"""From what the parts of `make accept NAME=kernels` measured to its lines: figure and verdict of each.

Owns the targets. Must not know how anything was measured.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness import ROOT, Line, NotRun

sys.path.insert(0, str(ROOT / "bench"))
from peers import rounds, table
from peers.rounds import OURS, Turn

VERDICTS = {True: "PASS", False: "FAIL", None: "PUBLISHED"}
KV_BYTES = 23_040  # of one token of SmolLM2: 30 layers, 3 heads of 64, K and V, fp16
ALLOWANCE_MB = 150
SHAPES = ("q", "k,v", "o", "gate,up", "down")  # products of a layer
Found = dict[str, Any]

TITLES: dict[str, tuple[str, ...]] = {
    "mixed64": (
        "mixed64: output at least 2.3x the fastest peer (aim 3x)",
        "mixed64: output at least 15x Transformers' static generate (aim 24x)",
        "mixed64: TTFT p50 below the fastest peer's",
        "mixed64: TPOT p50 below the fastest peer's",
        "mixed64: ITL p99 under load, API process on the same cores",
    ),
    "poisson": (
        "poisson at 70 % of the fastest peer: TTFT p99 at most a third of the best peer's",
        "poisson at 70 % of the fastest peer: TPOT p50 at most half of the best peer's",
    ),
    "single": (
        "single: decode at least 1.5x llama-server's on the same file",
        "single: at least 75 % of packed weights / measured read bandwidth",
    ),
    "prefill": (
        "prefill of 512: at least 1.8x llama.cpp's best type (aim 2.5x)",
        "prefill of 512: products at least 60 % of the integer limit",
    ),
    "batch32": (
        "decode at batch 32, context 250: at least 2x llama.cpp's batched bench (aim 2.5x)",
    ),
    "prefix": ("prefix: at least 2x the best peer",),
    "floats": (
        "mixed64, F32 weights: at least 1.2x the best of llama.cpp F32/F16 and vLLM fp32",
        "mixed64, F16 weights: at least 1.2x the best of llama.cpp F32/F16 and vLLM fp32",
    ),
    "qwen": (
        "Qwen2.5-Coder 0.5B, half of mixed64: at least 1.8x the fastest peer",
        "Qwen2.5-Coder 0.5B, single: at least 1.2x the fastest peer",
    ),
    "unseen": ("mixed64 of words nobody tuned on: at least 2.3x the fastest peer",),
    "sampler": ("sampler: at most 4 % of a step of 64 rows, mixed parameters",),
    "memory": ("peak RSS at most packed weights + KV in use + 150 MB",),
    "profile": ("profile of one step at batch 1, 8, 32",),
}


def lines(name: str, found: Found) -> Iterator[Line]:
    """The lines of one part. NotRun where it could not be measured; Exception where it failed."""
    if "not_run" in found:
        raise NotRun(found["not_run"])
    if "error" in found:
        raise RuntimeError(found["error"])
    yield from _JUDGES[name](TITLES[name], found)
    for engine, reason in found.get("failed", {}).items():
        yield Line(f"{name}: {_short(engine)} was not measured", reason, None)


def _short(engine: str) -> str:
    """ "llama@/folder/smollm2.F16.gguf" as "llama F16"."""
    name, _, file = engine.partition("@")
    kind = re.search(r"\.([A-Z0-9_]+)\.gguf$", file)
    return f"{name} {kind[1]}" if kind else name


def _against(
    what: str, turns: Sequence[Turn], of: tuple[str, str], mine: str, peer: str, least: float
) -> Line:
    workload, metric = of
    middle = rounds.medians(turns, workload, metric)
    ratio, count = rounds.ratio(turns, workload, metric, mine, peer)
    unit = table.METRICS[metric][1]
    figure = f"{ratio:.2f}x {_short(peer)} ({middle[mine]:.1f} / {middle[peer]:.1f} {unit}, {count} rounds)"
    return Line(what, figure, ratio >= least)


def _others(turns: Sequence[Turn], workload: str, metric: str, mine: str) -> Iterator[Line]:
    """What was measured of everybody, without a target."""
    for engine in rounds.ranked(turns, workload, metric):
        if engine != mine:
            line = _against(
                f"{workload} {metric}: ours / {_short(engine)}",
                turns,
                (workload, metric),
                mine,
                engine,
                0,
            )
            yield Line(line.what, line.figure, None)


def _mixed64(titles: Sequence[str], found: Found) -> Iterator[Line]:
    turns = rounds.load_turns(found)
    fastest = rounds.best_peer(turns, "mixed64", "output")
    yield _against(titles[0], turns, ("mixed64", "output"), OURS, fastest, 2.3)
    if "transformers" in rounds.medians(turns, "mixed64", "output"):
        yield _against(titles[1], turns, ("mixed64", "output"), OURS, "transformers", 15)
    else:
        yield Line(titles[1], "transformers has not run", False)
    yield _against(titles[2], turns, ("mixed64", "TTFT p50"), OURS, fastest, 1)
    yield _against(titles[3], turns, ("mixed64", "TPOT p50"), OURS, fastest, 1)
    gaps = {
        e: statistics.median(t.figures["itl_ms"]["p99"] for t in turns if t.engine == e)
        for e in (OURS, fastest)
    }
    yield Line(titles[4], f"{gaps[OURS]:.0f} ms; {fastest} {gaps[fastest]:.0f} ms", None)
    yield from _others(turns, "mixed64", "output", OURS)


def _poisson(titles: Sequence[str], found: Found) -> Iterator[Line]:
    turns = rounds.load_turns(found)
    load = f"; arrivals x {found['rate_scale']:.2f} for {found['fastest']}"
    for what, metric, least in zip(titles, ("TTFT p99", "TPOT p50"), (3, 2), strict=True):
        best = rounds.best_peer(turns, "poisson", metric)
        line = _against(what, turns, ("poisson", metric), OURS, best, least)
        yield Line(line.what, line.figure + load, line.passed)
        yield from _others(turns, "poisson", metric, OURS)


def _single(titles: Sequence[str], found: Found) -> Iterator[Line]:
    turns = rounds.load_turns(found)
    yield _against(titles[0], turns, ("single", "TPOT p50"), OURS, "llama", 1.5)
    floor = 1e-6 * found["read_bytes"] / found["read_gb_s"]
    mine = rounds.medians(turns, "single", "TPOT p50")[OURS]
    figure = (
        f"{floor / mine:.0%}: TPOT {mine:.2f} ms, of which {found['read_bytes'] / 1e6:.1f} MB at"
    )
    yield Line(
        titles[1], f"{figure} {found['read_gb_s']:.1f} GB/s need {floor:.2f}", floor / mine >= 0.75
    )
    yield from _others(turns, "single", "output", OURS)


def _best_of_types(what: str, found: Found, least: float) -> Iterator[Line]:
    """Ours over the best of llama.cpp's types in each round."""
    kinds = {
        kind: statistics.median(r["theirs"][kind] for r in found["rounds"])
        for kind in found["rounds"][0]["theirs"]
    }
    best = max(kinds, key=lambda kind: kinds[kind])
    ratio = statistics.median(r["ours"] / r["theirs"][best] for r in found["rounds"])
    ours = statistics.median(r["ours"] for r in found["rounds"])
    all_kinds = ", ".join(f"{kind} {speed:.0f}" for kind, speed in kinds.items())
    figure = f"{ratio:.2f}x {best} ({ours:.0f} tok/s; llama.cpp: {all_kinds}; {len(found['rounds'])} rounds)"
    yield Line(what, figure, ratio >= least)


def _prefill(titles: Sequence[str], found: Found) -> Iterator[Line]:
    yield from _best_of_types(titles[0], found, 1.8)
    limit = found["ladder"]["limits"]["integer_gop_s"]
    us = operations = 0.0
    for row in found["ladder"]["rungs"]:
        shape = row["name"].split()[1]
        as_served = "Q4_1 x2" if shape == "k,v" else "Q4_1"
        if shape in SHAPES and row["rows"] == 512 and row["kind"] == as_served:
            us += row["us"]
            operations += row["gop_s"] * row["us"] * 1e-6
    reached = operations / (us * 1e-6)
    figure = f"{reached / limit:.0%}: {reached:.0f} of {limit:.0f} GOP/s, {found['ladder']['threads']} threads"
    yield Line(
        titles[1],
        f"{figure}; the four products of a layer as served, rounding included",
        reached / limit >= 0.6,
    )


def _batch32(titles: Sequence[str], found: Found) -> Iterator[Line]:
    yield from _best_of_types(titles[0], found, 2.0)


def _prefix(titles: Sequence[str], found: Found) -> Iterator[Line]:
    turns = rounds.load_turns(found)
    yield _against(
        titles[0], turns, ("prefix", "output"), OURS, rounds.best_peer(turns, "prefix", "output"), 2
    )
    yield from _others(turns, "prefix", "output", OURS)


def _floats(titles: Sequence[str], found: Found) -> Iterator[Line]:
    turns = rounds.load_turns(found)
    best = rounds.best_peer(turns, "mixed64", "output")
    mine = [e for e in rounds.medians(turns, "mixed64", "output") if e.startswith(OURS)]
    for what, kind in zip(titles, ("F32", "F16"), strict=True):
        engine = next(e for e in mine if f".{kind}." in e)
        yield _against(what, turns, ("mixed64", "output"), engine, best, 1.2)


def _qwen(titles: Sequence[str], found: Found) -> Iterator[Line]:
    turns = rounds.load_turns(found)
    mine = next(t.engine for t in turns if t.engine.startswith(OURS))
    for what, workload, least in zip(titles, ("mixed64", "single"), (1.8, 1.2), strict=True):
        best = rounds.best_peer(turns, workload, "output")
        yield _against(what, turns, (workload, "output"), mine, best, least)


def _unseen(titles: Sequence[str], found: Found) -> Iterator[Line]:
    turns = rounds.load_turns(found)
    fastest = rounds.best_peer(turns, "mixed64", "output")
    line = _against(titles[0], turns, ("mixed64", "output"), OURS, fastest, 2.3)
    yield Line(line.what, f"{line.figure}; sha256 {found['sha256'][:8]}", line.passed)


def _sampler(titles: Sequence[str], found: Found) -> Iterator[Line]:
    """What choosing adds to the product of the head: the head is timed alone when the step is taken apart."""
    middle = statistics.median
    step = middle(run["served"]["mean_us"] for run in found["runs"])
    choose = middle(run["served"]["calls_us"]["choose"] for run in found["runs"])
    head, sample = (
        middle(run["apart"]["operators"][n]["us"] for run in found["runs"])
        for n in ("head", "sample")
    )
    share = max(choose - head, 0.0) / step
    figure = f"{share:.1%} of {step:.0f} us: {choose:.0f} for head and choice, {head:.0f} for the head alone"
    yield Line(titles[0], f"{figure}; not fused, choosing takes {sample:.0f}", share <= 0.04)


def _memory(titles: Sequence[str], found: Found) -> Iterator[Line]:
    parts = [1e-6 * found["packed_bytes"], 1e-6 * found["kv_bytes"]]
    bound = sum(parts) + ALLOWANCE_MB
    peak = found["peak_mb"] * 1.048576
    figure = f"{peak:.0f} MB, API process included; {parts[0]:.0f} + {parts[1]:.0f} + {ALLOWANCE_MB} = {bound:.0f}"
    yield Line(titles[0], figure, peak <= bound)


def _profile(titles: Sequence[str], found: Found) -> Iterator[Line]:
    for served, apart in zip(found["served"], found["apart"], strict=True):
        floor = sum(apart["floors_us"].values())
        figure = f"{served['mean_us']:.0f} us, floor {floor:.0f} ({floor / served['mean_us']:.0%})"
        yield Line(f"{titles[0]}: {served['what']}", f"{figure}; bench/STEPS.md", None)


_JUDGES: dict[str, Callable[[Sequence[str], Found], Iterator[Line]]] = {
    "mixed64": _mixed64,
    "poisson": _poisson,
    "single": _single,
    "prefill": _prefill,
    "batch32": _batch32,
    "prefix": _prefix,
    "floats": _floats,
    "qwen": _qwen,
    "unseen": _unseen,
    "sampler": _sampler,
    "memory": _memory,
    "profile": _profile,
}
