"""Run a recorded log again: the same plans from the scheduler alone, or the same tokens from the
engine.

Owns what "the same" means. Must not know how a log is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pageturner.engine.engine_factory import make_engine, scheduler_of
from pageturner.engine.fingerprint import model_mark
from pageturner.errors import EngineFault
from pageturner.lab.simulation.recorded_runs import RecordedRun
from pageturner.progress import Progress
from pageturner.request import Failure, Refused
from pageturner.scheduler.types import Output, Plan, Result
from pageturner.telemetry.step_log import (
    Arrived,
    Changed,
    Forgot,
    Left,
    Released,
    StepRecord,
    Unpinned,
)


@dataclass(slots=True)
class ReplayComparison:
    """The number of plans, or answers, that were compared, and the differences in words."""

    compared: int = 0
    tokens: int = 0
    differences: list[str] = field(default_factory=list)


def replay_plans(run: RecordedRun) -> ReplayComparison:
    """Hand a new scheduler what the recorded one was handed, at the recorded times, and what was
    computed then, and compare each plan: who, how many tokens, from where, who was preempted, which
    padding.

    EngineFault('step_log') for a log that lacks records, and for a run that began with the KV of a
    process that had died: what followed cannot be compared.
    """
    _check_whole(run)
    if run.header.taken_back:
        message = f"this run began with {run.header.taken_back} blocks of KV that it took back from an engine"
        raise EngineFault(
            "step_log", f"{message} that died: its plans cannot be replayed (--no-kv-survival)"
        )
    stack = scheduler_of(run.config, run.sizes, run.header.max_model_len)
    scheduler, found = stack.scheduler, ReplayComparison()
    for record in run.records:
        match record:
            case Arrived():
                with contextlib.suppress(
                    Refused
                ):  # as it was then: a refused request is in no plan
                    scheduler.add(record.request())
            case Left(id=id):
                scheduler.abort(id)
            case Unpinned(id=id):
                stack.pins.drop(id)
            case Released(name=name):
                stack.sessions.release(name)
            case Forgot():
                stack.pins.forget_others()
            case Changed(settings=settings, widest=widest):
                if not stack.reconfigure(replace(stack.config, **settings), widest):
                    found.differences.append(
                        f"settings changed behind step {found.compared}, too early here"
                    )
                    return found
            case StepRecord():
                plan = scheduler.plan(record.start)
                found.compared += 1
                found.tokens += plan.tokens
                if (difference := _difference(plan, record)) is not None:
                    found.differences.append(f"step {found.compared}: {difference}")
                    return found  # from here on the two have different sequences
                scheduler.commit(plan, _result(plan, record), record.end)
    return found


def _check_whole(run: RecordedRun) -> None:
    if run.lost:
        raise EngineFault(
            "step_log",
            f"the log lacks {run.lost} records, which a slow disk cost it: it cannot be replayed",
        )


def _first_difference(now: Sequence[object], then: Sequence[object]) -> int:
    """The first place where two sequences differ; the length of the shorter one if that is all of
    it."""
    places = zip(now, then, strict=False)
    return next((i for i, (a, b) in enumerate(places) if a != b), min(len(now), len(then)))


def _result(plan: Plan, step: StepRecord) -> Result:
    """The recorded outputs, in the form that the scheduler wants."""
    outputs = []
    for planned, item in zip(plan.items, step.items, strict=True):
        failure = Failure("recorded", "it failed when it was recorded") if item.failed else None
        output = Output(list(item.tokens), draft=list(item.draft), failure=failure)
        output.candidates = list(item.candidates)
        params = planned.sequence.request.params
        ends = item.tokens or failure or params.beam_width or params.pooling
        output.late = planned.wants_logits and not ends
        if not params.pooling:
            output.prompt_logprobs = [(0.0, 1, ())] * len(planned.scored)
        outputs.append(output)
    return Result(outputs)


def _difference(plan: Plan, step: StepRecord) -> str | None:
    then = [(item.id, item.index, item.n, item.computed) for item in step.items]
    now = [
        (item.sequence.request.id, item.sequence.index, item.n, item.sequence.computed)
        for item in plan.items
    ]
    if now != then:
        place = _first_difference(now, then)
        if place == min(len(now), len(then)):
            return f"{len(now)} sequences, recorded {len(then)}"
        return f"(id, index, n, computed) is {now[place]}, recorded {then[place]}"
    if (list(plan.preempted), plan.ballast) != (step.preempted, step.ballast):
        return f"preempted {list(plan.preempted)}, recorded {step.preempted}; or other padding"
    return None


def replay_tokens(
    run: RecordedRun, *, model: str = "", progress: bool | None = None
) -> ReplayComparison:
    """Answer the recorded requests once more with the recorded seeds and compare the tokens. One
    that was aborted is compared as far as it came. `model`: where it is now, if elsewhere.

    EngineFault('step_log') for a log of digests: the prompts are not in it.
    """
    if run.header.content != "tokens":
        message = "the log holds digests instead of tokens: only plans can be replayed (--step-log-tokens)"
        raise EngineFault("step_log", message)
    _check_whole(run)
    recorded, failed = _recorded(run)
    config = replace(
        run.config, model=model or run.config.model, max_queue=max(run.config.max_queue, 1 << 20)
    )
    if (here := model_mark(config)) != run.header.model:
        message = (
            f"the log is of the model {run.header.model}, and {config.model} is {here}: say --model"
        )
        raise EngineFault("step_log", message)
    built = make_engine(config)
    if built.fingerprint != run.header.fingerprint:
        raise EngineFault(
            "step_log",
            f"the log is of {run.header.fingerprint}, this engine is {built.fingerprint}: the bits differ",
        )
    engine, found = built.engine, ReplayComparison()
    answers: dict[tuple[int, int], list[int]] = {}
    for record in run.records:
        if isinstance(record, Arrived):
            engine.submit(replace(record.request(), pin=False))
    with Progress("replaying", len(recorded), enabled=progress) as line:
        while engine.has_work:
            for event in engine.step():
                answers.setdefault((event.id, event.index), []).extend(event.tokens)
                found.tokens += len(event.tokens)
                line.update(len(answers))
    for key, then in recorded.items():
        if key in failed:
            continue
        found.compared += 1
        now = answers.get(key, [])
        if now[: len(then)] != then:
            place = _first_difference(now, then)
            found.differences.append(f"request {key[0]}: token {place} of {len(then)} differs")
    return found


def _recorded(run: RecordedRun) -> tuple[dict[tuple[int, int], list[int]], set[tuple[int, int]]]:
    """The tokens that each sequence gained, and the sequences that failed."""
    found: dict[tuple[int, int], list[int]] = {}
    failed = set()
    for step in run.steps:
        ended = {(id, index): why for id, index, why in step.ended}
        for item in step.items:
            key = (item.id, item.index)
            found.setdefault(key, []).extend(item.tokens)
            if ended.get(key) == "error":
                failed.add(key)
    return found, failed
