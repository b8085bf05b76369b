"""Real server processes, as the tests of the server start them."""

from __future__ import annotations

from server.conftest import start

__all__ = ["start"]
