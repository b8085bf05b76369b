"""README and docs: their words, every command of README and recipes executed, every claim with its proof.

Commands run in a folder of their own, with what a reader would change put in: the small model for a large one,
this machine for others, free ports. What wants a GPU, another machine's packages or a whole build is NOT RUN.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import harness
from harness import ROOT, Line

README = ROOT / "README.md"
RECIPES = ROOT / "docs" / "recipes.md"
MAX_WORDS = {"README and docs": 25_000, "docs/api.md": 8_000}
README_LINES = 80
PROGRAM = f"{shlex.quote(sys.executable)} -m pageturner"
LARGE = (
    "qwen2.5-7b-instruct-q4_k_m.gguf",
    "meta-llama/Llama-3.1-8B-Instruct",
    "MODEL",
    "FILE",
    "org/name",
    "${model.id}",
)
ELSEWHERE = ("--device cuda", "pip install", "gpu-kernels", "HF_TOKEN")
SERVES = ("serve", "route")


def lines(options: argparse.Namespace) -> Iterator[Line]:
    yield from words()
    yield from claims()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        yield from readme_commands(Path(folder))
        yield from recipe_commands(Path(folder))


# -- words -----------------------------------------------------------------------------------------
def words() -> Iterator[Line]:
    """Records of decisions are for whoever changes the code, and do not count."""
    pages = {path.name: len(path.read_text().split()) for path in (ROOT / "docs").glob("*.md")}
    counts = {
        "README and docs": sum(pages.values()) + len(README.read_text().split()),
        "docs/api.md": pages["api.md"],
    }
    for name, most in MAX_WORDS.items():
        yield Line(f"words of {name}", f"{counts[name]:,} of {most:,}", counts[name] <= most)
    long = len(README.read_text().splitlines())
    yield Line("lines of the README", f"{long} of {README_LINES}", long <= README_LINES)


# -- claims ----------------------------------------------------------------------------------------
def claims() -> Iterator[Line]:
    """Each row of figures names its command, each thing that nobody else does its test or page."""
    text = README.read_text()
    figures = text.split("## How fast", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (?!--|two cores)(.*?) \|", figures, re.M)
    proofs = " ".join(figures.split("\n\n")[-1].split())
    proofs += figures
    commands = re.findall(r"`((?:make|python) [^`]+)`", proofs)
    gone = [one for one in commands if not exists(one)]
    said = f"{len(rows)} rows, {len(set(commands))} commands; gone: {gone or 'none'}"
    yield Line("each figure has its command", said, len(rows) == 5 and bool(commands) and not gone)
    table, *others = figures.split("\n\n")[-1].splitlines()  # what lies behind the table is of it
    machines = [table, *(one for one in others if "H100" in one)]
    undated = [one[:40] for one in machines if not re.search(r"20\d\d-\d\d-\d\d", one)]
    yield Line(
        "each machine's figures have their date", f"without: {undated or 'none'}", not undated
    )
    section = text.split("## What nobody else does", 1)[1].split("\n## ", 1)[0]
    for claim in re.findall(r"^- (.*)$", section, re.M):
        named = re.findall(r"`([^`]+)`", claim) + re.findall(r"\]\(([^)#]+)", claim)
        wrong = [one for one in named if not exists(one)]
        title = re.sub(r"[*`]", "", claim)[:60]
        yield Line(title, ", ".join(named) or "no proof", bool(named) and not wrong)


def exists(proof: str) -> bool:
    """Tell whether a test, page or command of the README is there."""
    first, _, rest = proof.partition(" ")
    if named := re.search(r"\bNAME=(\w+)", rest):
        return (ROOT / "bench" / "accept" / f"{named[1]}.py").is_file()
    if first == "make":
        return bool(re.search(rf"^{rest.split()[0]}:", (ROOT / "Makefile").read_text(), re.M))
    if first == "pageturner":
        from pageturner import cli

        return any(rest.startswith(" ".join(names)) for names in cli.COMMANDS)
    if first == "python":
        return (ROOT / rest.split()[0]).is_file()
    return (ROOT / proof).exists()


# -- commands --------------------------------------------------------------------------------------
def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


def commands_of(block: str) -> list[str]:
    """Each command of a block, without its comment; one in quotes may have several lines."""
    found: list[str] = []
    for line in block.splitlines():
        open_quote = found and found[-1].count("'") % 2
        if open_quote or (found and found[-1].endswith("\\")):
            found[-1] += "\n" + line
        elif line.strip() and not line.startswith("#"):
            found.append(re.split(r"\s{2,}#|\s#\s", line)[0].strip())
    return found


def run(command: str, folder: Path, given: str = "") -> Line:
    """A command as it stands, whose exit status tells."""
    shown = command.replace(PROGRAM, "pageturner").split("\n")[0][:90]
    own = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = harness.ran("bash", "-ec", command, cwd=folder, input=given, timeout=600, env=own)
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    said = f"status {done.returncode}; {' '.join(last)[:100]}"
    return Line(shown, said, done.returncode == 0 and bool(last))


def readme_commands(folder: Path) -> Iterator[Line]:
    with harness.server() as server:
        for command in (one for block in blocks(README, "sh") for one in commands_of(block)):
            if command.startswith("make"):
                yield run(f"make -n -C {ROOT} {command.split(' ', 1)[1]}", folder)
                continue
            command = command.replace(".venv/bin/pageturner", PROGRAM)
            command = command.replace("http://127.0.0.1:8000", server.url)
            yield run(command, folder, "Hello.\n/exit\n" if " chat" in command else "")
    for block in blocks(README, "python"):
        (folder / "example.py").write_text(block)
        yield run(f"{shlex.quote(sys.executable)} example.py", folder)


def recipe_commands(folder: Path) -> Iterator[Line]:
    yield run(f"{PROGRAM} key new --tenant acme 2>key >> keys.toml; cat keys.toml", folder)
    tomllib.loads((folder / "keys.toml").read_text())
    inline = re.findall(r"`(pageturner serve [^`]+)`", RECIPES.read_text())
    each = [one for block in blocks(RECIPES, "sh") for one in commands_of(block)]
    for command in dict.fromkeys([*each, *inline]):
        if any(word in command for word in ELSEWHERE):
            yield Line(command[:90], "a GPU, a build or packages", None, run=False)
        elif command.split()[1] in SERVES:
            yield served(command, folder)
        else:
            yield run(here(command), folder)


def here(command: str) -> str:
    """The command with what a reader would change."""
    for name in LARGE:
        command = command.replace(name, "smollm2")
    command = command.replace("--max-model-len 32768", "--max-model-len 8192")
    command = re.sub(r"--host \S+", "--host 127.0.0.1", command)
    command = re.sub(r"--port \d+", "", command)
    return command.replace("pageturner", PROGRAM, 1)


def served(command: str, folder: Path) -> Line:
    """A command that serves: it is ready, and says who it is."""
    port, shown = harness.free_port(), command[:90]
    with contextlib.ExitStack() as stack:
        if command.startswith("pageturner route"):
            behind = stack.enter_context(harness.server())
            urls = [behind.url, *(f"http://127.0.0.1:{harness.free_port()}" for _ in "ab")]
            found = iter(urls)
            command = re.sub(r"http://10[\d.:]+|(?<=[= ])URL\b", lambda _: next(found), command)
        words = [*shlex.split(here(command)), "--port", str(port)]
        words = [str(folder / one) if one == "keys.toml" else one for one in words]
        try:
            with harness.running(words, port, wait=120):
                return Line(shown, "ready, and answers /health", True)
        except (RuntimeError, TimeoutError) as error:
            return Line(shown, str(error), False)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
