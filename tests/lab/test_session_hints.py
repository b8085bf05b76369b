"""Requests that say what their conversation will need again, on a simulated engine that is short of memory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pageturner.lab.simulation.simulator import Simulator
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import Sessions, SessionTurn, TrafficRequest
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.policies.scheduler_factory import make_scheduler
from pageturner.request import SessionHint
from pageturner.scheduler.scheduler import Scheduler

COST = CalibratedCost([4e-3, 1e-4, 6e-4, 2e-4, 6e-4, 2e-8, 2e-8], (0.0, 0.0), 0, 2e-4, {})
BLOCKS = 700  # of 16 tokens: half of what the conversations under way have said


class Hinted(Sessions):
    """Sessions whose turns say when the next one comes, and the last that it is the last."""

    def _request(
        self, session: int, number: int, at: float, before: tuple[tuple[int, int], ...]
    ) -> TrafficRequest:
        plain = super()._request(session, number, at, before)
        last = number + 1 == len(self.turns[session])
        next_in = 0.0 if last else self.turns[session][number + 1].think
        hint = SessionHint(f"{session}", keep=60.0, next_in=next_in, release=last)
        return replace(plain, session=hint)


def conversations(kind: type[Sessions]) -> Sessions:
    """Forty of them, each with 4 to 12 turns and a tool call of some seconds between two."""
    dice = random.Random(3)
    turns = []
    for _ in range(40):
        said, own = 350, []
        for _ in range(dice.randint(4, 12)):
            said += dice.randint(40, 150)
            own.append(SessionTurn(dice.uniform(0.3, 4.0), said, 20))
            said += 20
        turns.append(own)
    return kind([0.7 * number for number in range(len(turns))], turns, 64)


def run(traffic: Sessions) -> tuple[float, float]:
    """The share of prompts that was cached, and the seconds until all had ended."""
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256)

    def scheduler() -> Scheduler:
        return make_scheduler(config, num_blocks=BLOCKS, max_model_len=8192).scheduler

    simulator = Simulator(scheduler, COST, num_blocks=BLOCKS)
    simulator.run(traffic, progress=False)
    return simulator.figures()["cached_share"], simulator.metrics.end


@pytest.mark.slow
def test_hints_find_what_lru_has_lost() -> None:
    lru, lru_seconds = run(conversations(Sessions))
    kept, kept_seconds = run(conversations(Hinted))
    assert kept > max(0.8, 4 * lru), (lru, kept)
    assert kept_seconds < lru_seconds
