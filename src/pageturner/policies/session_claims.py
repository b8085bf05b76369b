"""The claims of conversations: which blocks each one claims, and what it pays for them.

Owns the claims: of each block key, who claims it, the first one in front. That one pays for the
block, so what several share is paid for once. Must not know what a claim is worth, nor blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from pageturner.policies.eviction_order import EvictionOrder, Fate
from pageturner.scheduler.store import Store


@dataclass(slots=True, eq=False)
class KeptConversation:
    """One conversation as an engine knows it. Times in seconds of the engine's clock.

    keys      of the blocks that it claims: the beginning of what was said
    whole     how many it claimed when its last turn had ended
    pays      for how many of these; most: for how many it has ever paid
    share     as SessionHint has it
    keep      seconds for which it claims them behind its last turn, which ended at `ended`
    next_in   seconds behind that in which it is expected; 0: it did not say
    gap       mean seconds between its turns; 0: there was none yet
    turns     that have ended; open: that wait or run
    coming    blocks that the prompt of its first turn takes beside those that are there already
    released  its claims end with the turns that are open
    paid      sum of blocks times seconds until `paid_until`
    """

    name: str
    owner: str
    share: float = 0.0
    keys: list[bytes] = field(default_factory=list)
    whole: int = 0
    pays: int = 0
    most: int = 0
    keep: float = 0.0
    next_in: float = 0.0
    gap: float = 0.0
    ended: float = 0.0
    turns: int = 0
    open: int = 0
    coming: int = 0
    released: bool = False
    paid: float = 0.0
    paid_until: float = 0.0

    def settle(self, now: float) -> None:
        """Pay until now."""
        self.paid += self.pays * max(0.0, now - self.paid_until)
        self.paid_until = max(now, self.paid_until)


class Claims(Container[bytes]):
    """The claims of all conversations.

    give_up   called when everything that is cached is claimed: it unclaims some of that
    pays      blocks that the conversations of each owner pay for
    ends      keys of the last blocks that conversations claim, where they go on; on_end: called
              with one that becomes an end, or is none any more
    """

    def __init__(self, store: Store, give_up: Callable[[], None]) -> None:
        self._store, self._give_up = store, give_up
        self._of: dict[bytes, dict[KeptConversation, None]] = {}
        self.pays: Counter[str] = Counter()
        self.ends: Counter[bytes] = Counter()
        self.on_end: Callable[[bytes], None] = lambda key: None

    @cached_property
    def _order(self) -> EvictionOrder:
        """The order of the store's cached blocks, which is another one from the first claim on."""
        return EvictionOrder(self._store, self, self._give_up)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, key: object) -> bool:
        return key in self._of

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._of)

    def change(self, one: KeptConversation, keys: list[bytes], now: float) -> None:
        """Let a conversation claim these keys from now on, and no others."""
        same = 0
        for before, after in zip(one.keys, keys, strict=False):
            if before != after:
                break
            same += 1
        self.cut(one, same, now, Fate.RECENT)
        one.settle(now)
        for key in keys[same:]:
            claimants = self._of.setdefault(key, {})
            if not claimants:
                self._pay(one, 1)
                self._order.claim(key)
            claimants[one] = None
        end = one.keys[-1:]
        one.keys += keys[same:]
        one.most = max(one.most, one.pays)
        self._ends_at(end, one.keys[-1:])

    def cut(self, one: KeptConversation, length: int, now: float, fate: Fate) -> int:
        """It claims only its first `length` keys any more. Returns how many of the others nobody
        else claims."""
        gone = one.keys[length:]
        end = one.keys[-1:]
        del one.keys[length:]
        self._ends_at(end, one.keys[-1:])
        one.settle(now)
        free = []
        for key in gone:
            claimants = self._of[key]
            payer = next(iter(claimants))
            del claimants[one]
            if payer is one:
                self._pay(one, -1)
                if claimants:
                    heir = next(iter(claimants))
                    heir.settle(now)
                    self._pay(heir, 1)
                else:
                    del self._of[key]
                    free.append(key)
        for key in free if fate is Fate.OLD else reversed(free):
            self._order.unclaim(key, fate)
        return len(free)

    def _ends_at(self, before: list[bytes], after: list[bytes]) -> None:
        """A conversation ends elsewhere; [] is nowhere."""
        if before != after:
            self.ends.update(after)
            self.ends.subtract(before)
            for key in before + after:
                if not self.ends[key]:
                    del self.ends[key]
                self.on_end(key)

    def _pay(self, one: KeptConversation, blocks: int) -> None:
        one.pays += blocks
        self.pays[one.owner] += blocks
        if not self.pays[one.owner]:
            del self.pays[one.owner]
