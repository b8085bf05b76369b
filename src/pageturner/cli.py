"""The command line: a table of commands, each in a module of its own that is imported when it is called.

Owns dispatch, exit codes and one-line errors. Must not know what any command does.

A command module has `add_arguments(parser)` and `main(arguments) -> exit code`. Exit codes: 0 done, 1 it
could not be done (the reason is on standard error, in one line), 2 the command line or settings are wrong.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from pageturner import __version__
from pageturner.errors import ClientError, EngineFault

COMMANDS = {
    ("serve",): ("pageturner.serve.server", "serve a model over HTTP, with the OpenAI API"),
    ("route",): (
        "pageturner.router.route",
        "put several servers behind one address, and send equal prefixes to the same one",
    ),
    ("chat",): ("pageturner.commands.chat", "talk to a model in the terminal"),
    ("batch",): (
        "pageturner.serve.batch_command",
        "answer every line of a file of requests, and go on where it was stopped",
    ),
    ("generate",): ("pageturner.commands.generate", "answer one prompt"),
    ("pull",): ("pageturner.commands.pull", "fetch a model, and check it"),
    ("list",): ("pageturner.commands.list_models", "list the models that were fetched"),
    ("rm",): ("pageturner.commands.rm", "remove a model that was fetched"),
    ("plan",): (
        "pageturner.commands.plan",
        "tell the memory that a model's weights and KV cache take, and how many sequences fit",
    ),
    ("compare",): (
        "pageturner.commands.compare",
        "run the same requests under several batching policies and write a report with pictures",
    ),
    ("simulate",): (
        "pageturner.commands.simulate",
        "estimate latencies, and how many replicas a load needs, without running the model",
    ),
    ("tune",): (
        "pageturner.commands.tune",
        "search the settings that meet latency targets, and write them as a file for serve",
    ),
    ("calibrate",): (
        "pageturner.commands.calibrate",
        "measure how long the engine's steps take on this machine, for simulate",
    ),
    ("verify",): (
        "pageturner.commands.verify",
        "make the answer of a receipt again, and say which part differs, if any",
    ),
    ("replay",): (
        "pageturner.commands.replay",
        "run a step log again and check that plans and tokens are the same",
    ),
    ("doctor",): (
        "pageturner.commands.doctor",
        "show what this machine can do, which kernels and settings would be used, and why",
    ),
    ("completion",): (
        "pageturner.commands.completion",
        "print a script with which bash, zsh or fish completes commands and flags",
    ),
    ("key", "new"): ("pageturner.commands.key", "make an API key, and its table for the file of keys"),
    ("bench", "serve"): ("pageturner.lab.bench_serve", "load any OpenAI-compatible server and measure it"),
    ("bench", "engine"): ("pageturner.lab.bench_engine", "measure the engine without a server"),
    ("bench", "kernels"): (
        "pageturner.lab.bench_kernels",
        "time each kernel and compare it with the machine's limits",
    ),
}

# flags of `vllm serve` that have another name here, or none; what follows "here"
OTHER_NAMES = {
    "--gpu-memory-utilization": "memory is a size: --kv-cache-memory 4G",
    "--scheduling-policy": "queue orders are --order (fcfs, priority ...)",
    "--tensor-parallel-size": "one process computes a model; several servers: pageturner route",
    "--pipeline-parallel-size": "one process computes a model; several servers: pageturner route",
    "--data-parallel-size": "several servers stand behind pageturner route",
    "--trust-remote-code": "code of a model is never run; leave it out",
    "--enforce-eager": "no graphs are captured; leave it out",
    "--enable-chunked-prefill": "prefill is chunked by the default policy; leave it out",
    "--enable-lora": "adapters are --lora NAME=FOLDER",
    "--lora-modules": "adapters are --lora NAME=FOLDER",
    "--speculative-config": "drafts are --speculation ngram, or draft with --draft-model",
    "--enable-auto-tool-choice": "tools are on; their format is --tool-call-parser",
    "--model": "the model stands without a flag: pageturner serve MODEL",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for names, (module, help) in COMMANDS.items():
        if tuple(words[: len(names)]) == names:
            return _run(names, module, help, words[len(names) :])
    if words in (["--version"], ["-V"]):
        print(f"pageturner {__version__}")
        return 0
    group = [names for names in COMMANDS if len(names) > 1 and names[:1] == tuple(words[:1])]
    asked = words[1 if group else 0 :] in ([], ["-h"], ["--help"])
    print(_overview(group or COMMANDS), file=sys.stdout if asked else sys.stderr)
    if not asked:
        print(f"pageturner: no such command: {' '.join(words[:2])}{_meant(words)}", file=sys.stderr)
    return 0 if asked else 2


def _run(names: tuple[str, ...], module: str, help: str, words: list[str]) -> int:
    command = importlib.import_module(module)
    parser = _parser(names, module, help)
    arguments = parser.parse_args(words)
    if names == ("completion",):
        arguments.helps = _helps
    try:
        return int(command.main(arguments) or 0)
    except (EngineFault, ClientError) as error:
        print(f"pageturner: {error.message}", file=sys.stderr)
        return 2 if error.code == "bad_setting" else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has left; nothing more can be said to them
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(names: tuple[str, ...], module: str, help: str) -> _Parser:
    """The flags of a command."""
    parser = _Parser(prog=" ".join(("pageturner", *names)), description=help, allow_abbrev=False)
    importlib.import_module(module).add_arguments(parser)
    return parser


def _helps() -> dict[tuple[str, ...], str]:
    """The help of every command, from which the shells' completion is made."""
    return {names: _parser(names, *entry).format_help() for names, entry in COMMANDS.items()}


def _meant(words: Sequence[str]) -> str:
    """The command that somebody may have meant who mistyped one, as a question; empty if none is near."""
    names = {" ".join(names): len(names) for names in COMMANDS}
    for size in (2, 1):
        for near in difflib.get_close_matches(" ".join(words[:size]), names, 1, 0.7):
            if names[near] == size:
                return f": did you mean {near}?"
    return ""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        flags = re.findall(r"--[\w-]+", self.format_help())
        meant = [flag for word in re.findall(r"--[\w-]+", message)
                 for flag in difflib.get_close_matches(word, flags, 1) if flag != word]  # fmt: skip
        others = [OTHER_NAMES[word] for word in re.findall(r"--[\w-]+", message) if word in OTHER_NAMES]
        hint = f"did you mean {meant[0]}? " if meant else ""
        hint = f"here {others[0]} " if others and self.prog == "pageturner serve" else hint
        self.exit(2, f"pageturner: {message}: {hint}({self.prog} --help lists the flags)\n")


def _overview(commands: Iterable[tuple[str, ...]]) -> str:
    """The list of commands."""
    lines = ["usage: pageturner COMMAND [...]   (pageturner COMMAND --help explains it)", ""]
    lines += [f"  {' '.join(names):14} {COMMANDS[names][1]}" for names in commands]
    return "\n".join([*lines, "", "  --version      print the version"])


if __name__ == "__main__":
    sys.exit(main())
