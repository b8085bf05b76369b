"""Prompts that another engine computes: who is asked, and how the KV blocks come into the prefix
cache here.

Owns which requests are worth it, and what is done when nothing or something wrong comes: the
request runs and computes what is missing, so that the other engine can cost time and never an
answer. A thread reads the link and holds a few blocks; the thread that steps takes them in while
the request waits in the anteroom. Must not know the scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pageturner.kv.kv_link import BLOCK, DONE, PREFILL, Link, LinkEnd, LinkError
from pageturner.kv.kv_transfer import BadBlock, KVBlock, Transfer, sequence_of
from pageturner.kv.prefill_server import ASKED, MAX_TOKENS, SUM
from pageturner.request import Request

log = logging.getLogger("pageturner")
MAX_LINKS = 16  # at once: others are computed here
IN_BYTES = 16 << 20  # of blocks of one request that are not taken in yet
ASIDE = 2.0  # seconds for which an engine is not asked that could not be reached or refused
CAUSES = ("unreachable", "refused", "late", "broken", "wrong", "no_room", "busy")


@dataclass(slots=True, eq=False)
class PrefillEngine:
    """One that may be asked. open: requests of ours there; aside_until: by `time.monotonic`."""

    address: tuple[str, int]
    open: int = 0
    aside_until: float = 0.0


@dataclass(slots=True, eq=False)
class PrefillTicket:
    """A request whose prompt is computed elsewhere: what the anteroom asks of a future. keys: of
    the blocks that are to come, in order; states: of recurrent states, of which one may follow."""

    keys: list[bytes]
    states: list[bytes]
    take: Callable[[PrefillTicket, KVBlock], bool]
    arrived: queue.Queue[KVBlock]
    taken: int = 0
    cause: str = ""
    left: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    sock: socket.socket | None = None

    def done(self) -> bool:
        """Take in what has come. In the thread that steps."""
        over = self.over.is_set()  # asked first: what comes behind it is nothing
        with contextlib.suppress(queue.Empty):
            while not self.left:
                if not self.take(self, self.arrived.get_nowait()):
                    self.cancel()
        return over or self.left

    def cancel(self) -> bool:
        """Nobody waits for it any more; its link is cut."""
        self.left = True
        sock = self.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return True

    def result(self) -> None:
        """Whatever came of it, the request can run."""


class RemotePrefill:
    """The client of remote prefill in one engine.

    transfers  of KV, and of states where there are some
    least      tokens that are not cached, from which on another engine is asked
    seconds    without a block after which it is late
    """

    def __init__(
        self,
        addresses: list[tuple[str, int]],
        end: LinkEnd,
        transfers: Sequence[Transfer],
        least: int,
        seconds: float,
    ) -> None:
        self._engines = [PrefillEngine(address) for address in addresses]
        self._end, self._least, self._seconds = end, least, seconds
        self._transfer, *self._states = transfers
        self._room = max(2, IN_BYTES // self._transfer.nbytes)
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # of the counts, which threads of links change too

    def ticket(self, request: Request) -> PrefillTicket | None:
        """Return what the request has to wait for; None: it is computed here."""
        tokens = sequence_of(request).tokens
        if len(tokens) < self._least or len(tokens) > MAX_TOKENS or request.adapter:
            return None
        keys = list(self._transfer.request_keys(request))
        pool = self._transfer.pool
        index, size = pool.full.index, pool.block_size
        skip = next((place for place, key in enumerate(keys) if key not in index), len(keys))
        if (len(keys) - skip) * size < self._least:
            return None
        engine = self._choose()
        if engine is None:
            return None
        content = ASKED.pack(skip, len(salt := request.salt.encode())) + salt
        content += np.array(tokens[: len(keys) * size + 1], "<i4").tobytes()
        states = [key for one in self._states for key in one.request_keys(request)]
        ticket = PrefillTicket(keys[skip:], states, self._take, queue.Queue(self._room))
        with self._lock:
            engine.open += 1
        self.counts["prefill_asked"] += 1
        work = (engine, ticket, content)
        threading.Thread(target=self._run, args=work, name="prefill-ask", daemon=True).start()
        return ticket

    def _choose(self) -> PrefillEngine | None:
        """The one with the fewest of ours."""
        now = time.monotonic()
        there = [engine for engine in self._engines if engine.aside_until <= now]
        if sum(engine.open for engine in self._engines) >= MAX_LINKS:
            self._fell_back("busy")
        elif not there:
            self._fell_back("unreachable")
        else:
            return min(there, key=lambda engine: engine.open)
        return None

    def _fell_back(self, cause: str) -> None:
        with self._lock:
            self.counts[f"prefill_fallback_{cause}"] += 1

    def _take(self, ticket: PrefillTicket, block: KVBlock) -> bool:
        """Make a block findable. False: no further one is wanted."""
        cause = "wrong"
        wanted, transfers = ticket.keys[ticket.taken : ticket.taken + 1], [self._transfer]
        if not wanted:
            wanted, transfers = ticket.states, self._states
        if block.key in wanted:
            with contextlib.suppress(BadBlock):
                cause = "no_room" if transfers[0].adopt(block) is None else ""
        if cause:
            self._fell_back(cause)
            return False
        ticket.taken += 1
        self.counts["kv_received_blocks"] += 1
        self.counts["kv_received_bytes"] += block.data.size
        return True

    # -- in a thread of the request ----------------------------------------------------------------
    def _run(self, engine: PrefillEngine, ticket: PrefillTicket, content: bytes) -> None:
        try:
            self._fetch(engine, ticket, content)
        except LinkError as error:
            if error.cause in ("unreachable", "refused"):
                engine.aside_until = time.monotonic() + ASIDE
                host, port = engine.address
                log.warning(
                    "prefill at %s:%d is %s, prompts are computed here: %s",
                    host,
                    port,
                    error.cause,
                    error,
                )
            if not ticket.left:
                self._fell_back(error.cause)
        finally:
            with self._lock:
                engine.open -= 1
            ticket.over.set()

    def _fetch(self, engine: PrefillEngine, ticket: PrefillTicket, content: bytes) -> None:
        try:
            sock = socket.create_connection(engine.address, self._seconds)
        except OSError as error:
            raise LinkError("unreachable", str(error)) from None
        with sock:
            ticket.sock = sock
            if ticket.left:  # before there was a link to cut
                raise LinkError("broken", "nobody waits for it any more")
            link = self._end.ask(sock, time.monotonic() + self._seconds)
            link.send(PREFILL, content, self._seconds)
            for _ in ticket.keys:
                block = self._receive(link, self._transfer)
                if block is None:
                    raise LinkError("broken", "it has lost blocks of the prompt")
                self._put(ticket, block)
            for states in self._states:
                if (block := self._receive(link, states)) is not None:
                    self._put(ticket, block)

    def _receive(self, link: Link, transfer: Transfer) -> KVBlock | None:
        nbytes = transfer.nbytes
        kind, content = link.receive(SUM.size + nbytes, time.monotonic() + self._seconds)
        if kind == DONE:
            return None
        if kind != BLOCK or len(content) != SUM.size + nbytes:
            raise LinkError("refused", "it does not compute this prompt")
        key, checksum = SUM.unpack_from(content)
        return KVBlock(key, transfer.form, np.frombuffer(content[SUM.size :], np.uint8), checksum)

    def _put(self, ticket: PrefillTicket, block: KVBlock) -> None:
        """Wait for the thread that steps; the link fills up meanwhile, and its other end waits
        too."""
        while not ticket.left:
            with contextlib.suppress(queue.Full):
                ticket.arrived.put(block, timeout=0.05)
                return
        raise LinkError("broken", "nobody waits for it any more")
