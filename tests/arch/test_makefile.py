"""The Makefile calls what is there, and does something: a module without a main part ends with status 0."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pageturner.cli.examples import EXAMPLES

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


def test_the_full_tests_fetch_triton_and_go_on_without_it() -> None:
    def target(name: str) -> tuple[str, str]:
        found = re.search(rf"^{name}:([^#\n]*)[^\n]*\n((?:\t[^\n]*\n)+)", TEXT, re.M)
        assert found is not None, name
        return found[1], found[2]

    wanted, recipe = target("test-full")
    assert "gpu-build" in wanted.split()
    assert "not gpu" in recipe  # the mark of tests that need a device, and not the folder tests/gpu
    assert target("gpu-build")[1].startswith("\t-")  # make goes on where it fails
    assert "touch" in target(r"\$\(VENV\)/\.gpu-build")[1]
    assert "tests/gpu" in target("test-gpu")[1]
