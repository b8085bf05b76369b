"""Sessions of agents with tool calls, whose KV is twice as large as the memory for it, on the simulated engine.

The trace is bench/data/agents.jsonl, run whole and with other seeds. That a real server does the same is held by
tests/server/test_sessions.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "data")]

import make_agents  # noqa: E402
import sessions_simulated as simulated  # noqa: E402
from agent_traffic import Agent, AgentTurn, read_agents  # noqa: E402
from harness import Line  # noqa: E402
from sessions_simulated import Outcome  # noqa: E402

TRACE = HERE.parent / "data" / "agents.jsonl"
OVERCOMMITTED = 2.0
LEAST = 0.95  # of the turns find their KV
SEEDS = range(2, 22)
TENANTS = (*make_agents.TENANTS, "grey")
HOGS = 120  # conversations that one opens, one after the other, and never comes back to
SUFFERS = 0.05  # of their turns, that others may miss more of beside it
SLOWER = 1.5  # times their TTFT at the median


# -- the simulated engine ------------------------------------------------------------------------------------
def told(outcome: Outcome, tenants: tuple[str, ...] = ()) -> str:
    """Turns that found their KV, TTFT of first and of later turns, time in all, work."""
    first, later = outcome.ttft(tenants, first=True), outcome.ttft(tenants, first=False)
    figure = f"{outcome.share(tenants):.1%} found, TTFT {quantiles(later)} s, of first turns {quantiles(first)} s"
    if tenants:
        return figure
    return f"{figure}; {outcome.seconds:.0f} s, {outcome.computed:,} prompt tokens computed"


def quantiles(values: list[float]) -> str:
    """Median and 95th percentile."""
    return f"{statistics.median(values):.2f} / {sorted(values)[int(0.95 * (len(values) - 1))]:.2f}"


def simulated_lines() -> Iterator[Line]:
    agents = read_agents(TRACE)
    mean, most = simulated.demand(agents)
    blocks = int(mean / OVERCOMMITTED)
    what = f"simulated, {len(agents)} agents, KV of who is under way {mean:.0f} blocks ({most} at most)"
    yield Line(what, f"memory of {blocks}, {mean / blocks:.2f} times overcommitted", None)
    hinted = simulated.run(agents, blocks, hints=True)
    yield Line(
        f"simulated, hints: at least {LEAST:.0%} of turns find their KV",
        told(hinted),
        hinted.share() >= LEAST,
    )
    yield Line(
        "simulated, LRU without hints", told(simulated.run(agents, blocks, hints=False)), None
    )
    nobody = simulated.run(agents, blocks, hints=True, session_wait=0.0)
    yield Line("simulated, hints, and nobody waits (--session-wait 0)", told(nobody), None)
    shares: dict[bool, list[float]] = {True: [], False: []}
    times: dict[bool, list[float]] = {True: [], False: []}
    for seed in SEEDS:
        agents = make_agents.make(seed, 72)
        blocks = int(simulated.demand(agents)[0] / OVERCOMMITTED)
        for hints in (True, False):
            outcome = simulated.run(agents, blocks, hints=hints)
            shares[hints].append(outcome.share())
            times[hints].append(outcome.seconds)
    figures = {
        hints: f"{statistics.mean(of):.1%} ({min(of):.1%} to {max(of):.1%})"
        for hints, of in shares.items()
    }
    ratio = statistics.mean(a / b for a, b in zip(times[True], times[False], strict=True))
    figure = f"{figures[True]}; LRU {figures[False]}; time in all {ratio:.2f} of LRU's"
    yield Line(f"simulated, {len(SEEDS)} other seeds", figure, min(shares[True]) >= LEAST)


def hog(first: int) -> list[Agent]:
    """One lane: a conversation after the other, each kept for as long as can be, said to go on at once, and
    never heard of again."""
    turn = AgentTurn(1.0, 300, 8, 0.2)
    return [Agent(first + n, 1000, "grey", (9, 100), [turn], releases=False) for n in range(HOGS)]


def hog_lines() -> Iterator[Line]:
    """With as much memory as the others need, so that they lose only what somebody takes from them."""
    agents = read_agents(TRACE)
    blocks = int(simulated.demand(agents)[0] * 1.25)
    alone = simulated.run(agents, blocks, hints=True)
    beside = simulated.run([*agents, *hog(len(agents))], blocks, hints=True)
    yield Line(
        "simulated, memory for all: others without one that never releases",
        told(alone, make_agents.TENANTS),
        None,
    )
    yield starved("simulated", alone, beside)


def starved(where: str, alone: Outcome, beside: Outcome) -> Line:
    others = make_agents.TENANTS
    lost = alone.share(others) - beside.share(others)
    slower = statistics.median(beside.ttft(others)) / max(
        1e-3, statistics.median(alone.ttft(others))
    )
    opened = sum(turn.tenant == "grey" for turn in beside.turns)
    figure = f"{told(beside, others)}; TTFT at the median {slower:.2f} times; it opened {opened}"
    what = f"{where}, beside one that never releases others find at most {SUFFERS:.0%} less, TTFT {SLOWER} times"
    return Line(what, figure, lost <= SUFFERS and slower <= SLOWER)


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    yield from simulated_lines()
    yield from hog_lines()
