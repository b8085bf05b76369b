"""Agents: tools and thoughts in every shape of the API, and three of them at work.

    python bench/accept/api_agents.py [--rounds N] [--seeds N] [--clients FOLDER] [--only shapes calls agents]

shapes  random answers of thoughts, text and calls, cut anywhere, in each shape: streamed as whole; kill -9
calls   a real model that must call a tool, in each shape: what comes matches the schema
agents  Codex, Claude Code and opencode edit a file. The model says what is dictated: whether so small a one
        solves a task is no matter of the server. Then as it likes, if --minutes are given for that

Owns what is asked of the shapes. Must not know how the agents are installed and told what to do
(bench/clients).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
from harness import Line, NotRun

CLIENTS = harness.ROOT / "bench" / "clients"
FOLDER = Path(
    os.environ.get("PAGETURNER_CLIENTS") or Path.home() / ".cache" / "pageturner" / "clients"
)
CODER = Path.home() / ".cache" / "pageturner" / "models" / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
AGENTS = ("codex", "opencode", "claude_code")
SCRIPTED_SECONDS = 900.0  # for one task; on a CPU the first prompt of an agent takes minutes
UNITS = ("celsius", "fahrenheit")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": list(UNITS)}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
MOST = 400  # tokens; only white space could take more
ASK = "What is the weather in Paris?"
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
OTHER = {"name": "wait", "description": "Waits.", "parameters": NOTHING}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=350, help="random answers in each shape")
    parser.add_argument(
        "--seeds", type=int, default=10, help="answers with each choice in each shape"
    )
    parser.add_argument(
        "--clients", type=Path, default=FOLDER, help="where agents are, or are installed"
    )
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="for each agent with the model's own words"
    )
    parser.add_argument("--only", nargs="*", choices=list(CHECKS), help="these alone")


# -- shapes --------------------------------------------------------------------------------------------------
def shapes(arguments: argparse.Namespace) -> Iterator[Line]:
    """By the tests, of which the first is given more rounds."""
    file, rounds = "tests/server/test_parts.py", arguments.rounds
    more = {"PARTS_ROUNDS": str(rounds)}
    what = f"{4 * rounds:,} random answers with calls and thoughts in 4 shapes: streamed as whole"
    yield harness.pytest_line(what, file, "-k", "wherever_the_answer_is_cut", environment=more)
    what = "kill -9 of the engine under streams of calls and thoughts in 4 shapes: each goes on as undisturbed"
    yield harness.pytest_line(what, file, "-k", "outlive_their_engine")


# -- calls ---------------------------------------------------------------------------------------------------
def calls(arguments: argparse.Namespace) -> Iterator[Line]:
    """A model that would rather talk."""
    with harness.server("--tool-call-parser", "hermes", wait=120) as server:
        for shape, (path, ask, read) in SHAPES.items():
            made: Counter[str] = Counter()
            for seed in range(arguments.seeds):
                for named in (False, True):
                    made[_judged(read(_post(server.url + path, ask(named, seed))), named)] += 1
            figure = ", ".join(f"{count} {verdict}" for verdict, count in made.most_common())
            asked = 2 * arguments.seeds
            what = f"{asked} calls that had to be, in {shape}: each is there and matches its schema"
            yield Line(what, figure, made["valid"] == asked)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    head = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=300) as answer:
        told: dict[str, Any] = json.load(answer)
        return told


def _judged(found: list[tuple[str, Any]], named: bool) -> str:
    """valid, or what is wrong with the calls of an answer. By name only the first tool may be called."""
    if not found:
        return "without a call"
    for name, arguments in found:
        if name == "wait" and not named and arguments == {}:
            continue
        right = (
            isinstance(arguments, dict) and set(arguments) == {"city", "unit"} and name == "weather"
        )
        if not right or len(arguments["city"]) > 20 or arguments["unit"] not in UNITS:
            return f"invalid ({name} {arguments})"[:120]
    return "valid"


def _told(arguments: str) -> Any:
    """The arguments; as they are where they are no JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _chat(named: bool, seed: int) -> dict[str, Any]:
    tools = [{"type": "function", "function": one} for one in (FUNCTION, OTHER)]
    choice: Any = {"type": "function", "function": {"name": "weather"}} if named else "required"
    asked = {"messages": [{"role": "user", "content": ASK}], "tools": tools, "tool_choice": choice}
    return {**asked, "seed": seed, "max_tokens": MOST, "parallel_tool_calls": False}


def _chat_calls(told: dict[str, Any]) -> list[tuple[str, Any]]:
    found = [call["function"] for call in told["choices"][0]["message"].get("tool_calls", ())]
    return [(one["name"], _told(one["arguments"])) for one in found]


def _responses(named: bool, seed: int) -> dict[str, Any]:
    tools = [{"type": "function", **one} for one in (FUNCTION, OTHER)]
    choice: Any = {"type": "function", "name": "weather"} if named else "required"
    asked = {"input": ASK, "tools": tools, "tool_choice": choice, "max_output_tokens": MOST}
    return {**asked, "seed": seed, "parallel_tool_calls": False}


def _responses_calls(told: dict[str, Any]) -> list[tuple[str, Any]]:
    found = [item for item in told["output"] if item["type"] == "function_call"]
    return [(item["name"], _told(item["arguments"])) for item in found]


def _messages(named: bool, seed: int) -> dict[str, Any]:
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in (FUNCTION, OTHER)
    ]
    choice = {"type": "tool", "name": "weather"} if named else {"type": "any"}
    asked = {
        "messages": [{"role": "user", "content": ASK}],
        "tools": tools,
        "max_tokens": MOST,
        "seed": seed,
    }
    return {**asked, "tool_choice": {**choice, "disable_parallel_tool_use": True}}


def _messages_calls(told: dict[str, Any]) -> list[tuple[str, Any]]:
    return [
        (block["name"], block["input"]) for block in told["content"] if block["type"] == "tool_use"
    ]


SHAPES = {
    "chats": ("/v1/chat/completions", _chat, _chat_calls),
    "responses": ("/v1/responses", _responses, _responses_calls),
    "messages": ("/v1/messages", _messages, _messages_calls),
}


# -- agents --------------------------------------------------------------------------------------------------
def agents(arguments: argparse.Namespace) -> Iterator[Line]:
    """Each after the other: they share two cores with the server."""
    if not CODER.exists():
        raise NotRun(f"{CODER} is not there")
    sys.path.insert(0, str(CLIENTS))
    flags = ("--served-model-name", "coder", "--kv-cache-memory", "2G", "--developer")
    flags += ("--engine-timeout", "120")
    with harness.server(
        *flags, "--tool-call-parser", "hermes", model=str(CODER), wait=120
    ) as server:
        for name in AGENTS:
            yield _agent(name, arguments, server.url, SCRIPTED_SECONDS, scripted=True)
    if not arguments.minutes:
        return
    with harness.server(*flags, "--tool-call-parser", "json", model=str(CODER), wait=120) as server:
        for name in AGENTS:
            yield _agent(name, arguments, server.url, 60 * arguments.minutes, scripted=False)


def _agent(
    name: str, arguments: argparse.Namespace, server: str, seconds: float, *, scripted: bool
) -> Line:
    """What one of them did. Its own words may solve the task or not; what it asks must not be refused."""
    told = "" if scripted else ", in the model's own words"
    what = (
        f"{name}: a file is edited through tool calls{told}"
        if scripted
        else f"{name}{told}: nothing refused"
    )
    client = importlib.import_module(name)
    installed = importlib.import_module("command_line").NotInstalled
    try:
        seen = client.run(arguments.clients / name, server, "coder", seconds, scripted)
    except installed as reason:
        raise NotRun(f"{name}: {reason}") from None
    requests = ", ".join(f"{count} x {request}" for request, count in seen.requests.items())
    called = ", ".join(f"{count} x {tool}" for tool, count in seen.calls.items()) or "nothing"
    end = "solved" if seen.solved else "file changed" if seen.changed else "file as it was"
    figure = f"{seen.version}; {requests}; called {called}; {end}; {'; '.join(seen.errors) or 'no errors'}"
    return Line(what, figure, seen.protocol_held and (seen.solved or not scripted))


CHECKS = {"shapes": shapes, "calls": calls, "agents": agents}


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """All lines of this part."""
    for name in arguments.only or CHECKS:
        yield from CHECKS[name](arguments)


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
