"""Search the settings under which most requests of some traffic meet their targets: simulate, then
measure.

Owns the candidates, the search, and what "better" means. Must not know flags or files.

Coarse first: every policy with budgets and numbers of sequences far apart. Then neighbours of the
best, one setting changed at a time, until none is better or the time is up. The best few run on the
real engine, beside the settings it had: what is measured decides.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault, bad_setting
from pageturner.lab.bench.engine_bench import EngineBench
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.planning.advice import BY_CHANCE, alike
from pageturner.lab.simulation import recorded_runs
from pageturner.lab.simulation.scenario import Scenario
from pageturner.lab.traffic.traffic import OpenLoop, Traffic, in_vocabulary
from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS
from pageturner.progress import Progress

COARSE_TOKENS = (64, 256, 1024)  # budgets that are tried first
COARSE_SEQS = (8, 32, 128)
BLOCK_SIZES = (8, 16, 32, 64)
LIMITS = {"max_num_batched_tokens": (16, 16384), "max_num_seqs": (1, 1024)}


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try; the fields are those of EngineConfig."""

    policy: str
    order: str
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int

    def settings(self, config: EngineConfig) -> EngineConfig:
        """The engine's settings with these."""
        return replace(config, **asdict(self))

    @classmethod
    def of(cls, config: EngineConfig) -> Candidate:
        now = {name: getattr(config, name) for name in TUNED_SETTINGS}
        return cls(**now | {"max_num_batched_tokens": config.token_budget})


TUNED_SETTINGS = tuple(field.name for field in fields(Candidate))


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """Names that may be tried. EngineFault('bad_setting') for those that do not exist."""

    policies: tuple[str, ...]
    orders: tuple[str, ...]
    block_sizes: tuple[int, ...] = BLOCK_SIZES

    def __post_init__(self) -> None:
        for kind, names, known in (
            ("policy", self.policies, POLICIES),
            ("order", self.orders, ORDERS),
        ):
            for name in names or ("",):
                if name not in known:
                    raise bad_setting(f"unknown {kind} {name!r}: one of {', '.join(known)}")

    def coarse(self, start: Candidate) -> Iterator[Candidate]:
        """The first candidates: the engine's own settings, then a coarse grid."""
        yield start
        for tokens, seqs, policy in itertools.product(COARSE_TOKENS, COARSE_SEQS, self.policies):
            numbers = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs}
            yield replace(start, policy=policy, order=self.orders[0], **numbers)

    def beside(self, one: Candidate) -> Iterator[Candidate]:
        """The neighbours of a candidate: those that differ from it in one setting."""
        yield from (replace(one, order=order) for order in self.orders)
        for name, (least, most) in LIMITS.items():
            now = getattr(one, name)
            for changed in (now * 2, now // 2, now * 4 // 3, now * 3 // 4):
                if least <= changed <= most:
                    yield replace(one, **{name: changed})
        yield from (replace(one, policy=policy) for policy in self.policies)
        yield from (replace(one, block_size=size) for size in self.block_sizes)


@dataclass(slots=True)
class Trial:
    """A candidate and what became of the traffic, by RequestMetrics.figures."""

    candidate: Candidate
    simulated: dict[str, Any]
    measured: dict[str, Any] = field(default_factory=dict)
    tied: bool = False  # with the best, as far as these requests tell


def score(figures: dict[str, Any], targets: LatencyTargets) -> tuple[float, float]:
    """Smaller is better. First the share of requests that missed a target, in steps of 0.1 %; among
    equals the 99th percentile of TTFT or TPOT, whichever is the larger share of its target."""
    ttft, tpot = figures["ttft_ms"]["p99"], figures["tpot_ms"]["p99"]
    pairs = ((ttft, targets.ttft), (tpot, targets.tpot))
    worst = max(
        (ms / 1e3 / target for ms, target in pairs if target is not None and ms == ms), default=0.0
    )
    return (-round(figures["goodput_share"], 3), worst)


def mark_tied(trials: list[Trial], best: Trial, targets: LatencyTargets) -> None:
    """Note which trials these requests do not tell from the best: the ranges of the shares within
    the targets overlap, and what `score` says of equal ones is alike or better."""
    for one in trials:
        both = [one.measured, best.measured] if one.measured else [one.simulated, best.simulated]
        lows, highs = zip(*(figures["goodput_range"] for figures in both), strict=True)
        own, worst = (score(figures, targets)[1] for figures in both)
        near = own < worst or alike([own], [worst], BY_CHANCE * bool(one.measured))
        one.tied = near and max(lows) <= min(highs)


def search_settings(
    scenario: Scenario,
    space: SearchSpace,
    seconds: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    progress: bool | None = None,
) -> list[Trial]:
    """All simulated settings, the best first; at least those that the engine has now. No new
    simulation begins after `seconds`. The KV memory keeps its size in tokens, whatever the block
    size."""
    until, tried = clock() + seconds, dict[Candidate, Trial]()
    start = Candidate.of(scenario.config)

    def rank(trial: Trial) -> tuple[float, float]:
        return score(trial.simulated, scenario.targets)

    def attempt(candidates: Iterator[Candidate]) -> None:
        for one in candidates:
            if one not in tried and (not tried or clock() < until):
                tried[one] = Trial(one, _simulated(scenario, one))
                spent = seconds - max(until - clock(), 0.0)
                best = min(map(rank, tried.values()))
                line.update(int(spent), f"{len(tried)} tried, best {-best[0]:.1%} within")

    with Progress("tuning", int(seconds), enabled=progress) as line:
        attempt(space.coarse(start))
        beside = set[Candidate]()
        while clock() < until:
            best = min(tried.values(), key=rank).candidate
            if best in beside:
                break
            beside.add(best)
            attempt(space.beside(best))
    return sorted(tried.values(), key=rank)


def _simulated(scenario: Scenario, one: Candidate) -> dict[str, Any]:
    size, sizes = scenario.config.block_size, scenario.sizes
    blocks, sliding = (max(n * size // one.block_size, 1) for n in (sizes.blocks, sizes.sliding))
    sizes = replace(sizes, blocks=blocks, sliding=sliding if sizes.sliding else 0)
    return replace(scenario, config=one.settings(scenario.config), sizes=sizes).run(progress=False)


def check_possible(best: Trial, targets: LatencyTargets) -> None:
    """EngineFault('impossible') where too few requests meet the targets even with the best
    settings."""
    found, one = best.simulated, best.candidate
    if found["goodput_share"] >= targets.share:
        return
    raise EngineFault(
        "impossible",
        f"no setting that was tried meets the targets: the best ({one.policy}, {one.order},"
        f" {one.max_num_batched_tokens} tokens, {one.max_num_seqs} sequences) has"
        f" {found['goodput_share']:.1%} of the requests within them and {targets.share:.1%} are wanted"
        f" (TTFT p99 {found['ttft_ms']['p99']:,.0f} ms, TPOT p99 {found['tpot_ms']['p99']:,.1f} ms):"
        " relax the targets, lower the load (--rate-scale), or lower --goodput to have the best all the same",
    )


# -- for real --------------------------------------------------------------------------------------


def first_seconds(traffic: Traffic, seconds: float) -> OpenLoop:
    """The requests of the first so many seconds, at least one request. EngineFault for sessions."""
    if not isinstance(traffic, OpenLoop):
        raise EngineFault(
            "workload", "sessions wait for their answers, and are simulated only: say --finalists 0"
        )
    found = [one for one in traffic.requests if one.arrival <= seconds] or traffic.requests[:1]
    return OpenLoop(found, "measuring")


def measure_trials(
    trials: list[Trial],
    base: EngineConfig,
    load: OpenLoop,
    targets: LatencyTargets,
    progress: bool | None = None,
) -> None:
    """Run the load under each of these on the real engine, which is loaded anew for each size of
    blocks."""
    for size in sorted({trial.candidate.block_size for trial in trials}):
        alike = [trial for trial in trials if trial.candidate.block_size == size]
        room = replace(
            base,
            block_size=size,
            max_num_batched_tokens=max(one.candidate.max_num_batched_tokens for one in alike),
            max_num_seqs=max(one.candidate.max_num_seqs for one in alike),
        )
        bench = EngineBench.load(room)  # whose KV memory is large enough for all of them
        known = in_vocabulary(load, bench.built.vocab_size)
        for trial in alike:
            run = bench.measure(known, trial.candidate.settings(base), progress=progress)
            trial.measured = recorded_runs.request_metrics(run).figures(targets)
