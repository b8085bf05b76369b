"""docs/policies.md names every registered policy, order and admission, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest

from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS
from pageturner.policies.reserves import RESERVES

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.mark.parametrize(
    ("section", "registry"), [("Policies", POLICIES), ("Orders", ORDERS), ("Admission", RESERVES)]
)
def test_names_in_docs_are_the_registered_ones(section: str, registry: Collection[str]) -> None:
    text = PAGE.read_text().split(f"\n## {section}", 1)[1].split("\n## ", 1)[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(registry)
