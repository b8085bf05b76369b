"""The claims of the literature about batching, beside what one comparison measured.

Owns the claims, their thresholds, and the sentence that says why one is not reached or not
measured. Must not know runs: it is given figures by name of contender.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Any]
CONTINUOUS = ("chunked", "adaptive_chunk", "prefill_first", "orca", "served_ratio")


@dataclass(frozen=True, slots=True)
class Claim:
    """verdict: "reached", "not reached" or "not measured"."""

    text: str
    source: str
    measured: str
    verdict: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """figures, fairness: by name of contender, the latter as difference of service and its bound.
    ideal: of run_timeline.ideal."""

    figures: Mapping[str, Figures]
    ideal: Mapping[str, float]
    fairness: Mapping[str, tuple[float, float]]

    def continuous(self) -> str | None:
        """The first of them that took part, the default before the others."""
        return next((name for name in CONTINUOUS if name in self.figures), None)


def claims(found: Evidence) -> list[Claim]:
    """All of them, in a fixed order."""
    return [
        _throughput(found),
        _unbatched(found),
        _tail(found),
        _waste(found),
        _gaps(found),
        _short(found),
        _level(found),
        _sjf(found),
        _fair(found),
        *ELSEWHERE,
    ]


ELSEWHERE = (
    Claim(
        "up to 24x the throughput of static generate() of Hugging Face Transformers",
        "vLLM",
        "another engine",
        "not measured",
        "static here is this engine with its own kernels;"
        " make bench-peers runs Transformers beside it",
    ),
    Claim(
        "parallel samples and beams: up to 55 % less KV memory",
        "PagedAttention",
        "one answer for each request here",
        "not measured",
        "make accept NAME=decoding",
    ),
    Claim(
        "speculative decoding: 2-3x on text that is easy to predict",
        "speculative decoding papers",
        "speculation is off here",
        "not measured",
        "make accept NAME=decoding",
    ),
)


def _absent(text: str, source: str, who: str) -> Claim:
    return Claim(text, source, "-", "not measured", f"it needs {who} among the contenders")


def _judged(text: str, source: str, measured: str, *, good: bool, why: str) -> Claim:
    return Claim(text, source, measured, "reached" if good else "not reached", "" if good else why)


def _throughput(found: Evidence) -> Claim:
    text, source = (
        "continuous batching: at least 2.5x the throughput of static",
        "Orca, surveys (2-4x)",
    )
    name = found.continuous()
    if name is None or "static" not in found.figures:
        return _absent(text, source, "static and a continuous policy")
    ratio = _of(found, name, "output_tokens_per_s") / _of(found, "static", "output_tokens_per_s")
    ideal = found.ideal
    measured = (
        f"{name} {ratio:.2f}x; the lengths allow {ideal['steps']:.2f}x where all steps take as long,"
        f" {ideal['rows']:.2f}x where all rows do"
    )
    mine = found.figures[name]
    idle = 1 - mine["busy_s"] / mine["seconds"]
    if idle > 0.1:
        why = f"{name} stood idle for {idle:.0%} of the time: requests came no faster (--rate, --rate-scale)"
    elif max(ideal["steps"], ideal["rows"]) < 2.5:
        why = "the lengths are too alike: even ideally no more is to be had"
    else:
        why = "between the two ideals: steps of few rows are not as much faster as they have fewer rows"
    return _judged(text, source, measured, good=ratio >= 2.5, why=why)


def _unbatched(found: Evidence) -> Claim:
    text, source = (
        "batching: 2.8x (uniform), 3.2x (mixed), 4.1x (bursts) of one at a time",
        "survey figures",
    )
    name = found.continuous()
    if name is None or "unbatched" not in found.figures:
        return _absent(text, source, "unbatched and a continuous policy")
    ratio = _of(found, name, "output_tokens_per_s") / _of(found, "unbatched", "output_tokens_per_s")
    why = "a batch shares reading the weights; where arithmetic is the limit, as on few cores, it shares less"
    return _judged(text, source, f"{name} {ratio:.2f}x", good=ratio >= 2.8, why=why)


def _tail(found: Evidence) -> Claim:
    text, source = "p99 of the end-to-end time at least halved", "survey figures"
    name = found.continuous()
    if name is None or "static" not in found.figures:
        return _absent(text, source, "static and a continuous policy")
    mine, static = (found.figures[one]["e2e_s"]["p99"] for one in (name, "static"))
    measured = f"{name} {mine:.2f} s, static {static:.2f} s: {mine / static:.0%}"
    why = "when all arrive at once, the last one waits for all others under any policy"
    return _judged(text, source, measured, good=mine <= static / 2, why=why)


def _waste(found: Evidence) -> Claim:
    text, source = "under 4 % of the KV memory in use is wasted", "PagedAttention"
    name = found.continuous()
    if name is None:
        return _absent(text, source, "a continuous policy")
    kv = found.figures[name]["kv"]
    measured = f"{name} {kv['waste']:.1%}; {kv['waste_if_whole']:.0%} if prompt and max_tokens were reserved"
    why = "half a block of each sequence is empty on average: short sequences need smaller blocks"
    return _judged(text, source, measured, good=kv["waste"] < 0.04, why=why)


def _gaps(found: Evidence) -> Claim:
    text = "stall-free: the longest token gap of chunked at most a quarter of prefill_first's"
    if not {"chunked", "prefill_first"} <= set(found.figures):
        return _absent(text, "Sarathi-Serve", "chunked and prefill_first")
    mine, other = (found.figures[one]["itl_ms"]["max"] for one in ("chunked", "prefill_first"))
    measured = f"{mine:,.0f} ms, prefill_first {other:,.0f} ms: {mine / other:.0%}"
    why = "it takes long prompts that arrive while others are answered (--mix stalls), or a smaller budget"
    return _judged(text, "Sarathi-Serve", measured, good=mine <= other / 4, why=why)


def _short(found: Evidence) -> Claim:
    text = (
        "short answers are not held up by long ones: they wait at most half as long as under static"
    )
    name = found.continuous()
    if name is None or "static" not in found.figures:
        return _absent(text, "all", "static and a continuous policy")
    mine, static = (found.figures[one]["short_e2e_s"] for one in (name, "static"))
    measured = f"the shortest quarter: {name} {mine:.2f} s, static {static:.2f} s on average"
    why = "they waited for a place: all requests arrived at once, or the queue was long"
    return _judged(text, "all", measured, good=mine <= static / 2, why=why)


def _level(found: Evidence) -> Claim:
    text = "utilisation stays level: no step computes padding rows"
    name = found.continuous()
    if name is None:
        return _absent(text, "all", "a continuous policy")
    mine = found.figures[name]["padding_share"]
    others = found.figures.get("static")
    beside = f"; static {others['padding_share']:.0%}" if others else ""
    measured = f"rows that are padding: {name} {mine:.0%}{beside}"
    return _judged(text, "all", measured, good=mine == 0.0, why="it pads")


def _sjf(found: Evidence) -> Claim:
    text = "sjf cuts the mean time to first token by 30 % against fcfs"
    names = [
        name
        for name in (*CONTINUOUS, *found.figures)
        if {name, f"{name} + sjf"} <= set(found.figures)
    ]
    if not names:
        return _absent(text, "shortest job first", "one policy with the orders fcfs and sjf")
    mine, other = (found.figures[one]["ttft_ms"]["mean"] for one in (f"{names[0]} + sjf", names[0]))
    measured = f"{names[0]} + sjf {mine:,.0f} ms, fcfs {other:,.0f} ms: {mine / other - 1:+.0%}"
    why = "nobody has to wait in the queue, or lengths cannot be told from what is known before the answer"
    return _judged(text, "shortest job first", measured, good=mine <= 0.7 * other, why=why)


def _fair(found: Evidence) -> Claim:
    text = "fair: service of two tenants who both wait differs by no more than the bound"
    names = [name for name in found.fairness if name.endswith(" + fair")]
    if not names:
        return _absent(text, "VTC", "the order fair, and a workload with tenants (--mix tenants)")
    difference, bound = found.fairness[names[0]]
    beside = "".join(f"; {n} {d:,.0f}" for n, (d, _) in found.fairness.items() if n not in names)
    measured = f"{difference:,.0f} of {bound:,.0f} tokens{beside}"
    why = "a tenant that has requests waiting was passed over for longer than the bound allows"
    return _judged(
        text, "VTC (Sheng et al., OSDI 2024)", measured, good=difference <= bound, why=why
    )


def _of(found: Evidence, name: str, figure: str) -> float:
    return float(found.figures[name][figure])
