"""The command line: a table of commands (commands.json), each in a module of its own that is
imported when it is called.

Owns dispatch, exit codes and one-line errors. Must not know what any command does.

A command module has `add_arguments(parser)` and `main(arguments) -> exit code`. Exit codes: 0 done,
1 it could not be done (the reason is on standard error, in one line), 2 the command line or
settings are wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from pageturner import __version__, logs
from pageturner.errors import ClientError, EngineFault
from pageturner.progress import Still

_TABLE: dict[str, tuple[str, str]] = json.loads(
    Path(__file__).with_name("commands.json").read_bytes()
)
# words of a command -> its module, and what it does
COMMANDS = {tuple(words.split()): entry for words, entry in _TABLE.items()}
LAB = "pageturner.lab."  # its commands compute, and end: none may be silent for long
LONGEST_USAGE = 400  # characters; a longer list of flags is no help


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for names, (module, help) in COMMANDS.items():
        if tuple(words[: len(names)]) == names:
            return _run(names, module, help, words[len(names) :])
    if words in (["--version"], ["-V"], ["-v"], ["version"]):
        print(f"pageturner {__version__}")
        return 0
    if words[:1] == ["help"]:
        return main([*words[1:], "--help"])
    group = [names for names in COMMANDS if len(names) > 1 and names[:1] == tuple(words[:1])]
    if words[1 if group else 0 :] in ([], ["-h"], ["--help"]):
        print(_overview(group or COMMANDS))
        return 0
    from pageturner.cli.other_names import other_command

    typed = " ".join(words[: 2 if group else 1])
    meant = other_command(typed) or _meant(words)
    if not meant:
        print(_overview(group or COMMANDS), file=sys.stderr)
    print(f"pageturner: no such command: {typed}{meant}", file=sys.stderr)
    return 2


def _run(names: tuple[str, ...], module: str, help: str, words: list[str]) -> int:
    try:
        said = {"json", "--json"} & {word.rpartition("=")[2] for word in words}
        every = 3600.0 if said else 1.5  # programs read nothing but what they asked for
        with contextlib.ExitStack() as stack:
            with Still(lambda: f"starting {' '.join(names)}", every):
                command = importlib.import_module(module)
                parser = _parser(names, module, help)
                # argparse is slow at it
                parser.usage = _usage(parser) if {"-h", "--help"} & {*words} else "%(prog)s"
                arguments = parser.parse_intermixed_args(_translated(parser, words))
                if module.startswith(LAB) and not sys.stderr.isatty():
                    stack.enter_context(Still(lambda: f"{' '.join(names)} is at work", 2 * every))
            if names == ("completion",):
                arguments.helps = _helps
            return int(command.main(arguments) or 0)
    except (EngineFault, ClientError) as error:
        logs.say(error.message, "error")
        return 2 if error.code == "bad_setting" else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has left; nothing more can be said to them
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(names: tuple[str, ...], module: str, help: str) -> _Parser:
    """The flags of a command."""
    from pageturner.cli import examples

    parser = _Parser(
        prog=" ".join(("pageturner", *names)),
        description=help[0].upper() + help[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    importlib.import_module(module).add_arguments(parser)
    about = (parser.epilog or "").partition("examples:")[0].rstrip()
    parser.epilog = "\n\n".join(filter(None, (about, examples.epilog(" ".join(names)))))
    return parser


def _usage(parser: _Parser) -> str:
    """Return argparse's usage line, without the optional flags if it would be longer than
    LONGEST_USAGE."""
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    if len(usage) <= LONGEST_USAGE:
        return usage.replace("%", "%%")
    return f"%(prog)s [options] {' '.join(_needed(usage))}".rstrip()


def _needed(usage: str) -> list[str]:
    """Return what follows the optional flags in a usage line: the flags that must be given, then
    the arguments."""
    return re.sub(r"\[-[^][]*(\[[^]]*\][^][]*)*\]", "", usage.partition("[-h]")[2]).split()


def _translated(parser: _Parser, words: list[str]) -> list[str]:
    """The words with our names of flags in place of vLLM's; what was left out is told."""
    from pageturner.cli import other_names

    if parser.prog == "pageturner serve":
        for note in other_names.notes_on_variables():
            print(f"pageturner: {note}", file=sys.stderr)
    if not other_names.concerns(words):
        return words
    short = re.findall(r"(?:^  |, )(-\w)\b", parser.format_help(), re.MULTILINE)
    found, notes = other_names.translate(words, {*parser.flags(), *short})
    for note in notes:
        print(f"pageturner: {note}", file=sys.stderr)
    return found


def _helps() -> dict[tuple[str, ...], str]:
    """The help of every command, from which the shells' completion is made."""
    return {names: _parser(names, *entry).format_help() for names, entry in COMMANDS.items()}


def _meant(words: Sequence[str]) -> str:
    """The command that somebody may have meant who mistyped one, as a question; empty if none is
    near."""
    names = {" ".join(names): len(names) for names in COMMANDS}
    for size in (2, 1):
        for near in difflib.get_close_matches(" ".join(words[:size]), names, 1, 0.7):
            if names[near] == size:
                return f": did you mean {near}?"
    return ""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def flags(self) -> dict[str, tuple[str, ...]]:
        """Its long flags, with their choices."""
        from pageturner.cli.completion import flags_of

        return flags_of(self.format_help())

    def error(self, message: str) -> NoReturn:
        flags = self.flags()
        unknown = [word for word in re.findall(r"--[\w-]+", message) if word not in flags]
        meant = [
            flag for word in unknown for flag in difflib.get_close_matches(word, flags, 1, 0.75)
        ]
        hint = f": did you mean {meant[0]}?" if meant else self._file_hint(message, flags)
        self.exit(2, f"pageturner: {message}{hint} ({self.prog} --help lists the flags)\n")

    @staticmethod
    def _file_hint(message: str, flags: Collection[str]) -> str:
        """Return a hint for a trace that was given without its flag, or for a unit that is
        separated from its number; "" for any other message."""
        _, unknown, words = message.partition("unrecognized arguments: ")
        if unknown and re.fullmatch(r"[KMGT]i?B?", words, re.IGNORECASE):
            return f": a size is one word, such as 8{words}"
        if "--trace" not in flags or not unknown or words.startswith("-"):
            return ""
        return f": a trace is given as --trace {words.split()[0]}"


def _overview(commands: Iterable[tuple[str, ...]]) -> str:
    """The list of commands."""
    lines = ["usage: pageturner COMMAND [...]   (pageturner COMMAND --help explains it)", ""]
    lines += [f"  {' '.join(names):14} {COMMANDS[names][1]}" for names in commands]
    return "\n".join([*lines, "", "  --version      print the version"])


if __name__ == "__main__":
    sys.exit(main())
