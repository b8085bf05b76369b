"""Prompt lookup: where it looks, how long its drafts are, when it is silent."""

from __future__ import annotations

from pageturner.executor.draft import FIRST, PromptLookup
from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.scheduler.types import Item, Output, Sequence

TEXT = list(range(40))


def sequence(tokens: list[int], id: int = 1, *, speculation: bool = True) -> Sequence:
    params = SamplingParams(speculation=speculation)
    return Sequence(Request(id, tuple(tokens), params), tokens=list(tokens))


def draft(drafter: PromptLookup, seq: Sequence, token: int, others: int = 0) -> list[int]:
    """What is proposed behind `token`, which the step has just given, beside so many other sequences."""
    outputs = [Output([token]), *(Output() for _ in range(others))]
    drafter.propose([Item(seq, 1, seq.computed)] * len(outputs), outputs)
    return outputs[0].draft


def feed(
    drafter: PromptLookup, seq: Sequence, tokens: list[int], others: int = 0
) -> list[list[int]]:
    """The drafts behind each token that comes, if as much as possible of each is right."""
    drafts = []
    while tokens:
        found = draft(drafter, seq, tokens[0], others)
        drafts.append(found)
        right = next(
            (i for i, (a, b) in enumerate(zip(found, tokens[1:], strict=False)) if a != b),
            len(found),
        )
        seq.tokens += tokens[: 1 + right]
        tokens = tokens[1 + right :]
    return drafts


def test_what_stood_behind_the_last_place_that_looks_alike() -> None:
    drafter = PromptLookup()
    assert draft(drafter, sequence([1, 2, 3, 9, 1, 2, 5, 6, 7, 1]), 2) == [5, 6, 7]
    assert draft(drafter, sequence([8, 1, 2, 3, 9, 9, 1, 2, 5, 8, 1], id=2), 2) == [3, 9, 9]
    assert draft(drafter, sequence([1, 2, 3, 4], id=3), 5) == []
    assert draft(drafter, sequence([1], id=4), 1) == []


def test_right_drafts_grow_and_wrong_ones_shrink() -> None:
    drafter = PromptLookup()
    drafts = feed(drafter, sequence([*TEXT, 99]), list(TEXT))
    lengths = [len(found) for found in drafts]
    assert lengths[:5] == [0, FIRST, 7, 7, 7]
    drafter = PromptLookup()
    drafts = feed(drafter, sequence([*TEXT, 99]), [0, 1, 2, 3, 4, 5, 80, 81, 82, 6, 7, 8, 80, 81])
    assert drafts[1] == [2, 3, 4]
    assert drafts[2] == [6, 7, 8, 9, 10, 11, 12][:7]


def test_after_wrong_drafts_it_is_silent_for_a_while() -> None:
    drafter = PromptLookup()
    seq = sequence([1, 2, 3] * 3)
    wrong = [token for i in range(60) for token in (1, 2, 50 + i)]
    lengths = [len(found) for found in feed(drafter, seq, wrong)]
    assert sum(length > 0 for length in lengths[:20]) > sum(length > 0 for length in lengths[-60:])


def test_running_a_plan_again_gives_the_same_drafts() -> None:
    drafter, seq = PromptLookup(), sequence([1, 2, 3, 4, 1])
    assert draft(drafter, seq, 2) == draft(drafter, seq, 2) == [3, 4, 1]


def test_no_drafts_in_a_full_batch_or_where_nobody_wants_them() -> None:
    tokens = [1, 2, 3, 4, 1]
    assert draft(PromptLookup(), sequence(tokens), 2, others=20) == []
    assert len(draft(PromptLookup(), sequence(tokens), 2, others=3)) > 0
    assert draft(PromptLookup(), sequence(tokens, speculation=False), 2) == []


def test_beside_others_a_sequence_whose_drafts_fail_is_silent_sooner() -> None:
    wrong = [token for i in range(12) for token in (1, 2, 50 + i)]
    alone, beside = (
        sum(map(bool, feed(PromptLookup(), sequence([1, 2, 3] * 3), list(wrong), others)))
        for others in (0, 3)
    )
    assert 0 < beside < alone


def test_an_id_that_comes_again_starts_anew() -> None:
    drafter = PromptLookup()
    assert draft(drafter, sequence([1, 2, 3, 4, 1]), 2) == [3, 4, 1]
    assert draft(drafter, sequence([7, 8, 1, 5, 1]), 2) == []
