"""Mixtures of experts: the choice of each row, rows grouped by expert, products of each group, their sum.

Nothing here depends on how many rows chose an expert but which tile of a product a row is in.
"""

import triton
import triton.language as tl

from pageturner.kernels.gpu.source.products import dense_part
from pageturner.kernels.gpu.source.sampling import keys_of


@triton.jit
def route(
    logits, ids, weights, experts, top_k, normalise, factor, SIGMOID: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The top_k experts of a row by (logit descending, id ascending), ascending by id. Grid: rows."""
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
    """order [count]: the indices of ids [count] by (expert, index). bounds [experts + 1]: where the indices
    of each expert begin. Grid: experts."""
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
def product(
    x, weights, order, bounds, out, shared, N, K, chunk, parts, x_rows,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Row i of out = row i // shared of x times the weight of its expert. weights: addresses, one for each
    expert, multiples of 16 bytes. Grid: N tiles, most M tiles of an expert, experts."""
    expert = tl.program_id(2)
    begin, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    m0 = tl.program_id(1) * BLOCK_M
    if m0 < end - begin:
        # where a matrix begins, which the compiler cannot know of an address out of memory
        w = tl.multiple_of(tl.load(weights + expert).to(tl.pointer_type(COMPUTE)), 16)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        place = begin + m0 + tl.arange(0, BLOCK_M)
        index = tl.load(order + place, mask=place < end, other=0x7FFFFFF)
        m = tl.where(place < end, index // shared, x_rows)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for part in range(0, parts):
            first = part * chunk
            last = tl.minimum(first + chunk, K)
            total += dense_part(
                x, w, m, n, x_rows, N, K, first, last, False, False, BLOCK_M, BLOCK_N, BLOCK_K
            )
        at = index[:, None].to(tl.int64) * N + n[None, :]
        tl.store(out + at, total, mask=(place[:, None] < end) & (n[None, :] < N))


@triton.jit
def add_experts(x, y, weights, out, d, top_k, BLOCK: tl.constexpr):
    """x plus weights[t, j] * y[t * top_k + j], from the first expert to the last; each product is rounded.
    Grid: rows, tiles of d."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + t * d + k, mask=k < d, other=0.0)
    for j in range(0, top_k):
        weight = tl.load(weights + t * top_k + j)
        total += weight * tl.load(y + (t * top_k + j) * d + k, mask=k < d, other=0.0)
    tl.store(out + t * d + k, total, mask=k < d)


@triton.jit
def add_rows(x, y, rows, weights, d, BLOCK: tl.constexpr):
    """weights[i] * y[i], rounded, added to row rows[i] of x. Grid: rows, tiles of d."""
    i = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(rows + i).to(tl.int64) * d + k
    value = tl.load(weights + i) * tl.load(y + i * d + k, mask=k < d, other=0.0)
    tl.store(x + at, tl.load(x + at, mask=k < d, other=0.0) + value, mask=k < d)
