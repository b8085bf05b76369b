"""Counters of the scheduler, as data. Knows names and sums; must not know how they come about."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class Counters:
    """Since the start of the scheduler.

    step_tokens        tokens computed in all steps, ballast included
    prompt_tokens      prompt tokens of requests at their first admission
    cached_tokens      how many of those the prefix cache gave; the others are computed for the first time
    drafts             drafts that were verified, draft_tokens tokens in all, accepted_tokens of them right;
                       accepted_at[i]: drafts whose token i was, in as_dict "accepted_tokens_at_i"
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
    accepted_at: list[int] = field(default_factory=list)

    def count_draft(self, tokens: int, accepted: int) -> None:
        self.drafts += 1
        self.draft_tokens += tokens
        self.accepted_tokens += accepted
        self.accepted_at += [0] * (tokens - len(self.accepted_at))
        for position in range(accepted):
            self.accepted_at[position] += 1

    def as_dict(self) -> dict[str, float]:
        figures = asdict(self)
        accepted = {f"accepted_tokens_at_{i}": n for i, n in enumerate(figures.pop("accepted_at"))}
        return {name: float(value) for name, value in (figures | accepted).items()}
