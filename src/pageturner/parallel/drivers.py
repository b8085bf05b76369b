"""CUDA devices of ranks: which device each rank has, its driver, and what memory is free there.

Owns the environment variables that name devices and drivers. Must not know models or what is
computed.
"""

from __future__ import annotations

import importlib
import os
import weakref
from typing import TYPE_CHECKING

from pageturner import memory
from pageturner.errors import bad_setting

if TYPE_CHECKING:
    from pageturner.kernels.gpu.driver import Driver
    from pageturner.kernels.gpu.ops import GpuOps

DRIVER = "PAGETURNER_GPU_DRIVER"  # MODULE:CLASS of a driver in place of CUDA's, for tests
# The devices of rank 0, 1, ... with commas, numbered as CUDA_VISIBLE_DEVICES leaves them; unset:
# 0,1,...
ORDINALS = "PAGETURNER_GPU_DEVICES"
WORKSPACE = 2 << 30  # bytes for what one step computes; less on small devices


def ordinals(size: int) -> list[int]:
    """The devices of so many ranks. EngineFault('bad_setting') where they are not said right."""
    told = os.environ.get(ORDINALS)
    if not told:
        return list(range(size))
    try:
        found = [int(one) for one in told.split(",")]
    except ValueError:
        found = []
    if len(found) < size or min(found) < 0:
        raise bad_setting(
            f"{ORDINALS} is {told!r}, and {size} numbers of devices with commas are wanted"
        )
    return found[:size]


def open_driver(rank: int = 0) -> Driver:
    """CUDA's, of the device of this rank. EngineFault('gpu_absent', 'gpu_driver', 'gpu_kernels')
    where it cannot be used."""
    ordinal = ordinals(rank + 1)[rank]
    named = os.environ.get(DRIVER)
    if named:
        module, _, name = named.partition(":")
        make = getattr(importlib.import_module(module), name)
        found: Driver = make(ordinal=ordinal) if ordinal else make()
        return found
    from pageturner.kernels.gpu.cuda_driver import CudaDriver

    return CudaDriver(ordinal=ordinal)


def open_rank(rank: int) -> GpuOps:
    """The backend of a rank but 0 on its device, which `choose` of rank 0 found good. EngineFault
    as open_driver."""
    from pageturner.kernels.gpu.ops import GpuOps

    driver = open_driver(rank)
    found = GpuOps(driver, workspace_of(driver))
    weakref.finalize(found, driver.close).atexit = False
    return found


def workspace_of(driver: Driver) -> int:
    """Bytes."""
    return min(WORKSPACE, driver.memory()[1] // 8)


def free_memory(ops: object) -> int | None:
    """Bytes that are free where this backend keeps weights: of the device, or else of the host."""
    free = getattr(ops, "free_memory", None)
    return memory.available() if free is None else free()
