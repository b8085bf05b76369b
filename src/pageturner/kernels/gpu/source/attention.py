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
# Scores are kept times log2(e), so that an exponential is one instruction.
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_heads(kv, scales, slot, head, heads, dim, d, KIND: tl.constexpr, COMPUTE: tl.constexpr):
    """Of each slot one head [positions, D] in the type that products are computed in."""
    index = slot * heads + head
    value = tl.load((kv + index.to(tl.int64) * dim)[:, None] + d[None, :], mask=(d < dim)[None, :], other=0)
    if KIND == "int8":
        scale = tl.load(scales + index)
        heads_of = (value.to(tl.float32) * scale[:, None]).to(COMPUTE)
    elif KIND == "fp8_e4m3":
        # a power of two from 2^-14 to 2^7: it and 256 are one factor, and the product is exact in fp16
        scale = tl.load(scales + index)
        heads_of = e4m3_fields(value) * (scale * 256.0).to(tl.float16)[:, None]
    else:
        heads_of = value
    return heads_of


@triton.jit
def finite(peak):
    """0 in place of a peak of nothing, which is -inf: 2^(-inf - 0) is 0, and not a number's absence."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def nothing(R: tl.constexpr, D: tl.constexpr):
    """The partial of R rows that saw nothing."""
    return tl.full((R,), float("-inf"), tl.float32), tl.zeros((R,), tl.float32), tl.zeros((R, D), tl.float32)


@triton.jit
def first_seen(position, window, chunked):
    """The first position that a row sees."""
    first = tl.where(chunked != 0, position - position % tl.maximum(window, 1), position - window + 1)
    return tl.where(window > 0, tl.maximum(first, 0), 0)


@triton.jit
def merged(peak, total, mixed, part_peak, part_total, part_mixed):
    """Two partials as one; one that saw nothing changes nothing."""
    new_peak = tl.maximum(peak, part_peak)
    old, new = tl.exp2(peak - finite(new_peak)), tl.exp2(part_peak - finite(new_peak))
    total = total * old + part_total * new
    mixed = mixed * old[:, None] + part_mixed * new[:, None]
    return new_peak, total, mixed


@triton.jit
def store_mixed(
    peak, total, mixed, out, sinks, has_sinks, row, head, valid, heads, dim, d
):  # fmt: skip
    """The quotient, the sink last. Rows of a tile that are none are not stored."""
    if has_sinks:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * LOG2E
        new_peak = tl.maximum(peak, sink)
        old = tl.exp2(peak - new_peak)
        total = total * old + tl.exp2(sink - new_peak)
        mixed = mixed * old[:, None]
    value = mixed / tl.where(total > 0, total, 1.0)[:, None]
    at = (row * heads + head)[:, None] * dim + d[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=valid[:, None] & (d[None, :] < dim))


@triton.jit
def attend_tile(
    q, keys, values, k_scales, v_scales, table, slopes, has_slopes, position, first, last, lowest,
    every_first, every_last, start, kv_head, query_head, kv_heads, dim, shift, soft_cap, valid, d,
    peak, total, mixed, KIND: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The partial (peak, total, mixed) of R rows with the positions of one tile more. first [R]: the first
    position that a row sees; lowest and last: the first and the last one that any row of the tile sees, and
    every_first and every_last those that all of them see. What no row sees is read of the nearest that one
    does."""
    ones = tl.full((BLOCK_T, 16), 1.0, tl.float32).to(q.dtype)
    j = start + tl.arange(0, BLOCK_T)
    there = tl.minimum(tl.maximum(j, lowest), last)
    slot = (tl.load(table + (there >> shift)) << shift) + (there & ((1 << shift) - 1))
    k = load_heads(keys, k_scales, slot, kv_head, kv_heads, dim, d, KIND, q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if soft_cap > 0:
        cap = soft_cap * LOG2E
        scores = cap * tanh(scores / cap)
    if has_slopes:
        slope = tl.load(slopes + query_head, mask=valid, other=0.0) * LOG2E
        scores += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
    if (start < every_first) | (start + BLOCK_T > every_last + 1):
        sees = (j[None, :] <= position[:, None]) & (j[None, :] >= first[:, None])
        scores = tl.where(sees, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = finite(new_peak)
    old = tl.exp2(peak - base)
    weights = tl.exp2(scores - base[:, None]).to(q.dtype)
    v = load_heads(values, v_scales, slot, kv_head, kv_heads, dim, d, KIND, q.dtype)
    sums = tl.max(tl.dot(weights, ones, input_precision="ieee"), axis=1)
    total = total * old + sums
    mixed = mixed * old[:, None] + tl.dot(weights, v, input_precision="ieee")
    return new_peak, total, mixed


@triton.jit
def attend(
    q, keys, values, k_scales, v_scales, tables, positions, tiles, slopes, sinks, out, peaks, mixes,
    stride, has_slopes, has_sinks, heads, kv_heads, dim, width, shift, segments, window, chunked, scale,
    soft_cap, KIND: tl.constexpr, COMPUTE: tl.constexpr, WHOLE: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """q fp32 [T, heads * dim], rows `stride` apart; a block has 2^shift positions. tiles [n, 4]: sequence,
    first row, rows, first row P of partials. Grid: kv_heads, n, segments or 1. Partials: peaks [P * heads,
    segments, 2] and mixes [P * heads, segments, D]. Heads of a tile stand beside each other, as their keys
    do; of long chunks the last tile is the first: it takes longest. Absent rows see what the first sees."""
    kv_head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if WHOLE:
        tile = tl.num_programs(1) - 1 - tile
    sequence = tl.load(tiles + tile * 4).to(tl.int64)
    row0, count = tl.load(tiles + tile * 4 + 1), tl.load(tiles + tile * 4 + 2)
    group = heads // kv_heads
    r, d = tl.arange(0, R), tl.arange(0, D)
    valid = r < count * group
    row = tl.where(valid, row0 + r // group, row0).to(tl.int64)
    head = kv_head * group + r % group
    position = tl.load(positions + row)
    first = first_seen(position, window, chunked)
    last, every_last = tl.max(position, axis=0), tl.min(position, axis=0)
    lowest, every_first = tl.min(first, axis=0), tl.max(first, axis=0)
    at = (row * stride + head * dim)[:, None] + d[None, :]
    query = tl.load(q + at, mask=valid[:, None] & (d[None, :] < dim), other=0.0) * (scale * LOG2E)
    query = query.to(COMPUTE)
    table = tables + sequence * width
    peak, total, mixed = nothing(R, D)
    if WHOLE:
        every_peak, every_total, every_mixed = peak, total, mixed
        for start in range(lowest // BLOCK_T * BLOCK_T, last + 1, BLOCK_T):
            if (start + 0 * last) % SEGMENT == 0:  # a tensor for the interpreter too
                every_peak, every_total, every_mixed = merged(
                    every_peak, every_total, every_mixed, peak, total, mixed
                )  # fmt: skip
                peak, total, mixed = nothing(R, D)
            peak, total, mixed = attend_tile(
                query, keys, values, k_scales, v_scales, table, slopes, has_slopes, position, first, last,
                lowest, every_first, every_last, start, kv_head, head, kv_heads, dim, shift, soft_cap, valid,
                d, peak, total, mixed, KIND, BLOCK_T,
            )  # fmt: skip
        peak, total, mixed = merged(every_peak, every_total, every_mixed, peak, total, mixed)
        store_mixed(peak, total, mixed, out, sinks, has_sinks, row, head, valid, heads, dim, d)
    else:
        segment = tl.program_id(2)
        if (segment * SEGMENT <= last) & (segment >= lowest // SEGMENT):
            begin = tl.maximum(segment * SEGMENT, lowest // BLOCK_T * BLOCK_T)
            end = tl.minimum(segment * SEGMENT + SEGMENT, last + 1)
            for start in range(begin, end, BLOCK_T):
                peak, total, mixed = attend_tile(
                    query, keys, values, k_scales, v_scales, table, slopes, has_slopes, position, first, last,
                    lowest, every_first, every_last, start, kv_head, head, kv_heads, dim, shift, soft_cap,
                    valid, d, peak, total, mixed, KIND, BLOCK_T,
                )  # fmt: skip
            kept = tl.load(tiles + tile * 4 + 3) + r // group
            part = (kept.to(tl.int64) * heads + head) * segments + segment
            tl.store(peaks + part * 2, peak, mask=valid)
            tl.store(peaks + part * 2 + 1, total, mask=valid)
            tl.store(mixes + part[:, None] * D + d[None, :], mixed, mask=valid[:, None])


@triton.jit
def merge(
    peaks, mixes, positions, tiles, sinks, out, has_sinks, heads, dim, segments, window, chunked,
    D: tl.constexpr,
):  # fmt: skip
    """The partials of `attend`, from the first segment that a row sees to the last. Grid: heads, n."""
    head, tile = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row0, count = tl.load(tiles + tile * 4 + 1), tl.load(tiles + tile * 4 + 2)
    kept = tl.load(tiles + tile * 4 + 3).to(tl.int64)
    d = tl.arange(0, D)
    for i in range(0, count):
        row = (row0 + i).to(tl.int64)
        position = tl.load(positions + row)
        first = first_seen(position, window, chunked)
        part = ((kept + i) * heads + head) * segments
        peak, total, mixed = nothing(1, D)
        for segment in tl.range(first // SEGMENT, position // SEGMENT + 1, num_stages=4):
            at = part + segment
            part_peak = tl.load(peaks + at * 2 + tl.arange(0, 1))
            part_total = tl.load(peaks + at * 2 + 1 + tl.arange(0, 1))
            part_mixed = tl.load(mixes + at * D + d)[None, :]
            peak, total, mixed = merged(peak, total, mixed, part_peak, part_total, part_mixed)
        one = tl.full((1,), 1, tl.int32)
        store_mixed(peak, total, mixed, out, sinks, has_sinks, one * row, one * head, one > 0, heads, dim, d)
