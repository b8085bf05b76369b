"""Receipts: 200 answers of all kinds, made in a crowd while the engine is killed, each verified alone.

Owns what is asked and what is counted. The answers come from a server of SmolLM2 that drafts and signs; they
are made again by the functions of `pageturner verify`, in this process, one at a time, without drafts. Then
one bit of each receipt is changed, and the part must be named.

    python bench/accept/trust_receipts.py
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import msgspec
from harness import ROOT, Line, Server

sys.path.insert(0, str(ROOT / "tests"))
from pageturner.formats import hub
from pageturner.formats.model_hash import model_hash
from pageturner.lab.commands import verify
from pageturner.lab.commands.receipt_prompts import given_answers
from pageturner.text import receipt as form
from support.receipts import KEY, flipped, leaves

COUNT, AT_ONCE, SEED = 200, 32, 11
KV_BYTES = 256 << 20
FLAGS = ("--speculation", "ngram", "--kv-cache-memory", str(KV_BYTES))
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TEXTS = (
    "Once upon a time there was a small house by the sea, and in the house there lived",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "one two three one two three one two three one two",
    "Grüße aus Köln, 東京 and naïve cafés:",
)
# what makes a kind; each goes with every way to ask that takes it
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.0},
    "narrow": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "n": {"n": 3, "temperature": 0.9},
    "best_of": {"n": 2, "best_of": 4, "temperature": 0.9},
    "beams": {
        "use_beam_search": True,
        "n": 2,
        "best_of": 4,
        "length_penalty": 0.8,
        "temperature": None,
    },
    "schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}
    },
    "choice": {"structured_outputs": {"choice": ["yes", "no", "perhaps"]}},
    "regex": {"structured_outputs": {"regex": "[a-z]{3,9} [0-9]{2}"}},
    "stop": {"stop": [" the", ".", "\n"], "temperature": 0.5},
    "stop kept": {"stop": [" a", ","], "include_stop_str_in_output": True, "min_tokens": 4},
    "stop ids": {"stop_token_ids": [28, 30, 18, 16, 253], "ignore_eos": True},
    "bias": {"logit_bias": {"253": 4.0, "28": -100}, "temperature": 0.7},
    "allowed": {"allowed_token_ids": list(range(200, 400)), "temperature": 1.0},
    "bad words": {"bad_words": ["the", "house", "and"], "temperature": 0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "logprobs": {"prompt_logprobs": 1, "temperature": 0.6},
    "truncated": {"truncate_prompt_tokens": 6, "temperature": 0.6},
    "special": {"skip_special_tokens": False, "stop": ["<|im_end|>"], "temperature": 0.6},
    "to its end": {"max_tokens": None, "temperature": 0.2},
}
NOT_STREAMED = ("best_of",)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and what came of it: the answer, or the event of its stream that has the receipt."""

    kind: str
    body: dict[str, Any]
    answer: dict[str, Any]
    texts: dict[int, str]
    seconds: float


def asks() -> list[tuple[str, dict[str, Any]]]:
    """The 200 requests with their kinds, the same in every run."""
    rng, found = random.Random(SEED), []
    for i in range(COUNT):
        kind = list(KINDS)[i % len(KINDS)]
        body: dict[str, Any] = {
            "max_tokens": rng.randint(8, 40),
            "seed": rng.getrandbits(63),
            "receipt": True,
        }
        body |= KINDS[kind]
        body = {name: value for name, value in body.items() if value is not None}
        text = rng.choice(TEXTS)
        way = (i // len(KINDS)) % 5
        if way in (0, 1):
            body["messages"] = [{"role": "user", "content": text}]
            body.setdefault("max_tokens", 64)
        else:
            body["prompt"] = [text, rng.choice(TEXTS)] if way == 4 else text
        if way in (1, 3) and kind not in NOT_STREAMED:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        found.append((kind, body))
    return found


def ask(server: Server, kind: str, body: dict[str, Any]) -> Asked:
    """Send it and wait for all of the answer."""
    path = CHAT if "messages" in body else "/v1/completions"
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as response:
        raw = response.read().decode()
    seconds = time.monotonic() - begin
    if not body.get("stream"):
        return Asked(kind, body, json.loads(raw), {}, seconds)
    chunks = [json.loads(line[6:]) for line in raw.split("\n\n") if line.startswith("data: {")]
    texts: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        texts[choice["index"]] = texts.get(choice["index"], "") + text
    answer = next(chunk for chunk in chunks if "receipt" in chunk)
    return Asked(kind, body, answer, texts, seconds)


def crowd(server: Server) -> list[Asked]:
    """All answers, asked AT_ONCE at a time; the engine is killed when half of them are there."""
    done, killed = [], threading.Event()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for answered in pool.map(lambda one: ask(server, *one), asks()):
            done.append(answered)
            if len(done) >= COUNT // 2 and not killed.is_set():
                killed.set()
                os.kill(server.engine_pid(), signal.SIGKILL)
    return done


def findings(llm: verify.LLM, value: dict[str, Any], asked: Asked) -> list[verify.Finding]:
    """What `pageturner verify` says of an answer and its receipt."""
    receipt = form.read_receipt(json.dumps(value))
    found = list(verify.unchanged(receipt, KEY))
    if verify.exit_code(found):
        return found
    answers = given_answers(json.dumps(value))
    answers |= {index: verify.GivenAnswer(text) for index, text in asked.texts.items()}
    return found + list(verify.made_again(receipt, llm, json.dumps(asked.body), answers))


def changed_bits(llm: verify.LLM, every: list[Asked]) -> list[str]:
    """One bit changed in each: those where not this part alone was named."""
    rng, missed = random.Random(SEED), []
    for asked in every:
        part, keys = rng.choice(list(leaves(asked.answer["receipt"])))
        value = asked.answer | {"receipt": flipped(asked.answer["receipt"], keys, rng)}
        try:
            named = [finding.part for finding in findings(llm, value, asked)]
        except form.NoReceipt as wrong:
            named = [wrong.difference.part]
        if named != [part]:
            missed.append(f"{asked.kind}: {part} was changed, {named} named")
    return missed


def resealed(llm: verify.LLM, every: list[Asked]) -> tuple[int, list[str]]:
    """Sampled answers whose seed somebody changed, who sealed the receipt again without a key: how many were
    tried, and those where no token of the answer was found to differ."""
    missed, tried = [], [one for one in every if one.kind == "sampled"]
    for asked in tried:
        receipt = form.read_receipt(json.dumps(asked.answer))
        params = msgspec.structs.replace(receipt.params, seed=str(int(receipt.params.seed) ^ 1))
        forged = form.sealed(msgspec.structs.replace(receipt, params=params))
        found = list(verify.made_again(forged, llm, json.dumps(asked.body)))
        if not any("the first token that differs" in finding.what for finding in found):
            missed.append(asked.kind)
    return len(tried), missed


def lines() -> Iterator[Line]:
    """Every line that receipts must show."""
    with tempfile.TemporaryDirectory(prefix="pageturner-receipts-") as folder:
        key = Path(folder) / "key"
        key.write_bytes(KEY)
        begin = time.monotonic()
        with harness.server(*FLAGS, "--receipt-key-file", str(key)) as server:
            every = crowd(server)
            restarts = server.metric("pageturner:engine_restarts_total")
        seconds = time.monotonic() - begin
    what = f"receipts: {COUNT} answers of {len(KINDS)} kinds, {AT_ONCE} at once, engine killed meanwhile"
    figure = f"{len(every)} with a receipt in {seconds:.0f} s, {restarts:.0f} restart"
    yield Line(what, figure, len(every) == COUNT and restarts == 1)
    sizes = [len(msgspec.json.encode(one.answer["receipt"])) for one in every]
    yield Line(
        "receipts: bytes, median and largest", f"{statistics.median(sizes):.0f}, {max(sizes)}", None
    )
    path = hub.resolve("smollm2").path
    begin = time.monotonic()
    hash = model_hash(path)
    took = f"{time.monotonic() - begin:.2f} s for {path.stat().st_size / 1e6:.0f} MB"
    right = all(one.answer["receipt"]["model_hash"] == hash for one in every)
    yield Line("receipts: model hash is the file's SHA-256", took, right)
    first = form.read_receipt(json.dumps(every[0].answer))
    llm = verify.load(first, path, kv_cache_memory=KV_BYTES)
    yield from _verified(llm, every)


def _verified(llm: verify.LLM, every: list[Asked]) -> Iterator[Line]:
    begin, wrong, tokens = time.monotonic(), Counter[str](), 0
    for asked in every:
        found = findings(llm, asked.answer, asked)
        tokens += sum(choice["tokens"] for choice in asked.answer["receipt"]["choices"])
        if {finding.verdict for finding in found} != {verify.SAME}:
            wrong[asked.kind] += 1
    seconds = time.monotonic() - begin
    figure = f"{len(every) - wrong.total()} of {len(every)} ({tokens} tokens, {seconds:.0f} s)"
    yield Line(
        "receipts: verified alone, bit for bit", f"{figure} {dict(wrong) or ''}".strip(), not wrong
    )
    missed = changed_bits(llm, every)
    figure = "; ".join([f"{len(every) - len(missed)} of {len(every)}", *missed[:5]])
    yield Line("receipts: one changed bit is named", figure, not missed)
    tried, missed = resealed(llm, every)
    figure = f"{tried - len(missed)} of {tried}"
    yield Line("receipts: a forged seed is found by the tokens", figure, bool(tried) and not missed)


if __name__ == "__main__":
    sys.exit(harness.run("trust_receipts", {"receipts": lines}))
