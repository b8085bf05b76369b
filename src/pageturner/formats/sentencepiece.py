"""SentencePiece's BPE: pieces with scores, merged best first, what remains spelt in bytes.

Owns that algorithm (Kudo and Richardson 2018, arXiv:1808.06226; sentencepiece `src/bpe_model.cc`)
and the finding of special tokens in text. Must not know which file the pieces came from.

Merging is done word by word, with the words remembered: no piece reaches over the place where a
word begins, so the words are independent. Where a vocabulary has pieces that do, no cut is made
there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise

from pageturner.errors import EngineFault
from pageturner.formats.tokenizer import least

SPACE = "▁"  # how pieces write a space
# Kinds of tokens as in sentencepiece_model.proto and GGUF.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
HIDDEN = (UNKNOWN, CONTROL)

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_SHORT = 24  # characters up to which a word is merged by searching, and remembered
_REMEMBERED = 1 << 16


class Specials:
    """Tokens that are found in text as they are written, before anything else: leftmost, then
    longest.

    texts   text -> token id
    rstrip  ids that swallow the white space behind them
    """

    def __init__(self, texts: Mapping[str, int], rstrip: Collection[int] = ()) -> None:
        self._texts = {text: i for text, i in texts.items() if text}
        self._rstrip = frozenset(rstrip)
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._first = re.compile("[" + "".join(map(re.escape, lengths)) + "]") if lengths else None
        self._blank = re.compile(r"\s*", re.ASCII)

    def split(self, text: str) -> Iterator[str | int]:
        """The parts of `text`: ids of special tokens, and the strings between them, none empty."""
        begin = position = 0
        while self._first and (found := self._first.search(text, position)):
            start = found.start()
            match = self._at(text, start)
            if match is None:
                position = start + 1
                continue
            if start > begin:
                yield text[begin:start]
            token, begin = match
            yield token
            if token in self._rstrip and (blank := self._blank.match(text, begin)):
                begin = blank.end()
            position = begin
        if begin < len(text):
            yield text[begin:]

    def _at(self, text: str, start: int) -> tuple[int, int] | None:
        for size in self._lengths[text[start]]:
            token = self._texts.get(text[start : start + size])
            if token is not None:
                return token, start + size
        return None


class Merger:
    """Best-first merging of adjacent symbols of a word, as long as the merged symbol is a piece.

    ids     piece -> token id
    scores  by token id; the highest goes first, of equal ones the leftmost
    spell   ids of a symbol that is no piece
    """

    def __init__(
        self, ids: Mapping[str, int], scores: Sequence[float], spell: Callable[[str], list[int]]
    ) -> None:
        self._ids = ids
        self._scores = scores
        self._spell = spell
        self._words: dict[str, list[int]] = {}

    def encode(self, word: str) -> list[int]:
        """The ids of a word; not to be changed by the caller."""
        known = self._words.get(word)
        if known is not None:
            return known
        if len(word) > _SHORT:
            return self._named(self._merge_long(word))
        ids = self._named(self._merge_short(list(word)))
        if len(self._words) >= _REMEMBERED:
            self._words.clear()
        self._words[word] = ids
        return ids

    def _named(self, symbols: list[str]) -> list[int]:
        out: list[int] = []
        for symbol in symbols:
            token = self._ids.get(symbol)
            if token is None:
                out += self._spell(symbol)
            else:
                out.append(token)
        return out

    def _merge_short(self, symbols: list[str]) -> list[str]:
        """Quadratic, but faster than a heap on words of ordinary length."""
        ids, scores = self._ids, self._scores
        pairs = [ids.get(left + right) for left, right in pairwise(symbols)]
        while True:
            best, at = None, -1
            for i, token in enumerate(pairs):
                if token is not None and (best is None or scores[token] > best):
                    best, at = scores[token], i
            if at < 0:
                return symbols
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            del pairs[at]
            if at > 0:
                pairs[at - 1] = ids.get(symbols[at - 1] + symbols[at])
            if at < len(pairs):
                pairs[at] = ids.get(symbols[at] + symbols[at + 1])

    def _merge_long(self, word: str) -> list[str]:
        """Merge with a heap, in n log n. A symbol is named by where it starts: it is
        word[start:ends[start]]."""
        ids, scores, size = self._ids, self._scores, len(word)
        ends = list(range(1, size + 1))  # 0 once the symbol has been merged into the one before it
        before = list(range(-1, size))
        heap = [
            (-scores[token], i, i + 2)
            for i in range(size - 1)
            if (token := ids.get(word[i : i + 2])) is not None
        ]
        heapify(heap)
        while heap:
            _, left, end = heappop(heap)
            middle = ends[left]
            if not middle or middle >= size or ends[middle] != end:
                continue  # one of the two symbols is no longer what it was
            ends[left], ends[middle] = end, 0
            before[end] = left
            if end < size and (token := ids.get(word[left : ends[end]])) is not None:
                heappush(heap, (-scores[token], left, ends[end]))
            first = before[left]
            if first >= 0 and (token := ids.get(word[first:end])) is not None:
                heappush(heap, (-scores[token], first, end))
        out, start = [], 0
        while start < size:
            out.append(word[start : ends[start]])
            start = ends[start]
        return out


class TokenTable:
    """The tokens of a vocabulary with a kind for each, the constants above: what codecs over them
    share.

    plain, hidden  text -> id: what is found in any text as it is written, and what only where
                   special tokens are asked for
    """

    def __init__(self, tokens: Sequence[str], kinds: Sequence[int]) -> None:
        self.vocab_size = len(tokens)
        self._tokens = tokens
        self._kinds = kinds
        self.plain = self.of_kind(USER_DEFINED)
        self.hidden = self.of_kind(*HIDDEN)

    def of_kind(self, *wanted: int) -> dict[str, int]:
        """text -> id of the tokens of these kinds."""
        return {self._tokens[i]: i for i, kind in enumerate(self._kinds) if kind in wanted}

    def byte_ids(self) -> dict[int, int]:
        """byte -> id. EngineFault('tokenizer_corrupt') for a broken byte token."""
        return {piece_bytes(text, BYTE)[0]: i for text, i in self.of_kind(BYTE).items()}

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token. It takes some milliseconds: found when the first long
        text comes."""
        return max(map(len, self._tokens), default=1)

    def token_bytes(self, token: int) -> bytes:
        return piece_bytes(self._tokens[token], self._kinds[token])


class SentencePiece(TokenTable):
    """A SentencePiece BPE vocabulary: a `Codec`.

    scores        for each id. Only text that was written as a special token becomes one: control,
                  unknown and byte pieces are never reached by merging (as in sentencepiece;
                  llama.cpp would merge "<", "s", ">" to the control token).
    space_prefix  a space is put in front of a text, and of what follows a special token
    rstrip        special tokens that swallow the white space behind them
    whole         pieces never taken apart nor merged, looked for once spaces are written as SPACE
                  (sentencepiece's own way with user-defined pieces; GGUF files have the other kind)
    """

    def __init__(
        self,
        pieces: tuple[Sequence[str], Sequence[float], Sequence[int]],
        *,
        space_prefix: bool,
        rstrip: Collection[int] = (),
        whole: Mapping[str, int] | None = None,
    ) -> None:
        """pieces: tokens, scores and kinds, one for each id."""
        tokens, scores, kinds = pieces
        if not len(tokens) == len(scores) == len(kinds):
            raise EngineFault(
                "tokenizer_corrupt", "the model file has not one score and type for each token"
            )
        super().__init__(tokens, kinds)
        self._space_prefix = space_prefix
        self._bytes = self.byte_ids()
        self._unknown = next((i for i, kind in enumerate(kinds) if kind == UNKNOWN), None)
        self._specials = Specials(self.plain, rstrip), Specials(self.hidden | self.plain, rstrip)
        self._whole = Specials(whole or {})
        self._swallows = bool(rstrip)
        mergeable = self.of_kind(NORMAL, USER_DEFINED, UNUSED)
        self._merger = Merger(mergeable, scores, self._spell)
        self._cut = _word_border(mergeable)

    def encode(self, text: str, parse_special: bool) -> list[int]:
        out: list[int] = []
        after_special = True
        for part in self._specials[parse_special].split(text):
            if isinstance(part, int):
                out.append(part)
                after_special = True
                continue
            if self._space_prefix and after_special:
                part = " " + part
            after_special = False
            for piece in self._whole.split(part.replace(" ", SPACE)):
                if isinstance(piece, int):
                    out.append(piece)
                    continue
                for word in self._cut.split(piece):
                    out += self._merger.encode(word)
        return out

    def least_tokens(self, text: str) -> int:
        """Each character is in one token or several, but for those that nothing can spell, and
        white space behind a special token that swallows it."""
        if len(self._bytes) < 256 and self._unknown is None:
            return 0
        return least(len("".join(text.split()) if self._swallows else text), self.longest)

    def _spell(self, symbol: str) -> list[int]:
        """Byte fallback, or the unknown token where the vocabulary has no bytes."""
        if len(self._bytes) == 256:
            return [self._bytes[byte] for byte in symbol.encode()]
        return [] if self._unknown is None else [self._unknown]


def piece_bytes(text: str, kind: int) -> bytes:
    """The bytes that a piece stands for. EngineFault('tokenizer_corrupt') for a byte piece not
    written as `<0x0A>`."""
    if kind == BYTE:
        if not _BYTE.fullmatch(text):
            raise EngineFault(
                "tokenizer_corrupt", f"the model file has a byte token written {text!r}"
            )
        return bytes([int(text[3:5], 16)])
    return (text if kind in (UNKNOWN, CONTROL, USER_DEFINED) else text.replace(SPACE, " ")).encode()


def _word_border(pieces: Collection[str]) -> re.Pattern[str]:
    """Matches between words: before a SPACE, but not behind a character that some piece joins with
    it."""
    joined = {SPACE}
    for piece in pieces:
        at = piece.rfind(SPACE)
        while at > 0:
            joined.add(piece[at - 1])
            at = piece.rfind(SPACE, 0, at)
    return re.compile(f"(?<=[^{''.join(map(re.escape, joined))}])(?={SPACE})")
