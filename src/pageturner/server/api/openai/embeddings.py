"""/v1/embeddings: one row of numbers for each text.

Owns what is special to this API: its fields, and how rows are written. Must not know how a row is
computed (executor/pooling.py), nor what all APIs have in common (call.py, replies.py).
"""

from __future__ import annotations

import base64
import struct
from array import array
from dataclasses import replace
from typing import Any

import msgspec

from pageturner.server.admission.limits import RequestLimits
from pageturner.server.api.base.body import EmbeddingOptions, RequestBody, bad_request
from pageturner.server.api.base.call import Call
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.replies import InParts, Reply, ReplyShape, encode
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.base.translate import FIELD_MAPS, fields_within, value_of
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.server.api.openai import completions
from pageturner.text.output_stream import OutputStream

# of struct
ORDERS = {"native": "=", "little": "<", "big": ">"}
CODES = {"float32": "f", "float16": "e"}
OWN = EmbeddingOptions.__struct_fields__
_MAP = FIELD_MAPS["embeddings"]
FIELDS = msgspec.structs.replace(_MAP, taken=(*_MAP.taken, *OWN))


def decode(raw: bytes, limits: RequestLimits) -> RequestBody:
    """The fields of a body, as a completion of one token that nobody sees."""
    fields = fields_within(raw, "the body")
    if "input" not in fields:
        raise bad_request("missing_field", "input is missing", "input")
    ours = FIELDS.passed_on(fields)
    given = {name: value_of(fields, name, Any) for name in OWN if name in fields}
    try:
        own = msgspec.convert(given, EmbeddingOptions)
    except msgspec.ValidationError as error:
        message, _, name = str(error).partition(" - at `$.")
        name = name.rstrip("`") or "input"
        raise bad_request("invalid_value", f"{name}: {message}"[:400], name) from None
    body = FIELDS.to_openai_request(ours | {"prompt": fields["input"], "max_tokens": 1}, limits)
    body.embedding = own
    return body


def read_rows(body: RequestBody, served: ServedModel, pooling: str) -> Call:
    """A call whose prompts become rows, each pooled so."""
    call = completions.read(body, served)
    pooled = tuple(
        replace(one, pooling=pooling, temperature=0.0, stop_ids=()) for one in call.params
    )
    return replace(call, params=pooled, only_echoes=True)


@FIELDS.renames
def read(body: RequestBody, served: ServedModel) -> Call:
    """A call of /v1/embeddings."""
    return read_rows(body, served, (body.embedding or EmbeddingOptions()).pooling)


def whole(reply: Reply, streams: list[OutputStream], _: WholeAnswer) -> InParts[bytes]:
    """The rows, one for each text."""
    rows = []
    for i, stream in enumerate(streams):
        rows.append(msgspec.Raw(encode(_entry(reply, i, stream))))
        yield
    prompt = sum(len(stream.request.prompt) for stream in streams)
    used = {"prompt_tokens": prompt, "total_tokens": prompt}
    return encode(
        {"id": reply.id, "object": "list", "data": rows, "model": reply.model, "usage": used}
    )


def row_of(reply: Reply, stream: OutputStream) -> list[float]:
    """The row of a text, as the client wants it."""
    options = reply.call.body.embedding or EmbeddingOptions()
    wanted = options.dimensions
    most = len(stream.pooled.total)
    if wanted is not None and wanted > most:
        raise bad_request(
            "invalid_value", f"dimensions is {wanted}, and a row has {most}", "dimensions"
        )
    return stream.pooled.vector(options.pooling, normalize=options.normalize, dimensions=wanted)


def _entry(reply: Reply, index: int, stream: OutputStream) -> dict[str, Any]:
    options = reply.call.body.embedding or EmbeddingOptions()
    row = row_of(reply, stream)
    embedding: Any = array("f", row).tolist()
    if options.encoding_format == "base64":
        form = f"{ORDERS[options.endianness]}{len(row)}{CODES[options.embed_dtype]}"
        embedding = base64.b64encode(struct.pack(form, *row)).decode()
    return {"object": "embedding", "index": index, "embedding": embedding}


EMBEDDINGS = Dialect(
    id_prefix="embd",
    shape=ReplyShape("list"),
    read=read,
    whole=whole,
    decode=decode,
)
