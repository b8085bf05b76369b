"""Nothing lost at the outside: help texts, the OpenAPI document, metric names, `__all__`, the rows of the
status page, and the files that a request executes, of two sides.

A difference that is meant stands in `MEANT` with its reason; every other difference fails its line.
"""

from __future__ import annotations

import difflib
import http.client
import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import sides
from harness import ROOT, Line
from same_answers import ENVIRONMENT, FAKE, FLAGS
from sides import Address, Side

MEANT = {  # "help of serve", or the name of a metric, an operation or a row: why it differs
    "pageturner.ray": "its one public name, `app`, is exported by name now",
}
# Sentences of help texts that say something else since the base: there and here.
REWORDED = {
    "among them, and the threads: one for each NUMA node": "among them: one for each GPU, or one for"
    " each NUMA node",
    "microseconds of an all-reduce beside": "microseconds of an exchange between GPUs beside",
}
MAX_SHOWN = 15  # differences that are printed, and lines of each
RECORDER = ROOT / "tests" / "support" / "call_recorder"
SETTLE_S = 0.2  # until the recorder has seen that it is to begin
GIVE_UP_S = 30.0  # until both processes have written their calls

Faces = dict[str, str]  # name -> text


def compared(what: str, base: Faces, ours: Faces) -> Line:
    """A line of how many faces are equal; those that differ are printed, with the reason where there is one."""
    different = [
        name for name in base | ours if as_meant(base.get(name, "")) != spaced(ours.get(name, ""))
    ]
    for name in different[:MAX_SHOWN]:
        sides = (base.get(name, "").splitlines(), ours.get(name, "").splitlines())
        changes = [
            line
            for line in difflib.unified_diff(*sides, lineterm="", n=0)
            if not line.startswith(("---", "+++", "@@"))
        ]
        print(f"          {name}: {MEANT.get(name, 'NOT MEANT')}")
        for line in changes[:MAX_SHOWN]:
            print(f"            {line[:160]}")
    lost = [name for name in different if name not in MEANT]
    figure = f"{len(base)} before, {len(ours)} now, {len(different)} differ, {len(lost)} not meant"
    return Line(what, "; ".join([figure, *lost[:5]]), not lost and bool(base))


def spaced(text: str) -> str:
    """The text without line breaks and indentation, which depend on its width."""
    return " ".join(text.split())


def as_meant(text: str) -> str:
    """A text of the base as it is meant to read now."""
    text = spaced(text)
    for then, now in REWORDED.items():
        text = text.replace(then, now)
    return text


def helps(side: Side) -> Faces:
    """The help of every command that the overview lists, and the overview."""
    overview = side.run(*side.command("--help"), COLUMNS="100")
    names = re.findall(r"^  ([a-z]+(?: [a-z]+)?)  +\S", overview, re.M)
    texts = {
        name: side.run(*side.command(*name.split(), "--help"), COLUMNS="100") for name in names
    }
    return {f"help of {name}": text for name, text in texts.items()} | {"overview": overview}


def openapi(address: Address) -> Faces:
    """Each operation and each schema of /openapi.json."""
    page = json.loads(fetch(address, "/openapi.json"))
    schemas = page.get("components", {}).pop("schemas", {})
    faces = {
        f"{path} {method}": part
        for path, of in page["paths"].items()
        for method, part in of.items()
    }
    faces |= {f"schema {name}": schema for name, schema in schemas.items()}
    faces["the rest"] = {key: value for key, value in page.items() if key != "paths"}
    return {name: json.dumps(value, indent=1, sort_keys=True) for name, value in faces.items()}


def metrics(address: Address) -> Faces:
    """Names and types of what /metrics exposes; the label names count too."""
    text = fetch(address, "/metrics")
    faces = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.M))
    for name, labels in re.findall(r"^([a-z]\S*?)\{(.*)\} ", text, re.M):
        faces[f"{name}, labels"] = " ".join(sorted(re.findall(r'(\w+)="', labels)))
    return faces


def exported(side: Side) -> Faces:
    """`__all__` of every module that has one, by the name that its users import."""
    script = (
        "import pageturner, json; print(json.dumps(sorted(pageturner.__all__)))\n"
        "for name in pageturner.__all__: getattr(pageturner, name)"
    )
    faces = {"pageturner": side.run(str(side.python), "-c", script)}
    package = side.root / "src" / "pageturner"
    for path in (package / "ray.py", package / "ray" / "__init__.py"):
        if path.exists():
            faces["pageturner.ray"] = "".join(re.findall(r"^__all__ = .*", path.read_text(), re.M))
    return faces


def fetch(address: Address, path: str, body: bytes | None = None) -> str:
    """The text of a page, as the administrator of the fake server sees it."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=120)
    try:
        headers = {"Authorization": "Bearer red-key", "Content-Type": "application/json"}
        connection.request("POST" if body else "GET", path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        if answer.status != 200:
            raise RuntimeError(f"{path}: status {answer.status}: {text[:200]}")
        return text
    finally:
        connection.close()


def outside(base: Side, ours: Side) -> Iterator[Line]:
    """Help, exports, OpenAPI and metrics."""
    both = (base, ours)
    yield compared("--help of all commands", *map(helps, both))
    yield compared("__all__", *map(exported, both))
    pages: list[tuple[Faces, Faces]] = []
    for side in both:
        with sides.serving(side, *FLAGS[FAKE], **ENVIRONMENT[FAKE]) as address:
            fetch(address, "/v1/completions", b'{"prompt": "a", "max_tokens": 3}')
            pages.append((openapi(address), metrics(address)))
    yield compared("/openapi.json", pages[0][0], pages[1][0])
    # a sample is there once it has counted something
    counted = pages[0][1].keys() & pages[1][1].keys()
    found = [
        {n: text for n, text in page.items() if "," not in n or n in counted} for _, page in pages
    ]
    yield compared("names, types and labels of metrics", *found)


# -- the status page -------------------------------------------------------------------------------
def rows(page: str) -> dict[str, list[str]]:
    """Row, as far as its first colon or bracket -> what it names as its test or command, in backquotes."""
    cells = re.findall(r"^\| (.*?) \| (.*) \|$", page, re.M)
    found: dict[str, list[str]] = {}
    for name, rest in cells:
        if name != "row":
            short = re.split(r" ?[:(]", name)[0]
            found.setdefault(short, []).extend(re.findall(r"`([^`]+)`", rest))
    return found


def named_and_absent(words: list[str]) -> list[str]:
    """Files and scripts that a row names and that are not there."""
    files = [word for word in words if re.match(r"(tests|bench|docs|examples)/[\w/.-]+$", word)]
    scripts = re.findall(r"accept NAME=(\w+)", " ".join(words))
    files += [f"bench/accept/{script}.py" for script in scripts]
    return [file for file in files if not (ROOT / file).exists()]


def status(base: Side) -> Iterator[Line]:
    """Every row of bench/STATUS.md is still there, and its tests and commands exist."""
    before = rows(next(base.root.glob("*/STATUS.md")).read_text())
    now = rows((ROOT / "bench" / "STATUS.md").read_text())
    gone = [name for name in before if name not in now and name not in MEANT]
    figure = f"{len(before)} before, {len(now)} now, {len(gone)} gone"
    yield Line("rows of bench/STATUS.md", "; ".join([figure, *gone[:5]]), bool(now) and not gone)
    absent = [f"{name}: {word}" for name, words in now.items() for word in named_and_absent(words)]
    figure = f"{sum(map(len, now.values()))} names, {len(absent)} absent"
    what = "tests and commands of bench/STATUS.md exist"
    yield Line(what, "; ".join([figure, *absent[:5]]), bool(now) and not absent)


# -- the files of a request ------------------------------------------------------------------------
def executed(side: Side) -> tuple[int, int]:
    """Files and lines that a streamed chat request executes in both processes: the second request after the
    start, so that what is made once is left out."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64, "stream": True}
        | {"ignore_eos": True, "temperature": 0.7}
    ).encode()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {"PYTHONPATH": str(RECORDER), "PAGETURNER_RECORD": name}
        with sides.serving(side, **environment) as address:
            fetch(address, "/v1/chat/completions", body)
            (folder / "on").touch()
            time.sleep(SETTLE_S)
            fetch(address, "/v1/chat/completions", body)
            (folder / "on").unlink()
            until = time.monotonic() + GIVE_UP_S
            while len(list(folder.glob("*.json"))) < 2 and time.monotonic() < until:
                time.sleep(0.05)
        found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if len(found) < 2:
        raise RuntimeError(f"{side.name}: {len(found)} of 2 processes wrote their calls")
    files = {file for calls in found for _, file, _ in calls}
    package = side.root / "src" / "pageturner"
    return len(files), sum((package / file).read_text().count("\n") for file in files)
