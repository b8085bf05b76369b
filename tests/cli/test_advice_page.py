"""The table at the head of docs/policies.md: its flags are those of serve, its commands those of simulate."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from pageturner import cli

ROOT = Path(__file__).parents[2]
SECTION = (
    (ROOT / "docs" / "policies.md")
    .read_text()
    .split("\n## Which to choose", 1)[1]
    .split("\n## ", 1)[0]
)
ROWS = [
    row.split(" | ")
    for row in re.findall(r"^\| (.*) \|$", SECTION, re.MULTILINE)[1:]
    if "--|" not in row
]
COMMANDS = re.findall(r"^\d\. `(--[^`]*)`", SECTION, re.MULTILINE)


def taken(command: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    called: list[object] = []
    monkeypatch.setattr(f"{cli.COMMANDS[(command,)][0]}.main", called.append)
    return cli.main([command, *words]) == 0 and len(called) == 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_flags_of_a_row_are_flags_of_serve(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [] if row[2] == "none" else shlex.split(row[2].strip("`"))
    assert taken("serve", flags, monkeypatch)


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_behind_the_figures_are_taken(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken("simulate", ["--model", "x", "--gpu", "H100", *words.split()], monkeypatch)


def test_the_example_of_a_batch_is_for_the_readmes_model() -> None:
    lines = [
        json.loads(line) for line in (ROOT / "examples" / "requests.jsonl").read_text().splitlines()
    ]
    assert len({line["custom_id"] for line in lines}) == len(lines) == 3
    for line in lines:
        assert (line["method"], line["url"]) == ("POST", "/v1/chat/completions")
        assert line["body"]["model"] == "smollm2"
        assert line["body"]["messages"][0]["role"] == "user"
    assert "batch examples/requests.jsonl " in (ROOT / "README.md").read_text()


def test_the_kinds_of_traffic_that_people_ask_about_are_there() -> None:
    kinds = " ".join(row[0] for row in ROWS)
    assert all(kind in kinds for kind in ("chat", "batch job", "several customers", "agents"))
    assert len(COMMANDS) == 5
    assert (ROOT / "examples" / "llama-3.1-8b.json").exists()
