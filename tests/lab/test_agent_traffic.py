"""Agents as traffic: agents are made from a seed, turns follow answers, and hints pay."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pageturner.lab.traffic.traffic import Pieces

BENCH = Path(__file__).parents[2] / "bench"
sys.path += [str(BENCH / "data"), str(BENCH / "accept")]

import make_agents  # noqa: E402
import sessions_simulated  # noqa: E402
from agent_traffic import Agent, AgentTraffic, AgentTurn  # noqa: E402


def test_agents_think_and_take_turns() -> None:
    agents = make_agents.make(1, 72)
    gaps = [turn.think for agent in agents for turn in agent.turns[1:]]
    assert 0.2 <= min(gaps) < max(gaps) <= 5.0
    assert all(3 <= len(agent.turns) <= 12 for agent in agents)


def test_turns_forks_and_lanes_follow_answers() -> None:
    def turn(think: float, new: int, answer: int, compact: bool = False) -> AgentTurn:
        return AgentTurn(think, new, answer, 1.0, compact)

    agents = [
        Agent(0, 0, "red", (1, 10), [turn(1.0, 5, 3), turn(2.0, 4, 2), turn(1.0, 6, 2, True)]),
        Agent(1, 0, "red", (1, 10), [turn(0.5, 5, 2)], releases=False),
        Agent(2, -1, "red", (1, 10), [turn(0.3, 7, 2)], fork_of=(0, 0)),
    ]
    traffic = AgentTraffic(agents)
    (first,) = traffic.arrivals()
    assert isinstance(first.prompt, Pieces)
    fork, second = traffic.after(first, 10.0)
    assert (fork.arrival, second.arrival, fork.prompt_tokens()[:17]) == (
        10.3,
        12.0,
        second.prompt_tokens()[:17],
    )
    assert (traffic.shared(0, 0), traffic.shared(2, 0), traffic.shared(0, 1)) == (None, 17, 17)
    (third,) = traffic.after(second, 20.0)
    assert (len(third.prompt_tokens()), traffic.shared(0, 2)) == (16, None)
    (following,) = traffic.after(third, 30.0)
    assert traffic.after(following, 40.0) == traffic.after(fork, 40.0) == []
    hints = [one.session for one in (first, second, third, following, fork)]
    assert [(hint.name, hint.release, hint.supersede, hint.fork_of) for hint in hints if hint] == [
        ("agent-0", False, False, ""),
        ("agent-0", False, False, ""),
        ("agent-0", True, True, ""),
        ("agent-1", False, False, ""),
        ("agent-2", True, False, "agent-0"),
    ]


@pytest.mark.slow
def test_hints_find_what_lru_has_lost() -> None:
    """Sessions whose requests say what they will need again, on a small trace."""
    agents = make_agents.make(3, 48, lanes=24)
    blocks = int(sessions_simulated.demand(agents) / 2)
    lru = sessions_simulated.run(agents, blocks, hints=False)
    kept = sessions_simulated.run(agents, blocks, hints=True)
    assert len(lru.turns) == len(kept.turns) == sum(len(agent.turns) for agent in agents)
    assert kept.share() > max(0.9, 4 * lru.share())
    assert kept.seconds < lru.seconds
