"""The Makefile calls what is there, and does something: a module without a main part ends with status 0."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pageturner.commands.examples import EXAMPLES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Makefile").read_text()
MODULES = [name.replace(".", "/") + ".py" for name in re.findall(r"-m (pageturner[\w.]+)", TEXT)]
SCRIPTS = re.findall(r"\$\(BIN\)/python ([\w/]+\.py)", TEXT)
COMMANDS = re.findall(r"\$\(BIN\)/pageturner ([\w-]+)", TEXT)


@pytest.mark.parametrize("name", sorted({*SCRIPTS, *(f"src/{name}" for name in MODULES)}))
def test_what_it_runs_has_a_main_part(name: str) -> None:
    assert 'if __name__ == "__main__":' in (ROOT / name).read_text()


@pytest.mark.parametrize("name", sorted(set(COMMANDS)))
def test_commands_are_there(name: str) -> None:
    assert any(known.split()[0] == name for known in EXAMPLES)
