"""Rooms import nothing of what their process does not have: proved by refusing these imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
ENGINE = ("engine", "executor", "kv", "scheduler", "policies")
HOOK = """
import importlib, sys

HIDDEN = tuple(sys.argv[1].split(","))

class Hide:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in HIDDEN):
            raise AssertionError(f"{name} is hidden here")

sys.meta_path.insert(0, Hide())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def modules_of(room: str) -> list[str]:
    paths = (SOURCE / "pageturner" / room).rglob("*.py")
    return [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in paths]


def import_without(hidden: list[str], modules: list[str]) -> None:
    command = [sys.executable, "-c", HOOK, ",".join(hidden), *sorted(modules)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_router_needs_neither_numpy_nor_the_server() -> None:
    modules = [name for name in modules_of("router") if ".ray." not in name]
    assert "pageturner.router.app" in modules
    hidden = [f"pageturner.{room}" for room in ("server", "text", "formats", "kernels", "engine")]
    import_without(["numpy", *hidden], modules)


@pytest.mark.parametrize("room", ENGINE)
def test_the_engine_needs_no_http(room: str) -> None:
    modules = modules_of(room)
    assert modules
    hidden = [f"pageturner.{room}" for room in ("http", "server", "router", "lab", "cli")]
    import_without(["starlette", "uvicorn", "httptools", *hidden], modules)


def test_what_is_hidden_is_refused() -> None:
    with pytest.raises(AssertionError, match="is hidden here"):
        import_without(["starlette"], ["pageturner.http.middleware"])
