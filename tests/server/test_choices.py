"""n and best_of over HTTP: several answers to one prompt, streamed as well as not, and over a crash."""

from __future__ import annotations

from typing import Any

import pytest

from pageturner.text import parameters
from support.refusals import client_error

from .bytes_tokenizer import answer
from .conftest import Server
from .test_http import HI, events, post, text_of


def test_choices_of_several_prompts_stand_side_by_side(server: Server) -> None:
    body = post(server, prompt=["one", "two"], n=3, max_tokens=5).json()
    expected = [answer(prompt, 5, index) for prompt in ("one", "two") for index in range(3)]
    assert [choice["text"] for choice in body["choices"]] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == 6, "each prompt counts once"
    assert body["usage"]["completion_tokens"] == 30


def test_a_stream_has_the_same_choices(server: Server) -> None:
    chunks = events(server, prompt="one", n=3, max_tokens=5, stream_options={"include_usage": True})
    assert [text_of(chunks, index) for index in range(3)] == [
        answer("one", 5, index) for index in range(3)
    ]
    assert chunks[-1]["usage"]["total_tokens"] == 3 + 15


def test_chats_have_choices_too(server: Server) -> None:
    path = "/v1/chat/completions"
    body = post(server, path, messages=HI, n=2, max_tokens=4).json()
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert len(set(texts)) == 2
    chunks = events(server, path, messages=HI, n=2, max_tokens=4)
    assert [text_of(chunks, index) for index in range(2)] == texts


def test_a_crash_loses_no_choice(server: Server) -> None:
    prompt = "<|crash|>x"
    chunks = events(server, prompt=prompt, n=3, max_tokens=12)
    assert [text_of(chunks, index) for index in range(3)] == [
        answer(prompt, 12, i) for i in range(3)
    ]


def test_the_best_of_several(server: Server) -> None:
    every = post(server, prompt="one", n=4, max_tokens=5, logprobs=0).json()["choices"]
    means = [sum(choice["logprobs"]["token_logprobs"]) for choice in every]
    order = sorted(range(4), key=lambda i: (-means[i], i))
    body = post(server, prompt="one", n=2, best_of=4, max_tokens=5).json()
    assert [choice["text"] for choice in body["choices"]] == [every[i]["text"] for i in order[:2]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in body["choices"]), "nobody asked for them"
    assert body["usage"]["completion_tokens"] == 20, "all that were made count"


def test_echo_and_prompt_logprobs_with_each_choice(server: Server) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 2, "n": 2}
    first, second = post(server, prompt="ab", **fields).json()["choices"]
    assert first["text"] == "ab" + answer("ab", 2)
    assert second["text"] == "ab" + answer("ab", 2, 1)
    assert first["logprobs"]["token_logprobs"][:2] == second["logprobs"]["token_logprobs"][:2]


def test_likeliest_by_the_mean_of_a_token() -> None:
    long, short, nothing = [(-1.0, ())] * 4, [(-1.5, ())], []
    assert parameters.most_likely([short, long, nothing], 3) == [2, 1, 0]
    assert parameters.most_likely([long, long, short], 2) == [0, 1]


@pytest.mark.parametrize(
    ("n", "best_of", "name"), [(0, None, "n"), (9, None, "n"), (2, 1, "best_of"), (1, 9, "best_of")]
)
def test_how_many_there_may_be(n: int, best_of: int | None, name: str) -> None:
    with client_error(param=name):
        parameters.choices(n, best_of, 8)
    assert parameters.choices(None, None, 8) == (1, 1)
    assert parameters.choices(3, 8, 8) == (8, 3)
