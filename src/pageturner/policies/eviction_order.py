"""The eviction order: which cached block is overwritten next, where some are claimed by their keys.

Owns the order of the cached blocks of one store: first those that nobody can want any more, then
the least recently released, as without claims. What is claimed is overwritten when its claim is
given up, and not before. Must not know who claims what, nor why somebody gives up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, MutableMapping
from enum import Enum

from pageturner.scheduler.store import Store


class Fate(Enum):
    """The fate of a block that is not claimed any more."""

    USELESS = "nobody can ask for it: it goes before all others"
    OLD = "as if it were what has not been used for longest"
    RECENT = "as if it had just been used"


ABSENT = 0  # what `pop` says of a block that is not there; of one that is there it says None


class EvictionOrder(MutableMapping[int, None]):
    """Takes the place of `Store.cached` and `Store.oldest`.

    claimed  keys of blocks that are claimed
    give_up  called when everything that is cached is claimed: it unclaims some of that
    """

    def __init__(
        self, store: Store, claimed: Container[bytes], give_up: Callable[[], None]
    ) -> None:
        self._store, self._claimed, self._give_up = store, claimed, give_up
        self._useless: OrderedDict[int, None] = OrderedDict()
        self._plain: OrderedDict[int, None] = OrderedDict.fromkeys(store.cached)
        self._kept: OrderedDict[int, None] = OrderedDict()
        store.cached, store.oldest = self, self.oldest

    def oldest(self) -> int:
        """The block that is overwritten next. There must be a cached one."""
        while not self._useless and not self._plain:
            self._give_up()
        return next(iter(self._useless or self._plain))

    def claim(self, key: bytes) -> None:
        """This key, which had no claim, has one now."""
        block = self._store.index.get(key)
        if block is not None and self._remove(block):
            self._kept[block] = None

    def unclaim(self, key: bytes, fate: Fate) -> None:
        """This key has no claim any more. Of a chain of OLD ones the last key must be told last, of
        others first, so that no block is overwritten before those behind it."""
        block = self._store.index.get(key)
        if block is None or self._kept.pop(block, ABSENT) is ABSENT:
            return  # it is in use, and finds its place when it is released
        (self._useless if fate is Fate.USELESS else self._plain)[block] = None
        if fate is Fate.OLD:
            self._plain.move_to_end(block, last=False)

    @property
    def kept(self) -> int:
        """Cached blocks that are claimed."""
        return len(self._kept)

    def _remove(self, block: int) -> bool:
        return any(
            part.pop(block, ABSENT) is None for part in (self._plain, self._kept, self._useless)
        )

    # -- as a mapping, which is all that a store sees of it ----------------------------------------
    def __setitem__(self, block: int, value: None) -> None:
        key = self._store.keys[block]
        (self._kept if key in self._claimed else self._plain)[block] = None

    def __delitem__(self, block: int) -> None:
        if not self._remove(block):
            raise KeyError(block)

    def __getitem__(self, block: int) -> None:
        if block not in self._plain and block not in self._kept and block not in self._useless:
            raise KeyError(block)

    def __iter__(self) -> Iterator[int]:
        yield from self._useless
        yield from self._plain
        yield from self._kept

    def __len__(self) -> int:
        return len(self._useless) + len(self._plain) + len(self._kept)
