"""Latency accounts, where the time of each request goes: an account of seconds by cause, complete
from the moment it came.

Owns the names of the parts, and how the time of a step is split. Must not know what the scheduler
decides, or text: it is told plans (whose `wait_reason` says why the queue stands), and when they
were made and run.

Every moment of a request in the engine is in one part. It waits (for its grammar or adapter, in the
queue, for the blocks that it lost) or it runs; who runs pays each step in whole, since it waits for
all of it:

    own         what the step would take with it alone: the forward pass without the next lines
    others      the tokens of others, each at what one more token adds to a step (step_time.py),
                never more than its share of the pass: apart for their prefill, their decoding, and
                padding
    sampling, grammar, drafting, overhead   as measured

So `others_prefill` is by how much a step would be shorter without the prompts of others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pageturner.request import Request, Timings
from pageturner.scheduler.types import Plan, WaitReason

MAX_SPANS = 64  # of one request's timeline; what follows is one span, called "later"
MAX_NAMED = 32  # requests that one account names
MAX_GATES = 4096  # causes that are remembered for those who wait
NAMED = 8  # of those it names, how many are told: the dearest


class Move(NamedTuple):
    """The part of one request in a step: prefill, recompute or decode, by so many tokens."""

    what: str
    tokens: int


class StepTimes(NamedTuple):
    """The times of one step: begun to be planned, to run; done; committed. spent: seconds of the
    run by part, the forward pass being the rest. each: seconds that one more token adds to a
    step."""

    begin: float
    planned: float
    ran: float
    end: float
    spent: dict[str, float]
    each: float


@dataclass(slots=True, eq=False)
class LatencyAccount:
    """The account of one request, or of a search with all its choices.

    since  up to when its time is accounted for
    state  grammar_wait, adapter_wait, kv_wait, queue, preempted or running: what it is doing since
           then
    """

    received: float
    since: float
    state: str
    by: int = 0  # who got its blocks
    users: int = 1
    parts: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[float, float, str, int]] = field(default_factory=list)
    named: dict[tuple[str, int], float] = field(default_factory=dict)

    def pay(self, part: str, seconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + seconds

    def blame(self, part: str, by: int, seconds: float) -> None:
        key = (part, by)
        if by and (key in self.named or len(self.named) < MAX_NAMED):
            self.named[key] = self.named.get(key, 0.0) + seconds

    def note(self, start: float, end: float, what: str, by: int) -> None:
        """One more piece of its timeline; what goes on as before makes the last piece longer."""
        if self.spans:
            last = self.spans[-1]
            if last[2:] == (what, by) or last[2] == "later":
                self.spans[-1] = (last[0], end, last[2], last[3])
                return
        full = len(self.spans) >= MAX_SPANS - 1
        self.spans.append((start, end, "later" if full else what, 0 if full else by))

    def wait(self, part: str, until: float, by: int = 0) -> None:
        """It has been waiting for that since `since`."""
        seconds = until - self.since
        if seconds > 0:
            self.pay(part, seconds)
            self.blame(part, by, seconds)
            self.note(self.since, until, part, by)
            self.since = until

    def told(self) -> Timings:
        """Return the account as it stands."""
        named = sorted(((s, part, by) for (part, by), s in self.named.items()), reverse=True)[
            :NAMED
        ]
        return Timings(
            self.received,
            self.since,
            dict(self.parts),
            tuple(self.spans),
            tuple((p, b, s) for s, p, b in named),
        )


class WaitHistory:
    """Why the queue stood, since when: one entry for each change."""

    def __init__(self) -> None:
        self._since: list[float] = []
        self._reasons: list[WaitReason | None] = []

    def note(self, at: float, wait_reason: WaitReason | None) -> None:
        if self._reasons and self._reasons[-1] == wait_reason:
            return
        if len(self._since) >= MAX_GATES:
            del self._since[: MAX_GATES // 2], self._reasons[: MAX_GATES // 2]
        self._since.append(at)
        self._reasons.append(wait_reason)

    def settle(self, account: LatencyAccount, id: int, until: float) -> None:
        """Charge a request for the time it has been waiting in the queue."""
        first = bisect_right(self._since, account.since)
        if not first:  # before the first plan, or forgotten
            account.wait("overhead", min([until, *self._since[:1]]))
        for i in range(max(first - 1, 0), len(self._since)):
            wait_reason = self._reasons[i]
            end = min(self._since[i + 1], until) if i + 1 < len(self._since) else until
            if wait_reason is None:
                account.wait("overhead", end)
            elif wait_reason.head not in (0, id):
                account.wait(f"queue_{wait_reason.cause}", end, wait_reason.head)
            else:
                account.wait(f"queue_{wait_reason.cause}", end, wait_reason.by)


class LatencyTracker:
    """The accounts of all requests that are in an engine. Calls come in the order of time."""

    def __init__(self) -> None:
        self._accounts: dict[int, LatencyAccount] = {}
        self._running: dict[int, LatencyAccount] = {}
        self._reasons = WaitHistory()
        self._moves: dict[int, Move] = {}

    def open(self, request: Request, now: float, state: str = "queue") -> None:
        """A request has come. Choices of one search have one account: the first one does the work
        for all."""
        parent = request.parent if request.params.beam_width else None
        home = None if parent is None else self._accounts.get(parent)
        if home is not None:
            home.users += 1
        self._accounts[request.id] = home or LatencyAccount(now, now, state)

    def ready(self, id: int, now: float) -> None:
        """It waited for its grammar or its adapter; from now on it is in the queue."""
        account = self._accounts[id]
        if account.state.endswith("_wait"):
            account.wait(account.state, now)
            account.state = "queue"

    def close(self, id: int, now: float) -> Timings | None:
        """Its account, at its end. None for one that was never opened."""
        timings = self.read(id, now)
        self.drop(id)
        return timings

    def read(self, id: int, now: float) -> Timings | None:
        """Its account as it stands."""
        account = self._accounts.get(id)
        if account is None:
            return None
        if account.state == "running":
            account.pay("overhead", now - account.since)
            account.since = now
        else:
            self._settle(id, account, now)
        return account.told()

    def read_some(self, ids: Iterable[int], now: float) -> dict[int, Timings]:
        """The accounts of those that are here, as they stand."""
        found = {id: self.read(id, now) for id in ids}
        return {id: timings for id, timings in found.items() if timings is not None}

    @property
    def open_ids(self) -> list[int]:
        """The requests that are here."""
        return list(self._accounts)

    def drop(self, id: int) -> None:
        """It is no more."""
        account = self._accounts.pop(id, None)
        if account is None:
            return
        account.users -= 1
        if not account.users:
            self._running = {
                one: other for one, other in self._running.items() if other is not account
            }

    def plan(self, plan: Plan) -> None:
        """A plan was made, and is not run yet."""
        self._reasons.note(plan.at, plan.wait_reason)
        moves: dict[int, Move] = {}
        self._moves = moves
        for item in plan.items:
            seq, id = item.sequence, item.sequence.request.id
            more = moves[id].tokens if id in moves else 0
            if len(seq.tokens) - seq.computed == 1:
                moves[id] = Move("decode", more + item.n)
            else:
                moves[id] = Move(
                    "recompute" if seq.computed < seq.max_computed_tokens else "prefill",
                    more + item.n,
                )
        for id, by in plan.preempted.items():
            if (lost := self._running.pop(id, None)) is not None:
                lost.wait("overhead", plan.at)
                lost.state, lost.by = "preempted", by
        for id in moves:
            if id not in self._running and (account := self._accounts.get(id)) is not None:
                self._settle(id, account, plan.at)
                account.state = "running"
                self._running[id] = account

    def _settle(self, id: int, account: LatencyAccount, now: float) -> None:
        if account.state == "queue":
            self._reasons.settle(account, id, now)
        else:
            account.wait(account.state, now, account.by)

    def step(self, plan: Plan, step: StepTimes) -> None:
        """The plan was run: charge everybody who runs."""
        if self._running:
            StepShares(plan, step, self._moves).charge(self._running)


class StepShares:
    """The split of one step among the requests that run."""

    def __init__(self, plan: Plan, step: StepTimes, moves: dict[int, Move]) -> None:
        self._step, self._moves = step, moves
        self._forward = max(0.0, step.ran - step.planned - sum(step.spent.values()))
        self._tokens = {"prefill": 0, "decode": 0}
        self._prompts: list[tuple[int, int]] = []  # (tokens, id) of the largest two prefills
        for id, move in moves.items():
            kind = "decode" if move.what == "decode" else "prefill"
            self._tokens[kind] += move.tokens
            if kind == "prefill":
                self._prompts = sorted([*self._prompts, (move.tokens, id)], reverse=True)[:2]
        self._padding = sum(rows for rows, _ in plan.ballast)
        total = sum(self._tokens.values()) + self._padding
        self._each = min(step.each, self._forward / total) if total else 0.0

    def charge(self, running: dict[int, LatencyAccount]) -> None:
        """Each of them pays the whole step, and what passed since the last one."""
        step, common = self._step, list(self._step.spent.items())
        around = (step.planned - step.begin) + (step.end - step.ran)
        alike: dict[
            Move, tuple[list[tuple[str, float]], str, int, float]
        ] = {}  # decoders pay the same
        for id, account in running.items():
            move = self._moves.get(id)
            if move is not None and move.what == "decode":
                bill = alike.get(move) or alike.setdefault(move, self._bill(id, move))
            else:
                bill = self._bill(id, move)
            parts, what, by, seconds = bill
            paid = account.parts
            for part, amount in parts:
                paid[part] = paid.get(part, 0.0) + amount
            for part, amount in common:
                paid[part] = paid.get(part, 0.0) + amount
            paid["overhead"] = paid.get("overhead", 0.0) + around + step.begin - account.since
            if by:
                account.blame("others_prefill", by, seconds)
            account.note(step.begin, step.end, what, by)
            account.since = step.end

    def _bill(self, id: int, move: Move | None) -> tuple[list[tuple[str, float]], str, int, float]:
        """Its parts of the forward pass; what its timeline says, whose prompt was computed beside
        it, and what that cost it."""
        by = next((one for _, one in self._prompts if one != id), 0)
        if move is None:
            return self._stalled(by)
        kind = "decode" if move.what == "decode" else "prefill"
        cost = {
            name: self._each * (n - (move.tokens if name == kind else 0))
            for name, n in self._tokens.items()
        }
        padding = self._each * self._padding
        own = self._forward - sum(cost.values()) - padding
        parts = [(f"own_{move.what}", own)]
        parts += [(f"others_{name}", seconds) for name, seconds in cost.items() if seconds]
        if padding:
            parts.append(("padding", padding))
        return parts, move.what, by, cost["prefill"]

    def _stalled(self, by: int) -> tuple[list[tuple[str, float]], str, int, float]:
        """It runs and got no token in this step: all of it was for others."""
        if by:
            return [("others_prefill", self._forward)], "stalled", by, self._forward
        return [("others_decode", self._forward)], "stalled", 0, 0.0
