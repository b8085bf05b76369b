"""One answer that is being made: its request, its tokens and text so far, and what ended it.

Owns how an engine's event becomes text: repeats dropped by absolute position, stop strings, the
reason of the end. Must not know sockets, processes, metrics or the shape of an HTTP answer; llm.py
uses it just as the server does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from pageturner.formats.tokenizer import Tokenizer
from pageturner.request import Event, Failure, Logprob, PromptLogprob, Request, Resume, Timings
from pageturner.text.answer_format import AnswerFormat
from pageturner.text.detokenizer import Detokenizer
from pageturner.text.pooled_sum import PooledSum


class StreamGap(Exception):
    """The engine skipped a position: it cannot be trusted any more."""


class OutputPiece(NamedTuple):
    """The addition of one token to the answer.

    token   None when a stream ends without one (failure, or text that was held back)
    n       tokens of the stream up to and including this one
    offset  characters decoded before this token (stop strings not considered)
    last    nothing comes after it; `stream.finish` or `stream.failure` says why
    """

    stream: OutputStream
    text: str
    token: int | None
    n: int
    offset: int
    last: bool


class OutputSink(Protocol):
    """Takes the pieces of one answer. Never blocks."""

    def put(self, piece: OutputPiece) -> None: ...


@dataclass(slots=True)
class StreamTimes:
    """The times of the stages of one answer, in seconds of one clock; 0: not yet.

    arrival       its first byte came
    submitted_at  it was handed to its first engine
    engines       that it was submitted to, one after another
    first_at, last_at   its tokens came
    timings       what its last engine says of where the time went; known when it has ended
    """

    arrival: float
    submitted_at: float = 0.0
    engines: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    timings: Timings | None = None


@dataclass(slots=True, eq=False)
class OutputStream:
    """One choice of one answer. `request` carries a resolved seed; `choice` is its index in the
    answer.

    hidden           tokens at its end that are no part of its text: 1 behind a stop id
    silent           the answer is the prompt alone (max_tokens 0): the engine's one token is
                     dropped
    prompt_logprobs  of the prompt's tokens from the second one on
    """

    request: Request
    choice: int
    detokenizer: Detokenizer
    sink: OutputSink
    times: StreamTimes
    eos_ids: tuple[int, ...] = ()  # stop ids that are no `stop_reason`: the sequence simply ended
    silent: bool = False
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    pooled: PooledSum = field(default_factory=PooledSum)
    logprobs: list[Logprob] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    failure: Failure | None = None
    cached: int = 0
    hidden: int = 0
    recomputed: int = 0
    _recomputed_before: int = 0  # by engines that are no more

    def resumable(self) -> Request:
        """The request with everything it has produced: what a new engine needs to go on."""
        request, self._recomputed_before = self.request, self.recomputed
        if known := len(self.prompt_logprobs) or self.pooled.positions:
            request = replace(request, logits_from=known)
        if not self.tokens:
            return request
        return replace(request, resume=(Resume(request.index, tuple(self.tokens)),))

    def add_event(self, event: Event, now: float) -> None:
        """Add what is new in `event`; `done` says whether that was all. Gap if tokens are
        missing."""
        known = len(self.request.prompt) + len(self.tokens) - event.position
        if known < 0:
            raise StreamGap(
                f"request {self.request.id}: position {event.position} came {-known} too early"
            )
        self.cached = max(self.cached, event.cached)
        self.recomputed = self._recomputed_before + event.recomputed
        self.times.timings = event.timings or self.times.timings
        self._score(event)
        fresh = event.tokens[known:]
        if self.silent and fresh:
            self.finish = "length"
            self._put(n=0, offset=0, last=True)
            return
        for i, token in enumerate(fresh, known + 1):
            if self.request.params.logprobs is not None:
                self.logprobs.append(event.logprobs[i - 1])
            self._push(token, event.finish if i == len(event.tokens) else None, now)
            if self.finish is not None:
                return
        if event.finish is not None and not fresh:
            self._end(event)

    def _score(self, event: Event) -> None:
        """Add what is new of the prompt's logprobs, or of its rows: all of that comes before a
        token."""
        if event.pooled is not None and self.pooled.positions == event.prompt_position - 1:
            self.pooled.add(*event.pooled)
        if event.prompt_logprobs:
            known = len(self.prompt_logprobs) + 1 - event.prompt_position
            if known < 0:
                raise StreamGap(
                    f"request {self.request.id}: prompt logprobs came {-known} positions too early"
                )
            self.prompt_logprobs += event.prompt_logprobs[known:]
        scored_whole = event.tokens or event.finish in ("stop", "length")
        if scored_whole and self.request.logits_from is not None:
            scored = max(len(self.prompt_logprobs), self.pooled.positions - 1)
            missing = len(self.request.prompt) - 1 - scored
            if missing:
                raise StreamGap(f"request {self.request.id}: {missing} prompt logprobs are missing")

    @property
    def done(self) -> bool:
        return self.finish is not None or self.failure is not None

    def fail(self, failure: Failure) -> None:
        """End the stream without its answer."""
        self.failure = failure
        self._put(n=len(self.tokens), offset=self.detokenizer.decoded, last=True)

    def _put(
        self, *, n: int, offset: int, last: bool, text: str = "", token: int | None = None
    ) -> None:
        self.sink.put(
            OutputPiece(stream=self, text=text, token=token, n=n, offset=offset, last=last)
        )

    def _push(self, token: int, finish: str | None, now: float) -> None:
        """One token. A stop token is counted, and shown only where stops are, as in vLLM."""
        if not self.tokens:
            self.times.first_at = now
        self.times.last_at = now
        self.tokens.append(token)
        offset = self.detokenizer.decoded
        hides = not self.request.params.include_stop_str_in_output
        self.hidden = int(hides and finish == "stop")
        text = "" if self.hidden else self.detokenizer.push(token)
        if self.detokenizer.stopped is None and finish is not None:
            text += self.detokenizer.finish()
            self.finish = finish
            if finish == "stop" and token not in self.eos_ids:
                self.stop_reason = token
        if self.detokenizer.stopped is not None:
            self.finish, self.stop_reason = "stop", self.detokenizer.stopped
            self.hidden = int(hides and self.stop_reason == token)
        last = self.finish is not None
        self._put(text=text, token=token, n=len(self.tokens), offset=offset, last=last)

    def _end(self, event: Event) -> None:
        """The engine ends a stream without a new token."""
        if event.failure is not None or event.finish in ("error", "abort"):
            self.fail(event.failure or Failure("aborted", "the engine gave up the request"))
            return
        text = self.detokenizer.finish()
        self.finish = event.finish
        self._put(text=text, n=len(self.tokens), offset=self.detokenizer.decoded, last=True)


def output_streams(
    first: Request,
    sinks: Sequence[OutputSink],
    ids: Iterator[int],
    tokenizer: Tokenizer,
    *,
    choice: int = 0,
    skip_special: bool = True,
    silent: bool = False,
    answer: AnswerFormat | None = None,
) -> list[OutputStream]:
    """The streams of all answers to one prompt, one for each sink: requests, text and times put
    together.

    first     the request of the first answer; those of the others are made from it, and it is their
              parent
    ids       gives the ids of the others
    choice    index of the first answer among all that the client gets
    skip_special, silent, answer   as in Detokenizer and OutputStream
    """
    params = first.params
    if params.prompt_logprobs is not None or params.pooling in ("mean", "cls"):
        first = replace(first, logits_from=0)
    others = [replace(first, id=next(ids), index=i, parent=first.id) for i in range(1, len(sinks))]
    streams = []
    for request, sink in zip((first, *others), sinks, strict=True):
        detokenizer = Detokenizer(
            tokenizer,
            params.stop,
            min_tokens=params.min_tokens,
            skip_special=skip_special,
            include_stop=params.include_stop_str_in_output,
            answer=answer,
        )
        stream = OutputStream(
            request=request,
            choice=choice + request.index,
            detokenizer=detokenizer,
            sink=sink,
            times=StreamTimes(first.arrival),
            eos_ids=() if params.ignore_eos else tokenizer.eos_ids,
            silent=silent,
        )
        streams.append(stream)
    return streams
