"""A memory that gives each request one contiguous piece, as servers without paging do.

Owns the pieces and the holes between them; best fit. Must not know what a request is. Compare with
scheduler/blocks.py, where any block serves anybody.
"""

from __future__ import annotations


class ContiguousMemory:
    """`size` tokens, all free at first. Holes are kept by place; neighbours become one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._holes: list[tuple[int, int]] = [(0, size)]  # (place, length), by place
        self._pieces: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def reserved(self) -> int:
        return sum(length for _, length in self._pieces.values())

    def take(self, id: int, length: int) -> bool:
        """A piece for `id`, from the smallest hole that holds it, the first of equals. False if none does."""
        fitting = [(hole[1], hole[0]) for hole in self._holes if hole[1] >= length]
        if not fitting:
            return False
        hole, place = min(fitting)
        at = self._holes.index((place, hole))
        self._holes[at : at + 1] = [(place + length, hole - length)] if hole > length else []
        self._pieces[id] = (place, length)
        return True

    def free(self, id: int) -> None:
        """Its piece is a hole again. KeyError if it has none."""
        holes = sorted([*self._holes, self._pieces.pop(id)])
        self._holes = [holes[0]]
        for place, length in holes[1:]:
            last, before = self._holes[-1]
            if last + before == place:
                self._holes[-1] = (last, before + length)
            else:
                self._holes.append((place, length))
