"""Rotary position embedding: the tables of cos and sin, with every known way to stretch them.

Owns the frequencies. Must not know models or backends. Sources: RoFormer (arXiv 2104.09864), YaRN
(arXiv
2309.00071), LongRoPE (arXiv 2402.13753), and Llama 3.1's model card; each as Transformers computes
it, but in
fp64 and rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pageturner.kernels.base import F32, Rope

F64 = NDArray[np.float64]
# positions: the angles in fp64 take four times the memory of what becomes of them
_AT_ONCE = 1 << 14
# "dynamic" stretches only beyond the model's context, which no sequence here reaches: no
# stretching.
KINDS = ("linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
SHORT_DIVISORS, LONG_DIVISORS = (
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)  # in GGUF files
LONGEST_ORIGINAL = 1 << 31  # tokens; what a file says beyond it makes no sense
HUGE = 1e12  # settings beyond it, or below its inverse, are none that anybody computed with


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding of the first `dim` dimensions of a head (0: of none).

    factor     by how much positions are stretched
    kind       one of KINDS
    original   context in tokens before stretching (llama3, yarn, longrope)
    low, high  llama3: low_freq_factor, high_freq_factor; yarn: beta_slow, beta_fast
    amplitude  cos and sin are multiplied by it (yarn)
    truncate   yarn's range of dimensions in whole numbers
    short, long  what the frequencies are divided by (longrope); see `rope_tables`
    turned     of the dimensions, those that turn: the pairs behind them have a frequency of 0
               (proportional)
    """

    base: float
    dim: int
    factor: float = 1.0
    interleaved: bool = False
    kind: str = "linear"
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    amplitude: float = 1.0
    truncate: bool = True
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    turned: int = 0

    def is_long(self, positions: int) -> bool:
        """Return whether sequences of up to so many tokens take the divisors of long contexts."""
        return 0 < self.original < positions

    def choice(self, positions: int) -> str:
        """The divisors that such sequences take, "short" or "long"; "" where there is nothing to
        choose."""
        chooses = self.original > 0 and self.kind in (
            "longrope",
            "linear",
        )  # the latter: those of a GGUF file
        return ("long" if self.is_long(positions) else "short") if chooses else ""


def rope_tables(spec: RopeSpec, positions: int, divisors: F32 | None = None) -> Rope:
    """cos and sin of position * frequency, computed in fp64 and rounded once. Which divisors
    longrope takes follows from `positions`, the longest sequence that will be computed, for all
    sequences (adr/0046).

    divisors  [dim/2] of the frequencies, from the tensor `rope_freqs.weight` of Llama 3.1 GGUF
              files
    """
    inverse = _frequencies(spec, positions)
    if divisors is not None:
        inverse = inverse / divisors
    cos, sin = (np.empty((positions, len(inverse)), np.float32) for _ in range(2))
    for start in range(0, positions, _AT_ONCE):
        rows = slice(start, min(start + _AT_ONCE, positions))
        angles = np.outer(np.arange(rows.start, rows.stop, dtype=np.float64), inverse)
        cos[rows], sin[rows] = np.cos(angles) * spec.amplitude, np.sin(angles) * spec.amplitude
    return Rope(cos, sin, spec.interleaved)


def table_bytes(spec: RopeSpec, positions: int) -> int:
    """The bytes that `rope_tables` takes."""
    return 2 * 4 * positions * (spec.dim // 2)


def _frequencies(spec: RopeSpec, positions: int) -> F64:
    """Radians per token of each pair of dimensions: [dim/2]."""
    inverse: F64 = spec.base ** -(np.arange(0, spec.dim, 2, dtype=np.float64) / max(spec.dim, 1))
    if spec.kind == "longrope" and spec.short:
        return np.asarray(inverse / np.array(spec.long if spec.is_long(positions) else spec.short))
    if spec.kind == "proportional":
        inverse[spec.turned // 2 :] = 0
    if spec.kind in ("linear", "proportional"):
        return inverse / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, inverse)
    if spec.kind == "yarn":
        return _yarn(spec, inverse)
    return inverse


def _llama3(spec: RopeSpec, inverse: F64) -> F64:
    """Waves that turn less than `low` times in the original context are stretched, those that turn
    more than `high` times are not, and those between partly."""
    turns = spec.original * inverse / (2 * math.pi)
    kept = np.clip((turns - spec.low) / max(spec.high - spec.low, 1e-9), 0, 1)
    return np.asarray((1 - kept) * inverse / spec.factor + kept * inverse)


def _yarn(spec: RopeSpec, inverse: F64) -> F64:
    """The same idea, but linear in the index of the dimension between the two borders."""

    def border(turns: float) -> float:
        return (
            spec.dim * math.log(spec.original / (turns * 2 * math.pi)) / (2 * math.log(spec.base))
        )

    first, last = border(spec.high), border(spec.low)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.dim - 1)
    width = last - first or 0.001
    stretched = np.clip((np.arange(spec.dim // 2) - first) / width, 0, 1)
    return np.asarray(stretched * inverse / spec.factor + (1 - stretched) * inverse)


def yarn_amplitude(factor: float, weight: float = 1.0) -> float:
    """Attention gets sharper over long distances: 0.1 weight ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def longrope_amplitude(factor: float, original: int) -> float:
    """sqrt(1 + ln(factor) / ln(original)), where the context is `factor` times the original one."""
    return (
        math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    )


def rope_problems(rope: RopeSpec, head_dim: int) -> dict[str, bool]:
    """Every way in which a rotary embedding can make no sense, and whether this one does."""
    stretched, pairs = rope.kind in ("llama3", "yarn"), rope.dim // 2
    turns = f"rotary frequencies between {rope.low} and {rope.high} turns of {rope.original} tokens"
    listed = f"{len(rope.short)} short and {len(rope.long)} long rotary factors for {pairs} pairs"
    return {
        f"rotary dimension {rope.dim} of {head_dim}": rope.dim % 2 != 0
        or not 0 <= rope.dim <= head_dim,
        f"{rope.turned} of {rope.dim} dimensions that turn": not 0 <= rope.turned <= rope.dim,
        f"rotary base {rope.base}": not 1 < rope.base < HUGE,
        f"rotary factor {rope.factor}": not 1 / HUGE < rope.factor < HUGE,
        f"rotary amplitude {rope.amplitude}": not 1 / HUGE < rope.amplitude < HUGE,
        turns: stretched
        and not (1 / HUGE < rope.low <= rope.high < HUGE and 0 < rope.original < LONGEST_ORIGINAL),
        listed: rope.kind == "longrope" and {len(rope.short), len(rope.long)} != {pairs},
        "rotary factors that cannot divide": not all(
            1 / HUGE < f < HUGE for f in rope.short + rope.long
        ),
    }
