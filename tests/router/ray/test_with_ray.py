"""What of Ray Serve is used, held against the Ray that is installed. Without a cluster: that is
`bench/accept/scale_ray.py`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed", exc_type=ImportError)

from pageturner.router.ray import app
from pageturner.router.ray.choice import Ask, choice_of
from pageturner.router.ray.deployments import deployment_of
from pageturner.router.ray.request_router import PlacementRouter
from pageturner.router.ray.settings import ModelSettings, settings_of

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def deployment(**more: Any) -> Any:
    return deployment_of("m", ModelSettings("m.gguf", **more), settings_of(TABLE).router_config)


TABLE: dict[str, Any] = {"models": {"m": {"model": "m.gguf", "replicas": [1, 3]}}}


def test_an_application_is_built() -> None:
    assert type(app(TABLE)).__name__ == "Application"


def test_a_version_is_what_replicas_are_made_of() -> None:
    one = deployment().version
    assert deployment(replicas=(2, 2)).version == one
    assert deployment(replicas=(1, 4), goal=0.5).version == one
    assert deployment(engine={"max_num_seqs": 3}).version != one
    assert deployment(cpus=2.0).version != one


def test_bounds_and_numbers_of_replicas() -> None:
    assert deployment(replicas=(2, 2)).num_replicas == 2
    assert (
        deployment(replicas=(1, 4)).num_replicas is None
        or deployment(replicas=(1, 4)).num_replicas == 1
    )


class Router(PlacementRouter):
    """Without what Serve's own part of it needs of a cluster."""

    def __init__(self) -> None:
        self.initialize_state(deployment="with-ray", placement="prefix_aware")


def some(name: str, **stats: int) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def pending(ask: Ask, id: str) -> Any:
    return SimpleNamespace(args=[ask], metadata=SimpleNamespace(internal_request_id=id))


def test_the_router_asks_our_choice_and_tells_it_what_became_of_it() -> None:
    router, choice = Router(), choice_of("with-ray")
    choice.update(["a", "b"])
    ask = Ask(1, "POST", "/v1/completions", [], b"", (b"1",) * 20)
    request = pending(ask, "one")

    def chosen(request: Any) -> list[str]:
        ranks = asyncio.run(
            router.choose_replicas([some("a"), some("b", said=1, active=9)], request)
        )
        return [one.replica_id.unique_id for rank in ranks for one in rank]

    assert chosen(request) == ["a", "b"]
    router.on_request_routed(request, some("a").replica_id, None)
    assert choice.where(1) == "a"
    router.on_request_completed(some("a").replica_id, "one")
    assert choice.replicas["a"].open == 0
    choice.forget(1)
    assert chosen(pending(replace(ask, number=2), "two"))[0] == "a"
    assert chosen(pending(replace(ask, number=3, avoid=("a",)), "three"))[0] == "b"
    assert chosen(None) == ["a", "b"], "a request that is not one of ours"
