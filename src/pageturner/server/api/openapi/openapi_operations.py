"""Every operation of a server: a method, a path, what it takes and what comes back.

A route of app.py has its entry here: tests/server/test_openapi.py says so where one is missing. Owns the
table.
Must not know how a document is made of it (openapi.py), nor fields (openapi_bodies.py, openapi_answers.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pageturner.http.json_schemas import STRING, Schema, one_of
from pageturner.http.request_info import SAFE_ID
from pageturner.server.api.base.call import ServedModel
from pageturner.server.api.openapi import openapi_bodies as bodies
from pageturner.server.api.openapi import openapi_small_bodies as small

GENERATED = (
    404,
    409,
    429,
    504,
)  # what a request for an answer may meet beside the errors of every request
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
PROMETHEUS, PLAIN = "text/plain", ""


@dataclass(frozen=True, slots=True)
class ApiOperation:
    """One method of one path.

    method, path  as its route has them, the path's variables as {name}
    summary   one line
    group     under which the page of the documentation shows it
    body      the schema of its body for a model; None: it takes none
    answer    which of the components the JSON of its answer is; "": any JSON
    events    which of them an event of its stream, or a line, is; "": it does not stream
    media     of its answer: of its stream, where it has one; PLAIN: it has no content
    errors    statuses beside those of every request
    targets   it takes headers that say how urgent it is
    open      it needs no key; admin: it takes the admin key
    variable  the schema of the path's variable
    form      its body is of this media type, not JSON
    made      operations whose path has the id of what this one has made
    """

    method: str
    path: str
    summary: str
    group: str
    body: Callable[[ServedModel], Schema] | None = None
    answer: str = ""
    events: str = ""
    media: str = "application/json"
    errors: tuple[int, ...] = ()
    targets: bool = False
    open: bool = False
    admin: bool = False
    variable: Callable[[ServedModel], Schema] = lambda _: dict(STRING)
    form: str = "application/json"
    made: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Its name in the document."""
        words = self.path.replace("{", "by_").replace("}", "").strip("/").replace("/", "_")
        return f"{self.method.lower()}_{words}"


def _safe_id(_: ServedModel) -> Schema:
    return {**STRING, "pattern": f"^{SAFE_ID.pattern}$"}


def _model_name(served: ServedModel) -> Schema:
    return one_of(served.model, *served.names)


def _generates(
    path: str,
    summary: str,
    group: str,
    body: Callable[[ServedModel], Schema],
    answer: str,
    events: str = "",
    media: str = EVENTS,
    made: tuple[str, ...] = (),
) -> ApiOperation:
    return ApiOperation(
        "POST",
        path,
        summary,
        group,
        body,
        answer,
        events,
        media,
        errors=GENERATED,
        targets=True,
        made=made,
    )


_OPENAI, _ABOUT, _ANTHROPIC, _OLLAMA = "OpenAI", "About the server", "Anthropic", "Ollama"
_TEXT, _PREFIX, _ADMIN = "Tokens", "Pinned prefixes", "Administration"
_OTHERS, _BATCHES, _SESSIONS = "Rows, scores and gaps", "Batches", "Sessions"
_RESPONSE = "/v1/responses/{id}"

OPERATIONS: tuple[ApiOperation, ...] = (
    _generates(
        "/v1/chat/completions",
        "What the assistant says next",
        _OPENAI,
        bodies.chat,
        "ChatCompletion",
        "ChatCompletionChunk",
    ),
    _generates(
        "/v1/completions",
        "The text behind a prompt",
        _OPENAI,
        bodies.completion,
        "Completion",
        "CompletionChunk",
    ),
    _generates(
        "/v1/responses",
        "An answer that is kept",
        _OPENAI,
        bodies.response,
        "Response",
        "ResponseEvent",
        made=(
            "get_v1_responses_by_id",
            "delete_v1_responses_by_id",
            "post_v1_responses_by_id_cancel",
            "get_v1_responses_by_id_input_items",
        ),
    ),
    ApiOperation("GET", _RESPONSE, "A kept answer", _OPENAI, answer="Response", errors=(404,)),
    ApiOperation(
        "DELETE", _RESPONSE, "Forget an answer", _OPENAI, answer="ResponseDeleted", errors=(404,)
    ),
    ApiOperation(
        "POST",
        f"{_RESPONSE}/cancel",
        "End an answer in the background",
        _OPENAI,
        answer="Response",
        errors=(404,),
    ),
    ApiOperation(
        "GET",
        f"{_RESPONSE}/input_items",
        "What was asked",
        _OPENAI,
        answer="ResponseItems",
        errors=(404,),
    ),
    _generates(
        "/v1/embeddings", "A row of numbers for each text", _OPENAI, bodies.embedding, "Embeddings"
    ),
    *(
        _generates(
            path, "The documents that go best with a query", _OTHERS, small.reranked, "Reranked"
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        _generates(path, "How well pairs of texts go together", _OTHERS, small.scored, "Scores")
        for path in ("/v1/score", "/score")
    ),
    _generates(
        "/infill", "The text in a gap, as llama.cpp says it", _OTHERS, small.gap, "Gap", "Gap"
    ),
    ApiOperation(
        "POST",
        "/v1/files",
        "Keep a file of requests",
        _BATCHES,
        small.file,
        "File",
        errors=(404, 429, 507),
        form="multipart/form-data",
        made=("get_v1_files_by_id", "delete_v1_files_by_id", "get_v1_files_by_id_content"),
    ),
    ApiOperation(
        "GET", "/v1/files", "The files that are kept", _BATCHES, answer="Files", errors=(404,)
    ),
    ApiOperation("GET", "/v1/files/{id}", "About a file", _BATCHES, answer="File", errors=(404,)),
    ApiOperation(
        "DELETE",
        "/v1/files/{id}",
        "Forget a file",
        _BATCHES,
        answer="FileDeleted",
        errors=(404, 409),
    ),
    ApiOperation(
        "GET",
        "/v1/files/{id}/content",
        "What is in it",
        _BATCHES,
        media="application/octet-stream",
        errors=(404,),
    ),
    ApiOperation(
        "POST",
        "/v1/batches",
        "Answer a file of requests when there is nothing better to do",
        _BATCHES,
        small.batch,
        "Batch",
        errors=(404, 409, 429),
        made=("get_v1_batches_by_id", "post_v1_batches_by_id_cancel"),
    ),
    ApiOperation("GET", "/v1/batches", "All batches", _BATCHES, answer="Batches", errors=(404,)),
    ApiOperation(
        "GET", "/v1/batches/{id}", "About a batch", _BATCHES, answer="Batch", errors=(404,)
    ),
    ApiOperation(
        "POST",
        "/v1/batches/{id}/cancel",
        "End a batch",
        _BATCHES,
        answer="Batch",
        errors=(404, 409),
    ),
    ApiOperation("GET", "/v1/sessions", "The sessions", _SESSIONS, answer="Sessions"),
    ApiOperation(
        "GET", "/v1/sessions/{id}", "About a session", _SESSIONS, answer="Session", errors=(404,)
    ),
    ApiOperation(
        "DELETE",
        "/v1/sessions/{id}",
        "Let a session go",
        _SESSIONS,
        answer="SessionDeleted",
        errors=(404,),
    ),
    ApiOperation("GET", "/v1/models", "The models that are served", _OPENAI, answer="Models"),
    ApiOperation(
        "GET",
        "/v1/models/{id}",
        "One of them",
        _OPENAI,
        answer="Model",
        errors=(404,),
        variable=_model_name,
    ),
    _generates(
        "/v1/messages",
        "What the assistant says next",
        _ANTHROPIC,
        bodies.anthropic,
        "Message",
        "MessageEvent",
    ),
    ApiOperation(
        "POST",
        "/v1/messages/count_tokens",
        "How many tokens a conversation has",
        _ANTHROPIC,
        bodies.counted,
        "CountedTokens",
        errors=(404, 429),
    ),
    _generates(
        "/api/chat",
        "What the assistant says next",
        _OLLAMA,
        small.or_loads(bodies.ollama_chat, texts=("prompt", "suffix"), lists=("messages",)),
        "OllamaChat",
        "OllamaChat",
        LINES,
    ),
    _generates(
        "/api/generate",
        "The text behind a prompt",
        _OLLAMA,
        small.or_loads(bodies.ollama_generate, texts=("prompt", "suffix"), lists=("messages",)),
        "OllamaText",
        "OllamaText",
        LINES,
    ),
    _generates(
        "/api/embed",
        "A row of numbers for each text",
        _OLLAMA,
        small.or_loads(small.ollama_rows, texts=("input", "prompt"), lists=("input",)),
        "OllamaRows",
    ),
    _generates(
        "/api/embeddings",
        "A row of numbers",
        _OLLAMA,
        small.or_loads(small.ollama_row, texts=("input", "prompt"), lists=("input",)),
        "OllamaRow",
    ),
    ApiOperation("GET", "/api/tags", "The models that are served", _OLLAMA, answer="OllamaModels"),
    ApiOperation("GET", "/api/ps", "The models that are loaded", _OLLAMA, answer="OllamaModels"),
    ApiOperation(
        "POST", "/api/show", "About a model", _OLLAMA, small.show, "OllamaShown", errors=(404,)
    ),
    ApiOperation("GET", "/api/version", "The version", _OLLAMA, answer="Version"),
    ApiOperation(
        "POST",
        "/tokenize",
        "The tokens of a text or a conversation",
        _TEXT,
        small.tokenize,
        "Tokens",
        errors=(404, 429),
    ),
    ApiOperation(
        "POST",
        "/detokenize",
        "The text of tokens",
        _TEXT,
        small.detokenize,
        "Text",
        errors=(404, 429),
    ),
    ApiOperation("GET", "/tokenizer_info", "Special tokens and chat template", _TEXT),
    ApiOperation(
        "POST",
        "/v1/prefixes",
        "Compute the KV of a prefix and keep it",
        _PREFIX,
        small.prefix,
        "Prefix",
        errors=(404, 409, 429),
        made=("delete_v1_prefixes_by_id",),
    ),
    ApiOperation("GET", "/v1/prefixes", "The prefixes that are kept", _PREFIX, answer="Prefixes"),
    ApiOperation(
        "DELETE",
        "/v1/prefixes/{id}",
        "Let a prefix go",
        _PREFIX,
        answer="PrefixDeleted",
        errors=(404,),
        variable=_safe_id,
    ),
    ApiOperation(
        "POST", "/reset_prefix_cache", "Forget the KV of earlier requests", _PREFIX, media=PLAIN
    ),
    ApiOperation(
        "GET", "/health", "Whether requests are answered", _ABOUT, answer="Status", open=True
    ),
    ApiOperation(
        "GET", "/ping", "Whether the server process lives", _ABOUT, media=PLAIN, open=True
    ),
    ApiOperation("POST", "/ping", "The same", _ABOUT, media=PLAIN, open=True),
    ApiOperation("GET", "/metrics", "Metrics for Prometheus", _ABOUT, media=PROMETHEUS, open=True),
    ApiOperation("GET", "/version", "The version", _ABOUT, answer="Version", open=True),
    ApiOperation("GET", "/load", "Answers under way", _ABOUT, answer="Load", open=True),
    ApiOperation("GET", "/server_info", "The settings of the engine", _ABOUT),
    ApiOperation("GET", "/props", "About the model, as llama.cpp says it", _ABOUT),
    ApiOperation(
        "GET", "/slots", "Sequences that may run, as llama.cpp says it", _ABOUT, answer="Slots"
    ),
    ApiOperation(
        "GET",
        "/v1/requests/{id}/timeline",
        "Where the time of a request went",
        _ABOUT,
        answer="Timeline",
        errors=(404,),
        variable=_safe_id,
    ),
    ApiOperation("GET", "/openapi.json", "This document", _ABOUT, open=True),
    ApiOperation("GET", "/docs", "This document, to read", _ABOUT, media="text/html", open=True),
    ApiOperation("GET", "/", "A chat with the model", _ABOUT, media="text/html", open=True),
    ApiOperation(
        "GET",
        "/v1/admin/config",
        "Settings that can be changed",
        _ADMIN,
        answer="Settings",
        errors=(404,),
        admin=True,
    ),
    ApiOperation(
        "POST",
        "/v1/admin/config",
        "Change them",
        _ADMIN,
        small.settings,
        "Settings",
        errors=(404,),
        admin=True,
    ),
    ApiOperation(
        "POST",
        "/v1/admin/drain",
        "Take no new requests, and have streams go on at other servers",
        _ADMIN,
        small.drain_order,
        errors=(404,),
        admin=True,
    ),
    ApiOperation(
        "POST",
        "/v1/streams/resume",
        "Go on with a stream of another server, as routers ask",
        _ADMIN,
        small.moved_stream,
        media=EVENTS,
        errors=GENERATED,
    ),
    ApiOperation(
        "POST",
        "/v1/load_lora_adapter",
        "Another LoRA adapter",
        _ADMIN,
        small.loaded_adapter,
        media="text/plain",
        errors=(404,),
        admin=True,
    ),
    ApiOperation(
        "POST",
        "/v1/unload_lora_adapter",
        "Forget an adapter",
        _ADMIN,
        small.unloaded_adapter,
        media="text/plain",
        errors=(404,),
        admin=True,
    ),
    ApiOperation(
        "GET", "/v1/admin/state", "What the server is doing", _ADMIN, errors=(404,), admin=True
    ),
    ApiOperation(
        "GET", "/v1/live", "The latest steps of the engine", _ADMIN, errors=(404,), admin=True
    ),
)
