"""Kernels in Gluon executed without a GPU: the functions of the source as they are, on numpy.

Owns what barriers, copies and matrix instructions do to shared memory. The warp groups of a
program are threads that take turns: which one goes on, and when a copy arrives, is drawn from a seed. A
matrix instruction reads its operands when it is waited for, so a stage that is given back too early has other
values by then; and where nobody can go on, that is a `Deadlock`. Sums go along K from the first to the last,
as in `triton_interpreter`.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from pageturner.kernels.gpu.catalogue import Kernel

NUMPY = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "i32": np.int32}


class Deadlock(AssertionError):
    """Every warp group waits for something that nobody will do."""


class Tensor(np.ndarray):  # type: ignore[type-arg]
    """An array with what kernels ask of a tensor."""

    def to(self, kind: Any) -> Tensor:
        return rounded(self, kind) if isinstance(kind, str) else self.astype(kind)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)


def tensor(values: Any) -> Tensor:
    return np.asarray(values).view(Tensor)


def rounded(values: Any, kind: str) -> Tensor:
    """fp32 with the values of another kind."""
    values = np.asarray(values, np.float32)
    if kind == "fp16":
        return tensor(values.astype(np.float16).astype(np.float32))
    if kind == "bf16":
        bits = values.view(np.uint32)
        return tensor(
            ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
        )
    return tensor(values)


def memory(address: int, shape: tuple[int, ...], kind: str) -> Any:
    """An array in the memory of the device."""
    nbytes = int(np.prod(shape)) * np.dtype(NUMPY[kind]).itemsize
    raw = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.frombuffer(raw, NUMPY[kind]).reshape(shape)


class Pointer:
    """An address, or many of them."""

    def __init__(self, address: int, kind: str, at: Any = 0) -> None:
        self._address, self._kind, self._at = address, kind, at

    def __add__(self, at: Any) -> Pointer:
        return Pointer(self._address, self._kind, self._at + np.asarray(at, np.int64))

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self._address, self._kind, self._at[key])

    def load(self, mask: Any, other: float) -> Tensor:
        at, mask = np.broadcast_arrays(self._at, mask)
        found = np.full(at.shape, other, np.float32)
        if mask.any():
            found[mask] = memory(self._address, (int(at[mask].max()) + 1,), self._kind)[at[mask]]
        return tensor(found)

    def store(self, values: Any, mask: Any) -> None:
        at, mask = np.broadcast_arrays(self._at, mask)
        if mask.any():
            memory(self._address, (int(at[mask].max()) + 1,), self._kind)[at[mask]] = np.asarray(
                values
            )[mask]


class Shared:
    """Shared memory, or a part of it; values in fp32."""

    def __init__(self, values: Any, dtype: Any) -> None:
        self.values, self.dtype = values, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def index(self, i: int) -> Any:
        found = self.values[i]
        return Shared(found, self.dtype) if isinstance(found, np.ndarray) else found

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        assert dim == 0
        return Shared(self.values[start : start + length], self.dtype)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.transpose(order), self.dtype)

    def store(self, values: Any) -> None:
        self.values[...] = values


class Barrier:
    """An mbarrier: a phase is over when nobody is missing and all bytes are there."""

    def __init__(self) -> None:
        self.count = 0

    def init(self, count: int) -> None:
        assert self.count == 0, "a barrier is made once"
        self.count = self.missing = count
        self.nbytes = self.phase = 0

    def change(self, arrivals: int, nbytes: int) -> None:
        assert self.missing >= arrivals, "more arrive than are missing"
        self.missing -= arrivals
        self.nbytes += nbytes
        if self.missing == 0 and self.nbytes == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def passes(self, parity: int) -> bool:
        return self.count > 0 and self.phase & 1 != parity


class Descriptor:
    """A plane that boxes are copied of. box: rows and columns."""

    layout = None

    def __init__(self, plane: Any, kind: str) -> None:
        self.dtype, _, sides = kind[:-1].partition("[")
        self.rows, self.columns = map(int, sides.split(","))
        self.plane = plane
        assert plane.address % 16 == 0, "TMA wants an address that is a multiple of 16"
        assert plane.columns * 2 % 16 == 0, "TMA wants rows of a multiple of 16 bytes"

    def _inside(self, at: Sequence[int]) -> tuple[int, int]:
        assert min(at) >= 0
        return tuple(
            max(0, min(size, whole - begin))
            for begin, size, whole in zip(
                at, (self.rows, self.columns), (self.plane.rows, self.plane.columns), strict=True
            )
        )  # type: ignore[return-value]

    def read(self, at: Sequence[int]) -> Any:
        found = np.zeros((self.rows, self.columns), np.float32)
        rows, columns = self._inside(at)
        if rows and columns:
            lies = memory(self.plane.address, (self.plane.rows, self.plane.columns), self.dtype)
            part = lies[at[0] : at[0] + rows, at[1] : at[1] + columns]
            wide = (part.astype(np.uint32) << 16).view(np.float32) if self.dtype == "bf16" else part
            found[:rows, :columns] = wide
        return found

    def write(self, at: Sequence[int], values: Any) -> None:
        rows, columns = self._inside(at)
        if not rows or not columns:
            return
        lies = memory(self.plane.address, (self.plane.rows, self.plane.columns), self.dtype)
        part = np.ascontiguousarray(values[:rows, :columns], np.float32)
        narrow = (part.view(np.uint32) >> 16) if self.dtype == "bf16" else part
        lies[at[0] : at[0] + rows, at[1] : at[1] + columns] = narrow


class Sum:
    """The sum of a matrix instruction, some of which are under way: (left, right) each."""

    def __init__(self, total: Any) -> None:
        self.total, self.under_way = total, []  # type: ignore[var-annotated]

    def wait(self, most: int) -> Any:
        while len(self.under_way) > most:
            left, right = (one.values for one in self.under_way.pop(0))
            for k in range(left.shape[1]):
                self.total += left[:, k, None] * right[None, k]
        return tensor(self.total) if most == 0 else self


class Machine:
    """Threads that take turns, and copies under way."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._turn = threading.Condition()
        self._waiting: dict[int, Callable[[], bool]] = {}  # worker -> what it waits for
        self._now = -1
        self._copies: list[Callable[[], None]] = []
        self._fault: BaseException | None = None
        self._place = threading.local()

    @property
    def program(self) -> Any:
        return self._place.program

    def later(self, copy: Callable[[], None]) -> None:
        self._copies.append(copy)

    def _next(self) -> None:
        """Choose who goes on, with the lock. Copies may arrive, in any order."""
        while self._copies and self._dice.random() < 0.5:
            self._copies.pop(self._dice.randrange(len(self._copies)))()
        while True:
            able = [one for one, ready in self._waiting.items() if ready()]
            if able or not self._copies:
                break
            self._copies.pop(self._dice.randrange(len(self._copies)))()
        if self._waiting and not able:
            self._fault = self._fault or Deadlock(f"{len(self._waiting)} warp groups wait")
        self._now = self._dice.choice(able) if able else -1
        self._turn.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Let others go on, until it is so."""
        with self._turn:
            me = self._place.worker
            self._waiting[me] = ready
            self._next()
            self._turn.wait_for(lambda: self._now == me or self._fault is not None)
            if self._fault is not None:
                raise SystemExit
            del self._waiting[me]

    def _work(self, me: int, program: Any, work: Callable[[], None]) -> None:
        self._place.worker, self._place.program = me, program
        with self._turn:
            self._turn.wait_for(lambda: self._now == me or self._fault is not None)
            self._waiting.pop(me, None)
        try:
            if self._fault is None:
                work()
        except BaseException as error:
            if not isinstance(error, SystemExit):
                self._fault = self._fault or error
        with self._turn:
            self._next()

    def run(self, program: Any) -> None:
        """Run all warp groups of a program to their end."""
        threads = [
            threading.Thread(target=self._work, args=(me, program, work), daemon=True)
            for me, work in enumerate(program.groups)
        ]
        self._waiting = {me: lambda: True for me in range(len(threads))}
        for thread in threads:
            thread.start()
        with self._turn:
            self._next()
        for thread in threads:
            thread.join()
        if self._fault is not None:
            raise self._fault
        for copy in self._copies:
            copy()


class Language:
    """What the source finds under the names that it imports from Gluon."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.groups: list[Callable[[], None]] = []
        self.gl = SimpleNamespace(
            float32=np.float32,
            int64=np.int64,
            constexpr=None,
            static_range=range,
            program_id=lambda axis: machine.program.at,
            num_programs=lambda axis: machine.program.count,
            int32=np.int32,
            cdiv=lambda a, b: -(-a // b),
            minimum=min,
            exp=np.exp,
            zeros=lambda shape, kind, layout: tensor(np.zeros(shape, kind)),
            arange=lambda begin, end, layout: tensor(np.arange(begin, end, dtype=np.int32)),
            reshape=lambda value, shape: value.reshape(shape),
            permute=lambda value, order: value.transpose(order),
            split=lambda value: (value[..., 0], value[..., 1]),
            convert_layout=lambda value, layout, assert_trivial: value,
            load=lambda at, mask, other: at.load(mask, other),
            store=lambda at, value, mask: at.store(value, mask),
            NVMMADistributedLayout=lambda **_: None,
            SliceLayout=lambda *_: None,
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialise,
        )
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=lambda one, count: one.init(count),
            wait=lambda one, parity: machine.wait(lambda: one.passes(parity)),
            arrive=lambda one, count, pred=True: one.change(count, 0) if pred else None,
            expect=lambda one, nbytes: one.change(1, nbytes),
        )
        self.tma = SimpleNamespace(
            async_copy_global_to_shared=self._fetch,
            async_copy_shared_to_global=self._write,
            store_wait=lambda left: machine.wait(lambda: len(machine.program.writes) <= left),
        )
        self.warpgroup_mma = self._multiply
        self.warpgroup_mma_wait = lambda most, deps: deps[0].wait(most)
        self.fence_async_shared = lambda: None
        self.prefetch_residual, self.now = lambda *_: None, lambda value: value
        self.launch_dependents = self.wait = lambda: None

    NAMES = (
        "gl",
        "mbarrier",
        "tma",
        "warpgroup_mma",
        "warpgroup_mma_wait",
        "fence_async_shared",
        "prefetch_residual",
        "now",
        "launch_dependents",
        "wait",
    )

    def names(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.NAMES}

    def _allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            return Shared([Barrier() for _ in range(shape[0])], dtype)
        return Shared(np.full(shape, np.nan, np.float32), dtype)

    def _specialise(
        self, works: list[tuple[Any, Any]], warps: list[int], registers: list[int]
    ) -> None:
        assert len(warps) == len(registers) == len(works) - 1
        self._machine.program.groups += [lambda f=f, given=given: f(*given) for f, given in works]

    def _fetch(self, plane: Descriptor, at: Sequence[int], barrier: Barrier, to: Shared) -> None:
        assert to.shape == (plane.rows, plane.columns)

        def arrive() -> None:
            to.values[...] = plane.read(at)
            barrier.change(0, -2 * plane.rows * plane.columns)

        self._machine.later(arrive)

    def _write(self, plane: Descriptor, at: Sequence[int], source: Shared) -> None:
        """Read at any time until it is waited for."""
        writes = self._machine.program.writes

        def arrive() -> None:
            plane.write(at, source.values)
            writes.remove(arrive)

        writes.append(arrive)
        self._machine.later(arrive)

    def _multiply(self, left: Shared, right: Shared, total: Any, is_async: bool) -> Sum:
        found = total if isinstance(total, Sum) else Sum(np.array(total))
        found.under_way.append((left, right))
        return found


def _source(module: Any, names: dict[str, Any]) -> dict[str, Any]:
    """The functions of a module as plain ones, which find other names than those it imports."""
    found = dict(vars(module)) | names
    for name, one in vars(module).items():
        if name not in names and getattr(one, "is_gluon", bool)():
            found[name] = FunctionType(one.fn.__code__, found, name, one.fn.__defaults__)
    return found


def run(kernel: Kernel, grid: Sequence[int], values: Sequence[Any], seed: int = 0) -> None:
    """One launch. values: addresses for pointers, a `Plane` for what is copied in boxes."""
    room, name = kernel.function.split(".")
    module = importlib.import_module(f"pageturner.kernels.gpu.source.{room}")
    arguments: dict[str, Any] = kernel.constants
    for (argument, kind), value in zip(kernel.arguments, values, strict=True):
        arguments[argument] = value
        if kind.endswith("]"):
            arguments[argument] = Descriptor(value, kind)
        elif kind.startswith("*"):
            arguments[argument] = Pointer(value, kind[1:])
        if argument in kernel.aligned and isinstance(value, int):
            assert value % 16 == 0, f"{kernel.name}: {argument} = {value}"
    (count,) = grid
    for at in range(count):
        machine = Machine(seed + at)
        program = SimpleNamespace(at=at, count=count, groups=[], writes=[])
        machine._place.program = program
        _source(module, Language(machine).names())[name](**arguments)
        with np.errstate(all="ignore"):
            machine.run(program)
