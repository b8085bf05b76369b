"""Signs of life in a stream whose first token takes long: some clients and proxies fear silence.

Must not know their bytes (dialect).
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Send

from pageturner.server.engine_client.open_streams import PieceQueue
from pageturner.text.output_stream import OutputPiece

ALIVE_SECONDS = 3.0  # between two signs


async def show_life(queue: PieceQueue, begun: bytes, alive: bytes, send: Send) -> list[OutputPiece]:
    """Send `begun`, then `alive` every few seconds, and return the first pieces when they come."""
    sign = begun
    while True:
        await send({"type": "http.response.body", "body": sign, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ALIVE_SECONDS):
                return await queue.get_all()
        sign = alive
