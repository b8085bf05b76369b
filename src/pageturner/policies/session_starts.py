"""Session starts: a conversation that wants to be kept waits until there is room to keep it.

A conversation that is silent between two turns holds memory like one that runs, and it comes back.
Where more of them are under way than fit, each turn overwrites what another one is about to ask
for, and every prompt is computed again from its first token. So the first turn of one more, and the
next turn of one that has lost its KV, stands aside while the others that are awaited fill what
sessions may keep: others in the queue pass it. It waits at most `session_wait` seconds, in the
order of arrival, and not for those that nobody waits for any more (session_worth.py,
`Gaps.awaited`). An owner whose own sessions have less than its part waits for nobody: what it needs
is given up by those who have more. Requests without a session never wait here.

Whether they fit is asked of the time to come. Conversations grow by `growth` blocks in each turn,
and have as many turns as those before them had, but half as many still to come at least, for who
has lived long is not about to end. Sums are largest just before somebody ends, so with conversation
i of size s_i and r_i turns to come, the most that all of them will need is

    peak = max over i of the sum over all j with r_j >= r_i of (s_j + growth * r_i)

Owns which requests stand aside. Must not know who claims what (kept_sessions.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from pageturner.policies.kept_sessions import KeptSessions
from pageturner.policies.session_claims import KeptConversation
from pageturner.scheduler.batching import View
from pageturner.scheduler.types import Sequence

GROWS = 2.0  # times its first prompt, until conversations have ended and their length is known


@dataclass(slots=True)
class _Room:
    """Conversations under way: (turns to come, blocks now) of all, and the blocks of each owner's
    when they end. until: when that may become less by itself."""

    ahead: list[tuple[float, float]]
    of: Counter[str]
    until: float


class SessionStarts:
    """Holds back first turns of sessions. wait: the most seconds for which it has a request wait;
    idle_joins: whether the first of them joins where nobody else is to be computed."""

    def __init__(self, sessions: KeptSessions) -> None:
        self._sessions = sessions
        self.wait = 0.0
        self.idle_joins = False

    def held(self, v: View) -> set[Sequence]:
        """Return the waiting sequences that stand aside in this step, and set when to ask again."""
        if not len(self._sessions):
            return set()
        self._sessions.plan(v.now)
        starts = {seq: one for seq in v.waiting if (one := self._starting(seq)) is not None}
        if not starts or not self.wait:
            return set()
        room = self._room(set(starts.values()), v.now)
        aside: set[Sequence] = set()
        owners: set[str] = set()  # whose first session stands aside, and so all behind it
        wake = room.until
        # sessions that were under way before come first
        for seq, one in sorted(starts.items(), key=lambda pair: not pair[1].turns):
            until = seq.request.arrival + self.wait
            if v.now < until and (one.owner in owners or not self._fits(one, room)):
                aside.add(seq)
                owners.add(one.owner)
                wake = min(wake, until)
            else:
                self._add(one, room)
        if self.idle_joins and aside.issuperset(v.waiting) and not v.decoding and not v.prefilling:
            aside.discard(v.waiting[0])
        if aside:
            v.wake = max(v.now, wake)
        return aside

    def _starting(self, seq: Sequence) -> KeptConversation | None:
        """The conversation that would begin with this turn; None: it is none, or under way."""
        one = self._sessions.turn_of(seq)
        starts = one is not None and not one.keys and one.keep > 0 and not one.released
        return one if starts and not seq.request.resume else None

    def _room(self, starts: set[KeptConversation], now: float) -> _Room:
        """Return the room that the conversations under way need."""
        gaps, room = self._sessions.gaps, _Room([], Counter(), inf)
        for one in self._sessions:
            if one not in starts and gaps.awaited(one, now):
                self._add(one, room)
                if not one.open:
                    room.until = min(room.until, gaps.awaited_until(one) + 1e-6)
        return room

    def _add(self, one: KeptConversation, room: _Room) -> None:
        turns, blocks = self._ahead(one)
        room.ahead.append((turns, blocks))
        room.of[one.owner] += int(blocks + turns * self._sessions.growth)

    def _ahead(self, one: KeptConversation) -> tuple[float, float]:
        """Turns that it will still have, as far as can be known, and its blocks behind the present
        one."""
        blocks = max(one.pays, one.coming)
        if not self._sessions.life:
            return 0.0, GROWS * blocks
        life = self._sessions.life
        return max(1.0, life - one.turns, life / 2), blocks

    def _fits(self, one: KeptConversation, room: _Room) -> bool:
        turns, blocks = self._ahead(one)
        mine = room.of[one.owner] + blocks + turns * self._sessions.growth <= self._sessions.part(
            one
        )
        both = [*room.ahead, (turns, blocks)]
        return mine or not room.ahead or peak(both, self._sessions.growth) <= self._sessions.most


def peak(ahead: Iterable[tuple[float, float]], growth: float) -> float:
    """The most blocks that conversations with these (turns to come, blocks now) will need at a
    time."""
    most = now = 0.0
    for count, (turns, blocks) in enumerate(sorted(ahead, key=lambda one: -one[0]), 1):
        now += blocks
        most = max(most, now + count * growth * turns)
    return most
