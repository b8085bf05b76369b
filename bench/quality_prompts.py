"""What rounding costs where people look: logprobs of answers to short chats and prompts, beside fp32.

    python bench/quality_prompts.py --model MODEL.gguf --prompts PROMPTS.jsonl [--count 100] [--half 0]

The same weights in fp32 answer each prompt greedily with 64 tokens. These are then given to every way of
computing (bench/quality.py has the names), and the logprobs of the given tokens are compared: mean, 99th
percentile, largest error; and how often the likeliest token is another one. Three of four prompts are chats,
through the template of the model, the fourth is taken as it is. Numerics are chosen on the prompts of one
half (0: those at even places) and judged on the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pageturner.kernels.base import F32, Batch, Ops
from pageturner.kernels.cpu.native import NativeOps
from pageturner.llm import LLM
from pageturner.models.load import load_model
from pageturner.params import SamplingParams

ANSWER, BLOCK, LONGEST = 64, 16, 512  # tokens of an answer, of a block, of prompt and answer
PARIS = "What is the capital of France?"
WAYS = {"8 bits": "8", "as served": "auto", "15 bits": "15"}


@dataclass(frozen=True, slots=True)
class Forced:
    """A prompt and the answer that is given to every way of computing.

    tokens  of both
    start   where the answer begins
    """

    tokens: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Of every token of every answer: its logprob, and the likeliest token in its place."""

    logprobs: F32
    best: NDArray[np.int64]

    def half(self, which: int) -> Scores:
        """Those of every second prompt."""
        logprobs, best = (
            a.reshape(-1, ANSWER)[which::2].reshape(-1) for a in (self.logprobs, self.best)
        )
        return Scores(logprobs, best)


@dataclass(frozen=True, slots=True)
class Error:
    """Of logprobs, in nats, against a base: mean, 99th percentile, largest; and the share of places where the
    likeliest token is the same."""

    mean: float
    p99: float
    most: float
    same: float

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.4f}, p99 {self.p99:.4f}, most {self.most:.3f}, same {self.same:.2%}"
        )


def read_prompts(path: Path, count: int, half: int | None = None) -> list[tuple[str, bool]]:
    """The first `count` prompts in an order that depends on their ids alone, and whether each is a chat;
    `half` keeps those at even or at odd places."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines.sort(key=lambda line: hashlib.sha256(line["id"].encode()).digest())
    chosen = [(line["turns"][0], place // 2 % 4 != 3) for place, line in enumerate(lines[:count])]
    return chosen if half is None else chosen[half::2]


def answered(model: str, prompts: Sequence[tuple[str, bool]]) -> list[Forced]:
    """Every prompt with what the model says in fp32, greedily, over the end of its answer too."""
    engine = LLM(
        model, dtype="float32", kv_cache_dtype="float32", max_model_len=LONGEST, max_num_seqs=16
    )
    room = LONGEST - ANSWER
    asked = [tokens_of(engine, text, chat)[:room] for text, chat in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    outputs = engine.generate(asked, params, progress=False)
    return [
        Forced((*prompt, *output.outputs[0].token_ids), len(prompt))
        for prompt, output in zip(asked, outputs, strict=True)
    ]


def tokens_of(engine: LLM, text: str, chat: bool) -> list[int]:
    """A prompt as the model gets it."""
    if chat:
        return engine.chat_tokens([{"role": "user", "content": text}])
    return engine.tokenizer.encode(text, add_special=True, parse_special=False)


def scored(model: str, forced: Sequence[Forced], ops: Ops, kv_type: str, **options: str) -> Scores:
    """The answers by one way of computing, each from one prefill."""
    decoder = load_model(model, ops, max_positions=LONGEST, **options)
    blocks = LONGEST // BLOCK
    kv = ops.alloc_kv(decoder.kv_spec(blocks, BLOCK, kv_type))
    table = np.arange(blocks, dtype=np.int32)[None]
    logprobs, best = [], []
    for each in forced:
        tokens = np.array(each.tokens[:-1], np.int32)
        rows = np.arange(len(tokens), dtype=np.int32)
        ends = np.array([0, len(tokens)], np.int32)
        wanted = rows[each.start - 1 :]
        logits = decoder.forward(Batch(tokens, rows, ends, ends[1:], table, rows, wanted), kv)
        for row, token in zip(logits, each.tokens[each.start :], strict=True):
            most = row.max()
            total = np.exp(row - most).sum(dtype=np.float64)
            logprobs.append(row[token] - most - np.log(total))
            best.append(row.argmax())
    return Scores(np.array(logprobs, np.float32), np.array(best))


def error(base: Scores, mine: Scores) -> Error:
    """Of one way of computing beside another."""
    off = np.abs(base.logprobs - mine.logprobs)
    same = float((base.best == mine.best).mean())
    return Error(float(off.mean()), float(np.quantile(off, 0.99)), float(off.max()), same)


def exact(model: str, forced: Sequence[Forced]) -> Scores:
    """In fp32 throughout."""
    return scored(model, forced, NativeOps(), "float32", dtype="float32")


def served(model: str, forced: Sequence[Forced], bits: str = "auto") -> Scores:
    """As served, but for the bits of activations."""
    return scored(model, forced, NativeOps(), "float16", activation_bits=bits)


def errors(
    model: str, forced: Sequence[Forced], ways: dict[str, str]
) -> Iterator[tuple[str, Error]]:
    """Of the named ways, as served but for the bits of activations, each beside fp32."""
    base = exact(model, forced)
    for name, bits in ways.items():
        yield name, error(base, served(model, forced, bits))


def answer_to(model: str, question: str, **settings: str) -> str:
    """What the model says greedily to one question in a chat."""
    params = SamplingParams(temperature=0.0, max_tokens=32)
    engine = LLM(model, max_model_len=LONGEST, **settings)
    return engine.chat([{"role": "user", "content": question}], params).outputs[0].text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--half", type=int, choices=(0, 1))
    arguments = parser.parse_args()
    forced = answered(
        arguments.model, read_prompts(arguments.prompts, arguments.count, arguments.half)
    )
    for name, found in errors(arguments.model, forced, WAYS):
        print(f"{name:10} {found}", flush=True)
    for name, settings in (("fp32", {"dtype": "float32"}), ("as served", {})):
        print(f"{name}: {PARIS} {answer_to(arguments.model, PARIS, **settings)!r}", flush=True)


if __name__ == "__main__":
    main()
