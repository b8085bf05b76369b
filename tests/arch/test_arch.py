"""The house rules that ruff cannot check: who imports whom, forbidden words, sizes, habits."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
FILES = sorted((SRC / "pageturner").rglob("*.py"))
GROUND = ("errors", "params", "memory", "progress", "config", "channel", "http_client")

# room -> what it may import of ours, as prefixes. Those not listed (cli, llm, __init__) may import anything.
ALLOWED: dict[str, tuple[str, ...]] = {
    "core": (
        "core",
        "policies.step_time",
        "policies.length_predictor",
        "policies.pinned_prefixes",
        "observe.counters",
        "observe.work",
    ),
    "policies": ("policies", "core"),
    "observe": ("observe", "core", "errors"),
    "text": ("text", "core.types", "files", "errors", "params"),
    "errors": (),
    "params": (),
    "memory": (),
    "progress": (),
    "session": ("core.types",),
    "config": ("errors",),
    "http_client": ("errors",),
    "channel": ("core.types", "observe.work"),
    "files": ("files", "errors", "params", "progress"),
    "kernels": ("kernels", "errors", "files", "memory"),
    "models": ("models", "kernels.base", "files", "errors", "memory"),
    "runtime": ("runtime", "models", "kernels", "policies", "observe", "text", "core", "files", *GROUND),
    "serve": ("serve", "core.types", "observe.work", "text", "files", *GROUND),
    "router": ("router", "serve", "files", *GROUND),
    "commands": (
        "commands",
        "llm",
        "lab",
        "runtime",
        "models",
        "kernels",
        "text",
        "core.types",
        "files",
        *GROUND,
    ),
    "lab": (
        "lab",
        "llm",
        "runtime",
        "serve",
        "router.placement",
        "models",
        "kernels",
        "policies",
        "observe",
        "text",
        "core",
        "files",
        *GROUND,
    ),
}
# What the shared mechanism must never learn about; features come in from outside.
FORBIDDEN = ("grammar", "lora", "beam", "tenant", "dashboard", "static")

MAX_FILE, MAX_FUNCTION, MAX_CORE = 450, 60, 3_750


def name_of(path: Path) -> str:
    """Dotted module name below the package: 'core.types'; '' is the package itself."""
    parts = path.relative_to(SRC / "pageturner").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}
IDS = [name or "__init__" for name in MODULES]


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def absolute(name: str, node: ast.ImportFrom) -> str:
    """The dotted name an import statement starts from, relative ones resolved."""
    if not node.level:
        return node.module or ""
    package = ["pageturner", *name.split(".")]
    if MODULES[name].name != "__init__.py":
        package.pop()
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def imported(name: str, node: ast.AST) -> list[str]:
    """Full dotted names that one statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = absolute(name, node)
        return [f"{base}.{alias.name}" for alias in node.names]
    return []


def ours(full: str) -> str | None:
    """The module of ours that a full name is or lies in."""
    if full.split(".")[0] != "pageturner":
        return None
    parts = full.split(".")[1:]
    while ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts)


def house_imports(name: str, *, top_level: bool = False) -> set[str]:
    nodes = tree(name).body if top_level else ast.walk(tree(name))
    found = {ours(full) for node in nodes for full in imported(name, node)}
    return {module for module in found if module is not None and module != name}


@pytest.mark.parametrize("name", MODULES, ids=IDS)
def test_imports_point_downwards(name: str) -> None:
    allowed = ALLOWED.get(name.split(".")[0])
    if allowed is None:
        assert name in ("", "cli", "llm"), "a new room: say in ALLOWED what it may import"
        return
    for module in house_imports(name):
        fits = any(module == prefix or module.startswith(prefix + ".") for prefix in allowed)
        assert fits or module == "", f"{name} imports {module}"


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in MODULES
        if name.split(".")[0] in ("core", "policies", "errors", "params", "memory", "progress")
    ],
)
def test_ground_floor_is_standard_library_only(name: str) -> None:
    for node in ast.walk(tree(name)):
        for full in imported(name, node):
            assert full.split(".")[0] in {*sys.stdlib_module_names, "pageturner"}, f"{name} imports {full}"


def test_torch_only_where_it_is_optional() -> None:
    optional = {"kernels.torch_ops", "kernels.triton_ops", "kernels.comm"}
    for name in MODULES:
        for node in ast.walk(tree(name)):
            if name not in optional:
                assert not any(
                    full.split(".")[0] in ("torch", "transformers") for full in imported(name, node)
                ), name


def test_no_import_cycles() -> None:
    order = TopologicalSorter({name: house_imports(name, top_level=True) for name in MODULES}).static_order()
    assert set(order) >= set(MODULES)  # a cycle raises CycleError, which names it


@pytest.mark.parametrize("name", [name for name in ("core.scheduler", "models.decoder") if name in MODULES])
def test_shared_mechanism_knows_no_feature(name: str) -> None:
    """`build` is left out: it hands the options of single policies on, by name; nobody else reads them."""
    module = tree(name)
    body = [node for node in module.body if not (isinstance(node, ast.FunctionDef) and node.name == "build")]
    text = ast.unparse(ast.Module(body, [])).lower()
    assert [word for word in FORBIDDEN if word in text] == []


@pytest.mark.parametrize("name", MODULES, ids=IDS)
def test_sizes_and_habits(name: str) -> None:
    lines = MODULES[name].read_text().splitlines()
    assert len(lines) <= MAX_FILE, f"{name}: {len(lines)} lines"
    assert not lines or ast.get_docstring(tree(name)), f"{name} does not say what it owns"
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or 0) - node.lineno + 1
            assert size <= MAX_FUNCTION, f"{name}.{node.name}: {size} lines"
        elif isinstance(node, ast.Call):
            assert ast.unparse(node.func) != "hasattr", f"{name}:{node.lineno}: hasattr"


def test_inheritance_is_at_most_protocol_and_class() -> None:
    bases: dict[str, list[str]] = {}
    for name in MODULES:
        for node in ast.walk(tree(name)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
    for cls, parents in bases.items():
        for parent in parents:
            grand = [name for name in bases.get(parent, []) if name in bases]
            assert not grand, f"{cls} <- {parent} <- {grand}"


def test_line_ceilings(capsys: pytest.CaptureFixture[str]) -> None:
    lines: Counter[str] = Counter()
    statements: Counter[str] = Counter()
    for name, path in MODULES.items():
        room = name.split(".")[0] if "." in name else "(top)"
        lines[room] += len(path.read_text().splitlines())
        statements[room] += sum(isinstance(node, ast.stmt) for node in ast.walk(tree(name)))
    with capsys.disabled():
        print(
            "\n" + ", ".join(f"{room} {n} lines/{statements[room]} statements" for room, n in lines.items())
        )
    assert lines["core"] <= MAX_CORE
