"""The two kinds of error a user can meet. Standard library only, imported by every room."""

from __future__ import annotations


class ClientError(Exception):
    """Something the caller can mend. `status` is for HTTP, `code` is stable, the message says what to do."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param


class EngineFault(Exception):
    """The engine cannot start or go on: no model, no memory, a broken file. The message says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
