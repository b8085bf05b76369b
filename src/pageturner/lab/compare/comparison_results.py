"""Results of a comparison: figures of all contenders, what was reckoned beside them, advice,
claims, answers.

Owns the choice of the run that stands for a contender (the median by throughput), and the JSON.
Must not know how anything was run, nor how it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.compare.comparison import Contender, answers_of
from pageturner.lab.compare.literature_claims import Claim, Evidence, claims
from pageturner.lab.compare.run_timeline import (
    Moment,
    RunTimeline,
    binned,
    figures,
    ideal,
    service_at,
    timeline_of,
    unfairness,
)
from pageturner.lab.compare.simulated_comparison import Reckoned
from pageturner.lab.planning.advice import Advice, Known, advise, chance_of
from pageturner.lab.reporting.charts import BINS
from pageturner.lab.simulation.recorded_runs import RecordedRun
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


OTHERS, STOLEN, SPREAD = 0.1, 0.05, 0.15  # shares above which a machine is called busy


@dataclass(frozen=True, slots=True)
class Disturbance:
    """Shares of the time of all processors while a comparison ran: what other programs took, and
    what other machines on the same hardware did."""

    others: float = 0.0
    stolen: float = 0.0


@dataclass(frozen=True, slots=True)
class About:
    """The facts that a reader needs to trust a figure, in words. real: measured, not simulated;
    rounds: 0 before it is known how many there are."""

    workload: str
    engine: str
    command: str
    machine: str
    real: bool
    rounds: int
    targets: LatencyTargets
    when: str = ""
    disturbance: Disturbance = Disturbance()
    seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ContenderResult:
    """One contender: its median run by throughput, the figures of each of its runs, and their
    throughput."""

    name: str
    policy: str
    order: str
    timeline: RunTimeline
    figures: dict[str, Any]
    each: list[dict[str, Any]]

    @property
    def rounds(self) -> list[float]:
        return [float(one["output_tokens_per_s"]) for one in self.each]

    @property
    def spread(self) -> float:
        """Between its rounds, as a share of the middle one."""
        speeds = sorted(self.rounds)
        return (speeds[-1] - speeds[0]) / (speeds[(len(speeds) - 1) // 2] or 1.0)


@dataclass(frozen=True, slots=True)
class ComparisonResults:
    """requests: how many; same: of how many the tokens were the same in all runs, None where no
    model ran.

    reckoned  the same requests with steps that take what they cost here; stalls: long prompts among
              running answers, likewise. Both empty where costs are not known; words: where they are
              from
    texts     by request, how its prompt and its answer begin
    """

    about: About
    contests: list[ContenderResult]
    ideal: dict[str, float]
    claims: list[Claim]
    requests: int
    same: int | None
    reckoned: list[ContenderResult] = field(default_factory=list)
    stalls: list[ContenderResult] = field(default_factory=list)
    words: str = ""
    texts: Mapping[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """The largest between rounds of one contender; 0 for one round."""
        return max(contest.spread for contest in self.contests)

    @property
    def chance(self) -> float:
        """The share by which measured figures differ by chance; 0 where nothing was measured."""
        taken = self.about.disturbance.others + self.about.disturbance.stolen
        return chance_of(self.about.rounds, taken) if self.about.real else 0.0

    @property
    def disturbed(self) -> list[str]:
        """Return the signs that the machine was busy; empty if there are none."""
        if not self.about.real:
            return []
        measured, found = self.about.disturbance, []
        if measured.others > OTHERS:
            found.append(f"other programs took {measured.others:.0%} of its processors")
        if measured.stolen > STOLEN:
            found.append(f"other machines on the same hardware took {measured.stolen:.0%}")
        if self.spread > SPREAD:
            found.append(f"rounds of the same policy differ by up to {self.spread:.0%}")
        return found

    @property
    def judged(self) -> list[ContenderResult]:
        """Return the contenders whose figures verdicts rest on: the measured ones, on a busy machine
        the reckoned ones, which may be none."""
        return self.reckoned if self.disturbed else self.contests

    @property
    def tenants(self) -> bool:
        """Return whether the requests are of more than one tenant."""
        return any("tenants" in contest.figures for contest in self.contests)

    def advice(self) -> list[Advice]:
        """Return which policy to choose for which wish, judged by figures without noise where there
        are any."""
        measured, reckoned, stalls = (
            {c.name: Known(c.policy, c.each) for c in contests}
            for contests in (self.contests, self.reckoned, self.stalls)
        )
        if self.disturbed:
            return advise(reckoned, reckoned, stalls, 0.0) if reckoned else []
        return advise(measured, reckoned, stalls, self.chance)

    @property
    def seconds(self) -> float:
        """The longest of all runs."""
        return max(contest.timeline.seconds for contest in self.contests)

    @property
    def drawn_seconds(self) -> float:
        """The axis of time of pictures: the longest of all runs, or a quarter more than the next
        one, so that a single slow run does not leave the others a corner."""
        each = sorted(contest.timeline.seconds for contest in self.contests)
        return min(each[-1], 1.25 * each[-2]) if len(each) > 2 else each[-1]

    def series(self, contest: ContenderResult, seconds: float) -> dict[str, list[float]]:
        """Return the series of a contender by name, each as BINS means over these seconds."""
        moments = contest.timeline.moments
        return {name: binned(moments, of, seconds, BINS) for name, of in SERIES.items()}

    def services(self, contest: ContenderResult) -> dict[str, list[float]]:
        """Return the service that each tenant had received at the end of each bin of a picture."""
        ends = [self.drawn_seconds * (i + 1) / BINS for i in range(BINS)]
        return {
            tenant: [service_at(line, at) for at in ends]
            for tenant, line in contest.timeline.service.items()
        }

    def as_json(self) -> dict[str, Any]:
        """Everything but the pictures."""
        return {
            "about": asdict(self.about),
            "requests": self.requests,
            "same_answers": self.same,
            "disturbed": self.disturbed,
            "spread": self.spread,
            "advice": [asdict(one) for one in self.advice()],
            "reckoned": {c.name: c.figures for c in self.reckoned},
            "stalls": {c.name: c.figures for c in self.stalls},
            "ideal": self.ideal,
            "claims": [asdict(claim) for claim in self.claims],
            "contenders": {
                contest.name: contest.figures
                | {"policy": contest.policy, "order": contest.order, "rounds": contest.rounds}
                for contest in self.contests
            },
            "series": {
                "bin_s": self.seconds / BINS,
                **{contest.name: self.series(contest, self.seconds) for contest in self.contests},
            },
        }


def find(
    runs: Mapping[Contender, Sequence[RecordedRun]],
    requests: Sequence[Request],
    about: About,
    reckoned: Reckoned | None = None,
    texts: Mapping[int, tuple[str, str]] | None = None,
) -> ComparisonResults:
    """The figures of all runs."""
    lengths = _lengths(requests)
    contests = [
        _contest(contender, mine, lengths, about.targets) for contender, mine in runs.items()
    ]
    batch = next(iter(runs.values()))[0].config.static_batch
    allowed = ideal(list(lengths.values()), batch)
    found = ComparisonResults(
        replace(about, rounds=len(contests[0].each)),
        contests,
        allowed,
        [],
        len(requests),
        _same(runs, lengths) if about.real else None,
        _once(reckoned.same if reckoned else {}, lengths, about),
        _once(reckoned.stalled, _lengths(reckoned.stalls), about) if reckoned else [],
        reckoned.words if reckoned else "",
        texts or {},
    )
    return replace(found, claims=_claims(found, lengths))


def _claims(found: ComparisonResults, lengths: Mapping[int, tuple[int, int]]) -> list[Claim]:
    """The claims by the figures that verdicts rest on."""
    figures = {c.name: c.figures for c in found.judged}
    each = claims(Evidence(figures, found.ideal, _fairness(found.judged, lengths)))
    if not found.disturbed:
        return each
    quiet = "it needs a quieter machine"
    return [
        replace(claim, measured=f"reckoned: {claim.measured}")
        if claim.verdict != "not measured"
        else replace(claim, why=claim.why if figures or claim.measured != "-" else quiet)
        for claim in each
    ]


def _lengths(requests: Sequence[Request]) -> dict[int, tuple[int, int]]:
    return {r.id: (len(r.prompt), r.params.forced_end or 0) for r in requests}


def _same(runs: Mapping[Contender, Sequence[RecordedRun]], ids: Iterable[int]) -> int:
    told = [answers_of(run) for mine in runs.values() for run in mine]
    return sum(all(one.get(id) == told[0].get(id) for one in told) for id in ids)


def _once(
    runs: Mapping[Contender, RecordedRun], lengths: Mapping[int, tuple[int, int]], about: About
) -> list[ContenderResult]:
    return [_contest(contender, [run], lengths, about.targets) for contender, run in runs.items()]


def _contest(
    contender: Contender,
    runs: Sequence[RecordedRun],
    lengths: Mapping[int, tuple[int, int]],
    targets: LatencyTargets,
) -> ContenderResult:
    told = [timeline_of(run) for run in runs]
    each = [figures(run, one, targets) for run, one in zip(runs, told, strict=True)]
    short = sorted(lengths, key=lambda id: lengths[id][1])[: max(1, len(lengths) // 4)]
    for mine, walked in zip(each, told, strict=True):
        mine["short_e2e_s"] = sum(walked.e2e[id] for id in short) / len(short)
        if len(walked.service) > 1:
            mine["tenants"] = _tenants(walked)
    order = sorted(range(len(runs)), key=lambda i: float(each[i]["output_tokens_per_s"]))
    middle = order[(len(runs) - 1) // 2]
    return ContenderResult(
        contender.name, contender.policy, contender.order, told[middle], each[middle], each
    )


def _tenants(told: RunTimeline) -> dict[str, Any]:
    """Return how much each tenant was served until only the one with most work had requests
    waiting."""
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
        c.name: (
            c.figures["tenants"]["difference"],
            2.0 * max(longest, 2.0 * c.figures["kv"]["most_used"]),
        )
        for c in contests
        if "tenants" in c.figures
    }
