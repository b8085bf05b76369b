"""The limits of what a server takes from clients that it does not know yet: sizes, times,
connections, memory.

Owns the bounds, and what all connections of a server share: their number and the memory of their
bodies. Must not know sockets, the syntax of HTTP, nor what is asked.
"""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from pageturner.config.settings import HttpConfig
from pageturner.http.memory_reserve import MemoryReserve

SMALL_BODY = 32 * 1024  # bytes; a body that is not larger never has to give way to others
SPARE_FILES = (
    64  # file descriptors that are not for connections: the log, the engine's channel, pipes
)
MAX_LINGERING = 64  # connections beyond the limit that are told so; more are closed without a word


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The bounds of one server. Sizes in bytes, times in seconds.

    connections     open at once
    head_bytes      of a request's first line and headers together; of trailers; of chunk extensions
                    with no byte of the body between them
    headers         in a head; trailers behind a body
    head_seconds    from the first byte of a head to its last
    body_seconds    for which a client may send nothing of the body that it announced
    body_rate       least bytes a second of a body that has taken longer than that
    unread_seconds  for which a client may read nothing of its answer
    read_rate       least bytes a second that it may read of one that waits for longer than that
    idle_seconds    for which a connection without a request is kept
    linger_seconds  for which the rest of a refused request is read: closing at once would reset the
                    connection under the answer
    pipelined       requests that may be sent before the one before them is answered
    body_bytes      of the largest body: a longer one is refused, and nothing of it is kept
    body_memory     of all bodies that are being sent, or are not understood yet
    """

    connections: int = 4096
    head_bytes: int = 64 * 1024
    headers: int = 128
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    body_rate: float = 1024.0
    unread_seconds: float = 60.0
    read_rate: float = 1024.0
    idle_seconds: int = 75
    linger_seconds: float = 1.0
    pipelined: int = 16
    body_bytes: int = 4 << 20
    body_memory: int = 128 << 20

    @property
    def tick(self) -> float:
        """Seconds between two looks at a client that has something to send or to read."""
        return min(self.head_seconds, self.body_seconds, self.unread_seconds) / 4


def limits_of(config: HttpConfig) -> HttpLimits:
    """Return the limits in a server's settings, with no more connections than this process may open
    files."""
    connections = config.max_connections
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY:
        connections = max(1, min(connections, files - SPARE_FILES))
    return HttpLimits(
        connections=connections,
        head_seconds=config.header_timeout,
        body_seconds=config.body_timeout,
        unread_seconds=config.send_timeout,
        body_bytes=config.max_body_size,
        body_memory=max(config.max_body_memory, config.max_body_size + SMALL_BODY),
    )


class Connection(Protocol):
    """The questions that others may ask of a connection."""

    def make_room(self) -> None:
        """Close this idle connection, because another client wants to connect."""

    def drop_body(self) -> None:
        """Refuse the request whose body is being received, because it takes the memory of
        others."""


class BodyMemory:
    """The bytes of bodies on their way, by connection. When they are too many, the body that has
    been on its way for longest is refused: those of honest clients are there within moments, so it
    is seldom theirs."""

    def __init__(self, most: int) -> None:
        self.total = 0
        self._most = most
        self._held: dict[Connection, int] = {}  # whole bodies too, until they are understood
        self._sending: dict[Connection, None] = {}  # in the order in which their bodies began

    def add(self, connection: Connection, n: int) -> None:
        """So many bytes of its body have come. May call `drop_body` of this connection or of
        others."""
        self._held[connection] = self._held.get(connection, 0) + n
        self._sending[connection] = None
        self.total += n
        while self.total > self._most:
            slowest = next((one for one in self._sending if self._held[one] > SMALL_BODY), None)
            if slowest is None:
                return
            self.release(slowest)
            slowest.drop_body()

    def complete(self, connection: Connection) -> None:
        """Its body is there: it counts, but does not give way to others any more."""
        self._sending.pop(connection, None)

    def release(self, connection: Connection) -> None:
        """Its body was understood, or thrown away."""
        self._sending.pop(connection, None)
        self.total -= self._held.pop(connection, 0)


class OpenConnections:
    """The state that all connections of a server share.

    open     how many there are
    refused  counts what was refused or cut off here, by code
    memory   of this process
    read     what comes in, until it is copied at once
    """

    def __init__(
        self, limits: HttpLimits, refused: Counter[str], memory: MemoryReserve | None = None
    ) -> None:
        self.limits = limits
        self.refused = refused
        self.bodies = BodyMemory(limits.body_memory)
        self.memory = memory or MemoryReserve()
        self.read = memoryview(bytearray(1 << 16))
        self.open = 0
        self._waiting: dict[
            Connection, None
        ] = {}  # without a whole request, those first that wait longest

    def enter(self, connection: Connection) -> bool:
        """Count a new connection, closing an idle one if there are too many. False: all others are
        busy, so there is no room."""
        self.open += 1
        if self.open > self.limits.connections:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            self.busy(longest)
            longest.make_room()
        self.rest(connection)
        return True

    def leave(self, connection: Connection) -> None:
        """Remove a connection that is closed."""
        self.open -= 1
        self.busy(connection)
        self.bodies.release(connection)

    def rest(self, connection: Connection) -> None:
        """Its request was answered, and it may be closed for others from now on."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def busy(self, connection: Connection) -> None:
        """Its request is under way."""
        self._waiting.pop(connection, None)

    @property
    def crowded(self) -> bool:
        """Return whether there are too many connections even to answer them with a refusal."""
        return self.open > self.limits.connections + MAX_LINGERING
