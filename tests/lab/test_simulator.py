"""The simulator: the engine's own scheduler, true to its plans; leaps change nothing; nobody sees lengths."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.simulation.fleet import Roles, fleets
from pageturner.lab.simulation.simulator import Simulator
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import (
    END,
    OpenLoop,
    Pieces,
    Sessions,
    SessionTurn,
    TrafficRequest,
)
from pageturner.lab.traffic.traffic_generators import SyntheticTraffic
from pageturner.policies.orders import ORDERS
from pageturner.router.load_balancer import PLACEMENTS, PrefixMap
from pageturner.scheduler.types import Plan
from pageturner.telemetry.work import StepWork, work_of
from support.schedulers import make_stack

COST = CalibratedCost([4e-3, 2e-4, 3e-5, 1e-5, 2e-5, 3e-8, 1e-9], (0.0, 0.0), 1, 1e-4, {})
Seen = list[tuple[int, float, float, list[tuple[int, int, int]]]]


def simulate(
    source: Any,
    *,
    leaps: bool,
    replicas: int = 1,
    placement: str = "least_loaded",
    roles: Roles | None = None,
    **settings: Any,
) -> tuple[Simulator, Seen]:
    """Run it; each step as (replica, begin, end, [(id, n, computed)])."""
    seen: Seen = []

    def watch(replica: int, begin: float, end: float, plan: Plan) -> None:
        items = [(i.sequence.request.id, i.n, i.sequence.computed) for i in plan.items]
        seen.append((replica, begin, end, items))

    blocks = settings.setdefault("num_blocks", 400)
    settings = {"block_size": 16, "max_model_len": 2000} | settings
    simulator = Simulator(
        lambda: make_stack(**settings).scheduler,
        COST,
        num_blocks=blocks,
        fleets=fleets(
            replicas,
            roles,
            PLACEMENTS[placement],
            lambda: PrefixMap(chunk=16) if placement == "prefix_aware" else None,
        ),
        roles=roles,
        leaps=leaps,
        watch=watch,
    )
    simulator.run(source, progress=False)
    return simulator, seen


def request(
    at: float, parts: tuple[tuple[int, int], ...], answer: int, output: int, cap: int
) -> TrafficRequest:
    return TrafficRequest(Pieces(parts), output, cap, at, answer=answer)


def some_source(dice: random.Random) -> Any:
    made = SyntheticTraffic(
        count=dice.randint(1, 12),
        rate=dice.choice([2.0, 10.0, 50.0, 1000.0]),
        prompt=dice.choice([1, 6, 40, 150]),
        output=dice.choice([1, 8, 40, 120]),
        cv=dice.choice([0.5, 1.0, 4.0]),
        cap=dice.choice([30, 200]),
        seed=dice.randrange(1 << 30),
    )
    if dice.random() < 0.3:
        return made.sessions(dice.randint(1, 3), dice.choice([0.0, 0.5]))
    return made.open_loop()


def some_settings(dice: random.Random) -> dict[str, Any]:
    return {
        "policy": dice.choice(("chunked", "prefill_first", "orca")),
        "order": dice.choice(list(ORDERS)),
        "block_size": dice.choice([1, 4, 16]),
        "num_blocks": dice.choice([450, 600, 4000]),
        "max_num_seqs": dice.choice([2, 5, 64]),
        "token_budget": dice.choice([16, 64, 512]),
        "max_model_len": 400,
        "prefix_caching": dice.random() < 0.7,
        "replicas": dice.randint(1, 3),
        "placement": dice.choice(list(PLACEMENTS)),
    }


def by_replica(seen: Seen) -> dict[int, Seen]:
    found: dict[int, Seen] = {}
    for one in seen:
        found.setdefault(one[0], []).append(one)
    return found


def same_but_for_leaps(every: Seen, most: Seen) -> int:
    """Assert that the steps of `most` are among those of `every`, and that each one it lacks only gives a
    token to everybody who had one in the step before it or after. Returns how many it lacks."""
    left, lacking = by_replica(most), 0
    for replica, steps in by_replica(every).items():
        rest = iter(left.pop(replica, []))
        following = next(rest, None)
        for step in steps:
            if step == following:
                following = next(rest, None)
                continue
            lacking += 1
            assert all(n == 1 for _, n, _ in step[3]), "a step with a prompt was leapt over"
        assert following is None, f"a step that is in no plan, or elsewhere: {following}"
    assert not left
    return lacking


def runs_alike(seed: int) -> int:
    dice = random.Random(seed)
    source, settings = some_source(dice), some_settings(dice)
    slow, every = simulate(source, leaps=False, **settings)
    fast, most = simulate(source, leaps=True, **settings)
    for name in ("ttft", "tpot", "e2e", "gap", "tokens"):
        a, b = list(getattr(slow.metrics, name)), list(getattr(fast.metrics, name))
        if name != "gap":
            assert [x for x in a if x == x] == [x for x in b if x == x], f"seed {seed}: {name}"
        assert b == pytest.approx(a, nan_ok=True, abs=1e-9), f"seed {seed}: {name}"
    assert slow.metrics.refused == fast.metrics.refused
    counted = [
        {k: v for k, v in s.figures().items() if k not in ("kv_used", "busy")} for s in (slow, fast)
    ]
    assert counted[0] == counted[1], f"seed {seed}"
    return same_but_for_leaps(every, most)


def test_leaps_change_no_plan_and_no_time() -> None:
    assert sum(runs_alike(seed) for seed in range(60)) > 500, "hardly a step was leapt over"


def test_what_was_leapt_over_can_be_found_by_others() -> None:
    """A prompt that begins as an answer under way does."""
    first = request(0.0, ((7, 16),), 8, 300, 400)
    second = request(0.8, ((7, 16), (8, 64), (9, 5)), 10, 4, 100)
    found = [simulate(OpenLoop([first, second]), leaps=leaps) for leaps in (False, True)]
    assert [simulator.figures()["cached_tokens"] for simulator, _ in found] == [80, 80]
    assert same_but_for_leaps(found[0][1], found[1][1]) > 100


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_leaps_change_no_plan_and_no_time_in_a_thousand_runs() -> None:
    assert sum(runs_alike(seed) for seed in range(1000, 2000)) > 10_000


def test_true_lengths_are_seen_by_nobody() -> None:
    """Until the first answer ends, a longer future makes no difference to any plan."""
    found = []
    for longer in (1, 3):
        each = [
            request(0.01 * i, ((1 << 41 | i, 40 + i),), 1 << 42 | i, 20 * longer, 100)
            for i in range(8)
        ]
        simulator, seen = simulate(OpenLoop(each), leaps=False, token_budget=32, max_num_seqs=4)
        found.append((min(simulator.metrics.e2e), seen))
    end = found[0][0]
    before = [[step for step in seen if step[2] < end] for _, seen in found]
    assert before[0] == before[1]
    assert len(before[0]) > 15


def test_answers_end_where_the_trace_says_or_at_the_cap() -> None:
    each = [
        request(0.0, ((i, 10),), 1 << 42 | i, length, 25)
        for i, length in enumerate((1, 2, 24, 25, 90))
    ]
    simulator, _ = simulate(OpenLoop(each), leaps=True)
    assert sorted(simulator.metrics.tokens) == [1, 2, 24, 25, 25]
    assert END < 0


def test_steps_take_what_the_cost_says_and_follow_each_other() -> None:
    _, seen = simulate(SyntheticTraffic(12, 30.0, 60, 20).open_loop(), leaps=False)
    for _, begin, end, items in seen:
        works = [
            StepWork(n, 1, 0, computed + n, n * computed + n * (n + 1) // 2)
            for _, n, computed in items
        ]
        tokens, context, pairs = (sum(w[i] for w in works) for i in (0, 3, 4))
        least = COST.seconds(StepWork(tokens, len(items), 0, context, pairs))
        most = COST.seconds(StepWork(tokens, len(items), len(items), context, pairs))
        assert least - 1e-9 <= end - begin <= most + 1e-9
    assert all(a[2] <= b[1] for a, b in pairwise(seen))


def test_ballast_costs_as_much_as_sequences() -> None:
    """Three rows at the end of a sequence of 50, and one at the end of one of 9."""
    plan = Plan(ballast=[(3, 50), (1, 9)])
    assert work_of(plan) == StepWork(4, 2, 0, 59, 48 + 49 + 50 + 9)


def test_a_static_batch_that_stays_short_starts_when_its_patience_ends() -> None:
    simulator, seen = simulate(
        SyntheticTraffic(3, 1000.0, 10, 5).open_loop(),
        leaps=False,
        policy="static",
        static_batch=16,
        static_patience=2.0,
    )
    assert 2.0 <= seen[0][1] < 2.1
    assert len(simulator.metrics.ttft) == 3


def test_sessions_wait_for_answers_and_find_what_was_said() -> None:
    turns = [SessionTurn(0.0, 64, 32), SessionTurn(5.0, 160, 16), SessionTurn(1.0, 20, 4)]
    simulator, seen = simulate(Sessions([3.0], [turns], 100), leaps=True)
    metrics = simulator.metrics
    assert list(metrics.tokens) == [32, 16, 4]
    first = {step[3][0][0]: step for step in reversed(seen)}
    assert first[1][1] == 3.0
    assert first[2][1] == pytest.approx(3.0 + metrics.e2e[0] + 5.0)
    assert first[3][1] == pytest.approx(first[2][1] + metrics.e2e[1] + 1.0)
    # the last token of the answer was never computed: 95 tokens are known, 80 of them in whole blocks
    assert [first[id][3][0][2] for id in (1, 2, 3)] == [0, 80, 0]


@pytest.mark.parametrize(("placement", "found"), [("prefix_aware", 28), ("round_robin", 26)])
def test_prefixes_are_found_where_they_were_sent(placement: str, found: int) -> None:
    """Two prefixes; to a replica that was chosen in turn each is new."""
    each = [
        request(0.2 * i, ((i % 4 // 2, 256), (1 << 41 | i, 16)), 1 << 42 | i, 4, 100)
        for i in range(30)
    ]
    simulator, _ = simulate(OpenLoop(each), leaps=True, replicas=2, placement=placement)
    assert simulator.figures()["cached_tokens"] == 256 * found


def test_refused_requests_are_counted_and_forgotten() -> None:
    made = SyntheticTraffic(30, 10_000.0, 40, 30).open_loop()
    simulator, _ = simulate(made, leaps=True, max_queue=5, max_num_seqs=2)
    figures = simulator.metrics.figures(LatencyTargets(10.0, 10.0))
    assert figures["refused"] > 0
    assert figures["requests"] == 30
    assert figures["goodput_share"] == pytest.approx(1 - figures["refused"] / 30)


def test_memory_does_not_grow_with_requests() -> None:
    simulator, _ = simulate(SyntheticTraffic(300, 500.0, 40, 10).open_loop(), leaps=True)
    assert not simulator._open
    assert not simulator._events
    assert not any(load.open for fleet in simulator.fleets for load in fleet.loads)


def test_drafts_by_suffixes_where_the_answers_are_known() -> None:
    """The proposer and the prices of an engine, on a clock of the simulator's own: the same tokens in fewer steps."""
    verse = tuple(range(100, 130))
    jobs = [
        TrafficRequest(
            prompt=(7, *verse, i), output=40, max_tokens=60, arrival=0.0, answer=(*verse, *verse)
        )
        for i in range(2)
    ]
    found = {}
    for kind in ("off", "suffix"):
        simulator = Simulator(
            lambda: make_stack(num_blocks=400, block_size=16, max_model_len=2000).scheduler,
            COST,
            num_blocks=400,
            speculation=kind,
        )
        simulator.run(OpenLoop(jobs), progress=False)
        found[kind] = simulator
    plain = found["off"]
    drafted = found["suffix"]
    assert drafted.usage.steps < plain.usage.steps / 2
    assert drafted.metrics.end < plain.metrics.end
