"""Without native kernels, or without the instructions they want: slower kernels run, warned, same answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.backends import make_ops
from pageturner.engine.engine_factory import make_engine
from pageturner.kernels.cpu import native_module
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.refusals import engine_fault

GOLDENS = Path(__file__).parent.parent / "goldens"
MODEL = str(GOLDENS / "tiny_llama.gguf")


def golden() -> tuple[list[int], list[int]]:
    recorded = np.load(GOLDENS / "tiny_llama.npz")
    return recorded["prompt_1"].tolist(), recorded["greedy_1"].tolist()


def greedy(config: EngineConfig) -> list[int]:
    prompt, expected = golden()
    engine = make_engine(config).engine
    params = SamplingParams(temperature=0.0, max_tokens=len(expected), ignore_eos=True)
    engine.submit(Request(1, tuple(prompt), params))
    tokens: list[int] = []
    while engine.scheduler.has_work:
        tokens += [token for event in engine.step() for token in event.tokens]
    return tokens


def test_without_the_compiled_module_the_reference_runs_warned() -> None:
    prompt, expected = golden()
    program = f"""
import sys
sys.modules["pageturner.kernels._native"] = None  # as if it had never been compiled
from pageturner import LLM, SamplingParams
llm = LLM({MODEL!r})
params = SamplingParams(temperature=0.0, max_tokens={len(expected)}, ignore_eos=True)
print(llm.built.fingerprint, llm.generate([{prompt}], params)[0].outputs[0].token_ids)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("reference")
    assert str(expected) in done.stdout
    assert "RuntimeWarning" in done.stderr
    assert "compiler" in done.stderr, "it says what to do"


def test_a_cpu_without_avx2_runs_portable_code_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native_module.available_isas():
        pytest.skip("the native kernels are not built")
    monkeypatch.setattr(native_module, "available_isas", lambda: ["portable"])
    monkeypatch.delenv("PAGETURNER_ISA", raising=False)
    with pytest.warns(RuntimeWarning, match="lacks AVX2"):
        tokens = greedy(EngineConfig(model=MODEL, kv_cache_dtype="float32"))
    assert tokens == golden()[1]


@pytest.mark.parametrize("isa", native_module.available_isas() or ["none"])
def test_every_instruction_set_gives_the_recorded_answer(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isa == "none":
        pytest.skip("the native kernels are not built")
    monkeypatch.setenv("PAGETURNER_ISA", isa)
    assert (
        greedy(EngineConfig(model=MODEL, backend="native", kv_cache_dtype="float32")) == golden()[1]
    )


def test_asking_for_native_kernels_that_are_not_there_is_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_module, "available_isas", list)
    monkeypatch.setattr(
        native_module, "supported", lambda: (False, "not built: install a compiler")
    )
    with engine_fault("not built", code="no_native_backend"):
        make_ops(EngineConfig(backend="native"))


def test_an_instruction_set_that_does_not_exist_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native_module.available_isas():
        pytest.skip("the native kernels are not built")
    monkeypatch.setenv("PAGETURNER_ISA", "sse9")
    with engine_fault("sse9"):
        make_ops(EngineConfig(backend="native"))
