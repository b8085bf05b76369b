"""How memory becomes blocks, against the same arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.executor.kv_memory import GIB, KVForm, KVSizes, plan_kv
from pageturner.kernels.base import KVSpec
from pageturner.kernels.recurrent import RecurrentSpec
from pageturner.models.spec import LinearSpec
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.engines import GOLDENS, answers
from support.refusals import engine_fault

MIB = 1 << 20
FREE = 16 * GIB
# 18 layers of one KV head of 256 in fp16, blocks of 16 tokens: 16 KiB a layer, 288 KiB a block
GEMMA = KVSpec(18, 1, 16, 1, 256, "float16")
LENGTH = 32768


def plan(one: KVSpec, windowed: int, window: int, length: int = LENGTH, **settings: int) -> KVSizes:
    return plan_kv(KVForm(one, windowed, window), EngineConfig(model="x", **settings), length, FREE)


def test_without_a_window_all_memory_is_one_kind_of_block() -> None:
    assert plan(GEMMA, 0, 0, kv_cache_memory=288 * MIB) == KVSizes(1024)
    assert plan(GEMMA, 0, 0, length=1024, max_num_seqs=8) == KVSizes(8 * 64), (
        "no more than can be used"
    )


def test_recent_blocks_for_all_sequences_at_once_then_whole_ones() -> None:
    """A window of 512 and a step of 512 touch 65 blocks of 16; 15 layers of them take 240 KiB, 3 take 48."""
    sizes = plan(GEMMA, 15, 512, kv_cache_memory=2048 * MIB)
    assert (sizes.window, sizes.sliding) == (512, 64 * 65)
    assert sizes.blocks == (2048 * 1024 - 64 * 65 * 240) // 48
    assert sizes.blocks > 3 * plan(GEMMA, 0, 0, kv_cache_memory=2048 * MIB).blocks, (
        "longer contexts"
    )


def test_scarce_memory_is_halved() -> None:
    sizes = plan(GEMMA, 15, 512, kv_cache_memory=60 * MIB)
    assert sizes.sliding == 30 * 1024 // 240
    assert sizes.blocks == (60 * 1024 - sizes.sliding * 240) // 48


def test_memory_too_small_for_a_window_is_one_kind_of_block() -> None:
    assert plan(GEMMA, 15, 512, kv_cache_memory=9 * MIB) == KVSizes(32)


def test_where_every_layer_has_a_window_contexts_are_bounded_by_it_alone() -> None:
    """Mistral 7B v0.1: 2 MiB a block. 1 GiB holds 8,192 tokens, and every context the model is made for."""
    mistral = KVSpec(32, 1, 16, 8, 128, "float16")
    sizes = plan(mistral, 32, 4096, kv_cache_memory=GIB, max_num_seqs=4)
    assert sizes == KVSizes(4 * LENGTH // 16, 4096, 512)
    assert plan(mistral, 32, 4096, max_num_seqs=1, length=8192).sliding == 512, (
        "no more than can be used"
    )


def with_draft_model(
    one: KVSpec, windowed: int, window: int, beside: int, **settings: int
) -> KVSizes:
    return plan_kv(
        KVForm(one, windowed, window, beside), EngineConfig(model="x", **settings), LENGTH, FREE
    )


def test_a_draft_model_costs_its_bytes_in_every_block_that_sees_everything() -> None:
    """12 KiB a block beside 288; with a window beside the 48 of whole blocks, and never in recent ones."""
    beside = 12 * 1024
    assert with_draft_model(GEMMA, 0, 0, beside, kv_cache_memory=300 * MIB) == KVSizes(1024)
    sizes = with_draft_model(GEMMA, 15, 512, beside, kv_cache_memory=2048 * MIB)
    assert sizes == KVSizes((2048 * 1024 - 64 * 65 * 240) // 60, 512, 64 * 65)
    mistral = KVSpec(32, 1, 16, 8, 128, "float16")  # all layers have the window: 2 MiB a block
    sizes = with_draft_model(mistral, 32, 4096, MIB, kv_cache_memory=2 * GIB)
    assert sizes == KVSizes(1024, 4096, 512), "half of it for recent blocks"
    sizes = with_draft_model(mistral, 32, 4096, 100, kv_cache_memory=2 * GIB, max_num_seqs=1)
    assert sizes.blocks == LENGTH // 16, "no more than can be used"


def test_two_shapes_of_kv_never_lie_in_one_kind_of_block() -> None:
    """Gemma 4 E2B: 3 layers of a head of 512, 12 of 256 with a window; 96 and 192 KiB a block."""
    local = KVSpec(12, 1, 16, 1, 256, "float16")
    both = KVSpec(3, 1, 16, 1, 512, "float16", beside=local)
    assert both.nbytes == (96 + 192) * 1024
    assert both.split(12) == (replace(both, beside=None), local)
    sizes = plan(both, 12, 512, kv_cache_memory=2048 * MIB)
    assert sizes == KVSizes((2048 * 1024 - 64 * 65 * 192) // 96, 512, 64 * 65)
    with engine_fault("no room"):
        plan(both, 12, 512, kv_cache_memory=9 * MIB)
    with engine_fault("KV tiers"):
        plan(both, 0, 0, kv_cache_memory=2048 * MIB)


@pytest.mark.parametrize("memory", [100, FREE + 1])
def test_memory_that_cannot_be(memory: int) -> None:
    with engine_fault(r"KV cache|--kv-cache-memory"):
        plan(GEMMA, 15, 512, kv_cache_memory=memory)


@pytest.mark.parametrize(
    ("family", "little"), [("mistral", 4_096), ("gemma3", 12_000), ("gemma4_e2b", 10_000)]
)
def test_an_engine_with_little_memory_answers_as_one_with_plenty(family: str, little: int) -> None:
    settings = {
        "backend": "reference",
        "block_size": 4,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
    }
    params = SamplingParams(temperature=0.0, max_tokens=12)
    requests = [Request(1, (5,) * 60, params), Request(2, (6,) * 9, params)]
    given, sliding = [], []
    for memory in (0, little):
        built = make_engine(
            EngineConfig(
                model=str(GOLDENS / "families" / family), kv_cache_memory=memory, **settings
            )
        )
        given.append(answers(built.engine, requests))
        sliding.append(built.engine.scheduler.stats()["recent_blocks_total"])
    assert given[0] == given[1]
    assert 4 * sliding[1] < 60, "the prompt was meant to be longer than all recent blocks"


def test_states_of_running_sequences_come_first_then_three_fifths_for_those_that_are_kept() -> None:
    """Qwen3.5-35B-A3B: 30 layers of 32 heads of 128 x 128 in fp32, three rows of 8,192 columns in fp16 before
    each state; 10 layers of two KV heads of 256."""
    linear = LinearSpec(frozenset(range(30)), 16, 32, 128, 128, 4)
    storage = linear.storage("float16")
    state = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    tail = 30 * (32 * 32 * 4 + 16 * 128 * 32 * 2 + 32 * 128 * 32 * 2 + 32 * 8192 * 2)
    assert (storage.state_bytes, storage.tail_bytes) == (state, tail)
    one = KVSpec(10, 1, 16, 2, 256, "float16")
    form = KVForm(one, recurrent=storage)
    total = 8 * GIB

    def planned(**settings: Any) -> KVSizes:
        config = EngineConfig(model="x", kv_cache_memory=total, **settings)
        return plan_kv(form, config, 262_144, FREE)

    sizes = planned(max_num_seqs=8)
    rest = total - 17 * (state + tail)  # two for each sequence, and one for padding
    assert sizes.tails == 16
    assert sizes.blocks == int(rest * 0.4) // one.nbytes
    assert sizes.states == 16 + (rest - sizes.blocks * one.nbytes) // state
    used = (sizes.states + 1) * state + 17 * tail + sizes.blocks * one.nbytes
    assert total - state < used <= total
    alone = planned(max_num_seqs=8, enable_prefix_caching=False)
    assert (alone.states, alone.tails) == (16, 16)
    assert alone.blocks == rest // one.nbytes
    drafted = EngineConfig(model="x", kv_cache_memory=total, max_num_seqs=8)
    sizes = plan_kv(replace(form, of_draft=3 * one.nbytes), drafted, 262_144, FREE)
    used = (sizes.states + 1) * state + 17 * tail + 4 * sizes.blocks * one.nbytes
    assert total - state < used <= total, "a draft model has its part of each block"
    small = KVForm(one, recurrent=RecurrentSpec(1, 16, 3))
    enough = plan_kv(small, EngineConfig(model="x", max_num_seqs=2), 4096, FREE)
    assert enough == KVSizes(2 * 256, states=4 + 2 * 128, tails=4), "no more than can be used"
    crowd = planned(max_num_seqs=1000)  # half of the memory holds fewer
    seats = (total // 2 // (state + tail) - 1) // 2
    assert crowd.tails == 2 * seats
    with engine_fault("recurrent states"):
        plan_kv(form, EngineConfig(model="x", kv_cache_memory=100 * MIB), 4096, FREE)
