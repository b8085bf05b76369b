"""A window gives memory back and changes no answer: bit-equal to the same run that keeps every block.

Blocks that were given back are poisoned with NaN after every step, and so is the scratch block that their
places read: a kernel that looked at one, if only to multiply it by zero, would show.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pageturner.engine.engine import Engine
from pageturner.kernels.base import Ops
from pageturner.kernels.cpu import native, native_module
from pageturner.kernels.reference import ReferenceOps
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.engines import GOLDENS, Model, Setup, answers
from support.poison import poison_blocks
from support.schedulers import unowned

# windows of 8 or 12; from Gemma 2 on in one layer of two; of Llama 4 chunks; of Gemma 4 in heads of
# another size, and in layers that share KV
GEMMA4 = ("gemma4_e2b", "gemma4_31b", "gemma4_26b")
FAMILIES = ("mistral", "phi3", "gemma2", "gemma3", "gpt_oss", "llama4_text", *GEMMA4)
LONGEST = 400  # tokens of a sequence, more than a segment of the kernels


def crowd(count: int, output: int) -> list[Request]:
    dice = random.Random(8)
    shared = tuple(dice.randrange(256) for _ in range(70))
    requests = []
    for number in range(count):
        prompt = shared[: number % 3 * 35] + tuple(
            dice.randrange(256) for _ in range(dice.randint(1, 40))
        )
        params = SamplingParams(
            temperature=number % 2, seed=number, max_tokens=output - dice.randrange(20), logprobs=1
        )
        requests.append(Request(number, prompt, params))
    return requests


def poisoned(model: Model, setup: Setup) -> Engine:
    """An engine whose free blocks, and scratch blocks, turn into NaN after every step."""
    engine = model.engine(setup)
    pool, runner = engine.stack.pool, engine.executor
    run = runner.run

    def run_then_poison(plan):  # type: ignore[no-untyped-def]
        for store, kv in zip((pool.full, pool.sliding), runner.storage, strict=False):
            if kv is not None:
                poison_blocks(kv, [*unowned(store), store.num_blocks])
        return run(plan)

    runner.run = run_then_poison
    return engine


SETUPS = [
    Setup(
        block_size=block_size,
        recent_tokens=recent,
        token_budget=budget,
        kv_tokens=tokens,
        policy=policy,
    )
    for block_size, recent, budget, tokens, policy in (
        (
            16,
            64,
            48,
            16384,
            "chunked",
        ),  # few recent blocks: preemption, and steps cut to what there is
        (16, 640, 512, 16384, "chunked"),
        (1, 90, 16, 16384, "chunked"),
        (16, 320, 64, 1024, "chunked"),  # few whole blocks
        (4, 200, 64, 16384, "prefill_first"),
        (16, 400, 64, 16384, "static"),
    )
]


def compare(ops: Ops, family: str, setups: list[Setup], requests: list[Request]) -> None:
    model = Model(GOLDENS / "families" / family, ops)
    assert model.decoder.window
    truth = answers(model.engine(Setup()), requests)
    preemptions = 0.0
    for setup in setups:
        for caching in (True, False):
            engine = poisoned(model, replace(setup, prefix_caching=caching))
            assert answers(engine, requests) == truth, setup
            stats = engine.scheduler.stats()
            assert stats["blocks_used"] == stats["recent_blocks_used"] == 0
            preemptions += stats["preemptions"]
    assert preemptions > 0 or len(setups) == 1


@pytest.mark.slow
@pytest.mark.skipif(
    not native_module.supported()[0], reason=f"native kernels: {native_module.supported()[1]}"
)
@pytest.mark.parametrize(
    ("family", "setups"),
    [
        ("gemma3", SETUPS[:1]),
        ("llama4_text", SETUPS[:1]),
        *((name, SETUPS[:1]) for name in GEMMA4),
        *(pytest.param(name, SETUPS, marks=pytest.mark.slow) for name in FAMILIES),
    ],
)
def test_giving_back_changes_no_bit(family: str, setups: list[Setup]) -> None:
    compare(native.NativeOps(threads=2), family, setups, crowd(8, LONGEST - 120))


@pytest.mark.slow
def test_giving_back_changes_no_bit_of_the_reference() -> None:
    compare(ReferenceOps(), "gemma3", SETUPS[:1], crowd(3, 40))


@pytest.mark.skipif(
    not native_module.supported()[0], reason=f"native kernels: {native_module.supported()[1]}"
)
@pytest.mark.parametrize("family", FAMILIES)
def test_memory_stays_at_the_window(family: str) -> None:
    """One long answer: whole blocks grow with it, recent ones stay at window, step and a block."""
    model = Model(GOLDENS / "families" / family, native.NativeOps(threads=1))
    request = Request(0, (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=LONGEST))
    engine = model.engine(Setup(recent_tokens=1024, token_budget=16))
    engine.submit(request)
    peak = whole = 0.0
    while engine.scheduler.has_work:
        engine.step()
        stats = engine.scheduler.stats()
        peak, whole = max(peak, stats["recent_blocks_used"]), max(whole, stats["blocks_used"])
    assert whole == (LONGEST + 2) // 16 + 1
    assert peak <= 2
