"""A test of whether this machine shows an NVIDIA GPU, before anything of CUDA is imported or
opened.

Owns the signs. Must not know drivers.
"""

from __future__ import annotations

from pathlib import Path

SIGNS = (
    "/proc/driver/nvidia/version",
    "/dev/nvidiactl",
    "/dev/dxg",
)  # of the driver on Linux; of WSL


def nvidia_is_here() -> bool:
    """False: advice about drivers and packages would help nobody."""
    return any(Path(sign).exists() for sign in SIGNS)
