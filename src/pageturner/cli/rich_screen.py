"""A chat in a terminal with colour: Markdown while it comes, history, completion of commands.

Owns what prompt_toolkit and rich (the extra `chat`) are asked to do. An answer is shown block by
block: what is whole (a paragraph, a list, code up to its closing fence) is printed for good, and
only the block that is still being written is drawn again and again, so that answers may be longer
than the screen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

from pageturner.cli.screen import PROMPT, printable
from pageturner.private_files import FOLDER, open_private

FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
DRAWN_A_SECOND = 12.0  # drawings of an unfinished block
SPARE_ROWS = 4  # of the terminal that an unfinished block leaves free


class MarkdownBlocks:
    """Cuts a text that comes in pieces where a block of Markdown has ended."""

    def __init__(self) -> None:
        self.rest = ""  # the block that has not ended
        self.fence = ""  # that is open in it

    def feed(self, text: str) -> list[str]:
        """The blocks that end with this piece."""
        whole: list[str] = []
        *lines, last = (self.rest + text).split("\n")
        self.rest = ""
        self.fence = ""
        for line in lines:
            found = FENCE.match(line)
            if self.fence:
                ends = (
                    found is not None
                    and found[1].startswith(self.fence)
                    and line.strip() == found[1]
                )
            else:
                ends = not line.strip()
            self.rest += line + "\n"
            if ends:
                if self.rest.strip():
                    whole.append(self.rest)
                self.rest = self.fence = ""
            elif found and not self.fence:
                self.fence = found[1]
        self.rest += last
        return whole

    def tail(self, rows: int) -> str:
        """The last rows of the block that has not ended, as Markdown of their own."""
        lines = self.rest.split("\n")
        if len(lines) <= rows:
            return self.rest
        opening = [next(line for line in lines if FENCE.match(line))] if self.fence else []
        return "\n".join([*opening, *lines[-rows:]])


class Commands(Completer):
    """Completes /commands at the beginning of a line."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        text = document.text_before_cursor
        if text.startswith("/") and " " not in text and "\n" not in text:
            for name, what in self._commands.items():
                if name.startswith(text[1:]):
                    yield Completion(f"/{name}", start_position=-len(text), display_meta=what)


class RichScreen:
    """The same interface as `PlainScreen`. `history`: None keeps it in memory."""

    def __init__(
        self,
        commands: Mapping[str, str],
        history: Path | None = None,
        console: Console | None = None,
        input: Input | None = None,
        output: Output | None = None,
    ) -> None:
        self._console = console or Console()
        self._status = ""
        self._session: PromptSession[str] = PromptSession(
            history=_history(history or default_history()),
            auto_suggest=AutoSuggestFromHistory(),
            completer=Commands(commands),
            complete_while_typing=True,
            multiline=True,
            key_bindings=_keys(),
            prompt_continuation=lambda width, line, wraps: "" if wraps else ". ",
            bottom_toolbar=lambda: HTML("{}").format(self._status),
            input=input,
            output=output,
        )
        self._live: Live | None = None
        self._blocks = MarkdownBlocks()

    def begin(self, model: str) -> None:
        self._status = (
            f"{model}   /help: commands   Alt-Enter: new line   Ctrl-C: stop   Ctrl-D: leave"
        )
        self._console.print(model, style="bold", markup=False, highlight=False)

    def ask(self) -> str:
        text = self._session.prompt(HTML("<b><ansicyan>{}</ansicyan></b>").format(PROMPT))
        return text.rstrip("\n")

    def piece(self, text: str) -> None:
        if self._live is None:
            self._blocks = MarkdownBlocks()
            self._live = Live(
                console=self._console,
                refresh_per_second=DRAWN_A_SECOND,
                transient=True,
                vertical_overflow="crop",
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        for block in self._blocks.feed(printable(text)):
            self._live.console.print(Markdown(block))
            self._live.console.print()
        room = max(2, self._console.height - SPARE_ROWS)
        self._live.update(Markdown(self._blocks.tail(room)))

    def end(self, note: str, figures: str) -> None:
        if self._live is not None:
            self._live.update("")
            self._live.stop()
            self._live = None
            if self._blocks.rest.strip():
                self._console.print(Markdown(self._blocks.rest))
        self.say(", ".join(filter(None, (note, figures))) + "\n")

    def say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)


def default_history() -> Path:
    """Return the path of the file that keeps the typed lines, following the XDG base
    directories."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "pageturner" / "chat_history"


def _history(path: Path) -> History:
    """Open the history file, readable by its owner alone; return a history in memory where the
    folder cannot be written."""
    try:
        path.parent.mkdir(FOLDER, parents=True, exist_ok=True)
        os.close(open_private(path))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> KeyBindings:
    """Enter sends, but behind a backslash; Alt-Enter is a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\":
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
