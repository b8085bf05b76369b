"""Mixtures of experts: the choice of each row, rows grouped by expert, products of each group,
their sum.

Nothing here depends on how many rows chose an expert but which tile of a product a row is in.
"""

import triton
import triton.language as tl

from pageturner.kernels.gpu.source.dependent import start_dependent
from pageturner.kernels.gpu.source.groups import whole_groups
from pageturner.kernels.gpu.source.products import dense_part
from pageturner.kernels.gpu.source.sampling import keys_of

LANES = tl.constexpr(256)  # experts that are looked through at once
# What an entry of a table of weights has: addresses of the weight or of its integers, which come
# first, and what else belongs to it; and the integer that stands for zero. As experts.py says.
FIELDS, HIGH, SCALE, LOW = tl.constexpr(8), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
BIAS, ZERO = tl.constexpr(4), tl.constexpr(5)


@triton.jit
def route(
    logits, ids, weights, experts, top_k, normalise, factor, SIGMOID: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The top_k experts of a row by (logit descending, id ascending), ascending by id. Grid:
    rows."""
    start_dependent()
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    x = tl.load(logits + row * experts + e, mask=e < experts, other=float("-inf"))
    pair = (keys_of(x).to(tl.int64) << 32) | (0x7FFFFFFF - e).to(tl.int64)
    left = tl.where(e < experts, pair, -0x8000000000000000)
    chosen = tl.zeros((BLOCK,), tl.int32)
    for _ in range(0, top_k):
        best = tl.max(left, axis=0)
        hit = left == best
        chosen = tl.where(hit, 1, chosen)
        left = tl.where(hit, -0x8000000000000000, left)
    if SIGMOID:
        weight = 1.0 / (1.0 + tl.exp(-x))
        whole = 1.0
    else:
        weight = tl.where(e < experts, tl.exp(x - tl.max(x, axis=0)), 0.0)
        whole = tl.sum(weight, axis=0)
    if normalise:
        whole = tl.sum(tl.where(chosen == 1, weight, 0.0), axis=0)
    place = tl.cumsum(chosen, axis=0) - 1
    at = row * top_k + place
    tl.store(ids + at, e, mask=chosen == 1)
    tl.store(weights + at, tl.div_rn(weight, whole) * factor, mask=chosen == 1)


@triton.jit
def group_rows(ids, order, bounds, count, experts, BLOCK: tl.constexpr):
    """order [count]: the indices of ids [count] by (expert, index). bounds [experts + 1]: where the
    indices of each expert begin. Grid: experts."""
    start_dependent()
    expert = tl.program_id(0)
    before = tl.zeros((BLOCK,), tl.int32)
    for i0 in range(0, count, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        other = tl.load(ids + i, mask=i < count, other=0x7FFFFFFF)
        before += (other < expert).to(tl.int32)
    at = tl.sum(before, axis=0)
    tl.store(bounds + expert, at)
    for i0 in range(0, count, BLOCK):
        i = i0 + tl.arange(0, BLOCK)
        other = tl.load(ids + i, mask=i < count, other=0x7FFFFFFF)
        mine = (other == expert).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, axis=0) - 1, i, mask=mine == 1)
        at += tl.sum(mine, axis=0)
    if expert == experts - 1:
        tl.store(bounds + experts, at)


@triton.jit
def begin_of(bounds, expert, by_head):
    """Return where the places of an expert begin; a head has one place for each of `by_head`
    rows."""
    return expert * by_head if by_head > 0 else tl.load(bounds + expert)


@triton.jit
def tile_of(bounds, experts, by_head, TILE: tl.constexpr):
    """The expert of program_id(1), the first place of its tile, and the end of the expert's places.
    The tiles of an expert begin at the smaller of two numbers: its first place, or as many whole
    tiles as fit before that and one for each expert before it. Either leaves room for all tiles
    before it, so nothing is listed; a tile that is none begins at the end or behind it."""
    slot = tl.program_id(1)
    before = tl.zeros((LANES,), tl.int32)
    for e0 in range(0, experts, LANES):
        e = e0 + tl.arange(0, LANES)
        begin = begin_of(bounds, tl.minimum(e, experts - 1), by_head)
        before += ((e < experts) & (tl.minimum(begin, begin // TILE + e) <= slot)).to(tl.int32)
    expert = tl.sum(before, axis=0) - 1
    begin, end = begin_of(bounds, expert, by_head), begin_of(bounds, expert + 1, by_head)
    first = begin + (slot - tl.minimum(begin, begin // TILE + expert)) * TILE
    return expert, first, end


@triton.jit
def rows_of(order, expert, first, end, experts, by_head, shared, x_rows, TILE: tl.constexpr):
    """Return the rows of the output of a tile and those of x; behind the last row of x where there
    is none."""
    place = first + tl.arange(0, TILE)
    if by_head > 0:
        index = (place - expert * by_head) * experts + expert
    else:
        index = tl.load(order + place, mask=place < end, other=0)
    return index, place < end, tl.where(place < end, index // shared, x_rows)


@triton.jit
def address_of(entry, field, kind: tl.constexpr):
    """The field of an entry as a pointer to this kind, where an array begins: of an address out of
    memory the compiler cannot know that."""
    return tl.multiple_of(tl.load(entry + field).to(tl.pointer_type(kind)), 16)


@triton.jit
def add_bias(value, entry, n, inside, BY_ROW: tl.constexpr):
    """value plus the bias of the entry, if it has one; n: along its rows or its columns."""
    if tl.load(entry + BIAS) != 0:
        bias = tl.load(address_of(entry, BIAS, tl.float32) + n, mask=inside, other=0.0)
        if BY_ROW:
            value += bias[:, None]
        else:
            value += bias[None, :]
    return value


@triton.jit
def gemm(
    x, table, order, bounds, out, shared, N, K, chunk, parts, x_rows, experts, halves, by_head, stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Row i of out = row i // shared of x times the weights of its expert, one behind the other,
    plus their biases. table [experts, halves, FIELDS]: addresses, multiples of 16 bytes, of each
    weight; 0: one of another kind. by_head > 0: expert h has row t * experts + h for each of so
    many t; else what `group_rows` gave. Rows of out are `stride` apart. Grid: N tiles of each half,
    tiles as `tile_of` counts them."""
    start_dependent()
    expert, first, end = tile_of(bounds, experts, by_head, BLOCK_M)
    if first < end:
        tiles = tl.cdiv(N, BLOCK_N)
        half, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        entry = table + (expert * halves + half) * FIELDS
        if tl.load(entry) != 0:
            w = address_of(entry, 0, x.dtype.element_ty)
            n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            index, there, m = rows_of(
                order, expert, first, end, experts, by_head, shared, x_rows, BLOCK_M
            )
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for part in range(0, parts):
                begin = part * chunk
                last = tl.minimum(begin + chunk, K)
                total += dense_part(
                    x, w, m, n, x_rows, N, K, begin, last, False, BLOCK_M, BLOCK_N, BLOCK_K
                )
            total = add_bias(total, entry, n, n < N, False)
            at = (index.to(tl.int64) * stride + half * N)[:, None] + n[None, :]
            tl.store(out + at, total, mask=there[:, None] & (n < N)[None, :])


@triton.jit
def group_gemm(
    x, table, order, bounds, sums, out, shared, N, K, chunk, parts, x_rows, experts, halves, by_head, stride,
    SCALES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`gemm` of weights in groups, or in fp8. sums: of the groups of x, where any weight has
    lows."""
    start_dependent()
    expert, first, end = tile_of(bounds, experts, by_head, BLOCK_M)
    if first < end:
        tiles = tl.cdiv(N, BLOCK_N)
        half, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
        entry = table + (expert * halves + half) * FIELDS
        if tl.load(entry) != 0:
            q, high = address_of(entry, 0, tl.int32), address_of(entry, HIGH, tl.int32)
            scale, low = address_of(entry, SCALE, SCALES), address_of(entry, LOW, SCALES)
            zero, has_low = tl.load(entry + ZERO).to(tl.int32), tl.load(entry + LOW) != 0
            n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            index, there, m = rows_of(
                order, expert, first, end, experts, by_head, shared, x_rows, BLOCK_M
            )
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in range(0, parts):
                begin = part * chunk
                last = tl.minimum(begin + chunk, K)
                total += whole_groups(
                    x, q, high, scale, low, sums, has_low, zero, m, tile, x_rows, N, K, begin, last,
                    BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
                )  # fmt: skip
            if GROUP == 0:
                total *= tl.load(scale + n, mask=n < N, other=0.0)[:, None]
            total = add_bias(total, entry, n, n < N, True)
            at = (index.to(tl.int64) * stride + half * N)[None, :] + n[:, None]
            tl.store(out + at, total, mask=there[None, :] & (n < N)[:, None])


@triton.jit
def weigh_rows(x, weights, out, d, top_k, BLOCK: tl.constexpr):
    """Row i of out = row i // top_k of x times weights[i]. Grid: rows of out, tiles of d."""
    start_dependent()
    i = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i // top_k * d + k, mask=k < d, other=0.0) * tl.load(weights + i)
    tl.store(out + i * d + k, value.to(out.dtype.element_ty), mask=k < d)


@triton.jit
def add_experts(x, y, weights, out, weighed, d, top_k, BLOCK: tl.constexpr):
    """x plus weights[t, j] * y[t * top_k + j], from the first expert to the last; each product is
    rounded. weighed: weights are 1, since they were applied to what went in. Grid: rows, tiles of
    d."""
    start_dependent()
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + t * d + k, mask=k < d, other=0.0)
    for j in range(0, top_k):
        weight = 1.0
        if weighed == 0:
            weight = tl.load(weights + t * top_k + j)
        total += weight * tl.load(y + (t * top_k + j) * d + k, mask=k < d, other=0.0)
    tl.store(out + t * d + k, total, mask=k < d)


@triton.jit
def add_rows(x, y, rows, weights, d, BLOCK: tl.constexpr):
    """weights[i] * y[i], rounded, added to row rows[i] of x. Grid: rows, tiles of d."""
    start_dependent()
    i = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(rows + i).to(tl.int64) * d + k
    value = tl.load(weights + i) * tl.load(y + i * d + k, mask=k < d, other=0.0)
    tl.store(x + at, tl.load(x + at, mask=k < d, other=0.0) + value, mask=k < d)
