"""Receipts: their canonical bytes, what each changed bit is called, and where they stand in answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from pageturner.errors import EngineFault
from pageturner.params import SamplingParams
from pageturner.server import receipts as receipts_module
from pageturner.server.receipts import Receipts
from pageturner.text import receipt as form
from pageturner.text.receipt import NoReceipt, Receipt
from pageturner.text.receipt_key import read_key
from support.receipts import KEY, PARAMS, flipped, leaves, plain, receipt_of
from support.refusals import client_error, engine_fault, refusal_of

from .bytes_tokenizer import BytesTokenizer, token_at
from .conftest import Server
from .test_http import HI, events, post

TOKENS = list(range(100, 150))
NOT_IN_A_RECEIPT = {
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "bad_words",
    "pooling",
    "speculation",
    "inject_fault",
}


def named(value: dict[str, Any], key: bytes = KEY) -> list[str]:
    """The parts that are said to be changed."""
    try:
        return [
            difference.part
            for difference in form.changes(form.read_receipt(json.dumps(value)), key)
        ]
    except NoReceipt as wrong:
        return [wrong.difference.part]


# -- form ----------------------------------------------------------------------------------------------------
def test_canonical_bytes_are_one_for_each_value() -> None:
    assert (
        form.canonical({"b": 0.1, "a": ["\u00e9", None, True]})
        == b'{"a":["\\u00e9",null,true],"b":0.1}'
    )
    with pytest.raises(ValueError, match="JSON"):
        form.canonical(float("nan"))


def test_a_token_hash_is_what_the_docs_say() -> None:
    raw = b"pageturner receipt 1 prompt\0" + struct.pack("<Q2i", 2, 7, 70000)
    assert form.token_hash("prompt", [7, 70000]) == hashlib.sha256(raw).hexdigest()
    assert form.token_hash("output", [7, 70000]) != form.token_hash("prompt", [7, 70000])


def test_every_parameter_is_in_a_receipt_or_left_out_for_a_reason() -> None:
    """Those left out are in it elsewhere, or change no token."""
    fields = set(SamplingParams.__dataclass_fields__)
    assert fields - set(form.ReceiptParams.__struct_fields__) == NOT_IN_A_RECEIPT


def test_a_budget_of_thoughts_is_in_a_receipt_only_where_there_is_one() -> None:
    """So the digests of receipts from before it was known are what they were."""
    params = SamplingParams(seed=1, max_thinking_tokens=5, thinking_end=(7,))
    made = msgspec.to_builtins(form.params_of(params, 1, 1))
    assert (made["max_thinking_tokens"], made["thinking_end"]) == (5, (7,))
    assert not {name for name in plain(receipt_of(TOKENS))["params"] if "think" in name}


def test_a_receipt_survives_other_ways_to_write_json() -> None:
    value = plain(receipt_of(TOKENS))
    value["params"]["top_p"] = 1  # as JavaScript writes 1.0
    text = json.dumps(dict(reversed(value.items())), indent=2)
    assert form.changes(form.read_receipt(text), KEY) == []
    assert form.read_receipt(json.dumps({"choices": [], "receipt": value})) == receipt_of(TOKENS)


def test_one_changed_bit_of_any_value_is_named() -> None:
    rng, value = random.Random(5), plain(receipt_of(TOKENS))
    ways = list(leaves(value))
    assert len(ways) > 50
    for part, keys in ways:
        for _ in range(8):
            assert named(flipped(value, keys, rng)) == [part]


def test_one_changed_bit_of_the_text_is_noticed() -> None:
    raw, rng = json.dumps(plain(receipt_of(TOKENS))).encode(), random.Random(6)
    for _ in range(600):
        changed = bytearray(raw)
        changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(7)
        try:
            read = form.read_receipt(bytes(changed))
        except NoReceipt:
            continue  # it names a part
        assert form.changes(read, KEY) or read == receipt_of(TOKENS)


def test_parts_that_are_added_or_taken_away() -> None:
    value = plain(receipt_of(TOKENS))
    assert named(value | {"more": 1}) == ["more"]
    assert named({name: one for name, one in value.items() if name != "model"}) == ["model"]
    assert named(value | {"choices": value["choices"] * 2}) == ["checks"]
    assert named({**value, "signature": None}) == ["signature"]
    assert named({**value, "signature": None}, key=b"") == []


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", "{}", '{"receipt": {}}', "[" * 9999, '{"version": NaN}']
)
def test_what_is_no_receipt_is_refused_by_name(text: str) -> None:
    with pytest.raises(NoReceipt):
        form.read_receipt(text)


def test_who_changes_all_of_it_needs_the_key() -> None:
    forged = msgspec.structs.replace(receipt_of(TOKENS), model_hash="sha256:01")
    by_nobody = form.sealed(forged)
    assert form.changes(by_nobody) == []
    assert [one.part for one in form.changes(by_nobody, KEY)] == ["signature"]
    by_another = form.sealed(forged, b"x" * 32)
    assert [one.part for one in form.changes(by_another, KEY)] == ["signature.key"]
    kept = msgspec.structs.replace(by_nobody, signature=receipt_of(TOKENS).signature)
    assert [one.part for one in form.changes(kept, KEY)] == ["signature.value"]


@pytest.mark.parametrize("at", [0, 15, 16, 31, 40, 49])
def test_where_an_answer_differs(at: int) -> None:
    (choice,) = receipt_of(TOKENS).choices
    other = [*TOKENS[:at], 9, *TOKENS[at + 1 :]]
    (found,) = form.differences(choice, other, "length")
    first = at // 16 * 16 + 1
    assert found.part == "choices[0].hash"
    assert f"one of {first} to {min(first + 15, 50)}" in found.what
    assert form.first_difference(TOKENS, other) == at + 1


def test_a_shorter_answer_and_another_end() -> None:
    (choice,) = receipt_of(TOKENS).choices
    found = list(form.differences(choice, TOKENS[:40], "stop"))
    assert [one.part for one in found] == [
        "choices[0].hash",
        "choices[0].tokens",
        "choices[0].finish_reason",
    ]
    assert "one of 33 to 50" in found[0].what
    assert list(form.differences(choice, TOKENS, "length")) == []


@pytest.mark.parametrize("count", [0, 15, 16, 2048, 2064, 100_000])
def test_a_chain_is_bounded(count: int) -> None:
    block, chain = form.token_chain(range(count))
    assert len(chain) == 8 * (count // block) <= 8 * form.MAX_LINKS


def test_parameters_come_back_as_they_were() -> None:
    receipt = receipt_of(TOKENS)
    again = form.sampling_of(form.read_receipt(msgspec.json.encode(receipt)), receipt.prompts[0])
    assert again == replace(PARAMS, max_tokens=64, best_of=1)


def test_a_key_is_long_enough_or_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("k" * 32 + "\n")
    assert read_key(str(file), "") == KEY == read_key("", "k" * 32)
    assert read_key("", "") == b""
    file.write_text("short")
    for given in ((str(file), ""), ("", "short"), (str(tmp_path / "none"), "")):
        with engine_fault(code="bad_setting"):
            read_key(*given)


def test_the_example_of_the_docs_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "receipts.md").read_text()
    receipt = form.read_receipt(page.split("```json\n")[1].split("```")[0])
    assert form.changes(receipt, b"an example key, which is no secret") == []
    for part in form.Receipt.__struct_fields__:
        assert f"`{part}`" in page.split("## What is in it")[1]


# -- the model -----------------------------------------------------------------------------------------------
ABOUT = {"id": "1", "object": "o", "created": 1, "model": "m", "fingerprint": "fake"}


def receipts_of(file: Path) -> Receipts:
    return Receipts(file, b"", lambda: "fake")


def hashes(file: Path, count: int) -> list[str]:
    """What several get that ask at once."""

    async def ask() -> list[str]:
        receipts = receipts_of(file)
        futures = [receipts.hashed() for _ in range(count)]
        await asyncio.wait(futures)
        return [future.result() for future in futures]

    return asyncio.run(ask())


def test_the_model_is_hashed_once_and_by_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, asked = tmp_path / "model.gguf", []
    file.write_bytes(b"weights")
    monkeypatch.setattr(
        receipts_module, "model_hash", lambda path: asked.append(path) or "sha256:1"
    )
    receipts_of(file)
    assert asked == []
    assert hashes(file, 3) == ["sha256:1"] * 3
    assert asked == [file]


async def test_a_model_that_cannot_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, found = tmp_path / "model.gguf", [EngineFault("model_unreadable", "no"), "sha256:1"]
    file.write_bytes(b"weights")

    def hash_of_model(path: Path) -> str:
        if isinstance(one := found.pop(0), EngineFault):
            raise one
        return one

    monkeypatch.setattr(receipts_module, "model_hash", hash_of_model)
    receipts = receipts_of(file)
    with client_error("no", status=503, code="model_unreadable"):
        await receipts.write(None, ABOUT, [])
    await asyncio.wait({again := receipts.hashed()})
    assert again.result() == "sha256:1"


def test_an_answer_that_two_builds_made_has_no_receipt(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    with client_error("other kernels", status=409, code="engine_changed"):
        asyncio.run(receipts_of(file).write(None, ABOUT | {"fingerprint": "older"}, []))


# -- in answers ----------------------------------------------------------------------------------------------
def receipt_in(value: dict[str, Any]) -> Receipt:
    receipt = form.read_receipt(json.dumps(value))
    assert form.changes(receipt) == []
    return receipt


def hash_of(prompt: str, count: int, index: int = 0) -> str:
    """Of an answer of the fake model."""
    tokens = tuple(BytesTokenizer().encode(prompt, add_special=True, parse_special=True))
    return form.token_hash("output", [token_at(tokens, n, index) for n in range(count)])


def test_a_whole_answer_and_a_stream_have_equal_receipts(server: Server) -> None:
    asked: dict[str, Any] = {
        "prompt": ["one", "two"],
        "n": 2,
        "max_tokens": 5,
        "receipt": True,
        "seed": 3,
    }
    whole = receipt_in(post(server, **asked).json())
    chunks = events(server, **asked, stream_options={"include_usage": True})
    streamed = receipt_in(chunks[-2])
    assert chunks[-1]["usage"]["completion_tokens"] == 20
    assert chunks[-2]["choices"] == []
    assert not any("receipt" in chunk for chunk in (*chunks[:-2], chunks[-1]))
    assert (streamed.params, streamed.prompts, streamed.choices) == (
        whole.params,
        whole.prompts,
        whole.choices,
    )
    expected = [(p, hash_of(("one", "two")[p], 5, i)) for p in range(2) for i in range(2)]
    assert [(choice.prompt, choice.hash) for choice in whole.choices] == expected


def test_chats_have_receipts_that_name_their_answer(server: Server) -> None:
    answer = post(server, "/v1/chat/completions", messages=HI, max_tokens=4, receipt=True).json()
    receipt = receipt_in(answer)
    about = (receipt.id, receipt.object, receipt.created, receipt.model, receipt.fingerprint)
    names = ("id", "object", "created", "model", "system_fingerprint")
    assert about == tuple(answer[name] for name in names)


def test_who_does_not_ask_gets_none(server: Server) -> None:
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 3}
    assert "receipt" not in post(server, **asked).json()
    assert not any("receipt" in chunk for chunk in events(server, **asked, receipt=False))


def test_usage_and_receipt_count_the_same_tokens(server: Server) -> None:
    plain_answer = post(server, prompt="x", max_tokens=30).json()["choices"][0]["text"]
    asked: dict[str, Any] = {
        "prompt": "x",
        "max_tokens": 30,
        "stop": [plain_answer[5:8]],
        "receipt": True,
    }
    answer = post(server, **asked).json()
    (choice,) = receipt_in(answer).choices
    assert 3 <= choice.tokens == answer["usage"]["completion_tokens"] < 30
    assert (choice.hash, choice.finish_reason) == (hash_of("x", choice.tokens), "stop")
    (of_echo,) = receipt_in(
        post(server, prompt="x", max_tokens=0, echo=True, receipt=True).json()
    ).choices
    assert (of_echo.tokens, of_echo.hash) == (0, form.token_hash("output", []))


def test_the_best_of_several_are_those_in_the_receipt(server: Server) -> None:
    asked: dict[str, Any] = {
        "prompt": "one",
        "n": 2,
        "best_of": 4,
        "max_tokens": 5,
        "receipt": True,
    }
    answer = post(server, **asked, return_token_ids=True).json()
    receipt = receipt_in(answer)
    assert (receipt.params.n, receipt.params.best_of) == (2, 4)
    of_answer = [form.token_hash("output", choice["token_ids"]) for choice in answer["choices"]]
    assert [choice.hash for choice in receipt.choices] == of_answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_changes_no_receipt(server: Server, stream: bool) -> None:
    prompt = f"<|crash|>{stream}"
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 12, "receipt": True}
    answer = events(server, **asked)[-1] if stream else post(server, **asked).json()
    (choice,) = receipt_in(answer).choices
    assert choice.hash == hash_of(prompt, 12)


def test_a_large_receipt_is_made_beside_the_streams(server: Server) -> None:
    """By a thread, from so many choices on; it is the same."""
    answer = post(server, prompt=["x"] * 20, max_tokens=2, receipt=True).json()
    assert [choice.hash for choice in receipt_in(answer).choices] == [hash_of("x", 2)] * 20


def test_a_failed_answer_has_none(server: Server) -> None:
    chunks = events(server, prompt="<|fail|>", max_tokens=9, receipt=True)
    assert chunks[-1]["error"]["reason"] == "sequence_failed"
    assert not any("receipt" in chunk for chunk in chunks)


def test_a_server_with_a_key_signs(start: Callable[..., Server], tmp_path: Path) -> None:
    model, settings, key = (tmp_path / name for name in ("model.gguf", "settings.toml", "key"))
    model.write_bytes(b"weights")
    key.write_bytes(KEY)
    settings.write_text(f'[engine]\nmodel = "{model}"\n')
    own = start("--config", str(settings), "--receipt-key-file", str(key))
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 3, "receipt": True}
    receipt = receipt_in(post(own, **asked).json())
    assert form.changes(receipt, KEY) == []
    assert receipt.model_hash == "sha256:" + hashlib.sha256(b"weights").hexdigest()
    model.write_bytes(b"other weights")
    refused = post(own, **asked)
    assert refusal_of(refused) == (409, "model_changed")
    assert post(own, prompt="x", max_tokens=3).status_code == 200
    assert KEY.decode() not in own.log


@pytest.mark.slow
def test_a_model_that_takes_long_to_hash_holds_nobody_up(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """A pipe that nobody writes into is never read to its end. Tokens come at once, clients may leave, others
    are answered, and the server ends when it is told to."""
    model, settings = tmp_path / "model.gguf", tmp_path / "settings.toml"
    os.mkfifo(model)
    settings.write_text(f'[engine]\nmodel = "{model}"\n')
    own = start("--config", str(settings))
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 3, "receipt": True}
    with own.http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as response:
        assert any('"finish_reason":"length"' in line for line in response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        own.http.post("/v1/completions", json=asked, timeout=0.5)
    assert post(own, prompt="x", max_tokens=3).status_code == 200
    own.until(lambda: own.http.get("/load").json()["server_load"] == 0)
    assert own.stop() == 0


def test_a_key_that_is_too_short_is_refused_at_the_start(start: Callable[..., Server]) -> None:
    own = start(wait=False, PAGETURNER_RECEIPT_KEY="short")
    assert own.process.wait(20) != 0
    assert "the key of receipts has 5 bytes" in own.finished()
