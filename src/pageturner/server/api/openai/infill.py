"""/infill: llama.cpp's API for the text in a gap, which editors ask for.

Owns its fields and options, and the shape of its answers. Must not know what a gap's prompt is
(text/fim.py), nor what all APIs have in common (call.py, replies.py).
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from pageturner.errors import ClientError
from pageturner.http.error_responses import error_body
from pageturner.http.responses import sse_event
from pageturner.server.admission.limits import RequestLimits
from pageturner.server.api.base.body import NOT_JSON, ExtraFile, RequestBody, bad_request
from pageturner.server.api.base.dialect import Dialect, no_end
from pageturner.server.api.base.replies import InParts, Reply, ReplyShape, encode
from pageturner.server.api.base.translate import FIELD_MAPS, Fields, fields_of, value_of
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.api.openai.fim import read_gap
from pageturner.text.output_stream import OutputPiece, OutputStream

FIELDS = FIELD_MAPS["infill"]
STOP_TYPES = {"length": "limit", "stop": "eos"}


# -- requests --------------------------------------------------------------------------------------
def decode(raw: bytes, limits: RequestLimits) -> RequestBody:
    """The fields of a body, as a prompt and a suffix."""
    fields = fields_of(raw, limits)
    ours = FIELDS.passed_on(fields)
    prefix, typed = value_of(fields, "input_prefix", str, ""), value_of(fields, "prompt", str, "")
    extra = _extra(fields)
    for name, unset in (("n_predict", -1), ("seed", -1)):  # as long as there is room; drawn
        if value_of(fields, name, int | float) == unset:
            ours.pop(FIELDS.options.get(name, name), None)
    ours |= {"prompt": prefix + typed, "suffix": value_of(fields, "input_suffix", str, "")}
    body = FIELDS.to_openai_request(ours, limits)
    body.extra = extra
    return body


def _extra(fields: Fields) -> list[ExtraFile]:
    if "input_extra" not in fields:
        return []
    try:
        return msgspec.json.decode(fields["input_extra"], type=list[ExtraFile])
    except NOT_JSON as error:
        message = f"input_extra is a list of objects with a text and a filename: {error}"[:400]
        raise bad_request("invalid_type", message, "input_extra") from None


# -- answers ---------------------------------------------------------------------------------------
def _about(reply: Reply, stream: OutputStream, text: str) -> dict[str, Any]:
    """Return the last event, which describes the whole answer. text: the text of this event."""
    times, now, prompt = stream.times, time.monotonic(), len(stream.request.prompt)
    first, made = times.first_at or now, len(stream.tokens)
    word = stream.stop_reason if isinstance(stream.stop_reason, str) else ""
    return {
        "index": 0,
        "content": text,
        "tokens": [],
        "id_slot": 0,
        "stop": True,
        "model": reply.model,
        "tokens_predicted": made,
        "tokens_evaluated": prompt,
        "truncated": False,
        "stop_type": "word" if word else STOP_TYPES.get(stream.finish or "", "none"),
        "stopping_word": word,
        "tokens_cached": stream.cached,
        "timings": {
            "cache_n": stream.cached,
            "prompt_n": prompt - stream.cached,
            **_pace("prompt", prompt - stream.cached, first - times.arrival),
            "predicted_n": made,
            **_pace("predicted", made, now - first),
        },
    }


def _pace(name: str, tokens: int, seconds: float) -> dict[str, float]:
    ms = max(seconds, 0.0) * 1e3
    per_token, per_second = ms / tokens if tokens else 0.0, 1e3 * tokens / ms if ms else 0.0
    return {f"{name}_ms": ms, f"{name}_per_token_ms": per_token, f"{name}_per_second": per_second}


def whole(reply: Reply, streams: list[OutputStream], answer: WholeAnswer) -> InParts[bytes]:
    """The body of an answer that is not streamed."""
    yield
    return encode(_about(reply, streams[0], answer.texts[0]))


def chunk(reply: Reply, piece: OutputPiece) -> bytes:
    """The events of one piece."""
    parts = []
    if piece.text:
        told = {"index": 0, "content": piece.text, "tokens": [], "stop": False, "id_slot": 0}
        counts = {"tokens_predicted": piece.n, "tokens_evaluated": len(piece.stream.request.prompt)}
        parts.append(sse_event(encode(told | counts)))
    if piece.last:
        parts.append(sse_event(encode(_about(reply, piece.stream, ""))))
    return b"".join(parts)


def failed(_: Reply, error: ClientError) -> bytes:
    """The event of a failure in the middle."""
    return sse_event(error_body(error.status, error.code, error.message))


INFILL = Dialect(
    id_prefix="infill",
    shape=ReplyShape("infill"),
    read=FIELDS.renames(read_gap),
    whole=whole,
    chunk=chunk,
    failed=failed,
    end=no_end,
    decode=decode,
)
