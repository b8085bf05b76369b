"""Names of blocks stand for the beginnings that an engine hashes, and change nothing that is simulated."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from pageturner.block_keys import chain_keys, root_key
from pageturner.config.settings import EngineConfig
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.simulation.fleet import Roles, TierSizes
from pageturner.lab.simulation.scenario import Scenario
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.block_names import BlockNames, known_by_pieces, merged
from pageturner.lab.traffic.traffic import OpenLoop, Pieces, Traffic, TrafficRequest
from pageturner.lab.traffic.traffic_generators import SyntheticTraffic
from pageturner.policies.orders import ORDERS
from pageturner.request import SessionHint

COST = CalibratedCost([5e-3, 0, 2e-4, 0, 0, 0, 1e-7], (0, 0), 1, 0.0, {})
Parts = tuple[tuple[int, int], ...]


def some_parts(dice: random.Random) -> Parts:
    """Few contents and lengths, so that many beginnings are equal; now and then a piece is empty."""
    return tuple(
        (dice.randrange(3), dice.choice([0, 1, 3, 4, 8])) for _ in range(dice.randint(1, 6))
    )


@pytest.mark.parametrize("seed", range(20))
def test_two_names_are_equal_where_two_hashes_are(seed: int) -> None:
    dice = random.Random(seed)
    size = dice.choice([1, 2, 3, 4, 16])
    names, pairs = BlockNames(size), set[tuple[bytes, bytes]]()
    for _ in range(200):
        parts = some_parts(dice)
        tokens = [content for content, count in parts for _ in range(count)]
        pairs |= {*zip(names.keys(parts), chain_keys(root_key(""), tokens, size, []), strict=True)}
    assert len(pairs) > 1
    assert len({name for name, _ in pairs}) == len(pairs) == len({hashed for _, hashed in pairs})


def test_how_a_prompt_is_cut_does_not_matter() -> None:
    assert [*merged([(1, 0), (2, 3), (5, 0), (2, 4), (0, 2), (0, 1), (2, 1)])] == [
        (2, 7),
        (0, 3),
        (2, 1),
    ]


# -- what is simulated ---------------------------------------------------------------------------------------


def shared_beginnings(seed: int) -> Traffic:
    """Prompts that begin alike, end in the middle of a block, and are too many for the memory."""
    dice, requests, at = random.Random(seed), list[TrafficRequest](), 0.0
    for number in range(80):
        at += dice.expovariate(60.0)
        shared = tuple((content, 48) for content in range(dice.randrange(4)))
        parts = (
            *((dice.choice([0, 10]) + one, count) for one, count in shared),
            (1000 + 2 * number, 37),
        )
        answer = dice.choice([1, 9, 60])
        requests.append(TrafficRequest(Pieces(parts), answer, 80, at, answer=1001 + 2 * number))
    return OpenLoop(requests)


def scenario(traffic: Traffic, **config: Any) -> Scenario:
    engine = EngineConfig(**config)
    return Scenario(
        engine, KVSizes(30), 400, COST, lambda rate: traffic, LatencyTargets(0.3, 0.02), replicas=2
    )


def both(one: Scenario, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any]]:
    """With names, and with the hashes of an engine."""
    named = one.run(progress=False)
    with monkeypatch.context() as patch:
        patch.setattr("pageturner.lab.simulation.scenario.known_by_pieces", lambda traffic: False)
        return named, one.run(progress=False)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("admission", ["none", "full"])
def test_names_change_no_figure(seed: int, admission: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named, hashed = both(scenario(shared_beginnings(seed), admission=admission), monkeypatch)
    assert named["engines"]["cached_tokens"] > 0
    assert (named["engines"]["preemptions"] > 0) == (admission == "none")
    assert repr(named) == repr(hashed)


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_nor_with_any_order(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named, hashed = both(scenario(shared_beginnings(7), order=order), monkeypatch)
    assert repr(named) == repr(hashed)


def test_what_asks_for_hashes_gets_them() -> None:
    one = TrafficRequest(Pieces(((1, 40),)), 5, 5)
    assert known_by_pieces(OpenLoop([one]))
    for other in (
        replace(one, prompt=(1, 2)),
        replace(one, answer=(1, 2)),
        replace(one, session=SessionHint("a")),
    ):
        assert not known_by_pieces(OpenLoop([one, other]))


def test_nor_where_a_turn_begins_with_the_answer_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    named, hashed = both(scenario(SyntheticTraffic(8, 4.0, 40, 50).sessions(3, 0.2)), monkeypatch)
    assert named["engines"]["cached_tokens"] > 0
    assert repr(named) == repr(hashed)


@pytest.mark.parametrize("change", [{"roles": Roles(1, 40)}, {"tiers": TierSizes(4000, 0, 1e-6)}])
def test_nor_where_kv_comes_from_elsewhere(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    named, hashed = both(replace(scenario(shared_beginnings(9)), **change), monkeypatch)
    assert repr(named) == repr(hashed)
