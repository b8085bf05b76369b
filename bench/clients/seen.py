"""What a script of a client saw: named checks with expectations that held or not, and one line of JSON.

Standard library only: it runs in each client's environment. A check that expected nothing has not passed.

    {"client": "openai", "version": "2.1", "checks": {"chat": true, "tools": "no call"}, "figure": "..."}
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

# A tool that all clients offer: two arguments, one of them of a few words.
CITY = "What is the weather in Paris, in celsius? Use the tool."
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The present weather of a city.",
        "parameters": WEATHER_SCHEMA,
    },
}
_held: list[str] = []  # expectations of the check that runs


class Unexpected(Exception):
    """An expectation that did not hold."""


def expect(held: object, what: str) -> None:
    """what: said where it did not hold."""
    if not held:
        raise Unexpected(what)
    _held.append(what)


def expect_equal(one: object, other: object, what: str) -> None:
    expect(one == other, f"{what}: {one!r:.300} is not {other!r:.300}")


def expect_weather(arguments: object) -> None:
    """Arguments, or their text, are those of the tool."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    right = isinstance(values, dict) and sorted(values) == ["city", "unit"]
    right = (
        right and isinstance(values["city"], str) and values["unit"] in ("celsius", "fahrenheit")
    )
    expect(right, f"not the arguments of get_weather: {arguments!r:.200}")


def told(error: BaseException) -> str:
    """An exception in a line."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]


class Seen:
    """The checks of one client, in the order in which they are run.

    package: the distribution whose version is told.
    """

    def __init__(self, client: str, package: str) -> None:
        self._client, self._version = client, version(package)
        self._checks: dict[str, bool | str] = {}
        self._loop = asyncio.Runner()  # one for all: clients keep connections
        self.figure = ""

    def check(self, function: Callable[[], Any]) -> None:
        """Run a check, which is called as its function is."""
        name, begin = function.__name__, time.monotonic()
        _held.clear()
        try:
            if inspect.iscoroutinefunction(function):
                self._loop.run(function())
            else:
                function()
            self._checks[name] = True if _held else "expected nothing"
        except (Exception, SystemExit) as error:
            self._checks[name] = told(error)
        verdict = "ok" if self._checks[name] is True else self._checks[name]
        print(f"{name}: {verdict} ({time.monotonic() - begin:.1f} s)", file=sys.stderr, flush=True)

    def tell(self) -> None:
        """The line of JSON."""
        line = {"client": self._client, "version": self._version, "checks": self._checks}
        print(json.dumps(line | {"figure": self.figure}), flush=True)


def metric(url: str, name: str) -> float:
    """The sum of a metric's samples of a server, whose engine tells what it did once a second."""
    time.sleep(1.5)
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + "{", name + " "))
    )
