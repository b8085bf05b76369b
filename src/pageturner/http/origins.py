"""Under which names, and from which web pages, a server may be asked that asks for no key.

Owns the rules of the headers Host, Origin and Content-Type, and the answers that let pages of other
origins ask (CORS). Must not know what is asked.

A browser sends what a web page says to every address that it can reach, localhost too: as a simple
request, whose answer the page may not read but whose work is done (CSRF), or after the page's own
name was made to point at this machine (DNS rebinding). Browsers tell: the first carries a foreign
Origin, the second a foreign name in Host. An address or a name without a dot is nobody's to
register, so no page can have it by rebinding.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pageturner.errors import ClientError, bad_setting

if TYPE_CHECKING:
    from starlette.types import ASGIApp

ANY = "*"
_AUTHORITY = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:]*))(?::[0-9]{0,5})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/]+|null|\*")
_JSON = re.compile(rb"application/(?:[\w.-]+\+)?json(?:\s*;.*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OriginRules:
    """The rules of who is let in. Without arguments: everything, as a server with keys does.

    hosts    names in lower case
    origins  as browsers write them
    local    the server listens on the loopback interface only
    """

    hosts: frozenset[str] = frozenset({ANY})
    origins: frozenset[str] = frozenset({ANY})
    local: bool = False

    def check(self, method: str, headers: dict[bytes, bytes]) -> None:
        """ClientError says which rule a request breaks, and which flag would let it in."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if b"host" in headers and not self._is_ours(host):
            message = f"{host[:80]!r} is no name of this server: allow it with --allowed-hosts, or use keys"
            raise ClientError(403, "host_not_allowed", message)
        if b"origin" not in headers:
            return
        origin = headers[b"origin"].decode("latin-1").lower()
        if not (
            ANY in self.origins or origin in self.origins or origin.partition("://")[2] == host
        ):
            message = f"web pages of {origin[:80]!r} may not ask: allow them with --allowed-origins"
            raise ClientError(403, "origin_not_allowed", message)
        if method == "POST" and not _JSON.fullmatch(
            headers.get(b"content-type", b"application/json")
        ):
            message = "send Content-Type: application/json, as requests of web pages have to"
            raise ClientError(415, "unsupported_media_type", message)

    def _is_ours(self, host: str) -> bool:
        parts = _AUTHORITY.fullmatch(host)
        if ANY in self.hosts or parts is None:
            return ANY in self.hosts
        name = (parts[1] or parts[2]).rstrip(".")
        if name in self.hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(name).is_loopback or not self.local
        except ValueError:
            return bool(name) and "." not in name and not self.local


EVERYTHING = OriginRules()


def origin_rules(host: str, allowed_hosts: str, allowed_origins: str) -> OriginRules:
    """Return the rules of a server that needs no key. host: the name or address that it listens on.
    EngineFault names an origin that no browser would send."""
    for origin in _listed(allowed_origins):
        if not _ORIGIN.fullmatch(origin):
            message = f"allowed_origins: an origin is https://HOST or https://HOST:PORT, or *, not {origin!r}"
            raise bad_setting(message)
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return OriginRules(
        frozenset({*_listed(allowed_hosts), host.lower()}), _listed(allowed_origins), local
    )


def _listed(text: str) -> frozenset[str]:
    return frozenset(one.strip().lower().rstrip("/") for one in text.split(",") if one.strip())


def with_cors(app: ASGIApp, allowed_origins: str) -> ASGIApp:
    """Return the application with CORS headers for these origins; unchanged if there are none."""
    origins = _listed(allowed_origins)
    if not origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=sorted(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        allow_private_network=True,
        expose_headers=["x-request-id", "retry-after"],
    )
