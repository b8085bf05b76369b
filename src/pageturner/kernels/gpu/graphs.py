"""Recordings of small steps, with the choice of tokens or without: made when a size comes again,
replayed with one call.

Owns which steps share a recording. The arena gives a step of one size the same addresses each time,
so only its integers are new; where the factors of adapters lie is among these, so all adapters of
the same ranks share a recording.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pageturner.errors import EngineFault
from pageturner.kernels.base import Batch, Stack
from pageturner.kernels.gpu.adapter_rows import of_wanted, shape_of
from pageturner.kernels.gpu.arrays import Arena, GpuArray
from pageturner.kernels.gpu.driver import Driver, Graph
from pageturner.kernels.gpu.launches import GpuKV, Launches
from pageturner.kernels.gpu.sampling import StepChoice
from pageturner.kernels.gpu.steps import (
    AttentionView,
    Room,
    Step,
    fits_at_once,
    pad,
    pad_draw,
    room_of,
    sizes_of,
)

MAX_ROWS = 512  # steps of more are long beside their launches
MAX_GRAPHS = 64
USES = 2  # a size is recorded when it comes for the second time
MIXED_USES = 3  # of steps with rows of prompts or drafts, whose sizes vary more
LIFE = 1024  # steps behind which all counts of uses are halved
NEVER = -(
    1 << 20
)  # uses of a size that did not fit: it is not tried again for some twenty thousand steps

Pages = Sequence[tuple[Batch, GpuKV]]  # a step with its KV, and once more for layers with a window


class _Key(NamedTuple):
    """The facts that a recording depends on. kv: addresses; choice: as `StepChoice.key`."""

    stack: int
    kv: tuple[int, ...]
    rows: int
    wanted: int
    adapters: tuple[Any, Any]
    choice: tuple[int, bool] | None
    room: Room

    @property
    def decodes(self) -> bool:
        """True if it is of steps that only decode."""
        return self.room.tiles == 0 and self.room.rows == 1


@dataclass(slots=True)
class Recorded:
    """out: hidden rows, of which the last ones fill the recording up and are nobody's; mark: of the
    arena; chosen: whether their tokens are chosen, too, as `GpuOps.choose_recorded` does."""

    graph: Graph
    out: GpuArray
    mark: int
    chosen: bool


class Recordable(Protocol):
    """The parts of a step that a recording is made of, which `GpuOps` has."""

    @property
    def launches(self) -> Launches: ...

    def begin(self) -> None: ...

    def steps(
        self,
        pages: Pages,
        views: Sequence[Collection[AttentionView]],
        room: Room,
        draw: Sequence[Any],
    ) -> list[tuple[Step, GpuKV]]: ...

    def layers(self, stack: Stack, steps: list[tuple[Step, GpuKV]]) -> GpuArray: ...

    def choose_recorded(self, hidden: GpuArray, step: Step, choice: StepChoice) -> None: ...


class Graphs:
    """Recordings by size, made when a size comes for the second time. There are at most MAX_GRAPHS:
    beyond that a size takes the place of the one that was used least, once it has come twice as
    often. A recording for which the memory is not there is given up, and its steps run without
    one."""

    def __init__(self, driver: Driver, arena: Arena) -> None:
        self._driver = driver
        self._arena = arena
        self._uses: dict[_Key, int] = {}
        self._steps = 0
        self.recorded: dict[_Key, Recorded] = {}

    def run(
        self,
        ops: Recordable,
        stack: Stack,
        pages: Pages,
        views: list[set[AttentionView]],
        choice: StepChoice | None = None,
    ) -> Recorded | None:
        """The step by a recording, which is made if it is time; None: compute it otherwise. A
        choice for whose logits there is no memory is left out."""
        batch = pages[0][0]
        if not 0 < len(batch.tokens) <= MAX_ROWS or not len(batch.logit_rows):
            return None
        rows, wanted = sizes_of(batch)
        room = room_of(batch, set().union(*views), self._driver.architecture, rows)
        if not all(fits_at_once(seen, rows, room, self._arena) for seen in views):
            return None
        kv = tuple(kv.keys for _, kv in pages)
        adapters = shape_of(batch.adapters), shape_of(of_wanted(batch))
        key = _Key(id(stack), kv, rows, wanted, adapters, choice.key if choice else None, room)
        if choice and self._used(key) < 0:
            return self.run(ops, stack, pages, views)
        self._count(key)
        chosen = key if key in self.recorded or self._has_place(key) else self._with_more_room(key)
        if chosen is None:
            return None
        try:
            found = self._replayed(chosen, ops, stack, pages, views, choice)
        except EngineFault as fault:
            if fault.code != "gpu_memory":
                raise
            self._give_up(chosen)
            ops.begin()
            return None
        self._arena.reset(found.mark)
        return found

    def _replayed(
        self,
        key: _Key,
        ops: Recordable,
        stack: Stack,
        pages: Pages,
        views: list[set[AttentionView]],
        choice: StepChoice | None,
    ) -> Recorded:
        """EngineFault('gpu_memory') where the recording, or what it computes, does not fit."""
        padded = [(pad(batch, key.rows, key.wanted), kv) for batch, kv in pages]
        draw = pad_draw(choice.draw, key.wanted) if choice else ()
        steps = ops.steps(padded, views, key.room, draw)
        if key not in self.recorded:
            self.recorded[key] = self._record(ops, stack, steps, choice)
        self._driver.replay(self.recorded[key].graph)
        return self.recorded[key]

    def _count(self, key: _Key) -> None:
        """Count a use. Old uses count less, and at last nothing, so that the sizes that are
        remembered are bounded."""
        self._steps += 1
        if self._steps % LIFE == 0:
            halves = {one: int(uses / 2) for one, uses in self._uses.items()}
            self._uses = {one: uses for one, uses in halves.items() if uses}
        self._uses[key] = self._uses.get(key, 0) + 1

    def _has_place(self, key: _Key) -> bool:
        """Return whether it is time to record this size, and make place for it. Contexts that have
        grown beyond the room of another recording will come again."""
        if self._uses[key] < 0:
            return False
        grown = key.decodes and any(
            one.room.segments < key.room.segments for one in self._like(key)
        )
        if self._uses[key] < (USES if key.decodes else MIXED_USES) and not grown:
            return False
        if len(self.recorded) < MAX_GRAPHS:
            return True
        least = min(self.recorded, key=self._used)
        if self._uses[key] < 2 * self._used(least):
            return False
        self._driver.forget(self.recorded.pop(least).graph)
        return True

    def _with_more_room(self, key: _Key) -> _Key | None:
        """The recording of other contexts that does for these, with at most as many works again."""
        most = 2 * key.room.segments
        larger = [one for one in self._like(key) if key.room.segments < one.room.segments <= most]
        return min(larger, key=lambda one: one.room, default=None)

    def _like(self, key: _Key) -> list[_Key]:
        """The recordings that differ by the segments of their contexts alone."""
        return [
            one for one in self.recorded if one[:-1] == key[:-1] and one.room[1:] == key.room[1:]
        ]

    def _used(self, key: _Key) -> int:
        return self._uses.get(key, 0)

    def _give_up(self, key: _Key) -> None:
        self._uses[key] = NEVER
        if key in self.recorded:
            self._driver.forget(self.recorded.pop(key).graph)

    def _record(
        self,
        ops: Recordable,
        stack: Stack,
        steps: list[tuple[Step, GpuKV]],
        choice: StepChoice | None,
    ) -> Recorded:
        for layer in stack.layers:  # what is put on the device once is put there now
            ops.launches.prepare(layer)
        self._driver.begin_recording()
        try:
            out = ops.layers(stack, steps)
            if choice:
                ops.choose_recorded(out, steps[0][0], choice)
        except BaseException:
            with suppress(
                EngineFault
            ):  # half a recording is of no use, and what stopped it is to be told
                self._driver.forget(self._driver.end_recording())
            raise
        return Recorded(self._driver.end_recording(), out, self._arena.mark, choice is not None)

    def release(self) -> None:
        """Give back what the recordings take; sizes are counted anew."""
        for one in self.recorded.values():
            self._driver.forget(one.graph)
        self.recorded.clear()
        self._uses.clear()
