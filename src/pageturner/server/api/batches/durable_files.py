"""Files that are there whole or not at all, and what is said when the disk does not take them.

Must not know what is in them.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

from pageturner.private_files import write_private


class JournalError(Exception):
    """The journal cannot be read or written. code: `disk_full`, `journal_in_use` or
    `journal_broken`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def fault_of(path: Path, error: OSError) -> JournalError:
    """Convert an OSError at this path to a JournalError."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return JournalError(
        "disk_full" if full else "journal_broken", f"{path}: {error.strerror or error}"
    )


def write_whole(path: Path, lines: Iterable[bytes]) -> int:
    """Write a file that is there whole or not at all, whatever happens meanwhile. Returns its size.
    OSError, as ENOSPC, leaves what was there before."""
    try:
        return write_private(path, (line + b"\n" for line in lines), durable=True)
    except OSError as error:
        raise fault_of(path, error) from error
