"""Tools and thoughts in every shape of the API: whole as in a stream, in order, when an engine dies too."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from .bytes_tokenizer import SPECIALS
from .conftest import Server, shared

Json = dict[str, Any]
Part = tuple[str, str, str]  # kind, name of a tool, text
FLAGS = ("--developer", "--tool-call-parser", "hermes", "--reasoning-parser", "think")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Bonn é"}}\n</tool_call>'
LOOK: Part = ("call", "look", '{"city": "Bonn é"}')
SAID: list[tuple[str, list[Part]]] = [
    ("Well.", [("content", "", "Well.")]),
    (CALL, [LOOK]),
    (f"Well.\n{CALL}\n{CALL}", [("content", "", "Well."), LOOK, LOOK]),
    (
        f"<think>\nHm.\n</think>\n\n{CALL} Done.",
        [("reasoning", "", "Hm."), LOOK, ("content", "", " Done.")],
    ),
    ("<think>\nHm.\n</think>\n\nYes", [("reasoning", "", "Hm."), ("content", "", "Yes")]),
    ("<think>Hm", [("reasoning", "", "Hm")]),
    ("", [("content", "", "")]),
]


def forced(text: str, most: int = 1000) -> Json:
    """What makes the model say this, and end."""
    ids = [*text.encode(), SPECIALS["<|end|>"]]
    return {"force_ids": ids, "max_tokens": min(len(ids), most), "seed": 1}


# -- each shape: how it is asked, and the parts of its answer ------------------------------------------------
def chat_body(fields: Json) -> Json:
    messages = [{"role": "user", "content": "hi"}]
    return {"messages": messages, "tools": [{"type": "function", "function": FUNCTION}], **fields}


def responses_body(fields: Json) -> Json:
    most = fields.pop("max_tokens")
    return {
        "input": "hi",
        "tools": [{"type": "function", **FUNCTION}],
        "max_output_tokens": most,
        **fields,
    }


def messages_body(fields: Json) -> Json:
    tool = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
    return {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], **fields}


def ollama_body(fields: Json) -> Json:
    return {"options": {"num_predict": fields.pop("max_tokens")}, **chat_body(fields)}


def chat_whole(told: Json) -> tuple[list[Part], Any, int]:
    choice = told["choices"][0]
    message = choice["message"]
    parts: list[Part] = []
    if message.get("reasoning_content"):
        parts.append(("reasoning", "", message["reasoning_content"]))
    if message["content"] or not (parts or message.get("tool_calls")):
        parts.append(("content", "", message["content"] or ""))
    for call in message.get("tool_calls", ()):
        parts.append(("call", call["function"]["name"], call["function"]["arguments"]))
    return (
        parts,
        choice["finish_reason"],
        told["usage"]["completion_tokens_details"]["reasoning_tokens"],
    )


def responses_whole(told: Json) -> tuple[list[Part], Any, int]:
    parts: list[Part] = []
    for item in told["output"]:
        if item["type"] == "function_call":
            assert item["call_id"].startswith("call_")
            parts.append(("call", item["name"], item["arguments"]))
        else:
            kind = "content" if item["type"] == "message" else "reasoning"
            parts.append((kind, "", "".join(part["text"] for part in item["content"])))
    assert len({item["id"] for item in told["output"]}) == len(told["output"])
    return parts, told["status"], told["usage"]["output_tokens_details"]["reasoning_tokens"]


def messages_whole(told: Json) -> tuple[list[Part], Any, int]:
    parts: list[Part] = []
    for block in told["content"]:
        if block["type"] == "tool_use":
            assert block["id"].startswith("toolu_")
            parts.append(("call", block["name"], json.dumps(block["input"], ensure_ascii=False)))
        elif block["type"] == "thinking":
            assert block["signature"]
            parts.append(("reasoning", "", block["thinking"]))
        else:
            parts.append(("content", "", block["text"]))
    return parts, told["stop_reason"], told["usage"]["output_tokens_details"]["thinking_tokens"]


def events(response: httpx.Response) -> Iterator[Json]:
    assert response.status_code == 200, response.text
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def chat_streamed(response: httpx.Response) -> tuple[list[Part], Any, int]:
    thoughts = content = finish = None
    calls: list[list[str]] = []
    used: Json = {}
    for event in events(response):
        used = event.get("usage") or used
        for choice in event["choices"]:
            delta, finish = choice["delta"], choice["finish_reason"]
            thoughts = (thoughts or "") + delta["reasoning"] if "reasoning" in delta else thoughts
            content = (content or "") + delta["content"] if "content" in delta else content
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
    parts: list[Part] = [] if thoughts is None else [("reasoning", "", thoughts)]
    parts += [("content", "", content or "")] if content or not (parts or calls) else []
    parts += [("call", name, arguments) for name, arguments in calls]
    return parts, finish, used["completion_tokens_details"]["reasoning_tokens"]


def responses_streamed(response: httpx.Response) -> tuple[list[Part], Any, int]:
    """Each event is where it must be: within its item, and that behind the one before it."""
    names = {
        "output_text": "content",
        "reasoning_text": "reasoning",
        "function_call_arguments": "call",
    }
    parts: list[Part] = []
    item: Json | None = None
    last: Json = {}
    for number, event in enumerate(events(response)):
        assert event["sequence_number"] == number
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert item is None
            item, text = event["item"], ""
            assert (event["output_index"], item["status"]) == (len(parts), "in_progress")
        elif kind.endswith((".delta", ".done")) and kind.partition(".")[0] in names:
            assert item is not None
            assert (event["item_id"], event["output_index"]) == (item["id"], len(parts))
            text += event.get("delta", "")
            assert not kind.endswith(".done") or text in (event.get("text"), event.get("arguments"))
            found = names[kind.partition(".")[0]]
        elif kind == "output_item.done":
            assert item is not None
            assert event["item"]["id"] == item["id"]
            parts.append((found, item.get("name", ""), text))
            item = None
        last = event
    assert item is None
    assert responses_whole(last["response"])[0] == parts
    return responses_whole(last["response"])


def messages_streamed(response: httpx.Response) -> tuple[list[Part], Any, int]:
    blocks: list[Json] = []
    is_open = False
    end: Json = {}
    for event in events(response):
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            is_open = True
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(blocks) - 1
            delta = dict(event["delta"])
            del delta["type"]
            ((name, text),) = delta.items()
            name = "json" if name == "partial_json" else name
            blocks[-1][name] += text
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
        elif event["type"] == "message_delta":
            end = {**event["delta"], "usage": event["usage"]}
    for block in blocks:
        told = block.pop("json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(told)
            except ValueError:
                block["input"] = {}
    return messages_whole({"content": blocks, **end})


def ollama_said(message: Json, reason: str) -> tuple[list[Part], Any, int]:
    parts: list[Part] = [("reasoning", "", message["thinking"])] if message.get("thinking") else []
    if message["content"] or not (parts or message.get("tool_calls")):
        parts.append(("content", "", message["content"] or ""))
    for place, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        assert function["index"] == place
        parts.append(
            ("call", function["name"], json.dumps(function["arguments"], ensure_ascii=False))
        )
    return parts, reason, 0


def ollama_whole(told: Json) -> tuple[list[Part], Any, int]:
    return ollama_said(told["message"], told["done_reason"])


def ollama_streamed(response: httpx.Response) -> tuple[list[Part], Any, int]:
    whole: Json = {"content": "", "thinking": "", "tool_calls": []}
    for line in map(json.loads, response.iter_lines()):
        for name, value in line["message"].items():
            if name != "role":
                whole[name] += value
    return ollama_said(whole, line["done_reason"])


Reader = Callable[[Any], tuple[list[Part], Any, int]]
SHAPES: dict[str, tuple[str, Callable[[Json], Json], Reader, Reader]] = {
    "chat": ("/v1/chat/completions", chat_body, chat_whole, chat_streamed),
    "responses": ("/v1/responses", responses_body, responses_whole, responses_streamed),
    "messages": ("/v1/messages", messages_body, messages_whole, messages_streamed),
    "ollama": ("/api/chat", ollama_body, ollama_whole, ollama_streamed),
}
each_shape = pytest.mark.parametrize("name", SHAPES)


server = shared(flags=FLAGS, FAKE_STEP_SECONDS="0")


def whole(server: Server, name: str, fields: Json) -> tuple[list[Part], Any, int]:
    path, body, read, _ = SHAPES[name]
    answer = server.http.post(path, json={**body(fields), "stream": False})
    assert answer.status_code == 200, answer.text
    return read(answer.json())


def streamed(server: Server, name: str, fields: Json) -> tuple[list[Part], Any, int]:
    path, body, _, read = SHAPES[name]
    asked = {**body(fields), "stream": True}
    if name == "chat":
        asked["stream_options"] = {"include_usage": True}
    with server.http.stream("POST", path, json=asked) as response:
        return read(response)


@each_shape
def test_parts_come_in_order_whole_and_streamed(server: Server, name: str) -> None:
    for text, expected in SAID:
        if name in ("chat", "ollama") and text.endswith("Done."):
            continue  # its one content stands before the calls
        one, other = whole(server, name, forced(text)), streamed(server, name, forced(text))
        assert one == other
        parts, why, thoughts = one
        assert parts == expected
        called = any(kind == "call" for kind, _, _ in expected)
        ends = {
            "chat": ("stop", "tool_calls"),
            "messages": ("end_turn", "tool_use"),
            "ollama": ("stop", "stop"),
        }
        assert why == ends.get(name, ("completed", "completed"))[called]
        end_of_thoughts = text.find("</think>") + 8 if "</think>" in text else len(text)
        if name != "ollama":
            assert thoughts == (len(text[:end_of_thoughts].encode()) if "<think>" in text else 0)


PIECES = (
    "<tool_call>",
    '{"name": "look", "arguments": ',
    "{",
    '"city": "B',
    '"}',
    "}}",
    "</tool_call>",
    "<think>",
    "</think>",
    " ",
    "\n",
    "é",
    "<",
    "text",
    CALL,
    f"<think>why</think>{CALL}",
)


@each_shape
def test_streamed_is_not_streamed_wherever_the_answer_is_cut(server: Server, name: str) -> None:
    dice = random.Random(name)
    for _ in range(int(os.environ.get("PARTS_ROUNDS", "15"))):
        text = "".join(dice.choices(PIECES, k=dice.randint(1, 8)))
        fields = forced(text, most=dice.randint(1, len(text.encode()) + 1))
        assert whole(server, name, dict(fields)) == streamed(server, name, dict(fields)), text


@pytest.mark.slow
def test_streams_with_calls_outlive_their_engine(start: Callable[..., Server]) -> None:
    server = start(*FLAGS)
    text = f"<think>{'why ' * 20}</think>So.{CALL * 3}"
    thoughts, expected = (
        ("reasoning", "", ("why " * 20).rstrip()),
        [("content", "", "So."), LOOK, LOOK, LOOK],
    )

    def one(name: str) -> tuple[list[Part], Any, int]:
        return streamed(server, name, forced(text))

    jobs = list(SHAPES) * 3
    server.hold(100)
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = [pool.submit(one, name) for name in jobs]
        server.kill_when_held(len(jobs))
        for answer in answers:
            assert answer.result(60)[0] == [thoughts, *expected]
    assert server.metric("pageturner:engine_restarts_total") == 1
    assert len([note for note in server.notes("submit") if note["resume"] > 0]) == len(jobs)


# -- what only one shape has ---------------------------------------------------------------------------------
def respond(server: Server, text: str, **fields: Any) -> tuple[Json, list[Json]]:
    """A whole answer of /v1/responses and the events of the same one."""
    body = {**responses_body(forced(text)), "temperature": 0, **fields}
    told = server.http.post("/v1/responses", json=body)
    with server.http.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
        return told.json(), list(events(response))


def shown(items: list[Json]) -> list[Json]:
    """Items without what differs between two answers."""
    return [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in items
    ]


def test_calls_of_custom_tools_and_of_tools_in_namespaces(server: Server) -> None:
    custom = '<tool_call>{"name": "patch", "arguments": {"input": "a\\n\\"é\\""}}</tool_call>'
    spaced = '<tool_call>{"name": "git__log", "arguments": {"n": 1}}</tool_call>'
    tools = [
        {"type": "custom", "name": "patch", "description": "Patches."},
        {"type": "namespace", "name": "git", "tools": [{"type": "function", "name": "log"}]},
    ]
    whole, told = respond(server, custom + spaced, tools=tools)
    head = {"status": "completed"}
    expected = [
        {**head, "type": "custom_tool_call", "name": "patch", "input": 'a\n"é"'},
        {
            **head,
            "type": "function_call",
            "name": "log",
            "namespace": "git",
            "arguments": '{"n": 1}',
        },
    ]
    assert shown(whole["output"]) == shown(told[-1]["response"]["output"]) == expected
    kinds = [event["type"] for event in told]
    assert kinds[2:6] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert told[3]["delta"] == told[4]["input"] == 'a\n"é"'
    assert whole["tools"] == tools
    cut, _ = respond(
        server, custom[:-20], tools=tools, max_output_tokens=len(custom[:-20].encode())
    )
    assert shown(cut["output"])[0] == {**expected[0], "status": "incomplete", "input": ""}


def test_thoughts_stand_where_the_client_looks_for_them(server: Server) -> None:
    text = "<think>Hm.</think>Yes"
    whole, told = respond(
        server, text, reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"]
    )
    thoughts = whole["output"][0]
    assert (thoughts["summary"], "content" in thoughts) == (
        [{"type": "summary_text", "text": "Hm."}],
        False,
    )
    assert thoughts["encrypted_content"]
    kinds = [event["type"].removeprefix("response.") for event in told if "summary_index" in event]
    assert (kinds[0], kinds[-1]) == ("reasoning_summary_part.added", "reasoning_summary_part.done")
    assert set(kinds[1:-2]) == {"reasoning_summary_text.delta"}
    back = [
        {name: thoughts[name] for name in ("type", "encrypted_content")},
        {"role": "user", "content": "x"},
    ]
    assert (
        server.http.post("/v1/responses", json={"input": back, "max_output_tokens": 2}).status_code
        == 200
    )
    plain, _ = respond(server, text)
    assert plain["output"][0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert "encrypted_content" not in plain["output"][0]


def test_a_conversation_goes_on_behind_a_call(server: Server) -> None:
    first, _ = respond(server, f"Well.{CALL}")
    call = first["output"][1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
    second, _ = respond(server, "So.", input=[result], previous_response_id=first["id"])
    items = server.http.get(f"/v1/responses/{second['id']}/input_items").json()["data"]
    assert [item["type"] for item in items] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert items[2] == call
    named = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    third, _ = respond(server, "So.", input=[{"role": "user", "content": "hi"}, *named, result])
    assert (
        server.http.get(f"/v1/responses/{third['id']}/input_items").json()["data"][1:] == items[1:]
    )
    lost = {"input": [{"type": "item_reference", "id": "msg_none"}]}
    assert server.http.post("/v1/responses", json=lost).status_code == 404


def test_why_a_message_ends_where_the_context_does(server: Server) -> None:
    asked = messages_body({"max_tokens": 100_000})
    told = server.http.post("/v1/messages", json=asked).json()
    assert told["stop_reason"] == "model_context_window_exceeded"
    assert told["usage"]["output_tokens"] < 2048


@pytest.mark.slow
def test_the_openai_client_takes_calls_and_thoughts(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        body = {**responses_body(forced(f"<think>Hm.</think>Well.{CALL}")), "model": "fake"}
        extra = {"force_ids": body.pop("force_ids"), "seed": body.pop("seed")}
        with client.responses.stream(**body, extra_body=extra) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
    assert "response.reasoning_text.delta" in kinds
    assert "response.function_call_arguments.done" in kinds
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Well."
