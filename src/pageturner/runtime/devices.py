"""Where kernels run: the CPU or a CUDA device, and why. Owns the choice; must not know models or requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pageturner import memory
from pageturner.errors import EngineFault

if TYPE_CHECKING:
    from pageturner.kernels.gpu.ops import GpuOps

WORKSPACE = 2 << 30  # bytes for what one step computes; less on small devices
SHARE = 0.9  # of the memory that weights leave: for KV


def gpu_ops(device: str) -> tuple[GpuOps | None, str]:
    """The backend of a CUDA device, or None; and why. device: "auto", "cuda" or "cpu".

    EngineFault ('gpu_absent', 'gpu_driver', 'gpu_kernels') if "cuda" is asked for and cannot be.
    """
    if device == "cpu":
        return None, "the CPU was asked for"
    try:
        from pageturner.kernels.gpu.cuda_driver import CudaDriver
        from pageturner.kernels.gpu.ops import GpuOps

        driver = CudaDriver()
    except EngineFault as fault:
        if device == "cuda":
            raise
        return None, fault.message
    workspace = min(WORKSPACE, driver.memory()[0] // 8)
    return GpuOps(driver, workspace), f"{driver.name} has kernels for it (sm_{driver.architecture})"


def free_memory(ops: object) -> int | None:
    """Bytes that are free where this backend keeps weights: of the device, or else of the host."""
    free = getattr(ops, "free_memory", None)
    return memory.available() if free is None else free()


def kv_bytes(ops: object, asked: int, host: int) -> tuple[int, int]:
    """For `plan_kv`: bytes for KV that are asked for, and bytes that are free; of the device where KV lies
    there. asked 0: a share of what is free. host: bytes that are free on the host."""
    free = getattr(ops, "free_memory", None)
    if free is None:
        return asked, host
    here = free()
    return asked or int(SHARE * here), here
