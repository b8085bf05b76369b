"""Drafts by suffixes: what followed where the newest tokens of a sequence stood before, in its own
prompt and answer, or in what was said to its tenant lately.

Owns where short runs of tokens stand, and how often what stood behind longer runs came again. Texts
of different tenants, salts and adapters never meet. Must not know what a step costs (drafts.py).

The idea is that of suffix decoding (Oliaro et al. 2024, arXiv 2411.04975). In the place of a suffix
tree stands a chain of places for each three tokens, newest first, as LZ77 coders have it: to add a
token takes one entry of a dict, and the oldest are forgotten by dropping a dict.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Tokens

from pageturner.policies.drafts import PricedDrafts, SequenceMemory
from pageturner.scheduler.types import Item, Output, Sequence

SHORTEST = 3  # tokens that must have stood before
LONGEST = 16  # longer matches count alike
PLACES = 6  # that are compared, the newest
MAX_DRAFT = 15  # tokens of a draft: below a chunk of recurrent layers
LEAST_CHANCE = 0.1  # a token that is right less often is not worth proposing
MAX_TOKENS = 1 << 18  # that are findable, of all texts: some 160 bytes each
COMMON = 128  # tokens that two prompts must share for the second not to be added once more
FORGET = 256  # outcomes of one kind that count
BITS = 20  # of a token in a key
KEY = (1 << BITS * SHORTEST) - 1
PLACE = 24  # bits of a position
POSITION = (1 << PLACE) - 1


class _Places:
    """The places where each three tokens stand in some texts: the newest, and those before it. A
    place is the position of the token behind them, with the number of its text.

    size  its memory in tokens that are findable: texts themselves are small beside places
    """

    __slots__ = ("ends", "older", "size", "texts")

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        self.older: dict[int, int] = {}
        self.texts: dict[int, list[int]] = {}
        self.size = 16.0

    def hold(self, number: int, text: list[int], begin: int) -> None:
        """Places lie in this text, and from `begin` on it is added."""
        self.texts[number] = text
        self.size += begin / 8

    def add(self, key: int, place: int, tokens: list[int]) -> int:
        """Add the places of these tokens, which stand behind the three of `key`; the newest key."""
        ends = self.ends
        older = self.older
        known = len(ends)
        for token in tokens:
            before = ends.get(key)
            if before is not None:
                older[place] = before
            ends[key] = place
            key = (key << BITS | token) & KEY
            place += 1
        self.size += len(ends) - known + len(tokens) / 8
        return key


class _Space:
    """The texts of one tenant, salt and adapter, or of one sequence: lately added ones, and those
    before them."""

    __slots__ = ("number", "old", "young")

    def __init__(self) -> None:
        self.young = _Places()
        self.old = _Places()
        self.number = 0  # texts so far


class _Record:
    """One sequence: its text, and the place whose continuation is expected.

    number      of its text in its space
    places      where the beginning of its text was added
    key         its last three tokens
    source, at  the tokens expected next; length: tokens that are equal before them
    """

    __slots__ = (
        "at",
        "chances",
        "draft",
        "key",
        "length",
        "number",
        "places",
        "source",
        "space",
        "text",
    )

    def __init__(self) -> None:
        self.text: list[int] = []
        self.space = _Space()
        self.places = _Places()
        self.source: list[int] = []
        self.number = self.key = self.at = self.length = 0
        self.draft: list[int] = []
        self.chances: list[float] = []


class SuffixDrafts:
    """Proposes the continuation of the longest match, with how often matches as long were right.

    own  only a sequence's own prompt and answer are looked through (prompt lookup)
    """

    watch = None  # it needs no hidden rows

    def __init__(self, *, own: bool = False) -> None:
        self.nbytes = 0
        self._own = own
        self._records = SequenceMemory(_Record)
        self._spaces: OrderedDict[tuple[str, str, str], _Space] = OrderedDict()
        # outcomes by length of the match: right ones, all
        self._right = [0.0] * SHORTEST + [1.0 + 0.05 * n for n in range(LONGEST - SHORTEST + 1)]
        self._tried = [1.0] * SHORTEST + [2.0] * (LONGEST - SHORTEST + 1)

    def propose(self, items: Tokens[Item], outputs: Tokens[Output], least: float = 0.0) -> None:
        shortest = next(n for n in range(SHORTEST, LONGEST + 1) if self._pays(n, least))
        for item, output in zip(items, outputs, strict=True):
            new = output.tokens
            seq = item.sequence
            if not new or not seq.request.params.speculation:
                continue
            record = self._records.of(seq)
            text = record.text
            known = len(seq.tokens)
            if 0 < len(text) < known and text == seq.tokens[: len(text)]:  # nobody asked meanwhile
                self._follow(record, [*seq.tokens[len(text) :], *new], shortest)
            elif len(text) != known:
                if text[known:] != new:
                    self._begin(record, seq)
                    self._follow(record, new, shortest)
            else:
                self._follow(record, new, shortest)
            if record.draft:
                output.draft, output.chances = record.draft.copy(), record.chances

    def _pays(self, length: int, least: float) -> bool:
        """Return whether a match of this length may pay. The longest are always followed, so that it is
        known how they do."""
        return length == LONGEST or self._right[length] >= least * self._tried[length]

    def _begin(self, record: _Record, seq: Sequence) -> None:
        """Make a text what its sequence is, and findable: a new one, or one whose newest tokens did
        not count."""
        text = record.text = list(seq.tokens)
        if not self._own:
            key = (seq.request.tenant, seq.request.salt, seq.request.adapter)
            record.space = self._spaces.setdefault(key, _Space())
            self._spaces.move_to_end(key)
            held = sum(one.young.size + one.old.size for one in self._spaces.values())
            while held > MAX_TOKENS:
                _, oldest = self._spaces.popitem(last=False)
                held -= oldest.young.size + oldest.old.size
        record.source = []
        record.length = 0
        self._add(record, _shared(record.space.young, text))

    def _add(self, record: _Record, begin: int) -> None:
        """Add a text from a position on to the young places of its space."""
        text = record.text
        space = record.space
        begin = max(SHORTEST, begin)
        if space.young.size > MAX_TOKENS // 4:
            space.old = space.young
            space.young = _Places()
        record.number = space.number
        record.places = space.young
        space.number += 1
        space.young.hold(record.number, text, begin)
        key = _key(text, begin)
        record.key = space.young.add(key, record.number << PLACE | begin, text[begin:])

    def _follow(self, record: _Record, new: list[int], shortest: int) -> None:
        """Take in new tokens: how the expected ones did, where they stand now, what is next."""
        text = record.text
        space = record.space
        if record.source:
            self._compare(record, new)
        young = space.young
        if record.places is not young:
            if record.places is not space.old:
                self._add(record, 0)  # it was forgotten meanwhile
            young = space.young
            if record.number not in young.texts:
                young.hold(record.number, text, len(text))
        if len(text) >= SHORTEST:
            record.key = young.add(record.key, record.number << PLACE | len(text), new)
        text += new
        if len(text) < 2 * SHORTEST:
            record.key = _key(text, len(text))
        record.draft = []
        if record.length < LONGEST:
            key = record.key
            if key in young.ends:
                self._look(record, young, shortest)
            if not record.source and key in space.old.ends:
                self._look(record, space.old, shortest)
        if record.length >= shortest:
            self._draft(record)

    def _compare(self, record: _Record, new: list[int]) -> None:
        """Learn how the expected tokens did, and follow them while they are right."""
        source, at, length = record.source, record.at, record.length
        right, tried = self._right, self._tried
        for token in new:
            if at >= len(source):
                break
            kind = min(length, LONGEST)
            tried[kind] += 1
            if tried[kind] > FORGET:
                right[kind] /= 2
                tried[kind] /= 2
            if source[at] != token:
                break
            right[kind] += 1
            at += 1
            length += 1
        else:
            record.at, record.length = at, length
            return
        record.source, record.length = [], 0

    def _look(self, record: _Record, places: _Places, shortest: int) -> None:
        """Find the place with the longest match, at least `shortest`; of several the one whose next
        token most of them have, then the newest."""
        text, end = record.text, len(record.text)
        best, votes = max(shortest, record.length + 1), dict[int, int]()
        wanted = text[-best:]
        place: int | None = places.ends[record.key]
        for _ in range(PLACES):
            if place is None:
                return
            source, at = places.texts[place >> PLACE], place & POSITION
            place = places.older.get(place)
            if at >= len(source) or at < best or source[at - best : at] != wanted:
                continue
            length, most = best, min(LONGEST, at, end)
            while length < most and text[end - length - 1] == source[at - length - 1]:
                length += 1
            if length > best:
                best, wanted, votes = length, text[-length:], {}
            count = votes.get(source[at], 0)
            if count >= max(votes.values(), default=0):
                record.source, record.at, record.length = source, at, length
            votes[source[at]] = count + 1

    def _draft(self, record: _Record) -> None:
        """Propose what stands at the place that was found, as far as it is likely enough."""
        length, joint = record.length, 1.0
        record.chances = []
        for token in record.source[record.at : record.at + MAX_DRAFT]:
            kind = min(length, LONGEST)
            chance = self._right[kind] / self._tried[kind]
            joint *= chance
            if joint < LEAST_CHANCE:
                return
            record.draft.append(token)
            record.chances.append(chance)
            length += 1


def _key(text: list[int], end: int) -> int:
    """The last three tokens before a position."""
    key = 0
    for token in text[max(0, end - SHORTEST) : end]:
        key = key << BITS | token
    return key


def _shared(places: _Places, text: list[int]) -> int:
    """Return how many tokens this text begins with as one of the newest texts does; 0 if few."""
    best = 0
    for number in list(places.texts)[-8:]:
        other = places.texts[number]
        n = best + COMMON
        while text[best:n] == other[best:n] and n <= min(len(text), len(other)):
            best, n = n, n + COMMON
    return best


def suffix_drafter(
    speculation: str, clock: Callable[[], float] = time.perf_counter
) -> PricedDrafts | None:
    """The priced proposer of this kind of speculation; None where suffixes are not asked for."""
    if speculation in ("auto", "suffix", "ngram"):
        return PricedDrafts(SuffixDrafts(own=speculation == "ngram"), clock)
    return None
