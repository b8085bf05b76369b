"""Sessions over HTTP: conversations whose clients say what becomes of their KV between two turns.

Owns which there are, whose they are, what they have been charged, and what an engine that is
started again must be told of them. Must not know their endpoints (pages.py), nor how an engine
keeps them (policies/kept_sessions.py): a turn is a request with a SessionHint.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pageturner.errors import ClientError
from pageturner.http.api_keys import ApiKey
from pageturner.http.request_info import RequestInfo
from pageturner.ipc.channel import Stats
from pageturner.ipc.session_messages import KeptSession, ReleaseSession, RestoreSession
from pageturner.request import SessionHint
from pageturner.server.admission.limits import check_id
from pageturner.server.admission.price import price_of_keeping
from pageturner.server.admission.quota import Quota
from pageturner.server.admission.service_level import ServiceLevel
from pageturner.server.api.base.body import SessionFields, bad_request
from pageturner.server.api.base.call import Call
from pageturner.server.engine_client.supervisor import EngineListener, Supervisor
from pageturner.text.output_stream import OutputStream

HEADER = b"x-session-id"
LONGEST = 86_400.0  # seconds
FORGOTTEN = 3600.0  # seconds after its last turn
BYTES = 4  # of a token that is remembered


@dataclass(slots=True)
class ServedSession:
    """One conversation. Times of the monotonic clock.

    hint, salt, adapter   of its newest turn; key: with which that came
    said         how many tokens were said in it; tokens: all of them, 32 bits each, while KV may be
                 kept
    cached, prompt  tokens of the newest prompt that were found, and all
    kept         what the present engine process says; before: token_seconds of those before it
    charged      tokens for being kept
    """

    id: str
    tenant: str
    created: int
    hint: SessionHint
    key: ApiKey
    used: float
    salt: str = ""
    adapter: str = ""
    turns: int = 0
    open: int = 0
    said: int = 0
    tokens: bytes = b""
    cached: int = 0
    prompt: int = 0
    kept: KeptSession | None = None
    before: float = 0.0
    charged: int = 0

    @property
    def kept_tokens(self) -> int:
        return self.kept.tokens if self.kept else 0

    @property
    def token_seconds(self) -> float:
        return self.before + (self.kept.token_seconds if self.kept else 0.0)

    def status(self, block_size: int) -> str:
        if self.open:
            return "running"
        if not self.kept_tokens:
            return "not_kept"
        # the KV of the last token was never computed
        whole = (self.said - 1) // block_size * block_size
        return "kept" if self.kept_tokens >= whole else "partly_kept"


def session_hint(
    call: Call, headers: Iterable[tuple[bytes, bytes]], info: RequestInfo, level: ServiceLevel
) -> SessionHint | None:
    """Return what the request says of its session, in its body or else in a header. ClientError 400
    for what no session can have."""
    told = call.body.session
    if told is None:
        told = next((value.decode("latin-1") for name, value in headers if name == HEADER), None)
    if told is None:
        return None
    fields = SessionFields(id=told) if isinstance(told, str) else told
    check_id("session.id", fields.id)
    check_id("session.fork_of", fields.fork_of)
    if len(call.prompts) != 1 or call.params[0].beam_width:
        raise bad_request("invalid_value", "a session has one answer: fork it for more", "session")
    keep = LONGEST if fields.keep in (None, True) else float(fields.keep or 0.0)
    for name, seconds in (("keep", keep), ("next_in", fields.next_in or 0.0)):
        if not isfinite(seconds) or not 0 <= seconds <= LONGEST:
            message = f"session.{name} is a number of seconds, at most {LONGEST:.0f}"
            raise bad_request("invalid_value", message, "session")
    return SessionHint(
        name=name_of(info.tenant, fields.id),
        owner=level.tenant,
        keep=keep,
        next_in=fields.next_in or 0.0,
        fork_of=name_of(info.tenant, fields.fork_of) if fields.fork_of else "",
        supersede=fields.supersede,
        release=fields.release,
        share=info.key.session_share,
    )


def name_of(tenant: str, id: str) -> str:
    """Return the engine's name of a session. Ids have no slash, so no tenant can name a session of
    another."""
    return f"{tenant}/{id}"


class ServedSessions:
    """All sessions of a server, by the names that the engine knows. At most `most`, and of these
    all tokens that fit the memory for KV: beyond that the one goes that was used least recently, of
    whoever has most."""

    def __init__(
        self,
        supervisor: Supervisor,
        quota: Quota,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor, self._quota, self._most, self._clock = supervisor, quota, most, clock
        self._sessions: dict[str, ServedSession] = {}  # the one used least recently first
        self._remembered = 0  # bytes of tokens
        supervisor.listeners.append(EngineListener(ready=self._restore, received=self._take))

    def __len__(self) -> int:
        return len(self._sessions)

    def of(self, tenant: str) -> list[ServedSession]:
        return [one for one in self._sessions.values() if one.tenant == tenant]

    def find(self, id: str, tenant: str) -> ServedSession:
        """ClientError 404 where the tenant has none of this id."""
        one = self._sessions.get(name_of(tenant, id))
        if one is None:
            raise ClientError(
                404, "no_such_session", f"there is no session {id[:128]!r} here", "id"
            )
        return one

    # -- turns -------------------------------------------------------------------------------------
    def begin(self, stream: OutputStream, info: RequestInfo) -> None:
        """Record that a turn of a session begins, if the request belongs to one."""
        hint, now = stream.request.session, self._clock()
        if hint is None:
            return
        one = self._sessions.pop(hint.name, None)
        if one is None:
            self._make_room(now)
            id = hint.name.partition("/")[2]
            one = ServedSession(id, info.tenant, int(time.time()), hint, info.key, now)
        self._sessions[hint.name] = one
        one.hint, one.key, one.used = hint, info.key, now
        one.salt, one.adapter = stream.request.salt, stream.request.adapter
        one.open += 1

    def end(self, stream: OutputStream) -> None:
        """A turn has ended, however it did."""
        hint = stream.request.session
        one = self._sessions.get(hint.name) if hint is not None else None
        if hint is None or one is None:
            return
        one.open -= 1
        one.turns += 1
        one.used = self._clock()
        one.cached, one.prompt = stream.cached, len(stream.request.prompt)
        self._remember(one, array("I", (*stream.request.prompt, *stream.tokens)).tobytes())
        one.said = len(one.tokens) // BYTES
        if hint.release and not one.open:
            self._forget(hint.name)

    def release(self, one: ServedSession) -> None:
        """Release a session that will not be continued. Its open turns keep running."""
        self._forget(one.hint.name)
        self._supervisor.tell(ReleaseSession(one.hint.name))

    def _forget(self, name: str) -> None:
        self._remember(self._sessions.pop(name), b"")

    def _remember(self, one: ServedSession, tokens: bytes) -> None:
        self._remembered += len(tokens) - len(one.tokens)
        one.tokens = tokens
        ready = self._supervisor.ready
        most = BYTES * ready.num_blocks * ready.block_size if ready else 0
        for other in self._sessions.values():
            if self._remembered <= most:
                break
            self._remembered -= len(other.tokens)
            other.tokens = b""

    def _make_room(self, now: float) -> None:
        """Make room for one more session."""
        idle = [one for one in self._sessions.values() if not one.open]
        for one in idle:
            if now > one.used + FORGOTTEN:
                self.release(one)
        idle = [one for one in idle if one.hint.name in self._sessions]
        if len(self._sessions) >= self._most and idle:
            counts = Counter(one.tenant for one in self._sessions.values())
            self.release(max(idle, key=lambda one: counts[one.tenant]))

    # -- the engine --------------------------------------------------------------------------------
    def _take(self, message: object) -> None:
        """Note what the engine says of sessions."""
        for news in message.sessions if isinstance(message, Stats) else ():
            one = self._sessions.get(news.name)
            if one is None:
                continue
            one.kept = news
            if not news.tokens and not news.open and not one.open:
                self._remember(one, b"")
            due = price_of_keeping(one.token_seconds) - one.charged
            if due > 0:
                one.charged += due
                self._quota.charge_kept(one.key, due)

    def _restore(self) -> None:
        """Restore sessions in a new engine process that did not take over the KV of the last one.
        Sessions with open turns are skipped, because those turns are submitted again anyway."""
        ready = self._supervisor.ready
        for one in self._sessions.values():
            one.before, one.kept = one.token_seconds, None
            if ready is not None and ready.kv_blocks_taken_back and one.tokens and not one.open:
                self._supervisor.tell(RestoreSession(one.hint, one.tokens, one.salt, one.adapter))

    def as_dict(self, one: ServedSession) -> dict[str, Any]:
        """Return a session as clients read it, with seconds and bytes."""
        ready = self._supervisor.ready
        size = ready.block_size if ready else 1
        per_token = ready.kv_bytes / (ready.num_blocks * size) if ready else 0.0
        return {
            "id": one.id,
            "object": "session",
            "created": one.created,
            "status": one.status(size),
            "turns": one.turns,
            "open_turns": one.open,
            "tokens": one.said,
            "kept_tokens": one.kept_tokens,
            "idle_s": 0.0 if one.open else round(self._clock() - one.used, 3),
            "last_turn": {"prompt_tokens": one.prompt, "cached_tokens": one.cached},
            "kept": {
                "paid_tokens": one.kept.paid_for if one.kept else 0,
                "token_seconds": round(one.token_seconds, 3),
                "byte_seconds": round(one.token_seconds * per_token),
                "price": one.charged,
            },
        }
