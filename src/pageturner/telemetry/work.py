"""The work of a step, what it computes and reads: counted once, from its plan, for everybody who
wants to know.

Owns the counts of a step, what a model costs for each of them, and their sums. Must not know where
a model's numbers come from (executor/model_costs.py), nor how a machine's limits are measured. A
multiply or an add is one operation, a byte counts once however often it is read. Counted are matrix
products and attention: all else is small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from pageturner.scheduler.types import Item, Plan

STEP_SIZES = (1, 8, *(1 << i for i in range(4, 15)))  # vLLM's buckets, in tokens

Span = tuple[int, int]  # (tokens of a sequence computed before the step, tokens computed in it)


class StepWork(NamedTuple):
    """The work of one step. Padding (Plan.ballast) counts like sequences.

    tokens       rows of the step
    sequences    whose rows these are
    logits       rows whose logits are computed: the last token of a sequence, each draft token
                 behind it, and prompt positions whose logprobs are wanted
    context      positions whose keys and values are read, each once for each sequence that looks at
                 them
    pairs        (query, position) pairs of attention
    window_context, window_pairs   context and pairs of the layers that see only the last `window`
                                   positions; 0 where there are no such layers
    """

    tokens: int
    sequences: int
    logits: int
    context: int
    pairs: int
    window_context: int = 0
    window_pairs: int = 0

    def plus(self, more: StepWork) -> StepWork:
        return StepWork(*(a + b for a, b in zip(self, more, strict=True)))

    def minus(self, less: StepWork) -> StepWork:
        return StepWork(*(a - b for a, b in zip(self, less, strict=True)))


def work_of(plan: Plan, window: int = 0) -> StepWork:
    """The work of a plan that was not committed yet.

    window  how many positions the layers with a sliding window see; 0: there are none

    The engine calls this in every step, so the common case, sequences that compute their last
    token, does little for each of them.
    """
    longer: list[Item] = []
    context = 0
    for item in plan.items:
        end = item.start + 1
        if item.n == 1 and end >= len(item.sequence.tokens):  # beyond them: made ahead
            context += end
        else:
            longer.append(item)
    decoding = len(plan.items) - len(longer)
    work = StepWork(decoding, decoding, decoding, context, context)
    if longer or plan.ballast:
        spans = [(item.start, item.n) for item in longer] + spans_of_ballast(plan.ballast)
        work = work.plus(work_of_spans(spans, sum(map(_logits_rows, longer))))
    if window:
        spans = [(item.start, item.n) for item in plan.items] + spans_of_ballast(plan.ballast)
        seen, pairs = _seen_through(window, spans)
        work = work._replace(window_context=seen, window_pairs=pairs)
    return work


def _logits_rows(item: Item) -> int:
    behind = item.start + item.n - len(item.sequence.tokens)  # draft tokens
    return max(0, behind + 1) + (0 if item.sequence.request.params.pooling else len(item.scored))


def work_of_spans(spans: Iterable[Span], logits: int, window: int = 0) -> StepWork:
    """The work of sequences of which only these numbers are known."""
    spans = list(spans)
    return StepWork(
        sum(n for _, n in spans),
        len(spans),
        logits,
        sum(begin + n for begin, n in spans),
        sum(n * begin + n * (n + 1) // 2 for begin, n in spans),
        *(_seen_through(window, spans) if window else (0, 0)),
    )


def spans_of_ballast(ballast: Iterable[tuple[int, int]]) -> list[Span]:
    """(rows, context) of padding: the last rows of a sequence that is `context` tokens long."""
    return [(context - rows, rows) for rows, context in ballast]


def _seen_through(window: int, spans: Iterable[Span]) -> tuple[int, int]:
    """Context and pairs where the query at position p sees p and the window - 1 positions before
    it."""
    context = pairs = 0
    for begin, n in spans:
        end = begin + n
        context += min(end, n + window - 1)
        pairs += n * begin + n * (n + 1) // 2
        first, last = (
            max(begin + 1 - window, 1),
            end - window,
        )  # positions hidden from first and last query
        if last >= first:
            pairs -= (first + last) * (last - first + 1) // 2
    return context, pairs


class StepDemand(NamedTuple):
    """The least that a step must do: operations by type, bytes to be read."""

    int8: float
    fp32: float
    weights: float
    kv: float


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The costs of the steps of one model: operations and bytes for each row, logits row and
    position.

    int8, fp32   operations of one row in the products of all layers
    layers       bytes of the matrices of these products, without experts
    ending_...   the same of what only rows that get logits go through: the last layer behind its
                 keys and values, and the output head
    experts      bytes of all experts, of which a row reads the share `chosen`
    pair         operations of one (query, position) pair in all layers; position: bytes of its KV
                 in these
    recent_pair, recent_position   the same of the layers that see only `window` positions; 0: there
                                   are none

    Step logs and calibrations hold these by their names, so the names stay.
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
        """Bytes of weights that a step reads: of the experts those that some row is likely sent
        to."""
        experts = self.experts * (1 - (1 - self.chosen) ** rows) if self.experts else 0.0
        return self.layers + experts + (self.ending if logits else 0.0)

    def demand(self, work: StepWork) -> StepDemand:
        """Return what a step with this work, counted with this model's window, must do."""
        rows, logits = work.tokens, work.logits
        attention = self.pair * work.pairs + self.recent_pair * work.window_pairs
        return StepDemand(
            self.int8 * rows + self.ending_int8 * logits,
            self.fp32 * rows + self.ending_fp32 * logits + attention,
            self.weight_bytes(rows, logits),
            self.position * work.context + self.recent_position * work.window_context,
        )


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """The limits of a machine: GB/s of reading weights, GOP/s of products; None: no such
    instructions."""

    read_gb_s: float
    int8_gop_s: float | None
    fp32_gop_s: float | None


@dataclass(slots=True)
class WorkTotals:
    """Sums over steps: what they had to do, and their seconds, from the plan to the end of the
    commit (step_seconds) and in the forward pass and the choice of tokens alone
    (kernel_seconds)."""

    step_seconds: float = 0.0
    kernel_seconds: float = 0.0
    int8_operations: float = 0.0
    fp32_operations: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0

    def add(self, demand: StepDemand, step: float, kernels: float) -> None:
        """One more step, and its seconds."""
        self.step_seconds += step
        self.kernel_seconds += kernels
        self.int8_operations += demand.int8
        self.fp32_operations += demand.fp32
        self.weight_bytes += demand.weights
        self.kv_bytes += demand.kv

    def as_dict(self) -> dict[str, float]:
        """Return the sums by name; empty before the first step that was counted."""
        return asdict(self) if self.step_seconds else {}

    def since(self, before: WorkTotals) -> WorkTotals:
        """Return what came after `before`."""
        return WorkTotals(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    def plus(self, more: WorkTotals) -> WorkTotals:
        """Both together."""
        return WorkTotals(*(getattr(self, f.name) + getattr(more, f.name) for f in fields(self)))

    @property
    def achieved(self) -> dict[str, float]:
        """Rates by name as in MachineLimits: GB/s read and GOP/s, over the time of steps. Empty
        without any."""
        if not self.step_seconds:
            return {}
        read, each = self.weight_bytes + self.kv_bytes, 1e-9 / self.step_seconds
        return {
            "read_gb_s": each * read,
            "int8_gop_s": each * self.int8_operations,
            "fp32_gop_s": each * self.fp32_operations,
        }

    def shares(self, limits: MachineLimits | None) -> dict[str, float]:
        """Return shares of the time of steps, 0 to 1: what reading and what computing would have
        taken at the limits (both go on at once, so neither is added to the other), and what kernels
        took. What is not known is left out."""
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
