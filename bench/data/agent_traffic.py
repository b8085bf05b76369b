"""Agents: conversations with tool calls between their turns, which say what becomes of their KV, or do not.

Owns how the conversations follow each other. A lane is somebody who has one
agent after the other do something; so it is a closed loop, and who is made to wait sends nothing meanwhile.
Must not know how anything is scheduled or kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from pageturner.lab.traffic.traffic import OWN, Pieces, TrafficRequest
from pageturner.request import SessionHint

KEEP = 60.0  # seconds for which an agent has its KV kept
MAX_TURNS = 1000


class AgentTurn(msgspec.Struct, frozen=True, array_like=True):
    """think: seconds behind the answer before it, or of a first turn behind the conversation before it;
    next_in: what the agent would say of the next one; new, answer: tokens; compact: all that was said but for
    the system's prompt is replaced by `new`."""

    think: float
    new: int
    answer: int
    next_in: float
    compact: bool = False


class Agent(msgspec.Struct, frozen=True):
    """One conversation. lane: of which it is the next; -1: it begins behind a turn of another one, (its
    number, the turn), with all that was said until then. system: (which prompt, its tokens), of all agents of
    a kind. releases: it says so when it has ended; otherwise it is simply never heard of again."""

    number: int
    lane: int
    tenant: str
    system: tuple[int, int]
    turns: list[AgentTurn]
    releases: bool = True
    fork_of: tuple[int, int] | None = None


def name_of(agent: Agent) -> str:
    return f"agent-{agent.number}"


def hint_of(agent: Agent, number: int) -> SessionHint:
    """What its turn says."""
    turn, last = agent.turns[number], number + 1 == len(agent.turns)
    forks = agent.fork_of is not None and number == 0
    return SessionHint(
        name=name_of(agent),
        owner=agent.tenant,
        keep=KEEP,
        next_in=turn.next_in,
        fork_of=f"agent-{agent.fork_of[0]}" if forks and agent.fork_of else "",
        supersede=turn.compact,
        release=last and agent.releases,
    )


@dataclass(slots=True)
class AgentTraffic:
    """Conversations as traffic. hints: whether they say anything of their KV."""

    agents: list[Agent]
    hints: bool = True
    # prompts and answers
    said: dict[int, list[tuple[tuple[int, int], ...]]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(len(agent.turns) for agent in self.agents)

    def arrivals(self) -> Iterator[TrafficRequest]:
        first: dict[int, Agent] = {}
        for agent in self.agents:
            if agent.lane >= 0:
                first.setdefault(agent.lane, agent)
        begin = [self._request(agent, 0, agent.turns[0].think, ()) for agent in first.values()]
        return iter(sorted(begin, key=lambda one: one.arrival))

    def after(self, request: TrafficRequest, end: float) -> list[TrafficRequest]:
        """Its next turn, or the next of its lane, and those that fork off behind it."""
        number, turn = request.turn or (0, 0)
        agent, said = self.agents[number], self.said[number][turn]
        found = [
            self._request(other, 0, end + other.turns[0].think, said)
            for other in self.agents
            if other.fork_of == (number, turn)
        ]
        if turn + 1 < len(agent.turns):
            return [*found, self._request(agent, turn + 1, end + agent.turns[turn + 1].think, said)]
        lane = (one for one in self.agents[number + 1 :] if one.lane == agent.lane >= 0)
        following = next(lane, None)
        if following is None:
            return found
        return [*found, self._request(following, 0, end + following.turns[0].think, ())]

    def shared(self, number: int, turn: int) -> int | None:
        """Tokens with which the prompt of a turn begins like what was computed in its conversation before;
        None where nothing was, or where that was given up by the agent itself."""
        agent = self.agents[number]
        source = (number, turn - 1) if turn else agent.fork_of
        if source is None or agent.turns[turn].compact:
            return None
        return sum(count for _, count in self.said[source[0]][source[1]])

    def _request(
        self, agent: Agent, number: int, at: float, before: tuple[tuple[int, int], ...]
    ) -> TrafficRequest:
        turn = agent.turns[number]
        new = OWN + 2 * (agent.number * MAX_TURNS + number)
        begin = before if before and not turn.compact else (agent.system,)
        prompt = (*begin, (new, turn.new))
        # its last token is the end
        answer = ((new + 1, turn.answer - 1),) if turn.answer > 1 else ()
        said = self.said.setdefault(agent.number, [()] * len(agent.turns))
        said[number] = (*prompt, *answer)
        return TrafficRequest(
            prompt=Pieces(prompt),
            output=turn.answer,
            max_tokens=turn.answer,
            arrival=at,
            answer=new + 1,
            tenant=agent.tenant,
            turn=(agent.number, number),
            session=hint_of(agent, number) if self.hints else None,
        )
