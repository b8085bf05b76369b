"""Short convolutions and Mamba2: tiny random models of LFM2, Granite 4 H, Nemotron-H and Falcon-H1 beside
Transformers, as folders and GGUF files, in crowds, after crashes; sizes of the published ones; refusals.

    python bench/accept/hybrid_families.py
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import harness
import hybrid_state
import numpy as np
import test_hybrid as crowds
import test_recurrent_configs as published
from harness import Line
from test_gguf_mamba import ARCHES, FAMILIES, written

from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.load import load_model
from support.decoding import Decoding, beside
from support.engines import Setup, answers

BLOCKS = (1, 16, 32, 48, 256)
SHAPE = published.LFM2 | {
    **{"vocab_size": 512, "hidden_size": 64, "block_ff_dim": 96, "block_multiple_of": 32},
    **{"num_attention_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4},
    **{"full_attn_idxs": [2], "max_position_embeddings": 16384, "dtype": "float32"},
}
NAMES = (*ARCHES, "falcon_h1_norm")


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """Everything, model by model."""
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            yield from transformers_lines(Path(folder), name)
    for name in NAMES:
        yield bits_line(name)
        yield hybrid_state.crash(name, "crashes in decode", (17, 31))
    for name in published.SIZES:
        yield size_line(name)
    # small states, one at every boundary
    yield from hybrid_state.reuse(60, 6, SHAPE, 12 << 20, "LFM2's shape, ")
    yield refusal_line()


def transformers_lines(folder: Path, name: str) -> Iterator[Line]:
    truth = dict(np.load(FAMILIES / name / "golden.npz"))
    paths = [FAMILIES / name]
    if name in ARCHES:
        paths.append(written(folder / f"{name}.gguf", name))
    found = [
        beside(Decoding(load_model(path, ops, dtype="float32"), ops), truth)
        for path, ops in itertools.product(paths, (ReferenceOps(), NativeOps(threads=2)))
    ]
    forms = ("folder", "folder and GGUF file")[len(paths) - 1]
    yield from hybrid_state.golden_lines(name, f"{forms}, reference and native", found)


def bits_line(name: str) -> Line:
    """Every answer alone is the truth; twice in each setup, so that the second finds snapshots."""
    setups = [*crowds.SETUPS.values()]
    setups += [
        Setup(block_size=size, token_budget=budget) for size in BLOCKS for budget in (16, 512)
    ]
    truth = crowds.truth(name)
    differ = count = cached = preempted = 0
    for setup in setups:
        engine = crowds.model(name).engine(setup)
        for _ in range(2):
            found = answers(engine, crowds.requests())
            differ += sum(found[i] != truth[i] for i in truth)
            count += len(truth)
        stats = engine.stack.scheduler.stats()
        cached += int(stats["cached_tokens"])
        preempted += int(stats["preemptions"])
    figure = (
        f"{differ} of {count} answers differ; {cached:,} tokens cached, {preempted} preemptions"
    )
    what = f"{name}: bits of crowds, chunks, blocks of {'/'.join(map(str, BLOCKS))}, cache, drafts"
    return Line(what, figure, differ == 0 and cached > 0 and preempted > 0)


def size_line(name: str) -> Line:
    values, layers, token, state = published.SIZES[name]
    spec = published.read(values)
    assert spec.linear is not None
    found = (
        len(spec.linear.layers),
        spec.kv_spec(1, 1, "float16").bytes_per_token,
        spec.linear.storage("float16").state_bytes,
    )
    figure = f"{found[0]} recurrent layers, KV of a token {found[1]:,} B, a state {found[2]:,} B"
    return Line(f"{name}: sizes beside sums by hand", figure, found == (layers, token, state))


def refusal_line() -> Line:
    nano = published.NANO_30B
    wrong = {"n_group": 4, "moe_latent_size": 1024, "use_bias": True}
    return hybrid_state.refused_by_name(
        {key: lambda own=nano | {key: value}: published.read(own) for key, value in wrong.items()}
    )


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
