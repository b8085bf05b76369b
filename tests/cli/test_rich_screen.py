"""The terminal chat with colour: where blocks end, what is drawn, keys, history."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from pageturner.cli import rich_screen
from pageturner.cli.chat import choose_screen
from pageturner.cli.rich_screen import Commands, MarkdownBlocks, RichScreen
from pageturner.cli.screen import PlainScreen, printable

ANSWER = """# Paris

The **capital** of France.

```python
def here():

    return "Paris"
```
~~~
a fence ``` of another kind

~~~

- one
- two

and the end"""


@pytest.fixture
def typed() -> Iterator[PipeInput]:
    with create_pipe_input() as keys:
        yield keys


@pytest.fixture
def shown(typed: PipeInput, tmp_path: Path) -> RichScreen:
    console = Console(
        file=io.StringIO(), force_terminal=True, width=60, height=12, color_system="truecolor"
    )
    return RichScreen(
        {"help": "this list", "exit": "leave"},
        tmp_path / "x" / "history",
        console,
        typed,
        DummyOutput(),
    )


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_blocks_are_cut_alike_however_the_text_comes(size: int) -> None:
    blocks, found = MarkdownBlocks(), []
    for i in range(0, len(ANSWER), size):
        found += blocks.feed(ANSWER[i : i + size])
    assert "".join(found).replace("\n\n\n", "\n\n") + blocks.rest == ANSWER.replace(
        "~~~\n\n-", "~~~\n-"
    )
    assert [block.split("\n")[0] for block in found] == [
        "# Paris",
        "The **capital** of France.",
        "```python",
        "~~~",
        "- one",
    ]
    assert blocks.rest == "and the end"


def test_only_the_last_rows_of_a_long_block_are_drawn() -> None:
    blocks = MarkdownBlocks()
    blocks.feed("```c\n" + "".join(f"line {i};\n" for i in range(100)))
    assert blocks.tail(3) == "```c\nline 98;\nline 99;\n"
    blocks = MarkdownBlocks()
    blocks.feed("a\nb\nc\nd")
    assert (blocks.tail(2), blocks.tail(9)) == ("c\nd", "a\nb\nc\nd")


def test_an_answer_is_drawn_and_ends_whole(shown: RichScreen) -> None:
    shown.begin("tiny[x]")
    for character in ANSWER:
        shown.piece(character)
    shown.end("cut: --max-tokens", "9 tokens in 0.1 s")
    file = shown._console.file
    assert isinstance(file, io.StringIO)
    text = file.getvalue()
    assert "**" not in text.split("and the end")[-1]
    assert "\x1b[1mcapital" in text, "bold"
    assert "cut: --max-tokens, 9 tokens in 0.1 s" in text
    assert "tiny[x]" in text
    shown.end("stopped", "")  # before the first piece


def test_a_model_cannot_speak_to_the_terminal(shown: RichScreen) -> None:
    assert printable("a\tb\n\x1b]0;title\x07\x9b2J\r") == "a\tb\n�]0;title��2J�"
    shown.piece("\x1b]0;owned\x07 text")
    shown.end("", "")
    file = shown._console.file
    assert isinstance(file, io.StringIO)
    assert "\x1b]0;" not in file.getvalue()


def test_keys(shown: RichScreen, typed: PipeInput) -> None:
    typed.send_text("hello\r")
    assert shown.ask() == "hello"
    typed.send_text("two\\\rlines\x1b\rand three\r")
    assert shown.ask() == "two\nlines\nand three"
    typed.send_text("\x04")
    with pytest.raises(EOFError):
        shown.ask()
    typed.send_text("\x03")
    with pytest.raises(KeyboardInterrupt):
        shown.ask()


def test_history_is_kept_for_its_owner_alone(
    shown: RichScreen, typed: PipeInput, tmp_path: Path
) -> None:
    typed.send_text("remember me\r")
    shown.ask()
    kept = tmp_path / "x" / "history"
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "remember me" in kept.read_text()
    (tmp_path / "file").write_text("")
    assert isinstance(rich_screen._history(tmp_path / "file" / "history"), InMemoryHistory)


def test_commands_are_completed() -> None:
    def of(text: str) -> list[str]:
        found = Commands({"help": "this list", "exit": ""}).get_completions(
            Document(text), CompleteEvent()
        )
        return [one.text for one in found]

    assert (of("/"), of("/he"), of("/help "), of("a /h")) == (["/help", "/exit"], ["/help"], [], [])


def test_plain_where_nothing_else_is_to_be_had(
    monkeypatch: pytest.MonkeyPatch, typed: PipeInput
) -> None:
    assert isinstance(choose_screen({}, False), PlainScreen), "tests have no terminal"
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    monkeypatch.setattr(rich_screen, "RichScreen", lambda commands: "rich")
    monkeypatch.setenv("TERM", "xterm")
    assert choose_screen({}, False) == "rich"
    assert isinstance(choose_screen({}, True), PlainScreen)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(choose_screen({}, False), PlainScreen)
    monkeypatch.setitem(os.environ, "TERM", "xterm")
    monkeypatch.setitem(__import__("sys").modules, "pageturner.cli.rich_screen", None)
    assert isinstance(choose_screen({}, False), PlainScreen), "the extra is not installed"
