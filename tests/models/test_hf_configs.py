"""config.json as people publish it: every spelling of Transformers 4 and 5, keys that say nothing, silence,
and what is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.rope import RopeSpec
from pageturner.models.spec import ExpertSpec, ModelSpec
from support.decoding import logits
from support.hf_folder import GOLDENS
from support.refusals import engine_fault
from support.safetensors_writer import tensors_of, write_safetensors

FAMILIES = GOLDENS / "families"
PROMPT = list(range(3, 20))
Json = dict[str, Any]


def read(values: Json, has_head: bool = False) -> ModelSpec:
    return read_hf_spec(values, "config.json", "x", has_head=has_head)


def refusal(values: Json) -> str:
    with engine_fault(code="model_unsupported") as caught:
        read(values)
    return caught.value.message


def recorded(name: str, **changes: object) -> Json:
    """The configuration of a tiny model; ... takes a key away."""
    values = json.loads((FAMILIES / name / "config.json").read_text()) | changes
    return {key: value for key, value in values.items() if value is not ...}


# -- as published --------------------------------------------------------------------------------------------

PUBLISHED: dict[str, Json] = json.loads((GOLDENS / "published_configs.json").read_text())
LLAMA_31 = PUBLISHED["llama_31"]
SMOLLM2 = PUBLISHED["smollm2"]
MISTRAL = PUBLISHED["mistral"]
QWEN3 = PUBLISHED["qwen3"]
GEMMA2 = PUBLISHED["gemma2"]
GEMMA3 = PUBLISHED["gemma3"]
BLOOM = PUBLISHED["bloom"]
GPT2 = PUBLISHED["gpt2"]
OPT = PUBLISHED["opt"]
TINYLLAMA = PUBLISHED["tinyllama"]
MIXTRAL = PUBLISHED["mixtral"]
PHI3 = PUBLISHED["phi3"]


def test_llama_31() -> None:
    spec = read(LLAMA_31)
    expected = RopeSpec(5e5, 128, 8.0, kind="llama3", original=8192, low=1.0, high=4.0)
    assert (spec.rope, spec.context, spec.tied) == (expected, 131072, False)


def test_smollm2_carries_keys_of_other_programs() -> None:
    spec = read(SMOLLM2)
    assert (spec.rope, spec.tied, spec.head_dim) == (RopeSpec(1e5, 64), True, 64)
    assert "rope_interleaved" in refusal(SMOLLM2 | {"rope_interleaved": True})


def test_mistral_with_a_head_of_its_own_size_and_no_window() -> None:
    spec = read(MISTRAL)
    assert (spec.head_dim, spec.heads * spec.head_dim, spec.dim) == (128, 4096, 5120)
    assert (spec.window, spec.windowed, spec.attention_scale) == (0, frozenset(), 128**-0.5)


def test_qwen3_has_heads_that_do_not_fill_the_model() -> None:
    spec = read(QWEN3)
    assert (spec.head_dim, spec.heads * spec.head_dim, spec.dim) == (128, 2048, 1024)
    assert (spec.rope.base, spec.tied, spec.windowed) == (1e6, True, frozenset())


def test_gemma2_27b_scales_by_another_number() -> None:
    spec = read(GEMMA2)
    assert (spec.attention_scale, spec.head_dim) == (144**-0.5, 128)
    assert (spec.soft_cap, spec.logit_soft_cap, spec.window, spec.tied) == (50.0, 30.0, 4096, True)
    assert spec.windowed == frozenset(range(0, 46, 2))
    assert "sliding_window_size" in refusal(GEMMA2 | {"sliding_window_size": 2048})


def test_gemma3_with_a_vision_tower() -> None:
    """What is silent is as Transformers' Gemma3TextConfig has it."""
    spec = read(GEMMA3)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.vocab) == (8, 4, 256, 262208)
    assert (spec.context, spec.eps, spec.attention_scale, spec.tied) == (131072, 1e-6, 1 / 16, True)
    assert (spec.rope_of(5), spec.rope_of(0)) == (
        RopeSpec(1e6, 256, 8.0, kind="linear"),
        RopeSpec(1e4, 256),
    )
    assert (spec.window, spec.family.act, spec.soft_cap) == (1024, "gelu_tanh", 0.0)
    assert "fusion" in refusal(GEMMA3 | {"fusion": 3})
    text = GEMMA3["text_config"] | {"use_bidirectional_attention": True}
    assert "use_bidirectional_attention" in refusal(GEMMA3 | {"text_config": text})
    with engine_fault("text_config should be an object"):
        read({"model_type": "gemma3"})


def test_tinyllama_and_mixtral() -> None:
    spec = read(TINYLLAMA, has_head=True)
    assert (spec.head_dim, spec.kv_heads, spec.rope, spec.tied) == (64, 4, RopeSpec(1e4, 64), False)
    spec = read(MIXTRAL, has_head=True)
    assert spec.experts == ExpertSpec(8, 2, 14336, True, frozenset(range(32)))
    assert (spec.tied, spec.window, spec.rope.base) == (False, 0, 1e6)
    assert read(MIXTRAL | {"tie_word_embeddings": True}).tied


@pytest.mark.parametrize("values", [BLOOM, GPT2, OPT, PHI3], ids=["bloom", "gpt2", "opt", "phi3"])
def test_others_as_published(values: Json) -> None:
    spec = read(values)
    assert (spec.arch, spec.tied) == (values["model_type"], values["model_type"] != "phi3")
    assert spec.window == values.get("sliding_window", 0)
    assert spec.head_dim == {"bloom": 64, "gpt2": 64, "opt": 64, "phi3": 96}[spec.arch]


def test_what_generate_once_read_here_says_nothing() -> None:
    """Old files carry the defaults of every parameter of generation."""
    old = {
        "return_dict": True,
        "max_length": 20,
        "min_length": 0,
        "num_beams": 1,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "encoder_no_repeat_ngram_size": 0,
        "num_return_sequences": 1,
        "diversity_penalty": 0.0,
        "num_beam_groups": 1,
        "pruned_heads": {},
        "chunk_size_feed_forward": 0,
        "output_scores": False,
        "is_encoder_decoder": False,
        "torchscript": False,
        "use_bfloat16": False,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "problem_type": None,
    }
    assert read(LLAMA_31 | old) == read(LLAMA_31)


# -- refused by name -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 512}, "do_layer_norm_before"),
        (OPT | {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        (OPT | {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        (BLOOM | {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
        (PHI3 | {"rope_scaling": {"type": "resonance", "factor": 4.0}}, "'resonance'"),
        (LLAMA_31 | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "'mrope'"),
        (
            QWEN3 | {"dual_chunk_attention_config": {"chunk_size": 262144}},
            "dual_chunk_attention_config",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(values: Json, says: str) -> None:
    assert says in refusal(values)


# -- spellings and silence -----------------------------------------------------------------------------------


def legacy(values: Json) -> Json:
    """The configuration in the spelling of Transformers 4."""
    values = dict(values)
    rope = values.pop("rope_parameters")
    values["torch_dtype"] = values.pop("dtype", None)
    if "full_attention" in rope:
        values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    values["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        values["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope["rope_type"] != "default":
        drop = ("rope_theta", "rope_type", "partial_rotary_factor")
        scaling = {key: value for key, value in rope.items() if key not in drop}
        values["rope_scaling"] = scaling | {"type": rope["rope_type"]}
    return values


@pytest.mark.parametrize(
    "name",
    ["llama3", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "mixtral", "qwen3_moe"],
)
def test_both_spellings_mean_the_same(name: str) -> None:
    assert read(legacy(recorded(name))) == read(recorded(name))


@pytest.mark.parametrize(
    ("name", "silent", "expected"),
    [
        ("mistral", "sliding_window", {"window": 4096, "windowed": frozenset({0, 1})}),
        ("gemma2", "sliding_window", {"window": 4096}),
        ("gemma2", "attn_logit_softcapping", {"soft_cap": 50.0}),
        ("gemma2", "final_logit_softcapping", {"logit_soft_cap": 30.0}),
        ("gemma2", "query_pre_attn_scalar", {"attention_scale": 1 / 16}),
        ("gemma3", "rope_parameters", {"rope": RopeSpec(1e6, 8), "local_rope": RopeSpec(1e4, 8)}),
        ("mixtral", "rope_parameters", {"rope": RopeSpec(1e6, 8)}),
    ],
)
def test_silence_is_what_transformers_takes(name: str, silent: str, expected: Json) -> None:
    assert read(recorded(name, **{silent: ...})) == replace(read(recorded(name)), **expected)


def test_qwen2_without_a_first_windowed_layer() -> None:
    window = {
        "layer_types": ...,
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": ...,
    }
    assert read(recorded("qwen2", **window, num_hidden_layers=30)).windowed == {28, 29}


# -- folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model."])
def test_gemma3_inside_of_a_model_that_sees(tmp_path: Path, root: str) -> None:
    """The names of Transformers 4 and 5; the tower is left alone."""
    source = FAMILIES / "gemma3"
    tensors = {
        root + name.removeprefix("model."): tensor for name, tensor in tensors_of(source).items()
    }
    outer = "" if root.startswith("language") else "model."
    for part in (
        "vision_tower.vision_model.post_layernorm.weight",
        "multi_modal_projector.norm.weight",
    ):
        tensors[outer + part] = ("F32", (4,), bytes(16))
    write_safetensors(tmp_path / "model.safetensors", tensors)
    text = json.loads((source / "config.json").read_text())
    outside = {"model_type": "gemma3", "vision_config": {"hidden_size": 4}, "image_token_index": 9}
    (tmp_path / "config.json").write_text(json.dumps(outside | {"text_config": text}))
    np.testing.assert_array_equal(*(logits(path, PROMPT) for path in (source, tmp_path)))


def test_gpt2_without_a_prefix_and_with_masks(tmp_path: Path) -> None:
    """The names of the first GPT-2 files."""
    source = Path(shutil.copytree(FAMILIES / "gpt2", tmp_path / "gpt2"))
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in tensors_of(source).items()
    }
    tensors["h.0.attn.bias"] = ("F32", (1, 1, 8, 8), bytes(256))
    write_safetensors(source / "model.safetensors", tensors)
    folders = FAMILIES / "gpt2", source
    np.testing.assert_array_equal(*(logits(path, PROMPT) for path in folders))
