"""Placement: whom the rules choose, and what a router remembers."""

from __future__ import annotations

import pytest

from pageturner.router.load_balancer import PLACEMENTS, WORTH, PrefixMap


def test_round_robin_looks_at_nothing() -> None:
    place = PLACEMENTS["round_robin"]()
    assert [place([9, 0, 5], {1: 100}, 64) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_goes_round_among_equals() -> None:
    place = PLACEMENTS["least_loaded"]()
    assert [place([0, 0, 0], {}, 64) for _ in range(4)] == [0, 1, 2, 0]
    assert [place([2, 1, 3], {0: 50}, 64) for _ in range(2)] == [1, 1]


def test_a_prefix_is_worth_requests_in_proportion() -> None:
    place = PLACEMENTS["prefix_aware"]()
    assert place([WORTH - 1, 0, 0], {0: 64, 2: 0}, 64) == 0
    assert place([WORTH, 0], {0: 64}, 64) == 1
    assert place([WORTH // 2 - 1, 0], {0: 32}, 64) == 0
    assert place([WORTH // 2, 0], {0: 32}, 64) == 1
    assert place([1, 0, 0], {0: 4}, 64) == 2, "a beginning that everybody has is worth no request"
    assert place([3, 2, 9], {0: 64, 1: 64}, 64) == 1
    assert place([9, 7], {0: 64, 1: 16}, 64) == 0
    assert place([1, 1, 0], {}, 64) == 2


def test_hints_are_whole_chunks_of_equal_beginnings() -> None:
    known = PrefixMap(chunk=4)
    known.sent((1, 2, 3, 4, 5, 6, 7, 8, 9), 0)
    known.sent((1, 2, 3, 4, 0, 0, 0, 0), 2)
    assert known.hints((1, 2, 3, 4, 5, 6, 7, 8)) == {0: 8, 2: 4}
    assert known.hints((1, 2, 3, 4, 5, 6, 7)) == {0: 4, 2: 4}
    assert known.hints((5, 6, 7, 8)) == {}, (
        "the same chunk behind another beginning is another prefix"
    )
    known.gone(0)
    assert known.hints((1, 2, 3, 4, 5, 6, 7, 8)) == {2: 4}


def test_text_can_be_remembered_too() -> None:
    known = PrefixMap(chunk=3)
    known.sent("abcdef", 1)
    assert known.hints("abcdeX") == {1: 3}


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    known = PrefixMap(chunk=1, most=3)
    for token in range(5):
        known.sent((token,), token)
    assert [bool(known.hints((token,))) for token in range(5)] == [False, False, True, True, True]
    known.sent((2,), 0)
    known.sent((9,), 0)
    assert known.hints((2,)) == {2: 1, 0: 1}
    with pytest.raises(ValueError, match="at least one"):
        PrefixMap(chunk=0)
