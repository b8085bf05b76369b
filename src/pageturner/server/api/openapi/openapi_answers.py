"""The answers of every endpoint, as JSON Schema: whole ones, the events of streams, and errors.

Owns what a client may rely on: what is `required` here is always there. Answers may have more fields than
stand here. tests/server/test_openapi.py holds real answers against it. Must not know paths
(openapi_operations.py).
"""

from __future__ import annotations

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
    one_of,
    record,
    ref,
)

TEXT, MAYBE_TEXT = STRING, nullable(STRING)
COUNT: Schema = {"type": "integer", "minimum": 0}
STATUSES = ("queued", "in_progress", "completed", "incomplete", "failed", "cancelled")


# -- errors --------------------------------------------------------------------------------------------------
def errors() -> dict[str, Schema]:
    """The three shapes of errors."""
    ours = {"message": TEXT, "type": TEXT, "param": MAYBE_TEXT, "code": INTEGER, "reason": TEXT}
    theirs = {"type": TEXT, "message": TEXT, "param": MAYBE_TEXT, "reason": TEXT}
    return {
        "Error": record({"error": record(ours, *ours)}, "error"),
        "AnthropicError": record(
            {"type": one_of("error"), "error": record(theirs, *theirs)}, "type", "error"
        ),
        "OllamaError": record({"error": TEXT, "reason": TEXT}, "error", "reason"),
    }


# -- OpenAI's older APIs -------------------------------------------------------------------------------------
def _usage() -> Schema:
    counts = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT)
    details = record({"cached_tokens": COUNT}, "cached_tokens")
    return record({**counts, "prompt_tokens_details": details, "recomputed_tokens": COUNT}, *counts)


def _finish(*more: str) -> Schema:
    return one_of("stop", "length", *more, None)


def _head(kind: str) -> dict[str, Schema]:
    return {
        "id": TEXT,
        "object": one_of(kind),
        "created": INTEGER,
        "model": TEXT,
        "system_fingerprint": TEXT,
    }


def _known_tokens() -> Schema:
    """Logprobs of completions: lists side by side."""
    likely = {"type": ["object", "null"], "additionalProperties": NUMBER}
    lists = {
        "tokens": array(TEXT),
        "token_logprobs": array(nullable(NUMBER)),
        "top_logprobs": array(likely),
        "text_offset": array(INTEGER),
    }
    return nullable(record(lists, *lists))


def _known_content() -> Schema:
    """Logprobs of chats: an entry for each token."""
    entry = {"token": TEXT, "logprob": NUMBER, "bytes": array(COUNT)}
    likely = array(record(entry, *entry))
    content = array(record({**entry, "top_logprobs": likely}, *entry, "top_logprobs"))
    return nullable(record({"content": content}, "content"))


def _beside() -> dict[str, Schema]:
    """What stands beside an answer where it was asked for."""
    return {
        "timings": array(OBJECT),
        "receipt": OBJECT,
        "prompt_logprobs": nullable(array(nullable(OBJECT))),
        "token_ids": array(COUNT),
        "prompt_token_ids": array(COUNT),
    }


def completion() -> dict[str, Schema]:
    """Of /v1/completions."""
    choice = {
        "index": COUNT,
        "text": TEXT,
        "logprobs": _known_tokens(),
        "finish_reason": _finish(),
        "stop_reason": ANYTHING,
    }
    head, more = _head("text_completion"), _beside()
    whole = record({**choice, **more}, "index", "text", "logprobs", "finish_reason", "stop_reason")
    part = record({**choice, **more}, "index", "text", "logprobs", "finish_reason")
    return {
        "Usage": _usage(),
        "Completion": record(
            {**head, "choices": array(whole), "usage": ref("Usage"), **more},
            *head,
            "choices",
            "usage",
        ),
        "CompletionChunk": record(
            {**head, "choices": array(part), "usage": ref("Usage"), **more}, *head, "choices"
        ),
    }


def chat() -> dict[str, Schema]:
    """Of /v1/chat/completions."""
    function = {"name": TEXT, "arguments": TEXT}
    call = {"id": TEXT, "type": one_of("function"), "function": record(function, *function)}
    piece = record(
        {"index": COUNT, "id": TEXT, "type": TEXT, "function": record(function)}, "index"
    )
    thoughts = {"reasoning": TEXT, "reasoning_content": TEXT}
    message = {"role": one_of("assistant"), "content": MAYBE_TEXT, **thoughts}
    calls = array(record(call, *call))
    why = {"finish_reason": _finish("tool_calls"), "logprobs": _known_content()}
    choice = {
        "index": COUNT,
        "message": record({**message, "tool_calls": calls}, "role", "content"),
        **why,
        "stop_reason": ANYTHING,
    }
    delta = record({**message, "tool_calls": array(piece)})
    head, more = _head("chat.completion"), _beside()
    part = record(
        {"index": COUNT, "delta": delta, **why, "stop_reason": ANYTHING, **more}, "index", "delta"
    )
    return {
        "ChatCompletion": record(
            {
                **head,
                "choices": array(record({**choice, **more}, *choice)),
                "usage": ref("Usage"),
                **more,
            },
            *head,
            "choices",
            "usage",
        ),
        "ChatCompletionChunk": record(
            {
                **_head("chat.completion.chunk"),
                "choices": array(part),
                "usage": ref("Usage"),
                **more,
            },
            *head,
            "choices",
        ),
    }


# -- other shapes --------------------------------------------------------------------------------------------
def responses() -> dict[str, Schema]:
    """Of /v1/responses."""
    item = record({"id": TEXT, "type": TEXT, "status": TEXT}, "type")
    used = dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), COUNT)
    whole = {
        "id": TEXT,
        "object": one_of("response"),
        "created_at": INTEGER,
        "status": one_of(*STATUSES),
        "background": BOOLEAN,
        "error": nullable(record({"code": TEXT, "message": TEXT}, "code", "message")),
        "incomplete_details": nullable(record({"reason": TEXT}, "reason")),
        "model": TEXT,
        "output": array(item),
        "tools": array(ANYTHING),
        "tool_choice": ANYTHING,
        "temperature": nullable(NUMBER),
        "top_p": nullable(NUMBER),
        "usage": nullable(record(used, *used)),
        "store": BOOLEAN,
        "previous_response_id": MAYBE_TEXT,
        "instructions": MAYBE_TEXT,
        "text": OBJECT,
    }
    deleted = {"id": TEXT, "object": one_of("response.deleted"), "deleted": one_of(True)}
    listed = {"object": one_of("list"), "data": array(OBJECT), "has_more": BOOLEAN}
    event = {"type": {**STRING, "pattern": r"^response\."}, "sequence_number": COUNT}
    return {
        "Response": record(whole, *whole),
        "ResponseDeleted": record(deleted, *deleted),
        "ResponseItems": record(listed, *listed),
        "ResponseEvent": record({**event, "response": ref("Response"), "delta": TEXT}, *event),
    }


def messages() -> dict[str, Schema]:
    """Of /v1/messages."""
    names = (
        "input_tokens",
        "cache_creation_input_tokens",
        "cache_read_input_tokens",
        "output_tokens",
    )
    used = dict.fromkeys(names, COUNT)
    whole = {
        "id": TEXT,
        "type": one_of("message"),
        "role": one_of("assistant"),
        "model": TEXT,
        "content": array(record({"type": TEXT}, "type")),
        "stop_reason": MAYBE_TEXT,
        "stop_sequence": MAYBE_TEXT,
        "usage": record(used, *used),
    }
    kinds = one_of(
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    )
    return {
        "Message": record(whole, *whole),
        "MessageEvent": record(
            {"type": kinds, "index": COUNT, "delta": OBJECT, "message": ref("Message")}, "type"
        ),
        "CountedTokens": record({"input_tokens": COUNT}, "input_tokens"),
    }


def ollama() -> dict[str, Schema]:
    """Of Ollama's API. The last line of a stream says how long it took."""
    line = {"model": TEXT, "created_at": TEXT, "done": BOOLEAN}
    times = "total_duration", "load_duration", "prompt_eval_duration", "eval_duration"
    figures = dict.fromkeys(("prompt_eval_count", "eval_count", *times), COUNT)
    more = {**line, "done_reason": MAYBE_TEXT, **figures}
    said = record({"role": one_of("assistant"), "content": TEXT}, "role", "content")
    model = {
        "name": TEXT,
        "model": TEXT,
        "modified_at": TEXT,
        "size": COUNT,
        "digest": TEXT,
        "details": OBJECT,
    }
    shown = {"template": TEXT, "details": OBJECT, "model_info": OBJECT, "capabilities": array(TEXT)}
    return {
        "OllamaChat": record({**more, "message": said}, *line, "message"),
        "OllamaText": record({**more, "response": TEXT}, *line, "response"),
        "OllamaModels": record({"models": array(record(model, *model))}, "models"),
        "OllamaShown": record(shown, *shown),
    }


def embeddings() -> dict[str, Schema]:
    """Of /v1/embeddings."""
    row = {
        "object": one_of("embedding"),
        "index": COUNT,
        "embedding": {"type": ["array", "string"], "items": NUMBER},
    }
    used = dict.fromkeys(("prompt_tokens", "total_tokens"), COUNT)
    whole = {
        "id": TEXT,
        "object": one_of("list"),
        "data": array(record(row, *row)),
        "model": TEXT,
        "usage": record(used, *used),
    }
    return {"Embeddings": record(whole, *whole)}


def others() -> dict[str, Schema]:
    """Of scores, gaps and Ollama's rows."""
    used = record(
        dict.fromkeys(("prompt_tokens", "total_tokens"), COUNT), "prompt_tokens", "total_tokens"
    )
    head = {"id": TEXT, "object": one_of("list"), "model": TEXT, "usage": used}
    best = record(
        {"index": COUNT, "relevance_score": NUMBER, "document": OBJECT}, "index", "relevance_score"
    )
    score = {"index": COUNT, "object": one_of("score"), "score": NUMBER}
    rows = {
        "model": TEXT,
        "embeddings": array(array(NUMBER)),
        "total_duration": COUNT,
        "load_duration": COUNT,
        "prompt_eval_count": COUNT,
    }
    return {
        "Reranked": record({**head, "results": array(best)}, *head, "results"),
        "Scores": record(
            {**head, "created": INTEGER, "data": array(record(score, *score))},
            *head,
            "created",
            "data",
        ),
        "Gap": record({"content": TEXT, "stop": BOOLEAN}, "content", "stop"),
        "OllamaRows": record(rows, "embeddings"),
        "OllamaRow": record({"embedding": array(NUMBER)}, "embedding"),
    }


def kept() -> dict[str, Schema]:
    """Of files, batches and sessions."""
    file = {
        "id": TEXT,
        "object": one_of("file"),
        "bytes": COUNT,
        "created_at": INTEGER,
        "filename": TEXT,
        "purpose": TEXT,
        "status": TEXT,
    }
    counts = dict.fromkeys(("total", "completed", "failed"), COUNT)
    batch = {
        "id": TEXT,
        "object": one_of("batch"),
        "endpoint": TEXT,
        "errors": nullable(OBJECT),
        "input_file_id": TEXT,
        "completion_window": TEXT,
        "status": TEXT,
        "created_at": INTEGER,
        "output_file_id": MAYBE_TEXT,
        "error_file_id": MAYBE_TEXT,
        "request_counts": record(counts, *counts),
        "metadata": nullable(OBJECT),
    }
    session = {
        "id": TEXT,
        "object": one_of("session"),
        "created": INTEGER,
        "status": TEXT,
        "turns": COUNT,
        "tokens": COUNT,
        "kept_tokens": COUNT,
    }
    deleted = {"id": TEXT, "object": TEXT, "deleted": one_of(True)}
    return {
        "File": record(file, *file),
        "Files": _list(ref("File"), has_more=BOOLEAN),
        "FileDeleted": record(deleted, *deleted),
        "Batch": record(batch, *batch),
        "Batches": _list(ref("Batch"), has_more=BOOLEAN),
        "Session": record(session, *session),
        "Sessions": _list(ref("Session")),
        "SessionDeleted": record(deleted, *deleted),
    }


# -- the small endpoints -------------------------------------------------------------------------------------
def small() -> dict[str, Schema]:
    """Of the endpoints that a server answers at once."""
    model = {
        "id": TEXT,
        "object": one_of("model"),
        "created": INTEGER,
        "owned_by": TEXT,
        "root": TEXT,
        "parent": MAYBE_TEXT,
        "max_model_len": nullable(COUNT),
    }
    tokens = {
        "count": COUNT,
        "max_model_len": COUNT,
        "tokens": array(COUNT),
        "token_strs": nullable(array(TEXT)),
    }
    prefix = {
        "id": TEXT,
        "object": one_of("prefix"),
        "created": INTEGER,
        "tokens": COUNT,
        "status": TEXT,
    }
    deleted = {"id": TEXT, "object": one_of("prefix"), "deleted": one_of(True)}
    timeline = {"id": TEXT, "choices": array(OBJECT)}
    slot = {"id": COUNT, "n_ctx": COUNT, "is_processing": BOOLEAN}
    return {
        "Status": record({"status": one_of("ok")}, "status"),
        "Version": record({"version": TEXT}, "version"),
        "Load": record(
            {
                "server_load": COUNT,
                "role": TEXT,
                "predicted_tokens": COUNT,
                "answer_tokens": NUMBER,
            },
            "server_load",
        ),
        "Model": record(model, *model),
        "Models": _list(ref("Model")),
        "Tokens": record(tokens, *tokens),
        "Text": record({"prompt": TEXT}, "prompt"),
        "Prefix": record(prefix, *prefix),
        "Prefixes": _list(ref("Prefix")),
        "PrefixDeleted": record(deleted, *deleted),
        "Timeline": record(timeline, *timeline),
        "Slots": array(record(slot, *slot)),
        "Settings": record({"applied": BOOLEAN}, "applied"),
    }


def _list(of: Schema, **more: Schema) -> Schema:
    return record({"object": one_of("list"), "data": array(of), **more}, "object", "data")


def components() -> dict[str, Schema]:
    """All of them, by their names in the document."""
    parts = (errors, completion, chat, responses, messages, ollama, embeddings, others, kept, small)
    return {name: schema for part in parts for name, schema in part().items()}
