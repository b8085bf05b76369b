"""The backend of a rank that has a GPU: tensor parallel with a process for each device.

Owns what rank 0 says to the others beside what it says on the CPU (`kernels.comm`), and which of a
step's rows logits are wanted of. What goes between devices is in exchange.py. Must not know models
or requests.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels import comm
from pageturner.kernels.adapters import Adapters, AdapterWeights
from pageturner.kernels.base import F32, I32, Batch, KVSpec, Stack
from pageturner.kernels.choosing import (
    ChooseArgs,
    ChoosesLater,
    Draw,
    Head,
    SamplerOutput,
)
from pageturner.kernels.gpu.arrays import GpuArray
from pageturner.kernels.gpu.exchange import DeviceExchange
from pageturner.kernels.gpu.launches import GpuKV
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.sampling import Chosen

_HANDLE = 64  # bytes of what memory is opened by
_JOIN, _FREE, _ROOM, _CHOSEN = 20, 21, 22, 23  # calls, beside those of kernels.comm


class GpuTensorParallelOps(comm.RankOps):
    """Each rank has a device, and a slice of every layer, of its KV heads, and of the vocabulary.
    Rank 0 gathers logits on its device and chooses there."""

    own: GpuOps

    def __init__(self, communicator: comm.Communicator, own: GpuOps, **how: int | None) -> None:
        """how: further settings of `DeviceExchange`."""
        super().__init__(communicator, own)
        rank, size = communicator.rank, communicator.size
        self._exchange = DeviceExchange(own.driver, own.arena, rank, size, **how)  # type: ignore[arg-type]
        self._exchange.tell = self._telling
        self._rows: list[
            tuple[GpuArray, I32]
        ] = []  # arrays of hidden rows, and which of the step's they are

    @property
    def later(self) -> ChoosesLater:
        return self

    # -- beginning and end -------------------------------------------------------------------------
    def assemble(self, ended: list[int]) -> None:
        """Also opens the memory of all devices at each other."""
        super().assemble(ended)
        with self._together(_JOIN):
            self._join()
        self._meet()
        _watch(ended, self._exchange)

    def follow(self, head: Head, ended: list[int]) -> None:
        """Do as on the CPU. A kernel that waits for a rank that has ended gives up."""
        _watch(ended, self._exchange)
        super().follow(head, ended)

    def _join(self) -> None:
        words = np.zeros((self.comm.size, _HANDLE // 4), np.uint32)
        words[self.comm.rank] = np.frombuffer(self._exchange.handle, np.uint32)
        every = np.array(self._summed(words.reshape(-1).tolist()), np.uint32).reshape(words.shape)
        self._exchange.open([one.tobytes() for one in every])
        self._exchange.starts = self.slices.starts
        self.own.exchange = self._exchange

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Rank 0 computes its slices as if they were the whole, and the others hear nothing of
        it."""
        self.own.exchange = None
        try:
            yield
        finally:
            self.own.exchange = self._exchange

    def _look(self) -> None:
        """EngineFault('rank_lost') where a rank was lost in what was computed."""
        if self._exchange.lost:
            raise EngineFault("rank_lost", self.give_up("an exchange between GPUs was given up"))

    def _make(self, call: int, arrays: list[I32], head: Head) -> None:
        if self._exchange.lost:
            raise EngineFault("rank_lost", "rank 0 did not come to an exchange between GPUs")
        if call == _JOIN:
            self._join()
        elif call == _FREE:
            self._free(int(arrays[0][0]))
        elif call == _ROOM:
            self._summed(self._room())
        elif call == _CHOSEN:
            self._exchange.share(self.own.launches.chosen, int(arrays[0][0]))
        else:
            super()._make(call, arrays, head)

    # -- storage -----------------------------------------------------------------------------------
    def _mine(self, spec: KVSpec) -> KVSpec:
        return comm.kv_of_rank(spec, self._stack)

    def alloc_kv(self, spec: KVSpec) -> GpuKV:
        """Do it at all ranks."""
        found: GpuKV
        found = super().alloc_kv(spec) if self.own.divided else self.own.alloc_kv(self._mine(spec))
        return found

    def free_kv(self, kv: GpuKV) -> None:
        """Give its memory back, at all ranks."""
        if not self.own.divided:
            self.own.free_kv(kv)
            return
        place = self._place(kv)
        with self._together(_FREE, np.array([place], np.int32)):
            self._free(place)

    def _free(self, place: int) -> None:
        self.own.free_kv(self._storage[place])
        self._storage[place] = None

    def free_for_kv(self) -> int:
        """Bytes that KV of all ranks together may have: the device with the least room decides."""
        with self._together(_ROOM):
            numbers = np.array(self._summed(self._room())).reshape(-1, 2)
        heads = numbers[:, 1]
        return int(min(free // mine for free, mine in numbers.tolist()) * heads.sum())

    def _room(self) -> list[int]:
        """Free bytes and KV heads, at this rank's place."""
        assert self._stack is not None
        numbers = np.zeros((self.comm.size, 2), np.int64)
        numbers[self.comm.rank] = self.own.free_memory(), self._stack.layers[0].shape.kv_heads
        found: list[int] = numbers.reshape(-1).tolist()
        return found

    def pack_adapter(self, weights: AdapterWeights, stack: Stack) -> Any:
        """EngineFault: not yet."""
        message = "adapters are not computed by several GPUs yet: use --tensor-parallel-size 1"
        raise EngineFault("model_unsupported", message)

    # -- composites --------------------------------------------------------------------------------
    def hidden(self, stack: Stack, batch: Batch, kv: GpuKV, sliding: Any) -> GpuArray:
        """A step of all ranks, whose rows lie on every device."""
        if not self.own.divided:
            return self.own.hidden(stack, batch, kv, sliding)
        found: GpuArray = super().hidden(stack, batch, kv, sliding)
        self._rows = [(found, np.arange(len(found), dtype=np.int32))]
        return found

    def take_rows(self, x: GpuArray, rows: I32) -> GpuArray:
        """Return logits of hidden rows."""
        taken = self.own.take_rows(x, rows)
        self._rows.append((taken, self._rows_of(x)[rows]))
        return taken

    def _rows_of(self, x: GpuArray) -> I32:
        """Return which of the last step's hidden rows these are."""
        for array, rows in reversed(self._rows):
            first = (x.address - array.address) // (4 * array.shape[1])
            if 0 <= first <= len(array) - len(x):
                return rows[first : first + len(x)]
        raise AssertionError("these are no hidden rows of the last step")

    def _telling(self, x: GpuArray) -> AbstractContextManager[None]:
        return self._together(comm.LOGITS, self._rows_of(x), np.empty(0, np.int32))

    def _share_logits(self, arrays: list[I32], head: Head) -> None:
        """A rank but 0: its columns of these rows of the last step."""
        assert self.found is not None
        mark = self.own.arena.mark
        self.own.raw_logits(self.own.take_rows(self.found, arrays[0]), head)
        self.own.arena.reset(mark)

    def to_numpy(self, x: GpuArray) -> F32:
        """A copy on the host."""
        found = self.own.to_numpy(x)
        self._look()
        return found

    def logits(self, x: GpuArray, head: Head, adapters: Adapters | None = None) -> F32:
        """Logits of x [R, d] on the host: [R, V]."""
        self._alive()
        found = self.own.logits(x, head, adapters)
        self._look()
        return found

    def choose(self, x: GpuArray, head: Head, args: ChooseArgs) -> SamplerOutput:
        """Choose as one device does, from the logits of all ranks."""
        self._alive()
        found = self.own.choose(x, head, args)
        self._look()
        return found

    def launch_step(
        self, stack: Stack, batch: Batch, kv: GpuKV, sliding: Any, head: Head, draw: Draw
    ) -> Chosen:
        """Launch as one device does. The tokens that rank 0 chooses go to the devices of the
        others, whose next step may be begun before anybody knows them."""
        if not self.own.divided:
            return self.own.launch_step(stack, batch, kv, sliding, head, draw)
        hidden = self.hidden(stack, batch, kv, sliding)
        chosen = self.own.launch_choice(hidden, head, draw, None)
        if chosen.rows:
            with self._together(_CHOSEN, np.array([chosen.rows], np.int32)):
                self._exchange.share(self.own.launches.chosen, chosen.rows)
        return chosen

    def collect(self, chosen: Chosen) -> SamplerOutput:
        """Wait for it."""
        found = self.own.collect(chosen)
        self._look()
        return found


def _watch(ended: list[int], exchange: DeviceExchange) -> None:
    """Stop the exchange when one of these files becomes readable: another process has ended."""
    if not ended:
        return
    files, what = [os.dup(fd) for fd in ended], weakref.ref(exchange)

    def wait() -> None:
        select.select(files, [], [])
        for fd in files:
            os.close(fd)
        if (found := what()) is not None:
            found.stop()

    threading.Thread(target=wait, name="pageturner-ranks", daemon=True).start()
