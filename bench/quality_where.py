"""Where the rounding of activations costs most: every matrix of a model in other bits, one field at a time.

    python bench/quality_where.py --model MODEL.gguf --prompts PROMPTS.jsonl [--base 15] [--other 8]

Weights and everything else are fp32; only what goes into a product is rounded first, by numpy, in groups of
32: to `base` bits, but for the rows of one field (q, k, v, o, gate and up, down, the head), or the first rows
of each sequence, which take `other`. The errors are those of bench/quality_prompts.py, on the prompts of its
first half. At the end: which share of the squares of the peaks, on which the error depends, the largest
groups of a row have, by field, on average over the rows and layers.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pageturner.kernels.base import F32, Tensor
from pageturner.kernels.composites import Composites
from pageturner.kernels.native import NativeOps
from pageturner.kernels.reference_arrays import quantise_rows
from quality_prompts import Forced, Scores, answered, error, exact, read_prompts, scored

FIELDS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate ffn_up", "ffn_down", "head")
SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)
GROUP, LEAST = (
    32,
    64,
)  # elements; rows of the shortest prompt with its answer: fewer rows are those of an answer

Rule = Callable[[str, F32], F32]  # what a product with a field gets in place of its rows


class Rounded(Composites):
    """The native backend by primitives, with a rule for what goes into its products."""

    def __init__(self, rule: Rule) -> None:
        self._ops, self._rule = NativeOps(), rule
        self.name, self.fingerprint = self._ops.name, self._ops.fingerprint
        self._fields: dict[int, str] = {}
        for name in dir(NativeOps):
            if (
                not name.startswith("_")
                and not hasattr(Composites, name)
                and name not in vars(Rounded)
            ):
                setattr(self, name, getattr(self._ops, name))
        for name in ("layer_norm", "activate", "mul", "scale", "soft_cap", "route", "add_rows"):
            setattr(self, name, getattr(self._ops, name))

    @property
    def features(self) -> frozenset[str]:
        """All."""
        return self._ops.features

    def pack_weight(self, tensor: Tensor) -> Any:
        """The weight, whose field is remembered."""
        packed = self._ops.pack_weight(tensor)
        found = re.match(r"blk\.\d+\.(\w+)\.weight", tensor.name)
        self._fields[id(packed)] = found[1] if found else "head"
        return packed

    def linear(self, x: F32, weight: Any, bias: Any = None) -> F32:
        """The product of rounded rows."""
        return self._ops.linear(self._rule(self._fields[id(weight)], x), weight, bias)


def rounded(x: F32, bits: str) -> F32:
    """What rows stand for once they are rounded to "8", "12" or "15" bits; "fp32": themselves."""
    if bits == "fp32":
        return x
    q, scale = quantise_rows(x, int(bits))
    return np.ascontiguousarray((q * scale[..., None]).reshape(x.shape), dtype=np.float32)


def rules(base: str, other: str) -> dict[str, Rule]:
    """By name: everything in `base`, each field in `other`, the first rows of a sequence in `other`."""

    def of_field(fields: str) -> Rule:
        return lambda field, x: rounded(x, other if field in fields.split() else base)

    def of_rows(count: int) -> Rule:
        def rule(field: str, x: F32) -> F32:
            y = rounded(x, base)
            if len(x) > LEAST:
                y[:count] = x[:count] if other == "fp32" else rounded(x[:count], other)
            return y

        return rule

    named = {"everything": of_field(""), **{fields: of_field(fields) for fields in FIELDS}}
    return named | {f"the first {count} rows": of_rows(count) for count in (1, 4)}


def peaks(model: str, forced: list[Forced]) -> dict[str, list[float]]:
    """By field: the share of the squares of the peaks that the largest groups of a row have, by SHARES."""
    found: defaultdict[str, list[F32]] = defaultdict(list)

    def rule(field: str, x: F32) -> F32:
        squares = np.sort(np.abs(x.reshape(len(x), -1, GROUP)).max(-1) ** 2)[:, ::-1]
        top = [max(1, round(share * squares.shape[1])) for share in SHARES]
        found[field].append(
            np.cumsum(squares, 1)[:, [n - 1 for n in top]] / squares.sum(1, keepdims=True)
        )
        return x

    scored(model, forced, Rounded(rule), "float32", dtype="float32")
    return {field: np.concatenate(parts).mean(0).tolist() for field, parts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--base", default="15", choices=("8", "12", "15"))
    parser.add_argument("--other", default="8", choices=("8", "12", "15", "fp32"))
    given = parser.parse_args()
    forced = answered(given.model, read_prompts(given.prompts, given.count, 0))
    base: Scores = exact(given.model, forced)
    print(f"{given.base} bits; of what is named {given.other}")
    for name, rule in rules(given.base, given.other).items():
        mine = scored(given.model, forced, Rounded(rule), "float32", dtype="float32")
        print(f"{name:18} {error(base, mine)}", flush=True)
    print(
        f"squares of the peaks in the largest {', '.join(f'{s:.0%}' for s in SHARES)} of the groups of a row"
    )
    for field, shares in peaks(given.model, forced[:4]).items():
        print(f"{field:18} {', '.join(f'{share:.1%}' for share in shares)}")


if __name__ == "__main__":
    main()
