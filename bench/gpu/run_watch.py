"""A driver with a watch: when the device begins and ends each piece of work, and how long the host waits.

Owns the events. It stands in front of a driver, whatever that offers; what is allocated through it can be
given back all at once, so that a part can load one model after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

WORK = ("launch", "replay", "copy", "clear", "upload", "upload_file", "download")
WAITS = ("download", "synchronise", "wait", "collect")
GAPS_US = (2, 5, 10, 20, 50, 100, 200, 1000)  # upper ends of the histogram's classes


class HostClock:
    """Of a device that works while it is called."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)


class DeviceClock:
    """CUDA events on the driver's stream."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._cu, self._stream = driver._cu, driver._stream

    def _ask(self, found: tuple[Any, ...]) -> Any:
        if int(found[0]):
            raise RuntimeError(f"an event failed: {found[0]}")
        return found[1] if len(found) > 1 else None

    def mark(self) -> Any:
        event = self._ask(self._cu.cuEventCreate(0))
        self._ask(self._cu.cuEventRecord(event, self._stream))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        ask = getattr(self._cu, "cuEventElapsedTime_v2", self._cu.cuEventElapsedTime)
        return 1e-3 * float(self._ask(ask(begin, end)))


class Watched:
    """A driver; `watching` makes it note the device's time around each piece of work.

    share   of how many parts the device's memory is told to be
    waited  seconds that the host spent waiting for the device
    calls   pieces of work so far
    """

    def __init__(self, inner: Any, clock: Any = None, share: int = 1) -> None:
        self.inner = inner
        self._share = share
        self.waited = 0.0
        self.calls = 0
        self._sizes: dict[int, int] = {}
        self._graphs: list[Any] = []
        self._marks: list[tuple[Any, Any, str]] | None = None
        self._recording = False
        fake = getattr(inner, "_cu", None) is None
        self._clock: Any = clock or (HostClock() if fake else DeviceClock(inner))

    @property
    def dependent_launch(self) -> bool:
        return bool(getattr(self.inner, "dependent_launch", False))

    @dependent_launch.setter
    def dependent_launch(self, allowed: bool) -> None:
        self.inner.dependent_launch = allowed

    def memory(self) -> tuple[int, int]:
        """Free and all bytes; of a share as if what the others have were not there."""
        free, total = self.inner.memory()
        if self._share == 1:
            return int(free), int(total)
        mine = total // self._share
        return min(int(free), max(0, mine - sum(self._sizes.values()))), mine

    def alloc(self, nbytes: int) -> int:
        address = int(self.inner.alloc(nbytes))
        self._sizes[address] = nbytes
        return address

    def free(self, address: int) -> None:
        self.inner.free(address)
        self._sizes.pop(address, None)

    def release(self) -> None:
        """Give back all recordings and all memory that were taken through the watch."""
        self.inner.synchronise()
        while self._graphs:
            self.inner.forget(self._graphs.pop())
        for address in sorted(self._sizes):
            self.inner.free(address)
        self._sizes.clear()

    def close(self) -> None:
        """Nothing: the device is the room's, whose next engine has it when this one is dropped."""

    def begin_recording(self) -> None:
        self._recording = True  # an event in between would become part of the recording
        self.inner.begin_recording()

    def end_recording(self) -> Any:
        self._recording = False
        self._graphs.append(self.inner.end_recording())
        return self._graphs[-1]

    def forget(self, graph: Any) -> None:
        self.inner.forget(graph)
        self._graphs = [one for one in self._graphs if one is not graph]

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name in WORK or name in WAITS:
            return self._noted(name, value)
        return value

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            if self._recording:
                return call(*arguments, **named)
            self.calls += name in WORK
            marked = self._marks is not None and name in WORK
            begin = self._clock.mark() if marked else None
            at = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                if name in WAITS:
                    self.waited += time.perf_counter() - at
                if marked and self._marks is not None:
                    what = " ".join(map(str, arguments[:2])) if name == "launch" else name
                    self._marks.append((begin, self._clock.mark(), what))

        return noted

    # -- watching --------------------------------------------------------------------------------------------
    def watch(self) -> None:
        """Note from now on. Two events around each piece of work cost some microseconds of the host, so the
        idle time that is found is at most too long."""
        self._marks = []

    def unwatch(self) -> dict[str, Any]:
        """Busy and idle time of the device since `watch`, and a histogram of the gaps between its work."""
        marks, self._marks = self._marks or [], None
        self.inner.synchronise()
        busy = [self._clock.seconds(begin, end) for begin, end, _ in marks]
        gaps = [self._clock.seconds(marks[i][1], marks[i + 1][0]) for i in range(len(marks) - 1)]
        edges = [0.0, *(1e-6 * one for one in GAPS_US), np.inf]
        counts, _ = np.histogram(np.maximum(gaps, 0.0), edges)
        names = [f"<{one}us" for one in GAPS_US] + [f">={GAPS_US[-1]}us"]
        whole = sum(busy) + sum(gaps)
        return {
            "busy_s": sum(busy),
            "idle_s": sum(gaps),
            "idle_share": sum(gaps) / whole if whole else 0.0,
            "gaps": dict(zip(names, counts.tolist(), strict=True)),
            "pieces": len(marks),
        }

    def by_name(self) -> dict[str, tuple[float, int]]:
        """Milliseconds and how often since `watch`, by kind of work; of launches by kernel and grid."""
        marks, self._marks = self._marks or [], None
        self.inner.synchronise()
        found: dict[str, tuple[float, int]] = {}
        for begin, end, what in marks:
            ms, count = found.get(what, (0.0, 0))
            found[what] = ms + 1e3 * self._clock.seconds(begin, end), count + 1
        return found
