"""What `plan` says of several replicas: hand-over of KV, slower memory for it, and roles.

Owns the table. The arithmetic is in lab/planning/cluster_plan.py.
"""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault
from pageturner.lab.commands import simulated_engines

if TYPE_CHECKING:
    from pageturner.lab.planning.cluster_plan import PromptRow
    from pageturner.lab.planning.kv_planner import KVPlanner
    from pageturner.lab.simulation.roofline import GPU

WIDTH = 100  # characters
LENGTHS = (512, 2048, 8192, 32768)  # tokens of prompts


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Replicas apart by what they do, or with slower memory. gpus: in each; sequences: of the longest length
    that all which answer hold; tokens: of KV in each tier of a replica; link, host, file: GB/s."""

    prefill: int
    decode: int
    gpus: int
    sequences: int
    host_tokens: int
    file_tokens: int
    link: float
    host: float
    file: float
    rows: list[PromptRow]

    def render(self) -> str:
        """For people: what there is, and a row for each length of prompt."""
        from pageturner.lab.reporting.summary import table

        lines = []
        if self.prefill:
            total = self.gpus * (self.prefill + self.decode)
            lines.append(
                f"{self.prefill:,} replicas compute prompts, {self.decode:,} answer and hold"
                f" {self.sequences:,} of the longest sequences; {total:,} GPUs in all"
            )
        if self.host_tokens or self.file_tokens:
            lines.append(
                f"below the KV of each replica: {self.host_tokens:,} tokens in host memory,"
                f" {self.file_tokens:,} in a file"
            )
        lines.append(
            f"ms of a prompt: to compute it; over a link of {self.link:g} GB/s, whole, and what is left of"
            f" that when it is computed; back from host memory ({self.host:g} GB/s) and from a file"
            f" ({self.file:g} GB/s)"
        )
        head = ["prompt of", "computed", "sent", "late", "from host", "from file"]
        cells = [
            [
                f"{row.tokens:,} tokens",
                *map(_ms, (row.computed, row.sent, row.late, row.host, row.file)),
            ]
            for row in self.rows
        ]
        if self.prefill:
            head.append("prompts/s")
            for cell, row in zip(cells, self.rows, strict=True):
                cell.append("-" if row.per_second is None else f"{row.per_second:,.1f}")
        return "\n".join([*(textwrap.fill(line, WIDTH) for line in lines), table(cells, head)])


def make(
    arguments: argparse.Namespace, config: EngineConfig, planner: KVPlanner, gpu: GPU | None
) -> ClusterPlan | None:
    """What was asked about; None where nothing was. EngineFault('bad_setting')."""
    from pageturner.lab.planning.cluster_plan import prompt_rows
    from pageturner.lab.simulation.fleet import Roles
    from pageturner.lab.simulation.roofline import Reach, roofline

    if not 0 <= arguments.kv_file_gb < float("inf"):
        raise EngineFault("bad_setting", f"--kv-file-gb is 0 or more, not {arguments.kv_file_gb}")
    nbytes, count = planner.model.bytes_per_token(planner.dtype), max(arguments.gpus, 1)
    roles = simulated_engines.roles_of(arguments, config, nbytes)
    tiers = simulated_engines.tiers_of(arguments, config, nbytes)
    if roles is None and tiers is None:
        return None
    prefill, decode = simulated_engines.role_counts(arguments.roles) if roles else (0, 1)
    links = roles or Roles(
        0, 0, nbytes / (1e9 * arguments.kv_link_gb_s), arguments.kv_link_ms / 1e3
    )
    cost = roofline(planner.model, gpu, Reach(), count, planner.dtype) if gpu else None
    lengths = [*(n for n in LENGTHS if n < planner.longest), planner.longest]
    budget = simulated_engines.GPU_SETTINGS["max_num_batched_tokens"]
    return ClusterPlan(
        prefill=prefill,
        decode=decode,
        gpus=count,
        sequences=decode * (planner.memory // planner.sequence_bytes(planner.longest)),
        host_tokens=tiers.host_tokens if tiers else 0,
        file_tokens=tiers.file_tokens if tiers else 0,
        link=arguments.kv_link_gb_s,
        host=arguments.kv_host_gb_s,
        file=arguments.kv_file_gb_s,
        rows=prompt_rows(lengths, links, tiers, cost, budget, prefill),
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f}"
