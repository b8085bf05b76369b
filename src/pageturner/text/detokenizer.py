"""Detokenization: one token at a time for answers, many at once for prompts.

Owns which bytes are ready to be shown: never half a character. Must not know where a stop string
cuts (stop_strings.py), HTTP, requests or processes; llm.py uses it just as the server does.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

from pageturner.formats.tokenizer import Tokenizer
from pageturner.text.answer_format import AnswerFormat
from pageturner.text.stop_strings import ContentStops, StopStrings


class Detokenizer:
    """Tokens in, text out, one token at a time.

    What `push` and `finish` return, joined, is the decoding of all tokens at once, cut at the first
    stop string (stop_strings.py). Text within the first `min_tokens` tokens cannot stop anything.

    answer    what may stand in the text beside content: nothing stops that (stop_strings.py)
    stopped   the stop string that ended the text, or the stop token of `answer`, or None
    decoded   characters decoded so far, those that are still held back included
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        skip_special: bool = True,
        include_stop: bool = False,
        answer: AnswerFormat | None = None,
    ) -> None:
        self.stopped: str | int | None = None
        self.decoded = 0
        self._token_bytes = tokenizer.token_bytes
        skipped = tokenizer.special_ids
        self._stops: StopStrings | ContentStops | None = None
        if stop:
            self._stops = StopStrings(stop, include_stop)
        if answer is not None:
            skipped = skipped.difference(answer.shown)
            self._stops = answer.stops(stop, include_stop)
        self._skip: Collection[int] = skipped if skip_special else ()
        self._exempt = min_tokens  # tokens that stop nothing
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is certain now that `token` is known. Empty once `stopped`."""
        if self.stopped is not None:
            return ""
        text = "" if token in self._skip else self._utf8.decode(self._token_bytes(token))
        self.decoded += len(text)
        if self._stops is None:
            return text
        self._exempt -= 1
        text = self._stops.push(text, token, self._exempt >= 0)
        self.stopped = self._stops.found
        return text

    def finish(self) -> str:
        """The text that was held back, when no more tokens come. A broken last character becomes
        U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._utf8.decode(b"", True)
        self.decoded += len(text)
        if self._stops is None:
            return text
        text = self._stops.push(text)
        if self._stops.found is None:
            text += self._stops.flush()
        self.stopped = self._stops.found
        return text


def prompt_offsets(tokenizer: Tokenizer, tokens: Iterable[int], text: str) -> list[int]:
    """The offset in the text of a prompt at which each of its tokens begins. A token that the
    tokenizer put in front, such as BOS, is not in the text and begins at 0."""
    utf8, offsets, end = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for token in tokens:
        offsets.append(end)
        end += len(utf8.decode(tokenizer.token_bytes(token)))
    end += len(utf8.decode(b"", True))
    return [max(offset - (end - len(text)), 0) for offset in offsets]
