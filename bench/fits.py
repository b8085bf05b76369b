"""The table of docs/kv.md: what fits in which memory, by `pageturner plan` over configurations as they are
published, which the tests have.

    python bench/fits.py           print the table
    python bench/fits.py --write   write it into the page
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "kv.md"
BEGIN, END = "<!-- fits -->\n", "<!-- /fits -->"
TESTS = ROOT / "tests"
sys.path += [str(TESTS), str(TESTS / "models")]

import test_hybrid_configs  # noqa: E402
import test_recurrent_configs as recurrent  # noqa: E402

from pageturner import cli  # noqa: E402

CONFIGS = json.loads((TESTS / "goldens" / "published_configs.json").read_text())
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3.5-4B": CONFIGS["qwen3_5_4b"],
    "Qwen3.6-27B": test_hybrid_configs.TEXT,
    "Qwen3.6-35B-A3B": CONFIGS["qwen3_6_35b"],
    **{f"Gemma 4 {name}": CONFIGS[f"gemma4_{name.lower()}"] for name in ("E2B", "E4B", "31B")},
    "Gemma 4 26B-A4B": CONFIGS["gemma4_26b"],
    **{name: values[0] for name, values in recurrent.SIZES.items()},
}
MEMORIES = (8, 16, 24, 48, 80)  # GB
SEQUENCES = 8  # at once
Q4_K_M = 4.85  # bits of a weight, on average
SIZES = {16: "", Q4_K_M: ", Q4_K_M"}


def table() -> str:
    """The table in Markdown. A cell has the tokens of KV / the states that are kept beside those of
    running sequences."""
    head = ["model", "weights, GB", "KV of a token, KiB", "state, MiB"]
    head += [f"{memory} GB" for memory in MEMORIES]
    lines = [head, ["--"] * len(head)]
    with tempfile.TemporaryDirectory() as folder:
        for name, values in MODELS.items():
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(values))
            for bits, form in SIZES.items():
                lines.append(_row(path, name + form, bits))
    return "".join(f"|{'|'.join(cells)}|\n" for cells in lines)


def _row(path: Path, name: str, bits: float) -> list[str]:
    nbytes = int(plan(path, "1GB")["weights"]["bytes"] / 16 * bits)
    plans = [plan(path, f"{memory}GB", "--weights-bytes", str(nbytes)) for memory in MEMORIES]
    kv = plans[0]["kv"]
    units = (nbytes / 1e9, kv["bytes_per_token"] / 1024, kv["bytes_per_state"] / 2**20)
    return [name, *(f"{value:,.1f}" for value in units), *map(_cell, plans)]


def _cell(found: dict[str, Any]) -> str:
    sizes = found["engine"]
    if sizes is None:
        return "-"
    tokens = f"{sizes['blocks'] * found['kv']['block_size']:,}"
    return f"{tokens}/{sizes['states'] - sizes['tails']:,}" if sizes["states"] else tokens


def plan(path: Path, memory: str, *words: str) -> dict[str, Any]:
    """The JSON of `pageturner plan`, which says with its exit code whether anything fits."""
    output = path.with_name("plan.json")
    words = ("--memory", memory, "--max-num-seqs", str(SEQUENCES), *words)
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(["plan", str(path), *words, "--output", str(output)])
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def main() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
