"""What must be refused, and how: by the engine with a fault, by the server with an error of the client."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import httpx
import pytest

from pageturner.errors import ClientError, EngineFault


class Refusal:
    """The block must end in an error of this kind that says this, with these fields. It is no generator: one
    would be in the error's traceback, and keep alive whatever the block had opened."""

    def __init__(self, kind: type[Exception], says: str | None, fields: dict[str, Any]) -> None:
        self._raises = pytest.raises(kind, match=says)
        self._fields = fields

    def __enter__(self) -> Any:
        return self._raises.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        expected = self._raises.__exit__(kind, error, traceback)
        if expected:
            found = {name: getattr(error, name) for name in self._fields}
            assert found == self._fields, error
        return expected


def engine_fault(says: str | None = None, **fields: Any) -> Refusal:
    return Refusal(EngineFault, says, fields)


def client_error(says: str | None = None, **fields: Any) -> Refusal:
    return Refusal(ClientError, says, fields)


def refusal_of(answer: httpx.Response) -> tuple[int, str]:
    """The status of an answer that refuses, and its reason."""
    return answer.status_code, answer.json()["error"]["reason"]
