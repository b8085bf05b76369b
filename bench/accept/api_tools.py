"""Tools: calls in the formats of eight families, on their real templates, with a real model behind each.

    python bench/accept/api_tools.py [--requests 200] [--seed 14] [--only Gemma ...] [--templates FOLDER]

Owns the lines of the report: what is required is a valid call, a stream is what the whole answer is, no text
is lost around calls, a call that has begun is never malformed whatever the logits, and the calls of
Qwen2.5-Coder's texts are those that Transformers reads. Templates are data of others: they are looked for in
the folder of --templates (PAGETURNER_TEMPLATES), as `python tests/tools/record_vocabs.py --templates` fills
it. jsonschema and Transformers are in an environment of their own (--judge PYTHON, PAGETURNER_JUDGE).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import api_tools_cases
import api_tools_walk
import harness
from api_tools_cases import FAMILIES, Draw, Family, Json
from api_tools_http import Answer, both, post
from api_tools_text import lost
from harness import Line, NotRun, Server

from pageturner.text.tool_formats import NAMES

JUDGE = Path(__file__).parent / "api_tools_judge.py"
MOST_TOKENS, FREE_TOKENS = 192, 64  # where a call is asked for, and where this small model rambles
FLAGS = ("--log-level", "error", "--max-num-seqs", "32", "--max-model-len", "4096")
BEGUN = "I shall look.\n<tool_call>\n"  # with which half of the texts begin: the model seldom calls by itself
CITIES = ("Paris", "Köln", "東京", "New York", "São Paulo")
QWEN = api_tools_cases.SMOLLM2.parent / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"


def judged(python: str, rows: list[Json]) -> list[Any]:
    """What the judge says of each row. NotRun where there is no such environment."""
    if not python:
        raise NotRun("no environment with jsonschema and transformers: --judge PYTHON")
    text = "\n".join(json.dumps(row) for row in rows)
    done = subprocess.run(
        [python, str(JUDGE)], input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotRun(f"the judge failed: {done.stderr[-300:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def _raw(server: Server, answer: Answer) -> str:
    _, told = post(f"{server.url}/detokenize", {"tokens": answer.ids})
    text: str = json.loads(told)["prompt"]
    return text


class Trial:
    """The requests of one family on one server, and what is wrong with their answers."""

    def __init__(self, family: Family, requests: int, seed: int, judge: str) -> None:
        self.family, self.judge = family, judge
        thinks = bool(family.thinks())
        draws = (Draw(f"{seed} {family.name} {i}", family, thinks=thinks) for i in range(requests))
        self.bodies = [draw.request() for draw in draws]
        for i, body in enumerate(self.bodies):
            most = FREE_TOKENS if body["tool_choice"] == "auto" else MOST_TOKENS
            more = {"max_tokens": most, "return_token_ids": True, "request_id": f"tools-{seed}-{i}"}
            body |= more
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()

    def run(self, server: Server) -> None:
        rows: list[Json] = []
        for body, (one, other) in zip(self.bodies, both(server, self.bodies), strict=True):
            asked = body["tool_choice"] if isinstance(body["tool_choice"], str) else "named"
            self.counts[asked] += 1
            self.counts["cut"] += one.finish == "length"
            self.counts["calls"] += len(one.calls)
            if one.refused:
                self.counts["refused"] += 1
                self.wrong.append(f"refused: {one.refused}")
                continue
            self._same(one, other)
            if missing := lost(one, _raw(server, one), self.family.format, self.family.thinks()):
                self.counts["text lost"] += 1
                self.wrong.append(f"text lost: {missing}")
            rows += self._calls(body, asked, one)
        for row, said in zip(rows, judged(self.judge, rows), strict=True):
            if said:
                self.counts["invalid"] += 1
                self.wrong.append(f"invalid: {said} {json.dumps(row)[:600]}")
        self.counts["judged"] += len(rows)

    def _same(self, one: Answer, other: Answer | str) -> None:
        if one != other:
            self.counts["stream differs"] += 1
            self.wrong.append(f"stream differs: {one} {other}"[:900])

    def _calls(self, body: Json, asked: str, answer: Answer) -> list[Json]:
        """What is to be judged: each call that is whole."""
        tools = {tool["function"]["name"]: tool["function"] for tool in body["tools"]}
        if asked != "auto" and not answer.calls and answer.finish != "length":
            self.counts["no call"] += 1
            self.wrong.append(f"no call: {answer}"[:600])
        if len(answer.calls) > 1 and body.get("parallel_tool_calls") is False:
            self.counts["too many"] += 1
            self.wrong.append(f"too many calls: {answer}"[:600])
        rows = []
        for i, call in enumerate(answer.calls):
            try:
                value = json.loads(call["arguments"])
            except ValueError:
                if answer.finish != "length" or i + 1 < len(answer.calls):
                    self.counts["invalid"] += 1
                    self.wrong.append(f"no JSON: {call}"[:600])
                continue
            schema = tools[call["name"]].get("parameters") or {"type": "object", "maxProperties": 0}
            named = body["tool_choice"]["function"]["name"] if asked == "named" else call["name"]
            rows.append({"schema": schema if named == call["name"] else False, "value": value})
        return rows

    def line(self, variant: str) -> Line:
        counts = self.counts
        asked = ", ".join(f"{counts[name]} {name}" for name in ("required", "named", "auto"))
        bad = {name: counts[name] for name in BAD if counts[name]}
        figure = f"{len(self.bodies)} requests ({asked}), each whole and streamed; {counts['judged']} calls judged"
        figure += f", {counts['cut']} answers cut by max_tokens; {bad or 'nothing wrong'}"
        return Line(f"tools, {self.family.name}, marks are {variant}", figure, not bad)


BAD = ("refused", "no call", "too many", "invalid", "stream differs", "text lost")


def _formats(arguments: argparse.Namespace) -> Iterator[Line]:
    """Half of the requests with marks as plain text, half with control tokens."""
    for family in FAMILIES:
        if arguments.only and family.name not in arguments.only:
            continue
        for control in (False, True):
            variant = "control tokens" if control else "plain text"
            trial = None
            try:
                trial = Trial(
                    family, arguments.requests // 2, arguments.seed + control, arguments.judge
                )
                with tempfile.TemporaryDirectory() as folder:
                    model = api_tools_cases.model_with(family, Path(folder), control=control)
                    with harness.server(*FLAGS, model=str(model)) as server:
                        trial.run(server)
                yield trial.line(variant)
            except NotRun as reason:
                yield Line(
                    f"tools, {family.name}, marks are {variant}", str(reason), None, run=False
                )
            for wrong in (trial.wrong if trial else [])[: arguments.show]:
                print("   ", wrong, file=sys.stderr)


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Every line about tools that the report has."""
    api_tools_cases.TEMPLATES = arguments.templates
    yield from _walks(arguments)
    try:
        yield from _transformers(arguments) if arguments.qwen else ()
    except NotRun as reason:
        yield Line("auto on Qwen2.5-Coder beside Transformers", str(reason), None, run=False)
    yield from _formats(arguments) if arguments.requests else ()


def _walks(arguments: argparse.Namespace) -> Iterator[Line]:
    """Random logits: a call that has begun, or is asked for, is never malformed."""
    texts = -(-arguments.texts // len(NAMES))
    for name in NAMES if texts else ():
        yield _walk(arguments, name, "auto", texts)
    for family in FAMILIES if texts else ():
        for asked in ("required", "named"):
            yield _walk(arguments, family.format, asked, arguments.required // 2)


def _walk(arguments: argparse.Namespace, name: str, asked: str, texts: int) -> Line:
    what = f"{texts} texts of random logits, {asked}, {name}: a call that has begun is a valid one"
    try:
        walks = api_tools_walk.Walks(name, arguments.seed, asked)
        walks.run(texts)
        said = judged(arguments.judge, walks.rows)
    except NotRun as reason:
        return Line(what, str(reason), None, run=False)
    wrong = walks.wrong + [f"{one} {row}" for row, one in zip(walks.rows, said, strict=True) if one]
    for one in wrong[: arguments.show]:
        print("   ", one[:900], file=sys.stderr)
    figure = (
        f"{walks.begun} calls begun, {len(walks.rows)} whole ones judged, {walks.cut} texts cut, "
    )
    figure += f"{walks.plain} texts without a call kept as they are; {len(wrong)} wrong"
    return Line(what, figure, not wrong)


def _asked(i: int, seed: int) -> Json:
    """A question to Qwen2.5-Coder: about the weather, with a tool for it, or drawn words and drawn tools."""
    body = Draw(f"{seed} qwen {i}", FAMILIES[0]).request(("auto",))
    if i % 3:
        parameters = {"city": {"type": "string"}, "days": {"type": "integer"}}
        function = {
            "name": "get_weather",
            "description": "The weather of a city for the next days.",
        }
        function |= {
            "parameters": {"type": "object", "properties": parameters, "required": ["city"]}
        }
        said = (
            f"What is the weather in {CITIES[i % len(CITIES)]} for {i % 7 + 1} days, and in Oslo?"
        )
        body["messages"] = [{"role": "user", "content": said}]
        body["tools"] = [{"type": "function", "function": function}]
    return body | {
        "max_tokens": MOST_TOKENS,
        "return_token_ids": True,
        "temperature": [0, 0.7, 1][i % 4 % 3],
    }


def _transformers(arguments: argparse.Namespace) -> Iterator[Line]:
    """Texts of Qwen2.5-Coder with auto: our calls beside those that Transformers reads from the same text."""
    what = "auto on Qwen2.5-Coder: the calls that Transformers reads from the same text"
    if not QWEN.is_file():
        yield Line(what, f"{QWEN.name} is absent", None, run=False)
        return
    bodies = [_asked(i, arguments.seed) for i in range(arguments.qwen)]
    with harness.server(*FLAGS, "--developer", model=str(QWEN), wait=120) as server:
        _, told = post(f"{server.url}/tokenize", {"prompt": BEGUN, "add_special_tokens": False})
        for body in bodies[::2]:
            body["force_ids"] = json.loads(told)["tokens"]
        answers = [one for one, _ in both(server, bodies)]
        raws = [_raw(server, one) for one in answers]
        prompts = [_prompt(server, body) for body in bodies]
    rows = [
        {"text": raw, "prompt": prompt, "tools": None}
        for raw, prompt in zip(raws, prompts, strict=True)
    ]
    counts, differ = Counter[str](), []
    for answer, raw, said in zip(answers, raws, judged(arguments.judge, rows), strict=True):
        ours = [(call["name"], _json(call["arguments"])) for call in answer.calls]
        counts["called"] += bool(ours)
        if "error" in said and answer.finish == "length":
            counts["cut"] += 1
            continue
        calls = [one["function"] for one in said.get("tool_calls") or ()]
        theirs = [(call.get("name"), call.get("arguments")) for call in calls]
        content, last = answer.content.strip(), (said.get("content") or "").strip()
        counts["same"] += ours == theirs and content == last
        # theirs is the text behind the last call alone, where there is some
        counts["more"] += (
            ours == theirs and content != last and bool(ours) and content.endswith(last)
        )
        if (
            "error" in said
            or ours != theirs
            or not content.endswith(last)
            or (content != last and not ours)
        ):
            differ.append(f"they: {said}; we: {ours} {answer.content!r}; {raw[:300]!r}")
    for one in differ[: arguments.show]:
        print("   ", one, file=sys.stderr)
    figure = f"{counts['same']} of {len(answers)} the same, {counts['called']} with calls; {counts['more']} more "
    figure += "of which Transformers keeps the last piece of text alone, "
    figure += f"{counts['cut']} cut by max_tokens that it cannot read; {len(differ)} differ"
    yield Line(what, figure, not differ)


def _prompt(server: Server, body: Json) -> str:
    fields = {name: body[name] for name in ("messages", "tools")}
    _, told = post(f"{server.url}/tokenize", fields)
    _, text = post(f"{server.url}/detokenize", {"tokens": json.loads(told)["tokens"]})
    prompt: str = json.loads(text)["prompt"]
    return prompt


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument("--requests", type=int, default=200, help="for each family")
    parser.add_argument("--texts", type=int, default=1000, help="of random logits, in all formats")
    parser.add_argument(
        "--required", type=int, default=200, help="of random logits that must call, a family"
    )
    parser.add_argument("--qwen", type=int, default=60, help="texts that Transformers reads too")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--show", type=int, default=3, help="of what is wrong, on standard error")
    parser.add_argument("--only", nargs="*", choices=[family.name for family in FAMILIES])
    parser.add_argument("--judge", default=os.environ.get("PAGETURNER_JUDGE", ""), help="a python")
    parser.add_argument("--templates", type=Path, default=api_tools_cases.TEMPLATES)


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
