"""Heads of checkpoints that predict a second token: what they compute, and answers with their drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence as Tokens
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pageturner.cli import doctor
from pageturner.config.settings import EngineConfig
from pageturner.executor.mtp import MTPDrafter
from pageturner.kernels.base import Array
from pageturner.kernels.reference import ReferenceOps
from pageturner.llm import LLM
from pageturner.models.load import load_model
from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.scheduler.types import Item, Output
from support.decoding import backend
from support.engines import Answer, Model, Setup, answers
from support.hf_folder import make_folder
from support.mtp import drafter, head_logits, write_head
from support.refusals import engine_fault

PROMPT = tuple(int(t) for t in np.random.default_rng(3).integers(3, 300, 70))


class Spy(MTPDrafter):
    """Keeps the hidden row of each position, and the drafts by the number of tokens before them."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.rows: dict[int, np.ndarray] = {}
        self.drafts: dict[int, list[int]] = {}

    def watch(self, rows: Array) -> None:
        super().watch(rows)
        self.seen = rows

    def propose(self, items: Tokens[Item], outputs: Tokens[Output]) -> None:
        first = 0
        for item in items:
            self.rows |= {item.start + i: np.array(self.seen[first + i]) for i in range(item.n)}
            first += item.n
        super().propose(items, outputs)
        for item, output in zip(items, outputs, strict=True):
            self.drafts[len(item.sequence.tokens) + len(output.tokens)] = list(output.draft)


def rms(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + w)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def expected(folder: Path, tokens: Tokens[int], hidden: np.ndarray) -> np.ndarray:
    """Logits of the head for each hidden row and the token behind it, in fp64 after the formulas of
    Qwen's layers."""
    from safetensors.numpy import load_file

    w = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
    c = json.loads((folder / "config.json").read_text())
    n, heads, kv, d = len(tokens) - 1, c["num_attention_heads"], c["num_key_value_heads"], 32
    m = {k.removeprefix("mtp.layers.0."): v for k, v in w.items() if k.startswith("mtp.")}
    e = rms(w["model.embed_tokens.weight"][list(tokens[1:])], m["mtp.pre_fc_norm_embedding.weight"])
    h = rms(rms(hidden, w["model.norm.weight"]), m["mtp.pre_fc_norm_hidden.weight"])
    x = np.concatenate([e, h], 1) @ m["mtp.fc.weight"].T
    y = rms(x, m["input_layernorm.weight"])
    both = (y @ m["self_attn.q_proj.weight"].T).reshape(n, heads, 2, d)
    q = rms(both[:, :, 0], m["self_attn.q_norm.weight"])
    k = rms((y @ m["self_attn.k_proj.weight"].T).reshape(n, kv, d), m["self_attn.k_norm.weight"])
    v = (y @ m["self_attn.v_proj.weight"].T).reshape(n, kv, d)
    angle = np.outer(np.arange(n), 1e4 ** -(np.arange(4) / 4))[:, None]

    def turned(z: np.ndarray) -> np.ndarray:
        a, b, rest = z[..., :4], z[..., 4:8], z[..., 8:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    q, k = turned(q), turned(k)
    out = np.empty((n, heads, d))
    for i in range(heads):
        scores = q[:, i] @ k[:, i * kv // heads].T * d**-0.5
        scores = np.exp(np.where(np.tri(n) > 0, scores, -np.inf))
        out[:, i] = scores / scores.sum(1, keepdims=True) @ v[:, i * kv // heads]
    out = out / (1 + np.exp(-both[:, :, 1]))
    x = x + out.reshape(n, -1) @ m["self_attn.o_proj.weight"].T
    y = rms(x, m["post_attention_layernorm.weight"])
    x = x + _mlp(y, m, c)
    return np.asarray(rms(x, m["mtp.norm.weight"]) @ w["lm_head.weight"].T)


def _mlp(y: np.ndarray, m: dict[str, np.ndarray], c: dict[str, int]) -> np.ndarray:
    def mlp(stem: str) -> np.ndarray:
        gate, up, down = (m[f"{stem}{f}_proj.weight"].T for f in ("gate", "up", "down"))
        return np.asarray((silu(y @ gate) * (y @ up)) @ down)

    if "mlp.gate.weight" not in m:
        return mlp("mlp.")
    scores = np.exp(y @ m["mlp.gate.weight"].T)
    chosen = np.argsort(-scores, 1)[:, : c["num_experts_per_tok"]]
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, chosen, np.take_along_axis(scores, chosen, 1), 1)
    weights /= weights.sum(1, keepdims=True)
    found = mlp("mlp.shared_expert.") / (1 + np.exp(-y @ m["mlp.shared_expert_gate.weight"].T))
    for i in range(scores.shape[1]):
        found = found + weights[:, i : i + 1] * mlp(f"mlp.experts.{i}.")
    return np.asarray(found)


@pytest.mark.parametrize("ops", ["reference", "native"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "qwen3_5_moe"])
def test_what_a_head_computes(tmp_path: Path, family: str, ops: str) -> None:
    """Its logits are those of an independent form, and drafts begin with the likeliest token of them in
    every step, however the prompt was cut."""
    folder = write_head(tmp_path / family, family, alone=True)
    model = Model(folder, backend(ops), dtype="float32", kv_dtype="float32", mtp=True)
    setup = Setup(token_budget=33, block_size=16)
    spy = drafter(model, setup, Spy)
    request = Request(1, PROMPT, SamplingParams(temperature=0.0, max_tokens=20))
    found = answers(model.engine(replace(setup, drafter=lambda: spy)), [request])
    tokens = [*PROMPT, *found[1].tokens]
    hidden = np.stack([spy.rows[i] for i in range(len(tokens) - 1)])
    logits = expected(folder, tokens, hidden)
    here = head_logits(model.decoder, model.ops, np.array(tokens[1:], np.int32), hidden)
    assert np.abs(here - logits).max() < 2e-5 * np.abs(logits).max()
    first = {length: draft[0] for length, draft in spy.drafts.items() if draft}
    assert len(first) >= 4
    assert {n: int(logits[n - 2].argmax()) for n in first} == first


def requests() -> list[Request]:
    dice = np.random.default_rng(5)
    found = []
    for id in range(6):
        shared = PROMPT[: (0, 33, 64, 70, 40, 64)[id]]
        own = [int(t) for t in dice.integers(3, 300, 1 + id)]
        temperature = (0.0, 0.7)[id % 2]
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=id, logprobs=0)
        found.append(Request(id, (*shared, *own), params))
    return found


SETUPS = {
    "crowd": Setup(),
    "chunks": Setup(token_budget=20, block_size=48, max_num_seqs=4),
    "blocks of 1": Setup(block_size=1, token_budget=50, max_num_seqs=6),
    "preemption": Setup(kv_tokens=160, block_size=1),
    "no cache": Setup(prefix_caching=False),
    "padding": Setup(policy="static", token_budget=64, max_num_seqs=6),
}
MODELS = {
    "right": partial(write_head, family="qwen3_5", right=True),
    "random": partial(write_head, family="qwen3_next"),
    "behind": partial(write_head, family="glm4_moe", right=True, behind=True),
    "latent": partial(write_head, family="deepseek_v3", right=True, behind=True),
}


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = MODELS[request.param](tmp_path_factory.mktemp("mtp") / request.param)
    model = Model(folder, backend("native"), mtp=True)
    model.name = request.param  # type: ignore[attr-defined]
    return model


def alone(model: Model) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    for request in requests():
        found |= answers(model.engine(Setup(prefix_caching=False, max_num_seqs=1)), [request])
    return found


def test_drafts_change_no_bit(served: Model) -> None:
    truth = alone(served)
    for name, setup in SETUPS.items():
        engine = served.engine(replace(setup, drafter=partial(drafter, served, setup)))
        for turn in range(2):  # the second finds what the first left
            again = [replace(one, id=one.id + 100 * turn) for one in requests()]
            found = answers(engine, again, spread=3 * turn)
            assert {id % 100: answer for id, answer in found.items()} == truth, name
        stats = engine.stack.scheduler.stats()
        assert stats["draft_tokens"] > 0, name
        if served.name != "random":  # type: ignore[attr-defined]
            assert stats["accepted_tokens"] > 0.3 * stats["draft_tokens"], (name, stats)
        if name == "preemption":
            assert stats["preemptions"] > 0


@pytest.mark.parametrize("family", ["qwen3_5", "olmo2", "gpt2", "deepseek_v3", "falcon_h1"])
def test_a_checkpoint_without_a_head(tmp_path: Path, family: str) -> None:
    folder = make_folder(tmp_path / "plain", family)
    with engine_fault("no head that predicts a second token", code="draft_model") as fault:
        load_model(folder, ReferenceOps(), mtp=True)
    assert "--speculation ngram" in fault.value.message


def test_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offline API with a head: the same text and fingerprint, and blocks that cost the bytes of
    both."""
    monkeypatch.setattr("pageturner.executor.mtp.cost_of", lambda head, target: 0.01)
    folder = write_head(make_folder(tmp_path / "m", "qwen3_5"), "qwen3_5", right=True)
    plain, drafted = (
        LLM(str(folder), kv_cache_memory=1 << 22, speculation=kind) for kind in ("off", "mtp")
    )
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    texts = [it.generate("the old house", params)[0].outputs[0].text for it in (plain, drafted)]
    assert texts[0] == texts[1]
    stats = drafted.built.engine.scheduler.stats()
    assert stats["accepted_tokens"] > 0.5 * stats["draft_tokens"] > 0
    assert drafted.built.fingerprint == plain.built.fingerprint
    assert drafted.built.num_blocks < plain.built.num_blocks
    config = EngineConfig(model=str(folder), kv_cache_memory=1 << 22, speculation="mtp")
    report = doctor.examine(config, measure=False)
    assert report.problems == []
    assert report.data["kv"]["blocks"] == drafted.built.num_blocks
    assert "its KV takes 256 bytes a token" in report.sections["model"]["MTP head"]
