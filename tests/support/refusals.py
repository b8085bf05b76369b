"""What must be refused, and how: by the engine with a fault, by the server with an error of the client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pageturner.errors import ClientError, EngineFault


@contextmanager
def engine_fault(says: str | None = None, **fields: Any) -> Iterator[Any]:
    """The block must end in an EngineFault that says this, with these fields."""
    with pytest.raises(EngineFault, match=says) as caught:
        yield caught
    _compare(caught.value, fields)


@contextmanager
def client_error(says: str | None = None, **fields: Any) -> Iterator[Any]:
    """The block must end in a ClientError that says this, with these fields."""
    with pytest.raises(ClientError, match=says) as caught:
        yield caught
    _compare(caught.value, fields)


def _compare(error: EngineFault | ClientError, fields: dict[str, Any]) -> None:
    assert {name: getattr(error, name) for name in fields} == fields, error.message
