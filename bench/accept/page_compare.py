"""`pageturner compare` twice on a quiet and twice on a deliberately busy machine: the same advice.

Owns what of a comparison is advice. Costs of steps are kept in a
folder of this run, so that the first comparison begins with none; one more begins with none on the busy
machine. Pages stay in build/accept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE)]

from harness import ROOT, Line, NotRun, busy  # noqa: E402

from pageturner.formats import hub  # noqa: E402

PAGES = ROOT / "build" / "accept"
LOOPS = 2  # busy ones
LONGEST = 90.0  # seconds of a comparison that has the machine to itself
Told = dict[str, Any]


def advice_of(told: Told) -> list[tuple[str, tuple[str, ...]]]:
    """What is wanted and whom to choose, all who are tied for it."""
    return [(one["want"], tuple(one["choose"])) for one in told["advice"]]


def different(one: Told, other: Told) -> list[str]:
    """Where two comparisons advise otherwise, in words."""
    mine, theirs = dict(advice_of(one)), dict(advice_of(other))
    wants = list(dict.fromkeys([*mine, *theirs]))
    return [
        f"{want}: {mine.get(want)} and {theirs.get(want)}"
        for want in wants
        if mine.get(want) != theirs.get(want)
    ]


def compare(name: str, cache: Path, *flags: str) -> tuple[Told, float]:
    """The figures of one comparison, and its seconds."""
    page = PAGES / f"compare-{name}.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pageturner",
        "compare",
        "smollm2",
        "--output",
        str(page),
        *flags,
    ]
    begin = time.monotonic()
    subprocess.run(
        command,
        check=True,
        cwd=PAGES,
        env={**os.environ, "PAGETURNER_CACHE": str(cache)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return json.loads(page.with_suffix(".json").read_text()), time.monotonic() - begin


def fresh_cache(name: str) -> Path:
    """A cache with the models of the usual one, and no costs of steps."""
    models = hub.cache_folder()
    if not models.is_dir():
        raise NotRun("no model yet: make model")
    cache = PAGES / f"cache-{name}"
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True)
    (cache / "models").symlink_to(models)
    return cache


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Quiet, quiet, busy, busy; then busy from nothing."""
    flags = [] if arguments.requests is None else ["--num-prompts", str(arguments.requests)]
    cache, told = fresh_cache("kept"), list[Told]()
    for number in range(4):
        kind = "quiet" if number < 2 else "busy"
        with busy(0 if kind == "quiet" else LOOPS):
            found, seconds = compare(f"{kind}-{number % 2 + 1}", cache, *flags)
        told.append(found)
        yield _told(f"compare on a {kind} machine, time {number % 2 + 1}", found, seconds)
    said = [words for found in told[1:] for words in different(told[0], found)]
    figure = "; ".join(said) or "; ".join(
        f"{want}: {', '.join(names)}" for want, names in advice_of(told[0])
    )
    yield Line("the same advice twice quiet and twice busy", figure, not said)
    with busy(LOOPS):
        found, seconds = compare("busy-first", fresh_cache("busy"), *flags)
    yield _told("compare on a busy machine, with no costs kept", found, seconds)
    said = different(told[0], found)
    yield Line(
        "the same advice where the first comparison of all is on a busy machine",
        "; ".join(said) or "equal",
        not said,
    )
    yield Line(
        "a machine with busy loops of others is called busy at the top of the page",
        "; ".join(told[2]["disturbed"]) or "not a word",
        bool(told[2]["disturbed"]) and bool(told[3]["disturbed"]),
    )


def _told(what: str, found: Told, seconds: float) -> Line:
    """A comparison on a machine of its own takes about a minute; on another no promise is made."""
    about = found["about"]
    figure = (
        f"{seconds:.0f} s, {about['cpu_seconds']:.0f} of processors, {about['rounds']} rounds;"
        f" {'; '.join(found['disturbed']) or 'undisturbed'}; answers equal {found['same_answers']} of"
        f" {found['requests']}"
    )
    return Line(what, figure, None if found["disturbed"] else seconds < LONGEST)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument(
        "--requests", type=int, help="of each comparison (default: as the command has it)"
    )
