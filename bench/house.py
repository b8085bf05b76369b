"""The house in figures: rooms, floors, arrows, circles, private accesses, questions for a class and sizes.

Owns what may import what (`ALLOWED`) and the bars that the house is held to, and prints both beside what is.
How it is counted is the affair of house_walk.py; `tests/arch/test_house.py` holds the same figures to the
same bars.

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
    "arrows upwards": 5,
    "import circles": 8,
    "private accesses": 0,
    "questions for a class": 0,
    "class names twice, unexplained": 0,
    "longest function": 112,
    "lines of the scheduler": 1_700,
    "lines of the path": 5_600,
}

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
    "progress": (),
    "logs": (),
    "block_keys": (),
    "option": (),
    "interrupt": (),
    "session": ("request", "params"),
    "scheduler": ("params", "request", "block_keys"),
    "telemetry": ("scheduler", "request", "params", "errors", "logs"),
    "ipc": ("request", "telemetry.work"),
    "policies": ("scheduler", "telemetry", "ipc.session_messages", "request", "params", "option"),
    "config": ("errors", "option", "policies"),
    "formats": ("errors", "params", "progress", "logs"),
    "text": ("formats", "errors", "params", "request"),
    "kernels": ("formats", "errors", "memory"),
    "models": ("kernels", "formats", "errors", "memory"),
    "executor": ("scheduler", "telemetry", "models", "kernels", "formats", "text", *_WORDS),
    "kv": ("scheduler", "executor", "kernels", *_WORDS),
    "parallel": ("models", "kernels", "formats", *_WORDS),
    "engine": (*_ENGINE, "formats", "text", *_WORDS),
    "llm": ("engine", *_ENGINE, "formats", "text", *_WORDS),
    "http": ("config", "text.output_stream", *GROUND),
    "server": ("http", "text", "formats", "telemetry.work", *_WORDS),
    "router": ("http", "server", "formats", *_WORDS),
    "ray": ("router",),
    "lab": ("llm", "engine", *_ENGINE, "formats", "text", "http", "router", *_WORDS),
    "cli": ("llm", "engine", *_ENGINE, "formats", "text", "http", *_WORDS),
    "__main__": ("cli",),
    "pageturner": ("llm", "session", "text.structured_outputs", "params", "errors"),
}


# -- all of it -----------------------------------------------------------------------------------------------
def count(house: House, files: list[str]) -> dict[str, Any]:
    """Everything, as `--json` prints it. files: the marked path, empty if there is none."""
    private, of_libraries = walk.private_accesses(house)
    silent, explained = walk.duplicates(house)
    found: dict[str, Any] = {
        "rooms": [
            dict(zip(("room", "files", "lines", "statements"), row, strict=True))
            for row in walk.rooms(house)
        ],
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
            f"{lines} {where}" for lines, where in walk.longest_functions(house)[:3]
        ],
        "path": [[file, walk.lines_of(house, [file])] for file in files],
    }
    found["figures"] = {
        "arrows upwards": len(found["upwards"]),
        "import circles": len(found["circles"]),
        "private accesses": len(private),
        "questions for a class": len(found["questions"]),
        "class names twice, unexplained": len(silent),
        "longest function": walk.longest_functions(house)[0][0],
        "lines of the scheduler": sum(
            row["lines"] for row in found["rooms"] if row["room"] == "scheduler"
        ),
        "lines of the path": walk.lines_of(house, files) if files else None,
    }
    found["missed"] = [
        name for name, bar in BARS.items() if (n := found["figures"][name]) is None or n > bar
    ]  # what is absent misses its bar
    return found


def table(found: dict[str, Any], *, findings: bool) -> str:
    out = ["room           files   lines  statements"]
    for row in (*found["rooms"], {"room": "all"}):
        sums = [
            row.get(key) or sum(r[key] for r in found["rooms"])
            for key in ("files", "lines", "statements")
        ]
        out.append("{:14} {:5} {:7} {:11}".format(row["room"], *sums))
    out += ["", "floors, from the top"]
    out += [f"{n:3}  {', '.join(level)}" for n, level in reversed([*enumerate(found["floors"])])]
    out += ["", "arrows: how many modules of a room import something of which other room"]
    for own in dict.fromkeys(one["from"] for one in found["arrows"]):
        targets = [f"{one['to']} {one['modules']}" for one in found["arrows"] if one["from"] == own]
        out.append(f"{own:14} -> {', '.join(targets)}")
    out += ["", f"{'held to a bar':30} {'is':>8} {'bar':>6}"]
    for name, bar in BARS.items():
        figure, verdict = found["figures"][name], "FAIL" if name in found["missed"] else "PASS"
        out.append(f"{name:30} {'absent' if figure is None else figure:>8} {bar:6}  {verdict}")
    out += [
        f"{name:30} {len(found[name]):8}"
        for name in ("private of libraries", "same name with a reason")
    ]
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
