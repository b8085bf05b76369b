"""The messages between processes: requests on their way in, events on their way out.

Owns their fields. Lengths are in tokens, times in seconds of `time.monotonic()` (or of a simulated
clock). Must not know how anything is scheduled, computed or sent. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pageturner.params import SamplingParams

POOLED_UNIT = 2.0**-24  # of Event.pooled
# the largest priority: whoever has it takes only what others leave of every step
BACKGROUND = 2**31 - 1
TopLogprobs = tuple[tuple[int, float], ...]
Logprob = tuple[float, TopLogprobs]  # of the chosen token; of the most likely ones, best first
PromptLogprob = tuple[
    float, int, TopLogprobs
]  # of the prompt's token; its rank, from 1; of the most likely


class Refused(Exception):
    """A request that the engine will not take, with a stable `code` and a sentence that says what
    to do. retry_after: seconds after which it would be taken, as far as can be known; 0: not
    known."""

    def __init__(self, code: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Resume:
    """The tokens that one unfinished choice had already produced when its engine died or it was
    moved."""

    index: int
    tokens: tuple[int, ...]
    cum_logprob: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionHint:
    """The hints that a turn of a conversation gives about the KV that it leaves behind.

    name       of the conversation, the only one on its server
    owner      whose share of the memory its KV counts against
    keep       seconds for which it is wanted behind the turn; 0: not at all
    next_in    seconds after which the next turn is expected; 0: nobody knows
    fork_of    name of a conversation that it goes on from; "" of none
    supersede  what was said before and is not in this prompt can be reached by no later turn
    release    this turn is the last one
    share      of what all sessions may keep, the most that its owner's may, 0 to 1; 0: an equal
               part
    """

    name: str
    owner: str = ""
    keep: float = 0.0
    next_in: float = 0.0
    fork_of: str = ""
    supersede: bool = False
    release: bool = False
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request for completions. Frozen; crosses processes."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = 0.0
    priority: int = 0  # smaller goes first
    deadline: float | None = (
        None  # when the answer is worth nothing any more: it ends there, as it is
    )
    ttft_target: float | None = None  # seconds from arrival until its first token should be there
    tpot_target: float | None = None  # seconds that a token after the first should take on average
    tenant: str = ""
    adapter: str = ""
    salt: str = ""  # keeps cached prefixes apart, all but what is pinned without one
    logits_from: int | None = (
        None  # prompt position; attach stops here: cached positions have no logits
    )
    resume: tuple[Resume, ...] = ()
    index: int = 0  # which of several choices of one prompt: part of what keys its noise
    row_price: float = (
        0.0  # tokens of a step's budget that a row of its logits costs beside its own token
    )
    pin: bool = False  # when it has ended, its whole blocks stay until they are unpinned
    parent: int | None = (
        None  # id of the request of the first choice, whose prompt blocks this one shares
    )
    session: SessionHint | None = None  # the conversation whose turn it is


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one sequence ended without its answer. retry_after: as Refused has it."""

    code: str
    message: str
    retry_after: float = 0.0


EXPIRED = Failure("deadline_exceeded", "the deadline has passed before the answer was complete")


@dataclass(frozen=True, slots=True)
class Timings:
    """The parts of a request's time from `received` to `until`: they add up to that, in seconds.

    spans  (start, end, what, by): what it did when, and the request that it did it because of, or 0
    named  (part, request, seconds): who made it wait longest
    """

    received: float
    until: float
    parts: dict[str, float]
    spans: tuple[tuple[float, float, str, int], ...] = ()
    named: tuple[tuple[str, int, float], ...] = ()


@dataclass(slots=True)  # not frozen: one is made for every token, at a quarter of the cost
class Event:
    """News of one choice of one request. `position` is absolute, so that delivering twice is
    harmless.

    position  of tokens[0] in the whole sequence (prompt included)
    finish    "stop" (a stop id, which is the last of `tokens`), "length", "abort", "error"
    cached    prompt tokens that came from the prefix cache
    recomputed  tokens computed once more by this engine, because their KV had been given up
    prompt_position  absolute, of the prompt token that prompt_logprobs[0] is of
    pooled  prompt positions from prompt_position - 1 on, and the sum of what they give to the
            pooled row: d whole numbers of 64 bits, in units of POOLED_UNIT; none: it is zero
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
    pooled: tuple[int, bytes] | None = None
    timings: Timings | None = None
