"""The sources of a router's replicas: its command line, a file, names that are resolved,
registrations.

Owns these sources and their union. What a source cannot tell for now stays as it was: a file that
cannot be read or a name that does not resolve takes nobody away. Must not know how replicas are
watched or asked.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from pageturner.config.settings import RouterConfig
from pageturner.errors import ClientError, EngineFault, bad_setting
from pageturner.http.http_client import parse_address
from pageturner.router.replica import Member

log = logging.getLogger("pageturner")

MAX_MEMBERS = 1024  # of all sources together
MAX_FILE = 1 << 20  # bytes of a file of replicas
RESOLVED = "dns+"  # in front of an URL: each address of its name is a replica
_NAMED = re.compile(r"([^=:/?#][^=:?#]*)=(.+)")
MAX_URL = 512  # characters of a registered one
MAX_MODELS = 64  # names with which one registers
Resolve = Callable[[str, int], Awaitable[list[str]]]  # (name, port): addresses


async def resolve(name: str, port: int) -> list[str]:
    """The addresses of a name, in order. OSError where it has none."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return sorted({str(address[0]) for *_, address in found})


@dataclass(frozen=True, slots=True)
class Listed:
    """The replicas of a command line or a file. names: replicas behind a name that is resolved."""

    members: tuple[Member, ...] = ()
    names: tuple[Member, ...] = ()


def split_names(text: str) -> tuple[tuple[str, ...], str]:
    """`NAME[,NAME...]=URL`, or an URL alone: the names, and the URL. EngineFault('bad_setting')."""
    found = _NAMED.fullmatch(text)
    if found is None:
        return (), text
    names = tuple(name.strip() for name in found[1].split(","))
    if not all(names):
        raise bad_setting(f"a replica is given as NAME,NAME=http://HOST:PORT, not {text!r}")
    return names, found[2]


def listed(words: Iterable[str], roots: str = "") -> Listed:
    """Return the replicas in a list. EngineFault('bad_setting') if one is invalid or listed
    twice."""
    members, names = list[Member](), list[Member]()
    for word in words:
        models, url = split_names(word)
        if url.startswith(RESOLVED):
            url = url.removeprefix(RESOLVED)
            if not url.startswith("http://"):
                raise bad_setting(
                    f"a name that is resolved is given as {RESOLVED}http://NAME:PORT, not {word!r}"
                )
            names.append(Member(parse_address(url, "a replica"), models))
        else:
            members.append(Member(parse_address(url, "a replica", roots), models))
    addresses = [one.address for one in (*members, *names)]
    for address in addresses:
        if addresses.count(address) > 1:
            raise bad_setting(f"{address} is there twice")
    if len(addresses) > MAX_MEMBERS:
        raise bad_setting(f"{len(addresses)} replicas: a router takes {MAX_MEMBERS}")
    return Listed(tuple(members), tuple(names))


def read_file(path: str, roots: str = "") -> Listed:
    """Return the replicas in a file, one per line. Raises EngineFault('bad_setting')."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE + 1)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise bad_setting(f"cannot read replicas from {path}: {error}") from error
    if len(raw) > MAX_FILE:
        raise bad_setting(f"{path} is larger than {MAX_FILE} bytes")
    lines = (line.split("#", 1)[0].strip() for line in text.splitlines())
    try:
        return listed(filter(None, lines), roots)
    except EngineFault as error:
        raise bad_setting(f"{path}: {error}") from error


@dataclass(slots=True)
class Members:
    """The replicas from all sources of a router. tell: called with the replicas whenever they
    change."""

    config: RouterConfig
    given: Listed
    tell: Callable[[Sequence[Member]], None]
    clock: Callable[[], float] = time.monotonic
    resolve: Resolve = resolve
    _file: Listed = Listed()
    _found: dict[Member, tuple[Member, ...]] = field(default_factory=dict)  # behind each name
    _registered: dict[Member, float] = field(default_factory=dict)  # until when
    _told: tuple[Member, ...] | None = None
    _trouble: dict[str, str] = field(default_factory=dict)  # by source, as it stands in the log

    async def begin(self) -> None:
        """Look at all sources once. EngineFault for a file that cannot be read."""
        if self.config.replicas_file:
            self._file = read_file(self.config.replicas_file, self.config.ssl_ca)
        await self.look_up()
        self.settle()

    async def watch(self) -> None:
        """Refresh all sources for ever: the file and the registrations once per health interval,
        the DNS names as often as they are to be resolved."""
        looked_up = self.clock()
        while True:
            await asyncio.sleep(min(self.config.health_interval, self.config.resolve_interval))
            self.look_at_file()
            if self.clock() >= looked_up + self.config.resolve_interval:
                looked_up = self.clock()
                await self.look_up()
            self.settle()

    def settle(self) -> None:
        """Report the current replicas if they have changed. If several sources name a replica, the
        first one counts."""
        now = self.clock()
        self._registered = {one: until for one, until in self._registered.items() if until > now}
        names = (*self.given.names, *self._file.names)
        self._found = {name: self._found.get(name, ()) for name in names}
        behind = [one for name in names for one in self._found[name]]
        every = (*self.given.members, *self._file.members, *behind, *self._registered)
        members = tuple({one.address: one for one in reversed(every)}.values())[::-1][:MAX_MEMBERS]
        if members != self._told:
            self._told = members
            self.tell(members)

    def look_at_file(self) -> None:
        """Read the file again; what is wrong with it changes nothing."""
        if not self.config.replicas_file:
            return
        try:
            self._file = read_file(self.config.replicas_file, self.config.ssl_ca)
            self._trouble.pop("file", None)
        except EngineFault as error:
            self._warn("file", f"{error}; the replicas stay as they are")

    async def look_up(self) -> None:
        """Resolve all names again. A name that resolves to no addresses keeps its previous ones."""
        for name in (*self.given.names, *self._file.names):
            address = name.address
            try:
                async with asyncio.timeout(self.config.connect_timeout):
                    hosts = await self.resolve(address.host, address.port)
            except (OSError, TimeoutError) as error:
                self._warn(str(address), f"{address.host} is not resolved: {error or 'no answer'}")
                continue
            self._trouble.pop(str(address), None)
            found = (replace(name, address=replace(address, host=host)) for host in hosts)
            self._found[name] = tuple(found)

    def _warn(self, source: str, trouble: str) -> None:
        if self._trouble.get(source) != trouble:
            self._trouble[source] = trouble
            log.warning("%s", trouble)

    # -- registrations -----------------------------------------------------------------------------
    @property
    def registered(self) -> dict[Member, float]:
        """Return the registered replicas, and the seconds until each registration expires."""
        now = self.clock()
        return {one: until - now for one, until in self._registered.items() if until > now}

    def register(self, url: str, models: Sequence[str]) -> Member:
        """Take in this replica, or keep it. ClientError 400 for what is none, 429 where there are
        too many."""
        member = registered_member(url, models, self.config.ssl_ca)
        known = self.registered
        others = [one for one in known if one.address != member.address]
        if len(others) + len(self.given.members) + len(self._file.members) >= MAX_MEMBERS:
            message = f"the router has {MAX_MEMBERS} replicas already: take one out first"
            raise ClientError(429, "too_many_replicas", message)
        for one in known:
            if one.address == member.address:
                del self._registered[one]
        self._registered[member] = self.clock() + self.config.register_ttl
        self.settle()
        return member

    def unregister(self, url: str) -> None:
        """Take out this replica. ClientError 404 where it did not register."""
        address = registered_member(url, (), self.config.ssl_ca).address
        gone = [one for one in self.registered if one.address == address]
        if not gone:
            raise ClientError(404, "not_found", f"{address} did not register here", "url")
        del self._registered[gone[0]]
        self.settle()


def registered_member(url: str, models: Sequence[str], roots: str) -> Member:
    """ClientError 400 for what is no replica."""
    if len(url) > MAX_URL or not url.isprintable():
        raise ClientError(
            400, "invalid_value", f"url has at most {MAX_URL} printable characters", "url"
        )
    if len(models) > MAX_MODELS or not all(0 < len(one) <= MAX_URL for one in models):
        message = f"models are at most {MAX_MODELS} names that are not empty"
        raise ClientError(400, "invalid_value", message, "models")
    try:
        return Member(parse_address(url, "url", roots), tuple(models))
    except EngineFault as error:
        raise ClientError(400, "invalid_value", str(error), "url") from error
