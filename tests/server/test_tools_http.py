"""Tools and thoughts over HTTP: whole as in a stream, with a real engine of a tiny model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": PLACE},
    },
    {"type": "function", "function": {"name": "wait"}},
]
ASK = {
    "messages": [{"role": "user", "content": "the old house"}],
    "tools": TOOLS,
    "max_tokens": 160,
    "reasoning_effort": "none",  # this model would think for ever
}


def whole(client: httpx.Client, **asked: Any) -> list[dict[str, Any]]:
    answer = client.post("/v1/chat/completions", json={**ASK, **asked})
    assert answer.status_code == 200, answer.text
    choices: list[dict[str, Any]] = answer.json()["choices"]
    return choices


def streamed(client: httpx.Client, **asked: Any) -> list[dict[str, Any]]:
    """The choices, put together of their deltas by OpenAI's rules."""
    answer = client.post("/v1/chat/completions", json={**ASK, **asked, "stream": True})
    events = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for one in event["choices"]:
            known = choices.setdefault(
                one["index"], {"message": {}, "finish_reason": None, "logprobs": []}
            )
            assert known["finish_reason"] is None
            known["finish_reason"] = one["finish_reason"]
            known["logprobs"] += (one["logprobs"] or {"content": []})["content"]
            add(known["message"], one["delta"])
    return [choices[index] for index in sorted(choices)]


def add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name != "tool_calls":
            message[name] = message.get(name, "") + value
            continue
        calls = message.setdefault("tool_calls", [])
        for call in value:
            if call["index"] == len(calls):
                assert set(call) == {"index", "id", "type", "function"}
                assert call["function"]["arguments"] == ""
                calls.append({**call, "function": dict(call["function"])})
            else:
                assert call == {
                    "index": len(calls) - 1,
                    "function": {"arguments": call["function"]["arguments"]},
                }
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]


def shown(choice: dict[str, Any]) -> tuple[Any, ...]:
    """All but what differs between two answers: the ids of calls."""
    message = choice["message"]
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return (
        message["role"],
        message["content"] or "",
        message.get("reasoning_content"),
        message.get("reasoning"),
        calls,
        choice["finish_reason"],
    )


def forced(client: httpx.Client, text: str) -> dict[str, Any]:
    """Fields that make the model say this."""
    ids = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()[
        "tokens"
    ]
    return {"force_ids": ids, "max_tokens": len(ids) + 1}


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_are_valid_whole_and_streamed(client: httpx.Client, seed: int) -> None:
    asked = {"tool_choice": "required", "parallel_tool_calls": False, "seed": seed, "n": 2}
    one, other = whole(client, **asked), streamed(client, **asked)
    assert [shown(choice) for choice in one] == [shown(choice) for choice in other]
    ids = [call["id"] for choice in one for call in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == len(ids)
    for choice in one:
        if choice["finish_reason"] == "length":
            continue  # white space without end
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert call["id"].startswith("call_")
        assert call["function"]["name"] in ("look", "wait")
        assert arguments == {} or (len(arguments["city"]) <= 6 and arguments["days"] <= 9)


def test_a_named_call_ends_with_stop(client: httpx.Client) -> None:
    asked = {"tool_choice": {"type": "function", "function": {"name": "wait"}}, "seed": 1}
    (choice,) = whole(client, **asked)
    *rest, ((name, arguments),), finish = shown(choice)
    assert (rest, name, finish) == (["assistant", "", None, None], "wait", "stop")
    assert json.loads(arguments) == {}
    assert shown(choice) == shown(streamed(client, **asked)[0])


CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Bonn", "days": 3}}\n</tool_call>'
SAID: list[tuple[str, tuple[str, str | None, list[tuple[str, str]]]]] = [
    ("Well.\n" + CALL, ("Well.", None, [("look", '{"city": "Bonn", "days": 3}')])),
    ("<think>\nHm.\n</think>\n\nYes", ("Yes", "Hm.", [])),
    (
        "<think>a <tool_call></think>" + CALL,
        ("", "a <tool_call>", [("look", '{"city": "Bonn", "days": 3}')]),
    ),
    ("a <b> c", ("a <b> c", None, [])),
]


@pytest.mark.parametrize(("text", "expected"), SAID)
def test_what_the_model_says_is_taken_apart(
    client: httpx.Client, text: str, expected: tuple[str, str | None, list[tuple[str, str]]]
) -> None:
    asked = {**forced(client, text), "logprobs": True, "temperature": 0, "reasoning_effort": "high"}
    asked["max_tokens"] -= 1
    (choice,), (other,) = whole(client, **asked), streamed(client, **asked)
    assert shown(choice) == shown(other)
    role, content, thoughts, same, calls, finish = shown(choice)
    assert (role, finish, thoughts) == ("assistant", "length", same)
    assert (content, thoughts, calls) == expected
    assert choice["logprobs"]["content"] == other["logprobs"]  # those of held tokens too


@pytest.mark.parametrize("more", [{"tools": None}, {"tool_choice": "required"}])
def test_thoughts_have_a_budget(client: httpx.Client, more: dict[str, Any]) -> None:
    begin, end = (forced(client, text)["force_ids"] for text in ("<think>", "</think>"))
    asked = {
        "force_ids": begin,
        "return_token_ids": True,
        "reasoning_effort": "low",
        "seed": 4,
        **more,
    }
    for name, budget in (("thinking_token_budget", 6), ("max_reasoning_tokens", 0)):
        (choice,) = whole(client, **asked, **{name: budget})
        ids = choice["token_ids"]
        assert ids[: len(begin)] == begin
        assert ids[len(begin) + budget :][: len(end)] == end
        assert ("reasoning_content" in choice["message"]) == (budget > 0)
        assert ("tool_calls" in choice["message"]) == ("tool_choice" in more)
    (choice,) = whole(client, **asked, thinking_token_budget=100, max_tokens=60)
    assert choice["message"]["content"] in ("", None)


def test_tools_are_not_looked_for_where_the_choice_is_none(client: httpx.Client) -> None:
    asked = {**forced(client, CALL), "tool_choice": "none"}
    (choice,) = whole(client, **asked)
    assert choice["message"]["content"].startswith(CALL)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}
                ]
            },
            "tools",
        ),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"messages": [{"role": "no body", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        (
            {"max_reasoning_tokens": 5, "use_beam_search": True, "tools": None},
            "thinking_token_budget",
        ),
    ],
)
def test_what_is_wrong_is_said(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/chat/completions", json={**ASK, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
