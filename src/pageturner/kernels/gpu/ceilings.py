"""The ceilings of a device: bytes copied, and products of our own kernel, to measure steps against.

Owns the two measurements. Must not know where figures are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pageturner.kernels.gpu.arrays import GpuArray
from pageturner.kernels.gpu.driver import Driver
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.weights import FloatMatrix
from pageturner.kernels.peak import Ceilings

COPIED = 1 << 28  # bytes: more than any cache of a device holds
SIDE = 4096  # rows, columns and inputs of the product
AT_ONCE = 8  # calls between two looks at the clock, so that launches overlap


def measure(
    driver: Driver, copied: int = COPIED, side: int = SIDE, seconds: float = 0.2
) -> Ceilings:
    """Measure them in about twice so many seconds; takes 2 * copied bytes of the device, and gives
    them back.

    EngineFault('gpu_memory') where they are not there.
    """
    ops = GpuOps(driver, max(2 * copied, 16 * side * side))
    begin = ops.arena.take((copied,), "u8").address
    half = copied // 2
    copy = _fastest(driver, lambda: driver.copy(begin + half, begin, half), seconds)
    ops.begin()
    weight = ops.arena.take((side, side), "bf16")
    rows = ops.arena.take((side, side), "bf16")
    driver.clear(weight.address, weight.nbytes)
    driver.clear(rows.address, rows.nbytes)
    matrix = FloatMatrix(weight.address, "bf16", side, side)
    mark = ops.arena.mark

    def product() -> None:
        ops.arena.reset(mark)
        ops.launches.gemm(GpuArray(rows.address, rows.shape, "bf16"), matrix)

    product_s = _fastest(driver, product, seconds)
    ops.arena.release()
    driver.free(ops.launches.chosen)
    return Ceilings(driver.name, 1e-9 * half / copy, 2e-9 * side**3 / product_s)


def _fastest(driver: Driver, work: Callable[[], object], seconds: float) -> float:
    """Seconds of one call, of the fastest AT_ONCE in a row: what disturbs a measurement makes it
    longer."""
    work()
    driver.synchronise()
    least, end = float("inf"), time.perf_counter() + seconds
    while least == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(AT_ONCE):
            work()
        driver.synchronise()
        least = min(least, (time.perf_counter() - begin) / AT_ONCE)
    return least
