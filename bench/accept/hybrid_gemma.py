"""Gemma 4: tiny random models of three shapes (embeddings of each layer and shared KV as in E2B, k = v as in
31B, experts beside the MLP as in 26B-A4B) beside Transformers, in crowds, quantised; what is computed and held;
plans of the published configurations beside sums by hand; refusals."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Line
from hybrid_state import golden_lines, refused_by_name
from test_gemma4 import FAMILIES, KV, NAMES, PUBLISHED, by_hand, golden, wide

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.executor.draft import Costs
from pageturner.executor.draft_model import DraftModel
from pageturner.executor.kv_memory import KVLayout, KVSizes
from pageturner.kernels.base import Ops
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.reference import ReferenceOps
from pageturner.lab.planning.model_outline import read_outline
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.load import load_model, open_model, weight_bytes
from pageturner.params import SamplingParams
from pageturner.policies.suffix_drafts import SuffixDrafts
from pageturner.request import Request
from support.decoding import Decoding, beside
from support.engines import Model, Setup, answers
from support.gemma4 import write_gguf

BLOCKS = (1, 16, 32, 48, 256)


def lines(options: argparse.Namespace) -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        yield from transformers_lines(Path(folder))
        yield from quantised_lines(Path(folder))
    for name in NAMES:
        yield bits_line(name)
    yield from need_lines()
    with tempfile.TemporaryDirectory() as folder:
        yield from plan_lines(Path(folder))
    yield refusal_line()


# -- beside Transformers -------------------------------------------------------------------------------------
def forms(folder: Path, name: str) -> dict[str, Path]:
    """The model as it was recorded, and as GGUF files with experts in one tensor and in two."""
    file, spec, _ = open_model(FAMILIES / name)
    found = {"folder": FAMILIES / name}
    for joined in (True, False):
        path = folder / f"{name}-{joined}.gguf"
        found[f"GGUF{'' if joined else ', experts apart'}"] = write_gguf(
            path, file, spec, joined=joined
        )
    return found


def transformers_lines(folder: Path) -> Iterator[Line]:
    for name in NAMES:
        found = [
            beside(Decoding(load_model(path, ops), ops), golden(name))
            for path, ops in itertools.product(forms(folder, name).values(), backends())
        ]
        yield from golden_lines(name, "folder and two GGUF files, reference and native", found)


def backends() -> tuple[Ops, Ops]:
    return ReferenceOps(), NativeOps(threads=2)


# -- quantised -----------------------------------------------------------------------------------------------
def quantised_lines(folder: Path) -> Iterator[Line]:
    """Native beside the reference with the same integers. Where weights are rounded when a model is loaded, the
    recorded models; files of Q8_0 and Q4_K have sizes that fill blocks, and random weights."""
    prompt = list(range(3, 60, 2))
    for name in NAMES:
        cases: dict[str, tuple[Path, dict[str, Any]]] = {
            kind: (FAMILIES / name, {"quantization": kind}) for kind in ("int8", "int4")
        }
        for kind in ("Q8_0", "Q4_K"):
            path = folder / f"{name}-{kind}.gguf"
            cases[kind] = write_gguf(path, *wide(folder, name), lambda _, kind=kind: kind), {}
        found = {}
        for case, (path, more) in cases.items():
            a, b = (
                Decoding(load_model(path, ops, activation_bits="15", **more), ops).step(
                    [("p", prompt)]
                )[0]
                for ops in backends()
            )
            found[case] = float(np.abs(a - b).max() / np.abs(a).max())
        figure = ", ".join(f"{case} {error:.0e}" for case, error in found.items())
        yield Line(
            f"{name}: quantised, native beside the reference", figure, max(found.values()) < 4e-3
        )


# -- bits ----------------------------------------------------------------------------------------------------
def crowd() -> list[Request]:
    """Prompts of which two thirds share a beginning, some longer than a segment; greedy and sampled."""
    dice = random.Random(4)
    shared = tuple(dice.randrange(256) for _ in range(70))
    requests = []
    for number in range(10):
        own = tuple(
            dice.randrange(256) for _ in range(dice.choice([1, 9, 40, 300 if number == 4 else 20]))
        )
        params = SamplingParams(
            temperature=number % 2,
            seed=number,
            max_tokens=30 + 40 * (number % 3),
            logprobs=1,
            prompt_logprobs=1 if number == 5 else None,
        )
        start = 0 if number == 5 else None
        requests.append(Request(number, shared[: number % 3 * 35] + own, params, logits_from=start))
    return requests


def bits_line(name: str) -> Line:
    """Every answer alone is the truth; block sizes, budgets, cache, scarce memory, threads and drafts."""
    models = {n: Model(FAMILIES / name, NativeOps(threads=n)) for n in (1, 2)}
    requests, truth = crowd(), {}
    for request in requests:
        truth |= answers(models[1].engine(Setup()), [request])
    differ = count = preempted = 0
    for block, budget, scarce in itertools.product(BLOCKS, (16, 512), (False, True)):
        tokens = max(640, 3 * block) if scarce else 16384
        for cache, drafter in ((True, None), (False, SuffixDrafts)):
            setup = Setup(
                block_size=block,
                token_budget=budget,
                kv_tokens=tokens,
                recent_tokens=max(160, 3 * block) if scarce else 0,
                prefix_caching=cache,
                drafter=drafter,
            )
            engine = models[1 + cache].engine(setup)
            found = answers(engine, requests)
            differ += sum(found[i] != truth[i] for i in truth)
            count += len(truth)
            stats = engine.scheduler.stats()
            preempted += int(stats["preemptions"])
    figure = f"{differ} of {count} answers differ, {preempted} preemptions"
    sizes = "/".join(map(str, BLOCKS))
    what = f"{name}: bits of crowds, blocks of {sizes}, budgets, cache, drafts, threads"
    return Line(what, figure, differ == 0 and preempted > 0)


# -- what is computed and held -------------------------------------------------------------------------------
def need_lines() -> Iterator[Line]:
    ops = ReferenceOps()
    decoder, rows, attend = load_model(FAMILIES / "gemma4_e2b", ops), [], ops.attention
    ops.attention = lambda q, *rest: rows.append(len(q)) or attend(q, *rest)  # type: ignore[method-assign]
    Decoding(decoder, ops).last([("p", list(range(40)))])
    figure = f"rows of attention in each layer: {rows}"
    what = (
        "a prompt of 40 tokens: layers behind the last K and V see one row (E2B: 20 of 35 layers)"
    )
    yield Line(what, figure, rows == [40] * 4 + [1] * 4)
    file, _, layout = open_model(FAMILIES / "gemma4_e2b")
    table = len(file.tensor("model.embed_tokens_per_layer.weight")[2])
    whole = sum(info.nbytes for info in file.tensors.values())
    held = weight_bytes(file, layout, "auto", "none")
    mapped = all(not layer.per_layer.rows.data.flags.owndata for layer in decoder.stack.layers)
    figure = f"{whole:,} bytes in the file, {table:,} of them the table, {held:,} loaded; rows are views: {mapped}"
    yield Line(
        "embeddings of each layer stay in their file", figure, mapped and held == whole - table
    )


# -- plans and refusals --------------------------------------------------------------------------------------
def plan_lines(folder: Path) -> Iterator[Line]:
    for name, (whole, windowed, per_token) in KV.items():
        path = folder / "config.json"
        path.write_text(json.dumps(PUBLISHED[f"gemma4_{name}"]))
        found, weights = read_outline(path), 2 * by_hand(name)
        right = (found.kv, found.bytes_per_token("float16"), found.weights) == (
            (whole, windowed),
            per_token,
            weights,
        )
        figure = f"{found.bytes_per_token('float16'):,} bytes of KV a token, weights {found.weights:,} bytes"
        yield Line(f"plan of Gemma 4 {name} beside sums by hand", figure, right)


def refusal_line() -> Line:
    """Everything that is not built says its name."""
    text = PUBLISHED["gemma4_e2b"]["text_config"]
    model, native = str(FAMILIES / "gemma4_e2b"), NativeOps(threads=1)
    both_ways = PUBLISHED["gemma4_e2b"] | {
        "text_config": text | {"use_bidirectional_attention": "all"}
    }
    layout = KVLayout(KVSizes(8), 16, "float16")
    tries = {
        "use_bidirectional_attention": lambda: read_hf_spec(both_ways, "config.json", "x", False),
        "not divided among ranks": lambda: load_model(model, native, rank=1, ranks=2),
        "no adapter": lambda: load_model(model, native).pack_adapter(None),
        "KV tiers": lambda: make_engine(
            EngineConfig(model=model, backend="native", kv_host_memory=1 << 20)
        ),
        "draft model": lambda: DraftModel(
            load_model(model, native), native, layout, Costs(0.0, 1.0)
        ),
    }
    return refused_by_name(tries)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
