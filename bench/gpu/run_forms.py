"""Every form of quantised weights on a device: against fp64 products of their own values, the bits of a row
at every height, every fp8 code, and the time of the products of an 8B model beside bf16 and torch's int4.

The bound is derived, not fitted. A product of K columns in groups of G is sums in fp32: of the G products of
a group, in the matrix unit, then two additions for each group (times its scale, times its low value), then
one for each of at most 16 parts. fp8 has one group of K. An addition errs by at most 2^-23 of S, the sum of
the magnitudes of all terms (the matrix unit cuts where others round to 2^-24), and so does a product with a
scale. So |error| <= n 2^-23 S with n = G + 4 K / G + 16. Measured errors are told in units of 2^-23 S; about
1 is expected, more than n is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from run_common import (
    COLD,
    LLAMA_8B,
    Room,
    floats,
    recorded_seconds,
    tell,
    torch_here,
    torch_seconds,
)
from tests.kernels import grid

from pageturner.formats import float8, ggml
from pageturner.kernels.base import Tensor
from pageturner.kernels.gpu.arrays import BYTES, padded
from pageturner.kernels.gpu.catalogue import GROUPED
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.weights import BLOCK_ROWS, FloatMatrix, Groups
from pageturner.kernels.reference_arrays import to_bf16

HEIGHTS = (1, 8, 9, 16, 17, 64, 65, 300)  # rows
SIZE = (1040, 4096)  # of a weight: the last tile of its rows is not full, and it is cut into parts
WHOLE = (17408, 512)  # of one part, so that gate and up are one launch
# Kinds of files: name of the form that they become, and whether it has lows
FORMS = {
    "Q4_0": ("4.32.fp16", False),
    "Q4_1": ("4.32.fp16", True),
    "Q4_K": ("4.32", True),
    "Q4_W": ("4.128", True),
    "Q4_0 g128": ("4.128", False),
    "Q5_0": ("5.32", False),
    "Q5_1": ("5.32", True),
    "Q8_0": ("8.32", False),
    "Q6_K": ("8.16", False),
    "Q2_K": ("8.16", True),
    "F8_W": ("fp8", False),
}
TIMED_ROWS = (1, 16, 64, 256)
TIMED = {  # label -> form, whether with lows
    "int4 g32 low": ("4.32.fp16", True),
    "int4 g32": ("4.32.fp16", False),
    "Q4_K": ("4.32", True),
    "int4 g128 low": ("4.128", True),
    "Q5_0": ("5.32", False),
    "Q8_0": ("8.32", False),
    "Q6_K": ("8.16", False),
    "fp8": ("fp8", False),
}


def forms(room: Room) -> None:
    for kind in FORMS:
        right(room, kind)
    codes(room)
    times(room)


# -- right ---------------------------------------------------------------------------------------------------
def tensor_of(kind: str, rows: int, columns: int) -> Tensor:
    """Random, of the kind of file."""
    if kind == "F8_W":
        codes = grid.rng(3).integers(0, 127, (rows, columns), dtype=np.uint8)
        codes |= grid.rng(4).integers(0, 2, codes.shape, dtype=np.uint8) << 7
        return grid.fp8(codes, grid.rng(5).uniform(0.5, 2, rows) / columns**0.5)
    if kind == "Q2_K":
        data = grid.rng(3).integers(0, 256, (rows, columns // 256, 84), dtype=np.uint8)
        data[..., 80:] = np.array([0.002, 0.003], np.float16).view(np.uint8)
        return Tensor("w", kind, (rows, columns), data.reshape(-1))
    tensor = grid.weight(kind.removesuffix(" g128"), rows, columns, seed=3)
    if kind == "Q4_W":
        _alike(tensor, 24, 8)
    elif kind == "Q4_0 g128":
        _alike(tensor, 18, 2)
    return tensor


def _alike(tensor: Tensor, block: int, scales: int) -> None:
    """Four blocks in a row have one scale, so that they become one group."""
    blocks = tensor.data.reshape(tensor.shape[0], -1, 4, block)
    blocks[..., :scales] = blocks[:, :, :1, :scales]


def taken_apart(tensor: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The values, and the sum of the magnitudes of what each is made of; fp64."""
    rows, columns = tensor.shape
    values = ggml.dequantise(tensor.kind, tensor.shape, tensor.data).astype(np.float64)
    if tensor.kind == "F8_W":
        return values, np.abs(values)
    q, scale, low = ggml.unpack(tensor.kind, tensor.shape, tensor.data)
    size = np.abs(scale[..., None].astype(np.float64) * q)
    if low is not None:
        size += np.abs(low[..., None].astype(np.float64))
    return values, size.reshape(rows, columns)


def right(room: Room, kind: str) -> None:
    """One form at every height. Tells which heights have other bits, and the first element that is wrong."""
    form, has_low = FORMS[kind]
    rows, columns = (40, 2304) if room.tiny else SIZE
    heights = (1, 9, 17) if room.tiny else HEIGHTS
    tensor = tensor_of(kind, rows, columns)
    ops = room.ops(1, graphs=False)
    weight = ops.pack_weight(tensor)
    assert (weight.sort, bool(getattr(weight, "low", 0))) == (form, has_low), weight.sort
    x = np.random.default_rng(7).standard_normal((max(heights), columns), dtype=np.float32)
    x = (to_bf16(x).astype(np.uint32) << 16).view(np.float32)
    values, size = taken_apart(tensor)
    truth, bound = x.astype(np.float64) @ values.T, np.abs(x).astype(np.float64) @ size.T
    found = {}
    for height in heights:
        ops.begin()
        found[height] = ops.to_numpy(ops.linear(ops.on_device(x[:height]), weight))
    error = np.abs(found[max(heights)] - truth) / (bound * 2.0**-23)
    group = GROUPED[form][1] or columns
    limit = group + 4 * columns // group + 16
    wrong = np.argwhere(~(error <= limit))
    others = {height: _differ(mine, found[max(heights)][:height]) for height, mine in found.items()}
    tokens = np.array([0, rows - 1, 17], np.int32)
    embedded = ops.to_numpy(ops.embed(weight, tokens))
    tell(
        "forms",
        what="right",
        kind=kind,
        form=form,
        low=has_low,
        worst=float(np.nanmax(error)),
        limit=limit,
        finite=bool(np.isfinite(error).all()),
        wrong=len(wrong),
        first=wrong[:1].tolist(),
        relative=float(np.linalg.norm(found[max(heights)] - truth) / np.linalg.norm(truth)),
        other_bits={str(height): count for height, count in others.items() if count},
        embedded=_differ(embedded, values[tokens].astype(np.float32)),
        gated=_gated(room, ops, kind),
    )
    room.driver.release()


def _differ(mine: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int:
    return int((mine.view(np.int32) != other.view(np.int32)).sum())


def _gated(room: Room, ops: GpuOps, kind: str) -> int:
    """How many elements differ between gate and up in one launch, which many rows have, and in two."""
    weight = ops.pack_weight(tensor_of(kind, *((64, 512) if room.tiny else WHOLE)))
    count = 0
    for height in (1, 17 if room.tiny else 300):
        ops.begin()
        x = ops.on_device(np.random.default_rng(8).standard_normal((height, 512), dtype=np.float32))
        apart = ops.launches.gated(ops.launches.gemm(x, weight), "bf16")
        joined = ops.launches.gated_gemm(x, weight, "bf16")
        both = []
        for one in (apart, joined):
            bits = np.empty(one.shape, np.uint16)
            room.driver.download(bits, one.address)
            both.append(bits)
        count += int((both[0] != both[1]).sum())
    return count


def codes(room: Room) -> None:
    """Products of every e4m3 code with 1 are its value, subnormals too."""
    every = np.arange(256, dtype=np.uint8)
    every[every & 0x7F == 0x7F] = 0
    ops = GpuOps(room.driver, 64 << 20, graphs=False)
    weight = ops.pack_weight(grid.fp8(np.tile(every, (16, 1)), np.ones(16)))
    eye, wrong = np.eye(256, dtype=np.float32), set()
    for rows in (1, 16, 256) if not room.tiny else (256,):
        for first in range(0, 256, rows):
            ops.begin()
            got = ops.to_numpy(ops.linear(ops.on_device(eye[first : first + rows]), weight))
            expected = float8.VALUES[every[first : first + rows], None]
            wrong |= {int(first + at) for at in np.argwhere((got != expected).any(axis=1))[:, 0]}
    tell("forms", what="codes", wrong=sorted(wrong))
    room.driver.release()


# -- times ---------------------------------------------------------------------------------------------------
def times(room: Room) -> None:
    """Products of a layer of an 8B model, weights from memory, recorded and replayed."""
    for name, (n, k) in {"tiny": (64, 256)}.items() if room.tiny else LLAMA_8B.matrices.items():
        base = {}
        for label, rows, took in _timed(room, n, k):
            if label == "bf16":
                base[rows] = took
            tell(
                "forms",
                what="times",
                shape=name,
                kind=label,
                rows=rows,
                us=1e6 * took,
                times=base[rows] / took,
            )


def _timed(room: Room, n: int, k: int) -> Iterator[tuple[str, int, float]]:
    timed = (1,) if room.tiny else TIMED_ROWS
    for label in ("bf16", *TIMED):
        ops = room.ops(1, graphs=False)
        first = (
            ops.pack_weight(floats(n, k, 1)) if label == "bf16" else empty(ops, *TIMED[label], n, k)
        )
        copies = 1 if room.tiny else max(2, -(-COLD // first.nbytes))
        weights = [first, *(copied(ops, first) for _ in range(copies - 1))]
        for rows in timed:
            ops.begin()
            host = np.random.default_rng(rows).standard_normal((rows, k), dtype=np.float32)
            x = ops.launches.cast(ops.on_device(host), "bf16")
            works = [partial(_product, ops, x, weight, ops.arena.mark) for weight in weights]
            yield label, rows, recorded_seconds(room.driver, works, room.tiny, 0.03)
        room.driver.release()
    torch = torch_here(room)
    if torch is not None:
        for rows in timed:
            for group in (32, 128):
                took = _torch_int4(torch, rows, n, k, group)
                if took:
                    yield f"torch int4 g{group}", rows, took


def _product(ops: GpuOps, x: Any, weight: Any, mark: int) -> None:
    ops.arena.reset(mark)
    ops.launches.gemm(x, weight)


def empty(ops: GpuOps, form: str, low: bool, n: int, k: int) -> Groups:
    """A weight of random bits: what it holds takes no time on the host."""
    bits, group, scales = GROUPED[form]
    found = Groups(1, int(bits == 5), 1, int(low), bits, group, 8 if bits == 4 else 0, n, k, scales)
    rows, at = -(-n // BLOCK_ROWS) * BLOCK_ROWS, {}
    some = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
    few = np.random.default_rng(1).standard_normal(1 << 18).astype(np.float32)
    for name, nbytes in found.parts():
        whole = rows * nbytes
        at[name] = ops.driver.alloc(padded(whole))
        block = (
            few.astype(np.float16 if BYTES[scales] == 2 else np.float32)
            if name in ("scale", "low")
            else some
        )
        ops.driver.upload(at[name], block.view(np.uint8)[: min(whole, block.nbytes)])
        done = min(whole, block.nbytes)
        while done < whole:
            more = min(done, whole - done)
            ops.driver.copy(at[name] + done, at[name], more)
            done += more
    return replace(found, **at)


def copied(ops: GpuOps, weight: FloatMatrix | Groups) -> FloatMatrix | Groups:
    rows, at = -(-weight.rows // BLOCK_ROWS) * BLOCK_ROWS, {}
    if isinstance(weight, FloatMatrix):
        rows = weight.rows
    for name, nbytes in weight.parts():
        at[name] = ops.driver.alloc(padded(rows * nbytes))
        ops.driver.copy(at[name], getattr(weight, name), rows * nbytes)
    return replace(weight, **at)


def _torch_int4(torch: Any, rows: int, n: int, k: int, group: int) -> float:
    """Seconds of torch's int4 product, 0 where this torch has none for it."""
    try:
        raw = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        packed = torch.ops.aten._convert_weight_to_int4pack(raw, 8)
        scales = torch.randn(k // group, n, 2, dtype=torch.bfloat16, device="cuda")
        copies = [packed.clone() for _ in range(max(2, -(-COLD // (n * k // 2))))]
        x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
        works: list[Callable[[], Any]] = [
            partial(torch.ops.aten._weight_int4pack_mm, x, one, group, scales) for one in copies
        ]
        return torch_seconds(torch, works)
    except (RuntimeError, AttributeError, NotImplementedError) as fault:
        tell("forms", what="torch", group=group, why=str(fault)[:200], at=time.strftime("%H:%M"))
        return 0.0
    finally:
        torch.cuda.empty_cache()
