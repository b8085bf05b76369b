"""docs/architecture.md names only what exists."""

from __future__ import annotations

import ast
import keyword
import re
from functools import cache
from pathlib import Path

import house
import house_walk as walk

ROOT = Path(__file__).parents[2]
TEXT = house.ARCHITECTURE.read_text()
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
FILE = r"`((?:[\w]+/)*\w+\.py)`"


HOUSE = walk.read()


@cache
def classes() -> list[ast.ClassDef]:
    return [
        node for module in HOUSE.values() for node in module.nodes if isinstance(node, ast.ClassDef)
    ]


@cache
def defined() -> set[str]:
    """Classes, what is imported, and what is given a value."""
    found = {one.name for one in classes()}
    for module in HOUSE.values():
        for node in module.nodes:
            match node:
                case ast.ImportFrom(names=aliases):
                    found |= {alias.asname or alias.name for alias in aliases}
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
    return found


@cache
def trees(file: str) -> list[ast.Module]:
    """What this name of a file can mean, in the package or from the root; with its room or without it."""
    found = [one.tree for one in HOUSE.values() if f"/{one.file}".endswith(f"/{file}")]
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


def test_files_classes_and_names_exist() -> None:
    """One test, for one worker to parse the sources."""
    files = set(re.findall(FILE, PROSE))
    assert files
    assert [file for file in files if not trees(file)] == []
    absent = [
        (file, name)
        for file, name in set(statements())
        if not any(name in names(tree) for tree in trees(file))
    ]
    assert absent == []
    owned = [name.split(".") for name in re.findall(r"`([A-Z]\w*\.(?!md)\w+)`", PROSE)]
    assert owned
    have = {
        name for owner, _ in owned for one in classes() if one.name == owner for name in pairs(one)
    }
    assert [pair for pair in owned if tuple(pair) not in have] == []
    named = re.findall(r"`([A-Z]\w*[a-z_]\w*|[A-Z]+_[A-Z_]+)`", PROSE)
    assert named
    rest = set(named) - defined()
    assert [name for name in rest if not any(name in members(one) for one in classes())] == []


def pairs(owner: ast.ClassDef) -> set[tuple[str, str]]:
    return {(owner.name, member) for member in members(owner)}
