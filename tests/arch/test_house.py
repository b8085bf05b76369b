"""The product is held to the bars of bench/house.py, and to the habits that ruff cannot check."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import house
import house_walk as walk

HOUSE = walk.read()
STANDARD_ONLY = (
    "scheduler",
    "policies",
    "errors",
    "params",
    "request",
    "block_keys",
    "option",
    "memory",
    "garbage",
    "progress",
)


def test_bars() -> None:
    """`python bench/house.py --findings` names what is too many. One test, for one worker to count it."""
    found = house.count(HOUSE, walk.path(house.ARCHITECTURE))
    assert found["missed"] == []
    assert set(found["figures"]) == set(house.bars())
    assert set(house.BUDGETS) >= {row["room"] for row in found["rooms"]}
    assert len(found["path"]) > 10


def test_every_room_is_in_the_table_and_the_table_points_downwards() -> None:
    assert set(house.ALLOWED) >= {module.room for module in HOUSE.values()}
    graph = {
        room: {other.split(".")[0] for other in allowed} - {room}
        for room, allowed in house.ALLOWED.items()
    }
    # a circle raises CycleError
    assert set(TopologicalSorter(graph).static_order()) == set(house.ALLOWED)


def test_what_serves_never_imports_what_computes() -> None:
    """So that no kernel can take the API process down."""
    graph = {source: set[str]() for source in HOUSE}
    for one in walk.imports(HOUSE):
        graph[one.source].add(one.target)
    left = [name for name in HOUSE if walk.room(name) in ("http", "server", "router")]
    seen = set(left)
    while left:
        new = graph[left.pop()] - seen - {"pageturner"}
        seen |= new
        left += new
    assert not {walk.room(name) for name in seen} & {
        "engine",
        "executor",
        "kv",
        "parallel",
        "models",
        "kernels",
    }


def test_what_serves_has_no_threads_that_all_requests_share() -> None:
    """One that takes long there holds up all others and cannot be ended: text workers can."""
    shared = {"to_thread", "run_in_executor", "ThreadPoolExecutor"}
    for name in [name for name in HOUSE if walk.room(name) in ("http", "server")]:
        for node in HOUSE[name].nodes:
            named = {getattr(node, "attr", None), getattr(node, "id", None)}
            assert not named & shared, f"{name}:{getattr(node, 'lineno', 0)}"


def test_ground_floor_is_standard_library_only() -> None:
    allowed = {*sys.stdlib_module_names, "pageturner"}
    ground = [module for name, module in HOUSE.items() if walk.room(name) in STANDARD_ONLY]
    assert len(ground) > len(STANDARD_ONLY)
    for module in ground:
        for node in module.imports:
            for full in walk.imported(module, node):
                assert full.split(".")[0] in allowed, f"{module.name} imports {full}"


def test_torch_only_where_it_is_optional() -> None:
    optional = {"kernels.torch_ops", "kernels.triton_ops", "kernels.comm"}
    for module in HOUSE.values():
        for node in module.imports:
            firsts = {full.split(".")[0] for full in walk.imported(module, node)}
            assert module.name in optional or not firsts & {"torch", "transformers"}, module.name


def test_habits() -> None:
    silent = [
        name
        for name, module in HOUSE.items()
        if module.lines and not ast.get_docstring(module.tree)
    ]
    assert silent == [], "they do not say what they own"
    asked = [
        module.at(node, "hasattr")
        for module in HOUSE.values()
        for node in module.nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "hasattr"
    ]
    assert asked == []


def test_inheritance_is_at_most_protocol_and_class() -> None:
    bases: dict[str, list[str]] = {}
    for module in HOUSE.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    for cls, parents in bases.items():
        for parent in parents:
            grand = [name for name in bases.get(parent, []) if name in bases]
            assert not grand, f"{cls} <- {parent} <- {grand}"


def test_test_modules_of_folders_that_are_no_packages_have_names_of_their_own() -> None:
    """Where two are called alike pytest collects one of them only."""
    tests = Path(__file__).parents[1]
    found = [one for one in tests.rglob("test_*.py") if not (one.parent / "__init__.py").exists()]
    names = Counter(one.name for one in found)
    assert [str(one.relative_to(tests)) for one in found if names[one.name] > 1] == []
