"""/api/embed and /api/embeddings: Ollama's rows of numbers, the newer way and the older one.

Owns their fields and the shape of their answers. Must not know what a row is (embeddings.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from pageturner.server.admission.limits import RequestLimits
from pageturner.server.api.base.body import Count, EmbeddingOptions, RequestBody, bad_request
from pageturner.server.api.base.call import LONG_TOKEN, Call, check_model
from pageturner.server.api.base.dialect import Dialect, no_chunk
from pageturner.server.api.base.replies import InParts, Reply, ReplyShape, encode
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.base.translate import FieldMap, Fields, fields_of, value_of
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.api.ollama.ollama import LATEST
from pageturner.server.api.openai import completions
from pageturner.text.output_stream import OutputStream

# how a model is loaded, which is this server's own affair
PASSED_OVER = ("options", "keep_alive")


# -- requests --------------------------------------------------------------------------------------
def _decoder(name: str) -> Callable[[bytes, RequestLimits], RequestBody]:
    """name: the field of the texts."""

    def decode(raw: bytes, limits: RequestLimits) -> RequestBody:
        fields = fields_of(raw, limits)
        texts = value_of(fields, name, str | list[str] if name == "input" else str)
        if not texts:
            raise bad_request("missing_field", f"{name} is missing or empty", name)
        ours = field_map(name).passed_on(fields)
        model = value_of(fields, "model", str)
        ours |= {"model": model and model.removesuffix(LATEST), "prompt": texts, "max_tokens": 1}
        body = field_map(name).to_openai_request(ours, limits)
        body.embedding = _options(fields, name)
        if value_of(fields, "truncate", bool, True):
            body.truncate_prompt_tokens = -1  # which cuts their ends off here: see `_cut`
        return body

    return decode


def _options(fields: Fields, name: str) -> EmbeddingOptions:
    """The older way has neither dimensions nor a length of 1."""
    if name != "input":
        return EmbeddingOptions(normalize=False)
    return EmbeddingOptions(dimensions=value_of(fields, "dimensions", Count))


def field_map(name: str) -> FieldMap:
    """The fields of a body whose texts stand under this name."""
    taken = ("model", name, "truncate", "dimensions", *PASSED_OVER)
    return FieldMap(taken, names={"prompt": name, "max_tokens": name})


def _reader(name: str) -> Callable[[RequestBody, ServedModel], Call]:
    def read(body: RequestBody, served: ServedModel) -> Call:
        return field_map(name).renaming(lambda: _read(body, served))

    return read


def _read(body: RequestBody, served: ServedModel) -> Call:
    check_model(body, served)
    if body.truncate_prompt_tokens is not None:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
        cut = [_cut(text, served) for text in texts]
        body = msgspec.structs.replace(body, prompt=cut, truncate_prompt_tokens=None)
    call = completions.read(body, served)
    pooled = tuple(
        replace(one, pooling="mean", temperature=0.0, stop_ids=()) for one in call.params
    )
    return replace(call, params=pooled, only_echoes=True)


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
        rows.append(_row(reply, stream))
        yield
    took = int(1e9 * max(time.monotonic() - streams[0].times.arrival, 0.0))
    told = {"model": reply.model, "embeddings": rows, "total_duration": took, "load_duration": 0}
    return encode(
        told | {"prompt_eval_count": sum(len(stream.request.prompt) for stream in streams)}
    )


def whole_embeddings(reply: Reply, streams: list[OutputStream], _: WholeAnswer) -> InParts[bytes]:
    """The one row."""
    yield
    return encode({"embedding": _row(reply, streams[0])})


def _row(reply: Reply, stream: OutputStream) -> list[float]:
    options = reply.call.body.embedding or EmbeddingOptions()
    wanted, most = options.dimensions, len(stream.pooled.total)
    if wanted is not None and wanted > most:
        raise bad_request(
            "invalid_value", f"dimensions is {wanted}, and a row has {most}", "dimensions"
        )
    return stream.pooled.vector("mean", normalize=options.normalize, dimensions=wanted)


_SHAPE = ReplyShape(whole_object="list", chunk_object="list", content=lambda text: {"text": text})
OLLAMA_EMBED = Dialect(
    id_prefix="embed",
    shape=_SHAPE,
    read=_reader("input"),
    whole=whole_embed,
    chunk=no_chunk,
    decode=_decoder("input"),
)
OLLAMA_EMBEDDINGS = Dialect(
    id_prefix="embeddings",
    shape=_SHAPE,
    read=_reader("prompt"),
    whole=whole_embeddings,
    chunk=no_chunk,
    decode=_decoder("prompt"),
)
