"""API keys: who a client is, and what its key allows.

Owns how keys are written down and compared, which tenant each belongs to, and the limits that are
written beside it. Must not know HTTP beyond the value of one header, nor how limits are kept
(quota.py). No key is ever part of a message: what is wrong with one is told by its place.

What is kept of a key, here and in a file of tables, is its SHA-256. That is enough, and a slow hash
would be wrong: keys of `pageturner key new` are 256 random bits, so nobody finds one by trying,
however fast the hash; and who sends wrong keys must not be able to make the server compute for
long.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pageturner.errors import EngineFault, bad_setting

log = logging.getLogger("pageturner")

_NAMED = re.compile(r"(?:([A-Za-z0-9._-]{1,64}):)?([\x21-\x7e]+)")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
TABLES = "[[keys]]"  # a line of a file that holds tables, and not a key in each line


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. Limits: 0 means none.

    tenant             whose it is; "" where all keys are one tenant's
    sha256             of the key
    admin              opens /v1/admin too
    max_concurrent     most requests under way
    tokens_per_minute  of prompts and answers, on average; as many may come at once after a quiet
                       minute
    queue_share        most of the waiting queue that its requests may take, 0 to 1
    max_cost           tokens that its open requests may cost together (server/admission/price.py)
    most_urgent        least number that its requests may have as their priority
    session_share      of what all sessions may keep, the most that those of its tenant may, 0 to 1
    """

    tenant: str = ""
    sha256: bytes = b""
    admin: bool = False
    max_concurrent: int = 0
    tokens_per_minute: int = 0
    queue_share: float = 0.0
    max_cost: int = 0
    most_urgent: int = -(2**31)
    session_share: float = 0.0


ANYBODY = ApiKey()  # who asks a server without keys


@dataclass(slots=True)
class ApiKeys:
    """The API keys of a server. Without any, no request needs a key."""

    keys: tuple[ApiKey, ...] = ()

    def find(self, authorization: bytes) -> ApiKey | None:
        """The key that an Authorization header carries; None: it is none of these. Takes as long
        for every key: all of them are compared, each in constant time."""
        if not self.keys:
            return ANYBODY
        scheme, _, given = authorization.partition(b" ")
        digest = hashlib.sha256(given.strip()).digest()
        fits = [hmac.compare_digest(digest, key.sha256) for key in self.keys]
        if scheme.lower() != b"bearer" or not any(fits):
            return None
        return self.keys[fits.index(True)]

    @property
    def needed(self) -> bool:
        """Return whether a request must carry a key."""
        return bool(self.keys)


def single_key(key: str) -> ApiKeys:
    """Return the keys of a server with this single key and no tenants; no keys if it is empty."""
    return ApiKeys((ApiKey(sha256=hashlib.sha256(key.encode()).digest()),) if key else ())


class KeyRing(ApiKeys):
    """The API keys in force. The key file can be read again while the server runs."""

    def __init__(self, listed: str, file: str) -> None:
        super().__init__(read_api_keys(listed, file).keys)
        self._listed = listed
        self._file = file

    def reload(self) -> None:
        """Read the key file again. If it is invalid, the previous keys stay in force."""
        try:
            self.keys = read_api_keys(self._listed, self._file).keys
        except EngineFault as fault:
            log.error("the keys stay as they were: %s", fault.message)
        else:
            log.info("the keys were read again: %d", len(self.keys))


def read_api_keys(listed: str, file: str) -> ApiKeys:
    """The keys of a list with commas, each as KEY or TENANT:KEY, and of a file with one such in
    each line or with a table for each ([[keys]]). Those of one name are one tenant; one without is
    a tenant of its own. EngineFault says which one is wrong."""
    found: list[ApiKey] = []
    texts = [(number, text) for number, text in enumerate(listed.split(","), 1) if listed]
    _add_lines(found, "api_key", texts)
    if file:
        before = len(found)
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            make = f"; `pageturner key new --tenant NAME >> {file}` makes one"
            raise bad_setting(f"api_key_file: cannot read {file}: {error}{make}") from error
        lines = [line.strip() for line in text.splitlines()]
        if TABLES in lines:
            _add_tables(found, file, text)
        else:
            told = [
                (n, line) for n, line in enumerate(lines, 1) if line and not line.startswith("#")
            ]
            _add_lines(found, file, told)
        if len(found) == before:
            raise bad_setting(f"api_key_file: {file} has no key in it")
    if len({key.tenant for key in found}) == 1:
        found = [replace(key, tenant="") for key in found]
    return ApiKeys(tuple(found))


def _add_lines(found: list[ApiKey], place: str, texts: list[tuple[int, str]]) -> None:
    for number, text in texts:
        parts = _NAMED.fullmatch(text.strip())
        if parts is None:
            message = f"{place}: key {number} is none: KEY or TENANT:KEY, of printable ASCII without spaces"
            raise bad_setting(message)
        name = parts[1] or f"key-{len(found) + 1}"
        _add(found, ApiKey(name, hashlib.sha256(parts[2].encode()).digest()), place, number)


def _add_tables(found: list[ApiKey], place: str, text: str) -> None:
    try:
        read = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise bad_setting(f"{place} is not valid TOML: {error}") from error
    if set(read) != {"keys"}:
        raise bad_setting(f"{place}: what it may hold is tables {TABLES}")
    for number, table in enumerate(read["keys"], 1):
        _add(found, _from_table(table, f"{place}: key {number}"), place, number)


def _from_table(table: dict[str, Any], place: str) -> ApiKey:
    known = {one.name: type(one.default) for one in fields(ApiKey)}
    for name, value in table.items():
        if name not in known:
            raise bad_setting(f"{place}: unknown field {name!r}: the fields are {', '.join(known)}")
        kind = str if name == "sha256" else known[name]
        if type(value) not in ((float, int) if kind is float else (kind,)):
            raise bad_setting(f"{place}: {name} has a value of the wrong type")
    digest = table.get("sha256", "")
    if not _DIGEST.fullmatch(digest):
        raise bad_setting(f"{place}: sha256 is the SHA-256 of the key, as 64 hexadecimal digits")
    if not _TENANT.fullmatch(table.get("tenant", "")):
        raise bad_setting(f"{place}: tenant is 1 to 64 letters, digits and ._-")
    key = ApiKey(**{**table, "sha256": bytes.fromhex(digest)})
    shares = all(0 <= share <= 1 for share in (key.queue_share, key.session_share))
    if min(key.max_concurrent, key.tokens_per_minute, key.max_cost) < 0 or not shares:
        raise bad_setting(
            f"{place}: limits are 0 or more, queue_share and session_share are at most 1"
        )
    return key


def _add(found: list[ApiKey], key: ApiKey, place: str, number: int) -> None:
    if key.sha256 in [other.sha256 for other in found]:
        raise bad_setting(f"{place}: key {number} is there twice")
    found.append(key)


def cache_salt_of(tenant: str, own: str | None) -> str:
    """Return what keeps cached prefixes apart: a client's own salt, below its tenant, which it
    cannot leave."""
    return f"{tenant}/{own or ''}" if tenant else own or ""
