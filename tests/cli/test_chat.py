"""The conversation and its commands; a terminal, with a server and with an engine of its own."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pageturner import cli
from pageturner.cli.chat import COMMANDS, Conversation, Leave
from pageturner.cli.sampling_flags import SamplingOptions
from pageturner.cli.sources import Answer, AnswerSummary, Message
from pageturner.errors import ClientError
from support.gguf_writer import gguf_bytes, taken_apart

from .conftest import Server, Terminal


class Echo:
    """Repeats the last message in two pieces; holds `room` messages."""

    name = "echo"

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.asked: list[list[Message]] = []

    def complete(self, prompt: str, sampling: SamplingOptions) -> Answer:
        raise NotImplementedError

    def chat(self, messages: list[Message], sampling: SamplingOptions) -> Answer:
        self.asked.append([dict(m) for m in messages])
        if len(messages) > self.room:
            raise ClientError(400, "prompt_too_long", "too long")
        text = messages[-1]["content"]
        if text == "break":
            yield "half"
            raise KeyboardInterrupt
        yield text[:2]
        yield text[2:]
        return AnswerSummary(7, 3, 2, "stop")


def talk(source: Echo, *lines: str) -> Conversation:
    conversation = Conversation(source)
    for line in lines:
        conversation.handle_line(line)
    return conversation


def test_the_history_is_sent_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    source = Echo()
    talk(source, "hello", "   ", "world")
    assert [m["content"] for m in source.asked[-1]] == ["hello", "hello", "world"]
    assert [m["role"] for m in source.asked[-1]] == ["user", "assistant", "user"]
    assert capsys.readouterr().out == "hello\nworld\n"


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    source = Echo()
    conversation = talk(source, "one", "/system be brief", "two", "/retry", "/stats")
    assert [m["content"] for m in source.asked[-1]] == ["be brief", "two"]
    assert [m["content"] for m in conversation.said] == ["two", "two"]
    assert "7 prompt tokens (3 cached), 2 output tokens" in capsys.readouterr().out
    conversation.handle_line("/reset")
    assert conversation.said == []
    conversation.handle_line("/retry")
    conversation.handle_line("/nonsense")
    conversation.handle_line("/help")
    out = capsys.readouterr().out
    assert "nothing was said" in out
    assert "no such command: /nonsense" in out
    assert all(f"/{name}" in out for name in COMMANDS)
    for name in ("exit", "quit"):
        with pytest.raises(Leave):
            conversation.handle_line(f"/{name}")


def test_an_interrupted_answer_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = talk(Echo(), "break", "and now")
    assert [m["content"] for m in conversation.said] == ["break", "half", "and now", "and now"]
    assert "half [stopped]\n" in capsys.readouterr().out


def test_a_full_context_forgets_the_oldest_exchange(capsys: pytest.CaptureFixture[str]) -> None:
    source = Echo(room=3)
    conversation = talk(source, "a", "b", "c")
    assert [m["content"] for m in conversation.said] == ["b", "b", "c", "c"]
    assert "the oldest 2 messages are forgotten" in capsys.readouterr().err
    source.room = 0
    conversation.handle_line("too much alone")
    assert [m["content"] for m in conversation.said] == ["b", "b", "c", "c"], (
        "nothing is forgotten in vain"
    )
    assert "too long" in capsys.readouterr().err


def test_without_a_terminal_each_line_is_a_message(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello \\\nworld\n/stats\n"))
    flags = ["-n", "4", "--temperature", "0", "--ignore-eos"]
    assert cli.main(["chat", *tiny, *flags]) == 0
    out = capsys.readouterr().out
    assert "2 messages" in out
    assert "4 output tokens" in out
    assert ">" not in out.splitlines()[0][:1]


def test_a_model_without_a_template_says_so_at_once(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata, tensors = taken_apart(Path(tiny[0]))
    del metadata["tokenizer.chat_template"]
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[1] = "<|nobody knows|>"  # the mark of its family
    path = tmp_path / "base.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors))
    assert cli.main(["chat", str(path), *tiny[1:]]) == 1
    assert "no chat template" in capsys.readouterr().err


def test_a_terminal_with_a_server(fake: Server, terminal: Callable[..., Terminal]) -> None:
    chat = terminal("chat", "--base-url", fake.url + "/v1", "-n", "30", "--temperature", "0")
    chat.until("/help lists the commands")
    chat.until("> ")
    chat.type("hello\n")
    chat.until("[cut: --max-tokens]")
    chat.type("/stats\n")
    assert "30 output tokens" in chat.until("finish length")
    chat.until("> ")  # a Ctrl-D that comes before the line editor has the terminal is lost
    chat.type("\x04")
    assert chat.process.wait(60) == 0


def test_ctrl_c_ends_the_answer_and_not_the_program(
    fake: Server, terminal: Callable[..., Terminal]
) -> None:
    chat = terminal("chat", "--base-url", fake.url, "-n", "1500")
    chat.until("> ")
    aborted = len(fake.notes("abort"))
    chat.type("<|slow|> tell me everything\n")
    chat.until("fox")  # the fake model reads a text aloud
    chat.type("\x03")
    chat.until("[stopped]")
    fake.until(lambda: len(fake.notes("abort")) > aborted)
    chat.until("> ")
    time.sleep(0.5)  # the line editor shows its prompt before it looks for signals
    chat.type("\x03")
    chat.until("(/exit or Ctrl-D leaves)")
    chat.type("/exit\n")
    assert chat.process.wait(60) == 0


@pytest.mark.slow
def test_ctrl_c_with_an_engine_in_the_program(
    tiny: list[str], terminal: Callable[..., Terminal]
) -> None:
    chat = terminal("chat", *tiny, "--ignore-eos", "-n", "1500", "--temperature", "0")
    chat.until("> ")
    chat.type("hello\n")
    chat.until("\n")
    chat.until(" ")  # some words of the answer
    chat.type("\x03")
    chat.until("[stopped]")
    chat.type("/stats\n")
    chat.until("finish abort")
    chat.type("/exit\n")
    assert chat.process.wait(60) == 0
