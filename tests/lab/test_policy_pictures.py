"""The pictures of docs/policies.md are the ones that bench/policies.py draws, and each is shown."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench import policies

from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return policies.drawn()


def test_committed_pictures_are_what_is_drawn(drawn: dict[str, str]) -> None:
    committed = {path.stem: path.read_text() for path in policies.FOLDER.iterdir()}
    stale = sorted(name for name in drawn | committed if drawn.get(name) != committed.get(name))
    assert not stale, f"run make docs-policies: {stale}"


def test_each_policy_and_order_has_its_own(drawn: dict[str, str]) -> None:
    assert set(drawn) == {*POLICIES, *ORDERS}
    assert len({svg.partition('class="grid"')[2] for svg in drawn.values()}) == len(drawn)


def test_the_page_shows_each(drawn: dict[str, str]) -> None:
    page = Path(policies.FOLDER.with_suffix(".md")).read_text()
    assert sorted(re.findall(r"^!\[.+\]\(policies/(\w+)\.svg\)", page, re.MULTILINE)) == sorted(
        drawn
    )
    assert sorted(re.findall(r"\| \[picture\]\(policies/(\w+)\.svg\) \|", page)) == sorted(drawn)


def test_pictures_are_small_and_whole(drawn: dict[str, str]) -> None:
    for name, svg in drawn.items():
        root = ElementTree.fromstring(svg)
        titles = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
        assert titles[0] == name
        assert len(svg) < 40_000
    assert sum(map(len, drawn.values())) < 300_000
