"""What the acceptance of `compare` calls the same advice."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))

import page_compare


def told(**choose: list[str]) -> dict[str, Any]:
    return {"advice": [{"want": want, "choose": names} for want, names in choose.items()]}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (told(speed=["chunked", "orca"], gaps=["chunked"]), []),
        (
            told(speed=["chunked"], gaps=["chunked"]),
            ["speed: ('chunked', 'orca') and ('chunked',)"],
        ),
        (told(speed=["chunked", "orca"]), ["gaps: ('chunked',) and None"]),
    ],
)
def test_advice_is_the_same_when_each_want_has_the_same_answer(
    other: dict[str, Any], words: list[str]
) -> None:
    assert page_compare.different(told(speed=["chunked", "orca"], gaps=["chunked"]), other) == words
