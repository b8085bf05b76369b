"""Makes agents (bench/data/agent_traffic.py) from a seed.

Lengths follow recorded agents (46 runs on SWE-bench with 2,146 turns: a prompt of some 16,500 tokens that all
begin with, then at the median 146 new tokens and 106 of an answer in each turn), for a small model on a small
machine: prompts that all share are 1/40 as long, new text 1/2, answers 1/5. A tool is one of three kinds, and
an agent knows which: reading (0.2 to 0.6 s), searching (0.5 to 2 s), tests (1.5 to 5 s); that is all that its
`next_in` says. One in four forks another agent off, one in six has its conversation summed up in the middle,
one in six is never heard of again without a word.
"""

from __future__ import annotations

import math
import random

from agent_traffic import Agent, AgentTurn

TOOLS = ((0.2, 0.6), (0.5, 2.0), (1.5, 5.0))  # seconds
SYSTEMS = (416, 352, 304)  # tokens
LANES, TENANTS = 24, ("red", "blue")


def length(dice: random.Random, median: float, spread: float, most: int) -> int:
    return max(4, min(most, round(median * math.exp(dice.gauss(0.0, spread)))))


def turns_of(dice: random.Random, count: int) -> list[AgentTurn]:
    """Tool calls between `count` turns."""
    found: list[AgentTurn] = []
    think, compacts = dice.uniform(0.2, 1.0), dice.random() < 1 / 6 and count > 5
    for number in range(count):
        low, high = TOOLS[dice.choices(range(3), (5, 3, 2))[0]]
        compact = compacts and number == count // 2
        new = length(dice, 120, 0.5, 300) if compact or not number else length(dice, 73, 0.9, 400)
        answer = length(dice, 21, 0.8, 80)
        found.append(
            AgentTurn(round(think, 3), new, answer, round(math.sqrt(low * high), 2), compact)
        )
        think = math.exp(dice.uniform(math.log(low), math.log(high)))
    return found


def make(seed: int, agents: int, lanes: int = LANES) -> list[Agent]:
    """So many agents in lanes, and those that they fork off."""
    dice, found = random.Random(seed), list[Agent]()
    for place in range(agents):
        lane, number = place % lanes, len(found)
        kind = dice.randrange(len(SYSTEMS))
        one = Agent(
            number,
            lane,
            TENANTS[lane % len(TENANTS)],
            (kind + 1, SYSTEMS[kind]),
            turns_of(dice, dice.randint(3, 12)),
            dice.random() >= 1 / 6,
        )
        found.append(one)
        if dice.random() < 1 / 4:
            behind = dice.randrange(len(one.turns) - 1)
            turns = turns_of(dice, dice.randint(3, 5))
            found.append(
                Agent(number + 1, -1, one.tenant, one.system, turns, True, (number, behind))
            )
    return found
