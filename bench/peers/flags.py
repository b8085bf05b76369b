"""The fate of the flags of `vllm serve` and llama-server and of Ollama's variables here.

Owns how their own sources are read, which are given as folders and never copied. Must not know
what a flag means: that is src/pageturner/cli/other_names.json.

    python bench/peers/flags.py [--vllm FOLDER] [--llama FOLDER] [--ollama FILE] [--list]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pageturner.cli import COMMANDS, _parser, other_names
from pageturner.errors import EngineFault

FIELD = re.compile(r"^    ([a-z_0-9]+): ", re.MULTILINE)
OPTION = re.compile(r'"(--?[A-Za-z][\w.-]*)"')


def of_vllm(folder: Path) -> Iterator[str]:
    """The flags of its engine, and the fields of its front end, each a flag."""
    yield from OPTION.findall((folder / "vllm/engine/arg_utils.py").read_text())
    files = (folder / "vllm/entrypoints").rglob("cli_args.py")  # each release has it elsewhere
    parts = [path.read_text().partition("class BaseFrontendArgs") for path in files]
    for name in FIELD.findall("".join(fields for _, found, fields in parts if found)):
        yield "--" + name.replace("_", "-")


def of_llama(folder: Path) -> Iterator[str]:
    """The options that its server takes: those for all programs, and those for the server."""
    text = (folder / "common/arg.cpp").read_text()
    for option in text.split("add_opt(common_arg(")[1:]:
        examples = re.search(r"set_examples\(\{([^}]*)\}", option)
        if examples is None or re.search("COMMON|SERVER", examples[1]):
            head = re.match(r"\s*((?:\{[^}]*\},\s*)+)", option)
            if head:
                yield from OPTION.findall(head[1])


def of_ollama(file: Path) -> Iterator[str]:
    """The variables of its envconfig/config.go."""
    yield from re.findall(r'"(OLLAMA_\w+)"', file.read_text())


def verdict(flag: str, known: set[str]) -> str:
    """Return what happens to a flag: ours, understood, noted, answered or bare."""
    if flag.startswith("OLLAMA_"):
        return "noted"
    if flag in known or flag in ("--help", "--usage", "--version"):
        return "ours"
    value = "{}" if flag.endswith(("config", "-sc", "overrides")) else "1"
    try:
        found, notes = other_names.translate(["m", flag, value], known)
    except EngineFault:
        return "answered"
    if notes and found[:1] == ["m"]:
        return "noted"
    return "bare" if flag in found else "understood"


def main() -> int:
    """Print the table. Returns 1 where a flag gets a bare "unrecognized"."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    readers = {"vllm": of_vllm, "llama": of_llama, "ollama": of_ollama}
    for name in readers:
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--list", action="store_true", help="print each flag")
    arguments = parser.parse_args()
    serve = _parser(("serve",), *COMMANDS[("serve",)])
    known = set(re.findall(r"--?[a-z][\w-]*", serve.format_help()))
    bare = 0
    for name, reader in readers.items():
        source = getattr(arguments, name)
        if source is None:
            print(f"{name}: NOT RUN")
            continue
        verdicts = {flag: verdict(flag, known) for flag in sorted(set(reader(source)))}
        if arguments.list:
            for flag, said in verdicts.items():
                print(f"  {said:10} {flag}")
        counts = Counter(verdicts.values())
        bare += counts["bare"]
        named = [flag for flag, said in verdicts.items() if said == "bare"]
        print(f"{name}: {len(verdicts)} flags, {dict(counts)}", *named)
    return int(bare > 0)


if __name__ == "__main__":
    sys.exit(main())
