"""Processes (ranks) that compute one model: each has a slice of every layer (tensor parallel), or
some whole layers (pipeline parallel).

Owns what goes between ranks: rank 0, which has the engine, says each call to the others, once a
step the batch, and all make it on their own weights and their own KV storage, with the same block
tables. Calls are numbered: who is at another one than a rank that it hears from ends, and nothing
of one call is ever taken for a part of another. What is summed over ranks inside of a call, or goes
from a stage to the next, is the affair of native/comm.cpp, on GPUs of kernels/gpu/exchange.py: sums
in the order of ranks, in fp32, so that bits depend on the number of ranks alone; whole layers have
the bits of one process. Must not know how processes are started, nor models or requests.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import select
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kernels.adapters import Adapter, Adapters, AdapterWeights
from pageturner.kernels.base import (
    F32,
    I32,
    KV,
    KV_TYPES,
    Array,
    Batch,
    KVSpec,
    Stack,
    Weight,
)
from pageturner.kernels.choosing import ChooseArgs, Head, SamplerOutput
from pageturner.kernels.composites import Composites
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import module

PLACE = 512 * 1024  # bytes that a rank writes at once
PATIENCE = 30.0  # seconds that ranks wait for one of them in the midst of a step
STAGE_PATIENCE = 600.0  # the same where one of them computes all of its layers meanwhile
_LOADING = 1e9  # the same until all are there: what is wrong with one of them is seen otherwise
_MODEL, _MEET, _KV, _COPY, _HIDDEN, LOGITS, _ADAPTER, _FORGET, _TOTAL = range(9)  # calls
_COUNTED = 4  # parts of 16 bits that a number is summed in over ranks, exactly
_BATCH = (
    "tokens",
    "positions",
    "query_start",
    "context_len",
    "block_table",
    "slots",
    "logit_rows",
)
_NO_KV, _WITH_SLIDING = -1, 1
_NO_ADAPTER = -1


class Communicator:
    """The shared memory of `size` ranks, as one of them sees it.

    fd  memory of `shared_memory(size)`
    """

    def __init__(self, fd: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.native = module().Ranks(fd, rank, size, PLACE)

    def watch(self, ended: list[int], patience: float = PATIENCE) -> None:
        """ended: files that become readable when another process ends, at rank 0 those of rank 1,
        2, ..."""
        self.native.watch(ended, patience)

    def send(self, call: int, *arrays: NDArray[Any]) -> None:
        """A call of rank 0 to all others, with arrays of 4-byte numbers of one or two
        dimensions."""
        self.native.send(packed(call, *arrays))

    def receive(self) -> tuple[int, list[I32]]:
        """Receive the message of rank 0."""
        data = np.frombuffer(self.native.receive(), np.int32)
        call, count = int(data[0]), int(data[1])
        at, arrays = 2 + 2 * count, []
        for rows, columns in data[2:at].reshape(-1, 2).tolist():
            size = rows * columns if columns >= 0 else rows
            arrays.append(
                data[at : at + size].reshape((rows, columns) if columns >= 0 else (rows,))
            )
            at += size
        return call, arrays


def packed(call: int, *arrays: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a call."""
    shapes = [len(arrays)]
    for one in arrays:
        shapes += [len(one), one.shape[1] if one.ndim > 1 else -1]
    head = np.array([call, *shapes], np.int32)
    return np.concatenate(
        [np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in (head, *arrays)]
    )


def shared_memory(size: int) -> int:
    """A file without a name for so many ranks, which goes when the last of them ends, however it
    ends."""
    fd = os.memfd_create("pageturner-ranks", os.MFD_CLOEXEC)
    pages = -(-module().Ranks.bytes(size, PLACE) // mmap.PAGESIZE)
    os.ftruncate(fd, pages * mmap.PAGESIZE)
    return fd


@dataclass(frozen=True, slots=True)
class Slices:
    """The facts that ranks must know of how a model is divided.

    starts    first token of each rank's slice of the vocabulary, and the end; of stages none
    identity  numbers that only ranks of the same model have
    adapter   this rank's slice of an adapter
    layers    of the whole model
    counts    numbers of this rank that `RankOps.total` sums
    """

    starts: tuple[int, ...]
    identity: tuple[int, ...]
    adapter: Callable[[AdapterWeights], AdapterWeights]
    layers: int = 0
    counts: list[int] = field(default_factory=list)


class DividedAdapter:
    """An adapter at rank 0: its own part, and the whole until the others have theirs."""

    def __init__(self, number: int, own: Adapter, whole: AdapterWeights) -> None:
        self.number, self.own = number, own
        self.nbytes = int(own.nbytes)
        self.whole: AdapterWeights | None = whole


class RankOps:
    """An `Ops` around the backend of one rank. Whatever is asked of that of rank 0, the others do
    in `follow`; what is not told to them, such as sampling, is rank 0's alone.

    slices    set before `assemble` and `follow`
    at_loss   rank 0: called when ranks cannot go on; ends the others and says what is known of
              their ends
    called    what messages call them
    patience  seconds that a rank may keep others waiting in a step
    found     of ranks but 0: the rows that their last step gave
    """

    slices: Slices
    called = "tensor parallel ranks"
    patience = PATIENCE

    def __init__(self, comm: Communicator, own: Any) -> None:
        self.comm, self.own = comm, own
        self.found: Array | None = None
        self.at_loss: Callable[[], str] = str
        self._lost = ""  # why ranks cannot go on
        self._storage: list[KV] = []
        self._stack: Stack | None = None
        self._numbers = itertools.count()
        self._adapters: dict[int, Adapter] = {}  # of the others, by number
        self._gone: deque[int] = deque()  # numbers of adapters that rank 0 has no longer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def prepare_stack(self, stack: Stack) -> None:
        """Also: these are the layers that calls are about."""
        self.own.prepare_stack(stack)
        self._stack = stack

    def assemble(self, ended: list[int]) -> None:
        """Rank 0, when its slice is loaded: wait until the others' are.
        EngineFault('rank_lost')."""
        self.comm.watch(ended, _LOADING)
        with self._together(_MODEL, np.array(self.slices.identity, np.int32)):
            pass
        self._meet()
        self.comm.watch(ended, self.patience)

    def total(self, numbers: list[int]) -> list[int]:
        """Sums over ranks of numbers from 0 to 2^63, of which each rank has as many. At rank 0
        between `assemble` and the first step; the others have theirs in `Slices.counts`."""
        with self._together(_TOTAL):
            return self._summed(numbers)

    def _summed(self, numbers: list[int]) -> list[int]:
        parts = [[number >> 16 * i & 0xFFFF for i in range(_COUNTED)] for number in numbers]
        sums = np.array(parts, np.float32).reshape(-1, _COUNTED)
        self.comm.native.sum(sums)
        return [sum(int(part) << 16 * i for i, part in enumerate(row)) for row in sums.tolist()]

    def _meet(self) -> None:
        """Wait until all have done what they were told."""
        for _ in range(2):  # the second is not begun before all have come to the first
            with self._together(_MEET):
                pass

    def follow(self, head: Head, ended: list[int]) -> None:
        """Ranks but 0: make calls until rank 0 has ended. EngineFault('rank_lost') where this rank
        cannot go on while that lives: ranks are out of step, or memory ran out."""
        self.comm.watch(ended, self.patience)
        while True:
            try:
                call, arrays = self.comm.receive()
                self._make(call, arrays, head)
            except ValueError:  # of the arrays, before anything is computed: rank 0 raises it too
                continue
            except (RuntimeError, MemoryError) as error:
                if select.select(ended, [], [], 0)[0]:
                    return
                raise EngineFault(
                    "rank_lost", f"in call {self.comm.native.call}: {error or 'memory ran out'}"
                ) from error

    def _make(self, call: int, arrays: list[I32], head: Head) -> None:
        assert self._stack is not None
        if call == _KV:
            layers, blocks, block_size, kv_heads, head_dim, kind, latent = arrays[0].tolist()
            dtype = list(KV_TYPES)[kind]
            self._alloc(KVSpec(layers, blocks, block_size, kv_heads, head_dim, dtype, bool(latent)))
        elif call == _COPY:
            self.own.copy_blocks(
                self._storage[arrays[0][0]], [(a, b) for a, b in arrays[1].tolist()]
            )
        elif call == _HIDDEN:
            self._follow_step(arrays)
        elif call == LOGITS:
            self._share_logits(arrays, head)
        elif call == _TOTAL:
            self._summed(self.slices.counts)
        elif call == _MODEL and tuple(arrays[0].tolist()) != self.slices.identity:
            message = "it has another model than rank 0: the model was changed while it was loaded"
            raise EngineFault("rank_lost", message)
        elif call == _ADAPTER:
            weights = pickle.loads(arrays[1].tobytes()[: arrays[0][1]])
            self._adapters[int(arrays[0][0])] = self.own.pack_adapter(
                self.slices.adapter(weights), self._stack
            )
        elif call == _FORGET:
            for number in arrays[0].tolist():
                self._adapters.pop(number, None)

    def _follow_step(self, arrays: list[I32]) -> None:
        assert self._stack is not None
        kind, whole, recent = arrays[0].tolist()
        tokens, positions, starts, contexts, table, slots, wanted, *more = arrays[2:]
        adapters = self._numbered(arrays[1])
        batch = Batch(tokens, positions, starts, contexts, table, slots, wanted, adapters=adapters)
        sliding = None
        if kind == _WITH_SLIDING:
            sliding = replace(batch, block_table=more[0], slots=more[1]), self._storage[recent]
        self.found = self.own.hidden(
            self._stack, batch, None if whole < 0 else self._storage[whole], sliding
        )

    def _numbered(self, numbers: I32) -> Adapters | None:
        """The adapters of these numbers, none where there are no numbers."""
        return [self._adapters.get(number) for number in numbers.tolist()] if len(numbers) else None

    # -- storage -----------------------------------------------------------------------------------
    def alloc_kv(self, spec: KVSpec) -> KV:
        """spec: of all ranks together. Each has what its own KV heads take, or its own layers."""
        numbers = (spec.layers, spec.blocks, spec.block_size, spec.kv_heads, spec.head_dim)
        told = np.array([*numbers, list(KV_TYPES).index(spec.dtype), spec.latent], np.int32)
        with self._together(_KV, told):
            mine = self._alloc(spec)
        self._meet()  # whoever has no memory has ended by then
        return mine

    def _alloc(self, spec: KVSpec) -> KV:
        self._storage.append(self.own.alloc_kv(self._mine(spec)))
        return self._storage[-1]

    def _mine(self, spec: KVSpec) -> KVSpec:
        """Return the part of the KV that this rank has."""
        raise NotImplementedError

    def copy_blocks(self, kv: KV, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks, at all ranks."""
        if pairs:
            with self._together(
                _COPY, np.array([self._place(kv)], np.int32), np.array(pairs, np.int32)
            ):
                self.own.copy_blocks(kv, pairs)

    def _place(self, kv: KV) -> int:
        return _NO_KV if kv is None else next(i for i, one in enumerate(self._storage) if one is kv)

    def store_weight(self, weight: Weight, fd: int, offset: int) -> tuple[list[Any], int]:
        """Do as the native backend does: each rank has files of its own."""
        stored: tuple[list[Any], int] = self.own.store_weight(weight, fd, offset)
        return stored

    def fetch_weight(self, about: list[Any], fd: int, offset: int) -> tuple[Weight, int]:
        """The same."""
        fetched: tuple[Weight, int] = self.own.fetch_weight(about, fd, offset)
        return fetched

    # -- adapters ----------------------------------------------------------------------------------
    def pack_adapter(self, weights: AdapterWeights, stack: Stack) -> DividedAdapter:
        """May be called by any thread: the other ranks get theirs with the first step that wants
        it."""
        own = self.own.pack_adapter(self.slices.adapter(weights), stack)
        made = DividedAdapter(next(self._numbers), own, weights)
        weakref.finalize(made, self._gone.append, made.number)
        return made

    def _tell_adapters(self, adapters: Adapters | None) -> tuple[I32, Adapters | None]:
        """Their numbers, and rank 0's slices of them, once all ranks have theirs."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        if gone:
            with self._together(_FORGET, np.array(gone, np.int32)):
                pass
        if adapters is None:
            return np.empty(0, np.int32), None
        for one in adapters:
            if one is not None and one.whole is not None:
                data = pickle.dumps(one.whole, protocol=5)
                about = np.array([one.number, len(data)], np.int32)
                words = np.frombuffer(data + bytes(-len(data) % 4), np.int32)
                with self._together(_ADAPTER, about, words):
                    one.whole = None
        numbers = [_NO_ADAPTER if one is None else one.number for one in adapters]
        return np.array(numbers, np.int32), _own(adapters)

    # -- composites --------------------------------------------------------------------------------
    def hidden(self, stack: Stack, batch: Batch, kv: KV, sliding: tuple[Batch, KV] | None) -> Array:
        """A step of all ranks: every one gets the same rows [R, d]."""
        numbers, adapters = self._tell_adapters(batch.adapters)
        places = [0, self._place(kv), _NO_KV]
        arrays = [getattr(batch, name) for name in _BATCH]
        if sliding is not None:
            places[0], places[2] = _WITH_SLIDING, self._place(sliding[1])
            arrays += [sliding[0].block_table, sliding[0].slots]
        mine = replace(batch, adapters=adapters) if adapters else batch
        with self._together(_HIDDEN, np.array(places, np.int32), numbers, *arrays):
            return self.own.hidden(stack, mine, kv, sliding)

    def _share_logits(self, arrays: list[I32], head: Head) -> None:
        """The part of a rank but 0 in logits, of what rank 0 sent."""
        raise NotImplementedError

    @contextmanager
    def _together(self, call: int, *arrays: NDArray[Any]) -> Iterator[None]:
        """Run something that every rank takes part in: the others are told, then rank 0 does what
        is within. What goes wrong before they are told costs nobody anything, and a ValueError is
        raised by all of them before they begin. Else they are no longer at the same call:
        EngineFault, 'rank_lost' unless rank 0 has one of its own, in this and every later call."""
        self._alive()
        message = packed(call, *arrays)
        try:
            self.comm.native.send(message)
            yield
        except ValueError:
            raise
        except BaseException as error:
            self.give_up(str(error) or type(error).__name__)
            if isinstance(error, EngineFault) or not isinstance(error, Exception):
                raise
            raise EngineFault("rank_lost", self._lost) from error

    def _alive(self) -> None:
        if self._lost:
            raise EngineFault("rank_lost", self._lost)

    def give_up(self, why: str) -> str:
        """End the others: no later call is made. What is said of it."""
        known = self.at_loss()
        self._lost = f"{self.called} cannot go on: {why}{f' ({known})' if known else ''}"
        return self._lost


def kv_of_rank(spec: KVSpec, stack: Stack | None) -> KVSpec:
    """Return the part of the KV of all ranks that a rank with these layers has."""
    assert stack is not None
    return replace(spec, kv_heads=stack.layers[0].shape.kv_heads)


class TensorParallelOps(RankOps):
    """Each rank has a slice of every layer, of its KV heads, and of the vocabulary."""

    def __init__(self, comm: Communicator, own: NativeOps) -> None:
        super().__init__(comm, own)
        self._out: F32 = np.empty((0, 0), np.float32)
        own.join(comm.native)

    def _mine(self, spec: KVSpec) -> KVSpec:
        return kv_of_rank(spec, self._stack)

    def logits(self, x: F32, head: Head, adapters: Adapters | None = None) -> F32:
        """Logits of x [R, d], each rank's side by side: [R, V], valid until the next call of
        `logits`."""
        numbers, own = self._tell_adapters(adapters)
        rows, vocabulary = len(x), self.slices.starts[-1]
        if rows > len(self._out) or vocabulary != self._out.shape[1]:
            self._out = np.empty((rows, vocabulary), np.float32)
        out = self._out[:rows]
        with self._together(LOGITS, x, numbers):
            self._gather(self.own.logits(x, head, own), out)
        return out

    def _share_logits(self, arrays: list[I32], head: Head) -> None:
        x = arrays[0].view(np.float32)
        self._gather(self.own.logits(x, head, self._numbered(arrays[1])))

    def _gather(self, mine: F32, out: F32 | None = None) -> None:
        self.comm.native.gather(mine, list(self.slices.starts), out)

    def choose(self, x: F32, head: Head, args: ChooseArgs) -> SamplerOutput:
        """Choose from the logits of all ranks, as the definition has it: rank 0 chooses alone."""
        return Composites.choose(self, x, head, args)


class PipelineOps(RankOps):
    """Each rank has some whole layers and their KV: rank 1 the first ones and the embedding, rank 0
    the last ones and the head, so that logits and tokens are its own affair. A step goes from rank
    to rank."""

    called = "pipeline stages"
    patience = STAGE_PATIENCE

    def __init__(self, comm: Communicator, own: NativeOps) -> None:
        super().__init__(comm, own)
        self._apart = 0  # storages so far of layers with a window, or of those without
        own.join_stages(comm.native)

    def _mine(self, spec: KVSpec) -> KVSpec:
        """Storage of all layers; or of those that see everything, and then of those with a
        window."""
        assert self._stack is not None
        layers = [layer.shape.window > 0 for layer in self._stack.layers]
        if spec.layers == self.slices.layers:
            return replace(spec, layers=len(layers))
        self._apart += 1
        return replace(spec, layers=layers.count(self._apart % 2 == 0))

    def logits(self, x: F32, head: Head, adapters: Adapters | None = None) -> F32:
        """Logits of x [R, d], by rank 0 alone: [R, V], valid until the next call of `logits`."""
        out: F32 = self.own.logits(x, head, _own(adapters))
        return out

    def choose(self, x: F32, head: Head, args: ChooseArgs) -> SamplerOutput:
        """Do as the native backend does, by rank 0 alone."""
        out: SamplerOutput = self.own.choose(x, head, replace(args, adapters=_own(args.adapters)))
        return out


def _own(adapters: Adapters | None) -> Adapters | None:
    return adapters and [one and one.own for one in adapters]
