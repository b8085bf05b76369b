"""Products of activations [M, K] with a weight [N, K] transposed.

Bits of a row do not depend on M: the tile over K and the parts of K (`chunk` columns each) are given by the
weight's shape. Each part is summed on its own from zero, and the parts are added from the first to the last,
by one program (WHOLE) or by `add_parts`. Row tiles of different heights use one matrix instruction.
"""

import triton
import triton.language as tl


@triton.jit
def e4m3_fields(bits):
    """fp8 e4m3 as fp16 divided by 256, exactly: the same fields with an exponent that is 8 too small."""
    wide = bits.to(tl.uint16)
    fields = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return fields.to(tl.float16, bitcast=True)


@triton.jit
def e4m3(bits):
    """fp8 e4m3 as fp16, exactly."""
    return e4m3_fields(bits) * 256.0


@triton.jit
def place(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile over M and over N of a program: eight tiles of M beside each other, then the next of N, so
    that programs that run at once share rows and weights in the cache."""
    high, wide = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first = program // (8 * wide) * 8
    tall = tl.minimum(high - first, 8)
    within = program % (8 * wide)
    return first + within % tall, within // tall


@triton.jit
def halves(value):
    """Its left and its right columns."""
    rows: tl.constexpr = value.shape[0]
    columns: tl.constexpr = value.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(value, (rows, 2, columns)), (0, 2, 1)))


@triton.jit
def store_columns(
    value, out, scale, bias, residual, so_far, has_scale: tl.constexpr, has_bias, has_residual, m, n0, M, N
):  # fmt: skip
    n = n0 + tl.arange(0, value.shape[1])
    inside = (m < M)[:, None] & (n < N)[None, :]
    row = m.to(tl.int64) * N
    if so_far:
        value = tl.load((out + row)[:, None] + n[None, :], mask=inside, other=0.0) + value
    if has_scale:
        value *= tl.load(scale + n, mask=n < N, other=0.0)[None, :]
    if has_bias:
        value += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    if has_residual:
        value = tl.load((residual + row)[:, None] + n[None, :], mask=inside, other=0.0) + value
    tl.store((out + row)[:, None] + n[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_rows(
    value, out, scale, bias, residual, so_far, has_scale: tl.constexpr, has_bias, has_residual, m, n0, M, N
):  # fmt: skip
    """out = residual + (scale * value + bias), each step rounded; so_far: with what is there already before
    all of that. Wide tiles in pieces, which take fewer registers. n0: the first column."""
    WIDE: tl.constexpr = value.shape[1]
    if WIDE > 64:
        left, right = halves(value)
        half: tl.constexpr = WIDE // 2
        store_rows(
            left, out, scale, bias, residual, so_far, has_scale, has_bias, has_residual, m, n0, M, N
        )  # fmt: skip
        store_rows(
            right, out, scale, bias, residual, so_far, has_scale, has_bias, has_residual, m, n0 + half, M, N
        )  # fmt: skip
    else:
        store_columns(
            value, out, scale, bias, residual, so_far, has_scale, has_bias, has_residual, m, n0, M, N
        )  # fmt: skip


@triton.jit
def dense_part(
    x, w, m, n, M, N, K, begin, end, FP8: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What lies behind the last row or column is computed of the last one, and not stored. Of few rows those
    that are not there are not read."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    k = tl.arange(0, BLOCK_K)
    x += tl.minimum(m, M - 1)[:, None].to(tl.int64) * K + k[None, :]
    w += tl.minimum(n, N - 1)[None, :].to(tl.int64) * K + k[:, None]
    for k0 in range(begin, end, BLOCK_K):
        inside = k < K - k0
        if WHOLE:
            rows = tl.load(x + k0, mask=inside[None, :], other=0.0)
        else:
            rows = tl.load(x + k0, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        columns = tl.load(w + k0, mask=inside[:, None], other=0)
        if FP8:
            columns = e4m3(columns)
        total = tl.dot(rows, columns.to(rows.dtype), total, input_precision="ieee")
    return total


@triton.jit
def dense(
    x, w, scale, bias, residual, out, has_bias, has_residual, M, N, K, chunk, parts,
    FP8: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights in the type of x, or FP8 with one scale for each of N. Grid: tiles of M and N, parts or 1. Of
    several parts WHOLE keeps the sum so far in `out`."""
    m0, n0 = place(M, N, BLOCK_M, BLOCK_N)
    n = n0 * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m0 * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = n0 * BLOCK_N
    if WHOLE:
        for part in range(0, parts - 1):
            total = dense_part(
                x, w, m, n, M, N, K, part * chunk, part * chunk + chunk, FP8, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K
            )  # fmt: skip
            store_rows(total, out, scale, bias, residual, part > 0, False, False, False, m, n0, M, N)
            tl.debug_barrier()  # another thread of the program may read it next
        total = dense_part(
            x, w, m, n, M, N, K, (parts - 1) * chunk, K, FP8, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
        store_rows(
            total, out, scale, bias, residual, parts > 1, FP8, has_bias, has_residual, m, n0, M, N
        )  # fmt: skip
    else:
        part = tl.program_id(1)
        begin = part * chunk
        end = tl.minimum(begin + chunk, K)
        total = dense_part(x, w, m, n, M, N, K, begin, end, FP8, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K)
        if parts == 1:
            store_rows(
                total, out, scale, bias, residual, False, FP8, has_bias, has_residual, m, n0, M, N
            )  # fmt: skip
        else:
            to = out + part.to(tl.int64) * M * N
            store_rows(total, to, scale, bias, residual, False, False, False, False, m, n0, M, N)


@triton.jit
def gated_dense(
    x, w, scale, out, M, N, K, FP8: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """SiLU(x gate^T) * (x up^T) of a weight [2 N, K] of gate and up: bit for bit what `dense` in one part and
    `gated` behind it give. Grid: tiles of M and N."""
    m0, n0 = place(M, N, BLOCK_M, BLOCK_N)
    n = n0 * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m0 * BLOCK_M + tl.arange(0, BLOCK_M)
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    k = tl.arange(0, BLOCK_K)
    x += tl.minimum(m, M - 1)[:, None].to(tl.int64) * K + k[None, :]
    w += tl.minimum(n, N - 1)[None, :].to(tl.int64) * K + k[:, None]
    behind = N.to(tl.int64) * K
    for k0 in range(0, K, BLOCK_K):
        inside = k < K - k0
        if WHOLE:
            rows = tl.load(x + k0, mask=inside[None, :], other=0.0)
        else:
            rows = tl.load(x + k0, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        left = tl.load(w + k0, mask=inside[:, None], other=0)
        right = tl.load(w + (behind + k0), mask=inside[:, None], other=0)
        if FP8:
            left, right = e4m3(left), e4m3(right)
        gate = tl.dot(rows, left.to(rows.dtype), gate, input_precision="ieee")
        up = tl.dot(rows, right.to(rows.dtype), up, input_precision="ieee")
    if FP8:
        gate *= tl.load(scale + n, mask=n < N, other=0.0)[None, :]
        up *= tl.load(scale + N + n, mask=n < N, other=0.0)[None, :]
    value = gate / (1.0 + tl.exp(-gate)) * up
    to = (out + m.to(tl.int64) * N)[:, None] + n[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def add_parts(
    partial, scale, bias, residual, out, has_scale, has_bias, has_residual, M, N, parts,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the parts, from the first to the last, and what `dense` does with it. Grid: M, N tiles."""
    m = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    partial += m.to(tl.int64) * N + n
    for _ in range(0, parts):
        total += tl.load(partial, mask=n < N, other=0.0)
        partial += M * N
    if has_scale:
        total *= tl.load(scale + n, mask=n < N, other=0.0)
    if has_bias:
        total += tl.load(bias + n, mask=n < N, other=0.0)
    at = m.to(tl.int64) * N + n
    if has_residual:
        total = tl.load(residual + at, mask=n < N, other=0.0) + total
    tl.store(out + at, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def nibbles(word, above, shift, magic, PAIR: tl.constexpr, BITS: tl.constexpr):
    """A pair of the eight integers of each word, less zero, as bf16 [.., 2]: bits 0x4300 + q are 128 + q."""
    bits = (word >> (4 * PAIR)) & 0x000F000F
    if BITS == 5:
        bits |= ((above >> PAIR) & 0x00010001) << 4
    bits |= magic
    lower = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    upper = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    lower, upper = lower.to(tl.float32) - shift, upper.to(tl.float32) - shift
    return tl.join(lower.to(tl.bfloat16), upper.to(tl.bfloat16))


@triton.jit
def octets(word, PAIR: tl.constexpr):
    """A pair of the four integers of each word as bf16 [.., 2]: bits 0x4B000000 + q are 2^23 + q."""
    lower = ((word >> (16 * PAIR)) & 0xFF) | 0x4B000000
    upper = ((word >> (16 * PAIR + 8)) & 0xFF) | 0x4B000000
    both = tl.join(lower, upper).to(tl.float32, bitcast=True)
    return (both - 8388736.0).to(tl.bfloat16)


@triton.jit
def integers(word, above, shift, magic, BITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The integers of words [BLOCK_N, 4] as bf16, exactly, in the order of the columns."""
    if BITS == 8:
        value = tl.join(octets(word, 0), octets(word, 1))  # n, thread, pair, half
        return tl.reshape(tl.permute(value, (0, 3, 1, 2)), (BLOCK_N, 16))
    else:
        first = tl.join(
            nibbles(word, above, shift, magic, 0, BITS), nibbles(word, above, shift, magic, 1, BITS)
        )
        second = tl.join(
            nibbles(word, above, shift, magic, 2, BITS), nibbles(word, above, shift, magic, 3, BITS)
        )
        value = tl.join(first, second)  # n, thread, pair, half, step
        return tl.reshape(tl.permute(value, (0, 4, 3, 1, 2)), (BLOCK_N, 32))


@triton.jit
def unit_halves(flat, BLOCK_N: tl.constexpr):
    """Words of a unit [BLOCK_N / 16, 8, 4, half, row / 8] as two of [BLOCK_N, 4], one for each half."""
    words = tl.reshape(flat, (BLOCK_N // 16, 8, 4, 2, 2))
    return tl.split(tl.reshape(tl.permute(words, (0, 4, 1, 2, 3)), (BLOCK_N, 4, 2)))


@triton.jit
def scaled(total, dots, scale, low, sums, inside, LOW: tl.constexpr):
    """total + dots * scale + sums * low, each product and its sum rounded once."""
    factor = tl.load(scale)
    total = tl.fma(dots, tl.broadcast_to(factor[:, None], dots.shape), total)
    if LOW:
        more, mine = tl.load(low), tl.load(sums, mask=inside, other=0.0)
        more = tl.broadcast_to(more[:, None], dots.shape)
        total = tl.fma(tl.broadcast_to(mine[None, :], dots.shape), more, total)
    return total


@triton.jit
def groups_part(
    x, q, high, scale, low, sums, zero, m, n0, M, N, K, begin, end, LOW: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Transposed, [BLOCK_N, BLOCK_M]: the integers go from registers to the matrix unit."""
    UNIT: tl.constexpr = 32 if BITS == 8 else 64
    PIECE: tl.constexpr = UNIT if GROUP >= UNIT else UNIT // 2
    tl.static_assert(BLOCK_K % UNIT == 0 and BLOCK_K % GROUP == 0)
    zeros = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total, dots = zeros, zeros
    shift = (128 + zero).to(tl.bfloat16).to(tl.float32)
    magic = 0x43004300 | (zero >> 16)  # that, in a register
    there, row = (m < M)[None, :], tl.minimum(m, M - 1)
    x += row[None, :].to(tl.int64) * K + tl.arange(0, PIECE)[:, None]
    sums += row * (K // GROUP)
    last = tl.cdiv(N, 16) - 1  # of blocks of 16 rows; behind it that block again
    wide = tl.cdiv(K, 256) * 256
    e = tl.arange(0, BLOCK_N * 8)
    word = tl.minimum(n0 * (BLOCK_N // 16) + e // 128, last).to(tl.int64) * (wide // UNIT * 128) + e % 128
    q += word
    high += word
    n = tl.arange(0, BLOCK_N)
    one = tl.minimum(n0 * (BLOCK_N // 16) + n // 16, last).to(tl.int64) * (wide // GROUP * 16) + n % 16
    scale += one
    low += one
    for k0 in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        xs, qs, highs = x + k0, q + k0 // UNIT * 128, high + k0 // UNIT * 128
        scales, lows, mine = scale + k0 // GROUP * 16, low + k0 // GROUP * 16, sums + k0 // GROUP
        for u in tl.static_range(0, BLOCK_K, UNIT):
            words = tl.load(qs + u // UNIT * 128)
            first, second = unit_halves(words, BLOCK_N)
            above, behind = first, second
            if BITS == 5:
                bits = tl.load(highs + u // UNIT * 128).to(tl.int32)
                above, behind = unit_halves(bits | (bits << 12), BLOCK_N)
            values = integers(first, above, shift, magic, BITS, BLOCK_N)
            others = integers(second, behind, shift, magic, BITS, BLOCK_N)
            if GROUP >= UNIT:
                both = tl.permute(tl.join(values, others), (0, 2, 1))
                both = tl.reshape(both, (BLOCK_N, UNIT))
                columns = tl.load(xs + u, mask=there & (k0 + u < end), other=0.0)
                dots = tl.dot(both, columns, zeros if u // GROUP * GROUP == u else dots)
                if (u + UNIT) // GROUP * GROUP == u + UNIT:
                    total = scaled(
                        total, dots, scales + u // GROUP * 16, lows + u // GROUP * 16, mine + u // GROUP,
                        k0 + u < end, LOW,
                    )  # fmt: skip
            else:
                at = u // GROUP * 16
                columns = tl.load(xs + u, mask=there & (k0 + u < end), other=0.0)
                dots = tl.dot(values, columns, zeros)
                total = scaled(total, dots, scales + at, lows + at, mine + u // GROUP, k0 + u < end, LOW)
                inside = k0 + u + GROUP < end
                columns = tl.load(xs + u + GROUP, mask=there & inside, other=0.0)
                dots = tl.dot(others, columns, zeros)
                total = scaled(
                    total, dots, scales + at + 16, lows + at + 16, mine + u // GROUP + 1, inside, LOW
                )
    return total


@triton.jit
def groups(
    x, q, high, scale, low, sums, bias, residual, out, has_low, zero, has_bias, has_residual,
    M, N, K, chunk, parts, BITS: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weights in groups of GROUP columns: value = scale * (q - zero) + low. The integers are exact in the
    type of x; scales are applied to the sum of a group. sums: of the groups of x, where there are lows.
    How the integers lie: `weights.Groups`. Grid: tiles of M and N, parts or 1."""
    m0, n0 = place(M, N, BLOCK_M, BLOCK_N)
    n = n0 * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m0 * BLOCK_M + tl.arange(0, BLOCK_M)
    first = 0 if WHOLE else tl.program_id(1)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for part in range(first, parts if WHOLE else first + 1):
        begin = part * chunk
        end = tl.minimum(begin + chunk, K)
        if has_low:
            value = groups_part(
                x, q, high, scale, low, sums, zero, m, n0, M, N, K, begin, end, True,
                BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            value = groups_part(
                x, q, high, scale, low, sums, zero, m, n0, M, N, K, begin, end, False,
                BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip
        total += value
    inside = (m < M)[None, :] & (n < N)[:, None]
    at = m[None, :].to(tl.int64) * N + n[:, None]
    if WHOLE or parts == 1:
        if has_bias:
            total += tl.load(bias + n, mask=n < N, other=0.0)[:, None]
        if has_residual:
            total = tl.load(residual + at, mask=inside, other=0.0) + total
        tl.store(out + at, total, mask=inside)
    else:
        tl.store(out + first.to(tl.int64) * M * N + at, total, mask=inside)


@triton.jit
def group_sums(x, sums, K, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of the groups of each row, fp32 [M, K / GROUP]. Grid: M, tiles of BLOCK groups."""
    m = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + m * K + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(sums + m * (K // GROUP) + group, tl.sum(values, axis=1), mask=group < K // GROUP)
