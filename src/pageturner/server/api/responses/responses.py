"""/v1/responses: OpenAI's API of items, for text, tools and thoughts.

Owns its fields. Must not know what all APIs have in common (call.py, replies.py), its items and
tools (response_items.py), how its answers are written (response_writer.py), nor how they are kept
and gone back to (response_store.py, responses_pages.py).
"""

from __future__ import annotations

from typing import Any

from pageturner.server.admission.limits import RequestLimits
from pageturner.server.api.base.body import RequestBody, bad_request
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.replies import ReplyShape
from pageturner.server.api.base.translate import FIELD_MAPS, Fields, fields_of, value_of
from pageturner.server.api.openai import chat
from pageturner.server.api.responses.response_items import conversation, tool_fields
from pageturner.server.api.responses.response_store import ResponseStore
from pageturner.server.api.responses.response_writer import ResponseWriter

FIELDS = FIELD_MAPS["responses"]
LOGPROBS = "message.output_text.logprobs"


# -- requests --------------------------------------------------------------------------------------
def decode(raw: bytes, limits: RequestLimits) -> RequestBody:
    """The fields of a body, as a chat. Whatever went before stands in its `input` already."""
    fields = fields_of(raw, limits)
    ours = FIELDS.passed_on(fields)
    if LOGPROBS in value_of(fields, "include", list[str], []):
        raise bad_request(
            "unsupported_parameter", f"include: {LOGPROBS} is not supported yet", "include"
        )
    if (form := _format(fields)) is not None:
        ours["response_format"] = form
    effort = value_of(fields, "reasoning", dict[str, Any], {}).get("effort")
    ours |= {} if effort is None else {"reasoning_effort": effort}
    ours |= tool_fields(fields) | {"messages": conversation(fields)}
    return FIELDS.to_openai_request(ours, limits)


def _format(fields: Fields) -> dict[str, Any] | None:
    """`response_format` as chats have it."""
    wanted = value_of(fields, "text", dict[str, Any], {}).get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise bad_request("invalid_type", "text.format must be an object", "text.format")
    if wanted.get("type") != "json_schema":
        return wanted
    if "schema" not in wanted:
        form = '{"type": "json_schema", "name": ..., "schema": {...}}'
        raise bad_request(
            "invalid_schema", f"text.format has no schema: send {form}", "text.format"
        )
    named = {"schema": wanted["schema"], "strict": wanted.get("strict")}
    return {"type": "json_schema", "json_schema": named}


def dialect_of(store: ResponseStore) -> Dialect:
    """The dialect for requests that this store knows."""
    writer = ResponseWriter(store)
    return Dialect(
        id_prefix="resp",
        shape=ReplyShape("response"),
        read=FIELDS.renames(chat.read),
        whole=writer.whole,
        chunk=writer.chunk,
        begin=writer.begin,
        failed=writer.failed,
        end=writer.end,
        separator="_",
        decode=decode,
    )


RESPONSES = dialect_of(ResponseStore(0))  # for whoever only reads requests
