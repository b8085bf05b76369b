"""Sessions over HTTP: agents with tool calls, whose KV is twice as large as the memory for it.

Owns the clients, and what counts as found. The trace is bench/data/agents.jsonl; its texts are made-up tokens
of the lengths that it says. On the simulated engine it is run whole, and with other seeds; on a real server
with SmolLM2 its first agents, at its own pace, with shorter texts in smaller blocks: a small machine has
other things to do. How large the memory is to be is measured on the simulated engine.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "data")]

import harness  # noqa: E402
import make_agents  # noqa: E402
import sessions_simulated as simulated  # noqa: E402
from agent_traffic import Agent, AgentTurn, hint_of, name_of, read_agents  # noqa: E402
from harness import Line  # noqa: E402
from sessions_simulated import BLOCK, Outcome, Turn  # noqa: E402

TRACE = HERE.parent / "data" / "agents.jsonl"
OVERCOMMITTED = 2.0
LEAST = 0.95  # of the turns find their KV
SEEDS = range(2, 22)
REAL_AGENTS = 48  # of the trace, on the real server, and those that they fork off
SHORTER = (
    4  # times, and blocks too: as many blocks as on the simulated engine, with less to compute
)
KV_BYTES = 23_040  # of a token of SmolLM2
TENANTS = (*make_agents.TENANTS, "grey")
HOGS = 120  # conversations that one opens, one after the other, and never comes back to
SUFFERS = 0.05  # of their turns, that others may miss more of beside it
SLOWER = 1.5  # times their TTFT at the median


# -- the simulated engine ------------------------------------------------------------------------------------
def told(outcome: Outcome, tenants: tuple[str, ...] = ()) -> str:
    """Turns that found their KV, TTFT of first and of later turns, time in all, work."""
    first, later = outcome.ttft(tenants, first=True), outcome.ttft(tenants, first=False)
    figure = f"{outcome.share(tenants):.1%} found, TTFT {quantiles(later)} s, of first turns {quantiles(first)} s"
    if tenants:
        return figure
    return f"{figure}; {outcome.seconds:.0f} s, {outcome.computed:,} prompt tokens computed"


def quantiles(values: list[float]) -> str:
    """Median and 95th percentile."""
    return f"{statistics.median(values):.2f} / {sorted(values)[int(0.95 * (len(values) - 1))]:.2f}"


def simulated_lines() -> Iterator[Line]:
    agents = read_agents(TRACE)
    mean, most = simulated.demand(agents)
    blocks = int(mean / OVERCOMMITTED)
    what = f"simulated, {len(agents)} agents, KV of who is under way {mean:.0f} blocks ({most} at most)"
    yield Line(what, f"memory of {blocks}, {mean / blocks:.2f} times overcommitted", None)
    hinted = simulated.run(agents, blocks, hints=True)
    yield Line(
        f"simulated, hints: at least {LEAST:.0%} of turns find their KV",
        told(hinted),
        hinted.share() >= LEAST,
    )
    yield Line(
        "simulated, LRU without hints", told(simulated.run(agents, blocks, hints=False)), None
    )
    nobody = simulated.run(agents, blocks, hints=True, session_wait=0.0)
    yield Line("simulated, hints, and nobody waits (--session-wait 0)", told(nobody), None)
    shares: dict[bool, list[float]] = {True: [], False: []}
    times: dict[bool, list[float]] = {True: [], False: []}
    for seed in SEEDS:
        agents = make_agents.make(seed, 72)
        blocks = int(simulated.demand(agents)[0] / OVERCOMMITTED)
        for hints in (True, False):
            outcome = simulated.run(agents, blocks, hints=hints)
            shares[hints].append(outcome.share())
            times[hints].append(outcome.seconds)
    figures = {
        hints: f"{statistics.mean(of):.1%} ({min(of):.1%} to {max(of):.1%})"
        for hints, of in shares.items()
    }
    ratio = statistics.mean(a / b for a, b in zip(times[True], times[False], strict=True))
    figure = f"{figures[True]}; LRU {figures[False]}; time in all {ratio:.2f} of LRU's"
    yield Line(f"simulated, {len(SEEDS)} other seeds", figure, min(shares[True]) >= LEAST)


def hog(first: int) -> list[Agent]:
    """One lane: a conversation after the other, each kept for as long as can be, said to go on at once, and
    never heard of again."""
    turn = AgentTurn(1.0, 300, 8, 0.2)
    return [Agent(first + n, 1000, "grey", (9, 100), [turn], releases=False) for n in range(HOGS)]


def hog_lines() -> Iterator[Line]:
    """With as much memory as the others need, so that they lose only what somebody takes from them."""
    agents = read_agents(TRACE)
    blocks = int(simulated.demand(agents)[0] * 1.25)
    alone = simulated.run(agents, blocks, hints=True)
    beside = simulated.run([*agents, *hog(len(agents))], blocks, hints=True)
    yield Line(
        "simulated, memory for all: others without one that never releases",
        told(alone, make_agents.TENANTS),
        None,
    )
    yield starved("simulated", alone, beside)


def starved(where: str, alone: Outcome, beside: Outcome) -> Line:
    others = make_agents.TENANTS
    lost = alone.share(others) - beside.share(others)
    slower = statistics.median(beside.ttft(others)) / max(
        1e-3, statistics.median(alone.ttft(others))
    )
    opened = sum(turn.tenant == "grey" for turn in beside.turns)
    figure = f"{told(beside, others)}; TTFT at the median {slower:.2f} times; it opened {opened}"
    what = f"{where}, beside one that never releases others find at most {SUFFERS:.0%} less, TTFT {SLOWER} times"
    return Line(what, figure, lost <= SUFFERS and slower <= SLOWER)


# -- the real server -----------------------------------------------------------------------------------------
@dataclass(slots=True)
class Client:
    """All agents of a run against one server."""

    url: str
    agents: list[Agent]
    hints: bool
    block: int
    outcome: Outcome = field(default_factory=Outcome)
    lost: list[str] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: int = 0  # lanes of agents that come to an end by themselves

    def run(self) -> Outcome:
        begin = time.monotonic()
        lanes: dict[int, list[Agent]] = {}
        for agent in self.agents:
            if agent.lane >= 0:
                lanes.setdefault(agent.lane, []).append(agent)
        self._open = sum(lane[0].tenant != "grey" for lane in lanes.values())
        for lane in lanes.values():
            self._start(self._lane, lane)
        while self._threads:  # each may start others
            self._threads.pop(0).join()
        self.outcome.seconds = time.monotonic() - begin
        if self.lost:
            raise RuntimeError(f"{len(self.lost)} turns failed: {self.lost[0]}")
        return self.outcome

    def _start(self, work: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments)
        thread.start()
        with self._lock:
            self._threads.append(thread)

    def _lane(self, agents: list[Agent]) -> None:
        endless = agents[0].tenant == "grey"
        for agent in agents:
            if endless and not self._open:
                return
            self._converse(agent, [], None)
        self._open -= not endless

    def _converse(self, agent: Agent, before: list[int], shared: int | None) -> None:
        """All turns of an agent, behind what was said before."""
        for number, turn in enumerate(agent.turns):
            time.sleep(turn.think)
            begin = (
                before if before and not turn.compact else text(agent.system[0], agent.system[1])
            )
            prompt = begin + text(1_000_000 + agent.number * 1000 + number, turn.new)
            if turn.compact:
                shared = None
            try:
                answer, cached, ttft = self._ask(agent, number, prompt)
            except Exception as error:
                self.lost.append(repr(error))
                return
            found = Turn(
                agent.number, number, agent.tenant, len(prompt), cached, shared, ttft, self.block
            )
            self.outcome.turns.append(found)
            before = prompt + answer
            shared = len(before) - 1  # the KV of the last token is never computed
            for other in self.agents:
                if other.fork_of == (agent.number, number):
                    self._start(self._converse, other, before, shared)

    def _ask(self, agent: Agent, number: int, prompt: list[int]) -> tuple[list[int], int, float]:
        """A streamed completion: its tokens, cached tokens, seconds until the first."""
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": agent.turns[number].answer,
            "ignore_eos": True,
            "seed": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.hints:
            body["session"] = wire(agent, number)
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=300)
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer key-{agent.tenant}",
        }
        asked = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply, tokens, cached, ttft = connection.getresponse(), list[int](), 0, 0.0
        if reply.status != 200:
            raise RuntimeError(reply.read().decode())
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                ttft = ttft or time.monotonic() - asked
                tokens += choice.get("token_ids") or []
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        connection.close()
        return tokens, cached, ttft


def wire(agent: Agent, number: int) -> dict[str, Any]:
    """The field `session` of a turn."""
    hint = hint_of(agent, number)
    told: dict[str, Any] = {"id": name_of(agent), "keep": hint.keep, "next_in": hint.next_in}
    if hint.fork_of:
        told["fork_of"] = hint.fork_of
    return told | {"supersede": hint.supersede, "release": hint.release}


def text(content: int, count: int) -> list[int]:
    """Tokens of some content: the same for the same one."""
    dice = random.Random(content)
    return [dice.randrange(1000, 40_000) for _ in range(count)]


def on_server(agents: list[Agent], blocks: int, hints: bool) -> Outcome:
    with TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        digests = {name: hashlib.sha256(f"key-{name}".encode()).hexdigest() for name in TENANTS}
        keys.write_text(
            "".join(f'[[keys]]\ntenant = "{n}"\nsha256 = "{d}"\n' for n, d in digests.items())
        )
        block = BLOCK // SHORTER
        memory = ("--kv-cache-memory", str(blocks * block * KV_BYTES), "--block-size", str(block))
        with harness.server(
            *memory,
            "--max-num-seqs",
            "32",
            "--max-num-batched-tokens",
            "256",
            "--api-key-file",
            str(keys),
        ) as server:
            return Client(server.url, agents, hints, block).run()


def shorter(agents: list[Agent]) -> list[Agent]:
    """The same with texts of a part of their lengths."""

    def least(tokens: int) -> int:
        return max(2, tokens // SHORTER)

    def turn(one: AgentTurn) -> AgentTurn:
        return msgspec.structs.replace(one, new=least(one.new), answer=least(one.answer))

    return [
        msgspec.structs.replace(
            agent,
            system=(agent.system[0], least(agent.system[1])),
            turns=[turn(one) for one in agent.turns],
        )
        for agent in agents
    ]


def first(agents: list[Agent], count: int) -> list[Agent]:
    """So many of those in lanes, and who forks off from them: the beginning of the trace."""
    in_lanes = [agent.number for agent in agents if agent.lane >= 0]
    return agents[: in_lanes[count]] if count < len(in_lanes) else agents


def server_lines() -> Iterator[Line]:
    agents = shorter(first(read_agents(TRACE), REAL_AGENTS))
    mean, _ = simulated.demand(agents, BLOCK // SHORTER)
    blocks = int(mean / OVERCOMMITTED)
    where = f"SmolLM2, {len(agents)} agents, texts and blocks 1/{SHORTER} as long, {blocks} blocks for {mean:.0f}"
    hinted = on_server(agents, blocks, True)
    what = f"{where}: hints: at least {LEAST:.0%} of turns find their KV"
    yield Line(what, told(hinted), hinted.share() >= LEAST)
    yield Line(f"{where}: LRU without hints", told(on_server(agents, blocks, False)), None)
    blocks = int(mean * 1.25)
    alone = on_server(agents, blocks, True)
    what = f"SmolLM2, {blocks} blocks, room for all: without one that never releases"
    yield Line(what, told(alone, make_agents.TENANTS), None)
    hogs = shorter(hog(len(agents)))
    yield starved("SmolLM2", alone, on_server([*agents, *hogs], blocks, True))


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Every line of sessions. arguments.simulated: no real server."""
    yield from simulated_lines()
    yield from hog_lines()
    if not arguments.simulated:
        yield from server_lines()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument("--simulated", action="store_true", help="the simulated engine alone")


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
