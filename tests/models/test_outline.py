"""What a model takes, from its configuration alone: published models by hand, and models nobody runs here."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from pageturner.errors import EngineFault
from pageturner.formats.gguf import open_gguf, open_header
from pageturner.kernels.base import KV_TYPES
from pageturner.lab.planning.kv_planner import KVPlanner
from pageturner.lab.planning.model_outline import Outline, rank_kv_bytes, read_outline
from pageturner.lab.planning.model_outline_keys import KVLayers, gguf_usual, hf_usual
from pageturner.models.load import open_model
from support.gguf_writer import Tensor, Value, float_tensor, gguf_bytes, taken_apart
from support.refusals import engine_fault

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES = sorted(path.name for path in (GOLDENS / "families").iterdir() if path.is_dir())
Json = dict[str, Any]


def llama(layers: int, width: int, ffn: int, heads: int, kv_heads: int, **others: object) -> Json:
    """A config.json of the Llama family, from the numbers that are published of a model."""
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    } | others


LLAMA_31_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
BLOOM = {
    "model_type": "bloom",
    "n_layer": 70,
    "hidden_size": 14336,
    "num_attention_heads": 112,
    "vocab_size": 250880,
    "seq_length": 2048,
}
# name: configuration, bytes of KV per token in fp16, parameters as published with the model
PUBLISHED: dict[str, tuple[Json, int, int]] = {
    # 2 (K and V) x 70 layers x 112 heads x 128 values x 2 bytes
    "BLOOM-176B": (BLOOM, 4_014_080, 176_247_271_424),
    # 2 x 32 x 32 x 128 x 2: 512 KiB
    "Llama-2-7B": (llama(32, 4096, 11008, 32, 32), 524_288, 6_738_415_616),
    # 2 x 40 x 40 x 128 x 2: 800 KiB
    "Llama-2-13B": (llama(40, 5120, 13824, 40, 40), 819_200, 13_015_864_320),
    # 2 x 80 x 8 x 128 x 2: 320 KiB, an eighth of what its 64 heads would take
    "Llama-2-70B": (llama(80, 8192, 28672, 64, 8), 327_680, 68_976_648_192),
    # 2 x 80 x 8 x 128 x 2
    "Qwen2.5-72B": (
        llama(
            80,
            8192,
            29568,
            64,
            8,
            model_type="qwen2",
            vocab_size=152064,
            sliding_window=131072,
            use_sliding_window=False,
            max_window_layers=80,
            max_position_embeddings=131072,
        ),
        327_680,
        72_706_203_648,
    ),
    # 2 x 126 x 8 x 128 x 2: 504 KiB
    "Llama-3.1-405B": (
        llama(
            126,
            16384,
            53248,
            128,
            8,
            vocab_size=128256,
            max_position_embeddings=131072,
            rope_theta=500000.0,
            rope_scaling=LLAMA_31_ROPE,
        ),
        516_096,
        405_853_388_800,
    ),
}


@pytest.fixture
def outline(tmp_path: Path) -> Any:
    """The outline of a configuration."""

    def read(values: object, **settings: str) -> Outline:
        path = tmp_path / "some-model.json"
        path.write_text(json.dumps(values))
        return read_outline(path, **settings)

    return read


def refusal(read: Any, *arguments: Any) -> EngineFault:
    with engine_fault() as caught:
        read(*arguments)
    return caught.value


# -- models that this engine runs ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str, outline: Any) -> None:
    values, per_token, parameters = PUBLISHED[name]
    found = outline(values)
    assert found.bytes_per_token("float16") == per_token
    assert found.weights == 2 * parameters
    assert found.weights_from.startswith(f"{parameters:,} parameters")
    assert found.why_not == ""


def test_bloom_takes_what_the_mission_says(outline: Any) -> None:
    nbytes = 1024 * outline(BLOOM).bytes_per_token("float16")
    assert f"{nbytes / 1024**3:.2f} GiB" == "3.83 GiB"


def test_kv_types(outline: Any) -> None:
    found = outline(PUBLISHED["Llama-2-70B"][0])
    assert found.bytes_per_token("float32") == 2 * 327_680
    # 80 layers x 8 heads x (128 bytes and a scale of 4) for K and for V
    assert found.bytes_per_token("int8") == 2 * 80 * 8 * (128 + 4)


def test_weights_as_they_are_loaded(outline: Any) -> None:
    values, _, parameters = PUBLISHED["Llama-2-7B"]
    assert outline(values, dtype="float32").weights == 4 * parameters
    assert outline(values | {"torch_dtype": "float32"}).weights == 4 * parameters
    int8 = outline(values, quantization="int8").weights
    assert 1.0 * parameters < int8 < 1.2 * parameters  # a byte and its share of a group's scale
    silent = outline({key: value for key, value in values.items() if key != "torch_dtype"})
    assert silent.weights == 2 * parameters
    assert "names no float type" in silent.weights_from


@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", False), ("bloom", True)],
    ids=["Llama has a head", "BLOOM has none"],
)
def test_silence_about_the_head(family: str, tied: bool, outline: Any) -> None:
    values = llama(2, 64, 128, 4, 2) if family == "llama" else BLOOM
    said = {key: value for key, value in values.items() if key != "tie_word_embeddings"}
    assert outline(said).weights == outline(said | {"tie_word_embeddings": tied}).weights
    assert outline(said).weights != outline(said | {"tie_word_embeddings": not tied}).weights


def test_windows(outline: Any) -> None:
    mistral = llama(32, 4096, 14336, 32, 8, model_type="mistral", sliding_window=4096)
    assert outline(mistral).kv == (KVLayers(32, 8, 128, 128, 4096),)
    gemma = json.loads((GOLDENS / "families" / "gemma3" / "config.json").read_text())
    _, spec, _ = open_model(GOLDENS / "families" / "gemma3")
    full, windowed = outline(gemma).kv
    assert (full.window, windowed.window) == (0, spec.window)
    assert (full.count, windowed.count) == (spec.layers - len(spec.windowed), len(spec.windowed))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_says_what_its_tensors_take(family: str) -> None:
    """The shapes that follow from the configuration are those in the file."""
    folder = GOLDENS / "families" / family
    file, spec, layout = open_model(folder)
    used = {part.name for part in layout.all()}
    found = read_outline(folder)
    parameters = sum(prod(info.shape) for name, info in file.tensors.items() if name in used)
    assert found.weights_from.startswith(f"{parameters:,} parameters")
    assert found.layers == spec.kv_layers
    assert found.why_not == ""
    for dtype in KV_TYPES:
        # what the engine allocates
        assert 16 * found.bytes_per_token(dtype) == spec.kv_spec(1, 16, dtype).nbytes


# Granite 4 carries keys of Mamba layers that it has none of; Llama 4 is chunked; Gemma 4 has two kinds
# of heads, and layers that share KV
NOT_USUAL = {"granitemoehybrid", "llama4_text", "gemma4_e2b", "gemma4_31b", "gemma4_26b"}
NOT_USUAL |= {"qwen3_5", "qwen3_5_moe", "qwen3_next"}  # states in place of KV
NOT_USUAL |= {"lfm2", "lfm2_moe", "granite_h", "granite_h_dense", "nemotron_h", "nemotron_h_moe"}
NOT_USUAL |= {"falcon_h1", "falcon_h1_norm"}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NOT_USUAL])
def test_the_usual_keys_agree_with_the_specs(family: str) -> None:
    """What is done for unknown families gives, for known ones, what the readers of their specs say."""
    config = GOLDENS / "families" / family / "config.json"
    usual, exact = hf_usual(json.loads(config.read_text()), "config.json"), read_outline(config)
    assert (usual.heads, usual.kv) == (exact.heads, exact.kv)
    assert usual.context in (
        exact.context,
        0,
    )  # 0: the file is silent, and the spec takes a default


# -- others --------------------------------------------------------------------------------------------------

# arXiv 2412.19437: a latent vector of 512 and a rotary key of 64 in each of 61 layers
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8"},
}
USUAL: dict[str, tuple[Json, tuple[KVLayers, ...]]] = {
    "MLA": (DEEPSEEK_V3, (KVLayers(61, 1, 576, 0),)),
    "GPT-J": (
        {"model_type": "gptj", "n_layer": 28, "n_embd": 4096, "n_head": 16, "n_positions": 2048},
        (KVLayers(28, 16, 256, 256),),
    ),
    "StarCoder, MQA": (
        {
            "model_type": "gpt_bigcode",
            "n_layer": 40,
            "n_embd": 6144,
            "n_head": 48,
            "n_positions": 8192,
            "multi_query": True,
        },
        (KVLayers(40, 1, 128, 128),),
    ),
    "Falcon 7B, MQA": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "num_kv_heads": 71,
            "multi_query": True,
            "new_decoder_architecture": False,
        },
        (KVLayers(32, 1, 64, 64),),
    ),
    "Falcon 40B, GQA": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 60,
            "hidden_size": 8192,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "multi_query": True,
            "new_decoder_architecture": True,
        },
        (KVLayers(60, 8, 64, 64),),
    ),
    "ChatGLM": (
        {
            "model_type": "chatglm",
            "num_layers": 28,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "kv_channels": 128,
            "seq_length": 8192,
        },
        (KVLayers(28, 2, 128, 128),),
    ),
    "DBRX": (
        {
            "model_type": "dbrx",
            "n_layers": 40,
            "d_model": 6144,
            "n_heads": 48,
            "max_seq_len": 32768,
            "attn_config": {"kv_n_heads": 8},
        },
        (KVLayers(40, 8, 128, 128),),
    ),
    "MPT, MQA": (
        {
            "model_type": "mpt",
            "n_layers": 2,
            "d_model": 64,
            "n_heads": 4,
            "max_seq_len": 2048,
            "attn_config": {"attn_type": "multiquery_attention", "alibi": True},
        },
        (KVLayers(2, 1, 16, 16),),
    ),
    "within text_config": (
        {
            "model_type": "llava",
            "vision_config": {"hidden_size": 1024},
            "text_config": llama(32, 4096, 11008, 32, 32),
        },
        (KVLayers(32, 32, 128, 128),),
    ),
    "layer by layer": (
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 4,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        (KVLayers(2, 8, 64, 64), KVLayers(2, 8, 64, 64, 128)),
    ),
    "keys and values of different size": (
        {
            "model_type": "mimo",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 192,
            "v_head_dim": 128,
        },
        (KVLayers(2, 2, 192, 128),),
    ),
}


@pytest.mark.parametrize("name", USUAL)
def test_families_nobody_runs_here(name: str, outline: Any) -> None:
    values, kv = USUAL[name]
    found = outline(values)
    assert found.kv == kv
    assert found.why_not
    assert found.weights is None


def test_silence_about_kv_heads_is_said(outline: Any) -> None:
    silent, said = outline(USUAL["GPT-J"][0]), outline(USUAL["DBRX"][0])
    assert "all are taken" in silent.assumed
    assert said.assumed == ""


def test_latent_attention(outline: Any) -> None:
    found = outline(DEEPSEEK_V3)
    assert found.bytes_per_token("float16") == 70_272  # 61 x 576 x 2
    assert found.attention == "MLA"


def test_rotary_scaling_does_not_matter(outline: Any) -> None:
    scaling = {"type": "resonance", "factor": 4.0}
    values = llama(32, 3072, 8192, 32, 32, model_type="phi3", rope_scaling=scaling)
    found = outline(values)
    assert "resonance" in found.why_not
    assert found.bytes_per_token("float16") == 2 * 32 * 32 * 96 * 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"mamba_d_state": 128}, "mamba_d_state"),
        ({"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ({"attention_chunk_size": 8192}, "attention in chunks"),
        ({"model_type": "longcat_flash"}, "longcat_flash"),
        (
            {"kv_lora_rank": 8, "layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
            "kv_lora_rank",
        ),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers"),
        ({"sliding_window": 4096}, "which layers"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"num_key_value_heads": [2, 2]}, "num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers should be"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"hidden_size": 66}, "do not fill"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(change: Json, named: str, outline: Any) -> None:
    fault = refusal(outline, llama(2, 64, 128, 4, 2, model_type="unheard_of") | change)
    assert named in fault.message
    assert "some-model.json" in fault.message


def test_a_checkpoint_that_is_quantised_takes_what_its_files_take(tmp_path: Path) -> None:
    values = llama(2, 64, 128, 4, 2, quantization_config={"quant_method": "gptq", "bits": 4})
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_outline(tmp_path).weights is None
    index = {"metadata": {"total_size": 12345}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_outline(tmp_path).weights == 12345
    assert read_outline(tmp_path / "config.json").weights == 12345
    assert refusal(read_outline, tmp_path, "auto", "int8").code == "bad_setting"


def test_no_configuration(tmp_path: Path) -> None:
    assert refusal(read_outline, tmp_path).code == "config_missing"
    assert refusal(read_outline, tmp_path / "config.json").code == "config_corrupt"
    (tmp_path / "config.json").write_text("[]")
    assert "JSON object" in refusal(read_outline, tmp_path).message


# -- GGUF ----------------------------------------------------------------------------------------------------

TINY = GOLDENS / "tiny_llama.gguf"


def header_of(path: Path, metadata: dict[str, Value], tensors: dict[str, Tensor]) -> Path:
    """A GGUF file that ends where its tensors would begin."""
    rows = {name: (number, shape, b"") for name, (number, shape, _) in tensors.items()}
    path.write_bytes(gguf_bytes(metadata, rows))
    return path


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize("gpu_kv", [False, True])
def test_kv_is_counted_as_the_backend_stores_it(dtype: str, gpu_kv: bool) -> None:
    _, spec, _ = open_model(TINY)
    outline = replace(read_outline(TINY), gpu_kv=gpu_kv)
    stored = spec.kv_spec(1, 16, dtype, gpu_kv)
    assert outline.bytes_per_token(dtype) == stored.bytes_per_token
    assert rank_kv_bytes(outline, dtype, spec.kv_heads) * spec.kv_heads == stored.bytes_per_token


def test_a_gguf_file_and_its_header_alone(tmp_path: Path) -> None:
    file, spec, _ = open_model(TINY)
    whole = read_outline(TINY)
    assert whole.kv == (KVLayers(spec.layers, spec.kv_heads, spec.head_dim, spec.head_dim),)
    assert whole.weights == sum(info.nbytes for info in file.tensors.values())
    begin = min(info.offset for info in file.tensors.values())
    part = tmp_path / TINY.name
    part.write_bytes(TINY.read_bytes()[:begin])
    assert read_outline(part) == whole
    assert refusal(open_gguf, part).code == "gguf_truncated"
    part.write_bytes(TINY.read_bytes()[: begin // 2])
    assert refusal(read_outline, part).code == "gguf_truncated"


def test_the_usual_keys_agree_with_the_spec_of_a_gguf_file() -> None:
    for name in ("tiny_llama", "tiny_qwen3", "experts_qwen3moe"):
        path = GOLDENS / f"{name}.gguf"
        exact, file = read_outline(path), open_header(path)
        usual = gguf_usual(file, exact.arch)
        assert (usual.heads, usual.kv, usual.context) == (exact.heads, exact.kv, exact.context)


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """The outline of a GGUF file of an architecture that nobody runs here; ... takes a key away."""

    def read(**changes: Any) -> Outline:
        keys: dict[str, Any] = {
            "block_count": 4,
            "embedding_length": 64,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "context_length": 100,
        }
        keys |= {key.replace("__", "."): value for key, value in changes.items()}
        metadata = {f"other.{key}": value for key, value in keys.items() if value is not ...}
        path = tmp_path / "other.gguf"
        path.write_bytes(
            gguf_bytes(
                {"general.architecture": "other", **metadata},
                {"token_embd.weight": float_tensor(8, 64)},
            )
        )
        return read_outline(path)

    return read


def test_gguf_files_of_other_architectures(other: Any) -> None:
    plain = other()
    assert plain.kv == (KVLayers(4, 2, 16, 16),)
    assert plain.weights == 8 * 64 * 4
    assert "other" in plain.why_not
    assert other(attention__head_count_kv=...).kv == (KVLayers(4, 4, 16, 16),)
    assert other(attention__key_length=32, attention__value_length=24).kv == (
        KVLayers(4, 2, 32, 24),
    )
    assert other(attention__head_count_kv=[2, 0, 1, 2]).kv == (
        KVLayers(2, 2, 16, 16),
        KVLayers(1, 1, 16, 16),
    )
    assert other(nextn_predict_layers=1).kv == (KVLayers(3, 2, 16, 16),)
    latent = other(attention__kv_lora_rank=12, rope__dimension_count=4)
    assert latent.kv == (KVLayers(4, 1, 16, 0),)
    windows = other(
        attention__sliding_window=8, attention__sliding_window_pattern=[True, True, True, False]
    )
    mixed = [KVLayers(1, 2, 16, 16), KVLayers(3, 2, 16, 16, 8)]
    assert sorted(windows.kv, key=lambda kind: kind.window) == mixed
    every = other(attention__sliding_window=8, attention__sliding_window_pattern=4)
    assert sorted(every.kv, key=lambda kind: kind.window) == mixed


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ssm__state_size": 128}, "ssm.state_size"),
        ({"attention__shared_kv_layers": 2}, "shared_kv_layers"),
        ({"attention__sliding_window": 8}, "sliding_window_pattern"),
        ({"attention__causal": False}, "encoder"),
        ({"attention__head_count": ...}, "head_count"),
        ({"block_count": ...}, "block_count"),
        ({"block_count": 0}, "block_count"),
        ({"nextn_predict_layers": 4}, "0 layers"),
        ({"attention__head_count_kv": [2, 2]}, "each of 4 layers"),
        ({"embedding_length": ...}, "embedding_length"),
    ],
)
def test_gguf_files_that_are_refused(change: dict[str, Any], named: str, other: Any) -> None:
    with engine_fault(named):
        other(**change)


def test_a_vocabulary_is_no_model(tmp_path: Path) -> None:
    metadata, _ = taken_apart(TINY)
    fault = refusal(read_outline, header_of(tmp_path / "vocab.gguf", metadata, {}))
    assert fault.code == "vocabulary_only"
    assert "vocab.gguf" in fault.message


def test_one_of_several_files(tmp_path: Path) -> None:
    metadata, tensors = taken_apart(TINY)
    path = tmp_path / "model-00001-of-00003.gguf"
    split: dict[str, Any] = {"split.no": 0, "split.count": 3}
    path.write_bytes(gguf_bytes(metadata | split, tensors))
    found = read_outline(path)
    assert found.weights is None
    assert "2 are missing" in found.weights_from
    assert replace(found, weights=0, weights_from="") == replace(
        read_outline(TINY), name="model", weights=0, weights_from=""
    )


def test_a_sequence_has_two_states_beside_its_kv() -> None:
    """Four value heads of 16 x 16 in fp32, three rows of 128 columns in fp16 before each state, and the rows of a
    chunk; three layers."""
    outline = read_outline(GOLDENS / "families" / "qwen3_5")
    state = 3 * (4 * 16 * 16 * 4 + 3 * 128 * 2)
    tail = 3 * (4 * 32 * 4 + 2 * 16 * 32 * 2 + 4 * 16 * 32 * 2 + 32 * 128 * 2)
    storage = outline.recurrent("float16")
    assert storage is not None
    assert (storage.state_bytes, storage.tail_bytes) == (state, tail)
    kv = 2 * 2 * 32 * 2
    planner = KVPlanner(outline, "float16", 16, 512, 1 << 20)
    assert planner.sequence_bytes(100) == 112 * kv + 2 * (state + tail)
    assert read_outline(GOLDENS / "families" / "qwen3").recurrent("float16") is None
