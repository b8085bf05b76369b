"""Weights on a device: floats as they are, quantised kinds in groups of integers with scales.

Owns how they lie. Must not know layers or files. The integers of a group are those of
`formats.ggml.unpack`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.formats import ggml, ggml_types
from pageturner.kernels.base import Tensor
from pageturner.kernels.gpu.arrays import BYTES, padded
from pageturner.kernels.gpu.catalogue import STEP
from pageturner.kernels.gpu.driver import Driver
from pageturner.kernels.reference_arrays import to_bf16

FILE_KINDS = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
# Groups lie in blocks of so many rows, each padded to a multiple of so many columns
BLOCK_ROWS, BLOCK_COLUMNS = 16, 256
SLICE = 1 << 20  # elements that a thread takes apart at once: they stay in its cache

T = TypeVar("T")


@dataclass(slots=True)
class Vector:
    """n fp32 at an address."""

    address: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return 4 * self.shape[0]


@dataclass(slots=True)
class FloatMatrix:
    """A matrix [rows, columns] of floats."""

    address: int
    kind: str
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * BYTES[self.kind]

    @property
    def compute(self) -> str:
        """The type that activations are rounded to in products with it."""
        return self.kind

    @property
    def sort(self) -> str:
        """The part of a kernel's name that says its kind."""
        return self.kind

    @property
    def stored(self) -> tuple[int, ...]:
        """The addresses that a launch takes of it."""
        return (self.address,)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The numbers that a launch takes of what is added to its elements: none."""
        return ()

    def parts(self) -> tuple[tuple[str, int], ...]:
        """Names of its addresses, and the bytes of a row of each."""
        return (("address", self.columns * BYTES[self.kind]),)

    @property
    def form(self) -> tuple[object, ...]:
        """The facts that joined matrices have in common."""
        return ("dense", self.kind, self.columns)


@dataclass(slots=True)
class Groups:
    """A matrix in groups of `group` columns: scale * (q - zero) + low. Addresses; high and low may
    be 0. Group 0: scale * q with q in e4m3, and a scale for each row.

    The elements lie as a thread of the matrix unit reads them: a block of 16 rows and 64 columns
    (32 of 8 bits) has 128 words, [row % 8][column % 8 / 2][half of the columns][row / 8]. A word of
    4 bits has columns 8 i + p of its half at bit 4 i + 16 p, one of 8 bits (two's complement, or
    e4m3) at byte i + 2 p. high: the fifth bits, a byte for each word, at bit i + 4 p. Scales and
    lows lie as such a thread wants them for 128 columns at once: [block of 16 rows][128
    columns][row % 8][group][row / 8], in fp32, or in fp16 where that holds them exactly.

    order: int32 [columns], where column i multiplies input order[i]; 0: input i. ordered_by: its
    digest."""

    q: int
    high: int
    scale: int
    low: int
    bits: int
    group: int
    zero: int
    rows: int
    columns: int
    scales: str = "fp32"
    order: int = 0
    ordered_by: bytes = b""
    compute: str = "bf16"

    @property
    def nbytes(self) -> int:
        rows = -(-self.rows // BLOCK_ROWS) * BLOCK_ROWS
        return rows * sum(nbytes for _, nbytes in self.parts()) + (
            4 * self.columns if self.order else 0
        )

    @property
    def sort(self) -> str:
        """The name of its form in the catalogue's GROUPED."""
        if self.group == 0:
            return "fp8"
        return f"{self.bits}.{self.group}" + (".fp16" if self.scales == "fp16" else "")

    @property
    def stored(self) -> tuple[int, ...]:
        """The addresses that a launch takes of it."""
        return self.q, self.high, self.scale, self.low

    @property
    def offsets(self) -> tuple[int, ...]:
        """The numbers that a launch takes: whether there are lows, and the zero."""
        return int(self.low != 0), self.zero

    def parts(self) -> tuple[tuple[str, int], ...]:
        """Names of its addresses, and the bytes of a row of each."""
        columns = -(-self.columns // BLOCK_COLUMNS) * BLOCK_COLUMNS
        scales = BYTES[self.scales] * columns // self.group if self.group else 4
        found = [("q", columns if self.bits == 8 else columns // 2), ("scale", scales)]
        if self.high:
            found.append(("high", columns // 8))
        if self.low:
            found.append(("low", scales))
        return tuple(found)

    @property
    def form(self) -> tuple[object, ...]:
        """The facts that joined matrices have in common."""
        return (self.sort, self.zero, bool(self.low), self.columns, self.ordered_by)


Matrix = FloatMatrix | Groups


def pack(driver: Driver, tensor: Tensor) -> Vector | Matrix:
    """A weight as it is computed with. EngineFault('gpu_weights') where its columns do not fit."""
    if len(tensor.shape) == 1:
        values = ggml.dequantise(tensor.kind, tensor.shape, tensor.data)
        return Vector(_put(driver, values), tensor.shape)
    rows, columns = tensor.shape
    if columns % STEP:
        message = f"{tensor.name}: a GPU needs a multiple of {STEP} columns, not {columns}; use --device cpu"
        raise EngineFault("gpu_weights", message)
    if tensor.order is not None:
        return _ordered(driver, tensor, tensor.order)
    if tensor.kind in FILE_KINDS:
        kind = FILE_KINDS[tensor.kind]
        address = driver.alloc(padded(rows * columns * BYTES[kind]))
        driver.upload_file(address, tensor.data)
        return FloatMatrix(address, kind, rows, columns)
    if tensor.kind == "F8_W":
        return _fp8(driver, tensor)
    return _groups(driver, tensor)


def _ordered(driver: Driver, tensor: Tensor, order: NDArray[np.int32]) -> Groups:
    """EngineFault('bad_weight') for what is no order of its columns, or of floats."""
    if tensor.kind in ggml.FLOATS or not np.array_equal(np.sort(order), np.arange(tensor.shape[1])):
        message = (
            f"{tensor.name} ({tensor.kind}, {tensor.shape}): what it has is no order of its columns"
        )
        raise EngineFault("bad_weight", message)
    order = np.ascontiguousarray(order, np.int32)
    digest = blake2b(order.tobytes(), digest_size=16).digest()
    return replace(_groups(driver, tensor), order=_put(driver, order), ordered_by=digest)


def _put(driver: Driver, values: NDArray[Any]) -> int:
    values = np.ascontiguousarray(values)
    address = driver.alloc(padded(values.nbytes))
    driver.upload(address, values)
    return address


def _fp8(driver: Driver, tensor: Tensor) -> Matrix:
    """Return it as it is if each row has one scale, which is what files with a scale for each
    channel or tensor have, and no code is a NaN; else in bf16."""
    rows, columns = tensor.shape
    geometry = ggml_types.BY_NAME[tensor.kind]
    raw = tensor.data.reshape(rows, -1, geometry.nbytes)
    scales = np.ascontiguousarray(raw[..., :4]).view(np.float32)[..., 0]
    codes = np.ascontiguousarray(raw[..., 4:]).reshape(rows, columns)
    if (scales == scales[:, :1]).all() and not (codes & 0x7F == 0x7F).any():
        scale = np.pad(scales[:, 0], (0, -rows % BLOCK_ROWS))
        return Groups(
            _put(driver, words(codes, 8)[0]), 0, _put(driver, scale), 0, 8, 0, 0, rows, columns
        )
    values = ggml.dequantise(tensor.kind, tensor.shape, tensor.data)
    return FloatMatrix(_put(driver, to_bf16(values)), "bf16", rows, columns)


@dataclass(slots=True)
class _Rows:
    """Rows of a matrix in groups, taken apart. alike: whether four groups in a row have one scale,
    and one lowest value. short: whether fp16 holds all scales and lowest values."""

    q: NDArray[np.int8]
    scale: NDArray[np.float32]
    low: NDArray[np.float32] | None
    least: int
    most: int
    alike: bool
    short: bool


def _groups(driver: Driver, tensor: Tensor) -> Groups:
    """The fewest bits that hold the integers; groups of 128 where four in a row have one scale.
    Rows are laid out by as many threads as there are processors: numpy lets them."""
    rows, columns = tensor.shape
    step = max(1, SLICE // (BLOCK_ROWS * columns)) * BLOCK_ROWS
    slices = [(first, min(first + step, rows)) for first in range(0, rows, step)]
    threads = min(len(slices), len(os.sched_getaffinity(0)))
    parts: list[_Rows | None] = list(_each(threads, partial(_taken_apart, tensor), slices))
    known = [one for one in parts if one is not None]
    group, low = known[0].q.shape[2], known[0].low is not None
    least, most = min(one.least for one in known), max(one.most for one in known)
    bits, zero = 8, 0
    if group == 32 and most - least < 32:
        zero = 0 if least >= 0 else (8 if least >= -8 and most <= 7 else 16)
        bits = 4 if least + zero >= 0 and most + zero < 16 else 5
        if least + zero < 0 or most + zero > 31:
            bits, zero = 8, 0
    joined = 4 if bits == 4 and all(one.alike for one in known) else 1
    short = bits == 4 and joined == 1 and all(one.short for one in known)
    del known  # rows go as they are laid out
    found = Groups(
        1,
        int(bits == 5),
        1,
        int(low),
        bits,
        group * joined,
        zero,
        rows,
        columns,
        "fp16" if short else "fp32",
    )
    blocks = -(-rows // BLOCK_ROWS) * BLOCK_ROWS
    at = {name: driver.alloc(padded(blocks * nbytes)) for name, nbytes in found.parts()}
    found = replace(found, **at)  # type: ignore[arg-type]
    for laid in _each(threads, partial(_laid, parts, found, joined), range(len(slices))):
        for name, piece in laid.items():
            driver.upload(at[name], piece)
            at[name] += piece.nbytes
    return found


def _each(threads: int, work: Callable[[Any], T], of: Sequence[Any]) -> Iterator[T]:
    """Map in order, by so many threads."""
    if threads == 1:
        yield from map(work, of)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(work, of)


def _taken_apart(tensor: Tensor, rows: tuple[int, int]) -> _Rows:
    columns = tensor.shape[1]
    data = tensor.data.reshape(tensor.shape[0], -1)[rows[0] : rows[1]]
    q, scale, low = ggml.unpack(tensor.kind, (rows[1] - rows[0], columns), data)
    alike = columns % 128 == 0 and _alike(scale) and (low is None or _alike(low))
    short = _short(scale) and (low is None or _short(low))
    return _Rows(q, scale, low, int(q.min()), int(q.max()), alike, short)


def _laid(
    parts: list[_Rows | None], matrix: Groups, joined: int, at: int
) -> dict[str, NDArray[Any]]:
    """Words, fifth bits, scales and lowest values of one of the parts, in blocks; the part is taken
    out. joined: so many groups become one."""
    rows, parts[at] = parts[at], None
    assert rows is not None
    codes = rows.q.reshape(len(rows.q), -1).view(np.uint8) + np.uint8(matrix.zero)
    body, high = words(codes, matrix.bits)
    found = {"q": body, "scale": _in_blocks(rows.scale[:, ::joined], matrix)}
    if matrix.bits == 5:
        found["high"] = high
    if rows.low is not None:
        found["low"] = _in_blocks(rows.low[:, ::joined], matrix)
    return found


def words(codes: NDArray[np.uint8], bits: int) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Lay out the arrays of `Groups`: the words, and of 5 bits the bytes of those above them."""
    rows, columns = codes.shape
    if rows % BLOCK_ROWS or columns % BLOCK_COLUMNS:
        codes = np.pad(codes, ((0, -rows % BLOCK_ROWS), (0, -columns % BLOCK_COLUMNS)))
    # block, row / 8, row % 8, unit, half, i, thread, p -> block, unit, row % 8, thread, half, row /
    # 8, p, i
    blocks = len(codes) // BLOCK_ROWS
    if bits == 8:
        pieces = codes.reshape(blocks, 2, 8, -1, 2, 2, 4, 2)
        return np.ascontiguousarray(pieces.transpose(0, 3, 2, 6, 4, 1, 7, 5)), codes[:0]
    pieces = codes.reshape(blocks, 2, 8, -1, 2, 4, 4, 2).transpose(0, 3, 2, 6, 4, 1, 7, 5)
    body = np.ascontiguousarray(pieces[..., ::2] & 15 | pieces[..., 1::2] << 4, np.uint8)
    high = (
        np.packbits(pieces.reshape(-1, 8) >> 4, axis=1, bitorder="little")
        if bits == 5
        else codes[:0]
    )
    return body, high


def _in_blocks(values: NDArray[np.floating[Any]], matrix: Groups) -> NDArray[Any]:
    """Values of groups [rows, columns / group] as scales of `Groups` lie."""
    rows, groups = values.shape
    size = 128 // matrix.group
    dtype = np.float16 if matrix.scales == "fp16" else np.float32
    values = np.pad(values.astype(dtype), ((0, -rows % BLOCK_ROWS), (0, -groups % (2 * size))))
    return np.ascontiguousarray(
        values.reshape(-1, 2, 8, values.shape[1] // size, size).transpose(0, 3, 2, 4, 1)
    )


def _short(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16) == values).all())


def _alike(values: NDArray[np.float32]) -> bool:
    fours = values.reshape(len(values), -1, 4)
    return bool((fours == fours[..., :1]).all())


def join(driver: Driver, matrices: list[Matrix]) -> tuple[Matrix, list[Matrix]] | None:
    """Matrices of one form as one, row after row, and each as a part of it; None where they differ,
    or where one would begin within a block of rows. Their own memory is given back, of equal orders
    all but one."""
    first = matrices[0]
    if any(one.form != first.form for one in matrices):
        return None
    if isinstance(first, Groups) and any(one.rows % BLOCK_ROWS for one in matrices):
        return None
    rows = sum(one.rows for one in matrices)
    addresses = {}
    for name, nbytes in first.parts():
        addresses[name] = at = driver.alloc(padded(rows * nbytes))
        for one in matrices:
            driver.copy(at, getattr(one, name), one.rows * nbytes)
            driver.free(getattr(one, name))
            at += one.rows * nbytes
    views: list[Matrix] = []
    before = 0
    shared = {"order": first.order} if isinstance(first, Groups) else {}
    for one in matrices:
        if isinstance(one, Groups) and one.order not in (0, *shared.values()):
            driver.free(one.order)
        moved = {name: addresses[name] + before * nbytes for name, nbytes in first.parts()}
        views.append(replace(one, **moved, **shared))  # type: ignore[arg-type]
        before += one.rows
    return replace(first, rows=rows, **addresses), views  # type: ignore[arg-type]
