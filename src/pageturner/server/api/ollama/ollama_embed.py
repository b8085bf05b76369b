"""/api/embed and /api/embeddings: Ollama's rows of numbers, the newer way and the older one.

Owns their fields and the shape of their answers. Must not know what a row is (embeddings.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from pageturner.server.admission.limits import RequestLimits
from pageturner.server.api.base.body import Count, EmbeddingOptions, RequestBody, bad_request
from pageturner.server.api.base.call import LONG_TOKEN, Call, check_model
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.replies import InParts, Reply, ReplyShape, encode
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.base.translate import FIELD_MAPS, FieldMap, Fields, fields_of, value_of
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.api.ollama.ollama import model_of
from pageturner.server.api.openai.embeddings import read_rows, row_of
from pageturner.text.output_stream import OutputStream


# -- requests --------------------------------------------------------------------------------------
def _options(fields: Fields, name: str) -> EmbeddingOptions:
    """The older way has neither dimensions nor a length of 1."""
    if name != "input":
        return EmbeddingOptions(normalize=False)
    return EmbeddingOptions(dimensions=value_of(fields, "dimensions", Count))


def _read(body: RequestBody, served: ServedModel) -> Call:
    check_model(body, served)
    if body.truncate_prompt_tokens is not None:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
        cut = [_cut(text, served) for text in texts]
        body = msgspec.structs.replace(body, prompt=cut, truncate_prompt_tokens=None)
    return read_rows(body, served, "mean")


def _cut(text: str, served: ServedModel) -> list[int]:
    """The beginning of a text, as many of its tokens as fit."""
    room = min(served.context - 1, served.capacity)
    beginning = text[: LONG_TOKEN * room]
    return served.tokenizer.encode(beginning, add_special=True, parse_special=True)[:room]


# -- answers ---------------------------------------------------------------------------------------
def whole_embed(reply: Reply, streams: list[OutputStream], _: WholeAnswer) -> InParts[bytes]:
    """The rows, and what they took, in nanoseconds."""
    rows = []
    for stream in streams:
        rows.append(row_of(reply, stream))
        yield
    took = int(1e9 * max(time.monotonic() - streams[0].times.arrival, 0.0))
    told = {"model": reply.model, "embeddings": rows, "total_duration": took, "load_duration": 0}
    return encode(
        told | {"prompt_eval_count": sum(len(stream.request.prompt) for stream in streams)}
    )


def whole_embeddings(reply: Reply, streams: list[OutputStream], _: WholeAnswer) -> InParts[bytes]:
    """The one row."""
    yield
    return encode({"embedding": row_of(reply, streams[0])})


def _dialect(
    name: str,
    id_prefix: str,
    whole: Callable[[Reply, list[OutputStream], WholeAnswer], InParts[bytes]],
) -> Dialect:
    """name: the field of the texts; whole: writes their rows."""
    taken = (*FIELD_MAPS["ollama rows"].taken, name, "truncate", "dimensions")
    fields_here = FieldMap(taken, names=dict.fromkeys(("prompt", "max_tokens"), name))

    def decode(raw: bytes, limits: RequestLimits) -> RequestBody:
        fields = fields_of(raw, limits)
        texts = value_of(fields, name, str | list[str] if name == "input" else str)
        if not texts:
            raise bad_request("missing_field", f"{name} is missing or empty", name)
        ours = fields_here.passed_on(fields)
        ours |= {"model": model_of(fields), "prompt": texts, "max_tokens": 1}
        body = fields_here.to_openai_request(ours, limits)
        body.embedding = _options(fields, name)
        if value_of(fields, "truncate", bool, True):
            body.truncate_prompt_tokens = -1  # which cuts their ends off here: see `_cut`
        return body

    return Dialect(
        id_prefix=id_prefix,
        shape=ReplyShape("list"),
        read=fields_here.renames(_read),
        whole=whole,
        decode=decode,
    )


OLLAMA_EMBED = _dialect("input", "embed", whole_embed)
OLLAMA_EMBEDDINGS = _dialect("prompt", "embeddings", whole_embeddings)
