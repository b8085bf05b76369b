"""Gemma 4 beside what every family is tested for: as GGUF files, as published, quantised, and what it need not
compute or hold."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.formats.ggml import dequantise
from pageturner.formats.ggml_types import KINDS
from pageturner.kernels.base import Batch, Ops
from pageturner.kernels.reference import ReferenceOps
from pageturner.lab.planning.model_outline import read_outline
from pageturner.lab.planning.model_outline_keys import KVLayers
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.load import check_memory, load_model, open_model, weight_bytes
from pageturner.models.rope import RopeSpec, rope_tables
from pageturner.models.spec import ModelSpec
from support.decoding import Decoding, assert_greedy, assert_logits, backend
from support.gemma4 import write_gguf
from support.gguf_writer import gguf_bytes, taken_apart
from support.hf_folder import GOLDENS
from support.refusals import engine_fault
from support.safetensors_writer import tensors_of, write_safetensors

FAMILIES = GOLDENS / "families"
NAMES = ("gemma4_e2b", "gemma4_31b", "gemma4_26b")
PUBLISHED: dict[str, Any] = json.loads((GOLDENS / "published_configs.json").read_text())
PROMPT = list(range(3, 60, 2))


def golden(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FAMILIES / name / "golden.npz"))


def logits(path: Path, ops: Ops, prompt: list[int] = PROMPT, **options: Any) -> np.ndarray:
    return Decoding(load_model(path, ops, **options), ops).step([("p", prompt)])[0]


def read(values: dict[str, Any]) -> ModelSpec:
    return read_hf_spec(values, "config.json", "x", has_head=False)


def refusal(values: dict[str, Any]) -> str:
    with engine_fault() as caught:
        read(values)
    assert caught.value.code in ("model_unsupported", "model_invalid")
    return caught.value.message


# -- GGUF ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_model_as_gguf(tmp_path: Path, name: str, joined: bool) -> None:
    """Gates and ups of experts in one tensor, as converters write them now, or in two."""
    file, spec, _ = open_model(FAMILIES / name)
    path = write_gguf(tmp_path / "model.gguf", file, spec, joined=joined)
    ops, truth = backend("reference"), golden(name)
    decoder = load_model(path, ops)
    assert (
        replace(decoder.spec, arch=spec.arch, name=spec.name, rope=spec.rope, eps=spec.eps) == spec
    )
    assert_logits(Decoding(decoder, ops), truth)
    assert_greedy(Decoding(decoder, ops), truth)
    prompt = truth["prompt_1"].tolist()
    a, b = (logits(each, ops, prompt) for each in (FAMILIES / name, path))
    np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(a).max())


def test_what_layers_that_share_kv_do_not_read_is_passed_over(tmp_path: Path) -> None:
    file, spec, _ = open_model(FAMILIES / "gemma4_e2b")
    path = write_gguf(tmp_path / "model.gguf", file, spec)
    truth, (metadata, tensors) = logits(path, ReferenceOps()), taken_apart(path)
    for part in ("attn_k", "attn_v", "attn_k_norm"):
        tensors[f"blk.5.{part}.weight"] = (0, (4,), bytes(16))
    path.write_bytes(gguf_bytes(metadata, tensors))
    np.testing.assert_array_equal(logits(path, ReferenceOps()), truth)
    tensors["blk.3.attn_k_extra.weight"] = (0, (4,), bytes(16))
    path.write_bytes(gguf_bytes(metadata, tensors))
    with engine_fault("attn_k_extra"):
        load_model(path, ReferenceOps())


def test_a_file_without_layer_scales_has_ones(tmp_path: Path) -> None:
    file, spec, _ = open_model(FAMILIES / "gemma4_31b")
    path = write_gguf(tmp_path / "model.gguf", file, spec)
    metadata, tensors = taken_apart(path)
    for name in list(tensors):
        if name.endswith("layer_output_scale.weight"):
            del tensors[name]
    path.write_bytes(gguf_bytes(metadata, tensors))
    decoder = load_model(path, ReferenceOps())
    assert {layer.out_scale for layer in decoder.stack.layers} == {1.0}


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("attention.head_count_kv", [2, 1, 1, 1], "KV heads"),
        ("attention.head_count_kv", [2, 1], "head_count_kv"),
        ("attention.shared_kv_layers", 4, "share the KV"),
        ("attention.shared_kv_layers", 3, "share the KV"),
    ],
)
def test_a_file_that_makes_no_sense(tmp_path: Path, key: str, value: Any, named: str) -> None:
    file, spec, _ = open_model(FAMILIES / "gemma4_31b")
    path = write_gguf(tmp_path / "model.gguf", file, spec)
    metadata, tensors = taken_apart(path)
    path.write_bytes(gguf_bytes(metadata | {f"gemma4.{key}": value}, tensors))
    with engine_fault(named):
        open_model(path)


# -- Hugging Face folders ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arch"), [*((name, "gemma4") for name in NAMES), ("gemma4_31b", "gemma4_unified")]
)
def test_inside_of_a_model_that_sees_and_hears(tmp_path: Path, name: str, arch: str) -> None:
    """As published: text in an object of its own, two keys for the heads of layers without a window; 12B is
    of another type, and has the same text."""
    tensors = {
        old.replace("model.", "model.language_model.", 1): tensor
        for old, tensor in tensors_of(FAMILIES / name).items()
    }
    parts = [
        "vision_tower.a",
        "embed_vision.b",
        "audio_tower.c",
        "embed_audio.d",
        "vision_embedder.e",
    ]
    if name == "gemma4_e2b":  # published files hold what layers that share KV do not read
        shared = ("k_proj", "v_proj", "k_norm", "v_norm")
        parts += [f"language_model.layers.{i}.self_attn.{k}" for i in range(4, 8) for k in shared]
    for part in parts:
        tensors[f"model.{part}.weight"] = ("F32", (4,), bytes(16))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    text = json.loads((FAMILIES / name / "config.json").read_text())
    heads = next(iter(text.pop("per_layer_config").values()))
    text["global_head_dim"] = heads["head_dim"]
    text["num_global_key_value_heads"] = heads.get("num_key_value_heads")
    text["model_type"] = f"{arch}_text"
    outside = {
        "model_type": arch,
        "vision_config": {"hidden_size": 4},
        "audio_config": {"hidden_size": 4},
        "eoa_token_index": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps(outside | {"text_config": text}))
    ops = ReferenceOps()
    np.testing.assert_array_equal(logits(FAMILIES / name, ops), logits(tmp_path, ops))


def test_what_is_published() -> None:
    """Layers, heads, windows, what is shared and what is beside (HYBRID.md's table)."""
    e2b, e4b, moe, dense = (
        read(PUBLISHED[f"gemma4_{name}"]) for name in ("e2b", "e4b", "26b", "31b")
    )
    assert (e2b.local_heads, e2b.kv_heads, e2b.head_dim) == ((1, 256), 1, 512)
    assert (e4b.local_heads, e4b.kv_heads, e4b.head_dim) == ((2, 256), 2, 512)
    assert (moe.local_heads, moe.kv_heads, moe.head_dim) == ((8, 256), 2, 512)
    assert (dense.local_heads, dense.kv_heads, dense.head_dim) == ((16, 256), 4, 512)
    assert [spec.sharing for spec in (e2b, e4b, moe, dense)] == [20, 18, 0, 0]
    assert [spec.per_layer for spec in (e2b, e4b, moe, dense)] == [256, 256, 0, 0]
    assert [spec.k_as_v for spec in (e2b, e4b, moe, dense)] == [False, False, True, True]
    assert (e2b.inner(14), e2b.inner(15), e4b.inner(41)) == (6144, 12288, 10240)
    assert moe.experts is not None
    assert (moe.experts.count, moe.experts.top_k, moe.experts.ffn) == (128, 8, 704)
    assert (moe.experts.shared, moe.experts.normalise) == (2112, True)
    for spec in (e2b, e4b, moe, dense):
        assert (spec.attention_scale, spec.logit_soft_cap, spec.tied) == (1.0, 30.0, True)
        assert spec.local_rope == RopeSpec(1e4, 256)
        assert spec.rope == RopeSpec(1e6, 512, kind="proportional", turned=128)
        assert spec.layers - 1 not in spec.windowed
        assert "KV heads of two sizes" in spec.composed


def test_pairs_that_stand_still() -> None:
    """The first quarter turns as if all did; the others keep what they are, bit for bit."""
    part = rope_tables(RopeSpec(1e6, 16, kind="proportional", turned=4), 50)
    whole = rope_tables(RopeSpec(1e6, 16), 50)
    np.testing.assert_array_equal(part.cos[:, :2], whole.cos[:, :2])
    assert (part.cos[:, 2:] == 1).all()
    assert (part.sin[:, 2:] == 0).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"vocab_size_per_layer_input": 300}, "vocab_size_per_layer_input"),
        ({"num_kv_shared_layers": 35}, "share the KV"),
        ({"num_kv_shared_layers": 33}, "share the KV"),
        ({"rope_parameters": None}, "rope_parameters"),
        ({"per_layer_config": {"4": {"head_dim": 512}}}, "per_layer_config"),
        ({"per_layer_config": {"4": {"num_attention_heads": 4}}}, "num_attention_heads"),
        ({"hidden_size_per_layer_input": -1}, "embeddings"),
        ({"altup_num_inputs": 4}, "altup_num_inputs"),
    ],
)
def test_what_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    text = PUBLISHED["gemma4_e2b"]["text_config"] | change
    assert named in refusal(PUBLISHED["gemma4_e2b"] | {"text_config": text})


@pytest.mark.parametrize("divided", [{"ranks": 2}, {"stages": 2}])
def test_it_is_not_divided_among_ranks(divided: dict[str, Any]) -> None:
    with engine_fault(r"layers that share KV.*not divided"):
        load_model(FAMILIES / "gemma4_e2b", backend("native"), rank=1, **divided)


def test_kv_tiers_are_refused() -> None:
    """A tier holds blocks of all layers, which have no one form here."""
    model = str(FAMILIES / "gemma4_e2b")
    config = EngineConfig(model=model, backend="reference", kv_host_memory=1 << 20)
    with engine_fault("KV tiers"):
        make_engine(config)


def test_an_adapter_is_refused() -> None:
    decoder = load_model(FAMILIES / "gemma4_e2b", backend("native"))
    with engine_fault("no adapter works"):
        decoder.pack_adapter(None)  # type: ignore[arg-type]


# -- what is computed and held -------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, ops: Ops) -> list[int]:
    """The rows that each query product sees from here on are put into the list."""
    rows: list[int] = []
    attend = ops.attention

    def counting(q: Any, *rest: Any) -> Any:
        rows.append(len(q))
        return attend(q, *rest)

    monkeypatch.setattr(ops, "attention", counting)
    return rows


def test_a_prompt_computes_only_what_is_needed_behind_the_last_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers that share KV see the rows whose logits are wanted; a chunk without any stops before them."""
    ops = backend("reference")
    decoder = load_model(FAMILIES / "gemma4_e2b", ops)
    rows = counted(monkeypatch, ops)
    last = Decoding(decoder, ops).last([("a", PROMPT), ("b", PROMPT[:5])])
    count = len(PROMPT) + 5
    assert rows == [count] * 4 + [2] * 4
    whole = Decoding(decoder, ops).step([("a", PROMPT), ("b", PROMPT[:5])])
    np.testing.assert_array_equal(last, [whole[0][-1], whole[1][-1]])
    rows.clear()
    specs = decoder.kv_specs(4, 4, 16, "float32")
    kv = [ops.alloc_kv(spec) for spec in specs]
    batch = Batch(
        *(np.array(a, np.int32) for a in ([5, 6], [0, 1], [0, 2], [2], [[0]], [0, 1], []))
    )
    assert len(decoder.hidden(batch, kv[0], (batch, kv[1]))) == 0
    assert rows == [2] * 4


def test_the_table_of_embeddings_stays_in_its_file() -> None:
    """A row is read where it lies; nothing of it counts as memory that a load needs."""
    ops = backend("native")
    file, spec, layout = open_model(FAMILIES / "gemma4_e2b")
    decoder = load_model(FAMILIES / "gemma4_e2b", ops)
    kind, shape, raw = file.tensor("model.embed_tokens_per_layer.weight")
    table = dequantise(kind, shape, np.frombuffer(raw, np.uint8)).reshape(*shape[:1], 8, -1)
    tokens = np.array([7, 300, 7], np.int32)
    for number, layer in enumerate(decoder.stack.layers):
        assert layer.per_layer is not None
        rows = layer.per_layer.rows
        assert not rows.data.flags.owndata  # type: ignore[attr-defined]
        np.testing.assert_allclose(
            rows(tokens), table[tokens, number] * 2, rtol=1e-6
        )  # root of 8/2
    held = sum(info.nbytes for info in file.tensors.values()) - len(raw)
    assert weight_bytes(file, layout, "auto", "none") == held
    check_memory(file, layout, "auto", "none", held)
    with engine_fault("take"):
        check_memory(file, layout, "auto", "none", held - 1)
    assert spec.per_layer == 8


@pytest.mark.parametrize("name", NAMES)
def test_quantised_when_loaded(name: str) -> None:
    """The native backend computes what the reference does with the same integers."""
    for quantization in ("int8", "int4"):
        options = {"quantization": quantization, "activation_bits": "15"}
        a, b = (logits(FAMILIES / name, backend(o), **options) for o in ("reference", "native"))
        assert np.abs(a - b).max() < 2e-3 * np.abs(a).max(), quantization


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_K"])
@pytest.mark.parametrize("name", NAMES)
def test_quantised_files(tmp_path: Path, name: str, kind: str) -> None:
    """Sizes of whole blocks, with random weights; the table of embeddings has blocks too."""
    path = write_gguf(tmp_path / "model.gguf", *wide(tmp_path, name), lambda _: kind)
    found = [logits(path, backend(o), activation_bits="15") for o in ("reference", "native")]
    assert np.isfinite(found[0]).all()
    assert np.abs(found[0]).max() > 0.1
    assert np.abs(found[0] - found[1]).max() < 4e-3 * np.abs(found[0]).max()


def test_a_block_of_two_layers_is_refused(tmp_path: Path) -> None:
    """Parts of 8 values do not fill blocks of 32."""
    file, spec, _ = open_model(FAMILIES / "gemma4_e2b")
    kinds = lambda name: "Q8_0" if "per_layer_token" in name else "F32"  # noqa: E731
    path = write_gguf(tmp_path / "model.gguf", file, spec, kinds)
    with engine_fault("per_layer_token_embd", code="weight_kind"):
        load_model(path, ReferenceOps())


def test_experts_of_nvfp4_have_their_scale_once(tmp_path: Path) -> None:
    """Beside matrices of this type stands their scale, which is that of each expert here."""
    path = write_gguf(tmp_path / "model.gguf", *wide(tmp_path, "gemma4_26b"))
    metadata, tensors = taken_apart(path)
    number, block = next((n, kind) for n, kind in KINDS.items() if kind.name == "NVFP4")
    recorded = np.load(GOLDENS / "dequant.npz")["NVFP4_raw"].reshape(3, -1)[0]
    blocks, draw = recorded.reshape(-1, block.nbytes), np.random.default_rng(1)
    quantised, floats = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith("ffn_down_exps.weight")]:
        shape = tensors[name][1]
        raw = blocks[draw.integers(0, len(blocks), prod(shape) // block.values)].reshape(-1)
        values = dequantise("NVFP4", shape, raw)
        scales = draw.uniform(0.2, 3, shape[0]).astype(np.float32) / np.float32(values.std())
        quantised[name] = (number, shape, raw.tobytes())
        floats[name] = (0, shape, values.tobytes())
        for each in (quantised, floats):
            each[name.replace("weight", "scale")] = (0, scales.shape, scales.tobytes())
    found = []
    for each in (quantised, floats):
        path.write_bytes(gguf_bytes(metadata, each))
        found.append(logits(path, backend("reference"), activation_bits="15"))
    np.testing.assert_allclose(*found, rtol=0, atol=2e-3 * np.abs(found[1]).max())


def wide(folder: Path, name: str) -> tuple[Any, ModelSpec]:
    """The model with sizes that blocks of 256 fill, and random weights."""
    values = json.loads((FAMILIES / name / "config.json").read_text())
    values |= {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    if values["hidden_size_per_layer_input"]:
        values["hidden_size_per_layer_input"] = 256
    if values["enable_moe_block"]:
        values["moe_intermediate_size"] = 256
    for heads in values["per_layer_config"].values():
        heads["head_dim"] = 128
    (folder / "config.json").write_text(json.dumps(values))
    file, spec, _ = open_model(folder, "dummy", 1)
    return file, spec


# -- plans ---------------------------------------------------------------------------------------------------

# Layers without a window: their KV heads x 512, twice, in 16 bits; then those with one; those that own KV
# alone. Parameters are counted matrix by matrix from the table of published sizes.
KV = {
    "e2b": (KVLayers(3, 1, 512, 512), KVLayers(12, 1, 256, 256, 512), 2 * 2 * (3 * 512 + 12 * 256)),
    "e4b": (KVLayers(4, 2, 512, 512), KVLayers(20, 2, 256, 256, 512), 4 * 2 * (4 * 512 + 20 * 256)),
    "26b": (
        KVLayers(5, 2, 512, 512),
        KVLayers(25, 8, 256, 256, 1024),
        4 * (5 * 2 * 512 + 25 * 8 * 256),
    ),
    "31b": (
        KVLayers(10, 4, 512, 512),
        KVLayers(50, 16, 256, 256, 1024),
        4 * (10 * 4 * 512 + 50 * 16 * 256),
    ),
}


def matrices(d: int, heads: int, kv: tuple[int, int], full: bool, same: bool) -> int:
    """Weights of the attention of a layer: q, o, k and v of (KV heads, size)."""
    q = d * heads * kv[1]
    return 2 * q + (1 if same and full else 2) * d * kv[0] * kv[1]


def by_hand(name: str) -> int:
    """Parameters of a published model, norms and scalars included."""
    if name in ("e2b", "e4b"):
        layers, d, ffn, shared, kv, every = {
            "e2b": (35, 1536, 6144, 20, 1, 5),
            "e4b": (42, 2560, 10240, 18, 2, 6),
        }[name]
        total = 262144 * d + 262144 * layers * 256 + layers * 256 * d + 256 + d
        for i in range(layers):
            full = (i + 1) % every == 0
            size = 512 if full else 256
            own = i < layers - shared
            inner = 2 * ffn if name == "e2b" and not own else ffn
            total += 2 * d * 8 * size + size + (2 * d * kv * size + size if own else 0)
            total += 3 * d * inner + 2 * d * 256 + 5 * d + 1
        return total
    layers, d, ffn, heads, kv, wide = {
        "26b": (30, 2816, 2112, 16, 8, 2),
        "31b": (60, 5376, 21504, 32, 16, 4),
    }[name]
    total = 262144 * d + d
    for i in range(layers):
        full = (i + 1) % 6 == 0
        size = 512 if full else 256
        total += matrices(d, heads, (wide, 512) if full else (kv, 256), full, True)
        total += 2 * size + 3 * d * ffn + 4 * d + 1
        if name == "26b":
            total += 128 * 3 * d * 704 + 128 * d + 128 + d + 3 * d
    return total


@pytest.mark.parametrize("name", KV)
def test_a_plan_is_what_is_counted_by_hand(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[f"gemma4_{name}"]))
    found = read_outline(path)
    whole, windowed, per_token = KV[name]
    assert found.kv == (whole, windowed)
    assert found.bytes_per_token("float16") == per_token
    assert found.weights == 2 * by_hand(name)
    assert found.why_not == ""


def test_int4_leaves_the_table_as_it_is(tmp_path: Path) -> None:
    """It is read row by row from the file; everything else becomes 5 bits a weight."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED["gemma4_e2b"]))
    table = 2 * 262144 * 35 * 256
    found = read_outline(path, quantization="int4")
    assert found.weights is not None
    rest = by_hand("e2b") - table // 2
    assert 0.62 * rest < found.weights - table < 0.63 * rest
