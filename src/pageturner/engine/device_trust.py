"""Trust in devices: which have shown that they compute right, form by form, kept beside the limits
of the machine.

Owns the file, and when a device is tested and when it is left alone. A form is what is compared by
one comparison: products with weights of one kind and shape, attention over one type of KV with
heads of one size, and so on (`kernels.gpu.proof`). Must not know how anything is compared.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pageturner import logs
from pageturner.engine.machine_limits import devices_file, read_json, write_json
from pageturner.errors import EngineFault
from pageturner.kernels.base import KVSpec
from pageturner.models.decoder import Decoder
from pageturner.private_files import locked

if TYPE_CHECKING:
    from pageturner.kernels.gpu.driver import Driver

PROVEN = (90,)  # architectures on which bench/gpu/run.py has compared answers and bits
RIGHT = "right"
NOT_YET = (
    "the kernels for sm_{0} have not yet shown on this device that they compute right: start once with"
    " --device cuda, which compares them, and auto takes it from then on"
)
MAX_DEVICES = 32  # kinds of devices, drivers and kernels that are kept
MAX_MODELS = 100  # whose forms are kept, of each of them
WRONG = (
    "gpu_wrong",
    "gpu_fault",
)  # faults of kernels; whatever else stops a test says nothing of them


class FormResult(msgspec.Struct, frozen=True):
    """The result of one form. text: RIGHT, or what was wrong; code: digest of the code that
    compared it."""

    text: str
    code: str


class Record(msgspec.Struct):
    """A record of what a device has shown. models: the forms of models that were started there, by
    `ModelNeeds.mark`."""

    forms: dict[str, FormResult] = msgspec.field(default_factory=dict)
    models: dict[str, list[str]] = msgspec.field(default_factory=dict)


class _File(msgspec.Struct):
    version: Literal[2] = 2  # a file of another version is as if there were none
    devices: dict[str, Record] = msgspec.field(default_factory=dict)


def results_file() -> Path:
    """Return the path of the file, beside the limits of devices."""
    return devices_file().with_name("device_proofs.json")


def record_of(driver: Driver) -> Record:
    """Forms that were compared on this device, with this driver and these kernels, and by which
    models."""
    return _read().devices.get(_key(driver)) or Record()


def distrust_reason(driver: Driver, model: str, forms: Iterable[str]) -> str | None:
    """Why `--device auto` leaves a device alone for a model. None: no form of the model is known to
    be wrong there, and the architecture was proven or this device has shown something right.

    model  `ModelNeeds.mark`; forms: those that are known of it before it is loaded
    """
    from pageturner.kernels.gpu.proof import code_digest

    record = record_of(driver)
    wrong = {form: one.text for form, one in record.forms.items() if one.text != RIGHT}
    code = code_digest() if wrong else ""
    for form in (*forms, *record.models.get(model, ())):
        if form in wrong and record.forms[form].code == code:
            return wrong[form]
    if driver.architecture in PROVEN or len(wrong) < len(record.forms):
        return None
    return NOT_YET.format(driver.architecture)


def summary(driver: Driver) -> str:
    """Return what is known, for `doctor`."""
    record = record_of(driver)
    wrong = [one.text for one in record.forms.values() if one.text != RIGHT]
    if wrong:
        return "; ".join(wrong)
    if not record.forms:
        return "not yet: the first start does"
    return f"right, in {len(record.forms)} forms of {len(record.models)} models"


def self_test(decoder: Decoder, ops: Any, spec: KVSpec, model: str, length: int) -> None:
    """Compare what this device computes in each form of the model that it has not shown yet.
    EngineFault ('gpu_wrong', 'gpu_fault') names the form that is wrong; from then on `auto` leaves
    the device alone for models that have it, until it was right. On the CPU, and on what interprets
    kernels, nothing is done.

    spec    form of one KV block
    model   `ModelNeeds.mark`
    length  tokens that a sequence may have
    """
    if ops is None or not ops.driver.version:
        return
    from pageturner.kernels.gpu import proof

    stack = decoder.stack
    if (
        decoder.shard is not None
    ):  # of all ranks, and this is one: its slice is tested as if it were a model
        ops, spec = ops.own, replace(spec, kv_heads=stack.layers[0].shape.kv_heads)
        stack = replace(stack, first_token=0, vocabulary=stack.embed.rows)
    comparisons = proof.comparisons(proof.Subject(ops, stack, decoder.head, spec, length))
    code, known = proof.code_digest(), record_of(ops.driver).forms
    found: dict[str, FormResult] = {}
    try:
        for one in comparisons:
            if known.get(one.form) != FormResult(RIGHT, code):
                found[one.form] = FormResult(_compared(one), code)
                if found[one.form].text != RIGHT:
                    raise EngineFault("gpu_wrong", found[one.form].text)
    except EngineFault as fault:
        if fault.code in WRONG:
            raise
        logs.say(f"what the device computes was not compared: {fault.message}", "warning")
    finally:
        if found:
            _keep(ops.driver, found, model, [one.form for one in comparisons])


def _compared(comparison: Any) -> str:
    """RIGHT, or what is wrong and in which form."""
    try:
        comparison.run()
    except EngineFault as fault:
        if fault.code not in WRONG:
            raise
        told = f"{fault.message}, compared as {comparison.form!r}"
        return f"{told}: models with it are not computed there; use --device cpu"
    return RIGHT


def _key(driver: Driver) -> str:
    return f"{driver.name}, sm_{driver.architecture}, {driver.version}"


def _read() -> _File:
    return read_json(results_file(), _File)


def _keep(driver: Driver, found: dict[str, FormResult], model: str, forms: list[str]) -> None:
    """Keep results beside what others kept meanwhile; of devices and models the newest."""
    path = results_file()
    try:
        with locked(path.with_suffix(".lock"), fcntl.LOCK_EX):
            known, key = _read(), _key(driver)
            mine = known.devices.pop(key, None) or Record()
            mine.models.pop(model, None)
            mine.forms |= found
            mine.models = dict([*mine.models.items(), (model, forms)][-MAX_MODELS:])
            known.devices = dict([*known.devices.items(), (key, mine)][-MAX_DEVICES:])
            kept = write_json(path, msgspec.to_builtins(known))
    except OSError:
        kept = False
    if not kept:
        logs.say(
            f"{path} cannot be written: the next start compares again, and auto knows nothing",
            "warning",
        )
