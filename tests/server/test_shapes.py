"""What holds for every shape of the API: streamed is not streamed, streams outlive their engine, whatever
anybody sends is an answer or a refusal."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from pageturner.errors import ClientError
from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.api.anthropic.messages import MESSAGES
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.ollama.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from pageturner.server.api.openai.embeddings import EMBEDDINGS
from pageturner.server.api.responses.responses import RESPONSES

from .bytes_tokenizer import answer
from .conftest import Server
from .test_nasty import NASTY
from .test_openai import SERVED

Json = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """How one message is sent in one shape, and where the text of its answer is.

    body   a message, and most tokens
    end    what a stop string is called, and how an answer that is whole says why it ended
    whole  the text of an answer that is not streamed
    piece  the text of an event, or of a line
    """

    path: str
    body: Callable[[str, int], Json]
    stop: Callable[[str], Json]
    end: Callable[[Json], Any]
    whole: Callable[[Json], str]
    piece: Callable[[Json], str]


SHAPES = {
    "chat": Shape(
        "/v1/chat/completions",
        lambda text, n: {"messages": [{"role": "user", "content": text}], "max_tokens": n},
        lambda text: {"stop": [text]},
        lambda told: told["choices"][0]["finish_reason"],
        lambda told: told["choices"][0]["message"]["content"],
        lambda event: event["choices"][0]["delta"].get("content", ""),
    ),
    "responses": Shape(
        "/v1/responses",
        lambda text, n: {"input": text, "max_output_tokens": n},
        lambda text: {"stop": [text]},
        lambda told: told["status"],
        lambda told: told["output"][0]["content"][0]["text"],
        lambda event: event.get("delta", ""),
    ),
    "messages": Shape(
        "/v1/messages",
        lambda text, n: {"messages": [{"role": "user", "content": text}], "max_tokens": n},
        lambda text: {"stop_sequences": [text]},
        lambda told: told["stop_reason"],
        lambda told: told["content"][0]["text"],
        lambda event: event.get("delta", {}).get("text", ""),
    ),
    "ollama chat": Shape(
        "/api/chat",
        lambda text, n: {
            "messages": [{"role": "user", "content": text}],
            "options": {"num_predict": n},
        },
        lambda text: {"stop": [text]},
        lambda told: told["done_reason"],
        lambda told: told["message"]["content"],
        lambda line: line["message"]["content"],
    ),
    "ollama generate": Shape(
        "/api/generate",
        lambda text, n: {"prompt": text, "options": {"num_predict": n}},
        lambda text: {"stop": [text]},
        lambda told: told["done_reason"],
        lambda told: told["response"],
        lambda line: line["response"],
    ),
}
PIECES = ["a", "é", " ", "東", "<|short|>", "\n", '"', "😀"]
each_shape = pytest.mark.parametrize("name", SHAPES)


def expected(text: str, n: int) -> str:
    return answer(f"<|bos|>user\n{text}<|end|>\n<|bos|>assistant\n", n)


def streamed(server: Server, shape: Shape, body: Json) -> str:
    """The text of a streamed answer."""
    text = ""
    with server.http.stream("POST", shape.path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data.startswith("{"):
                text += shape.piece(json.loads(data))
    return text


@each_shape
def test_streamed_is_not_streamed(server: Server, name: str) -> None:
    shape, chance = SHAPES[name], random.Random(name)
    for _ in range(15):
        said = "".join(chance.choices(PIECES, k=chance.randint(1, 9)))
        body = shape.body(said, chance.randint(1, 40))
        if chance.random() < 0.5:
            body |= shape.stop(chance.choice(["o", "the", "é", "jumps over", "Ω"]))
        whole = server.http.post(shape.path, json={**body, "stream": False}).json()
        assert streamed(server, shape, body) == shape.whole(whole)


OF_ONE_TIME = re.compile(r'"(created|created_at|completed_at|\w+_duration)":("[^"]*"|\d+)')


@pytest.mark.slow
def test_answers_of_all_shapes_outlive_their_engine(start: Callable[..., Server]) -> None:
    """Streamed and whole: every byte is what it was, but for times."""
    server = start()
    jobs = [(name, stream) for name in SHAPES for stream in (True, True, True, False)]

    def one(number: int) -> str:
        name, stream = jobs[number]
        body = {**SHAPES[name].body(f"story {number}", 120), "stream": stream}
        answer = server.http.post(
            SHAPES[name].path, json=body, headers={"x-request-id": f"r{number}"}
        )
        assert answer.status_code == 200
        return OF_ONE_TIME.sub(r'"\1":0', answer.text)

    with ThreadPoolExecutor(len(jobs)) as pool:
        undisturbed = list(pool.map(one, range(len(jobs))))
        for number, (name, stream) in enumerate(jobs):
            if not stream:
                said = SHAPES[name].whole(json.loads(undisturbed[number]))
                assert said == expected(f"story {number}", 120)
        server.hold(10)
        texts = [pool.submit(one, number) for number in range(len(jobs))]
        server.kill_when_held(len(jobs))
        assert [text.result(60) for text in texts] == undisturbed
    assert server.metric("pageturner:engine_restarts_total") == 1
    assert len([note for note in server.notes("submit") if note["resume"] > 0]) == len(jobs)


@each_shape
def test_an_answer_says_why_it_ended(server: Server, name: str) -> None:
    shape = SHAPES[name]
    cut = server.http.post(shape.path, json={**shape.body("hi", 5), "stream": False}).json()
    ended = server.http.post(
        shape.path, json={**shape.body("<|short|>", 50), "stream": False}
    ).json()
    assert shape.end(cut) in ("length", "incomplete", "max_tokens")
    assert shape.end(ended) in ("stop", "completed", "end_turn")


# -- whatever anybody sends ----------------------------------------------------------------------------------
FIELDS: dict[str, tuple[Dialect, Json, tuple[str, ...]]] = {
    "responses": (
        RESPONSES,
        {"input": '"hi"'},
        (
            "input",
            "instructions",
            "max_output_tokens",
            "text",
            "tools",
            "include",
            "temperature",
            "user",
            "truncation",
            "model",
            "top_p",
            "stream",
            "tool_choice",
            "reasoning",
            "parallel_tool_calls",
        ),
    ),
    "messages": (
        MESSAGES,
        {"messages": '[{"role": "user", "content": "hi"}]', "max_tokens": "3"},
        (
            "messages",
            "system",
            "stop_sequences",
            "max_tokens",
            "thinking",
            "metadata",
            "output_config",
            "tools",
            "tool_choice",
            "output_format",
            "top_k",
            "stream",
        ),
    ),
    "embeddings": (
        EMBEDDINGS,
        {"input": '"hi"'},
        (
            "input",
            "pooling",
            "dimensions",
            "encoding_format",
            "normalize",
            "user",
            "truncate_prompt_tokens",
        ),
    ),
    "ollama chat": (
        OLLAMA_CHAT,
        {"messages": '[{"role": "user", "content": "hi"}]'},
        ("messages", "options", "format", "stream", "model", "think", "keep_alive", "tools"),
    ),
    "ollama generate": (
        OLLAMA_GENERATE,
        {"prompt": '"hi"'},
        ("prompt", "system", "raw", "options", "format", "context", "images", "suffix", "stream"),
    ),
}
CONTENTS = (
    '[{"role": "user", "content": [{"type": "text"}]}]',
    '[{"role": "user", "content": [5]}]',
    '[{"role": []}]',
    '[{"role": "user", "content": [{"type": [], "text": "a"}]}]',
    '[{"type": [], "role": "user"}]',
    "[{}]",
    '{"format": 5}',
    '{"format": {"type": []}}',
    '{"type": []}',
    '{"num_predict": [], "stop": 5}',
    '{"user_id": 5}',
    '[{"type": "text", "text": 5}]',
    '{"mirostat": []}',
    '[{"type": "function_call", "call_id": "c", "name": [], "arguments": "{"}]',
    '[{"type": "custom"}]',
    '[{"type": "namespace", "name": [], "tools": [{"type": "custom", "name": 5}]}]',
    '{"effort": []}',
    '[{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": []}]}]',
    '[{"type": "function_call_output", "call_id": 5, "output": []}]',
    '{"type": "tool", "name": []}',
    '{"type": "allowed_tools", "tools": [5]}',
    '{"type": "function", "name": {}}',
    '{"type": "enabled"}',
    '[{"name": "f", "input_schema": 5}]',
    '[{"type": "function", "name": "f", "parameters": []}]',
    '[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [5]}]}]',
    '[{"type": "reasoning", "summary": 5, "encrypted_content": []}]',
    '{"effort": "high", "summary": 5}',
    '[{"role": "user", "content": {"type": "text"}}]',
    '{"format": {"type": "json_schema", "schema": 5}}',
)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_taken_or_refused(name: str) -> None:
    dialect, good, fields = FIELDS[name]
    for field in fields:
        for value in (*NASTY, *CONTENTS):
            raw = "{" + ", ".join(f'"{n}": {v}' for n, v in {**good, field: value}.items()) + "}"
            status, message = read(dialect, raw.encode())
            assert status in (200, 400, 404)
            assert len(message) < 600


@pytest.mark.parametrize("name", FIELDS)
def test_nothing_that_would_change_an_answer_is_passed_over(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    dialect, good, _ = FIELDS[name]

    def ask(more: str) -> tuple[int, str]:
        raw = "{" + ", ".join(f'"{n}": {v}' for n, v in good.items()) + ", " + more + "}"
        return read(dialect, raw.encode())

    for field in (
        '"regex": "a+"',
        '"n": 2',
        '"best_of": 2',
        '"echo": true',
        '"samplers": ["top_k"]',
    ):
        status, message = ask(field)
        assert (status, field.split('"')[1] in message) == (400, True)
    assert ask('"repetition_penalty": 0')[0] == 400
    with caplog.at_level("INFO", logger="pageturner"):
        assert ask('"repetition_penalty": 1.5, "regex": null, "frobnicate": 1') == (200, "")
    assert "frobnicate" in caplog.text


def read(dialect: Dialect, raw: bytes) -> tuple[int, str]:
    try:
        dialect.read(dialect.decode(raw, NO_LIMITS), SERVED)
    except ClientError as error:
        return error.status, error.message
    return 200, ""
