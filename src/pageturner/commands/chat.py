"""`pageturner chat`: a conversation in the terminal.

Owns the conversation and its commands. Ctrl-C ends an answer, Ctrl-D or /exit the program. The whole history
is sent every time; the prefix cache makes that cheap.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pageturner.commands import sampling_flags, sources
from pageturner.commands.sampling_flags import SamplingOptions
from pageturner.commands.sources import AnswerSource, AnswerSummary, Message
from pageturner.errors import ClientError

PROMPT = "> "
# refusals that a shorter history can mend
TOO_LONG = ("prompt_too_long", "kv_too_small", "context_length_exceeded", "kv_capacity_exceeded")


class Leave(Exception):
    """The user wants to go."""


@dataclass(slots=True)
class Conversation:
    """What was said so far, and what the last answer cost. `system` "": no system message."""

    source: AnswerSource
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    system: str = ""
    said: list[Message] = field(default_factory=list)
    last: AnswerSummary = field(default_factory=AnswerSummary)
    seconds: float = 0.0

    def answer(self, text: str) -> None:
        """Ask, and show the answer as it comes. What was interrupted stays in the history as it is."""
        self.said.append({"role": "user", "content": text})
        begin = time.monotonic()
        pieces: list[str] = []
        try:
            self.last = self._ask(pieces)
        except ClientError as error:
            self.said.pop()
            print(f"pageturner: {error.message}", file=sys.stderr)
            return
        except KeyboardInterrupt:
            self.last = AnswerSummary()
        self.seconds = time.monotonic() - begin
        self.said.append({"role": "assistant", "content": "".join(pieces)})
        print({"abort": " [stopped]", "length": " [cut: --max-tokens]"}.get(self.last.finish, ""), flush=True)

    def _ask(self, pieces: list[str]) -> AnswerSummary:
        """One answer, to as many of the last exchanges as the context holds. None is forgotten for a message
        that does not even fit alone."""
        forgotten = 0
        while True:
            try:
                summary = self._show(pieces, forgotten)
            except ClientError as error:
                if error.code not in TOO_LONG or len(self.said) < forgotten + 3:
                    raise
                forgotten += 2
                continue
            del self.said[:forgotten]
            if forgotten:
                said = f"\n(the context is full: the oldest {forgotten} messages are forgotten)"
                print(said, end="", file=sys.stderr)
            return summary

    def _show(self, pieces: list[str], forgotten: int) -> AnswerSummary:
        system = [{"role": "system", "content": self.system}] if self.system else []
        said = [*system, *self.said[forgotten:]]
        with contextlib.closing(self.source.chat(said, self.sampling)) as answer:
            while True:
                try:
                    pieces.append(next(answer))
                except StopIteration as end:
                    summary: AnswerSummary = end.value
                    return summary
                print(pieces[-1], end="", flush=True)

    # -- commands: each takes what stands behind its name -------------------------------------------------
    def help(self, _: str) -> None:
        for name, (_method, what) in COMMANDS.items():
            print(f"/{name:8} {what}")
        print("Ctrl-C stops an answer; a line that ends with \\ goes on in the next one")

    def reset(self, _: str) -> None:
        self.said.clear()
        print("(a new conversation)")

    def set_system(self, text: str) -> None:
        self.system = text
        self.said.clear()
        print("(a new conversation, with this system message)" if text else "(no system message)")

    def retry(self, _: str) -> None:
        if len(self.said) < 2:
            print("(nothing was said yet)")
            return
        question = self.said[-2]["content"]
        del self.said[-2:]
        self.answer(question)

    def stats(self, _: str) -> None:
        a = self.last
        print(f"{self.source.name}: {len(self.said)} messages; last answer: {a.prompt_tokens} prompt tokens"
              f" ({a.cached_tokens} cached), {a.output_tokens} output tokens in {self.seconds:.2f} s,"
              f" finish {a.finish}")  # fmt: skip

    def exit(self, _: str) -> None:
        raise Leave

    def handle_line(self, line: str) -> None:
        """A command or something to say."""
        if not line.startswith("/"):
            if line.strip():
                self.answer(line)
            return
        name, _, rest = line[1:].partition(" ")
        if name not in COMMANDS:
            print(f"(no such command: /{name}; /help lists them)")
            return
        COMMANDS[name][0](self, rest.strip())


Command = Callable[[Conversation, str], None]
COMMANDS: dict[str, tuple[Command, str]] = {
    "help": (Conversation.help, "this list"),
    "reset": (Conversation.reset, "forget the conversation"),
    "system": (Conversation.set_system, "TEXT: begin anew with this system message; without TEXT: with none"),
    "retry": (Conversation.retry, "answer the last message again"),
    "stats": (Conversation.stats, "what the last answer cost"),
    "exit": (Conversation.exit, "leave (also /quit and Ctrl-D)"),
    "quit": (Conversation.exit, "leave"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    sources.add_flags(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    sampling_flags.add_flags(parser, None)


def main(arguments: argparse.Namespace) -> int:
    """Talk until the user leaves. Returns the exit code."""
    sampling = sampling_flags.from_flags(arguments)
    source = sources.from_flags(arguments)
    source.check_chat()
    conversation = Conversation(source, sampling, arguments.system)
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (line editing and history of `input`)
        print(f"{source.name}: /help lists the commands, Ctrl-D leaves")
    while True:
        try:
            conversation.handle_line(_read(PROMPT if terminal else ""))
        except (EOFError, Leave):
            if terminal:
                print()
            return 0
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")


def _read(prompt: str) -> str:
    """A line; a backslash at its end joins the next one to it."""
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("." * len(prompt)))
    return "\n".join(lines)
