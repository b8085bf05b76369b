"""Clusters in the simulator: the Mooncake conversation trace on 1,000 GPUs, with and without prefill
elsewhere and slower memory for KV; which is the cheapest at which target; replicas that fail, that move their
streams or lose them, and that follow the load; and 100,000 replicas for a minute.

Owns the commands and the claims. Of the 1,000 GPUs all cost the same, so the cluster with the higher goodput
is the cheaper one at these targets; the search says how many GPUs each target takes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE)]

from harness import DATA, Line  # noqa: E402
from simulate import simulate  # noqa: E402

TRACE = DATA / "traces" / "mooncake_conversation.jsonl.gz"
LOAD = (
    f"--trace {TRACE} --rate-scale 50 --block-size 256 --goodput 0.95 --ttft-ms 5000 --tpot-ms 25"
    " --price-per-gpu-hour 2.5"
)
CLUSTERS = {
    "chunked prefill on all": "--replicas 1000",
    "700 compute prompts, 300 answer": "--roles prefill=700,decode=300",
    "200 GiB of host memory for KV": "--replicas 1000 --kv-host-memory 200G",
}
FEW = (
    f"--trace {TRACE} --num-prompts 3000 --block-size 256 --goodput 0.95 --ttft-ms 5000"
    " --price-per-gpu-hour 2.5"
)
TARGETS = (25, 50)  # ms a token
FAILING = {
    "no failures": "",
    "streams move": "--failures-per-hour 20",
    "streams begin again": "--failures-per-hour 20 --streams restart",
}
SCALED = {
    "10 replicas": "--replicas 10",
    "12 replicas": "--replicas 12",
    "4 to 16 replicas": "--autoscale 4,16",  # of 256 places, of which prompts take a few
    "4 to 16 replicas of 8 places": "--autoscale 4,16 --max-num-seqs 8",
}
MINUTE = (
    "--rate 2000 --num-prompts 120000 --replicas 100000 --block-size 256 --placement round_robin"
)
MAX_MB = 16_384


def clusters() -> Iterator[Line]:
    """The same load and money, in three ways."""
    shares = {}
    for name, flags in CLUSTERS.items():
        found = simulate(f"{LOAD} {flags}")
        run, wall, cpu, most = found.run, found.wall, found.processors, found.peak_mb
        shares[name] = run["goodput_share"]
        ttft, tpot, gap = run["ttft_ms"], run["tpot_ms"], run["longest_gap_ms"]
        engines, price = run["engines"], run["price_per_million"]
        figure = (
            f"{run['goodput_share']:.1%} within 5 s and 25 ms; TTFT p50 {ttft['p50']:,.0f} p99"
            f" {ttft['p99']:,.0f} ms, TPOT p50 {tpot['p50']:.1f} p99 {tpot['p99']:.1f} ms, longest gap p99"
            f" {gap['p99']:,.0f} ms, {engines['cached_share']:.0%} cached, {price:.2f} a million tokens"
            f" ({wall:.0f} s, {cpu:.0f} s of processors, {most:,.0f} MB)"
        )
        yield Line(f"1,000 H100, 170 requests a second: {name}", figure, None)
    best = max(shares, key=lambda name: shares[name])
    yield Line("cheapest at 5 s and 25 ms, for the same money", best, None)


def searched() -> Iterator[Line]:
    """The fewest GPUs at each target, all alike and with some for prompts alone."""
    for tpot in TARGETS:
        told = {}
        for name, flags in (("all alike", ""), ("some for prompts", "--roles search")):
            found = simulate(f"{FEW} --gpus 1 --search --tpot-ms {tpot} {flags}")
            run, cpu = found.run, found.processors
            told[name] = run["gpus"], run["roles"], run["price_per_million"], cpu
        figure = "; ".join(
            f"{name}: {gpus} H100{f' ({roles})' if roles else ''}, {price:.2f} a million tokens ({cpu:.0f} s"
            " of processors)"
            for name, (gpus, roles, price, cpu) in told.items()
        )
        fewer = told["some for prompts"][0] <= told["all alike"][0]
        yield Line(f"3,000 requests, 95 % within 5 s and {tpot} ms a token", figure, fewer)


def failing() -> Iterator[Line]:
    """The same failures, with streams that move and streams that begin again."""
    for name, flags in FAILING.items():
        run = simulate(f"{FEW} --replicas 10 --tpot-ms 25 {flags}").run
        found, ttft, tpot = run.get("turnover"), run["ttft_ms"], run["tpot_ms"]
        figure = (
            f"{run['goodput_share']:.1%} in time, TTFT p50 {ttft['p50']:,.0f} p99 {ttft['p99']:,.0f} ms, TPOT"
            f" p50 {tpot['p50']:.1f} p99 {tpot['p99']:.1f} ms"
        )
        if found:
            figure += (
                f"; {found['replicas_failed']} failed, {found['streams_moved']} streams moved,"
                f" {found['tokens_recomputed']:,} tokens recomputed, {found['streams_restarted']} begun"
                f" again, {found['tokens_lost']:,} tokens lost"
            )
        answered = run["requests"] - run["refused"] == 3000
        yield Line(f"10 replicas, each fails 20 times an hour: {name}", figure, answered)


def scaled() -> Iterator[Line]:
    """A number of replicas that follows the load, beside a fixed one."""
    for name, flags in SCALED.items():
        run = simulate(f"{FEW} --tpot-ms 25 {flags}").run
        found = run.get("turnover", {})
        paid = found.get("replica_seconds", run["replicas"] * run["seconds"])
        figure = (
            f"{run['goodput_share']:.1%} in time, {paid:,.0f} s of replicas, {run['price_per_million']:.2f} a"
            " million tokens"
        )
        if found:
            figure += f"; {found['replicas_mean']:.1f} on average, {found['replicas_most']} at most"
        in_time = run["goodput_share"] >= 0.95 if found else None
        yield Line(f"autoscaling: {name}", figure, in_time)


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """The clusters, then the many."""
    if TRACE.exists():
        for part in (searched, failing, scaled, clusters):
            yield from part()
    else:
        yield Line("1,000 H100", f"{TRACE.name} is not there", None, run=False)
    found = simulate(MINUTE)
    run, wall, cpu, most = found.run, found.wall, found.processors, found.peak_mb
    figure = (
        f"{run['requests']:,} requests, {wall:.0f} s, {cpu:.0f} s of processors, {most:,.0f} MB"
    )
    what = f"100,000 replicas for a minute in at most {MAX_MB / 1024:.0f} GiB"
    yield Line(what, figure, most <= MAX_MB and run["requests"] == 120_000 and not run["refused"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""
