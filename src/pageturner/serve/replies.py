"""What clients get: the bytes of answers, chunks and errors.

Owns the shape of every JSON body and server-sent event, down to the byte. Must not know where tokens come
from. A streamed token is glued together from parts that were encoded once; only its text is encoded anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.responses import Response

from pageturner.core.types import Logprob
from pageturner.serve.open_streams import Outcome
from pageturner.serve.openai import Call
from pageturner.serve.timings import Name, report
from pageturner.text import parameters
from pageturner.text.detokenizer import Tokenizer, prompt_offsets, token_text
from pageturner.text.output_stream import OutputPiece, OutputStream

DONE = b"data: [DONE]\n\n"
FLOOR = -9999.0  # instead of -inf, which JSON has not
NOTHING: Mapping[str, Any] = MappingProxyType({})

Pair = tuple[int, Logprob | None]  # a token and what is known of it

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "PayloadTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

encode = msgspec.json.encode


def error(status: int, reason: str, message: str, param: str | None = None) -> bytes:
    """vLLM's error body (`code` is the status), and our own stable `reason`."""
    kind = TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return encode(
        {"error": {"message": message, "type": kind, "param": param, "code": status, "reason": reason}}
    )


def page(value: Any) -> Response:
    """An answer of one of the small endpoints."""
    return Response(encode(value), media_type="application/json")


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


def usage(streams: Iterable[OutputStream]) -> dict[str, Any]:
    """Tokens of all choices together. Each prompt counts once, for the first of its choices."""
    streams = list(streams)
    first = [stream for stream in streams if stream.request.index == 0]
    prompt = sum(len(stream.request.prompt) for stream in first)
    output = sum(len(stream.tokens) for stream in streams)
    used = _usage(prompt, output, sum(stream.cached for stream in first))
    again = sum(stream.recomputed for stream in streams)
    return used | {"recomputed_tokens": again} if again else used


def _usage(prompt: int, output: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Writer:
    """Writes the answer to one call. `id`, `created` and `model` are the same in all its parts."""

    def __init__(
        self,
        call: Call,
        id: str,
        created: int,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        name: Name = lambda _: None,
    ) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._head = {"id": id, "object": "", "created": created, "model": model}
        self._fingerprint = fingerprint
        self._name = name  # what the client knows other requests by
        self._timings = bool(call.body.timings)
        self._ids = bool(call.body.return_token_ids)
        self._logprobs = call.logprobs
        self._prompt_logprobs = call.body.prompt_logprobs
        self._every_usage = bool(call.options.continuous_usage_stats)
        plain = not (self._ids or self._every_usage)
        plain = plain and self._logprobs is None and self._prompt_logprobs is None
        self._before, self._after = self._template() if plain else ((), b"")
        self._begun = [False] * len(call.prompts)
        self._texts: dict[int, str] = {}  # of tokens that logprobs have shown

    # -- the whole answer ------------------------------------------------------------------------------------
    def whole(self, streams: list[OutputStream], outcome: Outcome) -> bytes:
        """The body of an answer that is not streamed."""
        chat = self._call.chat
        kind = "chat.completion" if chat else "text_completion"
        choices = [self._choice(i, stream, outcome) for i, stream in enumerate(self._kept(streams))]
        body = {**self._head, "object": kind, "choices": choices, "usage": usage(streams)}
        if chat:
            body |= self._prompt_part(streams[0])
        if self._timings:
            body |= self.timings(streams)
        return encode({**body, "system_fingerprint": self._fingerprint})

    def _kept(self, streams: list[OutputStream]) -> list[OutputStream]:
        """Of the choices of each prompt the likeliest, where more were made than are wanted."""
        made, kept = self._call.made, self._call.kept
        if made == kept:
            return streams
        found = []
        for first in range(0, len(streams), made):
            best = parameters.likeliest([s.logprobs for s in streams[first : first + made]], kept)
            found += [streams[first + i] for i in best]
        return found

    def _choice(self, index: int, stream: OutputStream, outcome: Outcome) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index}
        text = outcome.texts[stream.choice]
        if self._call.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = self._echo(stream) + text
        pairs, offsets = self._echoed(stream)
        pairs += zip(stream.tokens, stream.logprobs, strict=False)
        begin = len(self._echo(stream))
        offsets += [begin + offset for offset in outcome.offsets[stream.choice]]
        choice["logprobs"] = self._logprobs_of(pairs, offsets)
        choice["finish_reason"] = stream.finish
        choice["stop_reason"] = stream.stop_reason
        if not self._call.chat:
            choice |= self._prompt_part(stream)
        if self._ids:
            choice["token_ids"] = stream.tokens
            choice["prompt_token_ids"] = stream.request.prompt
        return choice

    # -- chunks ----------------------------------------------------------------------------------------------
    def chunks(self, piece: OutputPiece) -> bytes:
        """The events that one piece becomes: a chunk for its token; before the first one the role; after the
        last one of a chat the reason of its end."""
        chat, stream = self._call.chat, piece.stream
        parts = []
        if chat and not self._begun[stream.choice]:
            parts.append(self._role(stream))
        if piece.token is not None or piece.text or (piece.last and not chat):
            parts.append(self._token(piece))
        self._begun[stream.choice] = True
        if chat and piece.last:
            parts.append(self._chunk(stream, {"delta": {}}, None, piece, stream.finish, stream.stop_reason))
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def last_usage(self, streams: list[OutputStream]) -> bytes:
        """The event of stream_options.include_usage: no choices, only usage."""
        return self._event([], usage(streams))

    def timings(self, streams: list[OutputStream]) -> dict[str, Any]:
        """Where the time of each choice went until now."""
        now = time.monotonic()
        return {"timings": [report(stream.choice, stream.times, now, self._name) for stream in streams]}

    def last_timings(self, streams: list[OutputStream]) -> bytes:
        """The event of `timings`: no choices, only where the time went."""
        return self._event([], None, self.timings(streams))

    def _token(self, piece: OutputPiece) -> bytes:
        stream, chat = piece.stream, self._call.chat
        finish = stream.finish if piece.last and not chat else None
        first = not chat and not self._begun[stream.choice]
        text = self._echo(stream) + piece.text if first else piece.text
        if self._before and finish is None:
            return self._before[stream.choice] + encode(text) + self._after
        pairs, offsets = self._echoed(stream) if first else ([], [])
        if piece.token is not None and self._logprobs is not None:
            pairs.append((piece.token, stream.logprobs[piece.n - 1]))
            offsets.append(len(self._echo(stream)) + piece.offset)
        logprobs = self._logprobs_of(pairs, offsets) if pairs else None
        content: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        if first:
            content |= self._prompt_part(stream)
        reason = stream.stop_reason if finish else None
        return self._chunk(stream, content, logprobs, piece, finish, reason)

    def _role(self, stream: OutputStream) -> bytes:
        choice: dict[str, Any] = {
            "index": stream.choice,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._ids:
            choice["prompt_token_ids"] = stream.request.prompt
        nothing = _usage(len(stream.request.prompt), 0, stream.cached) if self._every_usage else None
        return self._event([choice], nothing, self._prompt_part(stream))

    def _chunk(
        self,
        stream: OutputStream,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None,
        piece: OutputPiece,
        finish: str | None,
        reason: str | int | None,
    ) -> bytes:
        choice = {"index": stream.choice, **content, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = reason
        if self._ids and content != {"delta": {}}:
            choice["token_ids"] = [] if piece.token is None else [piece.token]
            if not self._call.chat and not self._begun[stream.choice]:
                choice["prompt_token_ids"] = stream.request.prompt
        so_far = _usage(len(stream.request.prompt), piece.n, stream.cached) if self._every_usage else None
        return self._event([choice], so_far)

    def _event(
        self, choices: list[dict[str, Any]], used: dict[str, Any] | None, more: Mapping[str, Any] = NOTHING
    ) -> bytes:
        kind = "chat.completion.chunk" if self._call.chat else "text_completion"
        body = {**self._head, "object": kind, "system_fingerprint": self._fingerprint, "choices": choices}
        return event(encode({**body, **more} if used is None else {**body, **more, "usage": used}))

    def _template(self) -> tuple[tuple[bytes, ...], bytes]:
        """What comes before the text of a token (for each choice), and after it."""
        before, after = [], b""
        mark = "\x00"
        content: dict[str, Any] = {"delta": {"content": mark}} if self._call.chat else {"text": mark}
        for index in range(len(self._call.prompts)):
            choice = {"index": index, **content, "logprobs": None, "finish_reason": None}
            whole = self._event([choice], None)
            head, _, after = whole.partition(encode(mark))
            before.append(head)
        return tuple(before), after

    # -- logprobs --------------------------------------------------------------------------------------------
    def _logprobs_of(self, pairs: list[Pair], offsets: list[int]) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        if self._call.chat:
            return {"content": [self._chat_logprob(t, value) for t, value in pairs if value is not None]}
        return {
            "tokens": [self._text(token) for token, _ in pairs],
            "token_logprobs": [None if value is None else _finite(value[0]) for _, value in pairs],
            "top_logprobs": [None if value is None else self._top(token, value) for token, value in pairs],
            "text_offset": offsets,
        }

    def _echo(self, stream: OutputStream) -> str:
        return self._call.echoes[stream.choice] if self._call.echoes else ""

    def _echoed(self, stream: OutputStream) -> tuple[list[Pair], list[int]]:
        """Logprobs of an echoed prompt and where its tokens begin; nothing is known of the first token."""
        count, prompt = self._logprobs, stream.request.prompt
        if count is None or not self._call.echoes:
            return [], []
        values = [None, *((value, top[:count]) for value, _, top in stream.prompt_logprobs)]
        return list(zip(prompt, values, strict=True)), prompt_offsets(
            self._tokenizer, prompt, self._echo(stream)
        )

    def _prompt_part(self, stream: OutputStream) -> Mapping[str, Any]:
        """`prompt_logprobs` in vLLM's shape: null for the first token, then token id -> what is known of it,
        the prompt's own token and the likeliest ones."""
        count = self._prompt_logprobs
        if count is None:
            return NOTHING
        entries: list[dict[str, Any] | None] = [None]
        prompt = stream.request.prompt[1:]
        for token, (value, rank, top) in zip(prompt, stream.prompt_logprobs, strict=True):
            likely = ((t, p, r) for r, (t, p) in enumerate(top[:count], 1))
            ranked = {t: (p, r) for t, p, r in ((token, value, rank), *likely)}
            entries.append({str(t): self._ranked(t, p, r) for t, (p, r) in ranked.items()})
        return {"prompt_logprobs": entries}

    def _ranked(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(token)}

    def _chat_logprob(self, token: int, value: Logprob) -> dict[str, Any]:
        return {**self._entry(token, value[0]), "top_logprobs": [self._entry(t, p) for t, p in value[1]]}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    def _top(self, token: int, value: Logprob) -> Mapping[str, float]:
        """The most likely tokens and the chosen one, as vLLM does; of two with the same text the likelier."""
        top: dict[str, float] = {}
        for other, logprob in (*value[1], (token, value[0])):
            top.setdefault(self._text(other), _finite(logprob))
        return top

    def _text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = token_text(self._tokenizer, token)
        return text


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)
