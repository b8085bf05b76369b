"""Code that the answers of all APIs share: events, usage, and how a token becomes an event.

Owns those parts of the bytes that clients get. Must not know where tokens come from, nor what is
special to one API (completions.py, chat.py). A streamed token is put between parts that were
encoded once; only its text is encoded anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from pageturner.formats.tokenizer import Tokenizer
from pageturner.http import responses
from pageturner.http.responses import sse_event
from pageturner.request import Logprob
from pageturner.server.api.base.call import Call
from pageturner.server.api.base.usage import usage, usage_of
from pageturner.server.observability.timings import RequestName, report
from pageturner.text import parameters
from pageturner.text.answer_format import AnswerReader
from pageturner.text.output_stream import OutputPiece, OutputStream
from pageturner.text.receipt import Receipt

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # instead of -inf, which JSON has not
NOTHING: Mapping[str, Any] = MappingProxyType({})

TokenLogprob = tuple[int, Logprob | None]  # a token and what is known of it

AT_ONCE = 32  # tokens whose logprobs are written before others may go on

T = TypeVar("T")
encode = responses.encode
# something that is written in parts: between two of them others may go on
InParts = Generator[None, None, T]


def json_list(entries: Iterable[Any]) -> InParts[msgspec.Raw]:
    """A JSON list. The entries are made and written a few at once."""
    iterator, parts = iter(entries), []
    while batch := list(islice(iterator, AT_ONCE)):
        parts.append(encode(batch)[1:-1])
        yield
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def at_once(parts: InParts[T]) -> T:
    """All of it, for what is short."""
    try:
        while True:
            next(parts)
    except StopIteration as end:
        whole: T = end.value
        return whole


@dataclass(frozen=True, slots=True)
class ReplyShape:
    """The object name in the answers of an API, that of its chunks where it differs, and the place
    of the text in a chunk that says nothing else; None: no chunk is written so."""

    whole_object: str
    chunk_object: str = ""
    content: Callable[[str], dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class EventTemplate:
    """The event of a token that says nothing but its text: what stands before the text (for each
    choice) and behind it, encoded once."""

    before: tuple[bytes, ...]
    after: bytes

    def event(self, choice: int, text: str) -> bytes:
        return self.before[choice] + encode(text) + self.after


class Reply:
    """The answer to one call, as it is written. `id`, `created` and `model` are the same in all its
    parts.

    name      what the client knows other requests by; tenant: whose the answer is
    model     as answers name it
    logprobs  how many the client wants to see, None: none
    template  of the events of its tokens, where these say nothing but their text
    receipt   what it carries at its end, where the client wants one
    """

    def __init__(
        self,
        call: Call,
        shape: ReplyShape,
        *,
        id: str,
        created: int,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        name: RequestName = lambda _: None,
        tenant: str = "",
    ) -> None:
        self.call, self.id, self.model, self.tenant = call, id, model, tenant
        self.tokenizer = tokenizer
        self.logprobs = call.logprobs
        self.receipt: Receipt | None = None
        self._shape = shape
        self._head = {"id": id, "object": "", "created": created, "model": model}
        self._fingerprint = fingerprint
        self._name = name
        self._ids = bool(call.body.return_token_ids)
        options = call.options
        self._every_usage = bool(options.include_usage and options.continuous_usage_stats)
        self._begun: set[int] = set()  # choices
        self.readers: dict[int, AnswerReader] = {}  # of choices whose text is more than content
        self._state: object = None
        self.template = self._template()

    def state(self, kind: type[T]) -> T:
        """Return the dialect's own state for this answer, creating it on first use."""
        if not isinstance(self._state, kind):
            self._state = kind()
        return self._state

    def about(self) -> dict[str, Any]:
        """Return the metadata of the answer, which its receipt repeats."""
        return {**self._head, "object": self._shape.whole_object, "fingerprint": self._fingerprint}

    # -- the whole answer --------------------------------------------------------------------------
    def body(
        self,
        choices: list[dict[str, Any]],
        streams: list[OutputStream],
        more: Mapping[str, Any] = NOTHING,
    ) -> bytes:
        """An answer in one piece."""
        body = {
            **self._head,
            "object": self._shape.whole_object,
            "choices": choices,
            "usage": usage(streams, self.readers),
            **more,
        }
        if self.call.body.timings:
            body |= self._timings(streams)
        if self.receipt is not None:
            body["receipt"] = self.receipt
        return encode({**body, "system_fingerprint": self._fingerprint})

    def best(self, streams: list[OutputStream]) -> list[OutputStream]:
        """Return the likeliest `n` choices of each prompt if more were generated (`best_of`)."""
        made, kept = self.call.made, self.call.kept
        if made == kept:
            return streams
        found = []
        for first in range(0, len(streams), made):
            best = parameters.most_likely([s.logprobs for s in streams[first : first + made]], kept)
            found += [streams[first + i] for i in best]
        return found

    # -- events ------------------------------------------------------------------------------------
    def event(
        self,
        choices: list[dict[str, Any]],
        used: dict[str, Any] | None,
        more: Mapping[str, Any] = NOTHING,
    ) -> bytes:
        """One event of a streamed answer. used: its `usage`, None: it has none."""
        body = {
            **self._head,
            "object": self._shape.chunk_object or self._shape.whole_object,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }
        return sse_event(
            encode({**body, **more} if used is None else {**body, **more, "usage": used})
        )

    def begins(self, stream: OutputStream) -> bool:
        """Return whether nothing of this choice was written before. True only on the first call."""
        if stream.choice in self._begun:
            return False
        self._begun.add(stream.choice)
        return True

    def usage_so_far(self, stream: OutputStream, tokens: int) -> dict[str, Any] | None:
        """Return the usage of a choice after this many tokens; None unless the client wants usage
        in every event."""
        if not self._every_usage:
            return None
        return usage_of(len(stream.request.prompt), tokens, stream.cached)

    def last_usage(self, streams: list[OutputStream]) -> bytes:
        """The event of stream_options.include_usage: no choices, only usage."""
        return self.event([], usage(streams, self.readers))

    def last_timings(self, streams: list[OutputStream]) -> bytes:
        """The event of `timings`: no choices, only where the time went."""
        return self.event([], None, self._timings(streams))

    def last_receipt(self) -> bytes:
        """The event of `receipt`: no choices, only that."""
        return self.event([], None, {"receipt": self.receipt})

    def _timings(self, streams: list[OutputStream]) -> dict[str, Any]:
        """Return how the time of each choice was spent so far."""
        now = time.monotonic()
        return {
            "timings": [report(stream.choice, stream.times, now, self._name) for stream in streams]
        }

    def _template(self) -> EventTemplate | None:
        content = self._shape.content
        bare = self.logprobs is None and self.call.body.prompt_logprobs is None
        if content is None or self._ids or self._every_usage or not bare:
            return None
        before, after, mark = [], b"", "\x00"
        for index in range(len(self.call.prompts)):
            choice = {"index": index, **content(mark), "logprobs": None, "finish_reason": None}
            head, _, after = self.event([choice], None).partition(encode(mark))
            before.append(head)
        return EventTemplate(tuple(before), after)

    # -- prompt and tokens -------------------------------------------------------------------------
    def echo(self, stream: OutputStream) -> str:
        """The text of the prompt, where it stands in front of the answer."""
        return self.call.echoes[stream.choice] if self.call.echoes else ""

    def prompt_ids(self, stream: OutputStream) -> dict[str, Any]:
        return {"prompt_token_ids": stream.request.prompt} if self._ids else {}

    def token_ids(self, stream: OutputStream) -> dict[str, Any]:
        """Token ids of a whole answer, null where the client does not want them."""
        return {"token_ids": stream.tokens if self._ids else None, **self.prompt_ids(stream)}

    def piece_ids(self, piece: OutputPiece, prompt: bool) -> dict[str, Any]:
        """Token ids of one piece, where the client wants them, and those of the prompt."""
        if not self._ids:
            return {}
        ids: dict[str, Any] = {"token_ids": [] if piece.token is None else [piece.token]}
        return {**ids, **self.prompt_ids(piece.stream)} if prompt else ids

    def prompt_logprobs(self, stream: OutputStream) -> InParts[Mapping[str, Any]]:
        """`prompt_logprobs` in vLLM's shape: null for the first token, then token id -> what is
        known of it, the prompt's own token and the likeliest ones."""
        count = self.call.body.prompt_logprobs
        if count is None:
            return NOTHING
        return {"prompt_logprobs": (yield from json_list(self._prompt_entries(stream, count)))}

    def _prompt_entries(self, stream: OutputStream, count: int) -> Iterable[dict[str, Any] | None]:
        yield None
        prompt = stream.request.prompt[1:]
        for token, (value, rank, top) in zip(prompt, stream.prompt_logprobs, strict=True):
            likely = ((t, p, r) for r, (t, p) in enumerate(top[:count], 1))
            ranked = {t: (p, r) for t, p, r in ((token, value, rank), *likely)}
            yield {str(t): self._ranked(t, p, r) for t, (p, r) in ranked.items()}

    def _ranked(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = self.tokenizer.text_of(token)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    def top_logprobs(self, token: int, value: Logprob) -> Mapping[str, float]:
        """The chosen token and the most likely ones, as vLLM does. One with the same text as the
        chosen one, or as one that is likelier, stands under its id."""
        top: dict[str, float] = {}
        chosen = self.token_text(token)
        likely = {token: value[0], **dict(value[1])}
        for other, logprob in likely.items():
            text = self.token_text(other)
            if other != token and (text == chosen or text in top):
                text = f"token_id:{other}"
            top[text] = finite(logprob)
        return top

    def token_text(self, token: int) -> str:
        """Return the text of a single token, or its id where the client wants that."""
        if self.call.body.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self.tokenizer.text_of(token)


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)
