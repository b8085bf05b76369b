"""The house in figures: rooms and their budgets, imports, circles, private accesses, and the shape of code.

This file owns what may import what (`ALLOWED`), how large each room may be (`BUDGETS`) and the other bars that the
house is held to, and prints them beside what is. house_walk.py counts; `tests/arch/test_house.py` holds the same
figures to the same bars.

    python bench/house.py [--json] [--findings]       exit code 1 when a bar is missed
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import house_walk as walk
from house_walk import House

ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"
BARS = {
    "lines of the scheduler": 1_933,
    "files in a folder": 30,
    "arrows upwards": 0,
    "import circles": 0,
    "private accesses": 0,
    "questions for a class": 0,
    "class names twice, unexplained": 0,
    "longest function": 94,
    "files of the path": 25,
    "lines of the path": 6_033,
    "docstrings without a subject": 0,
    "functions of more than five parameters": 134,
    "tuple assignments": 1_056,
    "conditional expressions": 1_713,
    "names MOST_": 0,
    "lines over 100 characters": 373,
}

# Room -> how many tokens it may have (house_walk.tokens). "." stands for the modules directly in the package.
# A new capability pays its size by deleting others; docs/adr says why where a budget is raised.
BUDGETS = {
    ".": 8_600,
    "scheduler": 12_560,
    "policies": 27_610,
    "telemetry": 7_870,
    "config": 3_970,
    "ipc": 2_303,
    "engine": 16_090,
    "executor": 16_522,
    "kv": 16_240,
    "parallel": 3_130,
    "models": 52_540,
    "kernels": 105_670,
    "formats": 24_184,
    "text": 42_980,
    "http": 18_970,
    "server": 109_490,
    "router": 28_030,
    "lab": 90_961,
    "cli": 14_480,
}
WHOLE = {"src/pageturner": 602_050, "bench": 198_550, "tests": 691_130}  # tokens
FINDINGS = (
    "upwards",
    "circles",
    "private",
    "private of libraries",
    "questions",
    "same name",
    "same name with a reason",
    "longest functions",
    "path",
    *walk.SHAPES,
)

# The modules that lie directly in the package, beside the offline API: words that everybody uses.
GROUND = (
    "errors",
    "params",
    "request",
    "memory",
    "garbage",
    "progress",
    "logs",
    "private_files",
    "block_keys",
    "option",
    "interrupt",
    "session",
)
_WORDS = ("config", "ipc", *GROUND)
_ENGINE = ("scheduler", "policies", "telemetry", "executor", "kv", "parallel", "models", "kernels")
# Room -> what it may import, as beginnings of module names. Each may import itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "errors": (),
    "params": (),
    "request": ("params",),
    "memory": (),
    "garbage": (),
    "progress": ("logs",),
    "logs": (),
    "private_files": ("logs",),
    "block_keys": (),
    "option": (),
    "interrupt": (),
    "session": ("request", "params"),
    "scheduler": ("params", "request", "block_keys"),
    "telemetry": ("scheduler", "request", "params", "errors", "logs", "private_files"),
    "ipc": ("request", "telemetry.work"),
    "policies": ("scheduler", "telemetry", "ipc.session_messages", "request", "params", "option"),
    "config": ("errors", "option", "policies"),
    "formats": ("errors", "params", "progress", "logs"),
    "text": ("formats", "errors", "params", "request"),
    "kernels": ("formats", "errors", "memory"),
    "models": ("kernels", "formats", "errors", "memory", "private_files"),
    "executor": (
        "scheduler",
        "policies.drafts",
        "telemetry",
        "models",
        "kernels",
        "formats",
        "text",
        *_WORDS,
    ),
    "kv": ("scheduler", "executor", "kernels", *_WORDS),
    "parallel": ("models", "kernels", "formats", *_WORDS),
    "engine": (*_ENGINE, "formats", "text", *_WORDS),
    "llm": ("engine", *_ENGINE, "formats", "text", *_WORDS),
    "http": ("config", *GROUND),
    "server": ("http", "text", "formats", "telemetry.work", *_WORDS),
    "router": ("http", "server.embedded", "server.server", *_WORDS),
    "ray": ("router",),
    "lab": ("llm", "engine", *_ENGINE, "formats", "text", "http", "router", *_WORDS),
    "cli": ("llm", "engine", *_ENGINE, "formats", "text", "http", *_WORDS),
    "__main__": ("cli",),
    "pageturner": ("llm", "session", "text.structured_outputs", "params", "errors"),
}


# -- all of it -------------------------------------------------------------------------------------
def count(house: House, files: list[str]) -> dict[str, Any]:
    """Everything, as `--json` prints it. files: the marked path, empty if there is none."""
    private, of_libraries = walk.private_accesses(house)
    silent, explained = walk.duplicates(house)
    importers = walk.importers(house)
    rooms = walk.rooms(house)
    folders = {"src/pageturner": sum(row["tokens"] for row in rooms)}
    others = [name for name in WHOLE if name not in folders]
    folders |= {name: walk.size_of(walk.PACKAGE.parents[1] / name) for name in others}
    found: dict[str, Any] = {
        "rooms": rooms,
        "folders": folders,
        "one importer": [name for name, n in sorted(importers.items()) if n == 1],
        "flat": walk.flat(house),
        "floors": walk.floors(house),
        "arrows": [
            {"from": a, "to": b, "modules": n} for (a, b), n in sorted(walk.arrows(house).items())
        ],
        "upwards": walk.upwards(house, ALLOWED),
        "circles": [" <-> ".join(part) for part in walk.circles(house)],
        "private": private,
        "private of libraries": of_libraries,
        "questions": walk.questions(house),
        "same name": [f"{name}: {', '.join(where)}" for name, where in silent.items()],
        "same name with a reason": [
            f"{name}: {', '.join(where)}" for name, where in explained.items()
        ],
        "longest functions": [
            f"{lines} {where}" for lines, where in walk.longest_functions(house)[:20]
        ],
        "path": [[file, walk.lines_of(house, [file])] for file in files],
        **walk.shape(house),
    }
    found["figures"] = figures(found, files)
    found["missed"] = [name for name, bar in bars().items() if found["figures"][name] > bar]
    return found


def bars() -> dict[str, int]:
    """Every bar by name: the budgets of rooms, those of whole folders, and the others."""
    return {
        **{f"tokens of {name}": budget for name, budget in {**BUDGETS, **WHOLE}.items()},
        **BARS,
    }


def figures(found: dict[str, Any], files: list[str]) -> dict[str, int]:
    """What is held to `bars`, by the same names."""
    sizes = {row["room"]: row for row in found["rooms"]}
    return {
        **{f"tokens of {name}": sizes[name]["tokens"] if name in sizes else 0 for name in BUDGETS},
        **{f"tokens of {name}": tokens for name, tokens in found["folders"].items()},
        "lines of the scheduler": sizes["scheduler"]["lines"],
        "files in a folder": max(found["flat"].values()),
        "arrows upwards": len(found["upwards"]),
        "import circles": len(found["circles"]),
        "private accesses": len(found["private"]),
        "questions for a class": len(found["questions"]),
        "class names twice, unexplained": len(found["same name"]),
        "longest function": int(found["longest functions"][0].split()[0]),
        "files of the path": len(files),
        "lines of the path": sum(lines for _, lines in found["path"]),
        **{name: len(found[name]) for name in walk.SHAPES},
    }


def table(found: dict[str, Any], *, findings: bool) -> str:
    """The same for people to read."""
    out = [f"{'room':14} {'files':>5} {'lines':>7} {'tokens':>8} {'budget':>8}"]
    total = {key: sum(row[key] for row in found["rooms"]) for key in ("files", "lines", "tokens")}
    for row in (*found["rooms"], {"room": "all", **total}):
        budget = BUDGETS.get(row["room"], WHOLE["src/pageturner"])
        out.append(
            f"{row['room']:14} {row['files']:5} {row['lines']:7,} {row['tokens']:8,} {budget:8,}"
        )
    out += ["", "floors, from the top"]
    out += [f"{n:3}  {', '.join(level)}" for n, level in reversed([*enumerate(found["floors"])])]
    out += ["", "arrows: how many modules of a room import something of which other room"]
    for own in dict.fromkeys(one["from"] for one in found["arrows"]):
        targets = [f"{one['to']} {one['modules']}" for one in found["arrows"] if one["from"] == own]
        out.append(f"{own:14} -> {', '.join(targets)}")
    out += ["", f"{'held to a bar':40} {'is':>8} {'bar':>8}"]
    for name, bar in bars().items():
        verdict = "FAIL" if name in found["missed"] else "PASS"
        out.append(f"{name:40} {found['figures'][name]:8,} {bar:8,}  {verdict}")
    lines = total["lines"] / 1000
    out += ["", "for each 1,000 lines"]
    out += [f"{name:40} {len(found[name]) / lines:8.1f}" for name in walk.SHAPES]
    out.append(f"{'modules that one other module imports':40} {len(found['one importer']):8}")
    if findings:
        for name in FINDINGS:
            out += ["", name, *(f"  {line}" for line in found[name])]
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="count the rooms of the house and hold them to their bars"
    )
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument("--findings", action="store_true", help="name each thing that was counted")
    arguments = parser.parse_args()
    found = count(walk.read(), walk.path(ARCHITECTURE))
    print(
        json.dumps(found, indent=1) if arguments.json else table(found, findings=arguments.findings)
    )
    return 1 if found["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
