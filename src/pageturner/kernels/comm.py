"""Tensor parallel on the CPU: the native backend of processes (ranks) that have a slice of each layer.

Owns what goes between ranks: rank 0, which has the engine, says each call to the others, once a step the
batch, and all make it on their own slices and their own KV storage, with the same block tables. What is
summed over ranks inside of a call is the affair of native/comm.cpp: in the order of ranks, in fp32, so that
bits depend on the number of ranks alone. Must not know how processes are started, nor models or requests.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kernels.adapters import Adapter, Adapters, AdapterWeights
from pageturner.kernels.base import F32, I32, KV, KV_TYPES, Batch, Draw, KVSpec, Stack, Weight
from pageturner.kernels.choosing import Head, LogprobsWanted, SamplerOutput
from pageturner.kernels.composites import Composites
from pageturner.kernels.edits import Allowed, Edits
from pageturner.kernels.native import NativeOps
from pageturner.kernels.native_module import module

PLACE = 512 * 1024  # bytes that a rank writes at once
PATIENCE = 30.0  # seconds that ranks wait for one of them in the midst of a step
_LOADING = 1e9  # the same until all are there: what is wrong with one of them is seen otherwise
_KV, _COPY, _HIDDEN, _LOGITS, _CHECK = range(5)  # calls
_BATCH = (
    "tokens", "positions", "query_start", "context_len", "block_table", "slots", "logit_rows",
)  # fmt: skip
_NO_KV, _WITH_SLIDING = -1, 1

T = TypeVar("T")


class Communicator:
    """The shared memory of `size` ranks, as one of them sees it.

    fd  memory of `shared_memory(size)`
    """

    def __init__(self, fd: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.native = module().Ranks(fd, rank, size, PLACE)

    def watch(self, ended: list[int], patience: float = PATIENCE) -> None:
        """ended: files that become readable when another process ends, at rank 0 those of rank 1, 2, ..."""
        self.native.watch(ended, patience)

    def send(self, call: int, *arrays: NDArray[Any]) -> None:
        """A call of rank 0 to all others, with arrays of 4-byte numbers of one or two dimensions."""
        shapes = [len(arrays)]
        for one in arrays:
            shapes += [len(one), one.shape[1] if one.ndim > 1 else -1]
        head = np.array([call, *shapes], np.int32)
        parts = [np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in (head, *arrays)]
        self.native.send(np.concatenate(parts))

    def receive(self) -> tuple[int, list[I32]]:
        """What rank 0 sent."""
        data = np.frombuffer(self.native.receive(), np.int32)
        call, count = int(data[0]), int(data[1])
        at, arrays = 2 + 2 * count, []
        for rows, columns in data[2:at].reshape(-1, 2).tolist():
            size = rows * columns if columns >= 0 else rows
            arrays.append(data[at : at + size].reshape((rows, columns) if columns >= 0 else (rows,)))
            at += size
        return call, arrays


def shared_memory(size: int) -> int:
    """A file without a name for so many ranks, which goes when the last of them ends, however it ends."""
    fd = os.memfd_create("pageturner-ranks", os.MFD_CLOEXEC)
    pages = -(-module().Ranks.bytes(size, PLACE) // mmap.PAGESIZE)
    os.ftruncate(fd, pages * mmap.PAGESIZE)
    return fd


class TensorParallelOps:
    """An `Ops` around the native backend of one rank. Whatever is asked of that of rank 0, the others do in
    `follow`; what is not told to them, such as sampling, is rank 0's alone.

    starts  first token of each rank's slice of the vocabulary, and the end
    """

    def __init__(self, comm: Communicator, own: NativeOps, starts: tuple[int, ...] = ()) -> None:
        self.comm, self.own, self.starts = comm, own, starts
        self._storage: list[KV] = []
        self._stack: Stack | None = None
        own.join(comm.native)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def prepare_stack(self, stack: Stack) -> None:
        """Also: these are the layers that calls are about."""
        self.own.prepare_stack(stack)
        self._stack = stack

    def begin(self, ended: list[int]) -> None:
        """Rank 0, when its slice is loaded: wait until the others' are. EngineFault('rank_lost')."""
        self.comm.watch(ended, _LOADING)
        self._meet()
        self.comm.watch(ended)

    def _meet(self) -> None:
        """Wait until all have done what they were told."""
        for _ in range(2):  # the second is not begun before all have come to the first
            self._told(lambda: self.comm.send(_CHECK))

    def follow(self, head: Head, ended: list[int]) -> None:
        """Ranks but 0: make calls until rank 0 has ended."""
        self.comm.watch(ended)
        while True:
            try:
                call, arrays = self.comm.receive()
                self._make(call, arrays, head)
            except ValueError:  # of the arrays, before anything is computed: rank 0 raises it too
                continue
            except RuntimeError:
                return

    def _make(self, call: int, arrays: list[I32], head: Head) -> None:
        assert self._stack is not None
        if call == _KV:
            layers, blocks, block_size, kv_heads, head_dim, kind = arrays[0].tolist()
            self._alloc(KVSpec(layers, blocks, block_size, kv_heads, head_dim, [*KV_TYPES][kind]))
        elif call == _COPY:
            self.own.copy_blocks(self._storage[arrays[0][0]], [(a, b) for a, b in arrays[1].tolist()])
        elif call == _HIDDEN:
            kind, whole, recent = arrays[0].tolist()
            tokens, positions, starts, contexts, table, slots, wanted, *more = arrays[1:]
            batch, sliding = Batch(tokens, positions, starts, contexts, table, slots, wanted), None
            if kind == _WITH_SLIDING:
                pages = replace(batch, block_table=more[0], slots=more[1])
                sliding = pages, self._storage[recent]
            self.own.hidden(self._stack, batch, None if whole < 0 else self._storage[whole], sliding)
        elif call == _LOGITS:
            self._gather(self.own.logits(arrays[0].view(np.float32), head))

    # -- storage ------------------------------------------------------------------------------------------
    def alloc_kv(self, spec: KVSpec) -> KV:
        """spec: of all ranks together. Each has what its own KV heads take."""
        numbers = (spec.layers, spec.blocks, spec.block_size, spec.kv_heads, spec.head_dim)
        told = np.array([*numbers, list(KV_TYPES).index(spec.dtype)], np.int32)
        self._told(lambda: self.comm.send(_KV, told))
        mine = self._alloc(spec)
        self._meet()  # whoever has no memory has ended by then
        return mine

    def pack_adapter(self, weights: AdapterWeights, stack: Stack) -> Adapter:
        """EngineFault: they are not divided."""
        message = "LoRA adapters are not divided among ranks yet: use --tensor-parallel-size 1"
        raise EngineFault("model_unsupported", message)

    def _alloc(self, spec: KVSpec) -> KV:
        assert self._stack is not None
        mine = replace(spec, kv_heads=self._stack.layers[0].shape.kv_heads)
        self._storage.append(self.own.alloc_kv(mine))
        return self._storage[-1]

    def copy_blocks(self, kv: KV, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, at all ranks."""
        if pairs:
            place = np.array([self._place(kv)], np.int32)
            self._told(lambda: self.comm.send(_COPY, place, np.array(pairs, np.int32)))
            self.own.copy_blocks(kv, pairs)

    def _place(self, kv: KV) -> int:
        return _NO_KV if kv is None else next(i for i, one in enumerate(self._storage) if one is kv)

    def store_weight(self, weight: Weight, fd: int, offset: int) -> tuple[list[Any], int]:
        """As the native backend does: each rank has files of its own."""
        return self.own.store_weight(weight, fd, offset)

    def fetch_weight(self, about: list[Any], fd: int, offset: int) -> tuple[Weight, int]:
        """The same."""
        return self.own.fetch_weight(about, fd, offset)

    # -- composites ---------------------------------------------------------------------------------------
    def hidden(self, stack: Stack, batch: Batch, kv: KV, sliding: tuple[Batch, KV] | None) -> F32:
        """A step of all ranks: every one gets the same rows [R, d]."""
        places = [0, self._place(kv), _NO_KV]
        arrays = [getattr(batch, name) for name in _BATCH]
        if sliding is not None:
            places[0], places[2] = _WITH_SLIDING, self._place(sliding[1])
            arrays += [sliding[0].block_table, sliding[0].slots]
        self._told(lambda: self.comm.send(_HIDDEN, np.array(places, np.int32), *arrays))
        return self._told(lambda: self.own.hidden(stack, batch, kv, sliding))

    def logits(self, x: F32, head: Head, adapters: Adapters | None = None) -> F32:
        """Logits of x [R, d], each rank's side by side: [R, V]."""
        out = np.empty((len(x), self.starts[-1]), np.float32)  # before anybody else begins
        self._told(lambda: self.comm.send(_LOGITS, x))
        self._told(lambda: self._gather(self.own.logits(x, head), out))
        return out

    def _gather(self, mine: F32, out: F32 | None = None) -> None:
        self.comm.native.gather(mine, list(self.starts), out)

    def choose(
        self,
        x: F32,
        head: Head,
        draw: Draw,
        allowed: Allowed | None = None,
        edits: Edits | None = None,
        wanted: LogprobsWanted | None = None,
        adapters: Adapters | None = None,
    ) -> SamplerOutput:
        """From the logits of all ranks, as the definition has it: rank 0 chooses alone."""
        return Composites.choose(self, x, head, draw, allowed, edits, wanted, adapters)

    def _told(self, work: Callable[[], T]) -> T:
        """What every rank takes part in. EngineFault('rank_lost') where one does not, or this one cannot:
        from then on they are no longer at the same call. ValueError is raised before a call is begun."""
        try:
            return work()
        except ValueError:
            raise
        except (RuntimeError, MemoryError) as error:
            message = f"tensor parallel ranks cannot go on: {error or 'memory ran out'}"
            raise EngineFault("rank_lost", message) from error
