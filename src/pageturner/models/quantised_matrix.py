"""Matrices of quantised checkpoints as blocks that kernels compute with, some rows at a time.

Owns how integers with scales and zero-points of any grouping, 8-bit and 4-bit floats, and tables of
16 floats become a kind of formats/ggml.py without losing a bit; and where they cannot, how they
become int8, which is said in a line. Must not know in which tensors of a file they lie: that is for
the readers of each format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.formats.ggml import E2M1, GROUP, U8
from pageturner.formats.ggml_types import BY_NAME
from pageturner.kernels.base import F32
from pageturner.models.checkpoint_tensors import CheckpointTensors
from pageturner.models.quantise import int8_blocks
from pageturner.models.spec import unsupported

Rows = Callable[[int, int], U8]  # of rows start .. stop-1


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A matrix that can be read some rows at a time.

    kind     of formats/ggml.py
    shape    (rows = outputs, columns = inputs); of experts in one tensor (experts, rows, columns)
    blocks   bytes of rows start .. stop-1: [stop - start, bytes of a row]
    becomes  what it loses by that, for people; "": nothing
    columns  int32, where they lie in another order than the inputs: which input each multiplies
    rows     the same of the outputs, in another order than the file's
    """

    kind: str
    shape: tuple[int, ...]
    blocks: Rows
    becomes: str = ""
    columns: NDArray[np.int32] | None = None
    rows: NDArray[np.int32] | None = None

    @property
    def nbytes(self) -> int:
        block = BY_NAME[self.kind]
        return int(np.prod(self.shape)) // block.values * block.nbytes


# By the name of the tensor that there would be unquantised.
Readers = dict[str, Callable[[], QuantisedMatrix]]


@dataclass(frozen=True, slots=True)
class Codes:
    """Unsigned integers of `bits` bits [rows, columns], read some rows at a time, and what they
    stand for: scale[r, g] * (code - zero[r, g]), where g is the group of the column.

    scale   fp32 [rows, groups]
    zero    [rows, groups], or one for all
    groups  of each column, where they are not simply one behind the other
    low     fp32 [rows, groups], which is added; None: nothing is
    pairs   the same integers of 4 bits, two neighbours in a byte, the first in its low nibble,
            where files have them so
    """

    name: str
    shape: tuple[int, int]
    bits: int
    read: Rows
    scale: F32
    zero: NDArray[np.int32]
    groups: NDArray[np.int32] | None = None
    pairs: Rows | None = None
    low: F32 | None = None

    @property
    def regular(self) -> bool:
        """Return whether 32 neighbours always belong to one group."""
        return self.groups is None and self.shape[1] // self.scale.shape[1] % GROUP == 0


def invalid(message: str) -> EngineFault:
    """The fault for a checkpoint that is not what it says."""
    return EngineFault("quantization_invalid", message)


def of_codes(codes: Codes, method: str) -> QuantisedMatrix:
    """The matrix of integers of 2 to 8 bits. EngineFault 'quantization_invalid' for scales
    that are no numbers, 'model_unsupported' for columns that are not whole groups of 32."""
    check_columns(codes.name, codes.shape[1])
    check_scales(codes.name, codes.scale)
    kind = _kind_of(codes)
    if kind:
        make, becomes, wide = _nibble_blocks, "", 4
        if kind.startswith("Q8"):
            make, wide = _byte_blocks, 8
        if codes.bits != wide:
            becomes = f"{method} with {codes.bits} bits is computed with {wide}, which is exact"
        return QuantisedMatrix(
            kind, codes.shape, lambda start, stop: make(kind, codes, start, stop), becomes
        )
    why = "zero-points of 8 bits"
    if codes.low is not None:
        check_scales(codes.name, codes.low)
        why = f"minima of {codes.bits} bits"
    if codes.groups is not None:
        why = "groups in the order of activations (desc_act)"
    elif not codes.regular:
        why = f"groups of {codes.shape[1] // codes.scale.shape[1]}"
    becomes = (
        f"{method} with {why} becomes int8 in groups of 32 (root mean square error about 0.5 %)"
    )
    return QuantisedMatrix(
        "Q8_0", codes.shape, lambda start, stop: _rounded(codes, start, stop), becomes
    )


def check_columns(name: str, columns: int) -> None:
    """EngineFault('model_unsupported') unless columns are whole groups of 32."""
    if columns % GROUP:
        raise unsupported(
            f"{name} is quantised and has {columns} columns"
            f"; only multiples of {GROUP} are supported"
        )


def check_scales(name: str, scale: F32) -> None:
    """EngineFault('quantization_invalid') for scales that are not finite."""
    if not np.isfinite(scale).all():
        raise invalid(f"the scales of {name} hold values that are not finite")


def exact_half(x: F32) -> bool:
    """Return whether fp16 holds all of these numbers."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(x.astype(np.float16).astype(np.float32), x))


def unpack(words: NDArray[np.generic], bits: int) -> U8:
    """The integers of `bits` bits, lowest first, of words [rows, n]: [rows, n * 32 / bits]."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if 8 % bits:  # they run on over the ends of bytes
        digits = np.unpackbits(raw, axis=1, bitorder="little").reshape(len(raw), -1, bits)
        return np.asarray(digits @ (1 << np.arange(bits)).astype(np.uint8), np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (raw[:, :, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(raw), -1)


def unpacked(words: NDArray[np.generic], bits: int) -> Rows:
    """The integers of `unpack`, read some rows at a time."""
    return lambda start, stop: unpack(words[start:stop], bits)


def as_pairs(words: NDArray[np.generic]) -> Rows:
    """The bytes of words [rows, n], read some rows at a time: of 4 bits two integers each."""
    return lambda start, stop: np.ascontiguousarray(words[start:stop]).view(np.uint8)


def _kind_of(codes: Codes) -> str:
    """The smallest kind that holds them, "" if none does."""
    if not codes.regular:
        return ""
    if codes.low is not None:
        fits = exact_half(codes.scale) and exact_half(codes.low)
        return "" if codes.bits > 4 else "Q4_1" if fits else "Q4_W"
    middle, exact = bool((codes.zero == 1 << (codes.bits - 1)).all()), exact_half(codes.scale)
    if codes.bits > 4:  # those of fewer than 8 bits fit in int8 less any zero-point
        return "" if codes.bits == 8 and not middle else "Q8_0" if exact else "Q8_W"
    if codes.bits in (3, 4) and middle and exact:
        return "Q4_0"
    return "Q4_1" if exact and exact_half(codes.scale * codes.zero) else "Q4_W"


def by_block(
    codes: Codes, values: NDArray[np.generic], start: int, stop: int
) -> NDArray[np.generic]:
    """The value of the group of each 32 columns of these rows."""
    blocks = codes.shape[1] // GROUP
    part = values[start:stop] if len(values) > 1 or codes.shape[0] == 1 else values
    return np.broadcast_to(np.repeat(part, blocks // part.shape[1], axis=1), (stop - start, blocks))


def _joined(*fields: NDArray[Any]) -> U8:
    """The bytes of blocks from their fields [rows, blocks, ...], by row."""
    raw = [np.ascontiguousarray(field).view(np.uint8) for field in fields]
    return np.concatenate(raw, axis=-1).reshape(len(raw[0]), -1)


def _nibble_blocks(kind: str, codes: Codes, start: int, stop: int) -> U8:
    """Q4_0, Q4_1 or Q4_W."""
    if codes.pairs is None:
        q = codes.read(start, stop).reshape(stop - start, -1, GROUP)
        if kind == "Q4_0" and codes.bits == 3:
            q = q + np.uint8(4)  # whose middle is 8
        q = q[..., :16] | q[..., 16:] << np.uint8(4)
    else:
        q = halves_of_pairs(codes.pairs(start, stop).reshape(stop - start, -1, GROUP // 2))
    fields = [by_block(codes, codes.scale, start, stop)]
    if kind != "Q4_0":
        low = codes.low
        if low is None:
            low = -codes.scale * codes.zero.astype(np.float32)
        fields.append(by_block(codes, low, start, stop))
    numbers = np.stack(fields, axis=-1).astype(np.float32 if kind == "Q4_W" else np.float16)
    return _joined(numbers, q)


def halves_of_pairs(pairs: U8) -> U8:
    """Groups of 32 nibbles, of which 16 bytes hold two neighbours each, the first in the low
    nibble, as GGML has them: the first 16 are the low ones."""
    out = np.empty_like(pairs)
    low, high = pairs[..., :8], pairs[..., 8:]
    out[..., 0::2] = low & np.uint8(15) | high << np.uint8(4)
    out[..., 1::2] = low >> np.uint8(4) | high & np.uint8(0xF0)
    return out


def _byte_blocks(kind: str, codes: Codes, start: int, stop: int) -> U8:
    """Q8_0 or Q8_W."""
    zero = by_block(codes, codes.zero, start, stop).astype(np.uint8)  # what wraps around is int8
    q = codes.read(start, stop).reshape(stop - start, -1, GROUP) - zero[..., None]
    scale = by_block(codes, codes.scale, start, stop)
    if kind == "Q8_0":
        return _joined(scale[..., None].astype(np.float16), q)
    return _joined(np.stack([scale, scale], axis=-1), q)


def _rounded(codes: Codes, start: int, stop: int) -> U8:
    columns = codes.shape[1]
    groups = codes.groups
    if groups is None:
        groups = np.arange(columns, dtype=np.int32) // (columns // codes.scale.shape[1])
    scale = codes.scale[start:stop]
    zero = np.broadcast_to(codes.zero, codes.scale.shape)[start:stop].astype(np.float32)
    values = codes.read(start, stop).astype(np.float32)
    values -= zero[:, groups]
    values *= scale[:, groups]
    if codes.low is not None:
        values += codes.low[start:stop][:, groups]
    return int8_blocks(values)


def of_bytes(
    name: str, q: U8, scale: F32, zero: NDArray[np.int32] | None = None
) -> QuantisedMatrix:
    """A matrix of int8 [rows, columns] with scales [rows, groups] and zero-points, if not 0."""
    zero = np.array([[0]]) if zero is None else zero
    shape = (q.shape[0], q.shape[1])
    codes = Codes(name, shape, 8, lambda a, b: q[a:b] ^ np.uint8(0x80), scale, zero + 128)
    return of_codes(codes, "int8")


def group_count(name: str, columns: int, size: int) -> int:
    """The number of groups of so many columns; -1: one group.
    EngineFault('quantization_invalid')."""
    if size == -1:
        return 1
    if size < 1 or columns % size:
        raise invalid(f"group_size is {size}, and {name} has {columns} columns")
    return columns // size


def group_of_columns(
    tensors: CheckpointTensors, name: str, columns: int, groups: int
) -> NDArray[np.int32] | None:
    """The group of each column; None where they lie one behind the other, or there is no such
    tensor."""
    if not tensors.has(name):
        return None
    order = tensors.raw(name, "I32", (columns,)).astype(np.int32, copy=False)
    if order.min() < 0 or order.max() >= groups:
        raise invalid(f"{name} names groups {order.min()} to {order.max()}, and there are {groups}")
    return None if np.array_equal(order, np.arange(columns) // (columns // groups)) else order


def block_sizes(key: str, said: Any) -> tuple[int, int]:
    """Rows and columns of blocks. EngineFault('quantization_invalid') unless these are two
    sizes."""
    fits = isinstance(said, list) and len(said) == 2 and all(type(n) is int and n > 0 for n in said)
    if not fits:
        raise invalid(f"{key} should be two sizes, not {said!r}")
    return said[0], said[1]


def of_float8(name: str, bits: U8, scale: F32, block: tuple[int, int]) -> QuantisedMatrix:
    """e4m3 [rows, columns] with a scale for each block of so many rows and columns (at the edges
    they may be smaller). EngineFault('quantization_invalid') for a NaN: of scales at once, of
    values when read."""
    rows, columns = bits.shape
    check_columns(name, columns)
    check_scales(name, scale)
    if block[1] % GROUP:
        raise unsupported(
            f"{name}: blocks of {block[1]} columns are not supported, only multiples of {GROUP}"
        )
    places = np.arange(columns // GROUP) * GROUP // block[1]

    def blocks(start: int, stop: int) -> U8:
        part = bits[start:stop]
        if ((part & np.uint8(0x7F)) == 0x7F).any():
            raise invalid(f"{name} holds values that are not finite")
        numbers = scale[np.arange(start, stop) // block[0]][:, places]
        return _joined(numbers[..., None], part.reshape(stop - start, -1, GROUP))

    return QuantisedMatrix("F8_W", (rows, columns), blocks)


def of_float4(name: str, packed: U8, exponents: U8, experts: int = 0) -> QuantisedMatrix:
    """e2m1 floats, two neighbours in each byte of packed [rows, columns / 2], the first in the low
    nibble, with an exponent of 8 bits for each 32: [rows, columns / 32].

    experts  so many matrices lie one behind the other in these rows
    """
    rows, columns = packed.shape[0], packed.shape[1] * 2
    check_columns(name, columns)
    if (exponents == 255).any():
        raise invalid(f"the scales of {name} hold values that are not finite")

    def blocks(start: int, stop: int) -> U8:
        pairs = packed[start:stop].reshape(stop - start, -1, GROUP // 2)
        return _joined(exponents[start:stop, :, None], halves_of_pairs(pairs))

    shape = (experts, rows // experts, columns) if experts else (rows, columns)
    return QuantisedMatrix("MXFP4", shape, blocks)


def of_nvfp4(name: str, packed: U8, scale: F32) -> QuantisedMatrix:
    """e2m1 floats, two neighbours in each byte of packed [rows, columns / 2], the first in the low
    nibble, with a scale for each 16: [rows, columns / 16]."""
    shape = (packed.shape[0], packed.shape[1] * 2)
    check_columns(name, shape[1])
    check_scales(name, scale)

    def blocks(start: int, stop: int) -> U8:
        part = packed[start:stop]
        q = E2M1[np.stack([part & np.uint8(15), part >> np.uint8(4)], axis=-1)]
        halves = (scale[start:stop] / np.float32(2)).reshape(stop - start, -1, 2)
        return _joined(halves, q.reshape(stop - start, -1, GROUP))

    becomes = "NVFP4 becomes int8 with a scale for each 16 values, which is exact and takes 10 bits"
    return QuantisedMatrix("Q8_W", shape, blocks, becomes)


def of_table(
    name: str, packed: U8, table: F32, scale: F32, shape: tuple[int, int], block: int
) -> QuantisedMatrix:
    """Nibbles that stand for 16 floats, two neighbours in each byte, the first in the high nibble.

    packed  [rows * columns / 2]
    table   [16], within -1 .. 1
    scale   of each `block` neighbours, rows one behind the other: [rows * columns / block]
    """
    columns = shape[1]
    check_columns(name, columns)
    check_scales(name, scale)
    if block % GROUP:
        raise unsupported(
            f"{name}: blocks of {block} values are not supported, only multiples of {GROUP}"
        )
    steps, integers, error = nearest_integers(table)

    def blocks(start: int, stop: int) -> U8:
        part = packed[start * columns // 2 : stop * columns // 2]
        pairs = (part << np.uint8(4) | part >> np.uint8(4)).reshape(stop - start, -1, GROUP // 2)
        places = np.arange(start * columns, stop * columns, GROUP) // block
        numbers = (scale[places] / np.float32(steps)).astype(np.float32)
        entries = np.broadcast_to(integers, (*pairs.shape[:2], 16))
        return _joined(numbers.reshape(stop - start, -1, 1), entries, halves_of_pairs(pairs))

    becomes = ""
    if error:
        share = f"{error:.1%}"
        becomes = f"a table of 16 floats (nf4, fp4) becomes one of 16 integers (root mean square error {share})"
    return QuantisedMatrix("T4_W", shape, blocks, becomes)


def nearest_integers(table: F32) -> tuple[float, NDArray[np.int8], float]:
    """(steps, integers, error): integers / steps is nearest to the table, of all steps up to 127
    over its largest value; the error is relative, as root mean square, where all 16 are as
    frequent."""
    most = float(np.abs(table).max())
    if not (np.isfinite(table).all() and most > 0):
        raise invalid("its table of 16 values holds no finite numbers")
    tried = np.arange(60, 127.01, 0.05) / most
    exact = np.multiply.outer(tried, table.astype(np.float64))
    left = np.square((np.rint(exact) - exact) / tried[:, None]).mean(axis=1)
    best = int(np.argmin(left))
    error = float(np.sqrt(left[best] / np.square(table, dtype=np.float64).mean()))
    return float(tried[best]), np.rint(exact[best]).astype(np.int8), error if error > 1e-6 else 0.0
