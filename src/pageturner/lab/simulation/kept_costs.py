"""What steps cost on this machine, kept from one comparison to the next.

Owns the file, what it is kept under (processor, threads, model, kernels), and when a newer measurement takes
the place of an older one. Must not know how anything was measured, nor what is reckoned with it.

Advice that rests on a fit of the latest run changes with whatever else the machine did meanwhile. Costs that
are kept do not: the same question gets the same answer, until a quieter measurement replaces a disturbed one.
"""

from __future__ import annotations

import math
import os
from hashlib import blake2b
from pathlib import Path

import msgspec

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, model_mark
from pageturner.engine.machine_limits import processor
from pageturner.formats import hub
from pageturner.lab.simulation.step_cost import FEATURES, CalibratedCost
from pageturner.telemetry.work import MachineLimits

QUIETER = 0.1  # less of the machine taken by others, as a share: worth more than what is kept


class KeptCosts(msgspec.Struct, frozen=True):
    """cost: of a step. others: share of the machine that others took while it was measured. when: the day, in
    words. pace: GOP/s of int8 and fp32 by which steps were sized; None where nothing was known."""

    cost: CalibratedCost
    others: float
    when: str
    pace: tuple[float | None, float | None] | None = None

    def limits(self) -> MachineLimits | None:
        """As steps are sized by them: reading hides behind computing."""
        return MachineLimits(math.inf, *self.pace) if self.pace else None


def pace_of(built: LoadedEngine) -> tuple[float | None, float | None] | None:
    """What is kept of the limits by which this engine sizes its steps."""
    return (built.pace.int8_gop_s, built.pace.fp32_gop_s) if built.pace else None


def costs_file(built: LoadedEngine, config: EngineConfig) -> Path:
    """Beside the limits of the machine."""
    threads = config.threads or len(os.sched_getaffinity(0))
    key = repr((processor(), threads, model_mark(config), built.fingerprint))
    name = f"{Path(config.model).stem}-{blake2b(key.encode(), digest_size=6).hexdigest()}.json"
    return hub.cache_folder().parent / "steps" / name


def kept_costs(path: Path) -> KeptCosts | None:
    """None where nothing is kept that this program understands."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=KeptCosts)
    except (OSError, msgspec.DecodeError):
        return None
    weights = found.cost.weights
    return found if len(weights) == len(FEATURES) and min(weights) >= 0 else None


def keep(path: Path, mine: KeptCosts) -> KeptCosts:
    """The costs to reckon with from now on: those that are kept, unless these are from a clearly quieter
    machine. Where the file cannot be written nothing is kept."""
    known = kept_costs(path)
    if known is not None and mine.others > known.others - QUIETER:
        return known
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(mine), indent=2))
        temporary.replace(path)
    except OSError:
        return mine
    return mine
