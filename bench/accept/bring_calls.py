"""Formats of tool calls and thoughts: the examples of each row whole and in 40 random splits, random bytes under
each grammar, and which format each public template has.

`--calls-templates` (or PAGETURNER_TEMPLATES) is walked for templates; PAGETURNER_SOURCES has `vllm`, for the names
of its parsers. What is absent is NOT RUN.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
from harness import Line  # noqa: E402

from pageturner.cli.other_names import translate  # noqa: E402
from pageturner.errors import ClientError  # noqa: E402
from pageturner.text import reasoning, tool_formats, tools  # noqa: E402
from pageturner.text.answer_format import AnswerFormat, read, recognised  # noqa: E402
from pageturner.text.argument_rules import property_types  # noqa: E402
from pageturner.text.call_parser import Delta  # noqa: E402
from pageturner.text.chat_template import ChatTemplate  # noqa: E402
from pageturner.text.conversation import prompt_text, variables  # noqa: E402
from pageturner.text.grammar.check import byte_tokens, compiled  # noqa: E402
from pageturner.text.tool_grammar import check_tools, no_control, tool_grammar  # noqa: E402

SPLITS = 40
SEEDS = 8
TYPES = {"get_weather": {"city": "string", "days": "integer", "at": "object"}}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5, "description": "C."},
        "days": {"type": "integer", "minimum": 0, "maximum": 99, "description": "D."},
        "units": {"type": "string", "enum": ["C", "F"], "description": "U."},
        "only": {
            "type": "array",
            "items": {"type": "boolean"},
            "maxItems": 2,
            "description": "O.",
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "L.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait", "description": "W."}},
]
TALK = [
    {"role": "user", "content": "Hm?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "look", "arguments": '{"city": "Bonn", "days": 3}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call00001", "content": "Rain."},
]


def joined(deltas: list[Delta]) -> list[tuple[str, str]]:
    """The deltas with neighbours of one kind as one."""
    found: list[tuple[str, str]] = []
    for kind, text in deltas:
        if found and found[-1][0] == kind != "call":
            text = found.pop()[1] + text
        found.append((kind, text))
    return [one for one in found if one[1]]


def calls_of(deltas: list[Delta]) -> list[list[str]]:
    """The name and the arguments of each call."""
    texts = joined(deltas)
    names = [at for at, one in enumerate(texts) if one[0] == "call"]
    return [[texts[at][1], texts[at + 1][1]] for at in names]


def examples() -> Iterator[Line]:
    """The examples of each row, as its parser reads them."""
    rows = json.loads((tool_formats.MARKUP / "calls.json").read_text(encoding="utf-8"))
    wrong: list[str] = []
    count = 0
    draw = random.Random(1)
    for row in rows:
        bare = tool_formats.tool_format(row["name"]).at_start
        names = ("get_weather", "wait") * bare
        format = AnswerFormat(tools=row["name"], names=names, types=TYPES)
        for text, content, calls in row["examples"]:
            count += 1
            whole = read(format, text)
            said = "".join(one for kind, one in whole if kind == "content")
            if said != content or calls_of(whole) != calls:
                wrong.append(f"{row['name']}: {text[:40]!r}")
            for _ in range(SPLITS):
                places = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 12)))
                parser = format.parser()
                pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
                deltas = [one for piece in pieces for one in parser.push(piece)]
                if joined(deltas + parser.finish()) != joined(whole):
                    wrong.append(f"{row['name']}, split: {text[:40]!r}")
    figure = f"{len(rows)} formats, {count} examples x {SPLITS}: {len(wrong)} wrong"
    yield Line("examples whole and in splits", "; ".join([figure, *wrong[:5]]), not wrong)


def walk(grammar: str, seed: int) -> str:
    """A random text that the grammar allows; "" where it does not come to an end."""
    matcher = compiled(byte_tokens(), grammar)
    draw = random.Random(seed)
    text = b""
    while len(text) < 2500:
        if matcher.is_accepting() and (draw.random() < 0.5 or matcher.is_stopped()):
            return text.decode("utf-8", "replace")
        bits = matcher.compute_bitmask()
        allowed = [token for token in range(256) if bits[token // 8] >> token % 8 & 1]
        closing = [token for token in b'"}])><|/' if token in allowed]
        if closing and draw.random() < 0.5:
            allowed = closing
        token = draw.choice(allowed)
        matcher.try_consume_tokens([token])
        text += bytes([token])
    return ""


def fits(name: str, arguments: str) -> bool:
    try:
        given = json.loads(arguments)
    except ValueError:
        return False
    if name == "wait":
        return given == {}
    kinds = {"city": str, "days": int, "units": str, "only": list}
    known = all(name in kinds and isinstance(one, kinds[name]) for name, one in given.items())
    return known and {"city", "days"} <= set(given)


def logits() -> Iterator[Line]:
    """Random bytes under the grammar of each format."""
    choice = tools.read(TOOLS, "required", None)
    types = {tool.name: property_types(tool.parameters) for tool in choice.tools}
    counts: Counter[str] = Counter()
    for format in tool_formats.FORMATS:
        grammar = tool_grammar(format, choice, no_control)
        answer = AnswerFormat(tools=format.name, types=types)
        for text in (walk(grammar, seed) for seed in range(SEEDS)):
            calls = calls_of(read(answer, text))
            counts["calls"] += len(calls)
            counts["cut"] += not text
            counts["malformed"] += bool(text) and (
                not calls or not all(fits(*one) for one in calls)
            )
    figure = ", ".join(f"{name} {n}" for name, n in counts.items())
    yield Line("random bytes under each grammar", figure, not counts["malformed"])


def templates(folder: str) -> Iterator[Line]:
    """Tools on every template that mentions them, and whether a call of the history is read back."""
    paths = sorted(Path(folder or os.devnull).rglob("*.jinja*"))
    if not paths:
        yield Line(
            "tools on public templates", "no templates: PAGETURNER_TEMPLATES", None, run=False
        )
        return
    choice = tools.read(TOOLS, None, None)
    found: Counter[str] = Counter()
    refused: list[str] = []
    unread: list[str] = []
    about = 0
    for path in paths:
        source = path.read_text()
        if not re.search("tool|function", source):
            continue
        about += 1
        format = recognised(source)
        template = ChatTemplate(source)
        told = variables(choice.shown, None, None)
        prompt = ""
        try:
            assert format is not None
            check_tools(format, choice)
            prompt_text(template, TALK[:1], told)
        except (ClientError, AssertionError) as error:
            refused.append(f"{path.stem}: {error}"[:90])
            continue
        with contextlib.suppress(ClientError):
            prompt = prompt_text(template, TALK, told)
        found[format.name] += 1
        answer = AnswerFormat(tools=format.name, names=("look",) * format.at_start)
        texts = [prompt[at.start() :] for at in re.finditer(r"\A|[\[{]|(?<=\n)look", prompt)]
        read_back = (calls_of(read(answer, text)) for text in texts[: 1 + 99 * format.at_start])
        if not any("look" in (name for name, _ in calls) for calls in read_back):
            unread.append(path.stem)
    figure = f"{about - len(refused)} of {about} that mention tools or functions"
    yield Line("tools are answered", "; ".join([figure, *refused[:5]]), not refused)
    yield Line("by format", ", ".join(f"{name} {n}" for name, n in found.most_common()), None)
    figure = f"{about - len(refused) - len(unread)} of {about - len(refused)}"
    yield Line("a call of the history is read back", "; ".join([figure, *unread[:8]]), None)


def names() -> Iterator[Line]:
    """The names of vLLM's parsers."""
    folder = Path(os.environ.get("PAGETURNER_SOURCES") or os.devnull) / "vllm" / "vllm"
    tables = {
        "tool_parsers": ("--tool-call-parser", tool_formats.NAMES),
        "reasoning": ("--reasoning-parser", reasoning.NAMES),
    }
    for table, (flag, ours) in tables.items():
        path = folder / table / "__init__.py"
        if not path.is_file():
            yield Line(f"names of vLLM's {table}", "PAGETURNER_SOURCES has none", None, run=False)
            continue
        theirs = re.findall(r'^    "([\w-]+)": \(', path.read_text(), re.M)
        known = (flag, "--max-num-seqs")
        said = {name: translate([flag, name], known)[0][1] for name in theirs}
        unknown = [name for name, one in said.items() if one not in (*ours, "auto")]
        figure = f"{len(theirs) - len(unknown)} of {len(theirs)}; not {', '.join(unknown) or 'any'}"
        yield Line(f"names of vLLM's {table}", figure, not unknown)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    folder = os.environ.get("PAGETURNER_TEMPLATES", "")
    parser.add_argument("--calls-templates", default=folder, help="walked for chat templates")


def lines(options: argparse.Namespace) -> Iterator[Line]:
    for file in ("test_calls", "test_tool_grammar", "test_tool_marks"):
        yield harness.pytest_line(f"tests of formats: {file}", f"tests/server/{file}.py")
    yield from examples()
    yield from logits()
    yield from templates(options.calls_templates)
    yield from names()


if __name__ == "__main__":
    sys.exit(harness.main("bring_calls", __doc__, {"calls": harness.part("bring_calls")}))
