"""Results of a comparison: figures of all contenders, the gain that lengths allow, claims, equal answers.

Owns the choice of the run that stands for a contender (the median by throughput), and the JSON. Must not
know how anything was run, nor how it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pageturner.lab.comparison import Contender, answers_of
from pageturner.lab.literature_claims import Claim, Evidence, claims
from pageturner.lab.recorded_runs import RecordedRun
from pageturner.lab.request_metrics import LatencyTargets
from pageturner.lab.run_timeline import (
    Moment,
    RunTimeline,
    binned,
    figures,
    ideal,
    service_at,
    timeline_of,
    unfairness,
)
from pageturner.lab.svg_charts import BINS
from pageturner.request import Request

SERIES: dict[str, Callable[[Moment], float]] = {
    "decoding": lambda m: m.decoding,
    "prefilling": lambda m: m.prefilling,
    "padding": lambda m: m.padding,
    "waiting": lambda m: m.waiting,
    "kv_reserved": lambda m: m.reserved,
    "kv_used": lambda m: m.used,
    "kv_whole": lambda m: m.whole,
    "read": lambda m: 100 * m.read,
    "useful": lambda m: 100 * (m.compute - m.nobody),
    "for_nobody": lambda m: 100 * m.nobody,
}


@dataclass(frozen=True, slots=True)
class About:
    """What must be known to believe a figure, in words. real: measured, not simulated."""

    workload: str
    engine: str
    command: str
    machine: str
    real: bool
    rounds: int
    targets: LatencyTargets


@dataclass(frozen=True, slots=True)
class ContenderResult:
    """One contender: its median run by throughput, and the throughput of each of its runs."""

    name: str
    policy: str
    order: str
    timeline: RunTimeline
    figures: dict[str, Any]
    rounds: list[float]


@dataclass(frozen=True, slots=True)
class ComparisonResults:
    """requests: how many; same: of how many the tokens were the same in all runs."""

    about: About
    contests: list[ContenderResult]
    ideal: dict[str, float]
    claims: list[Claim]
    requests: int
    same: int

    @property
    def seconds(self) -> float:
        """The longest of all runs: the common axis of time."""
        return max(contest.timeline.seconds for contest in self.contests)

    def series(self, contest: ContenderResult) -> dict[str, list[float]]:
        """By name, BINS means over the common axis of time."""
        moments = contest.timeline.moments
        return {name: binned(moments, of, self.seconds, BINS) for name, of in SERIES.items()}

    def services(self, contest: ContenderResult) -> dict[str, list[float]]:
        """By tenant, at the end of each bin."""
        ends = [self.seconds * (i + 1) / BINS for i in range(BINS)]
        return {
            tenant: [service_at(line, at) for at in ends] for tenant, line in contest.timeline.service.items()
        }

    def as_json(self) -> dict[str, Any]:
        """Everything but the pictures."""
        return {
            "about": asdict(self.about),
            "requests": self.requests,
            "same_answers": self.same,
            "ideal": self.ideal,
            "claims": [asdict(claim) for claim in self.claims],
            "contenders": {
                contest.name: contest.figures
                | {"policy": contest.policy, "order": contest.order, "rounds": contest.rounds}
                for contest in self.contests
            },
            "series": {
                "bin_s": self.seconds / BINS,
                **{contest.name: self.series(contest) for contest in self.contests},
            },
        }


def find(
    runs: Mapping[Contender, Sequence[RecordedRun]], requests: Sequence[Request], about: About
) -> ComparisonResults:
    """The figures of all runs."""
    lengths = {r.id: (len(r.prompt), r.params.forced_end or 0) for r in requests}
    contests = [_contest(contender, mine, lengths, about.targets) for contender, mine in runs.items()]
    batch = next(iter(runs.values()))[0].config.static_batch
    allowed = ideal(list(lengths.values()), batch)
    evidence = Evidence({c.name: c.figures for c in contests}, allowed, _fairness(contests, lengths))
    told = [answers_of(run) for mine in runs.values() for run in mine]
    same = sum(all(one.get(id) == told[0].get(id) for one in told) for id in lengths)
    return ComparisonResults(about, contests, allowed, claims(evidence), len(requests), same)


def _contest(
    contender: Contender,
    runs: Sequence[RecordedRun],
    lengths: Mapping[int, tuple[int, int]],
    targets: LatencyTargets,
) -> ContenderResult:
    told = [timeline_of(run) for run in runs]
    each = [figures(run, one, targets) for run, one in zip(runs, told, strict=True)]
    speeds = [float(one["output_tokens_per_s"]) for one in each]
    middle = sorted(range(len(runs)), key=lambda i: speeds[i])[(len(runs) - 1) // 2]
    mine, walked = each[middle], told[middle]
    short = sorted(lengths, key=lambda id: lengths[id][1])[: max(1, len(lengths) // 4)]
    mine["short_e2e_s"] = sum(walked.e2e[id] for id in short) / len(short)
    if len(walked.service) > 1:
        mine["tenants"] = _tenants(walked)
    return ContenderResult(contender.name, contender.policy, contender.order, walked, mine, speeds)


def _tenants(told: RunTimeline) -> dict[str, Any]:
    """How much each tenant was served until only the one with most work had requests waiting."""
    loudest = max(told.service, key=lambda tenant: told.service[tenant][-1][1])
    until = max(at for tenant, at in told.queued.items() if tenant != loudest)
    served = {tenant: service_at(line, until) for tenant, line in told.service.items()}
    return {
        "loudest": loudest,
        "until_s": until,
        "served": served,
        "loudest_share": served[loudest] / (sum(served.values()) or 1.0),
        "difference": unfairness(told),
    }


def _fairness(
    contests: Sequence[ContenderResult], lengths: Mapping[int, tuple[int, int]]
) -> dict[str, tuple[float, float]]:
    """The bound is twice max(longest prompt, weight x tokens in the batch): VTC, theorem 4.4."""
    longest = max(prompt for prompt, _ in lengths.values())
    return {
        c.name: (c.figures["tenants"]["difference"], 2.0 * max(longest, 2.0 * c.figures["kv"]["most_used"]))
        for c in contests
        if "tenants" in c.figures
    }
