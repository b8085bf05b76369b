"""Recurrent state as one more paged thing, on the engine: reuse of prefixes, crashes, sizes, and logits of tiny
models beside Transformers'.

    python bench/accept/hybrid_state.py [--state-requests N]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import ROOT, Line

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine import Engine
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.errors import EngineFault
from pageturner.kernels.recurrent import CHUNK
from pageturner.lab.planning.kv_planner import KVPlanner
from pageturner.lab.planning.model_outline import read_outline
from pageturner.params import SamplingParams
from pageturner.request import Request, Resume

FAMILIES = ROOT / "tests" / "goldens" / "families"
NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
CLOSE = 2e-5  # to Transformers, of the largest logit
BLOCK = 16
SHAPE = {  # a hybrid with random weights, small enough for millions of tokens
    "model_type": "qwen3_5_text",
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16, "max_position_embeddings": 16384, "dtype": "float32"},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
# Configuration -> KV of a token, and a state of all recurrent layers, by hand: layers x KV heads x 256 x 2 x 2;
# layers x (value heads x 128 x 128 x 4 + 3 rows of (2 x 16 + value heads) x 128 in fp16).
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    name: (
        {
            "model_type": kind,
            **{"num_hidden_layers": layers, "hidden_size": 2048, "num_attention_heads": 16},
            **{"num_key_value_heads": kv, "linear_num_value_heads": heads, "vocab_size": 248320},
            **{"linear_num_key_heads": 16, "intermediate_size": 6144, "head_dim": 256},
            **{"max_position_embeddings": 262144, "full_attention_interval": 4},
        },
        layers // 4 * kv * 256 * 2 * 2,
        layers * 3 // 4 * (heads * 128 * 128 * 4 + 3 * (32 + heads) * 128 * 2),
    )
    for name, kind, layers, kv, heads in (
        ("Qwen3.5-0.8B and 2B", "qwen3_5_text", 24, 2, 16),
        ("Qwen3.5-4B and 9B", "qwen3_5_text", 32, 4, 32),
        ("Qwen3.5-27B", "qwen3_5_text", 64, 4, 48),
        ("Qwen3.6-35B-A3B", "qwen3_5_moe_text", 40, 2, 32),
        ("Qwen3-Next-80B-A3B", "qwen3_next", 48, 2, 32),
    )
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How many requests of each kind of traffic."""
    parser.add_argument("--state-requests", type=int, default=120)


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """Everything, the fast lines first."""
    yield from sizes()
    yield from logits()
    what = f"three crashes in decode, fewer than {CHUNK} tokens of a stream computed again"
    for name in NAMES:
        yield crash(name, what, (17, 23, 31))
    conversations = max(options.state_requests // 12, 4)
    yield from reuse(options.state_requests, conversations, SHAPE, 48 << 20)


def engine(model: Path, **settings: Any) -> LoadedEngine:
    return make_engine(
        EngineConfig(model=str(model), backend="native", threads=2, block_size=BLOCK, **settings)
    )


def answer(engine: Engine, request: Request, steps: int = 1 << 30) -> tuple[list[int], int]:
    """Its tokens, and how many of its prompt were cached."""
    tokens, cached = [], 0
    failed = [event for event in engine.submit(request) if event.failure]
    assert not failed, failed
    while engine.has_work and steps:
        steps -= 1
        for event in engine.step():
            assert event.failure is None, event.failure
            tokens += event.tokens
            cached = event.cached
    return tokens, cached


# -- logits ------------------------------------------------------------------------------------------------------
def logits() -> Iterator[Line]:
    """Greedy tokens and their logprobs as Transformers has them."""
    for name in NAMES:
        truth = dict(np.load(FAMILIES / name / "golden.npz"))
        found = engine(FAMILIES / name, dtype="float32", kv_cache_dtype="float32").engine
        same, worst = 0, 0.0
        for i in range(2):
            expected, prompt = truth[f"greedy_{i}"].tolist(), truth[f"prompt_{i}"].tolist()
            params = SamplingParams(max_tokens=len(expected), temperature=0.0, logprobs=0)
            tokens, values = [], []
            found.submit(Request(i, tuple(prompt), params))
            while found.has_work:
                for event in found.step():
                    tokens += event.tokens
                    values += [each[0] for each in event.logprobs]
            same += tokens == expected
            off = np.abs(np.array(values) - truth[f"logprobs_{i}"]).max()
            worst = max(worst, off / np.abs(truth[f"logits_{i}"]).max())
        yield Line(
            f"{name}: greedy tokens are Transformers', logprobs within {CLOSE:.0e} of the largest logit",
            f"{same} of 2 prompts, {worst:.1e}",
            same == 2 and worst < CLOSE,
        )


def golden_lines(name: str, forms: str, found: list[tuple[float, int, int]]) -> Iterator[Line]:
    """The lines of what `support.decoding.beside` found of each form of a model."""
    errors, equals, counts = zip(*found, strict=True)
    worst, equal, tokens = max(errors), sum(equals), sum(counts)
    what = f"{name}: logits beside Transformers, {forms}"
    yield Line(what, f"{worst:.1e}", worst <= CLOSE)
    yield Line(f"{name}: greedy tokens", f"{equal} of {tokens} equal", equal == tokens)


# -- sizes -------------------------------------------------------------------------------------------------------
def sizes() -> Iterator[Line]:
    """`plan` beside sums by hand."""
    for name, (config, kv, state) in PUBLISHED.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config))
            outline = read_outline(path)
        states = outline.recurrent("float16")
        assert states is not None
        found = (outline.bytes_per_token("float16"), states.state_bytes)
        each = KVPlanner(outline, "float16", BLOCK, 32768, 1 << 40).sequence_bytes(32768)
        whole = kv * 32768 + 2 * (states.state_bytes + states.tail_bytes)
        yield Line(
            f"plan {name}: KV of a token, a state, a sequence of 32,768 tokens",
            f"{found[0]:,} B, {found[1] / 2**20:.1f} MiB, {each / 2**20:,.0f} MiB",
            found == (kv, state) and each == whole,
        )


# -- crash -------------------------------------------------------------------------------------------------------
PROMPTS = [tuple(range(5 + n, 42 + 9 * n)) for n in range(4)]


def crash(name: str, what: str, kills: tuple[int, ...]) -> Line:
    """Engines that are gone after so many steps, as killed ones are, and the next on their memory."""
    fd = os.memfd_create("states")
    whole, _ = go_on(name, None, {}, 1 << 30)
    done: dict[int, list[int]] = {}
    worst = 0.0
    for steps in (*kills, 1 << 30):
        done, again = go_on(name, fd, done, steps)
        worst = max(worst, again)
    os.close(fd)
    equal = "equal" if done == whole else "differ"
    figure = f"at most {worst:.0f} tokens of 4 streams computed again, answers {equal}"
    return Line(f"{name}: {what}", figure, done == whole and worst <= 4 * (CHUNK - 1))


def refused_by_name(tries: dict[str, Callable[[], object]]) -> Line:
    """Everything that is not built is refused with a word that says what it is."""
    named = []
    for word, attempt in tries.items():
        try:
            attempt()
        except EngineFault as fault:
            named += [word] * (word in fault.message)
    return Line("refused by name", ", ".join(named), len(named) == len(tries))


def go_on(
    name: str, fd: int | None, done: dict[int, list[int]], steps: int
) -> tuple[dict[int, list[int]], float]:
    """The answers after so many steps of a new engine on the memory, and what it computed again."""
    config = EngineConfig(
        model=str(FAMILIES / name), backend="native", threads=1, block_size=BLOCK, max_num_seqs=8
    )
    engine = make_engine(config, kv_fd=fd).engine
    params = SamplingParams(temperature=1.0, max_tokens=120, stop_ids=())
    found = {i: list(done.get(i, [])) for i in range(len(PROMPTS))}
    for i, prompt in enumerate(PROMPTS):
        resume = (Resume(0, tuple(found[i])),) if found[i] else ()
        engine.submit(Request(i, prompt, params, resume=resume))
    while engine.has_work and steps:
        steps -= 1
        for event in engine.step():
            found[event.id] += event.tokens
    return found, engine.stats()["recomputed_tokens"]


# -- reuse -------------------------------------------------------------------------------------------------------
def reuse(
    count: int, conversations: int, shape: dict[str, Any], memory: int, name: str = ""
) -> Iterator[Line]:
    """Documents with questions, chats, and prefixes cut anywhere, one request after the other,
    in so many bytes of KV. name: goes before the lines."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        for what, traffic, least in (
            ("repeated prefixes", documents(count), 0.98),
            ("chats of 12 turns", chats(conversations), 0.97),
            ("prefixes cut at random", cut(count), 0.95),
        ):
            built = engine(
                Path(folder),
                load_format="dummy",
                max_num_seqs=4,
                kv_cache_memory=memory,
                max_num_batched_tokens=2048,
                max_model_len=12_000,
            )
            share, computed = shared(built.engine, traffic)
            yield Line(
                f"{name}{what}: at least {least:.0%} of the reusable tokens",
                f"{share:.1%} of {computed:,} tokens; {built.sizes.states} states, {built.sizes.blocks:,} blocks",
                share >= least,
            )


def shared(engine: Engine, traffic: Iterator[tuple[list[int], int]]) -> tuple[float, int]:
    saved = there = 0
    for id, (prompt, known) in enumerate(traffic):
        _, cached = answer(engine, Request(id, tuple(prompt), SamplingParams(max_tokens=1)))
        saved += min(cached, known)
        there += known
    return saved / max(there, 1), there


def text(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(4, 500) for _ in range(count)]


def usable(tokens: int) -> int:
    """What could be taken up of so many tokens that are there: whole chunks."""
    return tokens // CHUNK * CHUNK


def documents(count: int) -> Iterator[tuple[list[int], int]]:
    """Documents of up to 8,000 tokens, asked about again and again."""
    dice = random.Random(1)
    texts = [text(dice, dice.randint(500, 8000)) for _ in range(8)]
    seen: set[int] = set()
    for _ in range(count):
        which = min(int(dice.expovariate(0.4)), 7)
        known = usable(len(texts[which])) if which in seen else 0
        seen.add(which)
        yield texts[which] + text(dice, dice.randint(50, 500)), known


def chats(users: int) -> Iterator[tuple[list[int], int]]:
    """Conversations of 12 turns beside each other: each prompt is what was said before, and more."""
    dice = random.Random(3)
    turns = [user for user in range(users) for _ in range(12)]
    dice.shuffle(turns)
    said: dict[int, list[int]] = {}
    for user in turns:
        before = said.get(user, [])
        said[user] = (before or text(random.Random(0), 400)) + text(dice, dice.randint(100, 600))
        yield said[user], usable(len(before))


def cut(count: int) -> Iterator[tuple[list[int], int]]:
    """The beginnings of documents of 8,000 tokens, cut anywhere; from the third request to each on."""
    dice = random.Random(2)
    texts = [text(dice, 8000) for _ in range(4)]
    asked = [0] * 4
    for _ in range(count):
        which, at = dice.randrange(4), dice.randint(256, 7999)
        asked[which] += 1
        if asked[which] == 1:
            yield texts[which], 0
        else:
            yield texts[which][:at] + text(dice, 100), usable(at) if asked[which] > 2 else 0


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
