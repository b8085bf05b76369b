"""Stop strings: where the text of an answer ends because one of them is complete.

Owns what is shown, held back and cut away. Must not know tokens: text comes in pieces of any
length.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text in, text out, cut at the first stop string.

    Nothing is given out that a stop string could still take back: where the end of the text may be
    the beginning of one, it is held back. The stop string that ends first wins; of those that end
    together the longest.

    stop     at least one string, none of them empty
    include  the stop string stays in the text
    found    the stop string that ended the text, or None; then nothing more may be pushed
    """

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self.found: str | None = None
        self._stop = tuple(stop)
        self._include = include
        self._held = ""

    def push(self, new: str) -> str:
        """The text that is certain now, with `new` behind what came before."""
        text = self._held + new
        complete, certain = [], len(text)
        for (
            stop
        ) in self._stop:  # once a token: only where its first character stands is it looked at
            first = stop[0]
            at = text.find(first)
            while at >= 0:
                if text.startswith(stop, at):
                    complete.append((at + len(stop), at, stop))
                    break
                if stop.startswith(text[at:]):
                    certain = min(certain, at)
                    break
                at = text.find(first, at + 1)
        if complete:
            end, start, self.found = min(complete)
            self._held = ""
            return text[: end if self._include else start]
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The text that was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text
