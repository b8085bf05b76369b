"""What bench/house_walk.py counts, on houses of a few lines: each thing is found, what is like it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

import house
import house_walk as walk


def build(**files: str) -> walk.House:
    """A house of these modules: scheduler__types="..." is scheduler/types.py."""
    names = {file.replace("__", "."): text for file, text in files.items()}
    return {
        name: walk.Module(name, name.replace(".", "/") + ".py", text)
        for name, text in names.items()
    }


def test_arrows_floors_and_what_points_upwards() -> None:
    small = build(
        scheduler__types="import sys",
        policies__orders="from pageturner.scheduler import types\nfrom . import pace",
        policies__pace="def late() -> None:\n    from pageturner.server.app import x",
        server__app="from pageturner.scheduler.types import Request",
    )
    assert walk.arrows(small) == {
        ("policies", "scheduler"): 1,
        ("policies", "server"): 1,
        ("server", "scheduler"): 1,
    }
    allowed = {**house.ALLOWED, "server": ("scheduler.types",)}
    assert walk.upwards(small, allowed) == ["policies/pace.py:2 imports server.app"]
    assert walk.floors(small) == [["scheduler"], ["server"], ["policies"]]
    assert walk.circles(small) == []


def test_circles_of_modules_and_of_rooms() -> None:
    modules = build(
        scheduler__a="import pageturner.scheduler.b",
        scheduler__b="from pageturner.scheduler import c",
        scheduler__c="",
    )
    assert walk.circles(modules) == []
    closed = {**modules, **build(scheduler__c="from pageturner.scheduler.a import x")}
    assert walk.circles(closed) == [["scheduler.a", "scheduler.b", "scheduler.c"]]
    rooms = build(
        scheduler__a="def f():\n    import pageturner.server.a",
        server__a="import pageturner.scheduler.b",
        scheduler__b="",
    )
    assert walk.circles(rooms) == [["scheduler", "server"]]
    assert walk.floors(rooms) == [["scheduler", "server"]]


@pytest.mark.parametrize(
    "text",
    [
        "def f(scheduler):\n    return scheduler._running",
        "def f(s):\n    s._running.append(1)\n    return s.a.b._x",
        "def f(s):\n    return getattr(s, '_running')",
        "from pageturner.scheduler.scheduler import _secret",
        # a name of its own does not make another's field its own
        "from pageturner.scheduler.scheduler import Scheduler\n"
        "class A:\n    def __init__(self, s: Scheduler):\n        self._plan = s._plan",
        "from pageturner.scheduler.scheduler import Scheduler\n"
        "class A:\n    def __init__(self, s: Scheduler):\n        self._s, self._plan = s, 1\n"
        "        self._s = s\n    def f(self):\n        return self._s._plan",
    ],
)
def test_private_names_of_other_files(text: str) -> None:
    small = build(policies__a=text, scheduler__scheduler="class Scheduler: ...")
    assert walk.private_accesses(small)[0] != []


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def f(self):\n        return self._x + type(self).__name__",
        "class A:\n    def __init__(self):\n        self._x = 1\n    def f(self, o):\n        return o._x",
        "class A:\n    _x: int\ndef f(a):\n    return a._x",
        "def f(s):\n    return s.__class__",
        "from pageturner.kernels import _native\n_native.tile()",
    ],
)
def test_names_of_the_same_file_are_its_own(text: str) -> None:
    assert walk.private_accesses(build(scheduler__a=text)) == ([], [])


def test_private_names_of_libraries_are_listed_apart() -> None:
    small = build(
        scheduler__a="import os\ndef f(pair):\n    os._exit(1)\n    os._other\n    return pair._replace(a=1)"
    )
    ours, theirs = walk.private_accesses(small)
    assert ours == ["scheduler/a.py:4 os._other"]
    assert theirs == ["scheduler/a.py:3 os._exit", "scheduler/a.py:5 pair._replace"]


@pytest.mark.parametrize(
    "text",
    [
        "def f(p):\n    return isinstance(p, Static)",
        "def f(p):\n    return isinstance(p, int | Static)",
        "def f(p):\n    return type(p) is Static",
        "def f(p):\n    return type(p) in (int, Static)",
        "def f(p):\n    return p is not chunked",
        "def f(p):\n    return p.name in LEAPING",
        "def f(p):\n    match p:\n        case Static():\n            return 1",
    ],
)
def test_questions_for_a_class(text: str) -> None:
    plugs = "class Static: ...\ndef chunked(): ...\nPOLICIES = {'static': Static}\nLEAPING = ('static',)"
    head = "from pageturner.policies.batching import LEAPING, POLICIES, Static, chunked\n"
    small = build(policies__batching=plugs, scheduler__a=head + text)
    assert len(walk.questions(small)) == 1


def test_what_is_no_question_for_a_class() -> None:
    plugs = "class Static: ...\ndef f(p):\n    return isinstance(p, Static)\nPOLICIES: dict = {'static': Static}"
    text = (
        "from pageturner.policies.batching import POLICIES, Static\n"
        "def f(p, name):\n    return isinstance(p, int), name in POLICIES, Static(), p.n > Static.n"
    )
    assert walk.questions(build(policies__batching=plugs, scheduler__a=text)) == []


def test_class_names_that_occur_twice() -> None:
    reason = (
        'class A:\n    """An a.\n\n    Same name as `scheduler.a.A` because both\n    are.\n    """'
    )
    wrong = 'class A:\n    """Same name as `scheduler.nowhere.A` because of nothing."""'
    assert walk.duplicates(build(scheduler__a="class A: ...", scheduler__b="class B: ...")) == (
        {},
        {},
    )
    assert walk.duplicates(build(scheduler__a="class A: ...", scheduler__b=reason))[1] == {
        "A": ["scheduler.a", "scheduler.b"]
    }
    assert walk.duplicates(build(scheduler__a="class A: ...", scheduler__b=wrong))[0] == {
        "A": ["scheduler.a", "scheduler.b"]
    }
    third = build(scheduler__a="class A: ...", scheduler__b=reason, scheduler__c="class A: ...")
    assert walk.duplicates(third)[0] == {"A": ["scheduler.a", "scheduler.b", "scheduler.c"]}


def test_sizes() -> None:
    small = build(scheduler__a="def f():\n    x = 1\n    return x\n", scheduler__b="x = 1\n")
    assert walk.longest_functions(small) == [(3, "scheduler/a.py:1 f")]
    assert walk.rooms(small) == [{"room": "scheduler", "tokens": 13, "lines": 4, "files": 2}]
    assert walk.lines_of(small, ["scheduler/b.py"]) == 1


def test_size_does_not_depend_on_density_or_prose() -> None:
    dense = build(scheduler__a="def f(x): return g(x, 1)")
    airy = build(
        scheduler__a='"""It is long."""\n\n\ndef f(x):\n    """Return it."""\n    # why\n    return g(\n    x, 1)'
    )
    assert walk.rooms(dense)[0]["tokens"] == walk.rooms(airy)[0]["tokens"] == 13


def test_shape() -> None:
    text = (
        '"""Of nothing."""\nMOST_X = 1\na, b = 1, 2\nc = 1 if a else 2\n'
        "class C:\n    def f(self, a, b, c, d, e): ...\n    def g(self, a, *, b, c, d, e, f): ...\n"
        f"d = {'1' * 100}"
    )
    found = walk.shape(build(scheduler__a=text))
    assert {kind: len(places) for kind, places in found.items()} == dict.fromkeys(walk.SHAPES, 1)


def test_importers_and_flat_folders() -> None:
    small = build(
        scheduler__a="import pageturner.scheduler.b",
        scheduler__b="",
        server__a="import pageturner.scheduler.b",
    )
    assert walk.importers(small) == {"scheduler.b": 2}
    assert walk.flat(small) == {"scheduler": 2, "server": 1}


def test_the_marked_path(tmp_path: Path) -> None:
    page = tmp_path / "architecture.md"
    assert walk.path(page) == []
    page.write_text(
        "`a/no.py`\n<!-- path -->\n1. `server/app.py`: see `f()`, `scheduler/a.py`\n2. `llm.py`\n"
        "3. `server/app.py`\n<!-- /path -->\n`a/no.py`"
    )
    assert walk.path(page) == ["server/app.py", "scheduler/a.py", "llm.py"]


def test_what_is_too_large_misses_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "WHOLE", {"src/pageturner": 1})
    monkeypatch.setattr(house, "BUDGETS", {"scheduler": 9, "server": 1})
    found = house.count(build(scheduler__a="def f():\n    x = 1\n    return x"), [])
    assert found["missed"] == ["tokens of scheduler", "tokens of src/pageturner"]
