"""Operations on each row on its own: embedding, norms, rotary, KV write, activations, gathers.

A program has one row or one head of it, or elements that know no others: no other row can matter.
"""

import triton
import triton.language as tl

from pageturner.kernels.gpu.source.dependent import (
    launch_dependents,
    prefetch_vector,
    start_dependent,
    wait,
)
from pageturner.kernels.gpu.source.products import e4m3


@triton.jit
def token_at(tokens, chosen, i, there):
    """Token i; where it is -1 - j the one that was chosen last for row j."""
    token = tl.load(tokens + i, mask=there, other=0)
    return tl.where(token < 0, tl.load(chosen - 1 - token, mask=token < 0, other=0), token).to(
        tl.int64
    )


@triton.jit
def embed(table, tokens, chosen, out, first, rows, K, BLOCK: tl.constexpr):
    """Rows of a table of floats in fp32, whose rows are the tokens from `first` on; zeros for all
    others. Grid: T, tiles of K."""
    start_dependent()
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = token_at(tokens, chosen, t, True) - first
    there = (token >= 0) & (token < rows)
    value = tl.load(table + token * K + k, mask=(k < K) & there, other=0)
    tl.store(out + t * K + k, value.to(tl.float32), mask=k < K)


@triton.jit
def embed_groups(
    q, high, scale, low, tokens, chosen, out, has_low, zero, first, rows, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Do as `embed` for a table in groups: scale * (q - zero) + low, each step rounded; of GROUP 0
    scale * q of e4m3."""
    start_dependent()
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = token_at(tokens, chosen, t, True) - first
    known = (row >= 0) & (row < rows)
    there = (k < K) & known
    UNIT: tl.constexpr = 32 if BITS == 8 else 64
    columns = tl.cdiv(K, 256) * 256
    word = (row // 16 * (columns // UNIT) + k // UNIT) * 128 + row % 8 * 16
    word += k % 8 // 2 * 4 + k % UNIT // (UNIT // 2) * 2 + row % 16 // 8
    i, p = k % (UNIT // 2) // 8, k % 2
    value = tl.load(q + word, mask=there, other=0)
    if BITS == 8:
        value = ((value >> (8 * i + 16 * p)) & 255).to(tl.uint8)
    else:
        value = (value >> (4 * i + 16 * p)) & 15
        if BITS == 5:
            bits = tl.load(high + word, mask=there, other=0).to(tl.int32)
            value += ((bits >> (i + 4 * p)) & 1) << 4
        value -= zero
    if GROUP == 0:
        wide = e4m3(value).to(tl.float32) * tl.load(scale + row, mask=known, other=0.0)
    else:
        if BITS == 8:
            value = value.to(tl.int8, bitcast=True)
        at = (row // 16 * (columns // 128) + k // 128) * (2048 // GROUP)
        at += row % 8 * (256 // GROUP) + k % 128 // GROUP * 2 + row % 16 // 8
        wide = value.to(tl.float32) * tl.load(scale + at, mask=there, other=0.0).to(tl.float32)
        if has_low:
            wide += tl.load(low + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + t * K + k, wide, mask=k < K)


@triton.jit
def rms_norm(x, weight, out, eps, d, heads, stride, BLOCK: tl.constexpr):
    """x / sqrt(mean(x^2) + eps) * weight. A row of x is one of `heads` that lie `d` apart, in rows
    `stride` apart. Grid: rows."""
    launch_dependents()
    prefetch_vector(weight, d, BLOCK)
    wait()
    k = tl.arange(0, BLOCK)
    out += tl.program_id(0).to(tl.int64) * d
    x += (tl.program_id(0) // heads).to(tl.int64) * stride + tl.program_id(0) % heads * d
    if (
        d <= BLOCK
    ):  # all is loaded before the sum, since one load takes as long as two beside each other
        value = tl.load(x + k, mask=k < d, other=0.0)
        scale = tl.load(weight + k, mask=k < d, other=0.0)
        factor = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / d + eps)
        tl.store(out + k, (value * factor * scale).to(out.dtype.element_ty), mask=k < d)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for k0 in range(0, d, BLOCK):
            value = tl.load(x + k0 + k, mask=k0 + k < d, other=0.0)
            squares += value * value
        factor = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / d + eps)
        for k0 in range(0, d, BLOCK):
            value = tl.load(x + k0 + k, mask=k0 + k < d, other=0.0)
            value = value * factor * tl.load(weight + k0 + k, mask=k0 + k < d, other=0.0)
            tl.store(out + k0 + k, value.to(out.dtype.element_ty), mask=k0 + k < d)


@triton.jit
def layer_norm(x, weight, bias, out, eps, d, BLOCK: tl.constexpr):
    """(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias, the mean first. Grid: rows."""
    start_dependent()
    row = tl.program_id(0).to(tl.int64) * d
    sums = tl.zeros((BLOCK,), tl.float32)
    for k0 in range(0, d, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        sums += tl.load(x + row + k, mask=k < d, other=0.0)
    mean = tl.sum(sums, axis=0) / d
    squares = tl.zeros((BLOCK,), tl.float32)
    for k0 in range(0, d, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        left = tl.where(k < d, tl.load(x + row + k, mask=k < d, other=0.0) - mean, 0.0)
        squares += left * left
    factor = 1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / d + eps)
    for k0 in range(0, d, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        value = (tl.load(x + row + k, mask=k < d, other=0.0) - mean) * factor
        value = value * tl.load(weight + k, mask=k < d, other=0.0)
        value = value + tl.load(bias + k, mask=k < d, other=0.0)
        tl.store(out + row + k, value.to(out.dtype.element_ty), mask=k < d)


@triton.jit
def rotated(x, weight, eps, has_norm, cos, sin, position, half, interleaved, k, dim):
    """A head at x, with has_norm its RMS norm, rotated; what is behind the tables passes through.
    All is loaded before the first sum, since one load takes as long as several beside each
    other."""
    turned = k < 2 * half
    if interleaved:
        pair, second, partner = k // 2, k % 2 == 1, k ^ 1
    else:
        pair, second = tl.where(k < half, k, k - half), k >= half
        partner = tl.where(k < half, k + half, k - half)
    value = tl.load(x + k, mask=k < dim, other=0.0)
    other = tl.load(x + partner, mask=turned, other=0.0)
    scale = tl.load(weight + k, mask=(k < dim) & (has_norm != 0), other=0.0)
    other_scale = tl.load(weight + partner, mask=turned & (has_norm != 0), other=0.0)
    c = tl.load(cos + position * half + pair, mask=turned, other=1.0)
    s = tl.load(sin + position * half + pair, mask=turned, other=0.0)
    if has_norm != 0:
        factor = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / dim + eps)
        value = value * factor * scale
        other = other * factor * other_scale
    return tl.where(turned, value * c + tl.where(second, other, -other) * s, value)


@triton.jit
def rotate(x, cos, sin, positions, out, stride, heads, dim, half, interleaved, BLOCK: tl.constexpr):
    """Rotary embedding of each head of x, whose rows are `stride` apart. Grid: T, heads."""
    start_dependent()
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    at = (t * heads + tl.program_id(1)) * dim
    mine = x + t * stride + tl.program_id(1) * dim
    position = tl.load(positions + t).to(tl.int64)
    value = rotated(mine, x, 0.0, 0, cos, sin, position, half, interleaved, k, dim)
    tl.store(out + at + k, value.to(out.dtype.element_ty), mask=k < dim)


@triton.jit
def to_e4m3(x):
    """fp32 to fp8 e4m3, rounded half to even; beyond 448 that is what it becomes."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    small = tl.minimum(tl.abs(x), 448.0)
    within = small.to(tl.int32, bitcast=True)
    rounded = (within + 0x7FFFF + ((within >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)
    shifted = small * 512.0
    floor = shifted.to(tl.int32)
    rest = shifted - floor.to(tl.float32)
    up = (rest > 0.5) | ((rest == 0.5) & (floor % 2 == 1))
    code = tl.where(small < 0.015625, floor + up.to(tl.int32), normal)
    code = tl.where(x != x, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def half_even(x):
    """Rounded to whole numbers, halves to even; |x| below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def power_of_two(exponent):
    """2^exponent as fp32, from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_head(value, kv, scales, index, k, room, KIND: tl.constexpr):
    """A head in the KV's type, with zeros up to `room` elements, whose scale, if it has one, is
    scales[index]."""
    at = index * room
    if KIND == "int8":
        peak = tl.max(tl.abs(value), axis=0)
        factor = tl.where(peak > 0, tl.div_rn(127.0, tl.where(peak > 0, peak, 1.0)), 0.0)
        tl.store(kv + at + k, half_even(value * factor).to(tl.int8), mask=k < room)
        tl.store(scales + index, tl.div_rn(peak, 127.0))
    elif KIND == "fp8_e4m3":
        # formats/float8.py: `scale`. From the bits of the peak, so that no logarithm decides
        bits = tl.max(tl.abs(value), axis=0).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.minimum(tl.maximum(exponent, -14), 7)
        tl.store(kv + at + k, to_e4m3(value * power_of_two(-exponent)), mask=k < room)
        tl.store(scales + index, power_of_two(exponent))
    else:
        tl.store(kv + at + k, value.to(kv.dtype.element_ty), mask=k < room)


@triton.jit
def kv_write(
    k_rows, v_rows, keys, values, k_scales, v_scales, slots, cos, sin, positions,
    k_stride, v_stride, heads, dim, room, half, interleaved, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """K, rotated unless half is 0, and V of a row go to its slot, where a head has room for `room`
    elements; slot -1: nowhere. Grid: T, kv_heads."""
    start_dependent()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    slot = tl.load(slots + t).to(tl.int64)
    if slot >= 0:
        k = tl.arange(0, BLOCK)
        position = tl.load(positions + t).to(tl.int64)
        mine = k_rows + t * k_stride + h * dim
        key = rotated(mine, mine, 0.0, 0, cos, sin, position, half, interleaved, k, dim)
        value = tl.load(v_rows + t * v_stride + h * dim + k, mask=k < dim, other=0.0)
        index = slot * heads + h
        store_head(key, keys, k_scales, index, k, room, KIND)
        store_head(value, values, v_scales, index, k, room, KIND)


@triton.jit
def qk_norm_rope_kv_write(
    rows, q, q_norm, k_norm, keys, values, k_scales, v_scales, slots, cos, sin, positions,
    has_norm, eps, stride, heads, kv_heads, dim, room, half, interleaved, KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows hold Q, K and V of heads of `dim` elements, `stride` apart: Q goes normed and
    rotated to q, K as well and V to its slot, each head with zeros up to `room` elements; slot -1:
    nowhere. Grid: T, heads + kv_heads."""
    launch_dependents()
    prefetch_vector(q_norm, dim * has_norm, BLOCK)
    prefetch_vector(k_norm, dim * has_norm, BLOCK)
    wait()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    k = tl.arange(0, BLOCK)
    position = tl.load(positions + t).to(tl.int64)
    mine = rows + t * stride + h * dim
    if h < heads:
        value = rotated(mine, q_norm, eps, has_norm, cos, sin, position, half, interleaved, k, dim)
        tl.store(q + (t * heads + h) * room + k, value, mask=k < room)
    else:
        slot = tl.load(slots + t).to(tl.int64)
        if slot >= 0:
            key = rotated(
                mine, k_norm, eps, has_norm, cos, sin, position, half, interleaved, k, dim
            )
            value = tl.load(mine + kv_heads * dim + k, mask=k < dim, other=0.0)
            index = slot * kv_heads + h - heads
            store_head(key, keys, k_scales, index, k, room, KIND)
            store_head(value, values, v_scales, index, k, room, KIND)


@triton.jit
def fit_heads(x, out, stride, heads, dim, room, BLOCK: tl.constexpr):
    """Heads of `dim` elements, in rows `stride` apart, become heads of `room`: with zeros behind
    them, or cut off. Grid: T, heads."""
    start_dependent()
    t, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    value = tl.load(x + t * stride + h * dim + k, mask=k < dim, other=0.0)
    tl.store(out + (t * heads + h) * room + k, value, mask=k < room)


@triton.jit
def latent_kv_write(
    rows, plain, q, norm, keys, k_scales, slots, cos, sin, positions, has_norm, eps, stride, heads, plain_dim,
    rank, rotary, dim, half, interleaved, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows, `stride` apart, hold `plain_dim` elements of each head, `rotary` ones of each head, the
    latent of `rank` elements, and the rotary key. The plain elements of heads go to `plain`; the
    others, rotated, to where q [T, heads, dim] has them, behind `rank`. The latent, normed, and the
    key, rotated, go to the slot of the row; -1: nowhere. Zeros are behind them. Grid: T, heads +
    1."""
    start_dependent()
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    k = tl.arange(0, BLOCK)
    position = tl.load(positions + t).to(tl.int64)
    rows += t * stride
    if h < heads:
        value = tl.load(rows + h * plain_dim + k, mask=k < plain_dim, other=0.0)
        at = t * heads + h
        tl.store(plain + at * plain_dim + k, value.to(plain.dtype.element_ty), mask=k < plain_dim)
        head = rows + heads * plain_dim + h * rotary
        value = rotated(head, head, 0.0, 0, cos, sin, position, half, interleaved, k, rotary)
        tl.store(q + at * dim + rank + k, value, mask=k < dim - rank)
    else:
        slot = tl.load(slots + t).to(tl.int64)
        if slot >= 0:
            head = rows + heads * (plain_dim + rotary)
            value = tl.load(head + k, mask=k < rank, other=0.0)
            if has_norm != 0:
                factor = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / rank + eps)
                value = value * factor * tl.load(norm + k, mask=k < rank, other=0.0)
            key = head + rank
            behind = tl.maximum(k - rank, 0)
            turned = rotated(
                key, key, 0.0, 0, cos, sin, position, half, interleaved, behind, rotary
            )
            value = tl.where(k < rank, value, turned)
            store_head(value, keys, k_scales, slot, k, dim, KIND)


@triton.jit
def join_heads(x, y, out, first, second, BLOCK: tl.constexpr):
    """Join the `first` elements of each row of x and the `second` ones of that row of y. Grid:
    rows, tiles of both."""
    start_dependent()
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    both = first + second
    value = tl.load(x + row * first + k, mask=k < first, other=0.0)
    value += tl.load(y + row * second + k - first, mask=(k >= first) & (k < both), other=0.0)
    tl.store(out + row * both + k, value, mask=k < both)


@triton.jit
def tanh(x):
    """Compute it from exp, which does not overflow here."""
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -size, size)


@triton.jit
def activated(a, ACT: tl.constexpr):
    """An activation of each element; `cast`: itself."""
    if ACT == "silu":
        a = a / (1.0 + tl.exp(-a))
    elif ACT == "gelu":
        a = 0.5 * a * (1.0 + tl.erf(a * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        a = 0.5 * a * (1.0 + tanh(0.7978845608028654 * (a + 0.044715 * a * a * a)))
    elif ACT == "relu":
        a = tl.maximum(a, 0.0)
    return a


@triton.jit
def gate_of(gate, up, ACT: tl.constexpr):
    """act(gate) * up, or what stands for it."""
    if ACT == "clamped_swiglu":
        g = tl.minimum(gate, 7.0)
        value = g / (1.0 + tl.exp(-1.702 * g)) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0)
    else:
        value = activated(gate, ACT) * up
    return value


@triton.jit
def elementwise(x, y, out, factor, count, OP: tl.constexpr, BLOCK: tl.constexpr):
    """One of the operations on each element. Grid: tiles of count."""
    start_dependent()
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + i, mask=i < count, other=0.0)
    if OP == "act_mul":
        a = gate_of(a, tl.load(y + i, mask=i < count, other=0.0), "silu")
    elif OP == "clamped_swiglu":
        a = gate_of(a, tl.load(y + i, mask=i < count, other=0.0), OP)
    elif OP == "add":
        a = a + tl.load(y + i, mask=i < count, other=0.0)
    elif OP == "mul":
        a = a * tl.load(y + i, mask=i < count, other=0.0)
    elif OP == "scale":
        a = a * factor
    elif OP == "soft_cap":
        a = factor * tanh(a / factor)
    else:
        a = activated(a, OP)
    tl.store(out + i, a.to(out.dtype.element_ty), mask=i < count)


@triton.jit
def take_rows(x, rows, factors, out, d, scaled, BLOCK: tl.constexpr):
    """Row i of out is row rows[i] of x, or where `scaled` row i times factors[rows[i]]. Grid: rows,
    tiles."""
    start_dependent()
    i = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i).to(tl.int64)
    source = i if scaled else row
    value = tl.load(x + source * d + k, mask=k < d, other=0.0)
    if scaled:
        value = value * tl.load(factors + row)
    tl.store(out + i * d + k, value, mask=k < d)


@triton.jit
def take_columns(x, order, out, d, BLOCK: tl.constexpr):
    """Column i of out is column order[i] of x. Grid: rows, tiles."""
    start_dependent()
    row = tl.program_id(0).to(tl.int64) * d
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(order + k, mask=k < d, other=0)
    tl.store(out + row + k, tl.load(x + row + column, mask=k < d, other=0.0), mask=k < d)


@triton.jit
def gated(x, out, d, ACT: tl.constexpr, BLOCK: tl.constexpr):
    """act(gate) * up of rows x [T, 2 * d] that hold gate and up. Grid: T, tiles of d."""
    start_dependent()
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + t * 2 * d + k, mask=k < d, other=0.0)
    up = tl.load(x + t * 2 * d + d + k, mask=k < d, other=0.0)
    value = gate_of(gate, up, ACT)
    tl.store(out + t * d + k, value.to(out.dtype.element_ty), mask=k < d)
