"""The compiled kernels: whether they are there, and which instruction set of this CPU they use.

Owns the import of the compiled module, which may be absent, and the choice of the instruction set. Must not
know what the kernels compute.
"""

from __future__ import annotations

import os
from typing import Any

from pageturner.errors import EngineFault

_native: Any = None
_import_error = ""
try:
    import pageturner.kernels._native as _compiled

    _native = _compiled
except ImportError as e:  # not compiled, or for another Python
    _import_error = str(e)


def available_isas() -> list[str]:
    """Instruction sets that were compiled and that this CPU has, best first; empty without the module."""
    return list(_native.available_isas()) if _native is not None else []


def module() -> Any:
    """The compiled module. EngineFault where there is none."""
    if _native is None:
        raise EngineFault("no_native_kernels", supported()[1])
    return _native


def supported() -> tuple[bool, str]:
    """Whether the native backend is worth using here, and why not (a sentence for the user)."""
    if _native is None:
        return False, (
            f"the native kernels are not built ({_import_error}); install a C++20 compiler"
            " and run `pip install --force-reinstall --no-deps pageturner` (in a checkout: `make native`)"
        )
    if available_isas() == ["portable"]:
        return False, "this CPU lacks AVX2, FMA or F16C (on ARM: dot products)"
    return True, ""


def choose_isa(isa: str | None) -> str:
    """This one, or the one of $PAGETURNER_ISA, or the best. EngineFault for one that is not available."""
    found = available_isas()
    if not found:
        raise EngineFault("no_native_kernels", supported()[1])
    wanted = isa or os.environ.get("PAGETURNER_ISA") or found[0]
    if wanted not in found:
        raise EngineFault(
            "unknown_isa",
            f"instruction set {wanted!r} is not available here; choose one of: {', '.join(found)}",
        )
    return wanted
