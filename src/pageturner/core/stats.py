"""Counters of the scheduler, as data. Knows names and sums; must not know how they come about."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Since the start of the scheduler.

    step_tokens        tokens computed in all steps, ballast included
    prompt_tokens      prompt tokens of requests at their first admission
    cached_tokens      how many of those the prefix cache gave
    drafts             drafts that were verified, draft_tokens tokens in all, accepted_tokens of them right
    recomputed_tokens  tokens computed once more after a preemption or a restart; never counted as hits
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

    def count_draft(self, tokens: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += tokens
        self.accepted_tokens += accepted

    def as_dict(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}
