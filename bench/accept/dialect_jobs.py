"""What is asked in every shape of the API while something goes wrong, and which bytes of an answer are of one
time only: all others must be the same however often it is given.

Owns those requests and that comparison. Must not know what goes wrong.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]
FLAGS = (
    "--tool-call-parser",
    "hermes",
    "--reasoning-parser",
    "think",
    "--developer",
)  # of the server
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
PLACES = ("Paris", "the sea", "a small village", "the moon", "winter", "a library")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LIST = {
    "type": "object",
    "properties": {
        "numbers": {"type": "array", "minItems": 12, "items": {"type": "integer", "maximum": 99}}
    },
    "required": ["numbers"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks up.", "parameters": PERSON},
    },
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds up.", "parameters": LIST},
    },
]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]  # as responses have them
SCHEMAS = [
    {"name": one["name"], "input_schema": one["parameters"]} for one in FLAT
]  # as messages do
ADD = {"type": "function", "function": {"name": "add"}}
FORM = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
# seconds, of the server that is disturbed: more where others leave it little of the processors
ENGINE_TIMEOUT = float(os.environ.get("PAGETURNER_CHAOS_TIMEOUT", "3"))
PATIENCE = 80 * ENGINE_TIMEOUT  # for an answer
UNDER_WAY = ("queued", "in_progress")

# what differs between two times: when, how long it took, what was in the cache or computed twice
_TIMES = re.compile(
    rb'"(created|created_at|completed_at|total_duration|load_duration|prompt_eval_duration|eval_duration'
    rb'|cached_tokens)":(?:"[^"]*"|\d+)'
)
_CACHED = re.compile(
    rb'"input_tokens":(\d+),"cache_creation_input_tokens":0,"cache_read_input_tokens":(\d+)'
)
_AGAIN = re.compile(rb',"recomputed_tokens":\d+')
_CHOICE = re.compile(rb'"choices":\[\{"index":(\d+)')
_IDS = re.compile(rb'"(id|item_id|call_id|previous_response_id)":"[^"]*"')


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Nothing of its answer depends on anything but this."""

    name: str
    path: str
    body: Json

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream", self.path in (OLLAMA_CHAT, OLLAMA_GENERATE)))

    @property
    def background(self) -> bool:
        return bool(self.body.get("background"))


@dataclass(frozen=True, slots=True)
class Marks:
    """Tokens with which a model begins its thoughts and a call, and whole thoughts."""

    think: list[int]
    call: list[int]
    thoughts: list[int]


def marks(url: str) -> Marks:
    """Those of the model of this server."""

    def tokens(text: str) -> list[int]:
        _, raw = send(url, Ask("", "/tokenize", {"prompt": text, "add_special_tokens": False}))
        ids: list[int] = json.loads(raw)["tokens"]
        return ids

    whole = "<think>\nWell, let me see what they want to know.\n</think>\n\n"
    return Marks(tokens("<think>"), tokens("<tool_call>\n"), tokens(whole))


def asks(known: Marks, seed: int = 0, tokens: int = 40) -> list[Ask]:
    """Each dialect with each of its methods, once. seed: others have other answers."""
    said, drawn = f"Tell me of {PLACES[seed % len(PLACES)]}.", {"temperature": 0.8, "seed": seed}
    return [*_chats(known, said, drawn, tokens), *_others(known, said, drawn, tokens)]


def _chats(known: Marks, said: str, drawn: Json, tokens: int) -> list[Ask]:
    chat = talk_of(said) | drawn | {"max_tokens": tokens}
    thoughts = {
        "force_ids": known.think,
        "thinking_token_budget": tokens // 3,
        "reasoning_effort": "high",
    }
    called = {"tools": TOOLS, "max_tokens": 2 * tokens}
    return [
        Ask("tools auto", CHAT, chat | called),
        Ask("tools auto, called", CHAT, chat | called | {"force_ids": known.call}),
        Ask("tools required", CHAT, chat | called | {"tool_choice": "required", "n": 2}),
        Ask(
            "a named tool", CHAT, chat | called | {"tool_choice": ADD, "parallel_tool_calls": False}
        ),
        Ask("thoughts", CHAT, chat | thoughts | {"logprobs": True, "top_logprobs": 2}),
        Ask("thoughts and a call", CHAT, chat | called | thoughts | {"tool_choice": "required"}),
        Ask("thoughts and a schema", CHAT, chat | thoughts | {"response_format": FORM}),
        Ask(
            "a turn of a session",
            CHAT,
            chat | {"session": {"id": f"chaos-{drawn['seed']}", "keep": 60}},
        ),
    ]


def _others(known: Marks, said: str, drawn: Json, tokens: int) -> list[Ask]:
    form = {"type": "json_schema", "name": "p", "schema": PERSON}
    response = {"input": said, "max_output_tokens": tokens, **drawn}
    item = {"tools": FLAT, "tool_choice": "required", "max_output_tokens": 2 * tokens}
    message = talk_of(said) | drawn | {"max_tokens": tokens}
    block = {"tools": SCHEMAS, "tool_choice": {"type": "any"}, "max_tokens": 2 * tokens}
    thinks = {
        "force_ids": known.think,
        "thinking": {"type": "enabled", "budget_tokens": tokens // 3},
    }
    thought = {"force_ids": known.thoughts}
    ollama = {"options": {"num_predict": tokens, **drawn}}
    return [
        Ask("a response", RESPONSES, response | {"metadata": {"said": said}}),
        Ask("a response of a schema", RESPONSES, response | {"text": {"format": form}}),
        Ask("a response with a call", RESPONSES, response | item),
        Ask(
            "a response with thoughts",
            RESPONSES,
            response | thought | {"reasoning": {"effort": "low"}},
        ),
        Ask("a response with thoughts and a call", RESPONSES, response | thought | item),
        Ask("a message", MESSAGES, message | {"system": "Be brief.", "stop_sequences": ["\n\n"]}),
        Ask("a message of a schema", MESSAGES, message | {"output_config": {"format": form}}),
        Ask("a message with a call", MESSAGES, message | block),
        Ask("a message with thoughts", MESSAGES, message | thinks),
        Ask("a message with thoughts and a call", MESSAGES, message | thinks | block),
        Ask("Ollama's chat", OLLAMA_CHAT, talk_of(said) | ollama),
        Ask("Ollama's chat of a schema", OLLAMA_CHAT, talk_of(said) | ollama | {"format": PERSON}),
        Ask(
            "Ollama's calls",
            OLLAMA_CHAT,
            talk_of(said) | ollama | {"tools": TOOLS, "force_ids": known.call},
        ),
        Ask("Ollama's thoughts", OLLAMA_CHAT, talk_of(said) | ollama | thought | {"think": True}),
        Ask("Ollama's generate", OLLAMA_GENERATE, {"prompt": said, **ollama}),
        Ask("Ollama's generate, raw", OLLAMA_GENERATE, {"prompt": said, "raw": True, **ollama}),
    ]


def talk_of(said: str) -> Json:
    return {"messages": [{"role": "user", "content": said}]}


def rows(seed: int = 0) -> list[Ask]:
    """What is not streamed: rows of numbers, and scores."""
    place = PLACES[seed % len(PLACES)]
    text = f"A story about {place}. " * (1 + seed % 5)
    pairs = {"query": text, "documents": [f"All about {one}." for one in PLACES]}
    return [
        Ask("embeddings", EMBEDDINGS, {"input": [text, "Another one."]}),
        Ask(
            "embeddings, last",
            EMBEDDINGS,
            {"input": text, "pooling": "last", "encoding_format": "base64"},
        ),
        Ask("Ollama's rows", "/api/embed", {"input": [text, place]}),
        Ask("ranks", "/v1/rerank", pairs),
        Ask("scores", "/v1/score", {"text_1": text, "text_2": place, "rerank_by": "yes_no"}),
    ]


def in_one_piece(one: Ask) -> Ask:
    """The same, not streamed."""
    return Ask(f"{one.name}, whole", one.path, one.body | {"stream": False})


def as_stream(one: Ask) -> Ask:
    return Ask(one.name, one.path, one.body | {"stream": True})


def in_background(one: Ask) -> Ask:
    """The same for a client that comes back."""
    return Ask(f"{one.name}, background", one.path, one.body | {"background": True})


# what a stream says while it waits for its first token: as often as it has to wait
_ALIVE = re.compile(rb': keep-alive\n\n|event: ping\ndata: \{"type":"ping"\}\n\n')


def same_bytes(raw: bytes, ids: bool = True) -> bytes:
    """An answer without what is of one time only. ids: they are the same, because the request's was."""
    raw = _ALIVE.sub(b"", raw)
    raw = _CACHED.sub(lambda m: b'"input_tokens":%d' % (int(m[1]) + int(m[2])), raw)
    raw = _AGAIN.sub(b"", _TIMES.sub(rb'"\1":0', raw))
    return raw if ids else _IDS.sub(rb'"\1":""', raw)


def events_of(one: Ask, raw: bytes) -> list[bytes]:
    """The events, or the lines, of a whole stream; of another answer its body. Where there are several
    choices those of each stand together: which of two choices has its next token first is a matter of when
    each of them was let in."""
    if not one.streamed:
        return [raw]
    events = (
        raw.splitlines(keepends=True)
        if one.path in (OLLAMA_CHAT, OLLAMA_GENERATE)
        else raw.split(b"\n\n")
    )
    if one.body.get("n", 1) == 1:
        return events
    return sorted(events, key=_choice)


def _choice(event: bytes) -> int:
    """Of which choice it is; behind them all what is of none."""
    found = _CHOICE.search(event)
    return int(found[1]) if found else 1 << 30


def send(
    url: str,
    one: Ask,
    id: str = "",
    seen: Callable[[bytes], None] = lambda piece: None,
    method: str = "POST",
) -> tuple[int, bytes]:
    """Status and body of the answer; one that breaks off raises http.client.IncompleteRead.

    id    of the request, "" for one of the server's own
    seen  is told each piece of the answer as it comes
    """
    headers = {"Content-Type": "application/json"} | ({"X-Request-Id": id} if id else {})
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
    try:
        connection.request(method, one.path, json.dumps(one.body) if one.body else None, headers)
        answer, raw = connection.getresponse(), b""
        while piece := answer.read1(1 << 16):
            raw += piece
            seen(piece)
        if answer.length:  # of an answer that said how long it is
            raise http.client.IncompleteRead(raw)
        return answer.status, raw
    finally:
        connection.close()


def whole_answer(
    url: str, one: Ask, id: str = "", seen: Callable[[bytes], None] = lambda piece: None
) -> tuple[int, bytes]:
    """As `send`; of an answer in the background what it is when it has ended."""
    status, raw = send(url, one, id, seen)
    if not one.background or status != 200:
        return status, raw
    until, path = time.monotonic() + PATIENCE, f"{one.path}/{json.loads(raw)['id']}"
    while json.loads(raw).get("status") in UNDER_WAY and time.monotonic() < until:
        time.sleep(0.05)
        status, raw = send(url, Ask("", path, {}), method="GET")
    return status, raw
