"""Sequences, plans and what comes of them: the vocabulary inside of an engine. Requests:
request.py.

Owns the one mutable thing, `Sequence`. Must not know how anything is scheduled or computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from pageturner.request import Failure, Logprob, PromptLogprob, Request
from pageturner.scheduler.store import Table


class State(Enum):
    """The state of a sequence; there is no state for prefill or decode, only `computed` and
    `tokens`."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class AdmissionEstimate(NamedTuple):
    """Full blocks that a running sequence may still take, kept from one step to the next.

    max_tokens  length of the sequence up to which it is valid
    num_blocks  len(Sequence.blocks) when it was made, and sharing: Store.sharing then; others make
                it stale
    """

    max_tokens: int
    num_blocks: int
    sharing: int
    blocks_needed: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One chain of tokens with its block table. Mutable, and only the Scheduler and its pool mutate
    it.

    tokens    prompt, then everything generated so far
    computed  how many of them have their KV in `blocks`
    blocks    block ids; block i holds positions i*block_size .. (i+1)*block_size-1
    sliding   with a sliding window, the block table of the layers that have one
    states    with recurrent layers, the slots of the states before each chunk of positions; few
              chunks have one, and the first needs none
    tail      with recurrent layers, the blocks of the rows of each chunk: only of the unfinished one
    branch    position up to which others had computed the same prompt, when it was attached
    draft     proposed tokens behind `tokens`, not yet verified
    num_cached_blocks  how many leading blocks the prefix cache can find by content
    block_keys  keys of its first full blocks, made when asked for; the first `keys_public` have no
                salt
    public    how many of its first blocks are unsalted pinned ones, which any sequence may share
    cached    prompt tokens whose KV came from the prefix cache, not counting what it had computed
              and lost
    max_computed_tokens  tokens that had KV before it was preempted or its engine died: computing
                         them again counts as recomputed
    recomputed  how many of those were computed once more
    scored    prompt positions whose logits became logprobs of the token behind them, from position
              0 on
    limit     the most tokens it may have, prompt and answer; fixed when it is taken
    inflight  tokens from `computed` on that the plans under way compute
    source    the sequence with the same prompt whose blocks it shares when it is admitted
    estimate  the last answer of pool.blocks_needed while it may still hold
    rank      (priority class, first admission), fixed then; the largest running rank is the victim.
              All sequences of a beam search share one rank, so they are preempted together
    """

    request: Request
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    sliding: Table = field(default_factory=Table)
    states: Table = field(default_factory=Table)
    tail: Table = field(default_factory=Table)
    branch: int = 0
    draft: list[int] = field(default_factory=list)
    num_cached_blocks: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    keys_public: int = 0
    public: int = 0
    cached: int = 0
    max_computed_tokens: int = 0
    recomputed: int = 0
    scored: int = 0
    limit: int = 0
    inflight: int = 0
    source: Sequence | None = None
    estimate: AdmissionEstimate | None = None
    rank: tuple[int, int] | None = None
    state: State = State.WAITING

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        """Tokens generated so far (a resumed choice counts what it had before)."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """The one gap: tokens whose KV is still to be computed, drafts included. Behind a plan
        under way that reaches the last one, it is the token that this is about to give, but for the
        last of the answer."""
        gap = len(self.tokens) + len(self.draft) - self.computed - self.inflight
        if gap > 0 or not self.inflight:
            return gap
        return int(gap == 0 and len(self.tokens) + 1 < self.limit)

    @property
    def logits_from(self) -> int | None:
        """The first prompt position whose logits are still wanted; None if there is none. The last
        position of the prompt gives the first token of the answer, and is none of them."""
        start = self.request.logits_from
        if start is None:
            return None
        start = max(start, self.scored)
        return start if start < len(self.request.prompt) - 1 else None

    def recompute(self, end: int) -> int:
        """It is about to be computed up to `end`: how much of it was computed before, and lost."""
        again = max(0, min(end, self.max_computed_tokens) - self.computed)
        self.recomputed += again
        return again


@dataclass(slots=True)  # not frozen: each sequence has one in each step, at a third of the cost
class Item:
    """Compute `n` tokens of `sequence` from position `start` on, which is `sequence.computed` when
    its turn comes. In a plan made ahead the token at `start` may be the one that the plan before it
    gives."""

    sequence: Sequence
    n: int
    start: int

    @property
    def wants_logits(self) -> bool:
        """True if this step reaches the last token, so that a next one can be chosen."""
        return self.start + self.n >= len(self.sequence.tokens)

    @property
    def drafted(self) -> int:
        """Draft tokens that this step verifies."""
        return max(0, self.start + self.n - max(len(self.sequence.tokens), self.start + 1))

    @property
    def scored(self) -> range:
        """Prompt positions of this step whose logits give the logprob of the token behind each."""
        sequence = self.sequence
        if sequence.request.logits_from is None or (start := sequence.logits_from) is None:
            return range(0)
        return range(start, min(self.start + self.n, sequence.prompt_len - 1))


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why no further sequence was admitted."""

    cause: str  # batching.WaitCause
    head: int = 0  # request at the head of the queue; 0: no sequence was asked for
    by: int = 0  # the request that has what the head lacks; 0 where it is not one


@dataclass(slots=True)
class Plan:
    """One step. Running it is idempotent until it is committed.

    copies     of each store of the pool, (source block, destination block) to copy before anything
               is written: copy-on-write
    wake       if nothing can run now: when to ask again; None: only after new input
    preempted  request ids that lost their blocks in this plan, and whom they gave way to
    ballast    (rows, context) of padding that static batching computes; results are dropped
    """

    items: list[Item] = field(default_factory=list)
    copies: list[list[tuple[int, int]]] = field(default_factory=list)
    wake: float | None = None
    preempted: dict[int, int] = field(default_factory=dict)
    wait_reason: WaitReason | None = None  # of the waiting sequences; None: none waits
    ballast: list[tuple[int, int]] = field(default_factory=list)
    at: float = 0.0  # when it was made

    @property
    def tokens(self) -> int:
        return sum(item.n for item in self.items) + sum(rows for rows, _ in self.ballast)


@dataclass(slots=True)
class Output:
    """The output of one item of a plan: [] in the middle of a prompt, one token, up to k+1 with
    drafts.

    chances  how likely each token of `draft` is right if those before it are, as its proposer says
    prompt_logprobs  one for each of the item's `scored` positions
    candidates  instead of a token, for a sequence of a search: the likeliest ones and their
                logprobs. Then `logprobs` has one value, whose likeliest tokens go with whichever
                goes on
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)  # one for each token, or none at all
    draft: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    failure: Failure | None = None
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    candidates: list[tuple[int, float]] = field(default_factory=list)
    pooled: tuple[int, bytes] | None = None  # as Event.pooled
    late: bool = False  # no token can be chosen yet: the step counts for nothing


@dataclass(slots=True)
class Result:
    """The result of a step.

    outputs  one for each item of its plan, in order
    spent    seconds by what else but the forward pass
    """

    outputs: list[Output] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
