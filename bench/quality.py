"""What rounding costs: KL divergence, same top token, logit error and perplexity against the model in fp32.

    python bench/quality.py --model MODEL.gguf --text TEXT [--tokens 448]

One row per way of loading: the integers of the file with 8, auto and 15 bits of activations, and the fp32
weights made into int8 and int4; fp32 also with KV of other types, auto with KV in int8. "fp32" is the file
dequantised: what its own bits once cost is not seen here (quality_types.py shows that). KV is fp32 beside
fp32 weights and fp16, as served, beside the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.kernels.base import F32, Batch
from pageturner.kernels.cpu.native import NativeOps
from pageturner.models.load import load_model

EXACT = {"dtype": "float32"}
WAYS = {
    "fp32": EXACT,
    "file, 8 bits": {"activation_bits": "8"},
    "file, auto": {"activation_bits": "auto"},
    "file, 15 bits": {"activation_bits": "15"},
    "int8, auto": {"dtype": "float32", "quantization": "int8"},
    "int4, auto": {"dtype": "float32", "quantization": "int4"},
    "fp32, int8 KV": {"dtype": "float32", "kv": "int8"},
    "fp32, bfloat16 KV": {"dtype": "float32", "kv": "bfloat16"},
    "fp32, e4m3 KV": {"dtype": "float32", "kv": "fp8_e4m3"},
    "file, auto, int8 KV": {"activation_bits": "auto", "kv": "int8"},
}
WINDOW, BLOCK = 512, 16  # tokens
_ROWS = 4  # of logits at once: their temporaries stay in cache

Window = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Loss:
    """One model against a base, over the positions whose next token is known. Logits are taken less their
    mean, which does not change a probability.

    tokens       positions compared
    kl           mean of KL(base || this), nats
    same         share of positions with the same likeliest token
    logit_error  root mean square of the difference, relative to that of the base
    perplexity   of this one; `base` of the base
    """

    tokens: int
    kl: float
    same: float
    logit_error: float
    perplexity: float
    base: float

    @property
    def change(self) -> float:
        """Relative change of perplexity."""
        return self.perplexity / self.base - 1


def read_windows(model: Path, text: Path, tokens: int) -> list[Window]:
    """The beginning of a text in windows of 512 tokens, each with what the tokenizer puts before a text."""
    tokenizer = load_tokenizer(model)
    first = tokenizer.encode("", add_special=True, parse_special=False)
    words = text.read_text(encoding="utf-8")[: 16 * tokens]
    ids = tokenizer.encode(words, add_special=False, parse_special=False)[:tokens]
    step = WINDOW - len(first)
    return [np.array(first + ids[at : at + step], np.int32) for at in range(0, len(ids) - 1, step)]


def logits_of(model: Path, way: dict[str, str], windows: Sequence[Window]) -> Iterator[F32]:
    """The logits [T, V] of each window from one prefill; valid until the next."""
    ops, longest = NativeOps(), max(map(len, windows))
    kv_type = way.get("kv", "float32" if way == EXACT else "float16")
    options = {name: value for name, value in way.items() if name != "kv"}
    decoder = load_model(model, ops, max_positions=longest, **options)
    kv = ops.alloc_kv(decoder.kv_spec(-(-longest // BLOCK), BLOCK, kv_type))
    table = np.arange(-(-longest // BLOCK), dtype=np.int32)[None]
    for window in windows:
        rows = np.arange(len(window), dtype=np.int32)
        ends = np.array([0, len(window)], np.int32)
        yield decoder.forward(Batch(window, rows, ends, ends[1:], table, rows, rows), kv)


def keep(folder: Path, logits: Iterable[F32]) -> list[F32]:
    """The same arrays, on disk: those of 4,096 tokens take gigabytes."""
    folder.mkdir(exist_ok=True)
    paths = []
    for number, each in enumerate(logits):
        paths.append(folder / f"{number}.npy")
        np.save(paths[-1], each)
    return [np.load(path, mmap_mode="r") for path in paths]


def loss(base: Iterable[F32], mine: Iterable[F32], windows: Sequence[Window]) -> Loss:
    """Logits [T, V] of every window against those of a base."""
    # KL, same, squared error, squared base, negative log likelihood of mine and of base
    total = np.zeros(6)
    for b, m, window in zip(base, mine, windows, strict=True):
        for at in range(0, len(window) - 1, _ROWS):
            targets = window[at + 1 : at + 1 + _ROWS]
            total += _sums(b[at : at + len(targets)], m[at : at + len(targets)], targets)
    count = sum(len(window) - 1 for window in windows)
    kl, same, error, square, mine_nll, base_nll = (float(x) for x in total)
    return Loss(
        tokens=count,
        kl=kl / count,
        same=same / count,
        logit_error=(error / square) ** 0.5,
        perplexity=float(np.exp(mine_nll / count)),
        base=float(np.exp(base_nll / count)),
    )


def _sums(base: F32, mine: F32, targets: Window) -> NDArray[np.float64]:
    """With d = base - mine and z the logarithms of the sums of exponentials,
    KL = E_base[log p - log q] = E_base[d] - z_base + z_mine."""
    rows = np.arange(len(targets))
    difference = base - mine
    weights, base_sum, base_z = _exponentials(base)
    mine_z = _exponentials(mine)[2]
    expected = np.einsum("ij,ij->i", weights, difference) / base_sum
    same = (base.argmax(axis=1) == mine.argmax(axis=1)).sum()
    nll = [(z - x[rows, targets]).sum() for z, x in ((mine_z, mine), (base_z, base))]
    return np.array(
        [(expected - base_z + mine_z).sum(), same, _spread(difference), _spread(base), *nll],
        np.float64,
    )


def _exponentials(x: F32) -> tuple[F32, NDArray[np.float64], NDArray[np.float64]]:
    """exp(x - max) [T, V], its sums over V, and log(sum(exp(x)))."""
    most = x.max(axis=1)
    e = np.exp(x - most[:, None])
    sums = e.sum(axis=1).astype(np.float64)
    return e, sums, most + np.log(sums)


def _spread(x: F32) -> float:
    """Sum of the squares around each row's mean."""
    return float((x.var(axis=1, dtype=np.float32) * x.shape[1]).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=448)
    arguments = parser.parse_args()
    windows = read_windows(arguments.model, arguments.text, arguments.tokens)
    base: list[F32] = []
    print(
        "| weights, activations | KL | same top token | logit error | perplexity |\n|--|--|--|--|--|"
    )
    for name, way in WAYS.items():
        logits = logits_of(arguments.model, way, windows)
        base = base or [each.copy() for each in logits]
        found = loss(base, base if way == EXACT else logits, windows)
        cells = (
            f"{found.kl:.5f} | {found.same:.1%} | {found.logit_error:.2%} | {found.perplexity:.2f}"
        )
        print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
