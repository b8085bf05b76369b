"""The token budget that nobody set, and where adaptive_chunk begins: by hand, and in an engine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine import engine_factory, machine_limits
from pageturner.engine.step_sizes import REACHED, STEERED, STEP, sequences_in, with_step_sizes
from pageturner.kernels import peak
from pageturner.kernels.cpu import native_module
from pageturner.telemetry.work import MachineLimits, ModelCosts

GOLDENS = Path(__file__).parents[1] / "goldens"
# a token takes 0.2 + 0.04 ms at the limits
NEEDS = ModelCosts(2e8, 4e6, 8e7, 1e7, 0.0, 3e7, pair=1e4, position=2e4)
LIMITS = MachineLimits(30.0, 1000.0, 100.0)
native = pytest.mark.skipif(not native_module.supported()[0], reason="no native kernels here")


def test_the_budget_is_what_the_machine_computes_in_the_time_of_a_step() -> None:
    chosen = with_step_sizes(EngineConfig(), NEEDS, LIMITS)
    assert chosen.max_num_batched_tokens == int(STEP / (0.24e-3 / REACHED)) // 32 * 32 == 160
    assert chosen.token_budget == 160
    slower = with_step_sizes(EngineConfig(), NEEDS, MachineLimits(30.0, 500.0, 50.0))
    assert slower.max_num_batched_tokens == 128, (
        "64 sequences and as many tokens of prompts beside them"
    )
    assert (
        with_step_sizes(
            EngineConfig(max_num_seqs=16), NEEDS, MachineLimits(30.0, 500.0, 50.0)
        ).token_budget
        == 80
    )
    assert (chosen.max_prefill_beside_decode, slower.max_prefill_beside_decode) == (160, 64), (
        "of prompts"
    )
    slowest = with_step_sizes(EngineConfig(), NEEDS, MachineLimits(30.0, 50.0, 5.0))
    assert (slowest.token_budget, slowest.max_prefill_beside_decode) == (128, 32), (
        "no step in time: the least"
    )
    waits = [
        with_step_sizes(replace(config, decode_wait_ms=20.0), NEEDS, LIMITS)
        for config in (
            EngineConfig(),
            EngineConfig(max_num_batched_tokens=99),
            EngineConfig(max_prefill_beside_decode=7),
        )
    ]
    assert [one.max_prefill_beside_decode for one in waits] == [41, 41, 7], "20 ms of 0.48 ms"
    assert (
        with_step_sizes(EngineConfig(decode_wait_ms=1.0), NEEDS, LIMITS).max_prefill_beside_decode
        == 16
    )
    told = with_step_sizes(EngineConfig(max_prefill_beside_decode=0), NEEDS, LIMITS)
    assert told.max_prefill_beside_decode == 0
    quick = MachineLimits(30.0, 1e5, 1e4)
    assert with_step_sizes(EngineConfig(), NEEDS, quick).token_budget == 512, "at most"
    mixture = replace(NEEDS, experts=8e7, chosen=0.1)
    assert with_step_sizes(EngineConfig(), mixture, quick).token_budget == 2048
    many = with_step_sizes(EngineConfig(max_num_seqs=1000), NEEDS, LIMITS)
    assert (many.token_budget, many.slots) == (512, 512), "as before"


@pytest.mark.parametrize("given", [0, 7, 4096])
def test_a_budget_that_is_given_is_taken(given: int) -> None:
    config = EngineConfig(max_num_batched_tokens=given, knee_tokens=5, knee_seqs=3)
    assert with_step_sizes(config, NEEDS, LIMITS) == config


@pytest.mark.parametrize(
    ("needs", "limits"),
    [(None, LIMITS), (NEEDS, None), (NEEDS, MachineLimits(30.0, None, 100.0)), (None, None)],
)
def test_where_nothing_is_known_it_is_the_most(
    needs: ModelCosts | None, limits: MachineLimits | None
) -> None:
    config = EngineConfig()
    assert (config.token_budget, config.slots) == (512, 64)
    assert with_step_sizes(config, needs, limits) == replace(config, max_num_batched_tokens=512)


def test_adaptive_chunk_begins_where_its_target_is_met() -> None:
    chosen = with_step_sizes(EngineConfig(policy="adaptive_chunk", tpot_ms=100.0), NEEDS, LIMITS)
    assert chosen.max_num_batched_tokens == 512, "its limit: it steers itself"
    assert chosen.knee_tokens == 187, "0.9 * 0.1 s of 0.24 ms / 0.5"
    assert chosen.knee_seqs == sequences_in(STEERED * 0.1, NEEDS, LIMITS)


def test_sequences_that_decode_in_a_time() -> None:
    computing, reading = 0.21e-3 + 0.04e-3 + 512 * 1e4 / 1e11, 512 * 2e4 / 30e9
    weights = 11e7 / 30e9
    assert sequences_in(0.05, NEEDS, LIMITS) == int((0.05 * REACHED - weights) / reading)
    glanced = replace(LIMITS, read_gb_s=math.inf)
    assert sequences_in(0.05, NEEDS, glanced) == int(0.05 * REACHED / computing)
    assert sequences_in(1e-6, NEEDS, LIMITS) == 1


@native
def test_an_engine_sizes_its_steps_by_what_is_kept_or_glanced_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    config = EngineConfig(
        model=str(GOLDENS / "tiny_llama.gguf"), threads=1, kv_cache_memory=1 << 20
    )
    looked = []
    monkeypatch.setattr(
        engine_factory, "quick_peak", lambda isa, n: looked.append((isa, n)) or (0.1, 0.1)
    )
    built = engine_factory.make_engine(config)
    isa = built.fingerprint.split("-")[1]
    assert looked == [(isa, 1)]
    assert built.limits is None, "a glance is no limit: no share is told of it"
    assert built.engine.scheduler.budget == built.engine.stack.config.token_budget < 512
    again = engine_factory.engine_again(built, config)
    assert again.scheduler.budget == built.engine.scheduler.budget
    machine_limits.store_peak(peak.Peak(isa, 1, 1e4, 1e4, dict.fromkeys(peak.READ, 30.0), 5.0))
    kept = engine_factory.make_engine(config)
    assert kept.engine.scheduler.budget == 512
    assert kept.pace == kept.limits
    assert looked == [(isa, 1)], "nothing is measured where limits are kept"


@native
def test_a_glance_is_about_what_is_measured_at_length() -> None:
    isa = native_module.available_isas()[0]
    integer, floats = peak.quick_peak(isa, 1)
    if integer is None or floats is None:
        pytest.skip(f"{isa} has no loops of its own")
    assert min(integer, floats) > 0
    assert peak.quick_peak(isa, 1) == (integer, floats), "once in a process"
