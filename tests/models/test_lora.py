"""LoRA adapters: against Transformers with PEFT, against themselves in other batches, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gguf_newer import converted

from pageturner.kernels.adapters import FIELDS, MAX_RANK
from pageturner.kernels.base import Ops
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model, open_model
from pageturner.models.lora import CONFIG, REFUSED, WEIGHTS, load_adapter, read_folder
from support.adapters import TOP, random_weights, write_adapter
from support.decoding import Decoding, backend
from support.refusals import engine_fault

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES, ADAPTERS = GOLDENS / "families", GOLDENS / "adapters"
NAMES = sorted(path.name for path in ADAPTERS.iterdir())
BACKENDS = ("reference", "native")
SPEC = open_model(FAMILIES / "llama3")[1]


@cache
def loaded(family: str, ops_name: str) -> tuple[Decoder, Ops]:
    ops = backend(ops_name)
    return load_model(FAMILIES / family, ops, dtype="float32"), ops


def with_adapter(name: str, ops_name: str) -> tuple[Decoder, Ops]:
    decoder, ops = loaded(name.removesuffix("_head"), ops_name)
    if name not in decoder.adapters:
        weights = load_adapter(read_folder(ADAPTERS / name), decoder.spec)
        decoder.adapters[name] = decoder.pack_adapter(weights)
    return decoder, ops


@pytest.mark.parametrize("ops_name", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers_with_peft(name: str, ops_name: str) -> None:
    decoder, ops = with_adapter(name, ops_name)
    truth = np.load(ADAPTERS / name / "golden.npz")
    for i in range(2):
        got = Decoding(decoder, ops, adapters={"p": name}).step(
            [("p", truth[f"prompt_{i}"].tolist())]
        )[0]
        np.testing.assert_allclose(got[-8:], truth[f"logits_{i}"], atol=1e-4, rtol=0)


def test_a_gguf_file_takes_an_adapter_of_its_model(tmp_path: Path) -> None:
    """In GGUF's `llama` the rows of q and k lie in another order than in the adapter."""
    (tmp_path / "m.gguf").write_bytes(converted(FAMILIES / "mistral", "llama", {}, {}))
    ops = backend("reference")
    there, (here, _) = load_model(tmp_path / "m.gguf", ops), with_adapter("mistral", "reference")
    there.adapters["a"] = there.pack_adapter(
        load_adapter(read_folder(ADAPTERS / "mistral"), there.spec)
    )
    prompt = [5, 80, 33, 107, 260]  # within the window that the other file has
    plain = Decoding(there, ops).step([("p", prompt)])[0]
    got = Decoding(there, ops, adapters={"p": "a"}).step([("p", prompt)])[0]
    truth = Decoding(here, ops, adapters={"p": "mistral"}).step([("p", prompt)])[0]
    np.testing.assert_allclose(got, truth, atol=1e-4, rtol=0)
    assert np.abs(got - plain).max() > 1


PROMPTS = {
    "all": [5, 9, 33, 71, 8, 250],
    "attention": [7] * 20,
    "none": list(range(3, 14)),
    "mlp": [9, 8, 7],
    "large": [5, 9, 33, 71, 8, 250],
    "again": [5, 9, 33],
}
WHO = {"all": "a", "attention": "b", "mlp": "c", "large": "d", "again": "a"}
OF = {
    "a": ((*FIELDS, *TOP), 4, "F32"),
    "b": (("q", "v"), 8, "F32"),
    "c": (("gate", "down"), 3, "F32"),
    "d": (FIELDS, 70, "F32"),
}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("family", ["llama3", "gemma2"])
@pytest.mark.parametrize("isa", ["reference", *available_isas()])
def test_a_mix_of_adapters_changes_no_bit(family: str, isa: str, kind: str) -> None:
    """Alone, in a mix, token by token, and on any number of threads."""
    every: list[np.ndarray] = []
    for threads in (1,) if isa == "reference" else (1, 3):
        ops = backend("reference") if isa == "reference" else NativeOps(threads, isa)
        decoder = load_model(FAMILIES / family, ops, dtype="float32")
        for seed, (name, (fields, rank, _)) in enumerate(OF.items()):
            decoder.adapters[name] = decoder.pack_adapter(
                random_weights(decoder.spec, fields, rank, seed, kind)
            )
        mixed = Decoding(decoder, ops, adapters=WHO).step(list(PROMPTS.items()))
        for (name, prompt), rows in zip(PROMPTS.items(), mixed, strict=True):
            alone = Decoding(decoder, ops, adapters=WHO).step([(name, prompt)])[0]
            np.testing.assert_array_equal(alone, rows)
        single = Decoding(decoder, ops, adapters=WHO)
        rows = np.concatenate([single.step([("all", [token])])[0] for token in PROMPTS["all"]])
        np.testing.assert_array_equal(rows, mixed[0])
        np.testing.assert_array_equal(mixed[0][:3], mixed[-1])
        assert np.abs(mixed[0] - mixed[4]).max() > 0.1
        every.append(np.concatenate(mixed))
    np.testing.assert_array_equal(every[0], every[-1])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("family", ["llama3", "qwen2", "gemma2", "opt"])
def test_native_kernels_compute_what_the_reference_does(family: str, kind: str) -> None:
    found = []
    for ops in (backend("reference"), backend("native")):
        decoder = load_model(FAMILIES / family, ops, dtype="float32")
        fields = tuple(
            field for field in (*FIELDS, *TOP) if field != "gate" or decoder.spec.family.gated
        )
        decoder.adapters["a"] = decoder.pack_adapter(
            random_weights(decoder.spec, fields, 5, 0, kind)
        )
        found.append(Decoding(decoder, ops, adapters={"p": "a"}).step([("p", PROMPTS["none"])])[0])
    np.testing.assert_allclose(found[0], found[1], atol=2e-4)


@pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")
@pytest.mark.parametrize("isa", available_isas())
def test_whole_pieces_of_many_rows(isa: str) -> None:
    """More rows than a block of a segment, a slice of the MLP and a tile have."""
    ops = NativeOps(2, isa)
    decoder = load_model(FAMILIES / "llama3", ops, dtype="float32")
    for seed, name in enumerate("ab"):
        decoder.adapters[name] = decoder.pack_adapter(random_weights(decoder.spec, FIELDS, 9, seed))
    prompts = {"x": [i % 300 for i in range(500)], "y": [i % 77 for i in range(130)]}
    who = {"x": "a", "y": "b"}
    together = Decoding(decoder, ops, adapters=who).step(list(prompts.items()))
    for (name, prompt), rows in zip(prompts.items(), together, strict=True):
        apart = Decoding(decoder, ops, adapters=who)
        parts = [apart.step([(name, prompt[i : i + 50])])[0] for i in range(0, len(prompt), 50)]
        np.testing.assert_array_equal(np.concatenate(parts), rows)


def spoilt(folder: Path, change: dict[str, Any]) -> None:
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def refusal(folder: Path) -> tuple[str, str]:
    with engine_fault() as caught:
        load_adapter(read_folder(folder), SPEC)
    return caught.value.code, caught.value.message


CONFIGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "dora": ({"use_dora": True}, "adapter_unsupported", "DoRA"),
    "ia3": ({"peft_type": "IA3"}, "adapter_unsupported", "IA3"),
    "pissa": ({"init_lora_weights": "pissa"}, "adapter_unsupported", "pissa"),
    "biases": ({"bias": "all"}, "adapter_unsupported", "bias"),
    "modules": ({"modules_to_save": ["lm_head"]}, "adapter_unsupported", "modules_to_save"),
    "rank": ({"r": MAX_RANK + 1}, "adapter_rank", "257"),
    "another rank": ({"r": 4}, "adapter_shape", "rank 8"),
    "no rank": ({"r": "8"}, "adapter_config", "whole number"),
    "alpha": ({"lora_alpha": "nan"}, "adapter_config", "lora_alpha"),
    "pattern": ({"rank_pattern": {"(": 8}}, "adapter_config", "no pattern"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_settings_that_are_not_computed_are_refused_by_name(tmp_path: Path, case: str) -> None:
    change, code, word = CONFIGS[case]
    folder = write_adapter(tmp_path / "a", SPEC)
    load_adapter(read_folder(folder), SPEC)
    spoilt(folder, change)
    found = refusal(folder)
    assert found[0] == code
    assert word in found[1]


def test_each_setting_that_is_refused_has_a_value_that_is_not() -> None:
    for what, plain in REFUSED.values():
        assert what
        assert None in plain


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    other = replace(SPEC, dim=48)
    code, message = refusal(
        write_adapter(tmp_path / "a", other, base_model_name_or_path="org/other")
    )
    assert code == "adapter_mismatch"
    assert "org/other" in message
    assert "q_proj" in message


def test_layers_that_the_model_has_not(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", replace(SPEC, layers=3))
    code, message = refusal(folder)
    assert code == "adapter_mismatch"
    assert "layers.2" in message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_values_that_are_no_numbers(tmp_path: Path, kind: str, value: float) -> None:
    folder = write_adapter(tmp_path / "a", SPEC, kind=kind)
    raw = bytearray((folder / WEIGHTS).read_bytes())
    number = np.array([value], np.float32)
    raw[-4:] = {
        "F32": number.tobytes(),
        "F16": number.astype(np.float16).tobytes() * 2,
        "BF16": (number.view(np.uint32) >> 16).astype(np.uint16).tobytes() * 2,
    }[kind]
    (folder / WEIGHTS).write_bytes(raw)
    assert refusal(folder)[0] == "adapter_values"


def test_a_folder_half_written(tmp_path: Path) -> None:
    whole = write_adapter(tmp_path / "whole", SPEC)
    raw = (whole / WEIGHTS).read_bytes()
    for cut in (0, 3, 100, len(raw) // 2, len(raw) - 1):
        folder = tmp_path / f"cut{cut}"
        shutil.copytree(whole, folder)
        (folder / WEIGHTS).write_bytes(raw[:cut])
        assert refusal(folder)[0] in ("safetensors_truncated", "safetensors_corrupt")
    for name in (CONFIG, WEIGHTS):
        folder = tmp_path / f"without {name}"
        shutil.copytree(whole, folder)
        (folder / name).unlink()
        code, message = refusal(folder)
        assert code == "adapter_missing"
        assert name in message
    (whole / CONFIG).write_text("{")
    assert refusal(whole)[0] == "adapter_config"
    assert refusal(tmp_path / "nowhere")[0] == "adapter_missing"


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    one, same, other = (
        read_folder(write_adapter(tmp_path / name, SPEC, seed=seed)).digest
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one == same != other
    spoilt(tmp_path / "same", {"lora_alpha": 3})
    assert read_folder(tmp_path / "same").digest != one
