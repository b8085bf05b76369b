"""KV events: which blocks the prefix cache of this engine holds, published in vLLM's format over
ZeroMQ.

Owns the events, their numbers, and the thread that sends them. A router that listens knows which
server has the beginning of a prompt. The form is that of vLLM's `vllm.distributed.kv_events`:
MessagePack of arrays,

    batch    [time, [event, ...], 0]                the last one: rank of a data-parallel engine
    event    ["BlockStored", hashes, parent, tokens, block size, LoRA number, medium, LoRA name],
             ["BlockRemoved", hashes, medium] or ["AllBlocksCleared"]

sent as three frames: topic, number of the batch (8 bytes, big-endian), batch. A hash is the first 8
bytes of a block's key as a big-endian number. Who missed batches asks the replay address for all
from a number on, and gets what is still remembered, then an end: number -1, no batch.

A step only puts its events in a queue. What does not fit is dropped whole, with its number, so that
subscribers see the gap. Must not know requests beyond their tokens and adapter, nor what is done
with events.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pageturner.errors import EngineFault, pip_install
from pageturner.kv.store_hooks import add_block_hooks
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.listener import Listener, StepReport
from pageturner.scheduler.types import Sequence

MEDIUM = "GPU"  # vLLM's word for the memory that is computed with, whatever it is
WAITING = 4096  # batches that wait to be sent
REMEMBERED = 10_000  # batches for who asks again, at most so many bytes together
REMEMBERED_BYTES = 64 << 20
UNREAD = 100_000  # batches that one slow subscriber may leave unread: then it misses some
END = (-1).to_bytes(8, "big", signed=True)
LINGER = 200  # milliseconds that the end of an engine waits for subscribers


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    """One step's events. ts: seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = 0


class BlockStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Blocks in a row became findable. token_ids: of all of them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Blocks are not findable any more."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """None is findable any more."""


def block_hash(key: bytes) -> int:
    """Return the hash by which a block is known outside."""
    return int.from_bytes(key[:8], "big")


class KVEvents:
    """The events of one engine, by the hooks of its store and as a listener of its steps.

    listener  to be told by the scheduler
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._pool: BlockPool | None = None
        self._told: set[bytes] = set()  # keys that subscribers know
        self._gone: list[int] = []
        self._touched: dict[Sequence, int] = {}  # sequence -> first place that may be new
        self.listener = Listener(
            attached=lambda seq, fresh: self._touch(seq, 0),
            served=lambda seq, n, now: self._touch(seq, seq.num_cached_blocks),
            committed=self._committed,
            stats=sender.stats,
        )

    def attach(self, pool: BlockPool) -> None:
        """Begin: whatever subscribers know of an engine before this one is gone."""
        self._pool = pool
        add_block_hooks(pool.full, lambda key, block: None, self._evict)
        self._sender.send([AllBlocksCleared()])

    def _touch(self, seq: Sequence, place: int) -> None:
        self._touched[seq] = min(place, self._touched.get(seq, place))

    def _evict(self, key: bytes, block: int) -> None:
        if key in self._told:
            self._told.discard(key)
            self._gone.append(block_hash(key))

    def _committed(self, report: StepReport) -> None:
        """Tell what a step changed: first what had to go for it."""
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        if self._gone:
            events.append(BlockRemoved(self._gone) if self._told else AllBlocksCleared())
            self._gone = []
        for seq, first in self._touched.items():
            events += self._stored(seq, first)
        self._touched.clear()
        if events:
            self._sender.send(events)

    def _stored(self, seq: Sequence, first: int) -> list[BlockStored]:
        """The findable blocks of a sequence from a place on that nobody was told of, in rows."""
        assert self._pool is not None
        keys, size, index, found = seq.block_keys, self._pool.block_size, self._pool.full.index, []
        place = first
        while place < len(keys):
            end = place
            while end < len(keys) and keys[end] not in self._told and keys[end] in index:
                self._told.add(keys[end])
                end += 1
            if end > place:
                found.append(
                    BlockStored(
                        [block_hash(key) for key in keys[place:end]],
                        block_hash(keys[place - 1]) if place else None,
                        seq.tokens[place * size : end * size],
                        size,
                        lora_name=seq.request.adapter or None,
                    )
                )
            place = end + 1
        return found


class Sender:
    """A thread that owns the sockets. EngineFault for addresses that cannot be had, and without
    pyzmq."""

    def __init__(self, address: str, replay: str, topic: str) -> None:
        zmq = _zmq()
        self._zmq, self._topic = zmq, topic.encode()
        self._waiting: deque[tuple[int, float, list[Any]] | None] = deque()
        self._news = threading.Semaphore(0)
        self._number = self._sent = self._dropped = 0
        self._past: deque[tuple[int, bytes]] = deque()
        self._past_bytes = 0
        context = zmq.Context.instance()
        self._socket = context.socket(zmq.PUB)
        self._socket.set_hwm(UNREAD)
        self._socket.setsockopt(zmq.LINGER, LINGER)
        _take_place(zmq, self._socket, "--kv-events", address)
        self._replay = None
        if replay:
            self._replay = context.socket(zmq.ROUTER)
            self._replay.setsockopt(zmq.LINGER, LINGER)
            try:
                _take_place(zmq, self._replay, "--kv-events-replay", replay)
            except EngineFault:
                self._socket.close(0)
                raise
        threading.Thread(target=self._run, name="kv-events", daemon=True).start()

    def send(self, events: list[Any]) -> None:
        """Have a batch sent; it is dropped, with its number, while too many wait. Never waits."""
        number, self._number = self._number, self._number + 1
        if len(self._waiting) >= WAITING:
            self._dropped += 1
            return
        self._waiting.append((number, time.time(), events))
        self._news.release()

    def stats(self) -> dict[str, float]:
        """Batches sent and dropped."""
        return {
            "kv_event_batches": self._sent,
            "kv_event_batches_dropped": self._dropped,
        }

    def close(self) -> None:
        self._waiting.append(None)
        self._news.release()

    def _run(self) -> None:
        encoder = msgspec.msgpack.Encoder()
        while True:
            if self._news.acquire(timeout=0.02 if self._replay else None):
                batch = self._waiting.popleft()
                if batch is None:
                    break
                number, ts, events = batch
                self._publish(number, encoder.encode(EventBatch(ts, events)))
            if self._replay is not None and self._replay.poll(0):
                self._answer(self._replay)
        self._socket.close()
        if self._replay is not None:
            self._replay.close()

    def _publish(self, number: int, data: bytes) -> None:
        self._past.append((number, data))
        self._past_bytes += len(data)
        while len(self._past) > REMEMBERED or self._past_bytes > REMEMBERED_BYTES:
            self._past_bytes -= len(self._past.popleft()[1])
        try:
            frames = (self._topic, number.to_bytes(8, "big"), data)
            self._socket.send_multipart(frames, self._zmq.NOBLOCK)
            self._sent += 1
        except self._zmq.ZMQError:
            self._dropped += 1

    def _answer(self, replay: Any) -> None:
        """Everything from the number on that one subscriber asks for."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        try:
            for number, data in self._past:
                if number >= start:
                    replay.send_multipart(
                        (client, b"", number.to_bytes(8, "big"), data), self._zmq.NOBLOCK
                    )
            replay.send_multipart((client, b"", END, b""), self._zmq.NOBLOCK)
        except self._zmq.ZMQError:
            return  # it does not read: it may ask again


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise EngineFault(
            "no_zeromq", f"--kv-events needs ZeroMQ: {pip_install('kv-events')}"
        ) from error
    return zmq


def _take_place(zmq: Any, socket: Any, flag: str, address: str) -> None:
    """Bind to an address of this machine, or connect to another one's, as vLLM does."""
    try:
        parts = urlsplit(address)
        whole = (
            parts.port is not None if parts.scheme == "tcp" else bool(parts.netloc or parts.path)
        )
        if parts.scheme not in ("tcp", "ipc", "inproc") or not whole:
            raise ValueError("an address is tcp://*:5557, tcp://HOST:PORT or ipc://PATH")
        host = parts.netloc.rpartition(":")[0].strip("[]")
        local = (
            parts.scheme != "tcp"
            or host in ("*", "localhost", "0.0.0.0", "::")
            or host.startswith("127.")
        )
        (socket.bind if local else socket.connect)(address)
    except (ValueError, zmq.ZMQError) as error:
        socket.close(0)
        raise EngineFault(
            "kv_events_address", f"{flag} {address}: {error}: name an address that is free"
        ) from error
