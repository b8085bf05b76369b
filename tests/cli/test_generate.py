"""`pageturner generate`: text and JSON, from flags, a file or standard input; from an engine or a server."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pageturner import LLM, SamplingParams, cli
from pageturner.cli.sampling_flags import SamplingOptions
from pageturner.cli.sources import AnswerSummary, RemoteServer
from support.hf_folder import make_folder
from support.refusals import client_error

from .conftest import Server

GREEDY = ["-n", "8", "--temperature", "0", "--ignore-eos"]


@pytest.fixture(scope="module")
def expected(tiny: list[str]) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return LLM(tiny[0], backend="reference").generate("the old house", params)[0].outputs[0].text


def test_the_prompt_comes_from_anywhere(
    tiny: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "prompt"
    file.write_text("the old house")
    monkeypatch.setattr("sys.stdin", io.StringIO("the old house"))
    for words in (["-p", "the old house"], ["--file", str(file)], []):
        assert cli.main(["generate", *tiny, *GREEDY, "--no-chat", *words]) == 0
        assert capsys.readouterr().out == expected + "\n"


def test_a_text_of_several_words_is_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str | None, str]] = []

    class Source:
        name = "it"

        def complete(self, prompt: str, sampling: object) -> Any:
            raise AssertionError("the model has a template")

        def chat(self, messages: list[dict[str, str]], sampling: object) -> Any:
            yield messages[-1]["content"].upper()
            return AnswerSummary(finish="stop", prompt_tokens=1, cached_tokens=0, output_tokens=1)

    def from_flags(arguments: Any) -> Source:
        asked.append((arguments.model, arguments.prompt))
        return Source()

    monkeypatch.setattr("pageturner.cli.sources.from_flags", from_flags)
    assert cli.main(["generate", "why is it so?"]) == 0
    assert capsys.readouterr().out == "WHY IS IT SO?\n"
    assert asked == [(None, "why is it so?")]
    assert cli.main(["generate", "why is it so?", "-p", "and this?"]) == 2
    assert "two prompts" in capsys.readouterr().err


def test_json(tiny: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", *tiny, *GREEDY, "--no-chat", "-p", "the old house", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["text"] == expected
    assert record["finish_reason"] == "length"
    assert record["usage"]["completion_tokens"] == 8
    assert record["prompt"] == "the old house"


def test_chat_and_sampling_flags_reach_the_model(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def text(*words: str) -> str:
        assert (
            cli.main(["generate", *tiny, "-n", "8", "--ignore-eos", "-p", "hi", "--json", *words])
            == 0
        )
        return str(json.loads(capsys.readouterr().out)["text"])

    hot = ["--temperature", "1.5", "--seed", "1"]
    assert text(*hot) == text(*hot)
    assert text(*hot) != text(*hot[:3], "2")
    assert text(*hot, "--top-k", "1") == text("--temperature", "0")
    greedy = ("--temperature", "0", "--no-chat")
    assert text("--temperature", "0", "--chat") == text("--temperature", "0") != text(*greedy)
    for penalty in ("repetition", "frequency", "presence"):
        assert text(*greedy, f"--{penalty}-penalty", "1.9") != text(*greedy), penalty
    whole = text(*greedy)
    assert text(*greedy, "--stop", whole[3:6]) == whole[: whole.index(whole[3:6])]


@pytest.mark.slow
def test_the_models_own_defaults_and_what_beats_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(
        tmp_path / "model", do_sample=False, repetition_penalty=1.5, max_new_tokens=6
    )

    def record(*words: str) -> dict[str, Any]:
        flags = ["--backend", "reference", "-p", "hi", "--json", *words]
        assert cli.main(["generate", str(folder), *flags]) == 0
        return dict(json.loads(capsys.readouterr().out))

    own = record()
    assert own["text"] == record()["text"] == record("--temperature", "0")["text"]
    assert own["usage"]["completion_tokens"] == 6
    assert own["text"] != record("--repetition-penalty", "1")["text"]
    assert own["text"] != record("--temperature", "1.5", "--seed", "1")["text"]
    assert record("-n", "9", "--ignore-eos")["usage"]["completion_tokens"] == 9
    neutral = record("--generation-config", "none", "--ignore-eos", "--seed", "1")
    assert neutral["usage"]["completion_tokens"] == 256
    asked = [
        "--temperature",
        "0.7",
        "--repetition-penalty",
        "1",
        "-n",
        "256",
        "--ignore-eos",
        "--seed",
        "1",
    ]
    assert record(*asked)["text"] == neutral["text"], "0.7 and 256 where nobody says anything"


def test_a_server_keeps_its_defaults_for_what_was_not_asked(
    fake: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--base-url", fake.url, "-p", "x", "--json"]
    assert cli.main(words) == 0
    params = fake.notes("submit")[-1]["params"]
    assert (params["temperature"], params["max_tokens"]) == (1.0, 256)
    flags = ["--temperature", "0", "--top-k", "0", "--stop", "fox", "--ignore-eos", "-n", "5"]
    assert cli.main([*words, *flags]) == 0
    params = fake.notes("submit")[-1]["params"]
    asked = ("temperature", "top_k", "stop", "ignore_eos", "max_tokens")
    assert [params[name] for name in asked] == [0, 0, ["fox"], True, 5]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--temperature", "-1"], "--temperature"),
        (["--top-p", "1.5"], "--top-p"),
        (["-n", "0"], "--max-tokens"),
        (["--stop", ""], "--stop"),
        (["--presence-penalty", "3"], "--presence-penalty"),
        (["--file", "/nowhere", "-p", "x"], "not both"),
        (["--block-size", "0"], "block_size"),
    ],
)
def test_wrong_flags_are_2(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = [] if "-p" in words else ["-p", "x"]
    assert cli.main(["generate", "/nowhere.gguf", *words, *extra]) == 2
    assert named in capsys.readouterr().err


def test_a_server_answers_the_same_fields(fake: Server, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--base-url", fake.url, "-p", "hello", "-n", "20", "--json", "--seed", "5"]
    assert cli.main([*words, "--no-chat"]) == 0
    record = json.loads(capsys.readouterr().out)
    asked = {"prompt": "hello", "max_tokens": 20}
    answer = fake.http.post("/v1/completions", json=asked).json()
    assert record["text"] == answer["choices"][0]["text"]
    assert record["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"] == 20
    assert record["model"] == "fake"
    assert fake.notes("submit")[-2]["seed"] == 5
    assert cli.main([*words, "--no-chat", "--system", "brief"]) == 2
    assert "--system" in capsys.readouterr().err
    assert cli.main([*words, "--system", "brief"]) == 0
    asked_chat = {
        "messages": [{"role": "system", "content": "brief"}, {"role": "user", "content": "hello"}]
    }
    answer = fake.http.post("/v1/chat/completions", json={**asked_chat, "max_tokens": 20}).json()
    assert json.loads(capsys.readouterr().out)["text"] == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("error", "continued"),
    [
        ({"message": "this model has no chat template", "reason": "no_chat_template"}, True),
        ({"message": "default chat template is no longer allowed", "code": 400}, True),  # vLLM's
        ({"message": "the model's chat template is broken", "reason": "template_error"}, False),
        ({"message": "temperature is too high", "code": "bad_field"}, False),
    ],
)
def test_a_text_is_continued_where_a_server_has_no_template(
    error: dict[str, object], continued: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    line = b'data: {"choices": [{"text": "a house", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            chat = self.path.endswith("chat/completions")
            self.send_response(400 if chat else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"error": error}).encode() if chat else line)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        words = ["generate", "m", "--base-url", url, "-p", "x"]
        assert cli.main(words) == (0 if continued else 1)
        assert cli.main([*words, "--chat"]) == 1, "what was asked for is not replaced"
        server.shutdown()
    assert (capsys.readouterr().out == "a house\n") == continued
    assert asked.count("/v1/completions") == int(continued)


def test_refusals_of_a_server_are_one_line(
    fake: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", "other", "--base-url", fake.url, "-p", "x"]) == 1
    assert "does not exist here" in capsys.readouterr().err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert cli.main(["generate", "m", "--base-url", nobody, "-p", "x"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert cli.main(["generate", "m", "--base-url", "nonsense", "-p", "x"]) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'data: {"choices": [{"text": "a"}]}\n\n', "broke off"),
        (b"data: nonsense\n\n", "no JSON"),
        (b'data: {"error": {"message": "it failed"}}\n\n', "it failed"),
    ],
)
def test_a_stream_that_goes_wrong_is_said(answer: bytes, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # to close with something unread would be a reset
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        remote = RemoteServer(f"http://127.0.0.1:{listener.getsockname()[1]}", "m")
        with client_error(message):
            list(remote.complete("x", SamplingOptions()))
        thread.join(10)


def test_a_reader_that_leaves_ends_it_quietly(tiny: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "pageturner",
        "generate",
        *tiny,
        "--ignore-eos",
        "-n",
        "300",
        "-p",
        "a",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.wait(60) == 1
    process.stderr.close()
    progress = rb"pageturner: .* \(\d+ s\)\n"  # on a busy machine
    assert re.sub(progress, b"", errors) == b""


@pytest.mark.slow
def test_an_empty_standard_input_is_no_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert cli.main(["generate", "--chat"]) == 2
    assert "there is no prompt: give it as an argument" in capsys.readouterr().err
