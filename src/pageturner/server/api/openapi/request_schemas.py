"""The bodies that requests may have, as JSON Schema for the model that is served.

Owns how `schemas.json` becomes them. A body there holds what a dialect has of its own; the fields
that it passes on or refuses are those of the FieldMap by which its requests are read. Within a
body, `$known` stands for a schema that depends on the model or has a name in `parts`, `$needs` for
what a model without that format does not take, and `$or` for another form of the body. Must not
know paths (operations.json).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import fields as fields_of_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from pageturner.config import settings as config
from pageturner.http.json_schemas import (
    ANYTHING,
    INTEGER,
    STRING,
    Schema,
    array,
    nullable,
    of_struct,
    one_of,
)
from pageturner.http.request_info import SAFE_ID
from pageturner.server.adapters import LoadBody, UnloadBody
from pageturner.server.api.anthropic import messages
from pageturner.server.api.base.answer_grammar import formats_of
from pageturner.server.api.base.body import OURS, EmbeddingOptions
from pageturner.server.api.base.foreign_fields import UNSUPPORTED
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.base.translate import EXTRAS, FIELD_MAPS, FieldMap
from pageturner.server.api.batches.batch_pages import NewBatch
from pageturner.server.api.ollama import ollama
from pageturner.server.api.openai import embeddings, infill
from pageturner.server.api.openapi.field_schemas import (
    field_schemas,
    neutral_schemas,
    of_chats,
    of_completions,
    prompt_schema,
    token_id,
)
from pageturner.server.api.responses import responses
from pageturner.server.observability import admin
from pageturner.server.text_workers.text_jobs import DetokenizeBody, PrefixBody, TokenizeBody
from pageturner.text.fim import fim_tokens

Properties = dict[str, Schema]
# body -> the fields of its dialect
_DIALECTS = {
    "AnthropicRequest": messages.FIELDS,
    "ResponseRequest": responses.FIELDS,
    "EmbeddingRequest": embeddings.FIELDS,
    "OllamaChatRequest": ollama.FIELDS,
    "OllamaGenerateRequest": ollama.FIELDS,
    "OllamaRowsRequest": FIELD_MAPS["ollama rows"],
    "OllamaRowRequest": FIELD_MAPS["ollama rows"],
    "RerankedRequest": FIELD_MAPS["pairs"],
    "ScoredRequest": FIELD_MAPS["pairs"],
    "GapRequest": infill.FIELDS,
}
# body -> the struct that it is decoded as
_STRUCTS: dict[str, type[msgspec.Struct]] = {
    "EmbeddingRequest": EmbeddingOptions,
    "BatchRequest": NewBatch,
    "TokenizeRequest": TokenizeBody,
    "DetokenizeRequest": DetokenizeBody,
    "PrefixRequest": PrefixBody,
    "LoadedAdapterRequest": LoadBody,
    "UnloadedAdapterRequest": UnloadBody,
}
ID: Schema = {**STRING, "pattern": f"^{SAFE_ID.pattern}$"}


@cache
def data() -> dict[str, dict[str, Any]]:
    """`schemas.json`: parts and bodies of requests, components of both, and answers."""
    found: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("schemas.json").read_bytes()
    )
    return found


def known_schemas(served: ServedModel) -> Properties:
    """The schemas that depend on the model, by the names that stand behind `$known`."""
    ours = field_schemas(served)
    text, ids, _ = prompt_schema(served)["anyOf"]
    names = (served.model, *served.names)
    ollama_names = (*names, *(f"{name}{ollama.LATEST}" for name in names))
    thinks = (True, *ollama.EFFORTS) if formats_of(served).reasoning else ()
    return ours | {
        "text": text,
        "prompts": prompt_schema(served),
        "prompt or none": {"anyOf": [text, ids, {"type": "null"}]},
        "token id": token_id(served),
        "token ids": array(token_id(served), maxItems=min(served.limits.text, 1 << 20)),
        "nullable messages": nullable(ours["messages"]),
        "id": ID,
        "nullable id": nullable(ID),
        "model name": one_of(*names),
        "nullable model": nullable(one_of(*ollama_names)),
        "ollama model or none": one_of(*ollama_names, ""),
        "ollama model or null": one_of(*ollama_names, None),
        "ollama options": _ollama_options(ours),
        "think": one_of(False, *thinks),
        "gap": {} if fim_tokens(served.tokenizer) else {"not": {}},
    }


def _ollama_options(ours: Properties) -> Schema:
    bare = {
        theirs: {word: value for word, value in ours[name].items() if word not in _SAID}
        for theirs, name in ollama.OPTIONS.options.items()
    }
    bare["num_predict"] = {"anyOf": [bare["num_predict"], one_of(*ollama.NO_LIMIT)]}
    passed_over = dict.fromkeys(sorted(ollama.OPTIONS.passed_over), ANYTHING)
    properties = bare | neutral_schemas(ollama.OPTIONS.neutral) | passed_over
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": {"type": "null"},
    }


_SAID = ("description", "default")


def request_schemas(served: ServedModel) -> Properties:
    """The schema of every body, by its name in the document."""
    known = data()["parts"] | known_schemas(served)
    missing = () if formats_of(served.for_tools).tools else ("tools",)
    made = {name: resolved(body, known, missing) for name, body in data()["bodies"].items()}
    for name, struct in _STRUCTS.items():
        made[name]["properties"] = of_struct(struct) | made[name]["properties"]
    made["SettingsRequest"]["properties"] = _settings()
    infill_own = {theirs: known[name] for theirs, name in infill.FIELDS.options.items()}
    made["GapRequest"]["properties"] = infill_own | made["GapRequest"]["properties"]
    for name, dialect in _DIALECTS.items():
        made[name]["properties"] = _with_extras(made[name], dialect, known)
    made["CompletionRequest"]["properties"] = (
        of_completions(served) | made["CompletionRequest"]["properties"]
    )
    made["ChatRequest"]["properties"] = of_chats(served) | made["ChatRequest"]["properties"]
    made["CountedRequest"] = _counted(made["AnthropicRequest"]["properties"])
    for name, body in made.items():
        if "$or" in body:
            made[name] = {"anyOf": [body, resolved({"$known": body.pop("$or")}, known, missing)]}
    return made


def resolved(schema: Any, known: Mapping[str, Any], missing: Collection[str] = ()) -> Any:
    """A schema of `schemas.json` for a model. missing: what the model has no format for."""
    if isinstance(schema, list):
        kept = [
            one for one in schema if not (isinstance(one, dict) and one.get("$needs") in missing)
        ]
        return [resolved(one, known, missing) for one in kept]
    if not isinstance(schema, dict):
        return schema
    found = {
        word: resolved(value, known, missing)
        for word, value in schema.items()
        if word not in ("$known", "$needs")
    }
    if "$known" in schema:
        found = resolved(known[schema["$known"]], known, missing) | found
    return found


def _with_extras(body: Schema, dialect: FieldMap, known: Properties) -> Properties:
    """All fields of a dialect: its own ones, those that are ours under the same name, what every
    dialect takes, and what is taken only where it changes nothing. Null is as if it were not there,
    but for fields that must be there."""
    own: Properties = body["properties"]
    own |= dict.fromkeys(sorted(dialect.own - own.keys()), ANYTHING)
    needed = {*body.get("required", ())}.union(*(way["required"] for way in body.get("anyOf", ())))
    strange = OURS - EXTRAS - own.keys() - {*dialect.same}
    return {
        **neutral_schemas(UNSUPPORTED),
        **neutral_schemas(dict.fromkeys(sorted(strange), ())),
        **{name: known[name] for name in (*sorted(EXTRAS), *dialect.same)},
        **neutral_schemas(dialect.neutral),
        **{name: one if name in needed else _or_null(one) for name, one in own.items()},
    }


def _or_null(schema: Schema) -> Schema:
    return schema if not schema or schema.get("type") == "null" else nullable(schema)


def _counted(whole: Properties) -> Schema:
    """The body of /v1/messages/count_tokens: what makes a prompt. The other fields of /v1/messages
    are taken too, and change nothing."""
    own = {*messages.FIELDS.taken} - {"stop_sequences"}
    kept = {name: one for name, one in whole.items() if name in own or one.get("x-neutral")}
    return {"type": "object", "properties": kept, "required": ["messages"]}


def _settings() -> Properties:
    """The settings that POST /v1/admin/config may change."""
    found: Properties = {}
    for setting in fields_of_dataclass(config.EngineConfig):
        if setting.name in admin.CHANGEABLE:
            choices, least = config.choices_of(setting), setting.metadata["least"]
            number = {**INTEGER, "minimum": least or 0, "maximum": admin.MOST}
            schema = one_of(*choices) if choices else number
            found[setting.name] = {"description": setting.metadata["help"], **schema}
    return found
