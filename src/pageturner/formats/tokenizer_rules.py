"""Checks the rules of a tokenizer.json: they must end soon and not make a text grow without bound.

Owns the check of patterns and normalizers, which anyone may have written. The `tokenizers` library
matches patterns by backtracking (Oniguruma): where something of varying length is repeated, as in
`(a+)+$`, thirty letters take longer than anybody waits. Telling such a pattern from a harmless one
by running it would only find the letters that were tried, so what is asked for is a form that
cannot take exponential time. Must not know files, nor what a tokenizer does with the rules.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MAX_RULES = 64  # normalizers and pre-tokenizers; real files have up to ten
MAX_VARYING = (
    8  # repetitions of varying length behind each other: the exponent of the time a text takes
)
MAX_GROWTH = 64  # how many times as long all normalizers together may make a text
MAX_PUT_IN = 64  # characters in front of a text; real files have one
_LONGEST_MAPPED = 64  # bytes that one character becomes; Unicode's own longest takes 33

_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_ESCAPE = re.compile(
    r"\\(?:[pPxo]\{[^}]*\}|[kg]<[^>]*>|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|.)", re.DOTALL
)
_GROUP = re.compile(r"\((?:\?(?:<?[=!]|[:>]|[a-zA-Z-]*[:)]|<\w+>|#[^)]*\)|[~(|{].*))?", re.DOTALL)
_ZERO_WIDTH = ("(?=", "(?!", "(?<=", "(?<!")


@dataclass(slots=True)
class _Part:
    """A pattern, or a part of one, as far as time is concerned.

    varies   whether it matches texts of different lengths, or one text in several ways
    varying  most repetitions of varying length on one way through it
    least    characters that it matches at least
    """

    varies: bool = False
    varying: int = 0
    least: int = 0


def check_rules(rules: Any) -> None:
    """ValueError, with a sentence that says what is wrong, unless all rules are bounded. rules:
    normalizers and pre-tokenizers as they are in the file, in whatever lists and objects."""
    growth, count, put_in = 1.0, 0, 0
    for rule in _objects(rules):
        count += "type" in rule
        put_in += len(prepended) if isinstance(prepended := rule.get("prepend"), str) else 0
        if isinstance(charsmap := rule.get("precompiled_charsmap"), str):
            growth *= _mapped(charsmap)
        pattern = rule.get("pattern")
        if not isinstance(pattern, dict):
            continue
        regex, text = pattern.get("Regex"), pattern.get("String")
        least = (
            pattern_least(regex)
            if isinstance(regex, str)
            else len(text)
            if isinstance(text, str)
            else 0
        )
        if isinstance(content := rule.get("content"), str):
            growth *= max(1.0, len(content) / least) if least else 1.0 + len(content)
            put_in += (
                0 if least else MAX_PUT_IN * len(content) // 2
            )  # where nothing is: one character, once
    if put_in >= MAX_PUT_IN:
        raise ValueError(
            "its normalizers put text where none was more than once, or more than is supported"
        )
    if count > MAX_RULES:
        raise ValueError(
            f"it has {count} normalizers and pre-tokenizers; at most {MAX_RULES} are supported"
        )
    if growth > MAX_GROWTH:
        raise ValueError(
            f"its normalizers may make a text {growth:.3g} times as long; {MAX_GROWTH} at most"
        )


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _objects(inner)


def _mapped(charsmap: str) -> float:
    """1 for a table of sentencepiece (a trie's size, the trie, texts that end in zeros) with short
    texts, as that of NFKC: a second table finds nothing to do. ValueError for one with longer
    ones."""
    raw = base64.b64decode(charsmap, validate=True)
    trie = int.from_bytes(raw[:4], "little")
    if len(raw) < 4 + trie or trie % 4:
        raise ValueError("its precompiled_charsmap is broken")
    texts = raw[4 + trie :]
    longest = max(map(len, texts.split(b"\0")))
    if longest > _LONGEST_MAPPED:
        raise ValueError(f"its precompiled_charsmap makes {longest} bytes of one character")
    return max(1.0, longest / 8) if longest > 40 else 1.0


def pattern_least(pattern: str) -> int:
    """The least number of characters that a pattern matches. ValueError for one whose time is not
    bounded."""
    part, end = _alternatives(pattern, 0, 0)
    if end < len(pattern):
        raise ValueError(f"the pattern {pattern!r} closes a group that it has not opened")
    if part.varying > MAX_VARYING:
        raise ValueError(f"the pattern {pattern!r} repeats {part.varying} things behind each other")
    return part.least


def _alternatives(pattern: str, at: int, depth: int) -> tuple[_Part, int]:
    """The part from `at` to the parenthesis that closes it, or to the end; where that is."""
    if depth > MAX_RULES:
        raise ValueError(f"the pattern {pattern!r} is nested too deeply")
    whole, branch, branches = _Part(least=-1), _Part(), 1
    while True:
        if at == len(pattern) or pattern[at] in "|)":
            whole.varies |= branch.varies
            whole.varying = max(whole.varying, branch.varying)
            whole.least = branch.least if whole.least < 0 else min(whole.least, branch.least)
            if at == len(pattern) or pattern[at] == ")":
                whole.varies |= branches > 1
                return whole, at
            branch, branches, at = _Part(), branches + 1, at + 1
            continue
        atom, at = _atom(pattern, at, depth)
        atom, at = _repeated(atom, pattern, at)
        branch.varies |= atom.varies
        branch.varying += atom.varying
        branch.least += atom.least


def _atom(pattern: str, at: int, depth: int) -> tuple[_Part, int]:
    """One character, class, assertion or group, and where it ends."""
    one = _Part(least=1)
    if pattern[at] == "[":
        return one, _class_end(pattern, at)
    if (escape := _ESCAPE.match(pattern, at)) is not None:
        if escape[0][1] in "gk" or escape[0][1] in "123456789":
            raise ValueError(
                f"the pattern {pattern!r} refers to its own parts, which is not supported"
            )
        return (_Part() if escape[0][1] in "bBAzZG" else one), escape.end()
    if pattern[at] in "^$":
        return _Part(), at + 1
    if (group := _GROUP.match(pattern, at)) is None:
        return one, at + 1
    opened = group[0]
    if opened.startswith(("(?~", "(?(", "(?|", "(?{")):
        raise ValueError(f"the pattern {pattern!r} has a kind of group that is not supported")
    if opened.endswith(")"):  # flags or a comment
        return _Part(), group.end()
    part, end = _alternatives(pattern, group.end(), depth + 1)
    if end == len(pattern):
        raise ValueError(f"the pattern {pattern!r} does not close a group")
    if opened in _ZERO_WIDTH:
        part.least, part.varies = 0, False
    return part, end + 1


def _repeated(atom: _Part, pattern: str, at: int) -> tuple[_Part, int]:
    """An atom with the quantifiers behind it. ValueError where what varies is repeated."""
    while (found := _QUANTIFIER.match(pattern, at)) is not None:
        sign, (low, comma, high) = found[0], found.groups()
        if sign in ("{}", "{,}"):
            break  # these are characters
        least, most = _bounds(sign, low, comma, high)
        if most > 1 and (atom.varies or atom.varying):
            raise ValueError(
                f"the pattern {pattern!r} repeats what is itself of varying length, which can take time"
                " without end: repeat single characters or classes"
            )
        varies = least != most
        atom = _Part(atom.varies or varies, atom.varying + varies, atom.least * least)
        at = found.end()
        # lazy, or possessive
        at += pattern.startswith(("?",) if sign.startswith("{") else ("?", "+"), at)
    return atom, at


def _bounds(sign: str, low: str | None, comma: str | None, high: str | None) -> tuple[int, float]:
    """The least and the largest number of repetitions of a quantifier."""
    if sign == "?":
        return 0, 1
    if low is None:
        return int(sign == "+"), math.inf
    if not comma:
        return int(low), int(low)
    return int(low or 0), int(high) if high else math.inf


def _class_end(pattern: str, at: int) -> int:
    """The position after the class that opens at `at`; classes may hold classes."""
    depth = 0
    while at < len(pattern):
        if (escape := _ESCAPE.match(pattern, at)) is not None:
            at = escape.end()
            continue
        first = pattern[at]
        at += 1
        if first == "[":
            depth += 1
            at += pattern.startswith("^", at)
            at += pattern.startswith("]", at)  # the first one is a character
        elif first == "]":
            depth -= 1
            if not depth:
                return at
    raise ValueError(f"the pattern {pattern!r} does not close a class")
