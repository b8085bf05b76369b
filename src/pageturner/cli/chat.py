"""`pageturner chat`: a conversation in the terminal.

Owns the conversation and its commands. Ctrl-C ends an answer, Ctrl-D or /exit the program. The
whole history is sent every time; the prefix cache makes that cheap.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pageturner.cli import sampling_flags, sources
from pageturner.cli.sampling_flags import SamplingOptions
from pageturner.cli.screen import PlainScreen, Screen
from pageturner.cli.sources import AnswerSource, AnswerSummary, Message
from pageturner.config.flag_table import add_flags
from pageturner.errors import ClientError

# refusals that a shorter history can mend
TOO_LONG = ("prompt_too_long", "kv_too_small", "context_length_exceeded", "kv_capacity_exceeded")


class Leave(Exception):
    """The user wants to go."""


@dataclass(slots=True)
class Conversation:
    """The messages so far, and what the last answer cost. `system` "": no system message."""

    source: AnswerSource
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    system: str = ""
    screen: Screen = field(default_factory=PlainScreen)
    said: list[Message] = field(default_factory=list)
    last: AnswerSummary = field(default_factory=AnswerSummary)
    seconds: float = 0.0

    def answer(self, text: str) -> None:
        """Ask, and show the answer as it comes. What was interrupted stays in the history as it
        is."""
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
        note = {"abort": "stopped", "length": "cut: --max-tokens"}.get(self.last.finish, "")
        self.screen.end(note, self._figures())

    def _figures(self) -> str:
        if not self.last.output_tokens:
            return ""
        return f"{self.last.output_tokens} tokens in {self.seconds:.1f} s"

    def _ask(self, pieces: list[str]) -> AnswerSummary:
        """One answer, to as many of the last exchanges as the context holds. None is forgotten for
        a message that does not even fit alone."""
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
                self.screen.piece(pieces[-1])

    # -- commands: each takes what stands behind its name ------------------------------------------
    def help(self, _: str) -> None:
        for name, (_method, what) in COMMANDS.items():
            self.screen.say(f"/{name:8} {what}")
        self.screen.say("Ctrl-C stops an answer; a line that ends with \\ goes on in the next one")

    def reset(self, _: str) -> None:
        self.said.clear()
        self.screen.say("(a new conversation)")

    def set_system(self, text: str) -> None:
        self.system = text
        self.said.clear()
        self.screen.say(
            "(a new conversation, with this system message)" if text else "(no system message)"
        )

    def retry(self, _: str) -> None:
        if len(self.said) < 2:
            self.screen.say("(nothing was said yet)")
            return
        question = self.said[-2]["content"]
        del self.said[-2:]
        self.answer(question)

    def stats(self, _: str) -> None:
        a = self.last
        self.screen.say(
            f"{self.source.name}: {len(self.said)} messages; last answer: {a.prompt_tokens} prompt tokens"
            f" ({a.cached_tokens} cached), {a.output_tokens} output tokens in {self.seconds:.2f} s,"
            f" finish {a.finish}"
        )

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
            self.screen.say(f"(no such command: /{name}; /help lists them)")
            return
        COMMANDS[name][0](self, rest.strip())


Command = Callable[[Conversation, str], None]
COMMANDS: dict[str, tuple[Command, str]] = {
    "help": (Conversation.help, "this list"),
    "reset": (Conversation.reset, "forget the conversation"),
    "system": (
        Conversation.set_system,
        "TEXT: begin anew with this system message; without TEXT: with none",
    ),
    "retry": (Conversation.retry, "answer the last message again"),
    "stats": (Conversation.stats, "what the last answer cost"),
    "exit": (Conversation.exit, "leave (also /quit and Ctrl-D)"),
    "quit": (Conversation.exit, "leave"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    sources.add_flags(parser)
    add_flags(parser, "chat")
    sampling_flags.add_flags(parser, None)


def main(arguments: argparse.Namespace) -> int:
    """Talk until the user leaves. Returns the exit code."""
    sampling = sampling_flags.from_flags(arguments)
    source = sources.from_flags(arguments)
    source.check_chat()
    shown = choose_screen({name: what for name, (_, what) in COMMANDS.items()}, arguments.plain)
    conversation = Conversation(source, sampling, arguments.system, shown)
    shown.begin(source.name)
    while True:
        try:
            conversation.handle_line(shown.ask())
        except (EOFError, Leave):
            return 0
        except KeyboardInterrupt:
            shown.say("\n(/exit or Ctrl-D leaves)")


def choose_screen(commands: Mapping[str, str], plain: bool) -> Screen:
    """The best that this terminal and this installation have. commands: {name: what it does}."""
    wanted = (
        not plain
        and sys.stdin.isatty()
        and sys.stdout.isatty()
        and os.environ.get("TERM") != "dumb"
    )
    if wanted:
        with contextlib.suppress(ImportError):
            from pageturner.cli.rich_screen import RichScreen

            return RichScreen(commands)
    return PlainScreen()
