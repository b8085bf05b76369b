"""Prompts that other engines want computed here: their requests, and their KV blocks on the way
out.

Owns the port, a thread for each link, and the requests that are made of what is asked. The thread
that steps submits them and copies each block when it is sealed and there is room for it; where the
peer reads slowly the block stays in the prefix cache. A guest whose link ends is aborted. Must not
know who asks, nor why.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kv.kv_link import (
    BLOCK,
    DONE,
    PREFILL,
    REFUSED,
    Link,
    LinkEnd,
    LinkError,
)
from pageturner.kv.kv_transfer import KVBlock, Transfer
from pageturner.params import SamplingParams
from pageturner.request import Event, Request
from pageturner.scheduler import types

MAX_LINKS = 32  # at once; who comes then is turned away
MAX_TOKENS = 1 << 20  # of a prompt
OUT_BYTES = 16 << 20  # of blocks that wait for one link
GREETING = 5.0  # seconds until a peer must have said who it is and what it wants
SENDING = 30.0  # seconds that a block may take
LOOK = 0.25  # seconds between two looks at whether a peer is still there
FIRST_ID = 1 << 48  # of the requests of guests: beyond those of the API process
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, stop_ids=())

ASKED = struct.Struct("<II")  # whole blocks that the asker has; bytes of the salt
SUM = struct.Struct("<16sQ")  # key and checksum before the bytes of a block


class Submits(Protocol):
    """The part of the engine that is used here."""

    @property
    def clock(self) -> Callable[[], float]: ...
    def submit(self, request: Request) -> list[Event]: ...
    def abort(self, id: int) -> object: ...


@dataclass(slots=True, eq=False)
class Guest:
    """A prompt on its way. keys: of its blocks; states: of recurrent states, of which the last that
    is there goes behind them. out: blocks for its link, None behind the last; gone: its link has
    ended."""

    tokens: tuple[int, ...]
    salt: str
    skip: int
    keys: list[bytes] = field(default_factory=list)
    states: list[bytes] = field(default_factory=list)
    sent: int = 0
    ended: bool = False
    refused: str = ""
    gone: bool = False
    out: queue.SimpleQueue[KVBlock | None] = field(default_factory=queue.SimpleQueue)


class PrefillServer:
    """The prefill server of one engine. address: (host, port); transfers: of KV, and of states where
    there are some; vocab: token ids are below it."""

    def __init__(
        self,
        address: tuple[str, int],
        end: LinkEnd,
        transfers: Sequence[Transfer],
        vocab: int,
    ) -> None:
        self._end, self._vocab = end, vocab
        self._transfer, *self._states = transfers
        self.counts: Counter[str] = Counter()
        self._asked: queue.SimpleQueue[Guest] = queue.SimpleQueue()
        self._guests: dict[int, Guest] = {}
        self._next_id = FIRST_ID
        self._ahead = max(2, OUT_BYTES // self._transfer.nbytes)
        self._free = threading.Semaphore(MAX_LINKS)
        self.bell, self._rope = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._listener = socket.create_server(address, backlog=MAX_LINKS)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise EngineFault(
                "prefill_address",
                f"--prefill-listen {where} cannot be had ({error.strerror}): take another port",
            ) from None
        self.port: int = self._listener.getsockname()[1]
        self._closing = False
        self._accepting = threading.Thread(target=self._accept, name="prefill-port", daemon=True)
        self._accepting.start()

    # -- in the thread that steps ------------------------------------------------------------------
    @property
    def busy(self) -> bool:
        return bool(self._guests) or not self._asked.empty()

    def ended(self, sequence: types.Sequence, finish: str | None) -> None:
        """Note that the sequence of a guest has ended."""
        guest = self._guests.get(sequence.request.id)
        if guest is not None:
            guest.ended = True

    def step(self, engine: Submits) -> None:
        """Submit who has come, hand out what was sealed, forget who has left."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.bell, 4096)
        while not self._asked.empty():
            self._begin(engine, self._asked.get())
        for id, guest in list(self._guests.items()):
            if guest.gone:
                engine.abort(id)
                del self._guests[id]
            elif self._hand_out(guest):
                guest.out.put(None)
                del self._guests[id]

    def _begin(self, engine: Submits, guest: Guest) -> None:
        id, self._next_id = self._next_id, self._next_id + 1
        request = Request(id, guest.tokens, PARAMS, arrival=engine.clock(), salt=guest.salt)
        guest.keys = list(self._transfer.request_keys(request))[guest.skip :]
        guest.states = [key for one in self._states for key in one.request_keys(request)]
        self._guests[id] = guest
        self.counts["prefill_guests"] += 1
        for event in engine.submit(request):
            if event.id == id and event.failure is not None:
                guest.refused, guest.ended = event.failure.message, True

    def _hand_out(self, guest: Guest) -> bool:
        """Copy what its link has room for. True behind the last one."""
        while guest.sent < len(guest.keys) and guest.out.qsize() < self._ahead:
            block = self._transfer.export(guest.keys[guest.sent])
            if block is None:
                return guest.ended  # it comes, or it is lost already
            guest.out.put(block)
            guest.sent += 1
        if guest.sent < len(guest.keys) or (guest.states and not guest.ended):
            return False
        for states in self._states:
            there = [key for key in guest.states if key in states.store.index]
            if there and (state := states.export(there[-1])) is not None:
                guest.out.put(state)
        return True

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for peers
        self._listener.close()
        self._accepting.join(1.0)

    # -- in other threads --------------------------------------------------------------------------
    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(LOOK)  # no more files: those that are open will be closed
                continue
            if not self._free.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(
                target=self._attend, args=(sock,), name="prefill-link", daemon=True
            ).start()

    def _attend(self, sock: socket.socket) -> None:
        guest: Guest | None = None
        try:
            until = time.monotonic() + GREETING
            link = self._end.answer(sock, until)
            guest = self._read(link, until)
            self._asked.put(guest)
            self._ring()
            self._send_all(link, guest, sock)
        except LinkError as error:
            self.counts["prefill_links_failed"] += 1
            self.counts["prefill_peers_refused"] += guest is None and error.cause in (
                "refused",
                "wrong",
            )
        finally:
            sock.close()
            self._free.release()
            if guest is not None:
                guest.gone = True
                self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._rope, b"!")

    def _read(self, link: Link, until: float) -> Guest:
        kind, content = link.receive(ASKED.size + MAX_TOKENS * 4 + 4096, until)
        if kind != PREFILL or len(content) < ASKED.size:
            raise LinkError("wrong", "a frame that asks for nothing")
        skip, salted = ASKED.unpack_from(content)
        salt, rest = content[ASKED.size : ASKED.size + salted], content[ASKED.size + salted :]
        if len(salt) != salted or salted > 4096 or len(rest) % 4 or not rest:
            raise LinkError("wrong", "a prompt that is cut off")
        tokens = np.frombuffer(rest, "<i4")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab:
            raise LinkError("wrong", "tokens that the model has not")
        return Guest(tuple(tokens.tolist()), bytes(salt).decode(errors="replace"), skip)

    def _send_all(self, link: Link, guest: Guest, sock: socket.socket) -> None:
        while True:
            try:
                block = guest.out.get(timeout=LOOK)
            except queue.Empty:
                if select.select([sock], [], [], 0)[0]:
                    raise LinkError("broken", "the peer has left") from None
                continue
            if block is None:
                kind = REFUSED if guest.refused else DONE
                link.send(kind, guest.refused.encode()[:4096], GREETING)
                return
            self._ring()  # there is room for another one
            link.send(BLOCK, SUM.pack(block.key, block.checksum) + block.data.tobytes(), SENDING)
            self.counts["kv_sent_blocks"] += 1
            self.counts["kv_sent_bytes"] += block.data.size
