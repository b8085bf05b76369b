"""Chats with tools through a server, each whole and as a stream: what came, and whether both are the same.

Owns the requests on the wire and how a stream is put together by OpenAI's rules. Must not know what makes a
call valid (api_tools.py) nor what is asked (api_tools_cases.py).
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from harness import Server

Json = dict[str, Any]
AT_ONCE = 24


@dataclass(slots=True)
class Answer:
    """One answer to a chat. ids: its tokens; refused: the error it was refused with."""

    content: str = ""
    thoughts: str = ""
    calls: list[Json] = field(default_factory=list)
    finish: str = ""
    tokens: int = 0
    ids: list[int] = field(default_factory=list)
    refused: str = ""


def post(url: str, body: Json) -> tuple[int, bytes]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def whole(server: Server, body: Json) -> Answer:
    status, raw = post(f"{server.url}/v1/chat/completions", body)
    told = json.loads(raw)
    if status != 200:
        return Answer(refused=f"{status} {told['error']['message']}"[:300])
    (choice,) = told["choices"]
    message = choice["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    return Answer(
        message["content"] or "",
        message.get("reasoning") or "",
        [{"id": one["id"], **one["function"]} for one in message.get("tool_calls", ())],
        choice["finish_reason"],
        told["usage"]["completion_tokens"],
        choice["token_ids"],
    )


def streamed(server: Server, body: Json) -> Answer:
    """The same, put together of its deltas. AssertionError where they break OpenAI's rules."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    status, raw = post(f"{server.url}/v1/chat/completions", body)
    if status != 200:
        return Answer(refused=f"{status} {json.loads(raw)['error']['message']}"[:300])
    made = Answer()
    events = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    for event in map(json.loads, events[:-1]):
        if "error" in event:
            return Answer(refused=f"in the stream: {event['error']['message']}"[:300])
        made.tokens = (event.get("usage") or {}).get("completion_tokens", made.tokens)
        for choice in event["choices"]:
            assert not made.finish, "something behind the end"
            made.finish = choice["finish_reason"] or ""
            made.ids += choice.get("token_ids") or ()
            _add(made, choice["delta"])
    return made


def _add(made: Answer, delta: Json) -> None:
    made.content += delta.get("content") or ""
    made.thoughts += delta.get("reasoning") or ""
    for call in delta.get("tool_calls", ()):
        if call["index"] == len(made.calls):
            assert call["type"] == "function"
            made.calls.append({"id": call["id"], **call["function"]})
        else:
            assert call["index"] == len(made.calls) - 1, "calls come one after the other"
            assert "id" not in call
            made.calls[-1]["arguments"] += call["function"]["arguments"]


def both(server: Server, bodies: list[Json]) -> list[tuple[Answer, Answer | str]]:
    """Each whole and streamed, many at a time; the second is a text where the stream breaks the rules."""

    def one(body: Json) -> tuple[Answer, Answer | str]:
        try:
            return whole(server, body), streamed(server, body)
        except AssertionError as error:
            return Answer(), f"{error}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [*pool.map(one, bodies)]
