"""--load-format dummy: random weights of every family's config.json, the same for the same seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pageturner import LLM, SamplingParams
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.models.dummy import open_dummy
from pageturner.models.load import load_model
from support import decoding as by_hand
from support.engines import GOLDENS
from support.refusals import engine_fault

FAMILIES = GOLDENS / "families"


def only_config(tmp_path: Path, family: str, **changes: object) -> Path:
    folder = tmp_path / family
    folder.mkdir()
    values = json.loads((FAMILIES / family / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("family", sorted(one.name for one in FAMILIES.iterdir()))
def test_each_family_computes_with_random_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_hand, "poison_blocks", lambda kv, blocks: None)
    folder = only_config(tmp_path, family)
    ops = by_hand.backend("reference")
    runs = by_hand.Decoding(load_model(folder, ops, load_format="dummy"), ops)
    logits = runs.step([("p", [1, 2, 3, 4])])[0]
    assert np.isfinite(logits).all()
    assert 1e-3 < logits.std() < 1e3


def test_a_seed_gives_the_same_weights_and_another_one_others(tmp_path: Path) -> None:
    folder = only_config(tmp_path, "llama3")

    def of(seed: int) -> dict[str, bytes]:
        file = open_dummy(folder, seed)[0]
        return {name: bytes(file.tensor(name)[2]) for name in file.tensors}

    first, again, other = of(1), of(1), of(2)
    assert first == again
    matrices = [name for name in first if name.endswith("proj.weight")]
    assert all(first[name] != other[name] for name in matrices)
    assert len({first[name][:64] for name in matrices}) == len(matrices)


def test_matrices_are_of_the_type_that_the_configuration_says(tmp_path: Path) -> None:
    for dtype, kind in (("float16", "F16"), ("bfloat16", "BF16"), ("float32", "F32")):
        folder = only_config(tmp_path / ".", "llama3", torch_dtype=dtype, dtype=dtype)
        kinds = {
            info.kind for info in open_dummy(folder, 0)[0].tensors.values() if len(info.shape) > 1
        }
        assert kinds == {kind}
        shutil.rmtree(folder)


def test_what_has_no_random_weights_is_refused(tmp_path: Path) -> None:
    quantised = only_config(tmp_path, "llama3", quantization_config={"quant_method": "gptq"})
    for path, advice in (
        (quantised, "--quantization int8"),
        (GOLDENS / "tiny_llama.gguf", "is a file"),
    ):
        with engine_fault(advice, code="bad_setting"):
            open_dummy(path, 0)


def test_without_a_tokenizer_bytes_stand_in_for_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = only_config(tmp_path, "llama3")
    with engine_fault("no tokenizer"):
        load_tokenizer(folder)
    tokenizer = load_tokenizer(folder, "dummy")
    assert tokenizer.encode("é!", add_special=True, parse_special=True) == [195, 169, 33]
    assert tokenizer.token_bytes(300) == b" t300"
    assert "stands in" in capfd.readouterr().err


def test_llm_answers_with_random_weights(tmp_path: Path) -> None:
    folder = only_config(tmp_path, "llama3")
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    answers = []
    for seed in (3, 3, 4):
        llm = LLM(str(folder), load_format="dummy", load_seed=seed, backend="reference")
        (found,) = llm.generate(["hello"], greedy)
        answers.append(found.outputs[0].token_ids)
    assert answers[0] == answers[1] != answers[2]
    assert len(answers[0]) == 5


def test_a_tensor_that_experts_share_is_made_once(tmp_path: Path) -> None:
    file, _, layout = open_dummy(only_config(tmp_path, "gemma4_26b"), 1)
    names = {part.name for part in layout.several[0]["gates"] + layout.several[0]["ups"]}
    assert len(names) == 1
    name = names.pop()
    assert file.tensor(name)[2] is file.tensor(name)[2]
