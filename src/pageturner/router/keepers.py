"""The replica that keeps an answer of /v1/responses: its id says it.

Owns the form of such ids: `resp_`, a digest of the replica's address, a dash, and the id of the
request. So every router before the same replicas finds it, also after a restart. Must not know how
a request is passed on (proxy.py). Whose an answer is, is the replica's affair: it looks at the key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from pageturner.errors import ClientError
from pageturner.http.decoding import decoded
from pageturner.http.http_client import ServerAddress
from pageturner.router.fleet import Fleet
from pageturner.router.replica import Replica
from pageturner.router.request_hints import RequestHints

DIGITS = 8
MAX_ID = 128 - DIGITS - 1  # characters of a request's id that fit behind the digest
_KEPT = re.compile(rf"resp_([0-9a-f]{{{DIGITS}}})-[A-Za-z0-9._:-]+")


@dataclass(frozen=True, slots=True)
class RoutingConstraint:
    """The replicas that may get a request.

    only    this replica, and no other
    tagged  the id of the request says to which replica it goes
    once    it is not asked again after a replica has seen it: what it began there may go on
    owner   digest of the key that came with it
    """

    only: Replica | None = None
    tagged: bool = False
    once: bool = False
    owner: bytes = b""

    def among(
        self, fleet: Fleet, asked: RequestHints, tried: Collection[Replica]
    ) -> Replica | None:
        """Return the next replica to try; None if none is left."""
        if self.only is None:
            return fleet.choose(asked, tried)
        return self.only if self.only not in tried and fleet.has_room(self.only) else None

    def check(self) -> None:
        """Raise ClientError if only one replica may be asked, and it could not answer."""
        if self.only is not None:
            raise ClientError(
                503,
                "no_replica",
                "the server that keeps this response cannot be asked now: try again in a moment",
            )


ANYWHERE = RoutingConstraint()


class _Body(msgspec.Struct):
    """The fields of a request that name other answers. Whatever is wrong with it, a replica will
    say."""

    previous_response_id: msgspec.Raw = msgspec.Raw(b"null")
    background: msgspec.Raw = msgspec.Raw(b"false")


def anywhere(fleet: Fleet, body: bytes, id: str, owner: bytes) -> RoutingConstraint:
    """Return the constraint of a request that any replica may answer."""
    return ANYWHERE


def by_id(fleet: Fleet, body: bytes, id: str, owner: bytes) -> RoutingConstraint:
    """Return the constraint of a request about an answer of this id. ClientError 404 where no
    replica here can have it."""
    return RoutingConstraint(only=_keeper(fleet, id, owner))


def by_previous(fleet: Fleet, body: bytes, id: str, owner: bytes) -> RoutingConstraint:
    """Return the constraint of a request for a new answer: the replica that keeps the answer behind
    which it goes on."""
    asked = decoded(body, _Body)
    if asked is None:
        return RoutingConstraint(tagged=True, owner=owner)
    previous = decoded(asked.previous_response_id, str)
    only = None if previous is None else _keeper(fleet, previous, owner)
    once = bytes(asked.background) == b"true"
    return RoutingConstraint(only=only, tagged=True, once=once, owner=owner)


def tagged(id: str, address: ServerAddress) -> str:
    """The id of a request under which this replica keeps its answer."""
    if len(id) > MAX_ID:
        id = hashlib.blake2b(id.encode(), digest_size=16).hexdigest()
    return f"{_tag(address)}-{id}"


def _tag(address: ServerAddress) -> str:
    return hashlib.blake2b(str(address).encode(), digest_size=DIGITS // 2).hexdigest()


def _keeper(fleet: Fleet, id: str, owner: bytes) -> Replica:
    found = _KEPT.fullmatch(id)
    stray = fleet.strays.get((owner, id.removeprefix("resp_")))
    if stray is not None and stray in fleet.replicas:
        return stray
    tags = {_tag(replica.address): replica for replica in fleet.replicas}
    if found is None or found[1] not in tags:
        message = f"no server behind this router keeps a response {id[:128]!r}: send the whole conversation"
        raise ClientError(404, "response_not_found", message, "previous_response_id")
    return tags[found[1]]
