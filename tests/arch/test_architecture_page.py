"""docs/architecture.md names only what exists."""

from __future__ import annotations

import ast
import keyword
import re
from functools import cache
from pathlib import Path

import pytest

import house
import house_walk as walk

ROOT = Path(__file__).parents[2]
TEXT = house.ARCHITECTURE.read_text()
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
FILE = r"`((?:[\w]+/)*\w+\.py)`"


@cache
def sources() -> dict[str, ast.Module]:
    """The files of the package."""
    return {
        str(path.relative_to(walk.PACKAGE)): ast.parse(path.read_text())
        for path in walk.PACKAGE.rglob("*.py")
    }


@cache
def classes() -> list[ast.ClassDef]:
    return [
        node
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]


@cache
def defined() -> set[str]:
    """Classes, what is imported, and what is given a value."""
    found: set[str] = set()
    for tree in sources().values():
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(names=aliases):
                    found |= {alias.asname or alias.name for alias in aliases}
                case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


@cache
def trees(file: str) -> list[ast.Module]:
    """What this name of a file can mean, in the package or from the root; with its room or without it."""
    found = [tree for path, tree in sources().items() if path == file or path.endswith(f"/{file}")]
    return found or [
        ast.parse(path.read_text()) for path in (ROOT / file, ROOT / "src" / file) if path.exists()
    ]


def names(tree: ast.AST) -> set[str]:
    """Everything that is defined, passed or used under a name in there."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                found.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                found.add(name)
    return found


def members(owner: ast.ClassDef) -> set[str]:
    """Methods, fields, and what a method sets on `self`; of its bases too."""
    found = set()
    for node in owner.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
    for node in ast.walk(owner):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    bases = {base.id for base in owner.bases if isinstance(base, ast.Name)}
    return found.union(*(members(one) for one in classes() if one.name in bases))


def statements() -> list[tuple[str, str]]:
    """(file, name) for each time the page says that a name is found in a file."""
    found = []
    listed = r"((?:`[\w.]+`(?:, | and )?)+)"
    for inside, file in re.findall(rf"{listed} (?:in|of) {FILE}", re.sub(r"\s+", " ", PROSE)):
        found += [(file, name) for name in re.findall(r"`(?:\w+\.)*(\w+)`", inside)]
    for file, about in re.findall(rf"^\d+\. {FILE}: (.*(?:\n .*)*)", PROSE, re.MULTILINE):
        found += [
            (file, name)
            for name in re.findall(r"`([a-z_]+)`", about)
            if not keyword.iskeyword(name)
        ]
    return found


def test_both_forms_of_naming_a_place_are_read() -> None:
    assert {("text/output_stream.py", "add_event"), ("scheduler/store.py", "on_evict")} <= set(
        statements()
    )


@pytest.mark.parametrize("file", sorted(set(re.findall(FILE, PROSE))))
def test_file_exists(file: str) -> None:
    assert trees(file)


@pytest.mark.parametrize(("file", "name"), sorted(set(statements())))
def test_name_is_in_that_file(file: str, name: str) -> None:
    assert any(name in names(tree) for tree in trees(file))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([A-Z]\w*\.(?!md)\w+)`", PROSE))))
def test_class_has_that_member(name: str) -> None:
    owner, member = name.split(".")
    assert any(one.name == owner and member in members(one) for one in classes())


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`([A-Z]\w*[a-z_]\w*|[A-Z]+_[A-Z_]+)`", PROSE)))
)
def test_class_or_constant_exists(name: str) -> None:
    assert name in defined() or any(name in members(one) for one in classes())
