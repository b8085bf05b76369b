"""The fewest GPUs with which enough requests meet their targets: what is asked next, and what was answered.

Owns the search: a sequence of questions, of which each says how many replicas of how many GPUs. Must not know
who answers them, nor how many at a time (lab/planning/parallel_runs.py).

What a prompt takes alone comes first (prompt_alone.py): where too few meet the targets on an empty replica,
no number of replicas does. Then counts are tried, from one on that queues of whole prompts suggest
(first_guess.py). Only simulations decide: of the answer is known that it is enough, and that one replica less
is not. That more replicas are never worse is taken for granted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

from pageturner.errors import EngineFault
from pageturner.lab.bench.prompt_alone import AloneVerdict, PromptTokens, alone, judge, prompts_of
from pageturner.lab.planning.first_guess import FirstGuess, named_prompts
from pageturner.lab.simulation.scenario import MOST_REPLICAS, Scenario
from pageturner.router.load_balancer import PLACEMENTS

SPLITS = tuple(eighths / 8 for eighths in range(1, 8))  # parts of the replicas that compute prompts


@dataclass(frozen=True, slots=True)
class Option:
    """A replica of so many GPUs; the `replicas` of the scenario are what is searched. kind: what they are
    called; "": it is no GPU that is simulated. prefill: the part of the replicas that computes prompts for
    the others, with the links of scenario.roles; 0: all do everything."""

    gpus: int
    scenario: Scenario
    kind: str = ""
    prefill: float = 0.0

    @property
    def of(self) -> str:
        """What a replica is made of, and what the replicas do."""
        part = f", {self.prefill:.1%} of them for prompts" if self.prefill else ""
        return (f" of {self.gpus} x {self.kind}" if self.kind else "") + part

    def with_replicas(self, count: int) -> Scenario:
        """So many of them; one alone does everything."""
        one = replace(self.scenario, replicas=count, roles=None)
        if not self.prefill or count == 1 or self.scenario.roles is None:
            return one
        apart = min(max(round(self.prefill * count), 1), count - 1)
        return replace(one, roles=replace(self.scenario.roles, prefill=apart))

    @property
    def budget(self) -> int:
        """Tokens of a step; 0: no limit."""
        scheduler = self.scenario.check().scheduler
        return scheduler.budget if scheduler.policy.bounded else 0

    def prompts(self) -> list[PromptTokens]:
        """The traffic as lengths, which every option of a search shares."""
        one = self.scenario
        return prompts_of(one.traffic(one.rate), caching=one.config.enable_prefix_caching)

    def verdict(self, prompts: Sequence[PromptTokens]) -> AloneVerdict:
        """What each request would take alone."""
        one = self.scenario
        return judge(alone(prompts, one.cost, budget=self.budget), one.targets)

    def guess(self) -> int:
        """A number of replicas to begin with."""
        one = self.scenario
        prompts, caching = named_prompts(one.traffic(one.rate)), one.config.enable_prefix_caching
        place = PLACEMENTS[one.placement]
        return FirstGuess(prompts, one.cost, place, one.targets, self.budget, caching).replicas(
            MOST_REPLICAS
        )


def splits_of(option: Option) -> list[Option]:
    """All replicas alike first, then with each of SPLITS."""
    return [option, *(replace(option, prefill=part) for part in SPLITS)]


@dataclass(frozen=True, slots=True)
class CapacityQuestion:
    """Whether so many replicas of an option are enough. likely: the guess."""

    option: int
    replicas: int
    likely: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class CapacityAnswer:
    """lone: it is too few although no replica ever had two requests, so more are no better."""

    enough: bool
    lone: bool = False

    @classmethod
    def of(cls, run: Mapping[str, Any], share: float) -> CapacityAnswer:
        """What a run says; share: of the requests that must be within the targets."""
        return cls(run["goodput_share"] >= share, run["engines"]["most_open"] <= 1)


Answered = Mapping[CapacityQuestion, CapacityAnswer]
Search = Generator[CapacityQuestion, CapacityAnswer, tuple[int, int] | None]
Counts = Generator[CapacityQuestion, CapacityAnswer, int | None]


# -- which questions -----------------------------------------------------------------------------------------


def fewest_gpus(
    options: Sequence[Option], guess: Callable[[int], int] = lambda option: 1
) -> Search:
    """The option and the number of its replicas that take the fewest GPUs; of equal ones the first. None
    where no number is enough. guess: of an option, where to begin; it must always say the same."""
    best = None
    for index, option in enumerate(options):
        if best is None:
            count = yield from _least(index, guess(index), MOST_REPLICAS, likely=False)
        elif most := (options[best[0]].gpus * best[1] - 1) // option.gpus:
            count = yield from _least(index, most, most, likely=guess(index) <= most)
        else:
            continue
        best = best if count is None else (index, count)
    return best


def _least(option: int, begin: int, most: int, *, likely: bool) -> Counts:
    """The least count that is enough, at most `most`; from `begin` on in steps that double."""
    answer = yield CapacityQuestion(option, begin, likely)
    step = 1
    if answer.enough:
        low, high = begin - 1, begin
        while low and (yield CapacityQuestion(option, low)).enough:
            high, step = low, 2 * step
            low = max(high - step, 0)
    else:
        low, high = begin, begin
        while not answer.enough:
            if high == most or answer.lone:
                return None
            low, high = high, min(high + step, most)
            step *= 2
            answer = yield CapacityQuestion(option, high)
    while high - low > 1:
        middle = (low + high) // 2
        enough = (yield CapacityQuestion(option, middle)).enough
        low, high = (low, middle) if enough else (middle, high)
    return high


def next_questions(
    search: Callable[[], Search], known: Answered, most: int
) -> list[CapacityQuestion]:
    """What the search asks next, and what it may ask behind that, the likelier first."""
    found: dict[CapacityQuestion, None] = {}
    branches = deque([dict(known)])
    for _ in range(4 * most):
        if not branches or len(found) >= most:
            break
        assumed = branches.popleft()
        question = first_unknown(search(), assumed)
        if question is not None:
            found[question] = None
            for enough in (question.likely, not question.likely):
                branches.append(assumed | {question: CapacityAnswer(enough)})
    return list(found)


def first_unknown(search: Search, known: Answered) -> CapacityQuestion | None:
    """The first question that is not answered; None where the search has ended."""
    try:
        question = next(search)
        while question in known:
            question = search.send(known[question])
    except StopIteration:
        return None
    return question


# -- answers -------------------------------------------------------------------------------------------------


class Asker(Protocol):
    """Whoever simulates. share: of the requests that must meet their targets."""

    def run(
        self,
        question: CapacityQuestion,
        search: Callable[[], Search],
        known: Answered,
    ) -> Any:
        """The figures of Scenario.run, which may have been given up. What comes next may be looked at."""


Tell = Callable[[str], None]


def asked(option: Option, question: CapacityQuestion) -> Scenario:
    """What is simulated to answer."""
    return option.with_replicas(question.replicas)


def possible_options(options: Sequence[Option], tell: Tell) -> list[Option]:
    """Those on which a prompt alone meets the targets. EngineFault('impossible') says what to try where there
    are none."""
    prompts, refusals = options[0].prompts(), dict[str, None]()
    alike = {
        (option.kind, option.gpus): option for option in reversed(options)
    }  # whatever replicas do
    found_of = {one: option.verdict(prompts) for one, option in alike.items()}
    verdicts = [found_of[option.kind, option.gpus] for option in options]
    for option, verdict in zip(options, verdicts, strict=True):
        if not verdict.possible:
            said = f"a replica{replace(option, prefill=0.0).of}: a prompt alone takes too long"
            refusals[f"{said}, {_why(option, verdict)}"] = None
    found = [option for option, verdict in zip(options, verdicts, strict=True) if verdict.possible]
    if not found:
        raise _impossible(options[-1], verdicts[-1])
    for said in refusals:
        tell(said)
    return found


def search_capacity(
    options: Sequence[Option], asker: Callable[[Sequence[Option]], Asker], tell: Tell
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run with the fewest GPUs with which enough requests (`targets.share`) meet the targets, and all
    runs that decided it. `gpus` of a run: in all of its replicas, `gpus_per_replica` in one. The same whoever
    answers. EngineFault('impossible') where more replicas do not help."""
    options = possible_options(options, tell)
    runner = asker(options)

    alike = {
        (option.kind, option.gpus): option for option in reversed(options)
    }  # whatever replicas do

    @cache
    def begin(kind: str, gpus: int) -> int:
        return alike[kind, gpus].guess()

    def guess(option: int) -> int:
        return begin(options[option].kind, options[option].gpus)

    def search() -> Search:
        return fewest_gpus(options, guess)

    known: dict[CapacityQuestion, CapacityAnswer] = {}
    runs: dict[CapacityQuestion, dict[str, Any]] = {}
    while (question := first_unknown(search(), known)) is not None:
        option = options[question.option]
        run = runner.run(question, search, known)
        known[question] = answer = CapacityAnswer.of(run, option.scenario.targets.share)
        gpus = {"gpus_per_replica": option.gpus, "gpus": option.gpus * question.replicas}
        runs[question] = run | gpus
        tell(_told(option, question, run, answer))
    best = _result(search(), known)
    tried = list(runs.values())
    if best is None:
        largest = [run for run in tried if run["gpus"] == run["replicas"] * options[-1].gpus]
        raise _not_found(options[-1], max(largest or tried, key=lambda run: run["replicas"]))
    return runs[CapacityQuestion(*best)], sorted(
        tried, key=lambda run: (run["gpus"], run["replicas"])
    )


def _result(search: Search, known: Answered) -> tuple[int, int] | None:
    try:
        question = next(search)
        while True:
            question = search.send(known[question])
    except StopIteration as ended:
        found: tuple[int, int] | None = ended.value
        return found


# -- words ---------------------------------------------------------------------------------------------------


def in_words(option: Option, question: CapacityQuestion) -> str:
    """Which count is tried."""
    return f"{question.replicas:,} replica{'s' if question.replicas > 1 else ''}{option.of}"


def _told(
    option: Option, question: CapacityQuestion, run: Mapping[str, Any], answer: CapacityAnswer
) -> str:
    share = f"{run['goodput_share']:.2%}"
    if "given_up" in run:
        said = f"too few: {share} at most, given up after {run['given_up']:.0%} of the requests"
    else:
        said = f"{'enough' if answer.enough else 'too few'}: {share} within the targets"
    return f"{in_words(option, question)}: {said}"


def _why(option: Option, verdict: AloneVerdict) -> str:
    targets, at = option.scenario.targets, verdict.at
    after = f" and {1e3 * at.tpot:.1f} ms for each one after it" if targets.tpot is not None else ""
    return (
        f"where {verdict.share:.1%} of the requests can meet the targets and {targets.share:.1%} are wanted"
        f" (at this share {at.prompt:,} tokens, {at.cached:,} of them cached, take {at.ttft:.2f} s until the"
        f" first token{after})"
    )


def _impossible(option: Option, verdict: AloneVerdict) -> EngineFault:
    """Targets that a request misses alone are missed with any number of replicas."""
    targets, tries = option.scenario.targets, []
    if option.kind:
        more = ",".join(str(option.gpus << doubled) for doubled in (1, 2, 3))
        tries.append(f"more GPUs in a replica (--gpus {more}), or faster ones")
    if targets.ttft is not None and verdict.at.ttft > targets.ttft:
        tries.append(f"--ttft-ms {1.1e3 * verdict.at.ttft:.0f} or more")
    if targets.tpot is not None and verdict.at.tpot > targets.tpot:
        tries.append(f"--tpot-ms {1.1e3 * verdict.at.tpot:.0f} or more")
    if verdict.share > 0.5:
        tries.append(f"--goodput {int(1e3 * verdict.share) / 1e3:g}")
    return EngineFault(
        "impossible",
        f"no number of replicas meets the targets: alone on an empty replica{option.of}"
        f" {_why(option, verdict).removeprefix('where ')}; try {', '.join(tries) or 'other targets'}",
    )


def _not_found(option: Option, best: Mapping[str, Any]) -> EngineFault:
    return EngineFault(
        "impossible",
        f"no number of replicas meets the targets: with {best['replicas']:,} replicas{option.of}"
        f" {best['goodput_share']:.1%} are within them and {option.scenario.targets.share:.1%} are wanted"
        f" (TTFT p99 {best['ttft_ms']['p99']:,.0f} ms, TPOT p99 {best['tpot_ms']['p99']:,.1f} ms)",
    )
