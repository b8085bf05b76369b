"""The screen of a chat: plain lines here, or a terminal with colour where the extra `chat` is
installed.

Owns how lines are asked for and how answers are shown. Must not know what a conversation is.
"""

from __future__ import annotations

import contextlib
import re
import sys
from typing import Protocol

PROMPT = "> "
# all control characters but tab and line feed: a model's answer must not move the cursor or rename
# the window
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Screen(Protocol):
    """The screen that shows one conversation."""

    def begin(self, model: str) -> None:
        """Say who is there."""

    def ask(self) -> str:
        """Return what the user says. EOFError: no more; KeyboardInterrupt: Ctrl-C."""

    def piece(self, text: str) -> None:
        """The next piece of an answer."""

    def end(self, note: str, figures: str) -> None:
        """An answer ended. note: why it is not whole, or ""; figures: what it took."""

    def say(self, text: str) -> None:
        """A line of the program's own."""


def printable(text: str) -> str:
    """Return the text without the control characters that a terminal would obey."""
    return CONTROL.sub("�", text)


class PlainScreen:
    """Lines as they are: for pipes, `--plain`, and where the extra is not installed."""

    def __init__(self) -> None:
        self._terminal = sys.stdin.isatty()
        self._obeys = sys.stdout.isatty()
        if self._terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (line editing and history of `input`)

    def begin(self, model: str) -> None:
        if self._terminal:
            print(f"{model}: /help lists the commands, Ctrl-D leaves")

    def ask(self) -> str:
        """A line; a backslash at its end joins the next one to it."""
        prompt = PROMPT if self._terminal else ""
        try:
            lines = [input(prompt)]
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(input("." * len(prompt)))
        except EOFError:
            if self._terminal:
                print()
            raise
        return "\n".join(lines)

    def piece(self, text: str) -> None:
        print(printable(text) if self._obeys else text, end="", flush=True)

    def end(self, note: str, figures: str) -> None:
        print(f" [{note}]" if note else "", flush=True)

    def say(self, text: str) -> None:
        print(text)
