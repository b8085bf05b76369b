"""The bodies of the smaller shapes, as JSON Schema: rows, scores, gaps, files and batches, tokens, settings.

Owns what each of them takes. Must not know conversations (openapi_bodies.py), nor paths
(openapi_operations.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields as fields_of_dataclass

from pageturner.config import settings as config
from pageturner.http.json_schemas import (
    ANYTHING,
    BOOLEAN,
    INTEGER,
    OBJECT,
    STRING,
    Schema,
    array,
    nullable,
    of_struct,
    one_of,
    record,
)
from pageturner.http.request_info import SAFE_ID
from pageturner.params import LARGEST
from pageturner.server import stream_migration
from pageturner.server.adapters import LoadBody, UnloadBody
from pageturner.server.api.base.body import EmbeddingOptions
from pageturner.server.api.base.call import ServedModel
from pageturner.server.api.base.field_table import field_schemas, prompt_schema, token_id
from pageturner.server.api.batches import batch_pages
from pageturner.server.api.batches.batch_lines import ENDPOINTS
from pageturner.server.api.ollama import ollama
from pageturner.server.api.ollama.ollama_embed import PASSED_OVER
from pageturner.server.api.ollama.ollama_pages import ShowBody
from pageturner.server.api.openai import infill, rerank
from pageturner.server.api.openapi.openapi_bodies import Properties, with_extras
from pageturner.server.observability import admin
from pageturner.server.text_workers.text_jobs import DetokenizeBody, PrefixBody, TokenizeBody
from pageturner.text.fim import fim_tokens

_COUNT: Schema = {"type": ["integer", "null"], "minimum": 1, "maximum": LARGEST}


# -- scores and rows -----------------------------------------------------------------------------------------
def reranked(served: ServedModel) -> Schema:
    """The body of /v1/rerank."""
    own = {
        "query": _text(served),
        "documents": _texts(served),
        "return_documents": {**BOOLEAN, "default": True},
        "top_n": {**_COUNT, "minimum": 0},
    }
    return record(
        {**_pairs(served, own), "query": _text(served), "documents": _texts(served)},
        "query",
        "documents",
    )


def scored(served: ServedModel) -> Schema:
    """The body of /v1/score: under the names of either way."""
    own: Properties = dict.fromkeys(("queries", "documents", "text_1", "text_2"), _texts(served))
    ways = [["queries", "documents"], ["text_1", "text_2"]]
    return {**record({**_pairs(served, own), **own}), "anyOf": [{"required": way} for way in ways]}


def _of_one_token(found: Properties) -> Properties:
    """A row is an answer of one token."""
    return {**found, "min_tokens": {**found["min_tokens"], "maximum": 1}}


def _text(served: ServedModel) -> Schema:
    """One that has tokens."""
    return STRING if served.tokenizer.add_bos else {**STRING, "minLength": 1}


def _texts(served: ServedModel) -> Schema:
    text = _text(served)
    held = record({"text": text}, "text")
    return {"anyOf": [text, array({"anyOf": [text, held]}, minItems=1)]}


def _pairs(served: ServedModel, own: Properties) -> Properties:
    own = {
        **own,
        "rerank_by": one_of("auto", "cosine", "yes_no"),
        "instruction": STRING,
        "pooling": one_of("mean", "last", "cls"),
        "max_tokens_per_doc": _COUNT,
    }
    found = with_extras(served, own, dict.fromkeys(rerank.REFUSED, ()), rerank.SAME)
    return _of_one_token(found) | {"session": {"type": "null"}}  # which has one answer


def ollama_rows(served: ServedModel) -> Schema:
    """The body of /api/embed."""
    wanted = nullable(of_struct(EmbeddingOptions)["dimensions"])
    text = _text(served)
    own = {
        "input": {"anyOf": [text, array(text, minItems=1)]},
        "truncate": BOOLEAN,
        "dimensions": wanted,
    }
    found = _of_one_token(with_extras(served, _ollama(served, own), {}))
    return record({**found, "input": own["input"]}, "input")


def ollama_row(served: ServedModel) -> Schema:
    """The body of /api/embeddings."""
    own: Properties = {"prompt": _text(served), "truncate": BOOLEAN}
    return record(_of_one_token(with_extras(served, _ollama(served, own), {})))


def _ollama(served: ServedModel, own: Properties) -> Properties:
    return {**own, "model": _ollama_name(served, ""), **dict.fromkeys(PASSED_OVER, ANYTHING)}


def _ollama_name(served: ServedModel, *others: str) -> Schema:
    names = (served.model, *served.names)
    return one_of(*names, *(f"{name}{ollama.LATEST}" for name in names), *others)


def or_loads(
    body: Callable[[ServedModel], Schema], *, texts: Collection[str], lists: Collection[str] = ()
) -> Callable[[ServedModel], Schema]:
    """A body of Ollama's, or one in which these are absent or empty: that has the model loaded, and nothing
    else of it is looked at."""

    def either(served: ServedModel) -> Schema:
        nothing = {name: one_of("", None) for name in texts}
        nothing |= {name: {**nullable({"type": "array"}), "maxItems": 0} for name in lists}
        if both := {*texts} & {*lists}:
            nothing |= {
                name: {"type": ["string", "array", "null"], "maxLength": 0, "maxItems": 0}
                for name in both
            }
        named = nullable(_ollama_name(served))
        loads = record(
            {"model": named, "keep_alive": {"type": ["string", "number", "null"]}, **nothing}
        )
        return {"anyOf": [body(served), loads]}

    either.__name__ = body.__name__
    return either


# -- gaps ----------------------------------------------------------------------------------------------------
def gap(served: ServedModel) -> Schema:
    """The body of /infill. A model without marks of gaps takes none."""
    ours = field_schemas(served)
    extra = array(record({"text": STRING, "filename": STRING}))
    own: Properties = dict.fromkeys(("input_prefix", "input_suffix", "prompt"), STRING)
    own |= {theirs: ours[name] for theirs, name in infill.OPTIONS.items()}
    own |= {"input_extra": extra, **dict.fromkeys(sorted(infill.PASSED_OVER), ANYTHING)}
    for name in ("n_predict", "seed"):
        own[name] = {"anyOf": [ours[infill.OPTIONS.get(name, name)], one_of(-1)]}
    made = record(with_extras(served, own, infill.NEUTRAL))
    return made if fim_tokens(served.tokenizer) else {**made, "not": {}}


# -- batches -------------------------------------------------------------------------------------------------
def batch(served: ServedModel) -> Schema:
    """The body of POST /v1/batches."""
    found = of_struct(batch_pages.NewBatch)
    most = {"maxProperties": batch_pages.MOST_METADATA, "propertyNames": {"maxLength": 64}}
    found |= {
        "endpoint": one_of(*ENDPOINTS),
        "completion_window": {
            "type": "string",
            "pattern": "^[1-9][hd]$",
        },
        "metadata": nullable(
            {**OBJECT, "additionalProperties": {**STRING, "maxLength": 512}, **most}
        ),
    }
    return record(found, "input_file_id", "endpoint")


def file(served: ServedModel) -> Schema:
    """The form of POST /v1/files."""
    content = {**STRING, "format": "binary", "description": "A JSON Lines file of requests."}
    taken = {"purpose": one_of("batch"), "file": content}
    return record(taken, *taken, additionalProperties=False)


# -- the small endpoints -------------------------------------------------------------------------------------
def tokenize(served: ServedModel) -> Schema:
    """The body of /tokenize: a text or a conversation."""
    ours, found = field_schemas(served), of_struct(TokenizeBody)
    said = {
        name: ours[name]
        for name in ("model", "messages", "tools", "tool_choice", "reasoning_effort")
    }
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
    found |= {
        "model": field_schemas(served)["model"],
        "tokens": array(token_id(served), maxItems=most),
    }
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
        {
            "properties": {"prompt": {"type": ["string", "array"]}, "messages": {"type": "null"}},
            "required": ["prompt"],
        },
        {"properties": {"messages": {"type": "array"}}, "required": ["messages"]},
    ]
    return {**record(found), "anyOf": either}


def show(served: ServedModel) -> Schema:
    """The body of /api/show."""
    names = (served.model, *served.names)
    either = one_of(*names, *(f"{name}{ollama.LATEST}" for name in names), None)
    old = {"type": ["string", "null"], "description": "The old name of model."}
    return record({**of_struct(ShowBody), "model": either, "name": old})


def loaded_adapter(_: ServedModel) -> Schema:
    """The body of /v1/load_lora_adapter."""
    return record(of_struct(LoadBody), "lora_name", "lora_path")


def unloaded_adapter(_: ServedModel) -> Schema:
    """The body of /v1/unload_lora_adapter."""
    return record(of_struct(UnloadBody), "lora_name")


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


def drain_order(_: ServedModel) -> Schema:
    """The body of POST /v1/admin/drain."""
    return record({"drain": BOOLEAN}, additionalProperties=False)


def moved_stream(served: ServedModel) -> Schema:
    """The body of POST /v1/streams/resume."""
    begun = record(
        {"fingerprint": STRING, "seed": INTEGER, "created": INTEGER},
        "fingerprint",
        "seed",
        "created",
    )
    token = {**INTEGER, "minimum": 0, "maximum": served.vocab_size - 1}
    return record(
        {
            "path": one_of(*stream_migration.DIALECTS),
            "body": STRING,
            "begun": begun,
            "tokens": {"type": "array", "items": token, "minItems": 1},
        },
        "path",
        "body",
        "begun",
        "tokens",
        additionalProperties=False,
    )
