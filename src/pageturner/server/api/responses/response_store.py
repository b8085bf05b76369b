"""Answers of /v1/responses that somebody may come back to, and those under way.

Owns which are kept, for how long and for whom: the newest, within a bound of bytes, each for its
own tenant. All of it is in memory and ends with the server. Must not know what an answer says.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

import msgspec

from pageturner.errors import ClientError
from pageturner.server.api.responses.response_items import ItemOptions, responses_of

OVERHEAD = 2048  # bytes of a record beside what it holds
QUEUED, IN_PROGRESS, COMPLETED, INCOMPLETE = "queued", "in_progress", "completed", "incomplete"
FAILED, CANCELLED = "failed", "cancelled"


@dataclass(slots=True)
class ResponseRecord:
    """One answer.

    asked     fields of its request that it repeats
    items     the conversation that was asked, as JSON: a list of items
    options   how its own items are written
    background  it goes on without its client
    store     whether it is kept when it has ended
    only_here  its conversation has parts that its request only names
    status    as the API names it
    body      the answer as JSON, b"" until it has ended
    output    its own items as JSON, behind `items` in the conversation that goes on
    cancelled, closed   set when somebody wants it to end, and when it is not under way any more
    """

    id: str
    tenant: str
    created: int
    asked: dict[str, msgspec.Raw]
    items: bytes
    background: bool
    store: bool
    options: ItemOptions = field(default_factory=ItemOptions)
    only_here: bool = False
    status: str = IN_PROGRESS
    body: bytes = b""
    output: bytes = b"[]"
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def key(self) -> tuple[str, str]:
        return self.tenant, self.id

    @property
    def ended(self) -> bool:
        return self.status not in (QUEUED, IN_PROGRESS)

    @property
    def size(self) -> int:
        """Bytes, about."""
        asked = sum(len(bytes(value)) for value in self.asked.values())
        return OVERHEAD + asked + len(self.items) + len(self.body) + len(self.output)


Key = tuple[str, str]  # tenant, id: an id that a client chose names nothing of another tenant


class ResponseStore:
    """most: bytes of all that have ended."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Key, ResponseRecord] = {}
        self._kept: OrderedDict[Key, ResponseRecord] = OrderedDict()  # the oldest first
        self._bytes: Counter[str] = Counter()  # by tenant

    def open(self, record: ResponseRecord) -> None:
        """Add a response that is in progress. Raises ClientError 409 if another one of its tenant
        has the same id."""
        if record.key in self._open:
            message = f"a response {record.id!r} is under way: send another X-Request-Id, or none"
            raise ClientError(409, "response_exists", message)
        self._open[record.key] = record

    def opened(self, id: str, tenant: str) -> ResponseRecord:
        """Return a response that is in progress."""
        return self._open[tenant, id]

    def close(self, record: ResponseRecord) -> None:
        """Remove a response from those in progress. It is stored if its client wants that and it
        ended properly. The oldest one of the tenant that has most gives way."""
        if self._open.get(record.key) is record:
            del self._open[record.key]
        record.closed.set()
        if not (record.store and record.ended and record.body) or record.size > self._most:
            return
        self._drop(record.key)
        self._kept[record.key] = record
        self._bytes[record.tenant] += record.size
        while self._bytes.total() > self._most:
            [(largest, _)] = self._bytes.most_common(1)
            self._drop(next(key for key in self._kept if key[0] == largest))

    def find(self, id: str, tenant: str) -> ResponseRecord:
        """Return a response that is stored, or runs in the background. Raises ClientError 404 if
        there is none."""
        key = (tenant, id)
        record = self._kept.get(key)
        if record is not None:
            self._kept.move_to_end(key)
            return record
        record = self._open.get(key)
        if record is None or not record.background:
            message = f"no response {id[:128]!r} is kept here: it was not stored, was deleted, or was too old"
            raise ClientError(404, "response_not_found", message)
        return record

    def item(self, id: str, tenant: str) -> bytes:
        """An item of an answer that was kept, as JSON. ClientError 404 where there is none."""
        for response in responses_of(id):
            record = self._kept.get((tenant, response))
            if record is None:
                continue
            for raw in msgspec.json.decode(record.output, type=list[msgspec.Raw]):
                if msgspec.json.decode(raw)["id"] == id:
                    return bytes(raw)
        message = f"no item {id[:128]!r} is kept here: send the item itself"
        raise ClientError(404, "response_not_found", message, "input")

    def delete(self, id: str, tenant: str) -> None:
        """Let it go, and end it where it goes on. ClientError as `find`."""
        record = self.find(id, tenant)
        record.store = False
        record.cancelled.set()
        self._drop(record.key)

    def _drop(self, key: Key) -> None:
        if (record := self._kept.pop(key, None)) is not None:
            self._bytes[record.tenant] -= record.size
            if not self._bytes[record.tenant]:  # tenants are named by clients
                del self._bytes[record.tenant]
