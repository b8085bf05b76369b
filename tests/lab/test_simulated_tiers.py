"""Slower memory for KV in the simulator: what comes up, in what time, and in which order blocks leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.simulation.fleet import SimulatedTiers, TierSizes
from pageturner.lab.simulation.scenario import Scenario
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import OpenLoop, Pieces, TrafficRequest
from pageturner.scheduler.store import Store

COST = CalibratedCost([1e-3, 0, 1e-4, 0, 0, 0, 0], (0, 0), 1, 0.0, {})
PROMPT, SECONDS = 320, 1e-5  # tokens, and seconds for which one comes up


def cached(store: Store, key: bytes) -> None:
    """A block with this key that nobody uses any more."""
    table: list[int] = []
    store.write(table, 0, 1)
    store.publish(table, 0, key)
    store.truncate(table, 0)


def test_what_is_evicted_goes_down_tier_by_tier_and_comes_up() -> None:
    store = Store(2)
    tiers = SimulatedTiers(store, TierSizes(2 * 16, 2 * 16, 1.0, 10.0), 16)
    for key in (b"a", b"b", b"c", b"d", b"e", b"f", b"g"):
        cached(store, key)
    assert set(store.index) == {
        b"f",
        b"g",
    }  # d and e are in host memory, b and c in the file, a is gone
    assert store.on_miss is not None
    assert store.on_miss(b"a") is None
    assert tiers.owed() == 0.0
    block = store.on_miss(b"e")
    assert store.index[b"e"] == block
    assert tiers.owed() == 16.0
    assert store.on_miss(b"b") is not None
    assert tiers.owed() == 160.0
    assert tiers.owed() == 0.0
    assert tiers.found == 32


def prompts_again(tiers: TierSizes | None, **change: Any) -> dict[str, Any]:
    """Eight prompts of 20 blocks, of which three fit, each sent again at the end."""
    each = [
        TrafficRequest(Pieces(((i % 8 + 1, PROMPT),)), 2, 8, 10.0 * i, answer=1 << 41 | i)
        for i in range(16)
    ]
    base = Scenario(
        EngineConfig(max_num_batched_tokens=512),
        KVSizes(64),
        1000,
        COST,
        lambda rate: OpenLoop(each),
        LatencyTargets(1.0),
        tiers=tiers,
    )
    return replace(base, **change).run(progress=False)


def test_prompts_come_back_from_below() -> None:
    without, below = prompts_again(None), prompts_again(TierSizes(10_000, 0, SECONDS, 0.0))
    assert without["engines"]["cached_tokens"] == 0
    found = below["engines"]["tier_tokens"]
    assert (
        below["engines"]["cached_tokens"] == found == 8 * (PROMPT - 16)
    )  # the last block is always computed
    assert below["ttft_ms"]["mean"] < without["ttft_ms"]["mean"]
    again = 1e3 * (COST.weights[0] + 16 * COST.weights[2] + (PROMPT - 16) * SECONDS)
    assert min(below["ttft_ms"]["p50"], again) == pytest.approx(again)


def test_slow_memory_is_paid_for() -> None:
    quick, slow = (prompts_again(TierSizes(0, 10_000, 0.0, seconds)) for seconds in (0.0, 1e-3))
    assert quick["engines"]["tier_tokens"] == slow["engines"]["tier_tokens"] > 0
    more = 8 * (PROMPT - 16) * 1e-3 / 16  # a request, on average
    assert slow["ttft_ms"]["mean"] - quick["ttft_ms"]["mean"] == pytest.approx(1e3 * more)
