"""Patterns and normalizers of a tokenizer.json: which of them may be used."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from pageturner.formats.bpe import PRE_TOKENIZERS
from pageturner.formats.tokenizer_rules import check_rules, pattern_least

CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = (
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"(?=(\d{3})+(?!\d))",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    " {2,}",
)


def test_the_patterns_of_real_tokenizers_may_be_used() -> None:
    every = {pattern for pre in PRE_TOKENIZERS.values() for pattern in pre.patterns}
    for pattern in (*every, CL100K, O200K, *DIGITS):
        check_rules({"type": "Split", "pattern": {"Regex": pattern}})


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(a+)+$", "varying length"),
        ("(a|a)*$", "varying length"),
        (r"(?:\p{L}+\s?)*!", "varying length"),
        ("(?:(?:a?){9}){9}", "varying length"),
        ("(?:a{1,9}){9}", "varying length"),
        ("[^[a]b]*(?<x>c*)+", "varying length"),
        ("a?" * 30 + "a" * 30, "behind each other"),
        (r"(a)\1+", "its own parts"),
        (r"(?<x>a)\g<x>*", "its own parts"),
        ("(?:" * 200 + "a" + ")" * 200, "too deeply"),
        ("(?~a+)+", "not supported"),
        ("(a", "does not close"),
        ("a)", "not opened"),
        ("[a", "does not close"),
    ],
)
def test_patterns_that_may_not_end_are_refused(pattern: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_rules([{"a": [{"pattern": {"Regex": pattern}}]}])


@pytest.mark.parametrize(
    ("pattern", "least"),
    [
        ("", 0),
        ("a", 1),
        ("ab|c", 1),
        ("a*", 0),
        ("a{3,}b", 4),
        ("a{,3}", 0),
        ("(?=aa)b", 1),
        (r"\bx\p{L}[a\]]$", 3),
        ("(?:ab){2}?c", 5),
        ("a{}", 3),
        ("(?#no)a(?i)", 1),
    ],
)
def test_how_much_a_pattern_matches_at_least(pattern: str, least: int) -> None:
    assert pattern_least(pattern) == least


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(longest: int) -> dict[str, Any]:
    return {
        "precompiled_charsmap": base64.b64encode(
            bytes(4) + b"a\0" + b"b" * longest + b"\0"
        ).decode()
    }


def test_normalizers_may_not_let_a_text_grow_without_bound() -> None:
    check_rules([replace("▁", String=" "), replace(" ", Regex=" {2,}"), charsmap(33)] * 3)
    check_rules([replace("", Regex="x*")] * 20)
    check_rules([{"prepend": "▁"}, replace("▁", Regex="^")])
    for grows in (
        [replace("aa", String="a")] * 7,
        [replace("x" * 65, String="a")],
    ):
        with pytest.raises(ValueError, match="times as long"):
            check_rules(grows)


@pytest.mark.parametrize(
    "rules",
    [
        [replace("aa", Regex="^")],
        [replace("a", Regex="(?=x)")] * 2,
        [replace("aa", String="")],
        [{"prepend": "x" * 64}],
        [{"prepend": "x" * 9}] * 9,
    ],
)
def test_normalizers_that_put_text_where_none_was(rules: list[dict[str, Any]]) -> None:
    """The library panics when it does so twice in one place."""
    with pytest.raises(ValueError, match="where none was"):
        check_rules(rules)


def test_other_rules_that_are_refused() -> None:
    with pytest.raises(ValueError, match="99 normalizers"):
        check_rules([{"type": "NFC"}] * 99)
    with pytest.raises(ValueError, match="500 bytes of one character"):
        check_rules(charsmap(500))
    for broken in ("/////w==", "", "A", "ü"):
        with pytest.raises(ValueError, match=r"broken|base64|ASCII|padded"):
            check_rules({"precompiled_charsmap": broken})
