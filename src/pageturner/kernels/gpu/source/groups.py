"""Products of activations [M, K] with a weight [N, K] in groups of integers, transposed.

How the integers lie: `weights.Groups`. Bits of a row do not depend on M, as in `products`.
"""

import triton
import triton.language as tl

from pageturner.kernels.gpu.source.products import place


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
