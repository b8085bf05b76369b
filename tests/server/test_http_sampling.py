"""Sampling fields over HTTP: echo, prompt logprobs, truncation; streamed as well as not, and over a crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .bytes_tokenizer import BytesTokenizer, answer, prompt_logprob
from .conftest import Server
from .test_http import CHAT_PROMPT, HI, events, post, text_of

TOKENIZER = BytesTokenizer()
LONG = "naïve 東京 prompt"


def prefix_tokens(prompt: str) -> list[int]:
    return TOKENIZER.encode(prompt, add_special=True, parse_special=True)


def text(token: int) -> str:
    return TOKENIZER.token_bytes(token).decode("utf-8", "replace")


def shown(prompt: list[int], k: int) -> list[Any]:
    """vLLM's prompt_logprobs of what the fake model thinks of a prompt."""
    entries: list[Any] = [None]
    for token in prompt[1:]:
        value, rank, top = prompt_logprob(token, k)
        ranked = {token: (value, rank)} | {t: (p, r) for r, (t, p) in enumerate(top, 1)}
        entries.append(
            {
                str(t): {"logprob": p, "rank": r, "decoded_token": text(t)}
                for t, (p, r) in ranked.items()
            }
        )
    return entries


# -- prompt logprobs -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("prompt", ["x", LONG])
def test_prompt_logprobs_of_completions(server: Server, prompt: str, k: int) -> None:
    choice = post(server, prompt=prompt, max_tokens=3, prompt_logprobs=k).json()["choices"][0]
    assert choice["prompt_logprobs"] == shown(prefix_tokens(prompt), k)
    assert choice["text"] == answer(prompt, 3)
    assert choice["logprobs"] is None
    chunks = [
        chunk["choices"][0]
        for chunk in events(server, prompt=prompt, max_tokens=3, prompt_logprobs=k)
    ]
    assert chunks[0]["prompt_logprobs"] == choice["prompt_logprobs"]
    assert not any("prompt_logprobs" in chunk for chunk in chunks[1:])


def test_prompt_logprobs_of_chats(server: Server) -> None:
    path, expected = "/v1/chat/completions", shown(prefix_tokens(CHAT_PROMPT), 1)
    body = post(server, path, messages=HI, max_tokens=3, prompt_logprobs=1).json()
    assert body["prompt_logprobs"] == expected
    chunks = events(server, path, messages=HI, max_tokens=3, prompt_logprobs=1)
    assert chunks[0]["prompt_logprobs"] == expected
    assert not any("prompt_logprobs" in chunk for chunk in chunks[1:])


def test_long_prompts_have_them_too(server: Server) -> None:
    """So many are written in a thread."""
    prompt = LONG * 20
    fields: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 2,
        "prompt_logprobs": 1,
        "echo": True,
        "logprobs": 0,
    }
    choice = post(server, **fields).json()["choices"][0]
    assert choice["prompt_logprobs"] == shown(prefix_tokens(prompt), 1)
    chunks = events(server, **fields)
    assert chunks[0]["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]
    assert text_of(chunks) == choice["text"] == prompt + answer(prompt, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_inside_the_prompt_loses_and_repeats_nothing(
    start: Callable[..., Server], stream: bool
) -> None:
    prompt, server = f"<|crash|>{LONG}", start()
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 9, "prompt_logprobs": 1, "echo": True}
    if stream:
        chunks = events(server, **fields)
        choice, whole = chunks[0]["choices"][0], text_of(chunks)
    else:
        choice = post(server, **fields).json()["choices"][0]
        whole = choice["text"]
    assert choice["prompt_logprobs"] == shown(prefix_tokens(prompt), 1)
    assert whole == prompt + answer(prompt, 9)
    assert len(server.notes("start")) == 2, "it was meant to crash once"


# -- echo ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 0}, {"logprobs": 2}, {"stop": "o"}, {"max_tokens": 0}]
)
@pytest.mark.parametrize("prompt", [LONG, "<|end|>a", list(b"ids"), ["one", "two"]])
def test_echo_streamed_and_not(server: Server, prompt: Any, fields: dict[str, Any]) -> None:
    fields = {"prompt": prompt, "max_tokens": 12, "echo": True, **fields}
    whole = post(server, **fields).json()
    chunks = events(server, stream_options={"include_usage": True}, **fields)
    plain = post(server, **{**fields, "echo": False, "max_tokens": 12}).json()
    prompts = prompt if isinstance(prompt[0], str) and isinstance(prompt, list) else [prompt]
    for i, one in enumerate(prompts):
        choice = whole["choices"][i]
        echoed = one if isinstance(one, str) else bytes(one).decode()
        generated = plain["choices"][i]["text"] if fields["max_tokens"] else ""
        assert choice["text"] == echoed + generated
        assert text_of(chunks, i) == choice["text"]
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == i]
        assert (mine[-1]["finish_reason"], mine[-1]["stop_reason"]) == (
            choice["finish_reason"],
            choice["stop_reason"],
        )
        parts = [c["logprobs"] for c in mine if c["logprobs"]]
        for key in choice["logprobs"] or ():
            assert [x for part in parts for x in part[key]] == choice["logprobs"][key]
    assert chunks[-1]["usage"] == whole["usage"]
    if fields["max_tokens"]:
        assert whole["usage"] == plain["usage"]
    else:
        assert whole["usage"]["completion_tokens"] == 0
        assert whole["choices"][0]["finish_reason"] == "length"


def test_loglikelihoods_as_harnesses_ask_for_them(server: Server) -> None:
    """echo with logprobs: the prompt's tokens first, nothing known of the first one, then the answer's."""
    prompt = "naïve?"
    ids = prefix_tokens(prompt)
    for most in (0, 1):
        logprobs = post(server, prompt=prompt, echo=True, logprobs=1, max_tokens=most).json()[
            "choices"
        ][0]["logprobs"]
        assert logprobs["tokens"][: len(ids)] == [text(token) for token in ids]
        known = [prompt_logprob(token, 1) for token in ids[1:]]
        assert logprobs["token_logprobs"] == [None, *(p for p, _, _ in known), *([-0.5] * most)]
        assert logprobs["top_logprobs"][: len(ids)] == [
            None,
            *(
                {text(t): p for t, p in (*top, (token, value))} | {text(top[0][0]): top[0][1]}
                for token, (value, _, top) in zip(ids[1:], known, strict=True)
            ),
        ]
        # the second byte of ï shows its character; offsets are into the whole text
        assert logprobs["text_offset"] == [0, 1, 2, 2, 3, 4, 5, 6][: len(ids) + most]
        assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(ids) + most


def test_prompt_logprobs_and_echo_keep_their_own_counts(server: Server) -> None:
    fields: dict[str, Any] = {"prompt": "abc", "echo": True, "logprobs": 3, "prompt_logprobs": 1}
    choice = post(server, max_tokens=1, **fields).json()["choices"][0]
    assert choice["prompt_logprobs"] == shown(prefix_tokens("abc"), 1)
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3


# -- truncation and stop strings -----------------------------------------------------------------------------
def test_truncation_keeps_the_end_of_the_prompt(server: Server) -> None:
    fields: dict[str, Any] = {"max_tokens": 4, "echo": True, "return_token_ids": True}
    body = post(server, prompt="hello world", truncate_prompt_tokens=5, **fields).json()
    assert body["choices"][0]["prompt_token_ids"] == list(b"world")
    assert body["choices"][0]["text"] == "world" + answer("world", 4)
    assert body["usage"]["prompt_tokens"] == 5
    same = post(server, prompt="hello", truncate_prompt_tokens=50, max_tokens=4).json()
    assert same["choices"][0]["text"] == answer("hello", 4)
    room = post(server, prompt="x" * 5000, truncate_prompt_tokens=-1, max_tokens=4).json()
    assert room["usage"] == {**room["usage"], "prompt_tokens": 2044, "completion_tokens": 4}
    chat = post(
        server, "/v1/chat/completions", messages=HI, truncate_prompt_tokens=3, max_tokens=4
    ).json()
    assert chat["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("stop", ["fox", "東京", ["é, ", "zzz"], ["lazy", 'e"y']])
def test_include_stop_str_in_output(server: Server, stop: Any) -> None:
    fields: dict[str, Any] = {"max_tokens": 150, "stop": stop}
    without = post(server, **fields).json()["choices"][0]
    choice = post(server, include_stop_str_in_output=True, **fields).json()["choices"][0]
    assert choice["stop_reason"] == without["stop_reason"] is not None
    assert choice["text"] == without["text"] + choice["stop_reason"]
    assert text_of(events(server, include_stop_str_in_output=True, **fields)) == choice["text"]


def test_fields_reach_the_engine_and_answers_stay_whole(server: Server) -> None:
    """Every field at once, streamed and not: the fake engine ignores them and must not trip over them."""
    fields: dict[str, Any] = {
        "max_tokens": 20,
        "repetition_penalty": 1.2,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "logit_bias": {"65": 5, "66": -100},
        "bad_words": ["foo", "é"],
        "allowed_token_ids": list(range(256)),
        "min_tokens": 3,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "echo": True,
        "seed": 5,
    }
    body = post(server, **fields)
    assert body.status_code == 200, body.text
    assert text_of(events(server, **fields)) == body.json()["choices"][0]["text"]
