"""API keys: who a client is.

Owns how keys are written down and compared, and which tenant each belongs to. Must not know HTTP beyond the
value of one header. No key is ever part of a message: what is wrong with one is told by its place.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from pageturner.errors import EngineFault

_NAMED = re.compile(r"(?:([A-Za-z0-9._-]{1,64}):)?([\x21-\x7e]+)")


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """(tenant, key) pairs. Without any, nobody needs one."""

    pairs: tuple[tuple[str, bytes], ...] = ()

    def tenant_of(self, authorization: bytes) -> str | None:
        """The tenant whose key an Authorization header carries, "" where all are one; None: it has no key.
        Takes as long for every key: all of them are compared, each in constant time."""
        if not self.pairs:
            return ""
        scheme, _, given = authorization.partition(b" ")
        fits = [hmac.compare_digest(given.strip(), key) for _, key in self.pairs]
        if scheme.lower() != b"bearer" or not any(fits):
            return None
        several = len({tenant for tenant, _ in self.pairs}) > 1
        return self.pairs[fits.index(True)][0] if several else ""


def read_api_keys(listed: str, file: str) -> ApiKeys:
    """The keys of a list with commas, and of a file with one in each line; each as KEY or TENANT:KEY. Those
    of one name are one tenant; one without is a tenant of its own. EngineFault says which one is wrong."""
    written = [("api_key", number, text) for number, text in enumerate(listed.split(","), 1) if listed]
    if file:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise EngineFault("bad_setting", f"api_key_file: cannot read {file}: {error}") from error
        stripped = ((number, line.strip()) for number, line in enumerate(lines, 1))
        written += [(file, number, line) for number, line in stripped if line and not line.startswith("#")]
        if not written:
            raise EngineFault("bad_setting", f"api_key_file: {file} has no key in it")
    pairs: list[tuple[str, bytes]] = []
    for place, number, text in written:
        found = _NAMED.fullmatch(text.strip())
        if found is None:
            message = f"{place}: key {number} is none: KEY or TENANT:KEY, of printable ASCII without spaces"
            raise EngineFault("bad_setting", message)
        name, key = found[1] or f"key-{len(pairs) + 1}", found[2].encode()
        if key in [other for _, other in pairs]:
            raise EngineFault("bad_setting", f"{place}: key {number} is there twice")
        pairs.append((name, key))
    return ApiKeys(tuple(pairs))


def cache_salt_of(tenant: str, own: str | None) -> str:
    """What keeps cached prefixes apart: a client's own salt, below its tenant, which it cannot leave."""
    return f"{tenant}/{own or ''}" if tenant else own or ""
