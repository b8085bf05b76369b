"""Waits for an answer that is not streamed.

Owns the texts of its choices until all have ended. Must not know how they are written.
"""

from __future__ import annotations

import asyncio

from pageturner.text.output_stream import OutputPiece

# fields that whole answers have whatever was asked, as vLLM's have them
UNASKED = {"prompt_logprobs": None, "prompt_token_ids": None}


class WholeAnswer:
    """Waits for the end of `count` streams and keeps their text: the answer that is not
    streamed."""

    def __init__(self, count: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.texts = [""] * count
        self.offsets: list[list[int]] = [[] for _ in range(count)]
        self._parts: list[list[str]] = [[] for _ in range(count)]
        self._open = count

    def put(self, piece: OutputPiece) -> None:
        choice = piece.stream.choice
        self._parts[choice].append(piece.text)
        if piece.token is not None:
            self.offsets[choice].append(piece.offset)
        if not piece.last:
            return
        self.texts[choice] = "".join(self._parts[choice])
        self._open -= 1
        failed = piece.stream.failure is not None
        if (failed or self._open == 0) and not self.done.done():
            self.done.set_result(None)
