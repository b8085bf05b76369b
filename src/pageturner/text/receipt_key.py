"""The key that signs receipts: read by the server that signs, and by whoever checks.

Owns where it may come from and how long it must be. Must not know receipts (receipt.py); it is read
before a server imports anything large. The key is never part of a message.
"""

from __future__ import annotations

from pathlib import Path

from pageturner.errors import EngineFault

LEAST = 32  # bytes
VARIABLE = "PAGETURNER_RECEIPT_KEY"


def read_key(file: str, given: str) -> bytes:
    """The text in a file, or the one given; white space around it does not count. Empty where there
    is neither. EngineFault('bad_setting') for a key that is too short."""
    raw = given.encode()
    if file:
        try:
            raw = Path(file).read_bytes()
        except OSError as error:
            raise EngineFault(
                "bad_setting", f"receipt_key_file: cannot read {file}: {error.strerror}"
            ) from error
    raw = raw.strip()
    if (file or raw) and len(raw) < LEAST:
        message = f"the key of receipts has {len(raw)} bytes, at least {LEAST} are needed: openssl rand -hex 32"
        raise EngineFault("bad_setting", message)
    return raw
