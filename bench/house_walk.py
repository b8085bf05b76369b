"""How the house is counted: its files as syntax trees, and what can be asked of them.

Owns the rules: what an arrow, a circle, a private access, a question for a class is. Must not know what is
wanted (house.py has the direction and the bars), nor import the product: what is broken can be counted too.

A *room* is a folder of the package, or a module that lies directly in it. An *arrow* is an import from one
room to another. A *private access* is `x._y` where `x` is not the object itself and `_y` belongs to another
file. A *question* asks which policy, order or group it has got. A class name may occur twice only if all but
one of the docstrings say why: "Same name as `room.module.Name` because ...".
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "src" / "pageturner"

# What plugs in: nobody outside the file where it is defined asks which one it has.
PLUGS = re.compile(r"policies\..*|scheduler\.(group|batching|order)")

# Private by its name, and other people's: (what it is asked of, name); None: of anything.
LIBRARIES: frozenset[tuple[str | None, str]] = frozenset(
    {
        (None, "_replace"),
        (None, "_asdict"),
        (None, "_fields"),
        (None, "_make"),  # named tuples
        ("os", "_exit"),
        ("sys", "_getframe"),
        ("sys", "_current_frames"),
        ("hashlib", "_Hash"),
        ("argparse", "_SubParsersAction"),
        ("argparse", "_ArgumentGroup"),
        ("argparse", "_StoreAction"),
        ("gl.shared_memory_descriptor", "_reinterpret"),  # Gluon's
    }
)
EXTENSION = "_native"  # our compiled module: private by its name to those who install it, not to us

SAME_NAME = re.compile(r"Same name as `([\w.]+)`,? because \w")
PATH = re.compile(r"<!-- path -->(.*?)<!-- /path -->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Import:
    """One module of ours that a statement of another imports. top: when the module itself is imported."""

    source: str
    target: str
    line: int
    top: bool


@dataclass(frozen=True)
class Module:
    """One file. name: dotted, below the package ("core.types"); that of its own file is the package's."""

    name: str
    file: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.file)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Its statements that import, wherever they stand."""
        return [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]

    @property
    def room(self) -> str:
        return self.name.split(".")[0]

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def at(self, node: ast.AST, what: str) -> str:
        """A finding: "scheduler/types.py:12 what"."""
        return f"{self.file}:{getattr(node, 'lineno', 1)} {what}"


House = Mapping[str, Module]


def read(package: Path = PACKAGE) -> dict[str, Module]:
    """Every module of a package, by name."""
    house = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or package.name
        house[name] = Module(name, path.relative_to(package).as_posix(), path.read_text())
    return house


# -- who imports whom ----------------------------------------------------------------------------------------
def imported(module: Module, node: ast.AST, package: str = PACKAGE.name) -> list[str]:
    """The full dotted names that one statement imports, relative ones resolved."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        here = [package, *(module.name.split(".") if module.name != package else [])]
        if not module.file.endswith("__init__.py"):
            here.pop()
        base = ".".join(
            [*here[: len(here) - node.level + 1], *([node.module] if node.module else [])]
        )
    return [f"{base}.{alias.name}" for alias in node.names]


def ours(house: House, full: str, package: str = PACKAGE.name) -> str | None:
    """The module of the house that a full name is or lies in; None for what is somebody else's."""
    first, *parts = full.split(".")
    if first != package:
        return None
    while parts and ".".join(parts) not in house:
        parts.pop()
    return ".".join(parts) or package


def imports(house: House) -> list[Import]:
    """Each module that each other one imports, once for each statement."""
    found = []
    for module in house.values():
        body = set(map(id, module.tree.body))
        for node in module.imports:
            for target in {ours(house, full) for full in imported(module, node)} - {
                None,
                module.name,
            }:
                assert target is not None
                found.append(
                    Import(module.name, target, getattr(node, "lineno", 0), id(node) in body)
                )
    return found


def arrows(house: House) -> Counter[tuple[str, str]]:
    """(room, room that it imports) -> how many modules of the first import something of the second."""
    pairs = {(one.source, room(one.target)) for one in imports(house)}
    return Counter((room(source), target) for source, target in pairs if room(source) != target)


def room(name: str) -> str:
    return name.split(".")[0]


def upwards(house: House, allowed: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Imports against the direction: of what is not allowed, or from a room that the table does not know."""
    found = []
    for one in imports(house):
        own = room(one.source)
        if own == room(one.target) or one.target == PACKAGE.name:
            continue
        if not any(one.target == a or one.target.startswith(f"{a}.") for a in allowed.get(own, ())):
            found.append(f"{house[one.source].file}:{one.line} imports {one.target}")
    return found


def knots(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The parts of a graph whose members all reach each other, what is pointed to before what points."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        reached[name], found = {name}, [name]
        while found:
            found += (new := graph[found.pop()] - reached[name])
            reached[name] |= new
    parts = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph
    }
    return sorted(map(sorted, parts), key=lambda part: (len(reached[part[0]]), part))


def room_graph(house: House) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {module.room: set() for module in house.values()}
    for source, target in arrows(house):
        graph[source].add(target)
    return graph


def circles(house: House) -> list[list[str]]:
    """Modules that import each other, lazily or for types too, and rooms that import each other."""
    graph: dict[str, set[str]] = {name: set() for name in house}
    for one in imports(house):
        if one.target != PACKAGE.name:
            graph[one.source].add(one.target)
    return [
        part
        for parts in (knots(graph), knots(room_graph(house)))
        for part in parts
        if len(part) > 1
    ]


def floors(house: House) -> list[list[str]]:
    """The rooms from the ground up: each imports from lower floors only; a circle of rooms shares a floor."""
    graph = room_graph(house)
    floor: dict[str, int] = {}
    for part in knots(graph):
        below = [floor[other] for name in part for other in graph[name] if other not in part]
        floor |= dict.fromkeys(part, max(below, default=-1) + 1)
    return [
        sorted(name for name in floor if floor[name] == n) for n in range(max(floor.values()) + 1)
    ]


# -- private names -------------------------------------------------------------------------------------------
def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined(module: Module) -> set[str]:
    """Private names that belong to this file: of its functions, classes, variables, fields and slots."""
    names = set()
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_self(node.value)
        ):
            names.add(node.attr)
    return names


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def elsewhere(house: House, module: Module) -> dict[str, str]:
    """Names in this file of what other modules of the house define -> those modules."""
    found = {}
    for node in module.imports:
        for alias, full in zip(node.names, imported(module, node), strict=True):
            target = ours(house, full)
            if target is not None and target != module.name:
                found[alias.asname or alias.name.split(".")[0]] = target
    return found


def annotated(module: Module, foreign: Iterable[str]) -> set[str]:
    """What is declared to be of a class of another file: parameters, and fields set from them."""
    found, foreign = set(), set(foreign)
    for node in module.nodes:
        if isinstance(node, ast.arg) and node.annotation is not None:
            if names_in(node.annotation) & foreign:
                found.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and names_in(node.annotation) & foreign:
            found.add(ast.unparse(node.target))
    for node in module.nodes:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name)
            and node.value.id in found
        ):
            found |= {ast.unparse(target) for target in node.targets}
    return found


def names_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def private_names(house: House, module: Module) -> Iterator[tuple[ast.AST, str | None, str]]:
    """(where, of what, name) for each use of a private name that is not one of the file's own."""
    own, theirs = defined(module), annotated(module, elsewhere(house, module))
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_self(node.value):
            whole = ast.unparse(node.value)
            if node.attr not in own or whole in theirs:
                yield node, whole, node.attr
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if is_private(alias.name):
                    yield node, node.module, alias.name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            of, name = node.args[0], ast.unparse(node.args[1]).strip("'")
            if node.func.id in ("getattr", "setattr") and is_private(name) and not is_self(of):
                yield node, ast.unparse(of), name


def private_accesses(house: House) -> tuple[list[str], list[str]]:
    """Of names of other files of the house; and of names of libraries, which is their makers' affair."""
    found: tuple[list[str], list[str]] = ([], [])
    for module in house.values():
        for node, of, name in private_names(house, module):
            if name != EXTENSION:
                library = (None, name) in LIBRARIES or (of, name) in LIBRARIES
                found[library].append(module.at(node, f"{of}.{name}"))
    return found


# -- questions for the class of what plugs in ----------------------------------------------------------------
def questions(house: House) -> list[str]:
    """isinstance, issubclass, type(...), `match` and `is` about a class or a function that plugs in."""
    found = []
    for module in house.values():
        plugs = {
            name
            for name, target in elsewhere(house, module).items()
            if PLUGS.fullmatch(target) and name not in registries(house[target])
        }
        for node in module.nodes if plugs else ():
            if names_in(asked(node)) & plugs:
                found.append(module.at(node, ast.unparse(asked(node))))
    return found


def registries(module: Module) -> set[str]:
    """Its tables from names to what plugs in: whether a name is in one is no question for a class."""
    found = set()
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
            node.value, ast.Dict | ast.DictComp
        ):
            found |= {
                ast.unparse(one)
                for one in getattr(node, "targets", [getattr(node, "target", None)])
            }
    return found


def asked(node: ast.AST) -> ast.AST:
    """The part of a question that says what is asked for; an empty expression where nothing is asked."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("isinstance", "issubclass") and len(node.args) == 2:
            return node.args[1]
    elif isinstance(node, ast.Compare):
        if any(
            isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq | ast.In | ast.NotIn)
            for op in node.ops
        ):
            sides = [side for side in (node.left, *node.comparators) if is_reference(side)]
            return ast.Tuple(sides, ast.Load())
    elif isinstance(node, ast.MatchClass):
        return node.cls
    return ast.Tuple([], ast.Load())


def is_reference(node: ast.AST) -> bool:
    """A bare name or a tuple of such: `x is chunked`, `type(x) in (Single, Search)`; not `n > View.left`."""
    if isinstance(node, ast.Tuple | ast.Set | ast.List):
        return all(map(is_reference, node.elts))
    return isinstance(node, ast.Name)


# -- names that occur twice, sizes, the path -----------------------------------------------------------------
def duplicates(house: House) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Class names defined more than once -> the modules: without a reason, and with one."""
    places: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for module in house.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                text = ast.get_docstring(node) or ""
                places[node.name].append((module.name, gives_reason(house, node.name, text)))
    found: tuple[dict[str, list[str]], dict[str, list[str]]] = {}, {}
    for name, where in sorted(places.items()):
        if len(where) > 1:
            silent = sum(not reason for _, reason in where)
            found[silent <= 1][name] = [module for module, _ in where]
    return found


def gives_reason(house: House, name: str, docstring: str) -> bool:
    """Whether it says of which class it has the name, rightly, and why."""
    match = SAME_NAME.search(" ".join(docstring.split()))
    if match is None:
        return False
    where, _, other = match[1].rpartition(".")
    classes = house[where].nodes if where in house else []
    return other == name and any(isinstance(n, ast.ClassDef) and n.name == name for n in classes)


def longest_functions(house: House) -> list[tuple[int, str]]:
    """(lines, "scheduler/types.py:12 name"), the longest first."""
    found = []
    for module in house.values():
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append((lines, f"{module.file}:{node.lineno} {node.name}"))
    return sorted(found, reverse=True)


def path(page: Path) -> list[str]:
    """The files of the marked path in reading order: those named between the markers, below the package."""
    marked = PATH.findall(page.read_text()) if page.exists() else []
    return list(dict.fromkeys(re.findall(r"`((?:\w+/)*\w+\.py)`", "".join(marked))))


def lines_of(house: House, files: Iterable[str]) -> int:
    """Lines of these files. KeyError for one that does not exist."""
    lines = {module.file: module.lines for module in house.values()}
    return sum(lines[file] for file in files)


def rooms(house: House) -> list[dict[str, Any]]:
    """For each room its tokens, lines and files, by name."""
    found: dict[str, dict[str, Any]] = {}
    for module in house.values():
        name = module.room if "/" in module.file else "."
        empty = {"room": name, "tokens": 0, "lines": 0, "files": 0}
        row = found.setdefault(name, empty)
        row["tokens"] += tokens(module.text)
        row["lines"] += module.lines
        row["files"] += 1
    return [found[name] for name in sorted(found)]


# -- size and shape ------------------------------------------------------------------------------------------
SPACE = r"(?:\s|#[^\n]*\n)*"
TEXT = (
    r"[bBfFrRuU]{0,2}(?:'{3}(?:\\.|[^\\])*?'{3}|\"{3}(?:\\.|[^\\])*?\"{3}"
    r"|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\")"
)
NUMBER = r"0[xXbBoO]\w+|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?[\d_]+)?[jJ]?"
OPERATOR = r"\*\*=?|//=?|>>=?|<<=?|!=|->|:=|\.{3}|[-+*/%&|^=<>@~]=?|[:;,.()[\]{}]"
BEGIN = re.compile(f"{SPACE}{TEXT}", re.DOTALL)  # of a file with a docstring
TOKEN = re.compile(
    rf"(?P<comment>#[^\n]*)|(?P<block>:[ \t]*(?:#[^\n]*)?\n{SPACE}{TEXT})|{TEXT}|{NUMBER}|\w+|{OPERATOR}",
    re.DOTALL,
)
MAX_COLUMNS = 100
MAX_PARAMETERS = 5  # beside self
NO_SUBJECT = re.compile(
    r"(Of|What|Those|Who|Whoever|Whose|Whether|How|When|Where|Which|By|For|As|From|With|Without|In|On"
    r"|At|To|Until|Unless|Beside|Behind|That)\b"
)
SHAPES = (
    "docstrings without a subject",
    "functions of more than five parameters",
    "tuple assignments",
    "conditional expressions",
    "names MOST_",
    "lines over 100 characters",
)
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(module: Module) -> list[ast.Expr]:
    """The docstrings of a file: of itself, its classes and its functions."""
    owners = [node for node in module.nodes if isinstance(node, Documented)]
    found = [one.body[0] for one in owners if ast.get_docstring(one, clean=False) is not None]
    return [one for one in found if isinstance(one, ast.Expr)]


def tokens(text: str) -> int:
    """How many tokens of Python a file has without comments, docstrings and white space: its size, whether it is
    written densely or not. A docstring is a text that begins a file or a block."""
    found = depth = 0
    begin = BEGIN.match(text)
    for one in TOKEN.finditer(text, begin.end() if begin else 0):
        if one.lastgroup == "comment":
            continue
        word = one[0]
        found += 1 + (depth > 0 and one.lastgroup == "block")
        depth += (word in "([{") - (word in ")]}")
    return found


def size_of(folder: Path) -> int:
    """How many tokens the Python files of a folder have in all."""
    return sum(tokens(path.read_text()) for path in folder.rglob("*.py"))


def importers(house: House) -> Counter[str]:
    """How many other modules import each one."""
    pairs = {(one.source, one.target) for one in imports(house)}
    return Counter(target for _, target in pairs)


def flat(house: House) -> dict[str, int]:
    """How many files lie directly in each folder."""
    return dict(Counter(module.file.rpartition("/")[0] or "." for module in house.values()))


def shape(house: House) -> dict[str, list[str]]:
    """Places where the code is denser, wider or less plainly documented than it should be, by kind."""
    found: dict[str, list[str]] = {kind: [] for kind in SHAPES}
    for module in house.values():
        for doc in docstrings(module):
            text = ast.literal_eval(doc.value).strip()
            if NO_SUBJECT.match(text):
                found["docstrings without a subject"].append(module.at(doc, text[:60]))
        for node in module.nodes:
            match node:
                case (
                    ast.FunctionDef(name=name, args=args)
                    | ast.AsyncFunctionDef(name=name, args=args)
                ):
                    if parameters(args) > MAX_PARAMETERS:
                        found["functions of more than five parameters"].append(
                            module.at(node, name)
                        )
                case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple()):
                    found["tuple assignments"].append(module.at(node, ""))
                case ast.IfExp():
                    found["conditional expressions"].append(module.at(node, ""))
                case ast.Name(id=name, ctx=ast.Store()) if name.startswith("MOST_"):
                    found["names MOST_"].append(module.at(node, name))
        for number, line in enumerate(module.text.split("\n"), 1):
            if len(line) > MAX_COLUMNS:
                found["lines over 100 characters"].append(f"{module.file}:{number}")
    return found


def parameters(args: ast.arguments) -> int:
    """How many parameters a function has beside `self`."""
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return len([one for one in every if one.arg not in ("self", "cls")])
