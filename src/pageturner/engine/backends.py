"""The backend of the CPU: the native ones, or the reference where these cannot run."""

from __future__ import annotations

import warnings

from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault
from pageturner.kernels.base import Ops


def make_ops(config: EngineConfig) -> Ops:
    """The backend of the CPU that was asked for. `auto` falls back to the reference, loudly."""
    from pageturner.kernels.cpu import (
        native_module,  # imports the compiled module, which may be absent
    )

    if config.backend == "reference":
        return _reference()
    usable, reason = native_module.supported()
    if usable or (config.backend == "native" and native_module.available_isas()):
        return _native(config)
    if config.backend == "native":
        raise EngineFault("no_native_backend", f"the native kernels cannot run here: {reason}")
    if native_module.available_isas():
        warn(f"{reason}: plain C++ runs instead; every answer is right, and many times slower")
        return _native(config)
    warn(
        f"{reason}: the numpy reference runs instead; every answer is right, and hundreds of times slower"
    )
    return _reference()


def _native(config: EngineConfig) -> Ops:
    from pageturner.kernels.cpu.native import NativeOps

    ops = NativeOps(threads=config.threads)
    if config.pin_threads:
        ops.pin_threads()
    return ops


def warn(message: str) -> None:
    """A RuntimeWarning for whoever called what calls this."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _reference() -> Ops:
    from pageturner.kernels.reference import ReferenceOps

    return ReferenceOps()
