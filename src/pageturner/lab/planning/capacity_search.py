"""The fewest GPUs with which enough requests meet their targets: the questions of a search, and its
answer.

Owns the search: a sequence of questions, of which each says how many replicas of how many GPUs.
Must not know who answers them, nor how many at a time (parallel_runs.py).

The time that a prompt takes alone comes first (prompt_alone.py): where too few meet the targets on
an empty replica, no number of replicas does. Then counts are tried, from one on that queues of
whole prompts suggest. Only simulations decide: of the answer is known that it is enough, and that
one replica less is not. That more replicas are never worse is taken for granted.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

from pageturner.errors import EngineFault
from pageturner.lab.bench.prompt_alone import (
    AloneVerdict,
    PromptTokens,
    all_requests,
    alone,
    judge,
    prefill_seconds,
    prompt_length,
    prompts_of,
)
from pageturner.lab.simulation.scenario import MAX_REPLICAS, Scenario
from pageturner.lab.traffic.block_names import BlockNames
from pageturner.lab.traffic.traffic import Pieces, Prompt
from pageturner.router.load_balancer import PLACEMENTS, PrefixMap
from pageturner.telemetry.work import StepWork

SPLITS = tuple(eighths / 8 for eighths in range(1, 8))  # parts of the replicas that compute prompts
CHUNK = 512  # tokens of a prompt that have one name


@dataclass(frozen=True, slots=True)
class Option:
    """A replica of so many GPUs; the `replicas` of the scenario are what is searched.

    kind     the name of the GPUs; "": it is no GPU that is simulated
    prefill  the part of the replicas that computes prompts for the others, with the links of
             scenario.roles; 0: all do everything
    """

    gpus: int
    scenario: Scenario
    kind: str = ""
    prefill: float = 0.0

    @property
    def of(self) -> str:
        """Words for the GPUs of a replica, and for what the replicas do."""
        part = f", {self.prefill:.1%} of them for prompts" if self.prefill else ""
        return (f" of {self.gpus} x {self.kind}" if self.kind else "") + part

    def with_replicas(self, count: int) -> Scenario:
        """The scenario with so many replicas; one alone does everything."""
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
        """The verdict on what each request would take alone."""
        one = self.scenario
        return judge(alone(prompts, one.cost, budget=self.budget), one.targets)


def splits_of(option: Option) -> list[Option]:
    """All replicas alike first, then with each of SPLITS."""
    return [option, *(replace(option, prefill=part) for part in SPLITS)]


@dataclass(frozen=True, slots=True)
class CapacityQuestion:
    """Are so many replicas of an option enough? likely: the guess."""

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
        """The answer by a run; share: of the requests that must be within the targets."""
        return cls(run["goodput_share"] >= share, run["engines"]["most_open"] <= 1)


Answered = Mapping[CapacityQuestion, CapacityAnswer]
Search = Generator[CapacityQuestion, CapacityAnswer, tuple[int, int] | None]
Ahead = Callable[[int], list[CapacityQuestion]]
Counts = Generator[CapacityQuestion, CapacityAnswer, int | None]


# -- which questions -------------------------------------------------------------------------------


def fewest_gpus(
    options: Sequence[Option], guess: Callable[[int], int] = lambda option: 1
) -> Search:
    """The option and the number of its replicas that take the fewest GPUs; of equal ones the first.
    None where no number is enough. guess: of an option, where to begin; it must always say the
    same."""
    best = None
    for index, option in enumerate(options):
        if best is None:
            count = yield from _least(index, guess(index), MAX_REPLICAS, likely=False)
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
        low = high = begin
        while not answer.enough:
            if high == most or answer.lone:
                return None
            low, high = high, min(high + step, most)
            step *= 2
            answer = yield CapacityQuestion(option, high)
    while high - low > 1:
        middle = (low + high) // 2
        if (yield CapacityQuestion(option, middle)).enough:
            high = middle
        else:
            low = middle
    return high


def next_questions(
    search: Callable[[], Search], known: Answered, most: int
) -> list[CapacityQuestion]:
    """The next question of the search, and those that may come behind it, the likelier first."""
    found: dict[CapacityQuestion, None] = {}
    branches = deque([dict(known)])
    for _ in range(4 * most):
        if not branches or len(found) >= most:
            break
        assumed = branches.popleft()
        question, _ = advance(search(), assumed)
        if question is not None:
            found[question] = None
            for enough in (question.likely, not question.likely):
                branches.append(assumed | {question: CapacityAnswer(enough)})
    return list(found)


def advance(
    search: Search, known: Answered
) -> tuple[CapacityQuestion | None, tuple[int, int] | None]:
    """The first question that is not answered; where the search has ended None and its result."""
    try:
        question = next(search)
        while question in known:
            question = search.send(known[question])
    except StopIteration as ended:
        return None, ended.value
    return question, None


# -- where to begin --------------------------------------------------------------------------------


def first_guess(option: Option) -> int:
    """A number of replicas to begin with. It decides nothing, so it may be wrong: prompts are
    computed one after another by the replica that the placement chose, answers take what a token
    takes alone, caches forget nothing. 1 where no number seems enough."""
    one, names = option.scenario, BlockNames(CHUNK)
    prompts = [
        (
            asked.arrival,
            prompt_length(asked.prompt),
            asked.answer_length,
            _chunks(asked.prompt, names),
        )
        for asked in all_requests(one.traffic(one.rate))
    ]
    prompts.sort(key=lambda prompt: prompt[0])
    budget, caching, targets = option.budget, one.config.enable_prefix_caching, one.targets

    def enough(replicas: int) -> bool:
        place, sent = PLACEMENTS[one.placement](), PrefixMap(1)
        loads, free, ends = [0] * replicas, [0.0] * replicas, list[tuple[float, int]]()
        left = (1 - targets.share) * len(prompts)
        for arrival, prompt, answer, chunks in prompts:
            while ends and ends[0][0] <= arrival:
                loads[heapq.heappop(ends)[1]] -= 1
            had = {at: CHUNK * count for at, count in sent.hints(chunks).items()}
            chosen = place(loads, had, prompt)
            sent.sent(chunks, chosen)
            cached = min(had.get(chosen, 0), prompt - 1) if caching else 0
            first = max(arrival, free[chosen]) + prefill_seconds(one.cost, cached, prompt, budget)
            token = one.cost.seconds(StepWork(1, 1, 1, prompt + 1, prompt + 1))
            loads[chosen] += 1
            free[chosen] = first
            heapq.heappush(ends, (first + (answer - 1) * token, chosen))
            left -= not targets.met(first - arrival, token if answer > 1 else 0.0)
            if left < 0:
                return False
        return True

    counts = _least(0, 1, min(MAX_REPLICAS, len(prompts)), likely=False)
    question = next(counts)
    try:
        while True:
            question = counts.send(CapacityAnswer(enough(question.replicas)))
    except StopIteration as ended:
        return ended.value or 1


def _chunks(prompt: Prompt, names: BlockNames) -> tuple[object, ...]:
    """A name for each whole chunk of a prompt."""
    if isinstance(prompt, Pieces):
        return tuple(names.keys(prompt.parts))
    return tuple(prompt[end - CHUNK : end] for end in range(CHUNK, len(prompt) + 1, CHUNK))


# -- answers ---------------------------------------------------------------------------------------


class Asker(Protocol):
    """Simulates what a question asks."""

    def run(self, question: CapacityQuestion, ahead: Ahead) -> Any:
        """The figures of Scenario.run, which may have been given up. ahead: so many questions, this
        one first, that may be looked at meanwhile."""


Tell = Callable[[str], None]


def possible_options(options: Sequence[Option], tell: Tell) -> list[Option]:
    """The options on which a prompt alone meets the targets. EngineFault('impossible') says what to
    try where there are none."""
    prompts, refusals = options[0].prompts(), dict[str, None]()
    known: dict[tuple[str, int], AloneVerdict] = {}  # whatever replicas do
    found = []
    for option in options:
        key = (option.kind, option.gpus)
        if key not in known:
            known[key] = option.verdict(prompts)
        if known[key].possible:
            found.append(option)
        else:
            said = f"a replica{replace(option, prefill=0.0).of}: a prompt alone takes too long"
            refusals[f"{said}, {_why(option, known[key])}"] = None
    if not found:
        raise _impossible(options[-1], known[options[-1].kind, options[-1].gpus])
    for said in refusals:
        tell(said)
    return found


def search_capacity(
    options: Sequence[Option], asker: Callable[[Sequence[Option]], Asker], tell: Tell
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The run with the fewest GPUs with which enough requests (`targets.share`) meet the targets,
    and all runs that decided it. `gpus` of a run: in all of its replicas, `gpus_per_replica` in
    one. The same whoever answers. EngineFault('impossible') where more replicas do not help."""
    options = possible_options(options, tell)
    runner = asker(options)
    alike = {(option.kind, option.gpus): option for option in reversed(options)}

    @cache
    def begin(kind: str, gpus: int) -> int:
        return first_guess(alike[kind, gpus])

    def search() -> Search:
        return fewest_gpus(options, lambda i: begin(options[i].kind, options[i].gpus))

    known: dict[CapacityQuestion, CapacityAnswer] = {}
    runs: dict[CapacityQuestion, dict[str, Any]] = {}
    while (found := advance(search(), known))[0] is not None:
        question = found[0]
        option = options[question.option]
        run = runner.run(question, lambda most: next_questions(search, known, most))
        known[question] = answer = CapacityAnswer.of(run, option.scenario.targets.share)
        gpus = {"gpus_per_replica": option.gpus, "gpus": option.gpus * question.replicas}
        runs[question] = run | gpus
        tell(_progress(option, question, run, answer))
    tried = list(runs.values())
    if found[1] is None:
        largest = [run for run in tried if run["gpus"] == run["replicas"] * options[-1].gpus]
        raise _not_found(options[-1], max(largest or tried, key=lambda run: run["replicas"]))
    tried.sort(key=lambda run: (run["gpus"], run["replicas"]))
    return runs[CapacityQuestion(*found[1])], tried


# -- words -----------------------------------------------------------------------------------------


def in_words(option: Option, question: CapacityQuestion) -> str:
    """The count that is tried."""
    return f"{question.replicas:,} replica{'s' if question.replicas > 1 else ''}{option.of}"


def _progress(
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
