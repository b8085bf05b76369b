"""Counters: what the scheduler did since its start, as sums.

Owns names and sums. It listens, and must not know how they come about.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict, dataclass, field

from pageturner.scheduler.listener import Listener, StepReport
from pageturner.scheduler.types import Sequence
from pageturner.telemetry.work import STEP_SIZES


@dataclass(slots=True)
class Counters:
    """Since the start of the scheduler.

    step_tokens        tokens computed in all steps, ballast included
    prompt_tokens      prompt tokens of requests at their first admission
    cached_tokens      how many of those the prefix cache gave; the others are computed for the
                       first time
    drafts             drafts that were verified, draft_tokens tokens in all, accepted_tokens of
                       them right; accepted_at[i]: drafts whose token i was, in stats
                       "accepted_tokens_at_i"
    steps_of           steps by their tokens, in the buckets of STEP_SIZES; in stats "steps_of_i",
                       where any
    recomputed_tokens  tokens computed once more after a preemption or a restart; never counted as
                       hits
    """

    steps: int = 0
    step_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    accepted_at: list[int] = field(default_factory=list)
    steps_of: list[int] = field(default_factory=lambda: [0] * (len(STEP_SIZES) + 1))

    @property
    def listener(self) -> Listener:
        return Listener(
            attached=self._attached,
            preempted=self._preempted,
            committed=self._committed,
            stats=self.stats,
        )

    def _attached(self, seq: Sequence, fresh: int) -> None:
        if seq.rank is None and not seq.request.resume:
            self.prompt_tokens += seq.prompt_len
        self.cached_tokens += fresh

    def _preempted(self, seq: Sequence) -> None:
        self.preemptions += 1

    def _committed(self, report: StepReport) -> None:
        steps = len(report.alike) or 1
        self.steps += steps
        self.steps_of[bisect_left(STEP_SIZES, report.tokens)] += steps
        self.step_tokens += steps * report.tokens
        self.recomputed_tokens += report.recomputed
        self.generated_tokens += steps * report.generated
        for drafted, accepted in report.drafts:
            self._count_draft(drafted, accepted)

    def _count_draft(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_at += [0] * (drafted - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1

    def stats(self) -> dict[str, float]:
        figures = asdict(self)
        accepted = {f"accepted_tokens_at_{i}": n for i, n in enumerate(figures.pop("accepted_at"))}
        sizes = {f"steps_of_{i}": n for i, n in enumerate(figures.pop("steps_of")) if n}
        return figures | accepted | sizes
