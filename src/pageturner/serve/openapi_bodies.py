"""The bodies that requests may have, as JSON Schema: of each API its fields, and what is within them.

Owns which API takes which fields, and the forms of conversations, tools and formats of answers. Names come
from the tables by which requests are read (TAKEN, NEUTRAL, EXTRAS ... of each dialect), bounds from
field_table.py; what a dialect has of its own is said here and held against its check by a test. Must not know
paths (openapi_operations.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields as fields_of_dataclass
from typing import Any

from pageturner import config
from pageturner.serve import admin, embeddings, messages, ollama, responses
from pageturner.serve.body import UNSUPPORTED, EmbeddingOptions, RequestBody
from pageturner.serve.call import ServedModel
from pageturner.serve.field_table import (
    field_schemas,
    neutral_schemas,
    of_chats,
    of_completions,
    prompt_schema,
    token_id,
)
from pageturner.serve.json_schemas import (
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
from pageturner.serve.limits import SAFE_ID
from pageturner.serve.ollama_pages import ShowBody
from pageturner.serve.text_jobs import DetokenizeBody, PrefixBody, TokenizeBody
from pageturner.serve.translate import EXTRAS
from pageturner.text.conversation import NAMES_OF_ROLES, ROLES
from pageturner.text.json_schema import FORMATS
from pageturner.text.structured_outputs import MOST_CHOICES
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
        "minLength": count, "maxLength": count, "minItems": count, "maxItems": count,
        "minimum": NUMBER, "maximum": NUMBER, "exclusiveMinimum": NUMBER, "exclusiveMaximum": NUMBER,
        "pattern": STRING, "format": {**STRING, "examples": sorted(FORMATS)},
        "title": STRING, "description": STRING, "default": ANYTHING,
    }  # fmt: skip
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
    named = record({"name": STRING, "schema": ref("JsonSchema"), "strict": nullable(BOOLEAN)}, "schema")
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
    texts = array({**STRING, "minLength": 1}, minItems=1, maxItems=MOST_CHOICES)
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
        "temperature": one_of(0, 1, None), "top_p": one_of(1, None), "top_k": one_of(0, -1, None),
        "min_p": one_of(0, None), "stop": {"type": ["array", "null"], "maxItems": 0},
        "prompt_logprobs": {"type": "null"},
    }  # fmt: skip
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
    return {**record({**taken, "prompt": prompt_schema(served)}, "prompt"), "allOf": [_beams_or_samples()]}


def chat(served: ServedModel) -> Schema:
    """The body of /v1/chat/completions."""
    taken = of_chats(served)
    taken["messages"] = {**taken["messages"], "type": "array"}
    return {**record(taken, "messages"), "allOf": [_beams_or_samples(), _with_logprobs()]}


# -- other shapes --------------------------------------------------------------------------------------------
def _with_extras(
    served: ServedModel,
    own: Mapping[str, Schema],
    neutral: Mapping[str, tuple[Any, ...]],
    same: Collection[str] = (),
) -> Properties:
    """The fields of a dialect: its own ones, those that are ours under the same name, what every dialect
    takes, and what is taken only where it changes nothing. Null is as if it were not there."""
    ours = field_schemas(served)
    strange = frozenset(RequestBody.__struct_fields__) - EXTRAS - own.keys() - frozenset(same)
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
    found = _with_extras(served, own, messages.NEUTRAL, messages.SAME)
    found |= {"messages": own["messages"], "max_tokens": {**ours["max_tokens"], "type": "integer"}}
    return record(found, "messages", "max_tokens")


def counted(served: ServedModel) -> Schema:
    """The body of /v1/messages/count_tokens: what makes a prompt. The other fields of /v1/messages are taken
    too, and change nothing."""
    whole: Properties = anthropic(served)["properties"]
    count = {name for name in whole if name in own_of_messages(served) or whole[name].get("x-neutral")}
    return record({name: whole[name] for name in whole if name in count - {"stop_sequences"}}, "messages")


def own_of_messages(served: ServedModel) -> Properties:
    """Of the fields of /v1/messages those that are no field of ours."""
    text = record({"type": one_of("text"), "text": STRING}, "type", "text")
    past = record({"type": one_of(*sorted(messages.OF_THE_PAST))}, "type")
    content = {"anyOf": [STRING, array({"anyOf": [text, past]})]}
    message = record({"role": one_of("user", "assistant", "system"), "content": content}, "role", "content")
    form = record({"type": one_of("json_schema"), "schema": ref("JsonSchema")}, "type", "schema")
    silent, stops = one_of(*messages.SILENT_THINKING), field_schemas(served)["stop"]
    own: Properties = {
        "messages": array(message, minItems=1, description="The conversation. The last one is the user's."),
        "system": {"anyOf": [STRING, array(text)]},
        "stop_sequences": {**stops, "type": "array"},
        "metadata": record({"user_id": ANYTHING}),
        "output_config": record({"format": {"anyOf": [{"type": "null"}, form]}}),
        "output_format": {"anyOf": [{"type": "null"}, {"type": "object", "maxProperties": 0}, form]},
        "thinking": record({"type": silent}),
    }
    return own | _passed_over(messages.TAKEN, own, messages.SAME)


def _passed_over(taken: Collection[str], own: Properties, same: Collection[str]) -> Properties:
    """What a dialect takes and does nothing with."""
    return dict.fromkeys(sorted(set(taken) - own.keys() - set(same)), ANYTHING)


def response(served: ServedModel) -> Schema:
    """The body of /v1/responses."""
    own = own_of_responses(served)
    found = _with_extras(served, own, responses.NEUTRAL, responses.SAME)
    return record({**found, "input": own["input"]}, "input")


def own_of_responses(served: ServedModel) -> Properties:
    """Of its fields those that are no field of ours."""
    part = record({"type": one_of(*sorted(responses.TEXTS)), "text": STRING}, "type", "text")
    content = {"anyOf": [STRING, array(part)]}
    said = record(
        {"type": one_of("message"), "role": one_of(*responses.ROLES), "content": content}, "role", "content"
    )
    thought = record({"type": one_of(*sorted(responses.PAST_THOUGHTS))}, "type")
    form = record({"type": one_of("json_schema"), "schema": ref("JsonSchema")}, "type", "schema")
    plain = record({"type": one_of("text", "json_object")}, "type")
    nothing = {"type": "object", "maxProperties": 0}
    asked = {"anyOf": [STRING, array({"anyOf": [said, thought]}, minItems=1, contains=said)]}
    own: Properties = {
        "input": {"description": "What is asked: a text, or messages.", **asked},
        "instructions": {**STRING, "description": "What the system says."},
        "max_output_tokens": field_schemas(served)["max_tokens"],
        "text": record({"format": {"anyOf": [{"type": "null"}, nothing, plain, form]}}),
        "include": array({**STRING, "not": one_of(responses.LOGPROBS)}),
        "previous_response_id": {**STRING, "description": "Go on behind this answer."},
        "store": {**BOOLEAN, "default": True, "description": "Keep the answer for who comes back to it."},
        "background": {**BOOLEAN, "default": False, "description": "Answer at once, and go on."},
    }
    return own | _passed_over(responses.TAKEN, own, responses.SAME)


def embedding(served: ServedModel) -> Schema:
    """The body of /v1/embeddings."""
    own = {"input": prompt_schema(served), **of_struct(EmbeddingOptions)}
    found = _with_extras(served, own, {}, embeddings.SAME)
    found["min_tokens"] = {**found["min_tokens"], "maximum": 1}  # a row is an answer of one token
    return record({**found, "input": own["input"]}, "input")


def ollama_chat(served: ServedModel) -> Schema:
    """The body of /api/chat."""
    content = {"type": ["string", "null"]}
    role = one_of(*ROLES, *NAMES_OF_ROLES)
    message = record({"role": role, "content": content}, "role")
    said = array(message, description="The conversation. Without one the model is only loaded.")
    return record(_ollama(served, {"messages": said}))


def ollama_generate(served: ServedModel) -> Schema:
    """The body of /api/generate."""
    own = {"prompt": STRING, "system": STRING, "raw": BOOLEAN}
    return record(_ollama(served, own))


def _ollama(served: ServedModel, own: Properties) -> Properties:
    names = (served.model, *served.names)
    ours = field_schemas(served)
    options = {theirs: _as_option(ours[name]) for theirs, name in ollama.OPTIONS.items()}
    limits = options["num_predict"]
    options["num_predict"] = {"anyOf": [limits, one_of(*ollama.NO_LIMIT)]}
    options |= neutral_schemas(ollama.OPTIONS_NEUTRAL) | dict.fromkeys(sorted(ollama.PASSED_OVER), ANYTHING)
    every: Properties = {
        **own,
        "model": one_of(*names, *(f"{name}{ollama.LATEST}" for name in names)),
        "options": record(options, additionalProperties={"type": "null"}),
        "format": {"anyOf": [one_of("", "json"), ref("JsonSchema")]},
        "stream": {**BOOLEAN, "default": True},
    }
    return _with_extras(served, every | _passed_over(ollama.TAKEN, every, ()), ollama.NEUTRAL)


def _as_option(schema: Schema) -> Schema:
    return {name: value for name, value in schema.items() if name not in ("description", "default")}


# -- the small endpoints -------------------------------------------------------------------------------------
def tokenize(served: ServedModel) -> Schema:
    """The body of /tokenize: a text or a conversation."""
    ours, found = field_schemas(served), of_struct(TokenizeBody)
    said = {name: ours[name] for name in ("model", "messages", "tools", "tool_choice", "reasoning_effort")}
    found |= {**said, "chat_template_kwargs": ours["chat_template_kwargs"]}
    either = [
        {"properties": {"prompt": STRING, "messages": {"type": "null"}}, "required": ["prompt"]},
        {"properties": {"messages": {"type": "array"}}, "required": ["messages"]},
    ]
    found["messages"] = nullable(found["messages"])
    return {**record(found), "anyOf": either}


def detokenize(served: ServedModel) -> Schema:
    """The body of /detokenize."""
    found = of_struct(DetokenizeBody)
    most = min(served.limits.text, 1 << 20)
    found |= {"model": field_schemas(served)["model"], "tokens": array(token_id(served), maxItems=most)}
    return record(found, "tokens")


def prefix(served: ServedModel) -> Schema:
    """The body of POST /v1/prefixes."""
    ours, found = field_schemas(served), of_struct(PrefixBody)
    found |= {name: ours[name] for name in ("model", "cache_salt", "chat_template_kwargs")}
    text, ids, _ = prompt_schema(served)["anyOf"]
    found |= {"id": {"type": ["string", "null"], "pattern": f"^{SAFE_ID.pattern}$"}}
    found["prompt"] = {"anyOf": [text, ids, {"type": "null"}]}
    found["messages"] = nullable(ours["messages"])
    either = [
        {"properties": {"prompt": {"type": ["string", "array"]}, "messages": {"type": "null"}},
         "required": ["prompt"]},
        {"properties": {"messages": {"type": "array"}}, "required": ["messages"]},
    ]  # fmt: skip
    return {**record(found), "anyOf": either}


def show(served: ServedModel) -> Schema:
    """The body of /api/show."""
    names = (served.model, *served.names)
    either = one_of(*names, *(f"{name}{ollama.LATEST}" for name in names), None)
    old = {"type": ["string", "null"], "description": "The old name of model."}
    return record({**of_struct(ShowBody), "model": either, "name": old})


def settings(served: ServedModel) -> Schema:
    """The body of POST /v1/admin/config."""
    found: Properties = {}
    for setting in fields_of_dataclass(config.EngineConfig):
        if setting.name in admin.CHANGEABLE:
            choices, least = config.choices_of(setting), setting.metadata["least"]
            number = {**INTEGER, "minimum": least or 0, "maximum": admin.MOST}
            schema = one_of(*choices) if choices else number
            found[setting.name] = {"description": setting.metadata["help"], **schema}
    return record(found, additionalProperties=False)
