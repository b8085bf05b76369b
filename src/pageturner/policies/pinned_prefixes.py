"""Pinned prefixes: requests that have ended and whose blocks stay, so that whoever begins alike
finds them.

Owns which they are and how much memory they hold, or will hold when they end. Must not know the
queue.
"""

from __future__ import annotations

from pageturner.request import Refused
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.listener import Listener
from pageturner.scheduler.store import GONE
from pageturner.scheduler.types import Sequence


class PinnedPrefixes:
    """All pinned prefixes by the ids of their requests."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._kept: dict[int, Sequence] = {}
        self._coming: dict[int, int] = {}  # blocks that a request under way will keep at the most
        self._largest: dict[int, int] = {}  # blocks that each request which is here may need

    @property
    def listener(self) -> Listener:
        return Listener(arriving=self._arriving, ended=self._ended, stats=self._stats)

    def __contains__(self, id: int) -> bool:
        return id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._kept.values())

    @property
    def blocks(self) -> int:
        """Blocks that nobody else can have, now or soon."""
        return self._pool.pinned

    def shared(self, id: int) -> tuple[int, int]:
        """Blocks that a pin holds, and how many of these others hold too."""
        seq = self._kept[id]
        return len(seq.blocks), len(self._pool.full.shared_places(seq.blocks, 0, len(seq.blocks)))

    def keep(self, seq: Sequence) -> None:
        """A request has ended: its blocks stay, as far as others can begin with them, and of
        recurrent layers the state at the end of these."""
        pool = self._pool
        keys = pool.keys_of(seq.blocks[: seq.num_cached_blocks])
        keep = pool.findable(keys)
        state = pool.states.index.get(keys[keep - 1], GONE) if keep else GONE
        pool.states.share([state])
        seq.computed = keep * pool.block_size
        seq.inflight = 0
        seq.num_cached_blocks = keep
        seq.public = min(seq.public, keep)
        pool.full.truncate(seq.blocks, keep)
        for kind in pool.kinds:
            if kind.sparse:
                table = kind.table(seq)
                kind.store.truncate(table, 0)
                table[:] = [GONE] * kind.places(seq.computed)
                table.released = kind.first_seen(seq.computed)
        if state != GONE:
            seq.states[-1] = state
        self._kept[seq.request.id] = seq
        self._tell_pool()

    def drop(self, id: int) -> bool:
        """Let the blocks go: they are cached then, like those of any other. False if there are
        none."""
        seq = self._kept.pop(id, None)
        if seq is not None:
            self._pool.release(seq)
            self._tell_pool()
        return seq is not None

    def forget_others(self) -> None:
        """Make blocks that nobody uses empty: taking all that can be taken has them forget their
        keys."""
        for kind in self._pool.kinds:
            table: list[int] = []
            kind.store.write(table, 0, kind.store.available)
            kind.store.truncate(table, 0)

    def _arriving(self, seq: Sequence) -> None:
        """Note a new request. One that is to be pinned is Refused where that leaves too little for
        the largest one that was taken already, or where pins cannot be found again."""
        id, request = seq.request.id, seq.request
        if id in self._kept:
            raise ValueError(f"request {id} is here already")
        if request.pin:
            self._check(seq)
        ways = max(1, request.params.beam_width)
        self._largest[id] = ways * self._pool.blocks_for(seq.limit - 1)

    def _check(self, seq: Sequence) -> None:
        if not self._pool.prefix_caching or self._pool.window:
            raise Refused(
                "pin_unsupported",
                "a prefix can be pinned where prefix caching is on and no layer has a sliding window",
            )
        states, tails = self._pool.states.num_blocks, self._pool.tails.num_blocks
        if states and len(self._kept) + len(self._coming) >= states - tails:
            raise Refused(
                "pin_too_large",
                f"a pin holds a state of the recurrent layers, and {states - tails} are not for running"
                " requests: unpin something or give the engine more KV memory",
            )
        peak = seq.limit - 1
        need = self._pool.blocks_for(peak)
        rest = (self._pool.full.num_blocks - self.blocks - need) * self._pool.block_size
        if rest < max(self._pool.block_size * max(self._largest.values(), default=0), 1):
            raise Refused(
                "pin_too_large",
                f"pinning {peak} tokens would leave KV memory for {max(rest, 0)}, too few for the requests"
                " that are here: pin less, unpin something or give the engine more KV memory",
            )
        self._coming[seq.request.id] = need
        self._tell_pool()

    def _ended(self, seq: Sequence, finish: str | None) -> bool:
        self._largest.pop(seq.request.id, None)
        if not seq.request.pin:
            return False
        self._coming.pop(seq.request.id, None)
        keeps = finish in ("stop", "length")
        if keeps:
            self.keep(seq)
        self._tell_pool()
        return keeps

    def _tell_pool(self) -> None:
        """Tell the pool how many blocks are gone for others, and which are public: what is pinned
        without a salt."""
        kept = {block for seq in self._kept.values() for block in seq.blocks}
        self._pool.pinned = len(kept) + sum(self._coming.values())
        open_to_all = (seq for seq in self._kept.values() if not seq.request.salt)
        self._pool.public = frozenset(block for seq in open_to_all for block in seq.blocks)

    def _stats(self) -> dict[str, float]:
        return {"pinned": len(self._kept)}
