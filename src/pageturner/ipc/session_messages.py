"""Messages of the two processes about sessions.

Ground floor: both import it. The turns themselves are requests with a SessionHint.
"""

from __future__ import annotations

import msgspec

from pageturner.request import SessionHint


class ReleaseSession(msgspec.Struct, tag=True, frozen=True):
    """API to engine: nobody will go on with the conversation of this name."""

    name: str


class RestoreSession(msgspec.Struct, tag=True, frozen=True):
    """API to engine: an engine process before this one kept a conversation. tokens: all that was
    said in it, 32 bits each; salt and adapter: as in Request."""

    hint: SessionHint
    tokens: bytes
    salt: str = ""
    adapter: str = ""


class KeptSession(msgspec.Struct, array_like=True, frozen=True):
    """Engine to API: what it keeps of a conversation.

    tokens      whose KV it claims; paid_for: those of them that no other conversation claimed
                before it
    token_seconds  that it has paid for so far, since this engine process began
    turns       that have ended; open: that wait or run
    """

    name: str
    tokens: int
    paid_for: int
    token_seconds: float
    turns: int
    open: int
