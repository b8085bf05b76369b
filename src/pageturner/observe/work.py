"""Utilisation: what a step must compute and read at least, and what share of a machine's limits that is.

Owns the counts of a step and their sums. Must not know where a model's numbers come from (runtime/usage.py),
nor how limits are measured. A multiply or an add is one operation, a byte counts once however often it is
read. Counted are matrix products and attention: all else is small.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import NamedTuple


class StepWork(NamedTuple):
    """What a step computes.

    tokens     rows; logits: those that get a token; sequences: whose they are
    context    positions whose KV is read, each once for a sequence
    pairs      (query, position) pairs of attention
    """

    tokens: int
    sequences: int
    logits: int
    context: int
    pairs: int


class Demand(NamedTuple):
    """What a step must do at least: operations by type, bytes to be read."""

    int8: float
    fp32: float
    weights: float
    kv: float


@dataclass(frozen=True, slots=True)
class Needs:
    """What the steps of one model need.

    int8, fp32   operations of one row in products; layers: bytes of their matrices, without experts
    ending       of what only rows that get a token go through: the last layer behind its K and V, the head
    experts      bytes of all experts, of which a row reads the share `chosen`
    pair         operations of one query and position in all layers; position: bytes of its KV in these
    recent_pair, recent_position   the same of layers that see only `window` positions; 0: there are none
    """

    int8: float
    fp32: float
    layers: float
    ending_int8: float
    ending_fp32: float
    ending: float
    pair: float
    position: float
    experts: float = 0.0
    chosen: float = 1.0
    recent_pair: float = 0.0
    recent_position: float = 0.0
    window: int = 0

    def weight_bytes(self, rows: int, logits: int) -> float:
        """Of experts those that somebody among so many rows is likely sent to."""
        experts = self.experts * (1 - (1 - self.chosen) ** rows) if self.experts else 0.0
        return self.layers + experts + (self.ending if logits else 0.0)

    def of(self, work: StepWork, recent: StepWork | None = None) -> Demand:
        """A step's. recent: its work as layers with a window see it; None: their window hides nothing."""
        rows, logits, seen = work.tokens, work.logits, recent or work
        attention = self.pair * work.pairs + self.recent_pair * seen.pairs
        return Demand(
            self.int8 * rows + self.ending_int8 * logits,
            self.fp32 * rows + self.ending_fp32 * logits + attention,
            self.weight_bytes(rows, logits),
            self.position * work.context + self.recent_position * seen.context,
        )


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Of a machine: GB/s at which weights come, GOP/s of products. None: there are no such instructions."""

    read_gb_s: float
    int8_gop_s: float | None
    fp32_gop_s: float | None


@dataclass(slots=True)
class WorkTotals:
    """Demands of steps, added up, and seconds: from the plan to the end of the commit, and of these in the
    forward pass and the choice of tokens."""

    step_seconds: float = 0.0
    kernel_seconds: float = 0.0
    int8_operations: float = 0.0
    fp32_operations: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0

    def add(self, demand: Demand, step: float, kernels: float) -> None:
        """One more step, and its seconds."""
        self.step_seconds += step
        self.kernel_seconds += kernels
        self.int8_operations += demand.int8
        self.fp32_operations += demand.fp32
        self.weight_bytes += demand.weights
        self.kv_bytes += demand.kv

    def as_dict(self) -> dict[str, float]:
        """By name; empty before the first step that was counted."""
        return asdict(self) if self.step_seconds else {}

    def since(self, before: WorkTotals) -> WorkTotals:
        """What came after `before`."""
        return WorkTotals(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    def plus(self, more: WorkTotals) -> WorkTotals:
        """Both together."""
        return WorkTotals(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))

    @property
    def achieved(self) -> dict[str, float]:
        """By name as in Limits: GB/s read and GOP/s, over the time of steps. Empty without any."""
        if not self.step_seconds:
            return {}
        read, each = self.weight_bytes + self.kv_bytes, 1e-9 / self.step_seconds
        return {
            "read_gb_s": each * read,
            "int8_gop_s": each * self.int8_operations,
            "fp32_gop_s": each * self.fp32_operations,
        }

    def shares(self, limits: MachineLimits | None) -> dict[str, float]:
        """Of the time of steps, 0 to 1: what reading and what computing would have taken at the limits (both
        go on at once, so neither is added to the other), and what kernels took. What is not known is left
        out."""
        done = self.achieved
        if not done:
            return {}
        found = {"kernels": self.kernel_seconds / self.step_seconds}
        if limits is None:
            return found
        found["read"] = done["read_gb_s"] / limits.read_gb_s
        compute = 0.0
        for name, limit in (("int8_gop_s", limits.int8_gop_s), ("fp32_gop_s", limits.fp32_gop_s)):
            if done[name] and limit is None:
                return found
            compute += done[name] / limit if limit else 0.0
        return found | {"compute": compute}
