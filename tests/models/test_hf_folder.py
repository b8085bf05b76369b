"""Hugging Face folders: configurations that are understood, and bad ones refused by name."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.load import load_model
from pageturner.models.rope import RopeSpec, rope_tables
from pageturner.models.spec import ModelSpec, alibi_slopes
from support.refusals import engine_fault
from support.safetensors_writer import tensors_of
from support.safetensors_writer import write_safetensors as write

FAMILIES = Path(__file__).parents[1] / "goldens" / "families"
OPS = ReferenceOps()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the sharded model, to be damaged."""
    return Path(shutil.copytree(FAMILIES / "llama3", tmp_path / "model"))


def fault(folder: Path) -> EngineFault:
    with engine_fault() as caught:
        load_model(folder, OPS)
    return caught.value


def config(name: str = "llama3", **changes: object) -> dict[str, Any]:
    values = json.loads((FAMILIES / name / "config.json").read_text()) | changes
    return {key: value for key, value in values.items() if value is not ...}


def spec(name: str = "llama3", **changes: object) -> ModelSpec:
    return read_hf_spec(config(name, **changes), "config.json", "x", has_head=False)


def joined(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The shards of a folder as one dictionary; they are taken out of the folder."""
    tensors = tensors_of(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    return tensors


# -- weights -------------------------------------------------------------------------------------------------


def test_shards_and_one_file_are_the_same(folder: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 2
    truth = joined(folder)
    write(folder / "model.safetensors", truth)
    assert tensors_of(folder) == truth
    load_model(folder, OPS)


def test_names_without_the_outermost_module(folder: Path) -> None:
    tensors = {name.removeprefix("model."): tensor for name, tensor in joined(folder).items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = (
        "F32",
        (4,),
        bytes(16),
    )  # old files carry it
    write(folder / "model.safetensors", tensors)
    load_model(folder, OPS)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    error = fault(folder)
    assert (error.code, shard.name in error.message) == ("shard_missing", True)


def test_weights_in_another_format(folder: Path) -> None:
    joined(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    error = fault(folder)
    assert (error.code, "pytorch_model.bin" in error.message) == ("weights_missing", True)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "code"),
    [
        (Q, None, "tensor_missing"),
        (Q, ("F32", (32, 16), bytes(2048)), "tensor_shape"),
        (Q, ("F32", (32, 32, 1), bytes(4096)), "tensor_shape"),
        (Q, ("F8_E4M3", (32, 32), bytes(1024)), "weight_kind"),
        (Q, ("F4", (32, 32), bytes(512)), "weight_kind"),
        (Q, ("F32", (32, 32), bytes(4092)), "safetensors_corrupt"),
        (Q, ("F32", (-32, -32), bytes(4096)), "safetensors_corrupt"),
        ("model.layers.1.self_attn.q_norm.weight", ("F32", (32,), bytes(128)), "tensor_unexpected"),
        (
            "model.layers.2.self_attn.q_proj.weight",
            ("F32", (32, 32), bytes(4096)),
            "tensor_unexpected",
        ),
    ],
)
def test_bad_tensors_are_named(
    folder: Path, name: str, tensor: tuple[str, tuple[int, ...], bytes] | None, code: str
) -> None:
    tensors = joined(folder)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    write(folder / "model.safetensors", tensors)
    error = fault(folder)
    assert (error.code, name in error.message) == (code, True)


def test_damaged_headers_load_or_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    write(path, joined(folder))
    sound, draw, refused = path.read_bytes(), random.Random(3), 0
    size = 8 + struct.unpack("<Q", sound[:8])[0]
    for _ in range(200):
        raw = bytearray(sound)
        for _ in range(draw.randint(1, 3)):
            raw[draw.randrange(size)] = draw.choice(
                (0, 0x22, 0x39, 0x7D, 0xFF, draw.randrange(256))
            )
        path.write_bytes(raw[: draw.choice((len(raw), draw.randrange(len(raw))))])
        try:
            load_model(folder, OPS)
        except EngineFault:
            refused += 1
    assert 100 < refused <= 200


# -- configurations ------------------------------------------------------------------------------------------


def test_folders_that_are_none(tmp_path: Path) -> None:
    assert fault(tmp_path).code == "config_missing"
    (tmp_path / "config.json").write_text("{")
    assert fault(tmp_path).code == "config_corrupt"
    (tmp_path / "config.json").write_text("[]")
    assert fault(tmp_path).code == "config_corrupt"


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"model_type": "mamba"}, "model_unsupported", "mamba"),
        ({"some_new_thing": 3}, "model_unsupported", "some_new_thing = 3"),
        ({"mlp_bias": True}, "model_unsupported", "mlp_bias"),
        ({"hidden_act": "mish"}, "model_unsupported", "mish"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "model_unsupported", "mrope"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "config_invalid", "short_factor"),
        ({"rope_parameters": {"rope_type": "linear"}}, "config_invalid", "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "model_invalid", "factor 0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "new": 1}},
            "model_unsupported",
            "new",
        ),
        ({"rope_parameters": 5}, "config_invalid", "rope_parameters"),
        ({"hidden_size": ...}, "config_invalid", "hidden_size"),
        ({"hidden_size": "32"}, "config_invalid", "hidden_size"),
        ({"hidden_size": 0}, "model_invalid", "hidden_size"),
        ({"num_key_value_heads": 3}, "model_invalid", "3 KV heads"),
        ({"rms_norm_eps": True}, "config_invalid", "rms_norm_eps"),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "model_unsupported",
            "layer_types",
        ),
    ],
)
def test_bad_configurations_are_refused_by_name(
    changes: dict[str, object], code: str, says: str
) -> None:
    with engine_fault() as caught:
        spec(**changes)
    assert (caught.value.code, says in caught.value.message) == (code, True), caught.value.message


def test_old_and_new_ways_to_say_the_same() -> None:
    new = config()["rope_parameters"]
    scaling = {key: value for key, value in new.items() if key not in ("rope_theta", "rope_type")}
    old = spec(
        rope_parameters=..., rope_theta=new["rope_theta"], rope_scaling=scaling | {"type": "llama3"}
    )
    assert old == spec()
    assert spec(rope_parameters=...).rope == RopeSpec(10_000.0, 8)


def test_windows_by_list_and_by_habit() -> None:
    assert spec("mistral").windowed == {0, 1}
    assert spec("mistral", sliding_window=None).windowed == frozenset()
    assert spec("gemma2", layer_types=..., num_hidden_layers=5).windowed == {0, 2, 4}
    thirteen = spec("gemma3", layer_types=..., num_hidden_layers=13)
    assert set(range(13)) - thirteen.windowed == {5, 11}
    assert (thirteen.rope_of(0).base, thirteen.rope_of(5).base) == (10_000, 1_000_000)
    qwen = {
        "layer_types": ...,
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": 1,
    }
    assert spec("qwen2", **qwen).windowed == {1}
    assert spec("qwen2", **(qwen | {"use_sliding_window": False})).windowed == frozenset()
    window = spec("mistral")
    assert [window.attention(0, positions).window for positions in (8, 9)] == [0, 8]


def test_tied_as_said_or_as_found() -> None:
    values = config(tie_word_embeddings=...)
    found = [read_hf_spec(values, "c", "x", has_head=has).tied for has in (False, True)]
    assert found == [True, False]
    assert read_hf_spec(config(tie_word_embeddings=True), "c", "x", has_head=True).tied


def test_alibi_slopes() -> None:
    assert alibi_slopes(4) == (2**-2, 2**-4, 2**-6, 2**-8)
    assert alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)


def test_dynamic_scaling_changes_nothing_within_the_context() -> None:
    plain, dynamic = (
        rope_tables(rope, 64) for rope in (RopeSpec(1e4, 8), RopeSpec(1e4, 8, 4.0, kind="dynamic"))
    )
    np.testing.assert_array_equal(plain.cos, dynamic.cos)
