"""Attention over block tables. Tiles of KV begin at absolute positions that are multiples of BLOCK_T.

A tile of rows holds `tokens` rows of one sequence with the query heads that share a KV head. The partials
(peak, total, mixed) of a segment of 256 positions are computed on their own and merged from the first to the
last: by one program (WHOLE: long chunks of a prompt), or by `merge` (few rows of a long context). What a row
does not see leaves its partials as they were, bit for bit, so who shares its tile cannot matter; sums over
positions are matrix products, whose order is that of the instruction, and not of a layout.
"""

import triton
import triton.language as tl

from pageturner.kernels.gpu.source.products import e4m3_fields
from pageturner.kernels.gpu.source.rows import tanh

SEGMENT = tl.constexpr(256)


@triton.jit
def load_heads(kv, scales, slot, head, heads, dim, d, seen, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """Of each slot one head [positions, D] in the type that products are computed in."""
    index = slot * heads + head
    inside = seen[:, None] & (d[None, :] < dim)
    value = tl.load(kv + index[:, None] * dim + d[None, :], mask=inside, other=0)
    if KIND == "int8":
        scale = tl.load(scales + index, mask=seen, other=0.0)
        heads_of = (value.to(tl.float32) * scale[:, None]).to(COMPUTE)
    elif KIND == "fp8_e4m3":
        # a power of two from 2^-14 to 2^7: it and 256 are one factor, and the product is exact in fp16
        scale = tl.load(scales + index, mask=seen, other=0.0)
        heads_of = e4m3_fields(value) * (scale * 256.0).to(tl.float16)[:, None]
    else:
        heads_of = value
    return heads_of


@triton.jit
def rescale(peak, new_peak):
    """exp(peak - new_peak), 1 where nothing was seen yet."""
    return tl.where(peak == new_peak, 1.0, tl.exp(peak - new_peak))


@triton.jit
def merged(peak, total, mixed, part_peak, part_total, part_mixed):
    """Two partials as one; one that saw nothing changes nothing."""
    new_peak = tl.maximum(peak, part_peak)
    old, new = rescale(peak, new_peak), rescale(part_peak, new_peak)
    total = total * old + part_total * new
    mixed = mixed * old[:, None] + part_mixed * new[:, None]
    return new_peak, total, mixed


@triton.jit
def store_mixed(
    peak, total, mixed, out, sinks, has_sinks, row, head, valid, heads, dim, d
):  # fmt: skip
    """The quotient, the sink last. Rows of a tile that are none have a total of 0."""
    if has_sinks:
        sink = tl.load(sinks + head, mask=valid, other=0.0)
        new_peak = tl.maximum(peak, sink)
        old = rescale(peak, new_peak)
        total = total * old + tl.exp(sink - new_peak)
        mixed = mixed * old[:, None]
    value = mixed / tl.where(total > 0, total, 1.0)[:, None]
    at = (row * heads + head)[:, None] * dim + d[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=valid[:, None] & (d[None, :] < dim))


@triton.jit
def segment_partial(
    q, keys, values, k_scales, v_scales, table, slopes, has_slopes, position, first, last, lowest, segment,
    kv_head, query_head, kv_heads, dim, block_size, scale, soft_cap, valid, d,
    KIND: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Of R rows over one segment. first [R]: the first position that a row sees; lowest and last: the first
    and the last one that any row of the tile sees."""
    peak = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    mixed = tl.zeros((R, D), tl.float32)
    ones = tl.full((BLOCK_T, 16), 1.0, tl.float32).to(q.dtype)
    begin = tl.maximum(segment * SEGMENT, lowest // BLOCK_T * BLOCK_T)
    end = tl.minimum(segment * SEGMENT + SEGMENT, last + 1)
    for start in range(begin, end, BLOCK_T):
        j = start + tl.arange(0, BLOCK_T)
        there = (j <= last) & (j >= lowest)
        block = tl.load(table + j // block_size, mask=there, other=0).to(tl.int64)
        slot = block * block_size + j % block_size
        k = load_heads(keys, k_scales, slot, kv_head, kv_heads, dim, d, there, KIND, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if soft_cap > 0:
            scores = soft_cap * tanh(scores / soft_cap)
        if has_slopes:
            slope = tl.load(slopes + query_head, mask=valid, other=0.0)
            scores += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
        sees = (j[None, :] <= position[:, None]) & (j[None, :] >= first[:, None]) & valid[:, None]
        scores = tl.where(sees, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        old = rescale(peak, new_peak)
        weights = tl.where(sees, tl.exp(scores - new_peak[:, None]), 0.0).to(q.dtype)
        v = load_heads(values, v_scales, slot, kv_head, kv_heads, dim, d, there, KIND, q.dtype)
        sums = tl.max(tl.dot(weights, ones, input_precision="ieee"), axis=1)
        total = total * old + sums
        mixed = mixed * old[:, None] + tl.dot(weights, v, input_precision="ieee")
        peak = new_peak
    return peak, total, mixed


@triton.jit
def attend(
    q, keys, values, k_scales, v_scales, tables, positions, tiles, slopes, sinks, out, peaks, mixes,
    stride, has_slopes, has_sinks, heads, kv_heads, dim, width, block_size, segments, window, chunked,
    scale, soft_cap,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, WHOLE: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """q fp32 [T, heads * dim], rows `stride` apart. tiles [n, 4]: sequence, first row, rows, first row P of
    partials. Grid: n, kv_heads, segments or 1. Partials: peaks [P * heads, segments, 2] and mixes
    [P * heads, segments, D]."""
    tile, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = tl.load(tiles + tile * 4).to(tl.int64)
    row0, count = tl.load(tiles + tile * 4 + 1), tl.load(tiles + tile * 4 + 2)
    group = heads // kv_heads
    r, d = tl.arange(0, R), tl.arange(0, D)
    valid = r < count * group
    row = (row0 + r // group).to(tl.int64)
    head = kv_head * group + r % group
    position = tl.load(positions + row, mask=valid, other=0)
    first = tl.where(chunked != 0, position - position % tl.maximum(window, 1), position - window + 1)
    first = tl.where(window > 0, tl.maximum(first, 0), 0)
    last = tl.max(tl.where(valid, position, -1), axis=0)
    lowest = tl.min(tl.where(valid, first, 2147483647), axis=0)
    at = (row * stride + head * dim)[:, None] + d[None, :]
    query = tl.load(q + at, mask=valid[:, None] & (d[None, :] < dim), other=0.0).to(COMPUTE)
    table = tables + sequence * width
    if WHOLE:
        peak = tl.full((R,), float("-inf"), tl.float32)
        total = tl.zeros((R,), tl.float32)
        mixed = tl.zeros((R, D), tl.float32)
        for segment in range(lowest // SEGMENT, last // SEGMENT + 1):
            part_peak, part_total, part_mixed = segment_partial(
                query, keys, values, k_scales, v_scales, table, slopes, has_slopes, position, first, last,
                lowest, segment, kv_head, head, kv_heads, dim, block_size, scale, soft_cap, valid, d,
                KIND, R, D, BLOCK_T,
            )  # fmt: skip
            peak, total, mixed = merged(peak, total, mixed, part_peak, part_total, part_mixed)
        store_mixed(peak, total, mixed, out, sinks, has_sinks, row, head, valid, heads, dim, d)
    else:
        segment = tl.program_id(2)
        if (segment * SEGMENT <= last) & (segment >= lowest // SEGMENT):
            peak, total, mixed = segment_partial(
                query, keys, values, k_scales, v_scales, table, slopes, has_slopes, position, first, last,
                lowest, segment, kv_head, head, kv_heads, dim, block_size, scale, soft_cap, valid, d,
                KIND, R, D, BLOCK_T,
            )  # fmt: skip
            kept = tl.load(tiles + tile * 4 + 3) + r // group
            part = (kept.to(tl.int64) * heads + head) * segments + segment
            tl.store(peaks + part * 2, peak, mask=valid)
            tl.store(peaks + part * 2 + 1, total, mask=valid)
            tl.store(mixes + part[:, None] * D + d[None, :], mixed, mask=valid[:, None])


@triton.jit
def merge(
    peaks, mixes, positions, tiles, sinks, out, has_sinks, heads, kv_heads, dim, segments, window, chunked,
    R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The partials of `attend`, from the first segment that the tile sees to the last. Grid: n, kv_heads."""
    tile, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row0, count = tl.load(tiles + tile * 4 + 1), tl.load(tiles + tile * 4 + 2)
    group = heads // kv_heads
    r, d = tl.arange(0, R), tl.arange(0, D)
    valid = r < count * group
    row = (row0 + r // group).to(tl.int64)
    head = kv_head * group + r % group
    position = tl.load(positions + row, mask=valid, other=0)
    first = tl.where(chunked != 0, position - position % tl.maximum(window, 1), position - window + 1)
    first = tl.where(window > 0, tl.maximum(first, 0), 0)
    last = tl.max(tl.where(valid, position, -1), axis=0)
    lowest = tl.min(tl.where(valid, first, 2147483647), axis=0)
    peak = tl.full((R,), float("-inf"), tl.float32)
    total = tl.zeros((R,), tl.float32)
    mixed = tl.zeros((R, D), tl.float32)
    kept = tl.load(tiles + tile * 4 + 3) + r // group
    for segment in range(lowest // SEGMENT, last // SEGMENT + 1):
        part = (kept.to(tl.int64) * heads + head) * segments + segment
        part_peak = tl.load(peaks + part * 2, mask=valid, other=float("-inf"))
        part_total = tl.load(peaks + part * 2 + 1, mask=valid, other=0.0)
        part_mixed = tl.load(mixes + part[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
        peak, total, mixed = merged(peak, total, mixed, part_peak, part_total, part_mixed)
    store_mixed(peak, total, mixed, out, sinks, has_sinks, row, head, valid, heads, dim, d)
