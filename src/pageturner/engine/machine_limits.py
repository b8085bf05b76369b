"""The limits of this machine, measured once (`pageturner doctor`) and kept beside the models.

Owns the file, what a measurement is kept under (processor, instruction set, threads), and which
limits are a step's. Must not measure.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from pageturner import private_files
from pageturner.engine.machine import named_lines
from pageturner.formats import hub
from pageturner.kernels.peak import Ceilings, Peak, best_of
from pageturner.telemetry.work import MachineLimits

T = TypeVar("T")
GET = "run `pageturner doctor` once"  # how to have limits where there are none


def limits_file() -> Path:
    """Return the path of the file in the folder of the cache."""
    return hub.cache_folder().parent / "limits.json"


def processor(proc: Path = Path("/proc")) -> str:
    """Its name; on ARM, whose processors have none, its numbers."""
    known = named_lines(proc / "cpuinfo")
    numbers = (known.get(name, "") for name in ("CPU implementer", "CPU part", "CPU variant"))
    return known.get("model name") or " ".join(numbers).strip() or "unknown"


def stored_peak(isa: str, threads: int) -> Peak | None:
    """Return what was measured here for so many threads; None if nothing was."""
    return _read_peaks().get(_key(isa, threads))


def store_peak(measured: Peak) -> bool:
    """Keep the larger of each figure and what is kept already: what disturbs a measurement makes it
    smaller. False where the file cannot be written."""
    known = _read_peaks()
    key = _key(measured.isa, measured.threads)
    best = best_of(known.get(key, measured), measured)
    return write_json(limits_file(), known | {key: best})


def devices_file() -> Path:
    """The same for devices, beside it."""
    return limits_file().with_name("device_limits.json")


def stored_ceilings(device: str) -> Ceilings | None:
    """Return what was measured of a device of this name; None if nothing was."""
    return _read_devices().get(device)


def store_ceilings(measured: Ceilings) -> bool:
    """Keep the larger of each figure of a device, as store_peak does."""
    known = _read_devices()
    before = known.get(measured.device, measured)
    known[measured.device] = Ceilings(
        measured.device,
        max(measured.copy_gb_s, before.copy_gb_s),
        max(measured.bf16_gop_s, before.bf16_gop_s),
    )
    return write_json(devices_file(), known)


def limits_of_device(device: str) -> MachineLimits | None:
    """Return the limits of steps on a device. A copy reads and writes, so reading alone may be
    twice as fast; all products are counted against those in bf16."""
    found = stored_ceilings(device)
    if found is None:
        return None
    return MachineLimits(2 * found.copy_gb_s, found.bf16_gop_s, found.bf16_gop_s)


def _read_devices() -> dict[str, Ceilings]:
    return read_json(devices_file(), dict[str, Ceilings])


def read_json(path: Path, kind: Callable[[], T]) -> T:
    """Return what a file holds; an empty one of its kind where it cannot be read or holds something
    else."""
    try:
        found: T = msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return kind()
    return found


def write_json(path: Path, known: object) -> bool:
    """Write a file at once or not at all. False where the file cannot be written."""
    try:
        private_files.write_json(path, known)
    except OSError:
        return False
    return True


def _key(isa: str, threads: int) -> str:
    return f"{processor()}, {isa}, {threads} threads"


def _read_peaks() -> dict[str, Peak]:
    return read_json(limits_file(), dict[str, Peak])


def limits_of(peak: Peak | None, weights: float) -> MachineLimits | None:
    """Return the limits of steps that read so many bytes of weights again and again."""
    if peak is None:
        return None
    return MachineLimits(peak.read_of(weights), peak.integer_gop_s, peak.fp32_gop_s)
