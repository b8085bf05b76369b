"""Which devices have shown that they compute right, kept beside the limits of the machine.

Owns the file, what a proof is for (a device, its driver, our kernels, the forms of a model), and when there
must be one. Must not know what is compared.
"""

from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pageturner import logs
from pageturner.errors import EngineFault
from pageturner.models.decoder import Decoder
from pageturner.runtime.machine_limits import devices_file, write_json

if TYPE_CHECKING:
    from pageturner.kernels.gpu.driver import Driver
    from pageturner.kernels.gpu.ops import GpuOps

PROVEN = (90,)  # architectures on which bench/gpu/run.py has compared answers and bits
RIGHT = "right"
NOT_YET = (
    "the kernels for sm_{0} have not yet shown on this device that they compute right: start once with"
    " --device cuda, which compares them, and auto takes it from then on"
)
MOST = 31  # kinds of devices, drivers and kernels beside the one that is kept
WRONG = ("gpu_wrong", "gpu_fault")  # faults of kernels; whatever else stops a check says nothing of them


def proofs_file() -> Path:
    """Beside the limits of devices."""
    return devices_file().with_name("device_proofs.json")


def proofs_of(driver: Driver) -> dict[str, str]:
    """RIGHT or what was wrong, by the forms that were compared."""
    return _read().get(_key(driver), {})


def doubt(driver: Driver) -> str | None:
    """Why `--device auto` leaves a device alone. None: an architecture that was proven, or a device that has
    shown it, and nothing that was ever wrong there."""
    found = proofs_of(driver)
    wrong = next((text for text in found.values() if text != RIGHT), None)
    if wrong is not None or driver.architecture in PROVEN or found:
        return wrong
    return NOT_YET.format(driver.architecture)


def told(driver: Driver) -> str:
    """What is known, for `doctor`."""
    found = proofs_of(driver)
    if (why := doubt(driver)) is not None:
        return why
    return f"right, with {len(found)} kinds of models" if found else "not yet: the first start does"


def prove(decoder: Decoder, ops: GpuOps | None, block_size: int, kv_dtype: str, length: int) -> None:
    """Compare what this device computes, once for each kind of model (`kernels.gpu.proof`). EngineFault
    ('gpu_wrong', 'gpu_fault') where it is wrong, and from then on `auto` leaves the device alone until it was
    right. On the CPU, and on what interprets kernels, nothing is done.

    length  tokens that a sequence may have
    """
    if ops is None or not ops.driver.version:
        return
    from pageturner.kernels.gpu import proof

    spec = decoder.kv_spec(1, block_size, kv_dtype)
    if decoder.shard is not None:  # of all ranks, and this is one
        spec = replace(spec, kv_heads=decoder.stack.layers[0].shape.kv_heads)
    forms = proof.identity(decoder.stack, decoder.head.weight, spec, length)
    if proofs_of(ops.driver).get(forms) == RIGHT:
        return
    try:
        proof.check(ops, decoder.stack, decoder.head.weight, spec, length)
    except EngineFault as fault:
        if fault.code in WRONG:
            _keep(ops.driver, forms, fault.message)
            raise
        logs.say(f"what the device computes was not compared: {fault.message}", "warning")
    else:
        _keep(ops.driver, forms, RIGHT)


def _key(driver: Driver) -> str:
    return f"{driver.name}, sm_{driver.architecture}, {driver.version}"


def _read() -> dict[str, dict[str, str]]:
    try:
        return msgspec.json.decode(proofs_file().read_bytes(), type=dict[str, dict[str, str]])
    except (OSError, msgspec.DecodeError):
        return {}


def _keep(driver: Driver, forms: str, text: str) -> None:
    """Beside what others kept meanwhile; of many kernels and drivers the newest."""
    path = proofs_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known, key = _read(), _key(driver)
            mine = known.pop(key, {}) | {forms: text}
            kept = write_json(path, dict(list(known.items())[-MOST:]) | {key: mine})
    except OSError:
        kept = False
    if not kept:
        logs.say(
            f"{path} cannot be written: the next start compares again, and auto knows nothing", "warning"
        )
