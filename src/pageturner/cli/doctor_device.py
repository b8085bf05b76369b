"""The part of `pageturner doctor` about CUDA devices: which is there, what it reaches, where a
model runs.

Owns these lines. Must not know the rest of the report.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pageturner.config.settings import EngineConfig
from pageturner.engine import device_trust, devices, machine_limits
from pageturner.errors import EngineFault
from pageturner.formats import hub
from pageturner.kernels.gpu import ceilings
from pageturner.parallel import drivers


def examine(
    config: EngineConfig, measure: bool
) -> tuple[dict[str, str], dict[str, Any], list[str]]:
    """Lines by name, the same as data, and problems: CUDA was asked for and cannot be had."""
    lines: dict[str, str] = {}
    data: dict[str, Any] = {}
    try:
        driver = drivers.open_driver()
    except EngineFault as fault:
        lines["CUDA"], data["cuda"] = fault.message, {"code": fault.code, "message": fault.message}
    else:
        free, total = driver.memory()
        lines["CUDA"] = (
            f"{driver.name}, sm_{driver.architecture}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
        )
        data["cuda"] = {
            "name": driver.name,
            "architecture": driver.architecture,
            "free": free,
            "total": total,
            "compared": {
                form: one.text for form, one in device_trust.record_of(driver).forms.items()
            },
        }
        reached = driver.peers()
        data["cuda"]["reaches"] = reached
        lines["devices"] = _reached(reached)
        lines["compared"] = device_trust.summary(driver)
        if measure:
            _measure(driver, lines, data)
        driver.close()
    try:
        chosen = devices.choose(config, lambda: _needs(config))
    except EngineFault as fault:
        return lines, data, [fault.message]
    lines["chosen"] = data["chosen"] = chosen.text
    return lines, data, []


def _reached(reached: list[bool]) -> str:
    """Describe how many devices there are, and which of them --tensor-parallel-size may use
    together with this one."""
    others = [str(ordinal) for ordinal, reaches in enumerate(reached) if reaches]
    apart = len(reached) - len(others)
    text = f"{len(reached)}, of which each --tensor-parallel-size may have: {', '.join(others)}"
    if len(reached) == 1:
        return "1"
    return f"{text}; the memory of {apart} more cannot be reached" if apart else text


def _needs(config: EngineConfig) -> devices.ModelNeeds:
    return devices.needs_of(hub.resolve(config.model, offline=True).path, config)


def _measure(driver: Any, lines: dict[str, str], data: dict[str, Any]) -> None:
    try:
        found = ceilings.measure(driver)
    except EngineFault as fault:
        lines["measured"] = f"not: {fault.message}"
        return
    data["measured"] = asdict(found)
    lines["copy"] = f"{found.copy_gb_s:,.0f} GB/s"
    lines["bf16 products"] = f"{found.bf16_gop_s / 1000:,.1f} TFLOP/s by our own kernel"
    if machine_limits.store_ceilings(found):
        lines["kept"] = (
            f"in {machine_limits.devices_file()}, the best so far: /metrics has shares of it"
        )
