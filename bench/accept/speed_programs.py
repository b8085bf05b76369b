"""Agents as programs, and boosted arrivals: the orders `programs` and `uniboost` beside others, simulated.

    python bench/accept/speed_programs.py [--programs-requests N] [--programs-engine]

Agents are the sessions of the trace agentic_swebench, every length divided by 16. LANES of them are under way at a
time, in a memory that holds a fraction of what they say, and nobody says which requests belong together. Programs
count until the last one begins. Five traces come at LOAD times the rate at which they are answered when all are
there at once; `srpt` is told how long each answer is, which no order of the product can know (docs/adr/0006).
What is simulated is the same on any machine. --programs-engine: a few short agents on the real engine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import harness
from harness import DATA, Line, NotRun

from pageturner import LLM
from pageturner.lab.bench.request_metrics import RequestMetrics
from pageturner.lab.reporting.summary import percentile
from pageturner.lab.simulation.simulator import Simulator
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.block_names import BlockNames
from pageturner.lab.traffic.traffic import OWN, OpenLoop, Pieces, Sessions, Traffic, TrafficRequest
from pageturner.lab.traffic.traffic_files import TraceScaling, from_trace, read_trace
from pageturner.params import SamplingParams
from pageturner.policies.orders import ORDERS, Context, sjf
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.policies.scheduler_factory import make_scheduler
from pageturner.request import Request
from pageturner.scheduler.order import Order
from pageturner.scheduler.types import Plan, Sequence

# Seconds of a step: once, for each of the first 8 rows, each row, sequence, logit, position read, pair
COST = CalibratedCost([4e-3, 1e-4, 6e-4, 2e-4, 6e-4, 2e-8, 2e-8], (0.0, 0.0), 0, 2e-4, {})
LANES, THINK, TARGET = 24, 20.0, 1.5
MEMORIES = (1500, 2200, 9000)  # blocks; the last holds all that LANES say
LOAD, MEAN_PROMPT, SLOTS, BLOCKS = 0.9, 400, 16, 4000
TRACES = (
    "azure2023_conv",
    "azure2023_code",
    "mooncake_conversation",
    "mooncake_synthetic",
    "servegen_deepseek-r1_1h",
)
AMONG = ("fcfs", "sjf", "srpt", "programs", "uniboost")
AGENTS, TURNS, ENGINE_KV = 12, 8, 90 << 20  # bytes: about a third of what the agents say at last
LONG = 8000  # tokens of the prompts beside which others decode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs-requests", type=int, default=1500, help="of each trace")
    parser.add_argument("--programs-engine", action="store_true", help="the real engine, too")


def lines(options: argparse.Namespace) -> Iterator[Line]:
    for blocks in MEMORIES:
        yield _agents_line(blocks)
    for name in TRACES:
        yield _trace_line(name, options.programs_requests)
    yield _gap_line()
    if options.programs_engine:
        yield _engine_line()


def _trace(name: str, most: int, mean: int) -> Traffic:
    """The traffic of a trace, whose prompts have `mean` tokens on average; of sessions a 16th of theirs."""
    path = DATA / "traces" / f"{name}.jsonl.gz"
    if not path.is_file():
        raise NotRun(f"{path} is absent")
    rows = read_trace(path, most)
    length = min(1.0, mean / statistics.mean(row.prompt_tokens for row in rows)) if mean else 1 / 16
    return from_trace(rows, TraceScaling(length=length, cap=8192, think=THINK), name)[0]


@dataclass(slots=True)
class Watch:
    """A simulated engine, and who overtook whom. late: admissions of requests that came behind one that waited
    on and had aged."""

    config: SchedulerConfig
    blocks: int
    waiting: Iterable[Sequence] = ()
    seen: set[Sequence] = field(default_factory=set)
    late: int = 0

    def run(self, traffic: Traffic) -> RequestMetrics:
        names = BlockNames(self.config.block_size)
        sizes = {"num_blocks": self.blocks, "max_model_len": 1 << 17}
        scheduler = make_scheduler(self.config, **sizes, listeners=(names.listener,)).scheduler
        self.waiting = scheduler.waiting
        simulator = Simulator(
            lambda: scheduler, COST, num_blocks=self.blocks, watch=self._step, names=names
        )
        simulator.run(traffic, progress=False)
        return simulator.metrics

    def _step(self, replica: int, begin: float, end: float, plan: Plan) -> None:
        joined = [item.sequence for item in plan.items if item.sequence not in self.seen]
        self.seen.update(joined)
        if joined:
            newest = max(seq.request.arrival for seq in joined)
            waiting = [seq.request.arrival for seq in self.waiting]
            aged = (at for at in waiting if at < newest and begin >= at + self.config.ageing)
            self.late += any(aged)


def _config(order: str, slots: int) -> SchedulerConfig:
    return SchedulerConfig(
        order=order, max_num_seqs=slots, max_num_batched_tokens=256, max_queue=1 << 20
    )


# -- agents --------------------------------------------------------------------------------------------------
class Lanes:
    """Sessions of which so many are under way at a time: when one ends, the next begins a second later."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._firsts = iter(list(sessions.arrivals()))
        self.begun: dict[int, float] = {}
        self.ended: dict[int, float] = {}

    @property
    def total(self) -> int:
        return self._sessions.total

    def arrivals(self) -> Iterator[TrafficRequest]:
        for lane in range(LANES):
            yield from self._next(lane / 2)

    def after(self, request: TrafficRequest, end: float) -> list[TrafficRequest]:
        following = self._sessions.after(request, end)
        if following:
            return following
        assert request.turn is not None
        self.ended[request.turn[0]] = end
        return self._next(end + 1.0)

    def _next(self, at: float) -> list[TrafficRequest]:
        found = [replace(one, arrival=at) for one in (next(self._firsts, None),) if one]
        self.begun |= {one.turn[0]: at for one in found if one.turn}
        return found

    @property
    def an_hour(self) -> float:
        last = max(self.begun.values())
        return 3600 * sum(end <= last for end in self.ended.values()) / last


def _agents_line(blocks: int) -> Line:
    found, words = {}, []
    late = 0
    for order in ("fcfs", "prefix", "programs"):
        sessions = _trace("agentic_swebench", 0, 0)
        assert isinstance(sessions, Sessions)
        twice = 2 * sessions.turns
        lanes = Lanes(Sessions([0.0] * len(twice), twice, sessions.cap))
        watch = Watch(_config(order, 32), blocks)
        metrics = watch.run(lanes)
        found[order], late = lanes.an_hour, watch.late
        mean = statistics.mean(end - lanes.begun[one] for one, end in lanes.ended.items())
        words.append(
            f"{order} {lanes.an_hour:.0f} programs an hour, {mean:.0f} s each, worst wait"
            f" {max(metrics.ttft):.0f} s"
        )
    ratio = found["programs"] / found["fcfs"]
    least = TARGET if blocks < MEMORIES[-1] else 0.98
    figure = f"{ratio:.2f}x ({'; '.join(words)}); {late} admissions past an aged request"
    return Line(
        f"{LANES} agents in {blocks} blocks: at least {least}x fcfs",
        figure,
        ratio >= least and not late,
    )


# -- traces --------------------------------------------------------------------------------------------------
def _srpt(context: Context) -> Order:
    """The order `sjf`, which is told how long answers are."""

    class Oracle:
        def length(self, seq: Sequence, q: float = 0.5) -> float:
            return float(seq.request.params.forced_end or seq.limit)

    return sjf(replace(context, predictor=Oracle()))  # type: ignore[arg-type]


def _trace_line(name: str, most: int) -> Line:
    traffic = _trace(name, most, MEAN_PROMPT)
    assert isinstance(traffic, OpenLoop)
    requests = traffic.requests
    at_once = OpenLoop([replace(one, arrival=0.0) for one in requests])
    seconds = Watch(_config("fcfs", SLOTS), BLOCKS).run(at_once).end / LOAD
    offered = traffic.faster((requests[-1].arrival - requests[0].arrival) / seconds)
    means, tails, words = {}, {}, []
    ORDERS["srpt"] = _srpt
    try:
        for order in AMONG:
            e2e = Watch(_config(order, SLOTS), BLOCKS).run(offered).e2e
            means[order], tails[order] = statistics.mean(e2e), percentile(e2e, 99)
            words.append(f"{order} {means[order]:.1f} and {tails[order]:.1f} s")
    finally:
        del ORDERS["srpt"]
    holds = tails["uniboost"] <= 1.02 * tails["srpt"] and means["uniboost"] <= means["fcfs"]
    return Line(
        f"{name}, mean and p99: uniboost within srpt's p99 and fcfs's mean", "; ".join(words), holds
    )


# -- decodes beside long prompts -----------------------------------------------------------------------------
def _gap_line() -> Line:
    """Eight answers, and a long prompt beside them every ten seconds; each token of a prompt takes 0.6 ms here."""
    gaps = {}
    for milliseconds in (80, 20):
        rows = round(milliseconds / 1e3 / COST.weights[2])
        asks = [_ask(number, 30, 1500, 0.0) for number in range(8)]
        asks += [_ask(8 + number, LONG, 8, 2.0 + 10 * number) for number in range(3)]
        config = replace(
            _config("fcfs", 32),
            max_prefill_beside_decode=rows,
            context_price=1000 * COST.weights[5] / COST.weights[2],
        )
        metrics = Watch(config, BLOCKS).run(OpenLoop(asks))
        gaps[milliseconds] = max(metrics.gap), max(metrics.ttft)
    words = [
        f"{1e3 * gap:.0f} ms at {limit} ms of prompts a step, last first token after {ttft:.1f} s"
        for limit, (gap, ttft) in gaps.items()
    ]
    return Line(f"longest gap beside prompts of {LONG:,} tokens", "; ".join(words), None)


def _ask(number: int, prompt: int, answer: int, at: float) -> TrafficRequest:
    own = OWN + 2 * number
    return TrafficRequest(Pieces(((own, prompt),)), answer, answer, at, answer=own + 1)


# -- the real engine -----------------------------------------------------------------------------------------
def _engine_line() -> Line:
    """Agents of SmolLM2 that say more than memory holds, under both orders, in turn."""
    runs: dict[str, list[tuple[float, list[tuple[int, ...]]]]] = {"fcfs": [], "programs": []}
    for _ in range(3):
        for order, found in runs.items():
            found.append(_engine_run(order))
    ratio = statistics.median(
        one[0] / other[0] for one, other in zip(runs["fcfs"], runs["programs"], strict=True)
    )
    equal = len({tuple(answers) for found in runs.values() for _, answers in found}) == 1
    paces = [
        f"{order} {3600 * AGENTS / statistics.median(one[0] for one in found):.0f} an hour"
        for order, found in runs.items()
    ]
    figure = f"{ratio:.2f}x ({', '.join(paces)}); bits {'equal' if equal else 'DIFFER'}"
    return Line(
        f"{AGENTS} agents on the engine: at least {TARGET}x fcfs",
        figure,
        ratio >= TARGET and equal,
    )


def _engine_run(order: str) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds until all agents have ended, and all that was said."""
    llm = LLM("smollm2", order=order, max_model_len=2048, kv_cache_memory=ENGINE_KV, max_num_seqs=4)
    engine, dice = llm.built.engine, random.Random(1)
    said = [tuple(dice.randrange(1, 40_000) for _ in range(400)) for _ in range(AGENTS)]
    turns = [0] * AGENTS
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    begin = time.monotonic()
    due = [(begin, agent) for agent in range(AGENTS)]
    asked: dict[int, int] = {}
    while due or engine.has_work:
        now = time.monotonic()
        ready = [one for one in due if one[0] <= now]
        due = [one for one in due if one[0] > now]
        for _, agent in ready:
            number = 1000 * agent + turns[agent] + 1
            asked[number] = agent
            assert not engine.submit(Request(number, said[agent], params, arrival=now))
        for event in engine.step():
            agent = asked[event.id]
            said[agent] += event.tokens
            if event.finish is not None:
                turns[agent] += 1
                new = random.Random(event.id)
                if turns[agent] < TURNS:
                    said[agent] += tuple(new.randrange(1, 40_000) for _ in range(60))
                    due.append((time.monotonic() + 0.2, agent))
    return time.monotonic() - begin, said


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
