"""Sessions: conversations that say what becomes of their KV, and the share of the memory that is
theirs.

Owns which conversations there are, what of them is claimed, and who is given up when claims are too
many. A claim is a place in the order in which cached blocks are overwritten, and nothing else: who
needs memory to run gets it, whatever is claimed. Must not know the queue (session_starts.py), nor
what a block is worth (session_worth.py).

All claims together are at most `max_session_share` of the blocks that are not pinned. What is
beyond that is given up at the end of the turn that brought it, the cheapest first, from the end of
a conversation on.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from math import inf
from operator import attrgetter

from pageturner.ipc.session_messages import KeptSession, RestoreSession
from pageturner.policies.eviction_order import Fate
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.policies.session_claims import Claims, KeptConversation
from pageturner.policies.session_worth import Gaps, worth
from pageturner.request import Request, SessionHint
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.listener import Listener, StepReport
from pageturner.scheduler.types import Sequence

GIVEN_UP = 16  # blocks of a conversation, at a time
OWN_HINT = attrgetter("request.session")
LEARNT = 0.2  # weight of a conversation that has ended in the number of turns that they have


class KeptSessions:
    """All kept sessions by name. now: the newest time that was told; hint_of: what is said of the
    KV of a sequence."""

    hint_of: Callable[[Sequence], SessionHint | None] = OWN_HINT

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self._pool, self._config = pool, config
        self._sessions: dict[str, KeptConversation] = {}
        self._owners: Counter[str] = Counter()
        self._turns: dict[int, KeptConversation] = {}  # request -> whose turn it is
        self.claims = Claims(pool.full, self.give_up)
        self.gaps = Gaps()
        self.now = self._planned = 0.0
        self.life = 0.0  # turns that conversations have; 0: none has ended
        self.growth = 0.0  # blocks by which one grows in a turn
        self._just_ended: list[KeptConversation] = []
        self._next_lapse = inf
        self._changed: dict[str, KeptConversation] = {}
        self._found = self._missed = self._given_up = 0

    @property
    def listener(self) -> Listener:
        return Listener(
            arriving=self._arriving,
            attached=self._attached,
            ended=self._ended,
            committed=self._committed,
            stats=self._stats,
        )

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[KeptConversation]:
        return iter(self._sessions.values())

    @property
    def most(self) -> int:
        """Blocks that may be claimed at once. None are with layers that have a window (their blocks
        go while a sequence still runs), and without the prefix cache."""
        if not self._pool.prefix_caching or self._pool.window:
            return 0
        return int(
            self._config.max_session_share * max(0, self._pool.full.num_blocks - self._pool.pinned)
        )

    def turn_of(self, seq: Sequence) -> KeptConversation | None:
        """The conversation whose turn this is."""
        return self._turns.get(seq.request.id)

    def part(self, one: KeptConversation) -> float:
        """Blocks that the conversations of its owner may claim while others want to."""
        if one.share:
            return one.share * self.most
        return self.most / max(1, len(self._owners))

    # -- verbs -------------------------------------------------------------------------------------
    def release(self, name: str) -> None:
        """Nobody will go on with it: what only it claims goes first. Its open turns run on."""
        one = self._sessions.get(name)
        if one is not None:
            one.released = True
            self.claims.cut(one, 0, self.now, Fate.USELESS)
            self._changed[name] = one
            self._forget_if_over(one)

    def restore(self, told: RestoreSession, now: float) -> None:
        """Claim what is there of a conversation that another engine process knew."""
        self.tick(now)
        if self.most and told.hint.name not in self._sessions:
            one = self._open(told.hint, now)
            one.ended, one.turns = now, 1
            tokens = array("I", told.tokens)
            request = Request(0, tuple(tokens), salt=told.salt, adapter=told.adapter)
            self._claim(one, self._pool.match(Sequence(request, tokens=[*tokens])))
            self._bound()
            self._next_lapse = min(self._next_lapse, now + one.keep)
            self._changed[one.name] = one

    def plan(self, now: float) -> None:
        """A step is planned."""
        self._planned = now
        self.tick(now)

    def tick(self, now: float) -> None:
        """It is so late. Conversations whose time is over lose their claims; who comes back finds
        what is still cached."""
        self.now = max(self.now, now)
        if self.now < self._next_lapse:
            return
        self._next_lapse = inf
        for one in list(self._sessions.values()):
            if one.open:
                continue
            if self.now >= one.ended + one.keep:
                self.claims.cut(one, 0, one.ended + one.keep, Fate.OLD)
                self._forget_if_over(one)
            else:
                self._next_lapse = min(self._next_lapse, one.ended + one.keep)

    def news(self) -> list[KeptSession]:
        """Return what has changed since the last call."""
        changed, self._changed = self._changed, {}
        for one in changed.values():
            one.settle(self.now)
        size = self._pool.block_size
        return [
            KeptSession(
                name, size * len(one.keys), size * one.pays, size * one.paid, one.turns, one.open
            )
            for name, one in changed.items()
        ]

    # -- turns -------------------------------------------------------------------------------------
    def _arriving(self, seq: Sequence) -> None:
        hint = self.hint_of(seq)
        if hint is None or not self.most:
            return
        arrival = seq.request.arrival
        self.tick(arrival)
        one = self._sessions.get(hint.name)
        if one is None:
            one = self._open(hint, arrival)
        elif not one.open and one.turns:
            self.gaps.saw(one, max(0.0, arrival - one.ended))
        self._hear(one, hint)
        one.released = hint.release
        source = self._sessions.get(hint.fork_of)
        if source is not None and not one.keys:
            self.claims.change(one, list(source.keys), self.now)
        cached = self._pool.match(seq)
        if hint.supersede and one.keys:
            known = {self._pool.full.keys[block] for block in cached}
            reached = next((i for i, key in enumerate(one.keys) if key not in known), len(one.keys))
            reached = self._pool.findable(one.keys[:reached])
            self.claims.cut(one, reached, self.now, Fate.USELESS)
        if not one.turns:
            one.coming = max(one.coming, self._pool.blocks_for(len(seq.tokens)) - len(cached))
        one.open += 1
        self._turns[seq.request.id] = one
        self._changed[one.name] = one

    def _open(self, hint: SessionHint, now: float) -> KeptConversation:
        if len(self._sessions) >= self._config.max_sessions:
            idle = [one for one in self._sessions.values() if not one.open]
            if idle:
                least = self._cheapest(idle)
                self.claims.cut(least, 0, self.now, Fate.OLD)
                least.keep = 0.0
                self._forget_if_over(least)
        one = KeptConversation(hint.name, hint.owner, paid_until=now)
        self._hear(one, hint)
        self._sessions[hint.name] = one
        self._owners[hint.owner] += 1
        return one

    def _hear(self, one: KeptConversation, hint: SessionHint) -> None:
        one.keep = min(hint.keep, self._config.session_keep)
        one.next_in = hint.next_in
        one.share = hint.share

    def _attached(self, seq: Sequence, fresh: int) -> None:
        """Count whether a turn behind the first finds the KV that was claimed for it."""
        one = self._turns.get(seq.request.id)
        hint = seq.request.session
        if (
            one is None
            or (hint is not None and hint.supersede)
            or not one.turns
            or seq.max_computed_tokens != fresh
        ):
            return
        found = fresh >= (one.whole - 1) * self._pool.block_size
        self._found, self._missed = self._found + found, self._missed + (not found)

    def _ended(self, seq: Sequence, finish: str | None) -> None:
        one = self._turns.pop(seq.request.id, None)
        if one is None:
            return
        one.open -= 1
        one.turns += 1
        one.ended = self.now
        self._just_ended.append(one)
        self._changed[one.name] = one
        if one.released or not one.keep:
            self.claims.cut(one, 0, self.now, Fate.USELESS if one.released else Fate.RECENT)
        elif seq.num_cached_blocks >= min(
            len(one.keys), 1
        ):  # one that waited has no blocks, and changes nothing
            self._claim(one, seq.blocks[: seq.num_cached_blocks])
            self._bound()
        self._next_lapse = min(self._next_lapse, one.ended + one.keep)
        self._forget_if_over(one)

    def _committed(self, report: StepReport) -> None:
        """Set the time at which the turns of this step ended."""
        if self._just_ended:
            self.now = max(self.now, self._planned + report.seconds)
            for one in self._just_ended:
                one.ended = self.now
            self._just_ended.clear()

    def _claim(self, one: KeptConversation, blocks: list[int]) -> None:
        keys = self._pool.keys_of(blocks)
        del keys[self._pool.findable(keys) :]
        if one.whole:
            more = max(0, len(keys) - one.whole)
            self.growth += LEARNT / 2 * (more - self.growth) if self.growth else more
        self.claims.change(one, keys, self.now)
        one.whole = len(keys)

    def _forget_if_over(self, one: KeptConversation) -> None:
        if one.open or one.keys or not (one.released or self.now >= one.ended + one.keep):
            return
        if self._sessions.pop(one.name, None) is not None:
            self._owners[one.owner] -= 1
            self._owners += Counter()  # without those that have none
        self._changed[one.name] = one
        if one.turns:
            self.life += LEARNT * (one.turns - self.life) if self.life else one.turns

    # -- giving up ---------------------------------------------------------------------------------
    def worth(self, one: KeptConversation) -> float:
        """See session_worth.py."""
        size = self._pool.block_size
        place = len(one.keys) * size
        cost = size * (1.0 + max(0.0, self._config.context_price) * place / 1000)
        part = min(1.0, self.part(one) / max(1, self.claims.pays[one.owner]))
        return worth(one, self.now, self.gaps.expected(one), cost, part)

    def _cheapest(self, sessions: Iterable[KeptConversation]) -> KeptConversation:
        return min(sessions, key=self.worth)

    def _bound(self) -> None:
        """Give up what is beyond what all may claim, and beyond what an owner may at the most.
        Where layers are recurrent a conversation claims a state, too, of those that are not for
        running sequences."""
        states = self._pool.states.num_blocks
        most = self._config.max_session_share * (states - self._pool.tails.num_blocks)
        while len(self.claims) > self.most or (states and len(self.claims.ends) > most):
            self.give_up()
        for owner in {one.owner for one in self._just_ended}:
            while theirs := self._beyond(owner):
                self._cut(self._cheapest(theirs))

    def _beyond(self, owner: str) -> list[KeptConversation]:
        theirs = [one for one in self._sessions.values() if one.owner == owner and one.keys]
        limit = max((one.share for one in theirs), default=0.0) * self.most
        return theirs if limit and self.claims.pays[owner] > limit else []

    def give_up(self) -> None:
        """Something of the conversation that is worth least."""
        self._cut(self._cheapest(one for one in self._sessions.values() if one.keys))

    def _cut(self, one: KeptConversation) -> None:
        """It may come back all the same, so what it gives up has the place of what was just
        used."""
        rest = self._pool.findable(one.keys[:-GIVEN_UP])
        self._given_up += self.claims.cut(one, rest, self.now, Fate.RECENT)
        self._changed[one.name] = one

    def _stats(self) -> dict[str, float]:
        """Gauges sessions, session_blocks; counters of turns behind a first one that found the KV
        of the one before, or did not, and of blocks that were given up."""
        return {
            "sessions": len(self._sessions),
            "session_blocks": len(self.claims),
            "session_turns_found": self._found,
            "session_turns_missed": self._missed,
            "session_blocks_given_up": self._given_up,
        }
