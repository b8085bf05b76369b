"""The limits of this machine, the ones that every kernel is measured against.

Owns which loops are run over how much memory; the loops are in native/limits.cpp. Must not know
kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import numpy as np

_INTEGER, _FLOAT, _READ, _COPY = range(4)  # pt::Limit
READ = ("256K", "8M", "32M", "256M")
GLANCE, GLANCES = 0.006, 3  # seconds of a measurement that delays a start, and how many
_READ_BYTES = (
    256 << 10,
    8 << 20,
    32 << 20,
    256 << 20,
)  # the first for each thread, the others in all


@dataclass(frozen=True, slots=True)
class Peak:
    """Limits of one instruction set, all `threads` together; None where it has no loop of its own.

    integer_gop_s  int8 products as the kernels do them (vpdpbusd, or vpmaddubsw and vpaddw), GOP/s
    fp32_gop_s     fused multiply-adds, GFLOP/s; a multiply or an add is one operation
    read_gb_s      by the bytes that are read again and again: 256K for each thread, 8M, 32M, 256M
                   in all; fewer bytes come at least as fast as more
    copy_gb_s      in memory: bytes copied, each read once and written once
    """

    isa: str
    threads: int
    integer_gop_s: float | None
    fp32_gop_s: float | None
    read_gb_s: dict[str, float] = field(hash=False)
    copy_gb_s: float

    def read_of(self, nbytes: float) -> float:
        """GB/s at which `nbytes`, read again and again by all threads together, can come: between
        the sizes measured along the logarithm of the size."""
        sizes = [math.log(n) for n in (_READ_BYTES[0] * self.threads, *_READ_BYTES[1:])]
        return float(np.interp(math.log(max(nbytes, 1)), sizes, list(self.read_gb_s.values())))


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The limits of one device. copy_gb_s: bytes copied, each read once and written once;
    bf16_gop_s: a multiply or an add is one operation."""

    device: str
    copy_gb_s: float
    bf16_gop_s: float


def best_of(first: Peak, second: Peak) -> Peak:
    """Limits that were measured twice, of one instruction set and as many threads: the higher ones.
    What disturbs a measurement makes it lower, never higher."""

    def higher(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else max(a, b)

    read = {name: max(rate, second.read_gb_s[name]) for name, rate in first.read_gb_s.items()}
    return Peak(
        first.isa,
        first.threads,
        higher(first.integer_gop_s, second.integer_gop_s),
        higher(first.fp32_gop_s, second.fp32_gop_s),
        read,
        max(first.copy_gb_s, second.copy_gb_s),
    )


def no_slower(rates: list[float]) -> list[float]:
    """Rates of reading more and more bytes, each at least as high as those behind it: what came so
    fast from farther away can come so fast from nearer, and a lower figure is of what disturbed its
    measurement."""
    return [max(rates[i:]) for i in range(len(rates))]


@cache
def quick_peak(isa: str, threads: int) -> tuple[float | None, float | None]:
    """GOP/s of int8 and GFLOP/s, in GLANCES of GLANCE seconds each, once in a process. Too rough
    for shares of limits, good enough to size a step. The best counts: what disturbs one makes it
    smaller."""
    from pageturner.kernels.cpu import native_module

    compiled = native_module.module()

    def best(what: int) -> float | None:
        found = [compiled.measure_limit(isa, what, threads, 0, GLANCE) for _ in range(GLANCES)]
        return 1e-9 * float(max(found)) or None

    return best(_INTEGER), best(_FLOAT)


def measure(isa: str, threads: int, seconds: float = 0.5) -> Peak:
    """The limits, in about `seconds`. Products, what stays in a thread's own caches, and with one
    thread everything, by processor time: other processes do not count. Of memory that threads
    share, at least what one of them reached so."""
    from pageturner.kernels.cpu import (
        native_module,  # here: who reads what was measured needs no kernels
    )

    compiled = native_module.module()

    def limit(what: int, nbytes: int = 0) -> float:
        return 1e-9 * float(compiled.measure_limit(isa, what, threads, nbytes, seconds / 7))

    shares = (_READ_BYTES[0], *(n // threads for n in _READ_BYTES[1:]))
    return Peak(
        isa=isa,
        threads=threads,
        integer_gop_s=limit(_INTEGER) or None,
        fp32_gop_s=limit(_FLOAT) or None,
        read_gb_s=dict(zip(READ, no_slower([limit(_READ, n) for n in shares]), strict=True)),
        copy_gb_s=limit(_COPY, shares[-1]),
    )
