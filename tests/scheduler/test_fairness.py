"""What the order `fair` remembers of tenants is bounded, and nobody gains by being forgotten."""

from __future__ import annotations

import itertools

import pytest

from pageturner.policies import fairness
from pageturner.policies.fairness import Tenants
from pageturner.request import Request
from pageturner.scheduler.types import Sequence

IDS = itertools.count()


@pytest.fixture
def tenants(monkeypatch: pytest.MonkeyPatch) -> Tenants:
    """Few are remembered, and one that was served nothing yet waits all the time."""
    monkeypatch.setattr(fairness, "MAX_TENANTS", 8)
    tenants = Tenants(output_weight=2.0, ageing=1e9)
    queued(tenants, "waits")
    return tenants


def queued(tenants: Tenants, name: str, prompt: int = 10) -> Sequence:
    request = Request(next(IDS), (1,) * prompt, tenant=name)
    seq = Sequence(request, tokens=list(request.prompt))
    tenants.queued(seq)
    return seq


def serve(tenants: Tenants, name: str, prompt: int = 10) -> None:
    """One request from its arrival to its end."""
    seq = queued(tenants, name, prompt)
    tenants.served(seq, prompt, 0.0)
    tenants.ended(seq, "stop")


def counter(tenants: Tenants, name: str) -> float:
    """What the next request of a tenant stands behind."""
    seq = queued(tenants, name)
    found = tenants.key(seq, 0.0)[1]
    tenants.ended(seq, None)
    return found


def test_who_was_forgotten_has_not_been_given_anything(tenants: Tenants) -> None:
    serve(tenants, "greedy", 1000)
    before = counter(tenants, "greedy")
    for i in range(40):
        serve(tenants, f"name {i}", 2000)
    assert counter(tenants, "greedy") >= before


def test_a_new_name_is_worth_no_more_than_a_forgotten_one(tenants: Tenants) -> None:
    for i in range(40):
        serve(tenants, f"name {i}", 1000)
    assert counter(tenants, "fresh") >= 1000


def test_who_runs_is_charged_whoever_else_comes(tenants: Tenants) -> None:
    seq = queued(tenants, "runs")
    tenants.served(seq, 10, 0.0)
    seq.computed, seq.tokens = 10, [*seq.tokens, *range(50)]
    for i in range(40):
        serve(tenants, f"name {i}", 1000)
    tenants.served(seq, 50, 0.0)
    assert counter(tenants, "runs") >= 110


def test_what_is_remembered_is_bounded(tenants: Tenants) -> None:
    for i in range(100):
        serve(tenants, f"name {i}")
    assert len(tenants) <= 10
