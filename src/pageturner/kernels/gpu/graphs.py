"""Recordings of steps that only decode: made when a size comes again, replayed with one call.

Owns which steps share a recording. The arena gives a step of one size the same addresses each time, so only
its integers are new; where the factors of adapters lie is among these, so all adapters of the same ranks
share a recording.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pageturner.errors import EngineFault
from pageturner.kernels.base import Batch, Stack
from pageturner.kernels.gpu.adapter_rows import shape_of
from pageturner.kernels.gpu.arrays import Arena, GpuArray
from pageturner.kernels.gpu.catalogue import SEGMENT
from pageturner.kernels.gpu.driver import Driver, Graph
from pageturner.kernels.gpu.launches import GpuKV
from pageturner.kernels.gpu.steps import bucket, pad, recordable, segments_bucket

if TYPE_CHECKING:
    from pageturner.kernels.gpu.ops import GpuOps

MOST_ROWS = 512  # steps of more are long beside their launches
MOST_GRAPHS = 64
USES = 2  # a size is recorded when it comes for the second time

_Key = tuple[int, int, int, int, tuple[tuple[str, bytes], ...]]  # stack, KV, rows, segments, adapters


@dataclass(slots=True)
class _Recorded:
    graph: Graph
    out: GpuArray
    mark: int


class Graphs:
    """Recordings by size, made when a size comes for the second time. There are at most MOST_GRAPHS: beyond
    that a size takes the place of the one that was used least, once it has come twice as often."""

    def __init__(self, driver: Driver, arena: Arena) -> None:
        self._driver = driver
        self._arena = arena
        self._uses: dict[_Key, int] = {}
        self.recorded: dict[_Key, _Recorded] = {}

    def run(self, ops: GpuOps, stack: Stack, batch: Batch, kv: GpuKV, groups: set[int]) -> GpuArray | None:
        """Hidden rows of the step by a recording, which is made if it is time; None: compute it otherwise."""
        if not recordable(batch) or len(batch.tokens) > MOST_ROWS:
            return None
        rows, segments = bucket(len(batch.tokens)), segments_bucket(batch)
        key = (id(stack), kv.keys, rows, segments, shape_of(batch.adapters))
        self._uses[key] = self._uses.get(key, 0) + 1
        if key not in self.recorded and not self._has_place(key):
            return None
        width = -(-segments * SEGMENT // kv.spec.block_size)
        step = ops.step(pad(batch, rows, width), groups, segments)
        if key not in self.recorded:
            self.recorded[key] = self._record(ops, stack, step, kv)
        found = self.recorded[key]
        self._driver.replay(found.graph)
        self._arena.reset(found.mark)
        return GpuArray(found.out.address, (len(batch.tokens), found.out.shape[1]))

    def _has_place(self, key: _Key) -> bool:
        """Whether it is time to record this size; makes room for it. Who decodes on with longer contexts will
        come again."""
        grown = any((one[:3], one[4]) == (key[:3], key[4]) for one in self.recorded)
        if self._uses[key] < USES and not grown:
            return False
        if len(self.recorded) < MOST_GRAPHS:
            return True
        least = min(self.recorded, key=self._uses.__getitem__)
        if self._uses[key] < 2 * self._uses[least]:
            return False
        self._driver.forget(self.recorded.pop(least).graph)
        return True

    def _record(self, ops: GpuOps, stack: Stack, step: Any, kv: GpuKV) -> _Recorded:
        for layer in stack.layers:  # what is put on the device once is put there now
            ops.launches.prepare(layer)
        self._driver.begin_recording()
        try:
            out = ops.layers(stack, step, kv, None)
        except BaseException:
            with suppress(
                EngineFault
            ):  # what was half recorded is of no use, and what stopped it is to be told
                self._driver.forget(self._driver.end_recording())
            raise
        return _Recorded(self._driver.end_recording(), out, self._arena.mark)

    def release(self) -> None:
        """Give back what the recordings take; sizes are counted anew."""
        for one in self.recorded.values():
            self._driver.forget(one.graph)
        self.recorded.clear()
        self._uses.clear()
