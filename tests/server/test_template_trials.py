"""How messages are put so that a chat template takes them: found out by trial, never by its source."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pageturner.formats.tokenizer import Marks, Tokenizer
from pageturner.params import SamplingParams
from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.api.anthropic.messages import MESSAGES
from pageturner.server.api.base.answer_grammar import formats_of
from pageturner.server.api.openai.chat import CHAT_COMPLETIONS
from pageturner.server.api.responses.responses import RESPONSES
from pageturner.text import chat_template, conversation
from pageturner.text.chat_request import ChatSettings, read_chat
from pageturner.text.chat_template import ChatTemplate, habits_of
from pageturner.text.conversation import prompt_text
from support.refusals import client_error

from .bytes_tokenizer import BytesCodec
from .test_chat_templates import HELLO, TRUSTING, WEATHER, ask, text_of

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"}
SYSTEM = {"role": "system", "content": "Be kind."}
EACH = "{% for m in messages %}%s{% endfor %}"
JSON = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
WRITTEN = '{"name": "look", "arguments": {"a": 1}}'


def each(body: str) -> ChatTemplate:
    """A template that writes this of each message."""
    return ChatTemplate(EACH.replace("%s", body))


def called(content: Any, *more: dict[str, Any]) -> list[dict[str, Any]]:
    return [HELLO, {"role": "assistant", "content": content, "tool_calls": [CALL, *more]}, RESULT]


def said(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


# -- text parts ----------------------------------------------------------------------------------------------
PARTS = "{% if m.content is string %}{{ m.content }}{% else %}%s{% endif %}"
OF_PARTS = PARTS.replace("%s", "{% for p in m.content %}%s{% endfor %}")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("{{ m.content }}", "Hi  you"),  # which writes a list as an object
        ("{{ m.content | tojson }}", '"Hi  you"'),
        ("{{ '' + m.content }}", "Hi  you"),  # which refuses a list
        (OF_PARTS.replace("%s", "{{ p.text }}"), "Hi  you"),
        (OF_PARTS.replace("%s", "{{ p.text | trim }}"), "Hiyou"),
        (OF_PARTS.replace("%s", "[{{ p.text }}]"), "[Hi ][ you]"),
        (PARTS.replace("%s", "{{ m.content[0].text }}"), "Hi  you"),  # which loses the second
        (OF_PARTS.replace("%s", "{{ p }}"), "Hi  you"),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_as_the_template_joins_them(body: str, text: str, role: str) -> None:
    assert prompt_text(each(body), [said(role, "Hi ", " you")], {}) == text


def test_parts_of_other_shapes_are_parts_too() -> None:
    source = EACH.replace("%s", OF_PARTS.replace("%s", "[{{ p.text }}]"))
    served = replace(TRUSTING, template=ChatTemplate(source), context=4000, capacity=4000)
    for dialect, fields in (
        (MESSAGES, {"messages": [said("user", "a", "b")], "max_tokens": 9}),
        (RESPONSES, {"input": [said("user", "a", "b")]}),
        (CHAT_COMPLETIONS, {"messages": [said("user", "a", "b")]}),
    ):
        body = dialect.decode(json.dumps(fields).encode(), NO_LIMITS)
        assert text_of(dialect.read(body, served)) == "[a][b]"


def test_a_template_that_takes_lists_alone_gets_one() -> None:
    template = each("{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};")
    for content in ("Hi", said("user", "Hi")["content"]):
        assert prompt_text(template, [SYSTEM, {**HELLO, "content": content}], {}) == (
            "system:Be kind.;user:Hi;"
        )


def test_a_role_that_takes_lists_says_nothing_of_another() -> None:
    lists = "{% for p in m.content %}[{{ p.text }}]{% endfor %}"
    body = "{% if m.role == 'user' and m.content is not string %}%s{% else %}{{ m.content }}{% endif %}"
    template = each(body.replace("%s", lists))
    both = [said("system", "a", "b"), said("user", "c", "d")]
    assert prompt_text(template, both, {}) == "ab[c][d]"


def test_parts_that_are_no_text_are_refused() -> None:
    for part in ({"type": "image_url"}, {"type": "text"}, "x"):
        with client_error(r"messages\[0\].content: only text parts"):
            prompt_text(each("{{ m.content }}"), [{**HELLO, "content": [part]}], {})


# -- no content ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "null", "empty"),
    [
        ("<{{ m.content }}>" + JSON, "<>" + WRITTEN, "<>" + WRITTEN),
        ("<{{ m.content | tojson }}>" + JSON, '<"">' + WRITTEN, '<"">' + WRITTEN),
        ("<{{ '' + m.content }}>" + JSON, "<>" + WRITTEN, "<>" + WRITTEN),
        (
            "{% if m.content is not none %}<{{ m.content }}>{% endif %}" + JSON,
            "<Hello>" + WRITTEN,  # and no turn that says nothing
            "<Hello>" + WRITTEN,
        ),
        ("{% if m.content is none %}%s{% else %}<{{ m.content }}>{% endif %}".replace("%s", JSON),)
        + (WRITTEN,) * 2,
        ("{% if m.content == '' %}%s{% else %}<{{ m.content }}>{% endif %}".replace("%s", JSON),)
        + (WRITTEN,) * 2,
    ],
)
def test_no_content_is_put_as_the_template_was_made_for(body: str, null: str, empty: str) -> None:
    template = each(body)
    for content, text in ((None, null), ("", empty)):
        assert text in prompt_text(template, called(content), {})
    without = [{k: v for k, v in m.items() if v is not None} for m in called(None)]
    assert prompt_text(template, without, {}) == prompt_text(template, called(None), {})


def test_an_answer_that_says_nothing() -> None:
    talk = [HELLO, {"role": "assistant", "content": None}, HELLO]
    assert prompt_text(each("<{{ m.content }}>"), talk, {}) == "<Hello><><Hello>"
    body = "{% if m.content is not none %}<{{ m.content }}>{% endif %}"
    assert prompt_text(each(body), talk, {}) == "<Hello><Hello>"


# -- calls and results ---------------------------------------------------------------------------------------
def test_a_call_beside_words_stands_in_them_where_the_template_would_lose_it() -> None:
    lost = "{% if m.content %}<{{ m.content }}>{% else %}" + JSON + "{% endif %}"
    text = prompt_text(each(lost), called("I look."), {})
    assert text.startswith("<Hello><I look.")
    assert text.count('"look"') == text.count('{"a": 1}') == 1
    assert prompt_text(each(lost), called(""), {}).startswith("<Hello>" + WRITTEN)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        # a tag of this name is not the field
        ("<tool_responses>{{ m.role }}:{{ m.content }}</tool_responses>", ">tool:Sunny<"),
        ("{{ m.role }}:{{ m.content }};{{ m.tool_responses }}", "'response': 'Sunny'"),
        (
            "{% if m.role == 'tool' %}<r>{{ m.content }}</r>{% else %}{{ m.content }}{{ m.tool_responses }}{% endif %}",
            "<r>Sunny</r>",
        ),
        (
            "{% if m.role in ('user', 'assistant') %}{{ m.role }}:{{ m.content }};{% endif %}",
            "user:<tool_response>\nSunny\n</tool_response>;",
        ),
    ],
)
def test_the_result_of_a_call_is_never_lost(body: str, text: str) -> None:
    for tools in ({}, {"tools": [WEATHER]}):
        assert text in prompt_text(each(body + JSON), called(None), dict(tools))


def test_results_that_stand_together_are_one_message_of_the_user() -> None:
    body = "{% if m.role in ('user', 'assistant') %}{{ m.role[0] }}:{{ m.content }};{% endif %}"
    talk = called("", {**CALL, "id": "call_2"})
    text = prompt_text(each(body + JSON), [*talk, {**RESULT, "tool_call_id": "call_2"}, HELLO], {})
    one = "<tool_response>\nSunny\n</tool_response>"
    assert text.endswith(f";{WRITTEN}{WRITTEN}u:{one}\n{one};u:Hello;")


def test_a_template_that_refuses_tools_refuses_them_still() -> None:
    body = "{% if m.role == 'tool' or m.tool_calls %}{{ raise_exception('no tools') }}{% endif %}"
    with client_error("no tools", status=400, code="template_error"):
        prompt_text(each(body), called(""), {})


def test_a_result_that_is_lost_behind_another_has_its_own_call() -> None:
    body = "{% if m.role == 'tool' and loop.previtem.role == 'tool' %}{% else %}{{ m.content }}{% endif %};"
    talk = [
        *called("", {**CALL, "id": "call_2"}),
        {**RESULT, "tool_call_id": "call_2", "content": "Rain"},
    ]
    assert prompt_text(each(body + JSON), talk, {}) == f"Hello;;{WRITTEN}Sunny;;{WRITTEN}Rain;"


# -- turns, variables ----------------------------------------------------------------------------------------
TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != loop.index0 is even %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.content }}]{% endfor %}"
)


def test_turns_alternate_where_the_template_asks_for_that() -> None:
    for messages, text in (
        ([HELLO, HELLO], "[Hello\n\nHello]"),
        ([HELLO, said("user", "a", "b")], "[Hello\n\nab]"),
        ([SYSTEM, HELLO], "[Be kind.\n\nHello]"),
    ):
        assert text_of(ask(messages=messages, chat_template=TURNS)) == text
    for messages in ([{"role": "assistant", "content": "a"}], called("")):
        with client_error("roles must alternate"):
            ask(messages=messages, chat_template=TURNS)


def test_a_template_gets_the_variables_that_it_cannot_do_without() -> None:
    for source, text in (
        ("{% for t in tools %}{{ t }}{% endfor %}a", "a"),
        ("{{ tools is none }}", "True"),
        ("{{ '' + functions }}, {{ datetime[:2] }}", "[], 20"),
        ("{{ functions is defined }}", "False"),
    ):
        assert prompt_text(ChatTemplate(source), [HELLO], {}) == text
    functions = ChatTemplate("{{ '' + functions }}")
    assert '"name": "weather"' in prompt_text(functions, [HELLO], {"tools": [WEATHER]})


def test_the_greatest_effort() -> None:
    call = ask(chat_template="{{ reasoning_effort }} {{ enable_thinking }}", reasoning_effort="max")
    assert text_of(call) == "max True"


def test_trials_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = each("{{ m.content }}<!-- once -->")
    known = habits_of(template, tools=True)
    monkeypatch.setattr(ChatTemplate, "render", None)
    assert habits_of(template, tools=True) is known
    for i in range(2 * chat_template.MAX_KNOWN):
        chat_template._known.setdefault(
            (str(i), True), known
        )  # what others have left is bounded all the same
    monkeypatch.undo()
    habits_of(each("{{ m.content }}<!-- another -->"), tools=False)
    assert len(chat_template._known) <= chat_template.MAX_KNOWN


# -- the sandbox ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% set s = namespace(role='system', content='x') %}"
            "{% for m in [s] + messages %}{{ m.content }};{% endfor %}",
            "x;Hello;",
        ),
        ("{% set s = namespace(a=[namespace(b=1)]) %}{{ s.a[0].b }}", "1"),
        (
            "{% set q = namespace(ids=[]) %}{% set _ = q.ids.append('a') %}{{ q.ids.pop(0) }}{{ q.ids | length }}",
            "a0",
        ),
        ("{% set d = {'a': messages} %}{% set _ = d.update({'b': 1}) %}{{ d.b }}", "1"),
    ],
)
def test_a_template_has_its_own_lists(source: str, text: str) -> None:
    assert prompt_text(ChatTemplate(source), [HELLO], {}) == text


@pytest.mark.parametrize(
    "source",
    [
        "{% set _ = messages.append(1) %}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{% set _ = tools.clear() %}",
        "{% set _ = [].clear() %}",
        "{% set _ = [].__class__ %}{{ _.x.y }}",
        "{% set n = namespace() %}{% set n.a = [n] %}{{ n }}",
        "{% set a = [1] %}{% for i in range(99999) %}{% set _ = a.append(a[:]) %}{% endfor %}",
    ],
)
def test_a_template_changes_nothing_else(source: str) -> None:
    with client_error(code="template_error"):
        prompt_text(ChatTemplate(source), [dict(HELLO)], {"tools": [dict(WEATHER)]})


# -- thoughts that go on -------------------------------------------------------------------------------------
THINKING = (
    "{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }};"
)


def thinking(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [HELLO, {"role": "assistant", "content": content, "reasoning_content": "I th", **more}]


@pytest.mark.parametrize("content", [None, "", []])
def test_thoughts_go_on_where_there_is_no_content(content: Any) -> None:
    template = each(THINKING)
    assert (
        prompt_text(template, thinking(content), {}, goes_on=True)
        == "user:Hello;assistant:<think>I th"
    )
    whole = "user:Hello;assistant:<think>I th</think>So"
    assert prompt_text(template, thinking("So"), {}, goes_on=True) == whole


def test_thoughts_go_on_in_templates_that_leave_them_out() -> None:
    ends = "{% if add_generation_prompt %}a:%s{% endif %}{# <think> #}"
    opens = "{% if enable_thinking %}<think>\n{% else %}</think>{% endif %}"
    source = EACH.replace("%s", "{{ m.role[0] }}:{{ m.content }};")
    for more, text in (("", "u:Hello;a:<think>\nI th"), (opens, "u:Hello;a:<think>\nI th")):
        template = ChatTemplate(source + ends.replace("%s", more))
        assert prompt_text(template, thinking(None), {}, goes_on=True) == text
    with client_error("reasoning_content of the last message"):
        prompt_text(ChatTemplate(source), thinking(None), {}, goes_on=True)


def test_an_answer_that_goes_on_in_its_thoughts_is_read_so() -> None:
    served = replace(TRUSTING, reasoning_parser="think")
    source = EACH.replace("%s", THINKING)
    call = ask(served, thinking(""), continue_final_message=True, chat_template=source)
    assert call.answer is not None
    assert call.answer.thinking


# -- templates by name ---------------------------------------------------------------------------------------
PLAIN = each("{{ m.content }};").source
NAMED = "{{ tools | tojson }}<tool_call>" + PLAIN


def test_requests_with_tools_go_through_the_template_for_them() -> None:
    template = ChatTemplate(PLAIN)
    template.tool_use = ChatTemplate(NAMED)
    served = replace(TRUSTING, template=template, context=4000, capacity=4000)
    assert text_of(ask(served)) == "Hello;"
    assert text_of(ask(served, tools=[WEATHER], tool_choice="none")) == "Hello;"
    call = ask(served, tools=[WEATHER])
    assert text_of(call).startswith('[{"type": "function"')
    assert call.answer is not None
    assert call.answer.tools == "hermes"
    assert formats_of(served.for_tools).tools is not None
    own = ask(served, tools=[WEATHER], chat_template="<tool_call>{{ tools | length }}")
    assert text_of(own) == "<tool_call>1"


def test_so_do_conversations_of_the_offline_api() -> None:
    marks = Marks(chat_template=PLAIN, named_templates={"tool_use": NAMED, "rag": "x"})
    tokenizer = Tokenizer(BytesCodec(), marks)
    for tools, begin in (([WEATHER], b"[{"), ([], b"Hello;")):
        asked = read_chat([HELLO], SamplingParams(), tokenizer, ChatSettings(tools=tools))
        assert bytes(asked.prompt).startswith(begin)
    assert conversation.variables([WEATHER], None, None)["tools"] == [WEATHER]
