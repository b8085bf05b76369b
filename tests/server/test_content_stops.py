"""Stops count in the content alone, and the marks of a cut call are no content: whole and streamed, in each shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.text.answer_format import AnswerFormat, AnswerReader

CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "STOP x"}}\n</tool_call>'
THINKS = "<think>\nSTOP it\n</think>\n\n"
FORMATS = {
    "hermes": AnswerFormat(tools="hermes", reasoning="think"),
    "harmony": AnswerFormat(tools="harmony", reasoning="harmony"),
    "llama3": AnswerFormat(tools="llama3"),
    "pythonic": AnswerFormat(tools="pythonic"),
    "plain": AnswerFormat(reasoning="think"),
}
PIECES = {
    "harmony": (
        "<|channel|>analysis<|message|>STOP<|end|>",
        "<|start|>assistant<|channel|>final<|message|>",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "STOP"}<|call|>',
    ),
    "llama3": ('{"name": "f", "parameters": {"a": "STOP"}}',),
    "pythonic": ('[f(a="STOP"), g()]',),
}
HERMES = (CALL, THINKS, "<tool_call>", "</think>")
TEXTS = ("a", " b", "STOP", "ST", "OP", "\n", "<", "x <", ".")


def content_of(format: AnswerFormat, text: str) -> str:
    deltas = AnswerReader(format).read(text, True)
    return "".join(delta.text for delta in deltas if delta.kind == "content")


def runs_of(format: AnswerFormat, text: str) -> str:
    """The content, with a zero wherever a mark, a thought or a call parts it: no stop lies across."""
    parser, held, runs = format.parser(), "", ""
    for one in text:
        held += one
        deltas = parser.push(one)
        decided = held[: len(held) - parser.held]
        held = held[len(decided) :]
        content = "".join(delta.text for delta in deltas if delta.kind == "content")
        runs += "\0".join([content, ""][: 1 + (decided != content)])
    return runs + "".join(delta.text for delta in parser.finish() if delta.kind == "content")


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_the_content_alone_is_cut_at_a_stop(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    format, marks = FORMATS[name], PIECES.get(name, HERMES)
    pieces = data.draw(st.lists(st.sampled_from([*marks, *TEXTS]), max_size=8))
    include = data.draw(st.booleans())
    text, stops = "".join(pieces), format.stops(("STOP",), include)
    assert stops is not None
    shown, rest = "", text
    while rest and stops.found is None:
        size = data.draw(st.integers(1, 9))
        shown += stops.push(rest[:size])
        rest = rest[size:]
    if stops.found is None:
        shown += stops.flush()
    assert text.startswith(shown)
    whole, kept = content_of(format, text), content_of(format, shown)
    if stops.found is None:
        assert shown == text
    else:
        assert whole.startswith(kept)
        assert kept.endswith("STOP") if include else whole[len(kept) :].lstrip().startswith("STOP")
    assert "STOP" not in runs_of(format, shown).rstrip("\0").removesuffix("STOP" * include)
    calls = [delta.text for delta in AnswerReader(format).read(shown, True) if delta.kind == "call"]
    if stops.found is not None and calls:  # each of them is whole
        assert shown.count("STOP x") == shown.count("</tool_call>")


TOOL = {"name": "look", "parameters": {"type": "object"}}
ASK = {"messages": [{"role": "user", "content": "the old house"}], "max_tokens": 200}
TOOLS = {"tools": [{"type": "function", "function": TOOL}]}


def ids_of(client: httpx.Client, text: str) -> list[int]:
    asked = {"prompt": text, "add_special_tokens": False}
    ids: list[int] = client.post("/tokenize", json=asked).json()["tokens"]
    return ids


def chat(client: httpx.Client, text: str, **asked: Any) -> tuple[Any, ...]:
    """Content, thoughts, arguments and reason of an answer of this text; the same when it is streamed."""
    forced = {"force_ids": ids_of(client, text), "return_token_ids": True, "temperature": 0}
    body = {**ASK, **forced, **asked}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    message = choice["message"]
    calls = [one["function"]["arguments"] for one in message.get("tool_calls", ())]
    told = (message["content"], message.get("reasoning"), calls)
    content, thoughts, arguments, ended = "", "", [], None
    stream = client.post("/v1/chat/completions", json={**body, "stream": True}).text
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        one = json.loads(line[6:])["choices"][0]
        content += one["delta"].get("content", "")
        thoughts += one["delta"].get("reasoning", "")
        for call in one["delta"].get("tool_calls", ()):
            arguments += [""] if "id" in call else []
            arguments[-1] += call["function"]["arguments"]
        ended = one["finish_reason"], one.get("stop_reason")
    assert (content, thoughts or None, arguments) == (told[0] or "", told[1], told[2])
    assert ended == (choice["finish_reason"], choice["stop_reason"])
    return *told, *ended


def test_a_stop_string_ends_the_content_and_no_thoughts(client: httpx.Client) -> None:
    said = THINKS + "The answer STOP ever"
    assert chat(client, said, stop=["STOP"]) == ("The answer ", "STOP it", [], "stop", "STOP")
    kept = chat(client, said, stop=["STOP"], include_stop_str_in_output=True)
    assert kept[0] == "The answer STOP"
    free = chat(client, said, stop=["STOP"], min_tokens=len(ids_of(client, said)), max_tokens=90)
    assert free[0].startswith("The answer STOP ever")


def test_a_stop_string_cuts_no_call(client: httpx.Client) -> None:
    asked = {"stop": ["STOP"], "reasoning_effort": "none", **TOOLS}
    (content, _, [arguments], *_) = chat(client, "Well.\n" + CALL + " a STOP", **asked)
    assert (content, json.loads(arguments)) == ("Well. a", {"city": "STOP x"})
    assert chat(client, CALL + " a STOP", **asked)[3:] == ("tool_calls", "STOP")


def test_stop_tokens_count_in_the_content_alone(client: httpx.Client) -> None:
    thought = ids_of(client, "STOP")[0]
    content, thoughts, _, *ended = chat(client, THINKS + "a STOP b", stop_token_ids=[thought])
    assert (thoughts, ended) == ("STOP it", ["stop", thought])
    assert "a" in content
    assert "b" not in content
    newline = ids_of(client, "a\nb")[1]
    ended = chat(client, THINKS + CALL + "\nc\nd", stop_token_ids=[newline], **TOOLS)[3:]
    assert ended == ("tool_calls", newline)


def test_a_stop_token_is_shown_where_stops_are(client: httpx.Client) -> None:
    first, second, *_ = ids_of(client, "the house")
    asked = {"stop_token_ids": [second], "include_stop_str_in_output": True}
    with_it = chat(client, "the house", **asked)[0]
    without = chat(client, "the house", stop_token_ids=[second])[0]
    assert with_it.startswith(without)
    assert with_it != without
    body = {"prompt": "a", "force_ids": [first, second], "max_tokens": 5, **asked}
    told = client.post("/v1/completions", json=body).json()["choices"][0]
    assert (told["text"], told["stop_reason"]) == (with_it, second)


@pytest.mark.parametrize("text", ["<tool_ca", "<tool_call>", '<tool_call>\n{"name', "Well.\n<too"])
def test_the_marks_of_a_cut_call_are_no_content(client: httpx.Client, text: str) -> None:
    ids = ids_of(client, text)
    content, _, calls, finish, _ = chat(client, text, max_tokens=len(ids), **TOOLS)
    assert (content, calls, finish) == ("Well." if "Well" in text else None, [], "length")


def test_other_shapes_do_the_same(client: httpx.Client) -> None:
    said = {"force_ids": ids_of(client, THINKS + "yes STOP no"), "messages": ASK["messages"]}
    told = client.post(
        "/v1/messages",
        json={
            **said,
            "model": "tiny_llama",
            "max_tokens": 100,
            "stop_sequences": ["STOP"],
            "thinking": {"type": "enabled", "budget_tokens": 2048},
        },
    ).json()
    assert [block.get("text", block.get("thinking")) for block in told["content"]] == [
        "STOP it",
        "yes ",
    ]
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "STOP")
    options = {"stop": ["STOP"], "num_predict": 100}
    asked = {**said, "model": "tiny_llama", "think": True, "stream": False, "options": options}
    message = client.post("/api/chat", json=asked).json()["message"]
    assert (message["thinking"], message["content"]) == ("STOP it", "yes ")
    asked = {
        "force_ids": said["force_ids"],
        "input": "hi",
        "stop": ["STOP"],
        "max_output_tokens": 99,
    }
    output = client.post("/v1/responses", json=asked).json()["output"]
    assert [one["content"][0]["text"] for one in output] == ["STOP it", "yes "]
