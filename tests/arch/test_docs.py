"""docs/policies.md names every registered policy, order and admission, and nothing else; docs/security.md
names tests and flags that exist."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest

from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS
from pageturner.policies.reserves import RESERVES
from pageturner.server.observability.metrics import Metrics, render

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "policies.md"
SECURITY = (ROOT / "docs" / "security.md").read_text()


@pytest.mark.parametrize(
    ("section", "registry"), [("Policies", POLICIES), ("Orders", ORDERS), ("Admission", RESERVES)]
)
def test_names_in_docs_are_the_registered_ones(section: str, registry: Collection[str]) -> None:
    text = PAGE.read_text().split(f"\n## {section}", 1)[1].split("\n## ", 1)[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(registry)


def test_promises_about_security_name_tests_that_exist() -> None:
    files = re.findall(r"`((?:tests|src)/[\w/]+\.py)`", SECURITY)
    assert len(files) > 5
    assert [name for name in files if not (ROOT / name).exists()] == []
    defined = {
        name
        for file in {ROOT / name for name in files if name.startswith("tests/")}
        for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert set(re.findall(r"`(test_\w+)`", SECURITY)) - defined == set()


def test_the_page_about_security_names_flags_and_metrics_that_exist() -> None:
    api = (ROOT / "docs" / "api.md").read_text()
    flags = set(re.findall(r"`(--[a-z-]+)", SECURITY))
    assert {flag for flag in flags if f"`{flag}`" not in api} == set()
    source = "".join(path.read_text() for path in (ROOT / "src" / "pageturner").rglob("*.py"))
    metrics = re.findall(r"`(?:pageturner|vllm):(?:router_)?(\w+?)(?:_total)?[`{]", SECURITY)
    assert [name for name in metrics if name not in source] == []


def test_the_page_about_watching_names_flags_metrics_and_spans_that_exist() -> None:
    text = (ROOT / "docs" / "watching.md").read_text()
    api = (ROOT / "docs" / "api.md").read_text()
    flags = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", text)) - {"--only"}
    assert {flag for flag in flags if f"`{flag}`" not in api} == set()
    metrics = Metrics()
    metrics.engine_stats({"step_seconds": 1.0, "read_bytes": 1.0})
    exposed = render(metrics, "m", True, {}).decode()
    names = set(re.findall(r"`((?:pageturner|vllm):\w+|(?:http|process)_\w+)", text)) - {
        "pageturner:router_"
    }
    assert len(names) > 30
    absent = {name for name in names if f"# TYPE {name} " not in exposed}
    assert {
        name for name in absent if f"# TYPE {name.removesuffix('_total')} " not in exposed
    } == set()
    source = "".join(path.read_text() for path in (ROOT / "src" / "pageturner").rglob("*.py"))
    attributes = set(re.findall(r"`((?:gen_ai|pageturner)\.[a-z_.]+)`", text))
    assert {name for name in attributes if name not in source and "seconds" not in name} == set()


def test_docs_are_short_enough_to_be_read() -> None:
    """Records of decisions are for whoever changes the code, and do not count."""
    words = {path: len(path.read_text().split()) for path in (ROOT / "docs").glob("*.md")}
    readme = (ROOT / "README.md").read_text()
    assert sum(words.values()) + len(readme.split()) <= 25_000
    assert words[ROOT / "docs" / "api.md"] <= 8_000
    assert len(readme.splitlines()) <= 80
