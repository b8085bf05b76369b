"""Keys of KV blocks where only the pieces of prompts are known: equal for equal beginnings, and not
hashed.

Owns these names. Must not know pools or schedulers: to them one key is as good as another.

An engine hashes the tokens of every block (block_keys.py). Of traffic that is made of pieces, whose
tokens are equal where their contents are, the beginning of a prompt up to the end of a block is
known by less: the pieces before the one in which the block ends, that piece's content, and how far
it reaches into it. Those are numbered, so equal numbers mean equal beginnings, and the other way
round. Never to be mixed with hashed keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pageturner.lab.traffic.traffic import OpenLoop, Pieces, Sessions, Traffic, TrafficRequest
from pageturner.scheduler.listener import Listener
from pageturner.scheduler.types import Sequence


def known_by_pieces(traffic: Traffic) -> bool:
    """Return whether each prompt is made of pieces and each answer of one token, and nobody else
    asks for blocks by their hash, as kept sessions do."""
    if isinstance(traffic, Sessions):
        return True
    return isinstance(traffic, OpenLoop) and all(
        isinstance(one.prompt, Pieces) and isinstance(one.answer, int) and one.session is None
        for one in traffic.requests
    )


class BlockNames:
    """Keys of whole blocks of `size` tokens, for traffic that is `known_by_pieces`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._runs: dict[tuple[int, int], int] = {}  # (what is before, content) -> its number
        self._ends: dict[
            tuple[int, int], int
        ] = {}  # (number of a run, its length) -> what is before the next
        self._expected: dict[int, TrafficRequest] = {}

    def keys(self, parts: Iterable[tuple[int, int]]) -> list[bytes]:
        """The keys of the tokens that these pieces, (content, tokens) each, stand for. 16 bytes
        each."""
        size, found, before, at = self._size, list[bytes](), 0, 0
        for content, count in merged(parts):
            run = self._runs.setdefault((before, content), len(self._runs))
            number, end = run.to_bytes(8, "little"), at + count
            found += [
                number + (stop - at).to_bytes(8, "little")
                for stop in range((at // size + 1) * size, end + 1, size)
            ]
            before, at = self._ends.setdefault((run, count), len(self._ends) + 1), end
        return found

    def of(self, asked: TrafficRequest) -> list[bytes]:
        """The keys of a prompt and its answer up to its last token, whose KV nobody computes."""
        assert isinstance(asked.prompt, Pieces)
        assert isinstance(asked.answer, int)
        return self.keys((*asked.prompt.parts, (asked.answer, asked.answer_length - 1)))

    # -- for schedulers ----------------------------------------------------------------------------
    @property
    def listener(self) -> Listener:
        """Gives a sequence its keys before anybody asks for them; a pool makes those that are not
        there."""
        return Listener(arriving=self._arriving)

    def expect(self, id: int, asked: TrafficRequest) -> None:
        """A request of this number will come."""
        self._expected[id] = asked

    def forget(self, id: int) -> None:
        """It has left, or never came."""
        self._expected.pop(id, None)

    def _arriving(self, seq: Sequence) -> None:
        asked = self._expected.pop(seq.request.id, None)
        if asked is not None:
            seq.block_keys = self.of(asked)


def merged(parts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same tokens with neighbours of one content as one piece, none of them empty: how they are
    cut does not matter."""
    content, total = 0, 0
    for other, count in parts:
        if not count:
            continue
        if total and other != content:
            yield content, total
            total = 0
        content, total = other, total + count
    if total:
        yield content, total
