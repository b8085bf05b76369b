"""What this machine reaches at most: the limits that every kernel is measured against.

Owns which loops are run over how much memory; the loops are in native/limits.cpp. Must not know kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pageturner.kernels import native

_INTEGER, _FLOAT, _READ, _COPY = range(4)  # pt::Limit
_IN_L2 = 256 << 10  # bytes for each thread
_IN_L3, _IN_MEMORY = 8 << 20, 256 << 20  # bytes of all threads together


@dataclass(frozen=True, slots=True)
class Peak:
    """Limits of one instruction set, all `threads` together; None where it has no loop of its own.

    integer_gop_s  int8 products as the kernels do them (vpdpbusd, or vpmaddubsw and vpaddw), GOP/s
    fp32_gop_s     fused multiply-adds, GFLOP/s; a multiply or an add is one operation
    read_gb_s      by where the bytes are: L2 (256 KB a thread), L3 (8 MB in all), memory (256 MB in all)
    copy_gb_s      in memory: bytes copied, each read once and written once
    """

    isa: str
    threads: int
    integer_gop_s: float | None
    fp32_gop_s: float | None
    read_gb_s: dict[str, float] = field(hash=False)
    copy_gb_s: float

    def read_of(self, nbytes: float) -> float:
        """GB/s at which `nbytes`, read again and again by all threads together, can come."""
        if nbytes <= _IN_L2 * self.threads:
            return self.read_gb_s["L2"]
        return self.read_gb_s["L3" if nbytes <= _IN_L3 else "memory"]


def measure(isa: str, threads: int, seconds: float = 0.5) -> Peak:
    """The limits, in about `seconds`. Products, and with one thread everything, by processor time: other
    processes do not count."""
    compiled = native.module()

    def limit(what: int, nbytes: int = 0) -> float:
        return 1e-9 * float(compiled.measure_limit(isa, what, threads, nbytes, seconds / 6))

    return Peak(
        isa=isa,
        threads=threads,
        integer_gop_s=limit(_INTEGER) or None,
        fp32_gop_s=limit(_FLOAT) or None,
        read_gb_s={
            "L2": limit(_READ, _IN_L2),
            "L3": limit(_READ, _IN_L3 // threads),
            "memory": limit(_READ, _IN_MEMORY // threads),
        },
        copy_gb_s=limit(_COPY, _IN_MEMORY // threads),
    )
