"""What is looked up for sampling parameters before an engine sees them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pageturner.params import SamplingParams
from pageturner.text import parameters

from .bytes_tokenizer import BytesTokenizer

WORDS = {
    "dog": [1],
    " dog": [2],
    "cat": [3],
    " cat": [4, 5],
    "cow": [6, 7],
    " cow": [8, 7],
    "ox": [9, 8],
    " ox": [9, 9],
}


class Words(BytesTokenizer):
    """Some words are one token, alone or with the space before them, as in a real vocabulary."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert not add_special, "a bad word is not the beginning of a prompt"
        return WORDS[text]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("dog", ((1,), (2,))),  # both ways to write it
        (" dog", ((1,), (2,))),  # the space is not part of the word
        ("cat", ((3,),)),  # more tokens behind a space: another word's beginning might be meant
        ("cow", ((6, 7), (8, 7))),
        (
            "ox",
            ((9, 8),),
        ),  # the same first token: forbidding its last would forbid more than the word
    ],
)
def test_bad_words_become_tokens_by_the_rule_of_vllm(
    word: str, expected: tuple[tuple[int, ...], ...]
) -> None:
    found = parameters.resolve(SamplingParams(bad_words=(word,)), Words(), 266)
    assert found.bad_words_token_ids == expected


def test_what_is_resolved() -> None:
    asked = SamplingParams(stop_ids=(5, 257), logit_bias={1: -500.0, 2: 3.0})
    found = parameters.resolve(asked, BytesTokenizer(), 266)
    assert found.stop_ids == (257, 5)
    assert found.logit_bias == {1: -100.0, 2: 3.0}
    assert found.seed is not None
    assert parameters.resolve(replace(asked, seed=4), BytesTokenizer(), 266).seed == 4
    assert parameters.resolve(replace(asked, ignore_eos=True), BytesTokenizer(), 266).stop_ids == (
        5,
        257,
    )


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (None, [1, 2, 3, 4, 5]),
        (2, [4, 5]),
        (5, [1, 2, 3, 4, 5]),
        (9, [1, 2, 3, 4, 5]),
        (-1, [2, 3, 4, 5]),
    ],
)
def test_truncation(keep: int | None, expected: list[int]) -> None:
    assert parameters.truncate([1, 2, 3, 4, 5], keep, room=4, context=10) == expected


def test_truncation_without_room_leaves_one_token_for_others_to_refuse() -> None:
    assert parameters.truncate([1, 2, 3], -1, room=-5, context=10) == [3]
