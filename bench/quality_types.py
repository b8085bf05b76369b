"""What each GGUF type costs: a file of each type made from one real model, and two comparisons, kept apart.

    python bench/quality_types.py --model SOURCE.gguf --text TEXT [--types Q4_0 ...] [--tokens 4096]

our kernels  the file as served (activations rounded to `auto` and to 8 bits, KV fp16) against fp32 on the
             dequantised weights of that file. The row F32 has no integers: it is what fp16 KV costs alone.
the bits     the file in fp32 against the source in fp32. The source was quantised once before: this is what
             the type loses on top of that. A tensor that had the type already is copied and loses nothing.

llama-quantize (bench/peers/setup.sh llama) makes the files, `--pure`. It takes another type for rows that are
no multiple of a block's 256 values: the table says how many matrices have the type. --folder keeps the files.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import quality
from pageturner.formats.gguf import open_gguf
from pageturner.kernels.base import F32
from peers import launch
from quality import EXACT, Loss, Window

TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "Q2_K",
    "Q3_K",
    "IQ4_NL",
    "IQ4_XS",
)
_ASKED_AS = {
    "Q3_K": "Q3_K_S",
    "Q4_K": "Q4_K_S",
    "Q5_K": "Q5_K_S",
}  # llama-quantize names mixtures; --pure makes them pure
KL, SAME, CHANGE = (
    0.006,
    0.97,
    0.015,
)  # what our kernels may cost: KL below, same top token, perplexity


@dataclass(frozen=True, slots=True)
class Row:
    """One type. `matrices`: how many have it, of `all_matrices`; the losses as in the module's docstring."""

    kind: str
    matrices: int
    all_matrices: int
    auto: Loss
    eight: Loss
    bits: Loss

    @property
    def passed(self) -> bool:
        """Whether our kernels, as served, keep within the bounds."""
        return self.auto.kl < KL and self.auto.same >= SAME and abs(self.auto.change) <= CHANGE


def make_file(source: Path, kind: str, folder: Path) -> Path:
    """A GGUF file whose matrices are of one type, wherever their rows allow. FileNotFoundError without
    llama-quantize, RuntimeError with its last words if it fails."""
    target = folder / f"{source.stem}.{kind}.gguf"
    if target.is_file():
        return target
    partial = target.with_suffix(".partial")
    command = [str(launch.find_llama("llama-quantize")), "--pure", "--allow-requantize"]
    command += [str(source), str(partial), _ASKED_AS.get(kind, kind), "2"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        partial.unlink(missing_ok=True)
        raise RuntimeError(f"llama-quantize to {kind}: {done.stdout[-400:]}")
    return partial.rename(target)


def measure(
    source: Path, kinds: Sequence[str], windows: Sequence[Window], folder: Path
) -> Iterator[Row]:
    """A row for each type, as it is known. `folder` keeps the files that are made."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        base = quality.keep(Path(scratch, "source"), quality.logits_of(source, EXACT, windows))
        for kind in kinds:
            yield _measure_kind(kind, make_file(source, kind, folder), base, windows)


def _measure_kind(kind: str, path: Path, base: Sequence[F32], windows: Sequence[Window]) -> Row:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        exact = quality.keep(Path(scratch), quality.logits_of(path, EXACT, windows))
        auto, eight = (_served(path, bits, exact, windows) for bits in ("auto", "8"))
        found = [t.kind for t in open_gguf(path).tensors.values() if len(t.shape) == 2]
        return Row(
            kind, found.count(kind), len(found), auto, eight, quality.loss(base, exact, windows)
        )


def _served(path: Path, bits: str, exact: Sequence[F32], windows: Sequence[Window]) -> Loss:
    served = quality.logits_of(path, {"activation_bits": bits}, windows)
    return quality.loss(exact, served, windows)


HEAD = [
    "type",
    "matrices",
    "our kernels, auto: KL",
    "same top",
    "logit error",
    "perplexity",
    "8 bits: KL",
    "same top",
    "the bits: KL",
    "same top",
    "perplexity",
]


def shown(row: Row) -> str:
    """A line of the table, for bench/LOG.md."""
    auto, eight, bits = row.auto, row.eight, row.bits
    cells = [
        f"{row.kind}{'' if row.passed else ' (missed)'}",
        f"{row.matrices} of {row.all_matrices}",
        f"{auto.kl:.5f}",
        f"{auto.same:.2%}",
        f"{auto.logit_error:.2%}",
        f"{auto.perplexity:.2f} ({auto.change:+.2%})",
        f"{eight.kl:.5f}",
        f"{eight.same:.2%}",
        f"{bits.kl:.4f}",
        f"{bits.same:.1%}",
        f"{bits.base:.2f} to {bits.perplexity:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="the source: any GGUF file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument(
        "--folder", type=Path, default=launch.cache_dir() / "types", help="of the files made"
    )
    args = parser.parse_args()
    windows = quality.read_windows(args.model, args.text, args.tokens)
    print(f"{args.model.name}, {args.text.name}, {sum(map(len, windows))} tokens\n")
    print(f"| {' | '.join(HEAD)} |\n|{'--|' * len(HEAD)}", flush=True)
    passed = True
    for row in measure(args.model, args.types, windows, args.folder):
        passed &= row.passed
        print(shown(row), flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
