"""What each test costs in seconds of processor time, its own and that of the processes it waited for.

    pytest -p support.cpu_times -m slow            prints the sum, and the files and tests that cost most

Unlike `--durations` this hardly depends on who else uses the machine. Those of xdist workers are
summed up.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Generator

import pytest

KEY = "cpu_seconds"
SHOWN = int(os.environ.get("PAGETURNER_CPU_SHOWN", "25"))
costs: Counter[str] = Counter()


def spent() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.user_properties.append((KEY, spent()))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "teardown":
        began = dict(item.user_properties)[KEY]
        report.user_properties = [(KEY, spent() - float(str(began)))]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        costs[report.nodeid] += float(dict(report.user_properties).get(KEY, 0.0))  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    files: Counter[str] = Counter()
    for test, seconds in costs.items():
        files[test.partition("::")[0]] += seconds  # type: ignore[assignment]
    say = terminalreporter.write_line
    say(f"processor time of {len(costs)} tests: {costs.total():.1f} s")
    for name, seconds in (*files.most_common(SHOWN), *costs.most_common(SHOWN)):
        say(f"{seconds:8.2f} s  {name}")
