"""The service level: what a request says about itself beside what it asks for: how urgent it is,
and whose it is.

Owns the body fields and headers of priority, deadline, targets and tenant, and their limits. Must
not know what becomes of them. Gateways set headers; a field of the body goes before the header of
the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from pageturner.errors import ClientError
from pageturner.http.api_keys import ANYBODY, ApiKey
from pageturner.http.request_info import ELAPSED, MAX_ELAPSED_MS, elapsed_of
from pageturner.request import SessionHint
from pageturner.server.api.base.body import RequestBody, bad_request

MAX_MS = MAX_ELAPSED_MS
SHORTEST = 0.001  # seconds; what is left of a target that cannot be met any more
MAX_PRIORITY = 2**31
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Seconds from the arrival of the request; None: not said. tenant: "" where nothing says it."""

    priority: int = 0
    deadline: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The context of a request beside its body. arrival: in monotonic seconds; adapter: its
    digest."""

    arrival: float
    level: ServiceLevel
    tenant: str
    session: SessionHint | None
    adapter: str


def service_level_of(
    body: RequestBody, headers: Iterable[tuple[bytes, bytes]], key: ApiKey = ANYBODY
) -> ServiceLevel:
    """Return those of a request. key: what it came with; only where keys do not tell tenants apart
    a header, or `user`, does. ClientError 400 names the field or header that is wrong, 403: the key
    does not allow it."""
    given = {
        name: value.decode("latin-1").strip() for name, value in headers if name.startswith(b"x-")
    }
    tenant = key.tenant
    if not tenant and (named := given.get(b"x-tenant")) is not None:
        if not _TENANT.fullmatch(named):
            raise bad_request(
                "invalid_value", "X-Tenant must be 1 to 64 letters, digits and ._-", "X-Tenant"
            )
        tenant = named
    priority = _priority(body.priority, given.get(b"x-priority"))
    if priority is None:
        priority = max(0, key.most_urgent)
    elif priority < key.most_urgent:
        message = f"with this key, priority is {key.most_urgent} or more, not {priority}"
        raise ClientError(403, "priority_not_allowed", message, "priority")
    elapsed = elapsed_of(given.get(ELAPSED, "").encode("latin-1"))
    deadline = _seconds(body.deadline_ms, "deadline_ms", given)
    if deadline is not None and elapsed and deadline <= elapsed:
        raise ClientError(
            504,
            "deadline_exceeded",
            f"the deadline passed {elapsed - deadline:.3f} s ago, before the request came here",
        )
    ttft = _seconds(body.ttft_target_ms, "ttft_target_ms", given)
    return ServiceLevel(
        priority,
        None if deadline is None else deadline - elapsed,
        None if ttft is None else max(SHORTEST, ttft - elapsed),
        _seconds(body.tpot_target_ms, "tpot_target_ms", given),
        tenant or body.user or "",
    )


def _priority(field: int | None, header: str | None) -> int | None:
    name = "priority"
    if field is None and header is not None:
        name = "X-Priority"
        field = int(header) if re.fullmatch(r"[+-]?[0-9]{1,10}", header) else MAX_PRIORITY
    if field is not None and not -MAX_PRIORITY <= field < MAX_PRIORITY:
        raise bad_request(
            "invalid_value", f"{name} must be {-MAX_PRIORITY} to {MAX_PRIORITY - 1}", name
        )
    return field


def _seconds(field: float | None, name: str, given: dict[bytes, str]) -> float | None:
    """Milliseconds of a field, or else of the header of its name, as seconds."""
    header = "X-" + name.replace("_", "-").title()
    if field is None and (text := given.get(header.lower().encode())) is not None:
        name, field = header, _number(text)
    if field is None:
        return None
    if not 0 < field <= MAX_MS:
        raise bad_request(
            "invalid_value", f"{name} must be above 0 and at most {MAX_MS:.0f} milliseconds", name
        )
    return field / 1000


def _number(text: str) -> float:
    """Infinity, which is no number of milliseconds, for what is none."""
    try:
        return float(text)
    except ValueError:
        return inf
