"""`pageturner calibrate`: how long a step takes on this machine, for `pageturner simulate`.

Owns the flags and what is printed. The loads, the fit and the check are in
lab/simulation/calibration.py.
"""

from __future__ import annotations

import argparse
import itertools
import os
import textwrap
from statistics import median
from typing import TYPE_CHECKING

from pageturner.config import settings as configuration
from pageturner.config.flag_table import add_flags, check_range
from pageturner.errors import bad_setting

if TYPE_CHECKING:
    from pageturner.lab.simulation.calibration import Check
    from pageturner.lab.simulation.step_cost import CalibratedCost


GOOD, ROUGH = (
    0.1,
    0.25,
)  # median relative errors up to which a plan may be made, or settings compared
WIDTH = 100  # columns
BUSY = 1.5  # load average beyond which other programs take part of each processor of ours


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_flags(parser, "calibrate")
    configuration.add_flags(parser, "engine", leave_out=("model", "step_log", "step_log_tokens"))


def main(arguments: argparse.Namespace) -> int:
    """Measure, fit, write; with --check, compare."""
    from pageturner.lab.bench.engine_bench import EngineBench
    from pageturner.lab.simulation import calibration, recorded_runs

    checks: list[Check] = []
    busy = not arguments.log and _busy()
    if arguments.log:
        if arguments.check:
            raise bad_setting("--check runs an engine, and --log none: give one of them")
        cost = calibration.fit_runs(recorded_runs.last_run(arguments.log))
    else:
        check_range(arguments, "6 or more", "num_prompts", "input_len", "output_len")
        flags = configuration.from_flags(arguments)
        flags["engine"]["model"] = arguments.model
        sizes = (arguments.input_len, arguments.output_len, arguments.num_prompts)
        bench = EngineBench.load(configuration.load(arguments.config, flags).engine)
        cost, checks = calibration.calibrate(bench, sizes, arguments.seed, check=arguments.check)
    cost.save(arguments.output)
    print(render(cost, checks))
    print(f"written to {arguments.output}")
    print(textwrap.fill(verdict(cost, checks, busy), WIDTH))
    return 0


def verdict(cost: CalibratedCost, checks: list[Check], busy: bool) -> str:
    """Tell whether to plan with it, and otherwise what to do. checks: loads it had not seen, which
    count more than the steps of the fit. busy: other programs ran meanwhile."""
    errors = [abs(error) for check in checks for error in check.errors.values()]
    error = median(errors) if errors else cost.error[0]
    of = "of predicted throughput, TTFT and TPOT" if errors else "of a step"
    found = f"median error {error:.1%} {of}"
    if error <= GOOD:
        return f"verdict: the cost model fits ({found}): good enough for planning"
    advice = "stop what else runs on this machine, then calibrate" if busy else "calibrate"
    advice = f"to have it better, {advice} again with more requests (--num-prompts 180)"
    if error <= ROUGH:
        use = f"good for comparing settings; keep {error:.0%} in reserve when you count machines"
        return f"verdict: the cost model fits roughly ({found}): {use}; {advice}"
    return f"verdict: the cost model does not fit ({found}): do not plan with it; {advice}"


def _busy() -> bool:
    """Return whether this machine has more to do than it has processors for us, before we begin."""
    return os.getloadavg()[0] > BUSY * len(os.sched_getaffinity(0))


def render(cost: CalibratedCost, checks: list[Check]) -> str:
    """The weights, the fit's own error, and each check."""
    from pageturner.lab.reporting.summary import table
    from pageturner.lab.simulation.step_cost import FEATURES, LEVELS

    names = [*FEATURES, *(f"{rows} rows or more" for rows in LEVELS)]
    more = [after - before for before, after in itertools.pairwise(cost.levels)]
    weights = ", ".join(
        f"{name} {1e6 * w:,.4g}" for name, w in zip(names, cost.weights + more, strict=True) if w
    )
    gap = f"{1e6 * cost.gap:,.0f}"
    lines = [
        textwrap.fill(
            f"{cost.steps:,} steps; microseconds for each: {weights}; between two {gap}", WIDTH
        ),
        f"of these steps half are within {cost.error[0]:.1%}, 90 % within {cost.error[1]:.1%}",
    ]
    if checks:
        names = [*checks[0].errors]
        rows: list[list[object]] = [
            [check.load, *(f"{check.errors[name]:+.1%}" for name in names), f"{check.drift:.3f}"]
            for check in checks
        ]
        middle = [f"{median(abs(check.errors[name]) for check in checks):.1%}" for name in names]
        rows.append(["median of sizes", *middle, f"{median(check.drift for check in checks):.3f}"])
        steady = [f"{median(abs(check.steady[name]) for check in checks):.1%}" for name in names]
        rows.append(["without the drift", *steady, "1"])
        lines += [
            "predicted beside measured, loads that the fit had not seen:",
            table(rows, ["load", *names, "drift"]),
            "drift: seconds that the steps took, by seconds that a fit of runs before and behind says",
        ]
    return "\n".join(lines)
