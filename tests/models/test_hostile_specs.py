"""Configurations that somebody made in order to hurt: refused before anything is listed or allocated."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.kernels.reference import ReferenceOps
from pageturner.lab.planning.model_outline import read_outline
from pageturner.models import load
from pageturner.models.hf_spec import read_hf_spec
from pageturner.models.load import check_tables, load_model, open_model
from pageturner.models.rope import RopeSpec, rope_tables
from pageturner.models.spec import ModelSpec, check_spec
from support import gguf_writer as w
from support.hf_folder import GOLDENS, make_folder, write_json
from support.refusals import engine_fault

FAMILIES = GOLDENS / "families"
HUGE = (1_000_000, 2**31 - 1)


def config(family: str, **changes: Any) -> dict[str, Any]:
    return json.loads((FAMILIES / family / "config.json").read_text()) | changes


def spec(family: str = "llama3", **changes: Any) -> ModelSpec:
    return read_hf_spec(config(family, **changes), "config.json", "x", has_head=False)


def rope(**values: Any) -> dict[str, Any]:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 64,
    }
    return {"rope_parameters": yarn | values}


def faulty(read: Any) -> EngineFault:
    """The fault, which took little memory."""
    tracemalloc.start()
    with engine_fault() as caught:
        read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30_000_000
    return caught.value


@pytest.mark.parametrize(
    ("family", "changes", "code"),
    [
        *(("llama3", {"num_hidden_layers": n}, "model_invalid") for n in HUGE),
        *(
            ("mistral", {"num_hidden_layers": n, "layer_types": None}, "model_invalid")
            for n in HUGE
        ),
        *(("gpt2", {"n_layer": n}, "model_invalid") for n in HUGE),
        *(("opt", {"num_hidden_layers": n}, "model_invalid") for n in HUGE),
        *(("bloom", {"n_layer": n}, "model_invalid") for n in HUGE),
        *(("bloom", {"n_head": n, "hidden_size": n}, "model_invalid") for n in HUGE),
        *(("mixtral", {"num_local_experts": n}, "model_invalid") for n in HUGE),
        ("llama3", {"max_position_embeddings": 1}, "model_invalid"),
        ("llama3", {"max_position_embeddings": 2**63}, "model_invalid"),
        ("llama3", {"partial_rotary_factor": float("inf")}, "model_invalid"),
        ("llama3", {"partial_rotary_factor": float("nan")}, "model_invalid"),
        ("llama3", rope(partial_rotary_factor=1e300), "model_invalid"),
        ("llama3", rope(factor=float("inf")), "model_invalid"),
        ("llama3", rope(factor=float("nan")), "model_invalid"),
        ("llama3", rope(factor=1e-320), "model_invalid"),
        ("llama3", rope(factor=1e9), "model_invalid"),
        ("llama3", rope(beta_slow=1e-320), "model_invalid"),
        ("llama3", rope(rope_theta=1e308), "model_invalid"),
        ("llama3", rope(attention_factor=1e300), "model_invalid"),
        ("llama3", {"rms_norm_eps": float("nan")}, "model_invalid"),
        ("qwen3_moe", {"mlp_only_layers": 5}, "config_invalid"),
        ("qwen3_moe", {"mlp_only_layers": [[0]]}, "config_invalid"),
    ],
)
def test_hostile_configurations(family: str, changes: dict[str, Any], code: str) -> None:
    assert faulty(lambda: spec(family, **changes)).code == code


def test_windows_from_a_negative_layer_on() -> None:
    changes = {"layer_types": None, "sliding_window": 8, "use_sliding_window": True}
    assert spec("qwen2", **changes, max_window_layers=-(10**18)).windowed == {0, 1}


@pytest.mark.parametrize("layers", [100, 3000, *HUGE])
def test_more_layers_than_tensors_in_a_folder(layers: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    write_json(folder / "config.json", config("llama3", num_hidden_layers=layers))
    fault = faulty(lambda: load_model(folder, ReferenceOps()))
    assert fault.code == ("tensor_missing" if layers == 100 else "model_invalid")
    assert str(folder) in fault.message


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *(("tiny_llama", "llama.block_count", n) for n in (3000, *HUGE)),
        *(("experts_qwen3moe", "qwen3moe.expert_count", n) for n in (3000, *HUGE)),
        *(("tiny_llama", "llama.attention.head_count", n) for n in HUGE),
        ("tiny_llama", "llama.context_length", 1),
        ("tiny_llama", "llama.rope.freq_base", float("nan")),
        ("tiny_llama", "llama.rope.freq_base", 1e30),
        ("tiny_llama", "llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("tiny_llama", "llama.attention.scale", float("inf")),
    ],
)
def test_hostile_keys_of_gguf(name: str, key: str, value: Any, tmp_path: Path) -> None:
    metadata, tensors = w.taken_apart(GOLDENS / f"{name}.gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(w.gguf_bytes(metadata | {key: value}, tensors))
    fault = faulty(lambda: open_model(path))
    assert (fault.code, str(path) in fault.message) == ("model_invalid", True)


def test_divisors_of_a_type_that_divides_nothing(tmp_path: Path) -> None:
    metadata, tensors = w.taken_apart(GOLDENS / "tiny_llama.gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes(w.gguf_bytes(metadata, tensors | {"rope_freqs.weight": (24, (4,), bytes(4))}))
    assert faulty(lambda: load_model(path, ReferenceOps())).code == "weight_kind"


@pytest.mark.parametrize("layers", HUGE)
def test_plans_of_what_nobody_has(layers: int, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for kind in ({}, {"model_type": "unheard_of"}, {"model_type": "gemma9", "sliding_window": 8}):
        write_json(path, config("llama3", num_hidden_layers=layers) | kind)
        assert faulty(lambda: read_outline(path)).code == "model_invalid"
    metadata, tensors = w.taken_apart(GOLDENS / "tiny_llama.gguf")
    other = {key.replace("llama.", "other."): value for key, value in metadata.items()}
    other |= {"general.architecture": "other", "other.block_count": layers}
    (tmp_path / "m.gguf").write_bytes(w.gguf_bytes(other, tensors))
    assert faulty(lambda: read_outline(tmp_path / "m.gguf")).code == "model_invalid"


def test_a_family_that_writes_to_the_terminal(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config("llama3", model_type="\x1b[2J"))
    outline = read_outline(tmp_path / "config.json")
    assert (outline.arch, outline.why_not.isprintable()) == ("\\x1b[2J", True)


def test_an_index_that_says_nothing_of_use(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    for text in (
        '{"metadata": {"total_size": 1e999}}',
        "[" * 99_999,
        '{"metadata": []}',
        "9" * 9999,
    ):
        (folder / "model.safetensors.index.json").write_text(text)
        assert read_outline(folder).weights


def test_tables_are_the_same_whatever_is_computed_at_once() -> None:
    short, long = (rope_tables(RopeSpec(1e4, 8), positions) for positions in (1000, 40_000))
    np.testing.assert_array_equal(short.cos, long.cos[:1000])
    np.testing.assert_array_equal(long.sin[-1], rope_tables(RopeSpec(1e4, 8), 40_001).sin[39_999])


def test_a_context_whose_tables_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load.memory, "available", lambda: 100_000_000)
    long = replace(spec(), context=1 << 22)
    check_tables(check_spec(long), 1000)
    with engine_fault(r"0\.1 GB of rotary tables.*--max-model-len", code="model_memory"):
        check_tables(long, 1 << 22)


def test_memory_that_ends_while_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(load, "load_weights", full)
    fault = faulty(lambda: load_model(GOLDENS / "tiny_llama.gguf", ReferenceOps()))
    assert (fault.code, "tiny_llama.gguf" in fault.message) == ("model_memory", True)
