"""Chat templates of real models: which format each has, and that calls of earlier turns stand in the prompt
as the model writes them. Skipped where they were not fetched: tests/tools/record_vocabs.py --templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pageturner.text import answer_format, reasoning
from pageturner.text.answer_format import AnswerFormat, read
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.conversation import prompt_text, variables
from support.vocabs import vocab_folder

from .test_calls import said

NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
pytestmark = pytest.mark.model  # templates that are fetched
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    for name in ("look", "wait_for")
]
GIVEN: list[tuple[str, dict[str, Any]]] = [
    ("look", {"city": 'Bonn "x" é', "n": 3, "l": [1, True, None], "o": {"k": "v"}}),
    ("wait_for", {"city": "Ulm\n", "n": -1.5}),
]
# file -> format of calls, of thoughts, whether the prompt begins these, whether messages have several calls
TEMPLATES: Any = json.loads(Path(__file__).with_name("real_templates.json").read_bytes())


def source_of(name: str) -> str:
    path = vocab_folder().parent / "templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"{path} is absent: python tests/tools/record_vocabs.py --templates")
    return path.read_text()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_formats_of_a_template(name: str) -> None:
    source, (tools, thoughts, opens, _) = source_of(name), TEMPLATES[name]
    found, thinks = answer_format.recognised(source), reasoning.recognised(source)
    assert (found and found.name, thinks and thinks.name) == (tools, thoughts)
    if thinks is not None:
        prompt = ChatTemplate(source).render([{"role": "user", "content": "hi"}])
        assert reasoning.opened(thinks, prompt) == opens


NO_NULLS = "MiniMax-M3"  # its template writes a null in a list as nothing, like an empty text


@pytest.mark.parametrize("name", [name for name, row in TEMPLATES.items() if row[0]])
def test_calls_of_earlier_turns_are_read_from_the_prompt(name: str) -> None:
    source, (tools, *_, several) = source_of(name), TEMPLATES[name]
    calls = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": tool, "arguments": json.dumps(arguments)},
        }
        for i, (tool, arguments) in enumerate(GIVEN)
    ]
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": "A result."} for call in calls),
        {"role": "assistant", "content": "Well."},
        {"role": "user", "content": "And?"},
    ]
    text = prompt_text(ChatTemplate(source), messages, variables(TOOLS, None, None))
    for one in ("Looks.", "Be kind.", "A result.", "Ulm"):
        assert one in text
    assert tools is not None
    # behind the tools, which show how calls look
    begin = text.index("hi", max(0, text.index("Bonn") - 200))
    begin = text.rindex("{", 0, text.index('"look"', begin)) if tools == "llama3" else begin
    *_, found = said(read(AnswerFormat(tools=tools), text[begin:]))
    # the others are in a message of their own, behind a result
    given = json.dumps(GIVEN if several else GIVEN[:1])
    if name == NO_NULLS:
        given = given.replace("null", '""')
    expected = [(tool, arguments) for tool, arguments in json.loads(given)]
    assert [(tool, json.loads(arguments)) for tool, arguments in found[: len(expected)]] == expected
