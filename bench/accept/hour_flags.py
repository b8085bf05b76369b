"""Flags people bring: every flag of `vllm serve` and llama-server and Ollama's variables, by their own sources."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import harness
from harness import Line, NotRun

WHERE = {
    "vllm": ("vllm", "vllm/engine/arg_utils.py"),
    "llama": ("llamacpp/vendor/llama.cpp", "common/arg.cpp"),
    "ollama": ("ollama_config.go", ""),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hour-sources",
        type=Path,
        default=os.environ.get("PAGETURNER_SOURCES"),
        help="folder with vllm, llamacpp and ollama_config.go (default: PAGETURNER_SOURCES)",
    )


def lines(options: argparse.Namespace) -> Iterator[Line]:
    """A line for each peer: its flags by what becomes of them."""
    if options.hour_sources is None:
        raise NotRun("--hour-sources names their sources")
    for name, (place, inside) in WHERE.items():
        source = Path(options.hour_sources) / place
        what = f"flags of {name}: none is bare"
        if not (source / inside).exists():
            yield Line(what, f"{source} is not there", None, run=False)
            continue
        done = harness.ran(sys.executable, "bench/peers/flags.py", f"--{name}", source)
        figure = next(
            (one for one in done.stdout.splitlines() if one.startswith(name)), done.stderr[-200:]
        )
        yield Line(what, re.sub(r"\s+", " ", figure), done.returncode == 0)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
