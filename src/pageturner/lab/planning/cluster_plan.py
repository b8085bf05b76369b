"""What a model takes in a cluster, before anything runs: each rank, each hand-over, each tier, each role.

Owns the arithmetic, with the same links, tiers and step times that the simulator has. Must not know flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pageturner.lab.bench.prompt_alone import prefill_seconds
from pageturner.lab.simulation.fleet import Roles, TierSizes
from pageturner.lab.simulation.step_cost import StepCost


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt of so many tokens, in a cluster. Seconds; None where it is not known or there is none.

    computed    to compute it on an empty replica
    sent        its KV over the link, whole
    late        from the end of its computation to its last KV at the other replica, which has got the rest
                meanwhile
    host, file  its KV back from memory and from a file
    per_second  such prompts that all prefill replicas compute
    """

    tokens: int
    computed: float | None
    sent: float
    late: float | None
    host: float | None
    file: float | None
    per_second: float | None


def prompt_rows(
    lengths: Sequence[int],
    links: Roles,
    tiers: TierSizes | None,
    cost: StepCost | None,
    budget: int,
    prefill: int,
) -> list[PromptRow]:
    """A row for each length. links: seconds on the way; budget: tokens of a step; prefill: replicas that
    compute prompts, 0: roles are not told apart."""
    rows = []
    for length in lengths:
        computed = prefill_seconds(cost, 0, length, budget) if cost else None
        late = links.on_the_way(cost, 0, length, budget) if cost else None
        host = tiers.host_seconds * length if tiers and tiers.host_tokens >= length else None
        file = tiers.file_seconds * length if tiers and tiers.file_tokens >= length else None
        sent = length * links.token_seconds + links.latency
        rate = prefill / computed if computed and prefill else None
        rows.append(PromptRow(length, computed, sent, late, host, file, rate))
    return rows
