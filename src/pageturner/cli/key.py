"""`pageturner key new`: make an API key, and the table for it in the file of --api-key-file.

Owns how a key is made. Must not know how it is checked (http/api_keys.py).
"""

from __future__ import annotations

import argparse
import hashlib
import re
import secrets
import sys

from pageturner.config.flag_table import add_flags
from pageturner.errors import bad_setting

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
RANDOM_BYTES = 32  # of a key: nobody finds one by trying, so that a fast hash of it is enough


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pageturner key new`."""
    add_flags(parser, "key new")


def main(arguments: argparse.Namespace) -> int:
    """Print the key, which is kept nowhere, to standard error, and its table to standard output."""
    if not _TENANT.fullmatch(arguments.tenant):
        raise bad_setting("--tenant is 1 to 64 letters, digits and ._-")
    key = "pt-" + secrets.token_urlsafe(RANDOM_BYTES)
    lines = [
        "[[keys]]",
        f'tenant = "{arguments.tenant}"',
        f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"',
    ]
    if arguments.admin:
        lines.append("admin = true")
    for name in ("max_concurrent", "tokens_per_minute", "queue_share", "max_cost"):
        if value := getattr(arguments, name):
            lines.append(f"{name} = {value}")
    print(f"the key, which is shown only now: {key}", file=sys.stderr)
    print("\n".join(lines))
    return 0
