"""Pins: requests that have ended and whose blocks stay, so that whoever begins alike finds them.

Owns which they are and how much memory they hold, or will hold when they end. Must not know the queue.
"""

from __future__ import annotations

from pageturner.core.blocks import BlockPool
from pageturner.core.types import Refused, Sequence


class PinnedPrefixes:
    """By the ids of their requests."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._kept: dict[int, Sequence] = {}
        self._coming: dict[int, int] = {}  # blocks that a request under way will keep at the most

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
        kept = {block for seq in self._kept.values() for block in seq.blocks}
        return len(kept) + sum(self._coming.values())

    def promise(self, seq: Sequence, peak: int, largest: int) -> None:
        """The request is going to be pinned. Refused where that leaves too little for another one that was
        taken already and may need KV of `largest` tokens, or where pins cannot be found again."""
        if not self._pool.prefix_caching or self._pool.window:
            raise Refused(
                "pin_unsupported",
                "a prefix can be pinned where prefix caching is on and no layer has a sliding window",
            )
        need = self._pool.blocks_for(peak)
        rest = (self._pool.full.num_blocks - self.blocks - need) * self._pool.block_size
        if rest < max(largest, 1):
            raise Refused(
                "pin_too_large",
                f"pinning {peak} tokens would leave KV memory for {max(rest, 0)}, too few for the requests"
                " that are here: pin less, unpin something or give the engine more KV memory",
            )
        self._coming[seq.request.id] = need

    def held(self, id: int) -> tuple[int, int]:
        """Blocks that a pin holds, and how many of these others hold too."""
        seq = self._kept[id]
        return len(seq.blocks), len(self._pool.full.shared_places(seq.blocks, 0, len(seq.blocks)))

    def keep(self, seq: Sequence) -> None:
        """The request has ended: its sealed blocks stay."""
        self._pool.keep(seq)
        self._kept[seq.request.id] = seq
        self.forget(seq.request.id)
        self._tell()

    def forget(self, id: int) -> None:
        """The request ended in another way, or has nothing to do with this."""
        self._coming.pop(id, None)

    def drop(self, id: int) -> bool:
        """Let the blocks go: they are cached then, like those of any other. False if there are none."""
        seq = self._kept.pop(id, None)
        if seq is not None:
            self._pool.release(seq)
            self._tell()
        return seq is not None

    def _tell(self) -> None:
        """What is pinned without a salt is everybody's."""
        open_to_all = (seq for seq in self._kept.values() if not seq.request.salt)
        self._pool.public = frozenset(block for seq in open_to_all for block in seq.blocks)
