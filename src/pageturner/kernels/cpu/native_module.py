"""The compiled kernels: whether they are there, and which instruction set of this CPU they use.

Owns the import of the compiled module, which may be absent, and the choice of the instruction set.
Must not know what the kernels compute.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import Any
from urllib.parse import unquote, urlsplit

from pageturner.errors import EngineFault

_native: Any = None
_import_error = ""
try:
    import pageturner.kernels._native as _compiled

    _native = _compiled
except ImportError as e:  # not compiled, or for another Python
    _import_error = str(e)


def available_isas() -> list[str]:
    """Instruction sets that were compiled and that this CPU has, best first; empty without the
    module."""
    return list(_native.available_isas()) if _native is not None else []


def module() -> Any:
    """The compiled module. EngineFault where there is none."""
    if _native is None:
        raise EngineFault("no_native_kernels", supported()[1])
    return _native


def supported() -> tuple[bool, str]:
    """Return whether the native backend is worth using here, and why not (a sentence for the
    user)."""
    if _native is None:
        return False, (
            f"the native kernels are not built ({_import_error}); install a C++20 compiler (Debian, Ubuntu:"
            f" `apt-get install g++`), then run `{how_to_compile()}`"
        )
    found = available_isas()
    if not found:
        compiled = ", ".join(_native.compiled_isas())
        return (
            False,
            f"the kernels were compiled for {compiled}; for this CPU: `{how_to_compile()}`",
        )
    if found == ["portable"]:
        return False, "this CPU lacks AVX2, FMA or F16C (on ARM: dot products)"
    return True, ""


def how_to_compile(isas: str = "") -> str:
    """The command that installs this very installation again, from where it came (PEP 610), and
    compiles, for these instruction sets where they are named."""
    from importlib import metadata  # slow to import, and for those alone who read it

    try:
        told = metadata.distribution("pageturner").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        told = None
    origin = json.loads(told or "{}")
    url = urlsplit(origin.get("url", ""))
    source = unquote(url.path) if url.scheme == "file" else url.geturl()
    if repository := origin.get("vcs_info"):
        source = f"{repository['vcs']}+{source}@{repository['commit_id']}"
    if not source or source.endswith(".whl"):  # has none for this machine: no source is known
        source = "PATH_OF_A_CHECKOUT"
    how = ["--editable"] if origin.get("dir_info", {}).get("editable") else []
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--force-reinstall",
        "--no-deps",
        *([f"--config-settings=cmake.define.PAGETURNER_ISAS={isas}"] if isas else []),
        *how,
        source,
    ]
    return shlex.join(command)


def choose_isa(isa: str | None) -> str:
    """This one, or the one of $PAGETURNER_ISA, or the best. EngineFault for one that is not
    available."""
    found = available_isas()
    if not found:
        raise EngineFault("no_native_kernels", supported()[1])
    wanted = isa or os.environ.get("PAGETURNER_ISA") or found[0]
    if wanted not in found:
        raise EngineFault(
            "unknown_isa",
            f"instruction set {wanted!r} is not available here; choose one of: {', '.join(found)}; the"
            f" others that this CPU has are compiled by `{how_to_compile('all')}`",
        )
    return wanted
