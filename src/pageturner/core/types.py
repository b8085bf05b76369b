"""The values that flow between the rooms, and the one mutable thing, `Sequence`.

Owns the vocabulary of the engine. Must not know how anything is scheduled, computed or sent.
Lengths are in tokens, times in seconds of `time.monotonic()` (or of a simulated clock).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from pageturner.observe.work import Demand

TopLogprobs = tuple[tuple[int, float], ...]
Logprob = tuple[float, TopLogprobs]  # of the chosen token; of the most likely ones, best first
PromptLogprob = tuple[float, int, TopLogprobs]  # of the prompt's token; its rank, from 1; of the most likely


class Refused(Exception):
    """A request that the engine will not take, with a stable `code` and a sentence that says what to do.
    retry_after: seconds after which it would be taken, as far as can be known; 0: not known."""

    def __init__(self, code: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Field names as in vLLM.

    temperature  0 is greedy: the largest logit, the smallest id among equals.
    top_k        keep the k most likely tokens; 0 or -1 keeps all.
    top_p        then keep the smallest set whose renormalised probability reaches top_p.
    min_p        keep tokens at least min_p times as likely as the most likely one (before top_k and top_p).
    max_tokens   most tokens to generate; None: as many as the context has room for.
    min_tokens   the stop ids cannot be chosen before so many tokens were generated.
    stop         strings that end the text; decided by whoever owns the text, never by the engine.
    stop_ids     tokens that end the sequence, end-of-sequence included (resolved before the engine).
    logprobs     None: no logprobs; k: of the chosen token and of the k most likely ones (raw logits).
    seed         of the sampling noise; None is resolved to a drawn seed before the engine sees it.
    n            completions of one prompt; who owns the text makes one request of each (Request.parent).
    best_of      None, or how many to make, of which the n likeliest are kept: by the mean logprob of a token.

    repetition_penalty  over 1: logits of tokens in prompt or output become less likely, by x / p or x * p.
    presence_penalty    taken once from the logit of every token in the output;
    frequency_penalty   and this as often as the token is in it.
    logit_bias          token -> what is added to its logit, -100 to 100.
    bad_words           words that are never written; the owner of the text makes tokens of them:
    bad_words_token_ids the last token of each is forbidden right behind the others of it.
    allowed_token_ids   None, or all that may be chosen.
    prompt_logprobs     None, or as logprobs for every prompt token but the first.
    truncate_prompt_tokens      keep the last k tokens of the prompt; -1: as many as there is room for.
    include_stop_str_in_output  keep the stop string in the text.
    beam_width   0, or beam search over so many sequences: choice k is its k-th best answer, told at the end;
    length_penalty      the sum of an answer's logprobs is divided by its length ** length_penalty;
    early_stopping      True: it ends with beam_width answers; False: when a better one is unlikely; "never":
                        when none can be better (all three as in Transformers).
    structured_outputs  None, or what the answer must match: a grammar made by StructuredOutputsParams.
    speculation  whether an engine that drafts tokens may do so here; the answer is the same.
    force_ids    for measuring: the output begins with these tokens, whatever the model says. As forced_end.
    forced_end          for replaying a trace: the first of stop_ids is chosen as this token of the output, no
                        stop id before it. Only what chooses tokens may read it (docs/adr/0006).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    include_stop_str_in_output: bool = False
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    structured_outputs: str | None = None
    forced_end: int | None = None
    force_ids: tuple[int, ...] = ()
    speculation: bool = True


@dataclass(frozen=True, slots=True)
class Resume:
    """What one unfinished choice had already produced when its engine died or it was moved."""

    index: int
    tokens: tuple[int, ...]
    cum_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request for completions. Frozen; crosses processes."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    arrival: float = 0.0
    priority: int = 0  # smaller goes first
    deadline: float | None = None  # when the answer is worth nothing any more: it ends there, as it is
    ttft_target: float | None = None  # seconds from arrival until its first token should be there
    tpot_target: float | None = None  # seconds that a token after the first should take on average
    tenant: str = ""
    adapter: str = ""
    salt: str = ""  # keeps cached prefixes apart, all but what is pinned without one
    logits_from: int | None = None  # prompt position; attach stops here: cached positions have no logits
    resume: tuple[Resume, ...] = ()
    index: int = 0  # which of several choices of one prompt: part of what keys its noise
    pin: bool = False  # when it has ended, its whole blocks stay until they are unpinned
    parent: int | None = None  # id of the request of the first choice, whose prompt blocks this one shares


class State(Enum):
    """Where a sequence is; there is no state for prefill or decode, only `computed` and `tokens`."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One chain of tokens with its block table. Mutable, and only the Scheduler mutates it.

    tokens    prompt, then everything generated so far
    computed  how many of them have their KV in `blocks`
    blocks    block ids; block i holds positions i*block_size .. (i+1)*block_size-1
    sliding   with a sliding window, the block table of the layers that have one; its first `released` places
              are store.GONE: their blocks were given back, because no later query sees them
    draft     proposed tokens behind `tokens`, not yet verified
    sealed    how many leading blocks are findable by content
    public    how many of those it took, in spite of its salt, from what is everybody's
    cached    prompt tokens that the prefix cache gave and that were never computed for it
    reached   how many tokens had their KV when it last lost it, or in an engine before this one
    recomputed  how many of those were computed once more
    scored    prompt positions whose logits became logprobs of the token behind them, from position 0 on
    limit     the most tokens it may have, prompt and answer; fixed when it is taken
    source    the sequence with the same prompt whose blocks it shares when it is admitted
    rank      (priority class, first admission), fixed then; the largest running rank is the victim. Those of
              one search have one rank
    """

    request: Request
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    sliding: list[int] = field(default_factory=list)
    released: int = 0
    draft: list[int] = field(default_factory=list)
    sealed: int = 0
    public: int = 0
    cached: int = 0
    reached: int = 0
    recomputed: int = 0
    scored: int = 0
    limit: int = 0
    source: Sequence | None = None
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
        """The one gap: tokens whose KV is still to be computed, drafts included."""
        return len(self.tokens) + len(self.draft) - self.computed

    @property
    def logits_from(self) -> int | None:
        """The first prompt position whose logits are still wanted; None if there is none. The last position
        of the prompt gives the first token of the answer, and is none of them."""
        start = self.request.logits_from
        if start is None:
            return None
        start = max(start, self.scored)
        return start if start < len(self.request.prompt) - 1 else None


@dataclass(frozen=True, slots=True)
class Item:
    """Compute `n` tokens of `sequence` from position `sequence.computed` on."""

    sequence: Sequence
    n: int

    @property
    def wants_logits(self) -> bool:
        """Whether this step reaches the last token, so that a next one can be chosen."""
        return self.sequence.computed + self.n >= len(self.sequence.tokens)

    @property
    def drafted(self) -> int:
        """Draft tokens that this step verifies."""
        return max(0, self.sequence.computed + self.n - len(self.sequence.tokens))

    @property
    def scored(self) -> range:
        """Prompt positions of this step whose logits are wanted for the logprob of the token behind each."""
        sequence = self.sequence
        if sequence.request.logits_from is None or (start := sequence.logits_from) is None:
            return range(0)
        return range(start, min(sequence.computed + self.n, sequence.prompt_len - 1))


@dataclass(frozen=True, slots=True)
class WaitReason:
    """Why nobody more was let in (causes.py). head: request at the head of the queue, 0: nobody was asked;
    by: the request that has what the head lacks, 0 where it is not one."""

    cause: str
    head: int = 0
    by: int = 0


@dataclass(slots=True)
class Plan:
    """One step. Running it is idempotent until it is committed.

    copies     (source block, destination block) to copy before anything is written: copy-on-write
    sliding_copies  the same among the blocks of `Sequence.sliding`
    wake       if nothing can run now: when to ask again (None: only after new input)
    preempted  request ids that lost their blocks in this plan, and whom they gave way to
    gate       what those who wait are waiting for; None: nobody waits
    ballast    (rows, context) of padding that static batching computes; results are dropped
    at         when it was made
    """

    items: list[Item] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    sliding_copies: list[tuple[int, int]] = field(default_factory=list)
    wake: float | None = None
    preempted: dict[int, int] = field(default_factory=dict)
    wait_reason: WaitReason | None = None
    ballast: list[tuple[int, int]] = field(default_factory=list)
    at: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(item.n for item in self.items) + sum(rows for rows, _ in self.ballast)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one sequence ended without its answer. retry_after: as Refused has it."""

    code: str
    message: str
    retry_after: float = 0.0


EXPIRED = Failure("deadline_exceeded", "the deadline has passed before the answer was complete")


@dataclass(slots=True)
class Output:
    """What one item of a plan gave: [] in the middle of a prompt, one token, up to k+1 with drafts.

    prompt_logprobs  one for each of the item's `scored` positions
    candidates  instead of a token, for a sequence of a search: the likeliest ones and their logprobs. Then
                `logprobs` has one value, whose likeliest tokens are told with whichever goes on
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)  # one for each token, or none at all
    draft: list[int] = field(default_factory=list)
    failure: Failure | None = None
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    candidates: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Result:
    """What a step gave: one Output for each item of its plan, in order.

    spent   seconds by what else they went to than the forward pass, where that was measured
    demand  what had to be computed and read, where that was counted
    """

    outputs: list[Output] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)
    demand: Demand | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a request went, from `received` to `until`: the parts add up to that, in seconds.

    spans  (start, end, what, by): what it did when, and the request that it did it because of, or 0
    named  (part, request, seconds): who made it wait longest
    """

    received: float
    until: float
    parts: dict[str, float]
    spans: tuple[tuple[float, float, str, int], ...] = ()
    named: tuple[tuple[str, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """News of one choice of one request. `position` is absolute, so that delivering twice is harmless.

    position  of tokens[0] in the whole sequence (prompt included)
    finish    "stop" (a stop id, which is the last of `tokens`), "length", "abort", "error"
    cached    prompt tokens that came from the prefix cache
    recomputed  tokens computed once more by this engine, because their KV had been given up
    prompt_position  absolute, of the prompt token that prompt_logprobs[0] is of
    timings  with its end; whoever ends a request by `abort` is told them then
    """

    id: int
    index: int
    position: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish: str | None = None
    failure: Failure | None = None
    cached: int = 0
    recomputed: int = 0
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    prompt_position: int = 0
    timings: Timings | None = None
