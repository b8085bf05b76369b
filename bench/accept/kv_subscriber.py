"""A router's side of KV events, written from what vLLM publishes of them: batches decoded into its types,
their numbers watched, and what was missed asked for again.

Owns the index that such a client keeps of one server. Uses nothing of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

POLL = 2000  # milliseconds that a replay may be silent
END = (-1).to_bytes(8, "big", signed=True)
Hash = bytes | int


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Blocks in a row. token_ids: of all of them."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Blocks that are held no longer."""

    block_hashes: list[Hash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Nothing is held."""


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Of one step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class KVIndex:
    """What one server holds: by the block before it and its tokens, each block."""

    def __init__(self) -> None:
        self.size = 0
        self.removed = 0
        self._after: dict[tuple[Hash | None, tuple[int, ...]], Hash] = {}
        self.place: dict[Hash, tuple[Hash | None, tuple[int, ...]]] = {}

    def take(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        """One event. KeyError for a block that is removed and was not held."""
        if isinstance(event, BlockStored):
            self.size, parent = event.block_size, event.parent_block_hash
            for n, name in enumerate(event.block_hashes):
                where = parent, tuple(event.token_ids[n * self.size : (n + 1) * self.size])
                self._after[where], self.place[name], parent = name, where, name
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del self._after[self.place.pop(name)]
                self.removed += 1
        else:
            self._after.clear()
            self.place.clear()

    def found(self, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt are held; the last one is always computed."""
        at, parent = 0, None
        while self.size and at + self.size < len(tokens):
            held = self._after.get((parent, tuple(tokens[at : at + self.size])))
            if held is None:
                break
            parent, at = held, at + self.size
        return at


class Subscriber:
    """The index of one server, by its events. events, replay: its addresses.

    numbers  of the batches that were taken, in their order
    replayed how many of them were asked for
    """

    def __init__(self, events: str, replay: str) -> None:
        context: Any = zmq.Context.instance()
        self.index = KVIndex()
        self.numbers: list[int] = []
        self.replayed = 0
        self._events, self._replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._events.setsockopt(zmq.SUBSCRIBE, b"")
        self._events.connect(events)
        self._replay.connect(replay)
        self._decoder = msgspec.msgpack.Decoder(Batch)

    def listen(self, silent: int = 500, lose: bool = False) -> None:
        """Take what comes until nothing has for so many milliseconds. lose: throw it away, as a client that
        was not there."""
        while self._events.poll(silent):
            _, number, data = self._events.recv_multipart()
            if not lose:
                self._arrived(int.from_bytes(number, "big"), data)

    def close(self) -> None:
        """End both sockets."""
        self._events.close(0)
        self._replay.close(0)

    def _arrived(self, number: int, data: bytes) -> None:
        first = self.numbers[-1] + 1 if self.numbers else 0
        if number > first:
            self._ask(first)
        if not self.numbers or number > self.numbers[-1]:
            self._take(number, data)

    def _ask(self, first: int) -> None:
        """For all batches from this number on. TimeoutError when no end comes."""
        self._replay.send_multipart((b"", first.to_bytes(8, "big")))
        while self._replay.poll(POLL):
            _, number, data = self._replay.recv_multipart()
            if number == END:
                return
            self._take(int.from_bytes(number, "big"), data)
            self.replayed += 1
        raise TimeoutError("the replay has no end")

    def _take(self, number: int, data: bytes) -> None:
        self.numbers.append(number)
        for event in self._decoder.decode(data).events:
            self.index.take(event)


def whole(subscriber: Subscriber) -> bool:
    """Whether it has every batch from the first, once and in order."""
    return subscriber.numbers == list(range(len(subscriber.numbers))) and bool(subscriber.numbers)


def answer(found: dict[str, Any]) -> tuple[int, int]:
    """Prompt tokens of an answer of the API, and those found in the cache."""
    usage = found["usage"]
    return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get(
        "cached_tokens", 0
    )
