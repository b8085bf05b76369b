"""Matrices of quantised checkpoints as blocks that kernels compute with, some rows at a time.

Owns how integers, scales and zero-points of any grouping become a kind of formats/ggml.py without losing a
bit,
and where they do not: then as int8, which is said in a line. Must not know in which tensors of a file they
lie: that is for the readers of each format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.formats.ggml import GROUP, U8
from pageturner.formats.ggml_types import BY_NAME
from pageturner.kernels.base import F32
from pageturner.models.quantise import int8_blocks

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


@dataclass(frozen=True, slots=True)
class Codes:
    """Unsigned integers of `bits` bits [rows, columns], read some rows at a time, and what they stand for:
    scale[r, g] * (code - zero[r, g]), where g is the group of the column.

    scale   fp32 [rows, groups]
    zero    [rows, groups], or one for all
    groups  of each column, where they are not simply one behind the other
    pairs   the same integers of 4 bits, two neighbours in a byte, the first in its low nibble, where files
            have them so
    """

    name: str
    shape: tuple[int, int]
    bits: int
    read: Rows
    scale: F32
    zero: NDArray[np.int32]
    groups: NDArray[np.int32] | None = None
    pairs: Rows | None = None

    @property
    def regular(self) -> bool:
        """Whether 32 neighbours always are of one group."""
        return self.groups is None and self.shape[1] // self.scale.shape[1] % GROUP == 0


def invalid(message: str) -> EngineFault:
    """What a checkpoint says of itself is not true."""
    return EngineFault("quantization_invalid", message)


def of_codes(codes: Codes, method: str) -> QuantisedMatrix:
    """The matrix of integers of 2, 4 or 8 bits. EngineFault 'quantization_invalid' for scales that are no
    numbers, 'model_unsupported' for columns that are not whole groups of 32."""
    check_columns(codes.name, codes.shape[1])
    check_scales(codes.name, codes.scale)
    kind = _kind_of(codes)
    if kind:
        make = _byte_blocks if codes.bits == 8 else _nibble_blocks
        return QuantisedMatrix(
            kind, codes.shape, lambda start, stop: make(kind, codes, start, stop)
        )
    why = "zero-points of 8 bits"
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
        message = f"{name} is quantised and has {columns} columns; only multiples of {GROUP} are supported"
        raise EngineFault("model_unsupported", message)


def check_scales(name: str, scale: F32) -> None:
    """EngineFault('quantization_invalid') for scales that are not finite."""
    if not np.isfinite(scale).all():
        raise invalid(f"the scales of {name} hold values that are not finite")


def exact_half(x: F32) -> bool:
    """Whether fp16 holds all of these."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(x.astype(np.float16).astype(np.float32), x))


def unpack(words: NDArray[np.generic], bits: int) -> U8:
    """The integers of `bits` bits, lowest first, of words [rows, n]: [rows, n * 32 / bits]."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    return (raw[:, :, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(raw), -1)


def _kind_of(codes: Codes) -> str:
    """The smallest kind that holds them, "" if none does."""
    if not codes.regular:
        return ""
    middle, exact = bool((codes.zero == 1 << (codes.bits - 1)).all()), exact_half(codes.scale)
    if codes.bits == 8:
        return "" if not middle else "Q8_0" if exact else "Q8_W"
    if codes.bits == 4 and middle and exact:
        return "Q4_0"
    return "Q4_1" if exact and exact_half(codes.scale * codes.zero) else "Q4_W"


def by_block(
    codes: Codes, values: NDArray[np.generic], start: int, stop: int
) -> NDArray[np.generic]:
    """What each group has, for each 32 columns of these rows."""
    blocks = codes.shape[1] // GROUP
    part = values[start:stop] if len(values) > 1 or codes.shape[0] == 1 else values
    return np.broadcast_to(np.repeat(part, blocks // part.shape[1], axis=1), (stop - start, blocks))


def _nibble_blocks(kind: str, codes: Codes, start: int, stop: int) -> U8:
    """Q4_0, Q4_1 or Q4_W."""
    if codes.pairs is None:
        q = halves_of(codes.read(start, stop).reshape(stop - start, -1, GROUP))
    else:
        q = halves_of_pairs(codes.pairs(start, stop).reshape(stop - start, -1, GROUP // 2))
    number = np.dtype(np.float32 if kind == "Q4_W" else np.float16)
    fields = [by_block(codes, codes.scale, start, stop)]
    if kind != "Q4_0":
        fields.append(by_block(codes, -codes.scale * codes.zero.astype(np.float32), start, stop))
    out = np.empty((*q.shape[:2], BY_NAME[kind].nbytes), np.uint8)
    head = len(fields) * number.itemsize
    out[..., :head] = np.stack(fields, axis=-1).astype(number).view(np.uint8)
    out[..., head:] = q
    return out.reshape(stop - start, -1)


def halves_of(nibbles: U8) -> U8:
    """Groups of 32 nibbles as 16 bytes, as GGML has them: the first 16 are the low ones."""
    return nibbles[..., :16] | nibbles[..., 16:] << np.uint8(4)


def halves_of_pairs(pairs: U8) -> U8:
    """The same of 16 bytes that hold two neighbours each, the first in the low nibble."""
    out = np.empty_like(pairs)
    low, high = pairs[..., :8], pairs[..., 8:]
    out[..., 0::2] = low & np.uint8(15) | high << np.uint8(4)
    out[..., 1::2] = low >> np.uint8(4) | high & np.uint8(0xF0)
    return out


def _byte_blocks(kind: str, codes: Codes, start: int, stop: int) -> U8:
    """Q8_0 or Q8_W."""
    q = codes.read(start, stop).reshape(stop - start, -1, GROUP) ^ np.uint8(0x80)
    return int8_with(kind, by_block(codes, codes.scale, start, stop), q)


def int8_with(kind: str, scale: NDArray[np.generic], q: U8) -> U8:
    """Blocks Q8_0 or Q8_W of integers [rows, blocks, 32] with scales [rows, blocks]."""
    out = np.empty((*q.shape[:2], BY_NAME[kind].nbytes), np.uint8)
    head = out.shape[2] - GROUP
    numbers = (
        scale[..., None].astype(np.float16) if kind == "Q8_0" else np.stack([scale, scale], axis=-1)
    )
    out[..., :head] = np.ascontiguousarray(numbers).view(np.uint8)
    out[..., head:] = q
    return out.reshape(len(q), -1)


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
    return int8_blocks(values)


def of_bytes(name: str, q: U8, scale: F32) -> QuantisedMatrix:
    """A matrix of int8 [rows, columns] with scales [rows, groups]."""
    codes = Codes(
        name,
        (q.shape[0], q.shape[1]),
        8,
        lambda a, b: q[a:b] ^ np.uint8(0x80),
        scale,
        np.array([[128]]),
    )
    return of_codes(codes, "int8")
