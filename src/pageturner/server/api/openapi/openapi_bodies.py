"""The bodies that requests may have, as JSON Schema: of each API its fields, and what is within them.

Owns which API takes which fields, and the forms of conversations, tools and formats of answers. Names come
from the tables by which requests are read (TAKEN, NEUTRAL, EXTRAS ... of each dialect), bounds from
field_table.py; what a dialect has of its own is said here and held against its check by a test. Must not know
paths (openapi_operations.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pageturner.http.json_schemas import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    Schema,
    array,
    nullable,
    of_struct,
    one_of,
    record,
    ref,
)
from pageturner.params import LIMITS
from pageturner.server.api.anthropic import anthropic_fields, messages
from pageturner.server.api.base.answer_grammar import formats_of
from pageturner.server.api.base.body import DIALECTS_OWN, UNSUPPORTED, EmbeddingOptions, RequestBody
from pageturner.server.api.base.call import ServedModel
from pageturner.server.api.base.field_table import (
    field_schemas,
    neutral_schemas,
    of_chats,
    of_completions,
    prompt_schema,
)
from pageturner.server.api.base.translate import EXTRAS
from pageturner.server.api.ollama import ollama
from pageturner.server.api.openai import embeddings
from pageturner.server.api.responses import response_items, responses
from pageturner.text.conversation import EFFORTS, NAMES_OF_ROLES, ROLES
from pageturner.text.structured_outputs import FORMATS, MAX_CHOICES
from pageturner.text.tools import NAME

Properties = dict[str, Schema]


# -- what stands within fields -------------------------------------------------------------------------------
def _json_schema() -> Schema:
    """A schema of an answer, or of arguments: the keywords of the draft that a grammar can hold."""
    here, count = ref("JsonSchema"), {**INTEGER, "minimum": 0, "maximum": 1000}
    kinds = one_of("object", "array", "string", "number", "integer", "boolean", "null")
    words: Properties = {
        "type": {"anyOf": [kinds, array(kinds, minItems=1, uniqueItems=True)]},
        "properties": {**OBJECT, "additionalProperties": here},
        "required": array(STRING, uniqueItems=True),
        "additionalProperties": {"anyOf": [BOOLEAN, here]},
        "items": here,
        "enum": array(ANYTHING, minItems=1),
        "const": ANYTHING,
        "anyOf": array(here, minItems=1),
        "minLength": count,
        "maxLength": count,
        "minItems": count,
        "maxItems": count,
        "minimum": NUMBER,
        "maximum": NUMBER,
        "exclusiveMinimum": NUMBER,
        "exclusiveMaximum": NUMBER,
        "pattern": STRING,
        "format": {**STRING, "examples": sorted(FORMATS)},
        "title": STRING,
        "description": STRING,
        "default": ANYTHING,
    }
    return {
        "description": "A JSON schema: most of draft 2020-12, $ref and $defs too. Other words are refused.",
        **record(words),
    }


def _message() -> Schema:
    text = record({"type": one_of("text"), "text": STRING}, "type", "text")
    arguments = {"type": ["string", "object"], "contentMediaType": "application/json"}
    function = record({"name": STRING, "arguments": arguments}, "name")
    call = record({"id": ANYTHING, "type": ANYTHING, "function": function}, "function")
    return record(
        {
            "role": one_of(*ROLES, *NAMES_OF_ROLES),
            "content": {"type": ["string", "array", "null"], "items": text},
            "tool_calls": nullable(array(call)),
            "reasoning_content": ANYTHING,
            "tool_call_id": ANYTHING,
            "name": ANYTHING,
        },
        "role",
    )


def _tool() -> Schema:
    function = record(
        {
            "name": {**STRING, "pattern": f"^{NAME.pattern}$"},
            "description": nullable(STRING),
            "strict": nullable(BOOLEAN),
            "parameters": {"anyOf": [{"type": "null"}, ref("JsonSchema")]},
        },
        "name",
    )
    return record({"type": one_of("function"), "function": function}, "type", "function")


def _response_format() -> Schema:
    named = record(
        {"name": STRING, "schema": ref("JsonSchema"), "strict": nullable(BOOLEAN)}, "schema"
    )
    return {
        "description": "The form of the answer, as OpenAI says it.",
        "anyOf": [
            {"type": "null"},
            {"type": "object", "maxProperties": 0},
            record({"type": one_of("text", "json_object")}, "type"),
            record({"type": one_of("json_schema"), "json_schema": named}, "type", "json_schema"),
        ],
    }


def _structured_outputs() -> Schema:
    texts = array({**STRING, "minLength": 1}, minItems=1, maxItems=MAX_CHOICES)
    one: Properties = {
        "json": {"anyOf": [one_of(True), STRING, ref("JsonSchema")]},
        "regex": {**STRING, "minLength": 1},
        "choice": texts,
        "grammar": {**STRING, "minLength": 1},
        "json_object": one_of(True),
    }
    json = {"disable_any_whitespace": BOOLEAN, "whitespace_pattern": nullable(STRING)}
    ways = [{"type": "null"}, {"type": "object", "maxProperties": 0}]
    for name, schema in one.items():
        more = json if name.startswith("json") else {}
        ways.append(record({name: schema, **more}, name, additionalProperties=False))
    return {"description": "The form of the answer, as vLLM says it.", "anyOf": ways}


def _named_tool() -> Schema:
    function = record({"name": STRING}, "name")
    return record({"type": one_of("function"), "function": function}, "function")


def components() -> Properties:
    """The schemas that others refer to."""
    return {
        "JsonSchema": _json_schema(),
        "ChatMessage": _message(),
        "Tool": _tool(),
        "NamedTool": _named_tool(),
        "ResponseFormat": _response_format(),
        "StructuredOutputs": _structured_outputs(),
    }


# -- OpenAI's older APIs -------------------------------------------------------------------------------------
def _beams_or_samples() -> Schema:
    """What beam search takes, and what only beam search does."""
    beams = {"use_beam_search": one_of(True)}
    drawn = {
        "temperature": one_of(0, 1, None),
        "top_p": one_of(1, None),
        "top_k": one_of(0, -1, None),
        "min_p": one_of(0, None),
        "stop": {"type": ["array", "null"], "maxItems": 0},
        "prompt_logprobs": {"type": "null"},
    }
    only = {"length_penalty": one_of(1, None), "early_stopping": one_of(False, None)}
    return {
        "if": {"properties": beams, "required": list(beams)},
        "then": {"properties": drawn},
        "else": {"properties": only},
    }


def _with_logprobs() -> Schema:
    """`top_logprobs` needs `logprobs: true`."""
    shown = {"top_logprobs": {"type": "integer", "minimum": 1}}
    needed = {"properties": {"logprobs": one_of(True)}, "required": ["logprobs"]}
    return {"if": {"properties": shown, "required": list(shown)}, "then": needed}


def completion(served: ServedModel) -> Schema:
    """The body of /v1/completions."""
    taken = of_completions(served)
    return {
        **record({**taken, "prompt": prompt_schema(served)}, "prompt"),
        "allOf": [_beams_or_samples()],
    }


def chat(served: ServedModel) -> Schema:
    """The body of /v1/chat/completions."""
    taken = of_chats(served)
    taken["messages"] = {**taken["messages"], "type": "array"}
    return {**record(taken, "messages"), "allOf": [_beams_or_samples(), _with_logprobs()]}


# -- other shapes --------------------------------------------------------------------------------------------
def with_extras(
    served: ServedModel,
    own: Mapping[str, Schema],
    neutral: Mapping[str, tuple[Any, ...]],
    same: Collection[str] = (),
) -> Properties:
    """The fields of a dialect: its own ones, those that are ours under the same name, what every dialect
    takes, and what is taken only where it changes nothing. Null is as if it were not there."""
    ours = field_schemas(served)
    strange = (
        frozenset(RequestBody.__struct_fields__)
        - DIALECTS_OWN
        - EXTRAS
        - own.keys()
        - frozenset(same)
    )
    return {
        **neutral_schemas(UNSUPPORTED),
        **neutral_schemas(dict.fromkeys(sorted(strange), ())),
        **{name: ours[name] for name in sorted(EXTRAS)},
        **neutral_schemas(neutral),
        **{name: ours[name] for name in same},
        **{name: nullable(one) if one else one for name, one in own.items()},
    }


def anthropic(served: ServedModel) -> Schema:
    """The body of /v1/messages."""
    own, ours = own_of_messages(served), field_schemas(served)
    found = with_extras(served, own, messages.NEUTRAL, messages.SAME)
    most = {
        **ours["max_tokens"],
        "type": "integer",
        "maximum": LIMITS["max_tokens"][1],
    }  # or less: what fits
    found |= {"messages": own["messages"], "max_tokens": most}
    return record(found, "messages", "max_tokens")


def counted(served: ServedModel) -> Schema:
    """The body of /v1/messages/count_tokens: what makes a prompt. The other fields of /v1/messages are taken
    too, and change nothing."""
    whole: Properties = anthropic(served)["properties"]
    count = {
        name for name in whole if name in own_of_messages(served) or whole[name].get("x-neutral")
    }
    return record(
        {name: whole[name] for name in whole if name in count - {"stop_sequences"}}, "messages"
    )


def own_of_messages(served: ServedModel) -> Properties:
    """Of the fields of /v1/messages those that are no field of ours."""
    form = record({"type": one_of("json_schema"), "schema": ref("JsonSchema")}, "type", "schema")
    ours = field_schemas(served)
    budget = {"type": one_of("enabled"), "budget_tokens": ours["thinking_token_budget"]}
    thinking = [record({"type": one_of("disabled", "adaptive")}), record(budget, "type")]
    own: Properties = {
        "messages": array(
            _anthropic_message(),
            minItems=1,
            description="The conversation. The last one is the user's.",
        ),
        "system": {"anyOf": [STRING, array(_anthropic_text())]},
        "stop_sequences": {**ours["stop"], "type": "array"},
        "metadata": record({"user_id": ANYTHING}),
        "output_config": record({"format": {"anyOf": [{"type": "null"}, form]}}),
        "output_format": {
            "anyOf": [{"type": "null"}, {"type": "object", "maxProperties": 0}, form]
        },
        "thinking": {"anyOf": thinking},
        "tools": array(_anthropic_tool(served)),
        "tool_choice": {
            "anyOf": [
                record({"type": one_of(*anthropic_fields.CHOICES)}, "type"),
                record({"type": one_of("tool"), "name": STRING}, "type", "name"),
            ]
        },
        "chat_template_kwargs": ours["chat_template_kwargs"],
    }
    return own | _passed_over(messages.TAKEN, own, messages.SAME)


def _anthropic_text() -> Schema:
    text = record({"type": one_of("text"), "text": STRING}, "type", "text")
    return {"anyOf": [text, record({"type": one_of(*sorted(anthropic_fields.UNREAD))}, "type")]}


def _anthropic_message() -> Schema:
    """What the model has said, or what it was told: each has blocks of its own."""
    text = _anthropic_text()["anyOf"]
    thoughts = record({"type": one_of("thinking"), "thinking": STRING}, "type", "thinking")
    use = {"type": one_of("tool_use"), "id": STRING, "name": STRING, "input": OBJECT}
    told = {
        "type": one_of("tool_result"),
        "tool_use_id": STRING,
        "is_error": BOOLEAN,
        "content": {"anyOf": [STRING, array(_anthropic_text()), {"type": "null"}]},
    }
    said = array({"anyOf": [*text, thoughts, record(use, "type", "id", "name")]})
    heard = array({"anyOf": [*text, record(told, "type", "tool_use_id")]})
    return {
        "anyOf": [
            record(
                {"role": one_of(*roles), "content": {"anyOf": [STRING, blocks]}}, "role", "content"
            )
            for roles, blocks in ((["assistant"], said), (["user", "system"], heard))
        ]
    }


def _anthropic_tool(served: ServedModel) -> Schema:
    """A tool that the model is offered, or one that nobody here could run."""
    hosted = record(
        {"type": {**STRING, "pattern": f"^(?:{'|'.join(anthropic_fields.HOSTED)})"}}, "type"
    )
    own = record(
        {
            "name": {**STRING, "pattern": f"^{NAME.pattern}$"},
            "description": nullable(STRING),
            "strict": nullable(BOOLEAN),
            "input_schema": {"anyOf": [{"type": "null"}, ref("JsonSchema")]},
        },
        "name",
        "input_schema",
    )
    return {"anyOf": [hosted, *([own] if formats_of(served).tools else [])]}


def _passed_over(taken: Collection[str], own: Properties, same: Collection[str]) -> Properties:
    """What a dialect takes and does nothing with."""
    return dict.fromkeys(sorted(set(taken) - own.keys() - set(same)), ANYTHING)


def response(served: ServedModel) -> Schema:
    """The body of /v1/responses."""
    own = own_of_responses(served)
    found = with_extras(served, own, responses.NEUTRAL, responses.SAME)
    return record({**found, "input": own["input"]}, "input")


def own_of_responses(served: ServedModel) -> Properties:
    """Of its fields those that are no field of ours."""
    said, items = _said_item(), _other_items()
    form = record({"type": one_of("json_schema"), "schema": ref("JsonSchema")}, "type", "schema")
    plain = record({"type": one_of("text", "json_object")}, "type")
    nothing = {"type": "object", "maxProperties": 0}
    asked = {"anyOf": [STRING, array({"anyOf": [said, *items]}, minItems=1, contains=said)]}
    own: Properties = {
        "input": {"description": "What is asked: a text, or messages.", **asked},
        "instructions": {**STRING, "description": "What the system says."},
        "max_output_tokens": field_schemas(served)["max_tokens"],
        "text": record({"format": {"anyOf": [{"type": "null"}, nothing, plain, form]}}),
        "include": array({**STRING, "not": one_of(responses.LOGPROBS)}),
        "reasoning": record({"effort": one_of(*EFFORTS, None)}),
        "tools": array(_response_tool(served)),
        "tool_choice": {"anyOf": [one_of("none", "auto", "required"), OBJECT]},
        "previous_response_id": {**STRING, "description": "Go on behind this answer."},
        "store": {
            **BOOLEAN,
            "default": True,
            "description": "Keep the answer for who comes back to it.",
        },
        "background": {**BOOLEAN, "default": False, "description": "Answer at once, and go on."},
    }
    return own | _passed_over(responses.TAKEN, own, responses.SAME)


def _item_content() -> Schema:
    part = record({"type": one_of(*sorted(response_items.TEXTS)), "text": STRING}, "type", "text")
    return {"anyOf": [STRING, array(part)]}


def _said_item() -> Schema:
    role = one_of(*response_items.ROLES)
    return record(
        {"type": one_of("message"), "role": role, "content": _item_content()}, "role", "content"
    )


def _other_items() -> list[Schema]:
    """Thoughts, calls and their results; and what nobody here has made."""
    texts = array(record({"text": STRING}, "text"))
    calls, outputs = response_items.CALLS, response_items.OUTPUTS
    arguments = {**STRING, "contentMediaType": "application/json"}
    head = {"call_id": STRING, "name": STRING}
    return [
        record(
            {"type": one_of("reasoning"), "content": nullable(texts), "summary": nullable(texts)},
            "type",
        ),
        record(
            {"type": one_of(calls[0]), **head, "arguments": arguments}, "type", *head, "arguments"
        ),
        record({"type": one_of(calls[1]), **head, "input": STRING}, "type", *head, "input"),
        record(
            {"type": one_of(*outputs), "call_id": STRING, "output": _item_content()},
            "type",
            "call_id",
            "output",
        ),
        record({"type": one_of("agent_message"), "content": _item_content()}, "type", "content"),
        record({"type": one_of(*sorted(response_items.PAST))}, "type"),
    ]


def _response_tool(served: ServedModel) -> Schema:
    """A function, or a tool of text; those that nobody here could run are passed over."""
    hosted = record({"type": one_of(*sorted(response_items.HOSTED))}, "type")
    named = {"name": {**STRING, "pattern": f"^{NAME.pattern}$"}, "description": nullable(STRING)}
    schema = {"anyOf": [{"type": "null"}, ref("JsonSchema")]}
    function = {
        "type": one_of("function"),
        **named,
        "strict": nullable(BOOLEAN),
        "parameters": schema,
    }
    custom = record({"type": one_of("custom"), **named, "format": OBJECT}, "type", "name")
    many = record(
        {"type": one_of(response_items.NAMESPACE), "name": STRING, "tools": array(OBJECT)}, "type"
    )
    own = [record(function, "type", "name"), custom, many] if formats_of(served).tools else []
    return {"anyOf": [hosted, *own]}


def embedding(served: ServedModel) -> Schema:
    """The body of /v1/embeddings."""
    own = {"input": prompt_schema(served), **of_struct(EmbeddingOptions)}
    found = with_extras(served, own, {}, embeddings.SAME)
    found["min_tokens"] = {**found["min_tokens"], "maximum": 1}  # a row is an answer of one token
    return record({**found, "input": own["input"]}, "input")


def ollama_chat(served: ServedModel) -> Schema:
    """The body of /api/chat."""
    content, text = {"type": ["string", "null"]}, {"type": ["string", "null"]}
    function = record({"name": STRING, "arguments": OBJECT}, "name")
    calls = nullable(array(record({"function": function}, "function")))
    message = record(
        {
            "role": one_of(*ROLES, *NAMES_OF_ROLES),
            "content": content,
            "tool_calls": calls,
            "tool_name": text,
            "thinking": text,
        },
        "role",
    )
    said = array(message, description="The conversation. Without one the model is only loaded.")
    return record(_ollama(served, {"messages": said, "tools": field_schemas(served)["tools"]}))


def ollama_generate(served: ServedModel) -> Schema:
    """The body of /api/generate."""
    own = {
        "prompt": STRING,
        "suffix": field_schemas(served)["suffix"],
        "system": STRING,
        "raw": BOOLEAN,
    }
    return record(_ollama(served, {**own, "tools": {"type": "array", "maxItems": 0}}))


def _ollama(served: ServedModel, own: Properties) -> Properties:
    names = (served.model, *served.names)
    ours = field_schemas(served)
    options = {theirs: _as_option(ours[name]) for theirs, name in ollama.OPTIONS.items()}
    limits = options["num_predict"]
    options["num_predict"] = {"anyOf": [limits, one_of(*ollama.NO_LIMIT)]}
    options |= neutral_schemas(ollama.OPTIONS_NEUTRAL) | dict.fromkeys(
        sorted(ollama.PASSED_OVER), ANYTHING
    )
    every: Properties = {
        **own,
        "model": one_of(*names, *(f"{name}{ollama.LATEST}" for name in names), ""),
        "options": record(options, additionalProperties={"type": "null"}),
        "format": {"anyOf": [one_of("", "json"), ref("JsonSchema")]},
        "think": one_of(False, *((True, *ollama.EFFORTS) if formats_of(served).reasoning else ())),
        "chat_template_kwargs": ours["chat_template_kwargs"],
        "stream": {**BOOLEAN, "default": True},
    }
    return with_extras(served, every | _passed_over(ollama.TAKEN, every, ()), ollama.NEUTRAL)


def _as_option(schema: Schema) -> Schema:
    return {name: value for name, value in schema.items() if name not in ("description", "default")}
