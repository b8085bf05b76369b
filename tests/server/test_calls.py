"""Calls and thoughts in the text of an answer: what is found, whatever the pieces in which it comes."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from pageturner.text import reasoning, tool_formats
from pageturner.text.answer_format import AnswerFormat, AnswerReader, read, recognised
from pageturner.text.argument_rules import property_types
from pageturner.text.call_parser import Delta
from pageturner.text.tool_formats import FORMATS, NAMES, tool_format

Said = tuple[str, str, list[tuple[str, str]]]  # thoughts, content, calls with their arguments

WEATHER = ("get_weather", '{"city": "Paris"}')
TIME = ("get_time", '{"zone": {"name": "a}b\\"", "l": [1, "]"]}}')


def said(deltas: list[Delta]) -> Said:
    thoughts, content, calls = "", "", []
    for kind, text in deltas:
        if kind == "reasoning":
            thoughts += text
        elif kind == "content":
            content += text
        elif kind == "call":
            calls.append((text, ""))
        else:
            name, arguments = calls.pop()
            calls.append((name, arguments + text))
    return thoughts, content, calls


def assert_said(format: AnswerFormat, text: str, wanted: Said) -> None:
    """Assert what an answer says, whole, in two pieces cut anywhere, and letter by letter."""
    for pieces in ([text], text, *([text[:at], text[at:]] for at in range(len(text)))):
        parser = format.parser()
        deltas = [delta for piece in pieces for delta in parser.push(piece)]
        assert said(deltas + parser.finish()) == wanted, pieces


# format -> texts, with the content and the calls in each
TEXTS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "hermes": [
        (
            f'<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER[1]}}}\n</tool_call>',
            "",
            [WEATHER],
        ),
        (
            'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
            "</tool_call>\n"
            f'<tool_call>{{"name":"get_time","arguments":{TIME[1]}}}</tool_call>\nDone. ',
            "Let me see.\nDone.",
            [WEATHER, TIME],
        ),
        ("a < b and <tool_ call> is no call", "a < b and <tool_ call> is no call", []),
        ("<tool_call>\nnothing</tool_call> x", "<tool_call>\nnothing</tool_call> x", []),
        (
            "<tool_call><tool_call>" + '{"name": "f", "arguments": {}}</tool_call>',
            "<tool_call>",
            [("f", "{}")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            [],
        ),
        ('<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
        ('<tool_call>{"name": "f", "arguments": {"a', "", [("f", '{"a')]),
        ('<tool_call>{"name": "f", "arguments": {}} and', " and", [("f", "{}")]),
        ("plain  ", "plain  ", []),
        ("", "", []),
    ],
    "llama3": [
        ('{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [WEATHER]),
        (
            '\n <|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
            "",
            [WEATHER],
        ),
        (
            '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
            "",
            [WEATHER],
        ),
        ('{"nam": 1}', '{"nam": 1}', []),
        ('See {"name": "f", "parameters": {}}', "See", [("f", "{}")]),
        ('See {"a": {"name": "f"}}', 'See {"a": {"name": "f"}}', []),
        (" \n", " \n", []),
    ],
    "json": [
        (
            f'```json\n{{\n  "name": "get_weather",\n  "arguments": {WEATHER[1]}\n}}\n```',
            "",
            [WEATHER],
        ),
        (f'{{"name": "get_weather", "arguments": {WEATHER[1]}}}', "", [WEATHER]),
        (
            f'<tool_call>{{"name": "get_weather", "arguments": {WEATHER[1]}}}</tool_call>',
            "",
            [WEATHER],
        ),
        ('```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
        ("```python\nprint()\n```", "```python\nprint()\n```", []),
    ],
    "mistral": [
        ('[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "", [WEATHER]),
        (
            f"Hm.[TOOL_CALLS]get_weather[ARGS]{WEATHER[1]}"
            f"[TOOL_CALLS]get_time[CALL_ID]abc123def[ARGS]{TIME[1]}",
            "Hm.",
            [WEATHER, TIME],
        ),
        ("[TOOL_CALLS][", "[TOOL_CALLS][", []),
    ],
    "mistral_list": [
        ('[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", [WEATHER]),
        (
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "123456789"}, '
            f'{{"name": "get_time", "arguments": {TIME[1]}, "id": "abcdefghi"}}]',
            "",
            [WEATHER, TIME],
        ),
        (f'[TOOL_CALLS][{{"name": "get_time", "arguments": {TIME[1]}}},{{"name"', "", [TIME]),
    ],
    "granite": [
        (
            'I look. <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
            f'{{"name": "get_time", "arguments": {TIME[1]}}}]\n',
            "I look.",
            [WEATHER, TIME],
        ),
    ],
    "deepseek_v3": [
        (
            "Ok.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n'
            f"```json\n{TIME[1]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Ok.",
            [WEATHER, TIME],
        ),
    ],
    "deepseek_v31": [
        (
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}'
            f"<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{TIME[1]}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            "",
            [WEATHER, TIME],
        ),
    ],
    "gemma": [
        (
            'Hm <|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
            "Hm",
            [("get_weather", '{"city":"Paris"}')],
        ),
        (
            '<|tool_call>call:f{a:-1.5,b:[true,null,<|"|>x"<y|<|"|>],c:{d:<|"|>}<|"|>}}<tool_call|>'
            "<|tool_call>call:g{n:None}<tool_call|>",
            "",
            [("f", '{"a":-1.5,"b":[true,null,"x\\"<y|"],"c":{"d":"}"}}'), ("g", '{"n":null}')],
        ),
    ],
    "pythonic": [
        ('[get_weather(city="Paris")]', "", [WEATHER]),
        (
            "[f(a=-1, b=[True, None], c={'k': 'it\\'s \"q\"', \"n\": (1, 2)}), g( ) ]",
            "",
            [
                ("f", '{"a": -1, "b": [true, null], "c": {"k": "it\'s \\"q\\"", "n": [1, 2]}}'),
                ("g", "{ }"),
            ],
        ),
        ("[see here](link)", "[see here](link)", []),
        ("[a, b]", "[a, b]", []),
    ],
    "pythonic_tokens": [
        ('<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Ok', "Ok", [WEATHER]),
        (
            "<|tool_call_start|>[f(s='\\n\\u00e9\\x41')]<|tool_call_end|>",
            "",
            [("f", '{"s": "\\néA"}')],
        ),
    ],
    "harmony": [
        ("<|channel|>final<|message|>Hello<|return|>", "Hello", []),
        (
            "<|channel|>commentary<|message|>Let me.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
            "Let me.",
            [WEATHER],
        ),
        (" to=functions.x", " to=functions.x", []),
        (
            "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
            '{"city": "Paris"}',
            "",
            [WEATHER],
        ),
    ],
}
TYPES = {"get_weather": {"city": "string", "days": "integer", "at": "object"}}
EXAMPLES: dict[str, list[Any]] = {
    row["name"]: row["examples"]
    for row in json.loads((tool_formats.MARKUP / "calls.json").read_text(encoding="utf-8"))
}
ALL = [(name, *one) for name, texts in TEXTS.items() for one in texts]
ALL += [
    (name, text, content, [(tool, arguments) for tool, arguments in calls])
    for name, texts in EXAMPLES.items()
    for text, content, calls in texts
]


def format_of(name: str) -> AnswerFormat:
    """The format with its tools, where their names tell a call from text."""
    names = ("get_weather", "wait") if name in ("glm4", "functionary_v32") else ()
    return AnswerFormat(tools=name, names=names, types=TYPES)


@pytest.mark.parametrize(("name", "text", "content", "calls"), ALL)
def test_the_calls_of_a_text(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert said(read(format_of(name), text)) == ("", content, calls)


@pytest.mark.parametrize(("name", "text"), [one[:2] for one in ALL])
def test_the_pieces_change_nothing(name: str, text: str) -> None:
    whole = said(read(format_of(name), text))
    draw = random.Random(text)
    cuts = [[text[:at], text[at:]] for at in range(len(text))] + [list(text)]
    for _ in range(20):
        places = sorted(draw.choices(range(len(text) + 1), k=draw.randint(2, 12)))
        cuts.append([text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])])
    for pieces in cuts:
        parser = format_of(name).parser()
        deltas = [delta for piece in pieces for delta in parser.push(piece)]
        assert said(deltas + parser.finish()) == whole, pieces


def test_every_format_has_examples_and_its_calls_are_json() -> None:
    assert {one.name for one in FORMATS} == set(EXAMPLES)
    for name, _, _, calls in ALL:
        complete = [call for call in calls if call[1].endswith("}")]
        assert complete or not calls or "f" in dict(calls), name
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in complete), name


TAGGED = (
    "<tool_call><function=f><parameter=x>\n%s\n</parameter></function></tool_call>",
    "<tool_call>f<arg_key>x</arg_key><arg_value>%s</arg_value></tool_call>",
)


@pytest.mark.parametrize(
    ("types", "value", "made"),
    [
        ("string", "3", "3"),
        ("string", 'a "b"\n</p', 'a "b"\n</p'),
        ("integer", "3", 3),
        ("integer", "three", "three"),
        ("number", "2", 2),
        ("boolean", "True", True),
        ("null,string", "null", None),
        ("null,string", "no", "no"),
        ("array", "[1, 'x']", [1, "x"]),
        ("object", '{"a": NaN}', '{"a": NaN}'),
        ("", "3", 3),
        ("", "x3", "x3"),
        ("string", "", ""),
    ],
)
def test_the_type_says_what_a_text_is(types: str, value: str, made: Any) -> None:
    for name, text in zip(("qwen3_coder", "glm45"), TAGGED, strict=True):
        format = AnswerFormat(tools=name, types={"f": {"x": types}})
        ((tool, arguments),) = said(read(format, text % value))[2]
        assert (tool, json.loads(arguments)) == ("f", {"x": made})


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("granite", "<think>Hm</think><response>Yes</response>", ("Hm", "Yes", [])),
        ("granite", "<response>Yes", ("", "Yes", [])),
        ("granite", "Yes <response>x</response>", ("", "Yes <response>x</response>", [])),
        ("granite", " Yes ", ("", " Yes ", [])),
        ("seed_oss", "<seed:think>Hm</seed:think>Yes", ("Hm", "Yes", [])),
        (
            "cohere_command3",
            "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>",
            ("Hm", "Yes", []),
        ),
        ("solar", "<|think|>Hm<|end|><|begin|>assistant<|content|>Yes<|end|>", ("Hm", "Yes", [])),
        ("hy_v3", "<think:opensource>Hm</think:opensource>Yes", ("Hm", "Yes", [])),
        (
            "apriel",
            "Here are my reasoning steps:\nHm\n[BEGIN FINAL RESPONSE]\nYes\n[END FINAL RESPONSE]",
            ("Hm", "Yes", []),
        ),
        (
            "kimi_k3",
            "<|open|>think<|sep|>Hm<|close|>think<|sep|><|open|>response<|sep|>Yes"
            "<|close|>response<|sep|><|close|>message<|sep|>",
            ("Hm", "Yes", []),
        ),
        ("apertus", "<|inner_prefix|>Hm<|inner_suffix|>Yes", ("Hm", "Yes", [])),
        ("hunyuan_a13b", "<think>\nHm\n</think>\n<answer>\nYes\n</answer>", ("Hm", "Yes", [])),
        ("minimax_m3", "<mm:think>Hm</mm:think>Yes", ("Hm", "Yes", [])),
        ("deepseek_r1", "Hm\n</think>\nYes", ("Hm", "Yes", [])),
        (
            "inkling",
            "<|content_thinking|>Hm<|end_message|><|message_model|><|content_text|>Yes<|end_message|>",
            ("Hm", "Yes", []),
        ),
        (
            "muse",
            " to=self<|message|>Hm<|eom|><|start|>assistant to=user<|message|>Yes",
            ("Hm", "Yes", []),
        ),
        ("k2_horizon", "<ifm|think>Hm</ifm|think>Yes", ("Hm", "Yes", [])),
        ("deepseek_r1", "<think>Hm</think>Yes", ("Hm", "Yes", [])),
    ],
)
def test_thoughts_of_each_format(name: str, text: str, wanted: Said) -> None:
    thinks = reasoning.reasoning_format(name)
    format = AnswerFormat(reasoning=name, thinking=reasoning.opened(thinks, "user: hi"))
    assert_said(format, text, wanted)


@pytest.mark.parametrize(
    ("tools", "reasoning"),
    [
        ("qwen3_xml", "qwen3"),
        ("glm47", "glm45"),
        ("llama3_json", "deepseek_v3"),
        ("openai", "openai_gptoss"),
        ("granite4", "plamo3"),
        ("step5", "inkling"),
        ("dots", "k2_horizon"),
    ],
)
def test_names_of_other_servers(tools: str, reasoning: str) -> None:
    assert AnswerFormat(tools=tools, reasoning=reasoning).parser().finish() == []


def test_headers_of_muse_are_neither_content_nor_thoughts() -> None:
    format = AnswerFormat(tools="muse", reasoning="muse")
    call = (
        '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="x">1</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    )
    calls = [("f", '{"x": 1}')]
    head = "to=f<|message|>" + call
    start = "<|start|>assistant "
    assert_said(format, f" {head}", ("", "", calls))
    assert_said(format, f" to=self<|message|>Hm<|eom|>{start}{head}", ("Hm", "", calls))
    said = f" to=user<|message|>Look.<|eom|>{start}{head}<|eom|>{start}{head}"
    assert_said(format, said, ("", "Look.", calls * 2))
    assert_said(format, " to=user<|message|>Go to=f now", ("", "Go to=f now", []))


def test_values_within_values_have_the_types_of_their_schemas() -> None:
    mark = "]<]minimax[>["
    at = {"type": "object", "properties": {"zip": {"type": "string"}, "n": {"type": "integer"}}}
    schema = {
        "properties": {"at": at, "all": {"type": "array", "items": at}, "no": {"type": "array"}}
    }
    one = f"{mark}<zip>018{mark}</zip>{mark}<n>3{mark}</n>"
    text = (
        f'{mark}<tool_call>{mark}<invoke name="f">{mark}<at>{one}{mark}</at>'
        f"{mark}<all>{mark}<item>{one}{mark}</item>{mark}</all>{mark}<no>{mark}</no>"
        f"{mark}</invoke>{mark}</tool_call>"
    )
    format = AnswerFormat(tools="minimax_m3", types={"f": property_types(schema)})
    place = '{"zip": "018", "n": 3}'
    wanted = f'{{"at": {place}, "all": [{place}], "no": []}}'
    assert_said(format, text, ("", "", [("f", wanted)]))


THINK = AnswerFormat(reasoning="think", tools="hermes")
THOUGHTS = [
    (False, "<think>\nHm, <b>.\n</think>\n\nYes. ", ("Hm, <b>.", "Yes. ", [])),
    (False, "Yes. <think>no</think>", ("", "Yes. <think>no</think>", [])),
    (False, "\n<think></think>\nYes", ("", "Yes", [])),
    (False, "<think>cut ", ("cut", "", [])),
    (False, "\n</think>\n\nYes", ("", "Yes", [])),
    (False, "</think", ("", "</think", [])),
    (False, "Yes </think> no", ("", "Yes </think> no", [])),
    (False, "  <thi", ("", "  <thi", [])),
    (True, 'Hm <tool_call>{"name": "f", "arguments": {}}</tool_call>', ("Hm", "", [("f", "{}")])),
    (True, "Hm <tool_call> or so", ("Hm <tool_call> or so", "", [])),
    (True, "Hm </th </think>\nYes", ("Hm </th", "Yes", [])),
    (True, "<think>\nHm</think>Yes", ("Hm", "Yes", [])),
    (
        True,
        'Hm <tool_call></think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ("Hm <tool_call>", "", [("f", "{}")]),
    ),
]


@pytest.mark.parametrize(("thinking", "text", "wanted"), THOUGHTS)
def test_thoughts_are_apart(thinking: bool, text: str, wanted: Said) -> None:
    format = AnswerFormat(tools="hermes", reasoning="think", thinking=thinking)
    assert_said(format, text, wanted)


def test_the_thoughts_of_harmony() -> None:
    text = "<|channel|>analysis<|message|>Hm <x|.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    assert_said(AnswerFormat(reasoning="harmony"), text, ("Hm <x|.", "Yes", []))


WRITES = (
    (
        "{% if tools %}{% endif %}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set f = c.function %}%s{% endfor %}{% endfor %}"
    )
    .replace("%", "%%")
    .replace("%%s", "%s")
)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        (
            "{% if tools %}<tool_call><function={{ f }}><parameter={{ p }}>{% endif %}",
            "qwen3_coder",
        ),
        ("<tool_call>", "hermes"),
        ("{{ tools }}", "hermes"),
        ("{{ messages }}", None),
        ("{{ raise_exception('no tools') }}", None),
        (WRITES % "<t>{'name':'{{ f.name }}'}", "hermes"),
        (
            WRITES % "<tool_call>{{ f.name }}<arg_key>sought_name</arg_key><arg_value>"
            "{{ f.arguments.sought_name }}</arg_value></tool_call>",
            "glm45",
        ),
        (WRITES % '[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]', "xlam"),
        (WRITES % '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "llama3"),
        ("{{ tools }} <|tool_call>call:", "gemma"),
        ("{{ tools }} [TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("{{ tools }} [TOOL_CALLS] [", "mistral_list"),
        ("{{ tools }} <|tool_list_start|>", "pythonic_tokens"),
        ("{{ xml_tools }} <tool_call>", "hermes"),
        ("{{ tools }} <tool_call> as <tool_calls>[", "hunyuan_a13b"),
        ("{{ tools }} ]<]minimax[>[ <tool_call>", "minimax_m3"),
        ("{{ tools }} <｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v31"),
        (None, None),
    ],
)
def test_a_template_tells_the_format(template: str | None, name: str | None) -> None:
    found = recognised(template)
    assert (found and found.name) == name


def test_every_name_is_a_format() -> None:
    assert {tool_format(name).name for name in NAMES} == {one.name for one in FORMATS}


def test_where_only_a_name_tells_a_call_it_is_one_of_a_tool() -> None:
    format = AnswerFormat(tools="json", names=("look",))
    text = '{"name": "%s", "arguments": {"a": 1}}'
    assert said(read(format, text % "look")) == ("", "", [("look", '{"a": 1}')])
    assert said(read(format, text % "peek")) == ("", text % "peek", [])


@pytest.mark.parametrize(
    ("format", "text", "tokens"),
    [
        (AnswerFormat(reasoning="think"), "<think>ab</think>c", 17),
        (AnswerFormat(reasoning="think"), "<think>ab", 9),
        (AnswerFormat(reasoning="think", thinking=True), "ab</think>c", 10),
        (AnswerFormat(reasoning="think"), "abc", 0),
        (AnswerFormat(tools="hermes"), "<think>abc", 0),
        (AnswerFormat(reasoning="harmony"), "<|channel|>analysis<|message|>a<|end|>b", 38),
        (AnswerFormat(reasoning="harmony"), "<|channel|>final<|message|>ab", 0),
    ],
)
def test_tokens_of_thoughts_are_counted(format: AnswerFormat, text: str, tokens: int) -> None:
    """By where they begin in the text, here one for each character, however it comes."""
    for size in (1, 3, len(text)):
        reader = AnswerReader(format)
        for at in range(0, len(text), size):
            reader.note(*range(at, min(at + size, len(text))))
            reader.read(text[at : at + size], last=at + size >= len(text))
        assert reader.reasoning_tokens == tokens
