"""Tools on public chat templates: which format each template has, and whether a call of the history is read back;
and the names of vLLM's parsers. What a parser makes of its own examples and grammars is held by
tests/server/test_calls.py and tests/server/test_tool_grammar.py.

`--calls-templates` (or PAGETURNER_TEMPLATES) is walked for templates; PAGETURNER_SOURCES has `vllm`. What is
absent is NOT RUN.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import harness
from bring_templates import TALKS, TOOLS, template_paths, with_texts
from harness import Line, NotRun

from pageturner.cli.other_names import translate
from pageturner.errors import ClientError
from pageturner.text import reasoning, tool_formats, tools
from pageturner.text.answer_format import AnswerFormat, read, recognised
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.conversation import prompt_text, variables
from pageturner.text.tool_grammar import check_tools

TALK = with_texts(TALKS["call"]["messages"])  # asks, calls, is told
TOOL = "weather"


def calls_back(prompt: str, answer: AnswerFormat) -> bool:
    """Tell whether the call of a rendered history is read as one, from any place where it may begin."""
    starts = [at.start() for at in re.finditer(rf"\A|[\[{{]|(?<=\n){TOOL}", prompt)]
    every = starts if answer.names else starts[:1]
    return any(("call", TOOL) in read(answer, prompt[start:]) for start in every[:100])


def templates(folder: str) -> Iterator[Line]:
    """Tools on every template that mentions them."""
    choice = tools.read([TOOLS[TOOL]], None, None)
    known = variables(choice.shown, None, None)
    sources = {path.stem: path.read_text() for path in template_paths(folder)}
    about = {name: text for name, text in sources.items() if re.search("tool|function", text)}
    found: Counter[str] = Counter()
    refused: list[str] = []
    unread: list[str] = []
    for name, source in about.items():
        format, template, prompt = recognised(source), ChatTemplate(source), ""
        try:
            assert format is not None
            check_tools(format, choice)
            prompt_text(template, TALK[:1], known)
        except (ClientError, AssertionError) as error:
            refused.append(f"{name}: {error}"[:90])
            continue
        with contextlib.suppress(ClientError):
            prompt = prompt_text(template, TALK, known)
        found[format.name] += 1
        if not calls_back(prompt, AnswerFormat(format.name, names=(TOOL,) * format.at_start)):
            unread.append(name)
    answered = len(about) - len(refused)
    figure = f"{answered} of {len(about)} that mention tools or functions"
    yield Line("tools are answered", "; ".join([figure, *refused[:5]]), not refused)
    yield Line("by format", ", ".join(f"{name} {n}" for name, n in found.most_common()), None)
    figure = f"{answered - len(unread)} of {answered}"
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
            raise NotRun(f"PAGETURNER_SOURCES has no {table} of vLLM's")
        theirs = re.findall(r'^    "([\w-]+)": \(', path.read_text(), re.M)
        said = {name: translate([flag, name], (flag, "--max-num-seqs"))[0][1] for name in theirs}
        unknown = [name for name, one in said.items() if one not in (*ours, "auto")]
        figure = f"{len(theirs) - len(unknown)} of {len(theirs)}; not {', '.join(unknown) or 'any'}"
        yield Line(f"names of vLLM's {table}", figure, not unknown)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    folder = os.environ.get("PAGETURNER_TEMPLATES", "")
    parser.add_argument("--calls-templates", default=folder, help="walked for chat templates")


def lines(options: argparse.Namespace) -> Iterator[Line]:
    yield from harness.safely("tools", lambda: templates(options.calls_templates))
    yield from harness.safely("names of vLLM's parsers", names)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
