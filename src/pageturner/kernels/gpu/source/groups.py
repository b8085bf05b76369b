"""Products of activations [M, K] with a weight [N, K] whose elements have 4, 5 or 8 bits,
transposed: the elements become bf16 in registers and go from there to the matrix unit.

How they lie: `weights.Groups`. Bits of a row do not depend on M, as in `products`.
"""

import triton
import triton.language as tl

from pageturner.kernels.gpu.source.dependent import (
    launch_dependents,
    prefetch,
    start_dependent,
    wait,
)
from pageturner.kernels.gpu.source.products import add_up, is_last, place


@triton.jit
def fma_pairs(bits, factor, addend):
    """factor * bits + addend of pairs of bf16 in words, each rounded once."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [bits, factor, addend], tl.int32, True, 1
    )


@triton.jit
def shifted(words, step, COUNT: tl.constexpr):
    """Words [a, b, c, 1] as [a, b, c, COUNT], the i-th shifted to the right by i * step bits."""
    shape: tl.constexpr = (words.shape[0], words.shape[1], words.shape[2], COUNT)
    by = tl.reshape(tl.arange(0, COUNT), (1, 1, 1, COUNT)) * step
    return tl.broadcast_to(words, shape) >> tl.broadcast_to(by, shape)


@triton.jit
def nibbles(words, above, magic, less, BITS: tl.constexpr):
    """The pairs of the integers of words [.., 1] plus `less`: the bits 0x4300 + q (magic) are 128 +
    q."""
    bits = shifted(words, 4, 4) & 0x000F000F
    if BITS == 5:
        bits |= (shifted(above, 1, 4) & 0x00010001) << 4
    return fma_pairs(bits | magic, 0x3F803F80, less)


@triton.jit
def octets(words, magic):
    """The pairs of the integers of words [.., 1]: 0x4300 + the lower seven bits are 128 more than
    those, and less 128, or 256 = 0x4380 if the eighth is set."""
    bits = shifted(words, 8, 2)
    less = (bits & 0x00800080) | (0xC300C300 - 0x100000000)
    return fma_pairs((bits & 0x007F007F) | magic, 0x3F803F80, less)


@triton.jit
def eights(words):
    """The pairs of the e4m3 of words [.., 1]: sign, exponent and mantissa in their places are
    2^-120 of it, subnormals too."""
    bits = words << (8 - 8 * tl.reshape(tl.arange(0, 2), (1, 1, 1, 2)))
    fields = ((bits >> 4) & 0x07F007F0) | (bits & (0x80008000 - 0x100000000))
    return fma_pairs(fields, 0x7B807B80, 0x80008000 - 0x100000000)


@triton.jit
def elements(words, above, magic, less, BITS: tl.constexpr, FP8: tl.constexpr):
    """The elements of words [BLOCK_N, 4, halves, 1] as bf16, exactly, in the order of the
    columns."""
    ROWS: tl.constexpr = words.shape[0]
    HALVES: tl.constexpr = words.shape[2]
    STEPS: tl.constexpr = 2 if BITS == 8 else 4
    if FP8:
        pairs = eights(words)
    elif BITS == 8:
        pairs = octets(words, magic)
    else:
        pairs = nibbles(words, above, magic, less, BITS)
    pairs = tl.reshape(tl.permute(pairs, (0, 2, 3, 1)), (ROWS, HALVES * STEPS, 4, 1))
    values = shifted(pairs, 16, 2).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(values, (ROWS, HALVES * STEPS * 8))


@triton.jit
def unit(flat, BLOCK_N: tl.constexpr):
    """Words of a unit [BLOCK_N / 16, 8, 4, half, row / 8] as [BLOCK_N, 4, half, 1]."""
    words = tl.reshape(flat, (BLOCK_N // 16, 8, 4, 2, 2))
    return tl.reshape(tl.permute(words, (0, 4, 1, 2, 3)), (BLOCK_N, 4, 2, 1))


@triton.jit
def fifths(bits):
    """Words, each with the fifth bits of four words of a thread, for each of those: at bit i + 16
    p."""
    COUNT: tl.constexpr = bits.shape[0]
    by = tl.reshape(8 * tl.arange(0, 4), (1, 4))
    mine = (
        tl.broadcast_to(tl.reshape(bits, (COUNT, 1)), (COUNT, 4)) >> tl.broadcast_to(by, (COUNT, 4))
    ) & 255
    return tl.reshape(mine | (mine << 12), (COUNT * 4,))


@triton.jit
def half(words, AT: tl.constexpr):
    """One half of words [BLOCK_N, 4, half, 1], [BLOCK_N, 4, 1, 1]."""
    first, second = tl.split(tl.reshape(words, (words.shape[0], 4, 2)))
    return tl.reshape(first if AT == 0 else second, (words.shape[0], 4, 1, 1))


@triton.jit
def column(value, AT: tl.constexpr):
    """Column AT of value [rows, 4, columns]."""
    ROWS: tl.constexpr = value.shape[0]
    HALF: tl.constexpr = value.shape[2] // 2
    if HALF == 0:
        return tl.reshape(value, (ROWS, 4))
    else:
        left, right = tl.split(tl.permute(tl.reshape(value, (ROWS, 4, 2, HALF)), (0, 1, 3, 2)))
        return column(left if AT < HALF else right, AT if AT < HALF else AT - HALF)


@triton.jit
def in_rows(scale, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    """Scales of a turn as `scale_places` says, [thread, row % 8, BLOCK_N / 16, group and row / 8],
    as [BLOCK_N, thread, group]."""
    value = tl.permute(tl.reshape(scale, (4, 8, BLOCK_N // 16, GROUPS, 2)), (2, 4, 1, 0, 3))
    return tl.reshape(value, (BLOCK_N, 4, GROUPS)).to(tl.float32)


@triton.jit
def beside(value, AT: tl.constexpr, BLOCK_M: tl.constexpr):
    """Column AT of what `in_rows` gave for every row of x."""
    ROWS: tl.constexpr = value.shape[0]
    four = tl.reshape(column(value, AT), (ROWS, 1, 4, 1))
    return tl.reshape(tl.broadcast_to(four, (ROWS, BLOCK_M // 8, 4, 2)), (ROWS, BLOCK_M))


@triton.jit
def scaled(total, dots, sums, scales, lows, AT: tl.constexpr, LOW: tl.constexpr):
    """total + dots * scale + sums * low, each product and its sum rounded once."""
    BLOCK_M: tl.constexpr = dots.shape[1]
    total = tl.fma(dots, beside(scales, AT, BLOCK_M), total)
    if LOW:
        total = tl.fma(sums, beside(lows, AT, BLOCK_M), total)
    return total


@triton.jit
def places(n0, N, size, BLOCK_N: tl.constexpr, EACH: tl.constexpr):
    """Return the offsets at which the first EACH elements of each block of 16 rows of a tile lie, a
    block having `size` of them; behind the last block that one again."""
    e = tl.arange(0, BLOCK_N // 16 * EACH)
    block = tl.minimum(n0 * (BLOCK_N // 16) + e // EACH, tl.cdiv(N, 16) - 1)
    return block.to(tl.int64) * size + e % EACH


@triton.jit
def scale_places(n0, N, size, BLOCK_N: tl.constexpr, EACH: tl.constexpr):
    """Return the offsets of scales, [thread, row % 8, BLOCK_N / 16, EACH], in the order of the
    threads of the matrix unit: four of them have the same rows."""
    block = n0 * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16)[None, None, :, None]
    found = tl.minimum(block, tl.cdiv(N, 16) - 1).to(tl.int64) * size
    found += tl.arange(0, 8)[None, :, None, None] * EACH + tl.arange(0, 4)[:, None, None, None] * 0
    return found + tl.arange(0, EACH)[None, None, None, :]


@triton.jit
def weight_at(
    q, high, scale, low, n0, N, K, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the addresses of what a tile of a weight has for its first turn."""
    UNIT: tl.constexpr = 32 if BITS == 8 else 64
    wide = tl.cdiv(K, 256) * 256
    q += places(n0, N, wide // UNIT * 128, BLOCK_N, 128)
    if BITS == 5:
        high += places(n0, N, wide // UNIT * 32, BLOCK_N, 32)
    if GROUP > 0:
        EACH: tl.constexpr = 256 // GROUP if GROUP > 0 else 1  # scales of two rows in 128 columns
        at = scale_places(n0, N, wide // 128 * 8 * EACH, BLOCK_N, EACH)
        scale += at
        low += at
    return (q, high, scale, low)


@triton.jit
def words_of(at, turn, LOW: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Load what a weight has for a turn of 128 columns: words, fifth bits, scales and lows. at:
    what `weight_at` returned."""
    q, high, scale, low = at
    UNITS: tl.constexpr = 4 if BITS == 8 else 2
    words, above, scales, lows = (), (), (), ()
    for u in tl.static_range(0, UNITS):
        words += (tl.load(q + turn * (128 * UNITS) + u * 128, cache_modifier=".cg"),)
        if BITS == 5:
            above += (tl.load(high + turn * (32 * UNITS) + u * 32),)
    if GROUP > 0:
        SIZE: tl.constexpr = 2048 // GROUP if GROUP > 0 else 1
        scales = (tl.load(scale + turn * SIZE),)
        if LOW:
            lows = (tl.load(low + turn * SIZE),)
    return (words, above, scales, lows)


@triton.jit
def add_turn(
    total, mine, columns, sums, zero, LOW: tl.constexpr, SUMS: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Add the sum of a turn. mine: what `words_of` loaded; columns: x, in pieces; sums: those of
    its groups, computed here without SUMS."""
    FP8: tl.constexpr = GROUP == 0
    UNIT: tl.constexpr = 32 if BITS == 8 else 64
    SIZE: tl.constexpr = 128 if FP8 else GROUP
    PIECE: tl.constexpr = columns[0].shape[0]
    BLOCK_N: tl.constexpr = total.shape[0]
    BLOCK_M: tl.constexpr = total.shape[1]
    magic = 0x43004300 | (zero >> 16)  # that, in a register
    less = zero * 0x00010001 + (0xC300C300 - 0x100000000)  # -(128 + zero) twice
    zeros = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    ones = tl.full((BLOCK_N, PIECE), 1.0, tl.float32).to(tl.bfloat16)
    dots, given = zeros, zeros
    words, above, scales, lows = mine
    if not FP8:
        factors = in_rows(scales[0], BLOCK_N, 128 // SIZE)
        least = in_rows(lows[0], BLOCK_N, 128 // SIZE) if LOW else factors
    for v in tl.static_range(0, 128, PIECE):
        here = unit(words[v // UNIT], BLOCK_N)
        top = here
        if BITS == 5:
            top = unit(fifths(above[v // UNIT]), BLOCK_N)
        if PIECE < UNIT:
            here, top = half(here, v % UNIT // PIECE), half(top, v % UNIT // PIECE)
        operand = elements(here, top, magic, less, BITS, FP8)
        if FP8:
            total = tl.dot(operand, columns[v // PIECE], total)
        else:
            if v // SIZE * SIZE == v:
                dots, given = zeros, zeros
            dots = tl.dot(operand, columns[v // PIECE], dots)
            if LOW and SUMS:
                one = tl.reshape(column(sums, v // SIZE), (1, BLOCK_M))
                given = tl.broadcast_to(one, (BLOCK_N, BLOCK_M))
            elif LOW:
                given = tl.dot(ones, columns[v // PIECE], given)
            if (v + PIECE) // SIZE * SIZE == v + PIECE:
                total = scaled(total, dots, given, factors, least, v // SIZE, LOW)
    return total


@triton.constexpr_function
def piece(bits, group):
    """Return the columns of a product: those of a unit, or half of them in small groups."""
    unit = 32 if bits == 8 else 64
    return unit if group == 0 or group >= unit else unit // 2


@triton.jit
def groups_part(
    x, q, high, scale, low, sums, zero, m, n0, M, N, K, begin, end, LOW: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The part of the sums of columns begin to end, [BLOCK_N, BLOCK_M]."""
    tl.static_assert(BLOCK_K == 128)
    PIECE: tl.constexpr = piece(BITS, GROUP)
    COUNT: tl.constexpr = 1 if GROUP == 0 else 128 // (1 if GROUP == 0 else GROUP)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    row = tl.minimum(m, M - 1)
    x += row[None, :].to(tl.int64) * K + tl.arange(0, PIECE)[:, None]
    sums += row[:, None] * (tl.cdiv(K, 256) * 2 * COUNT) + tl.arange(0, COUNT)[None, :]
    at = weight_at(q, high, scale, low, n0, N, K, BITS, GROUP, BLOCK_N)
    for turn in tl.range(begin // 128, tl.cdiv(end, 128), 1, num_stages=STAGES):
        columns, known = (), total
        for v in tl.static_range(0, 128, PIECE):
            there = (m < M)[None, :] & (turn * 128 + v < end)
            columns += (tl.load(x + turn * 128 + v, mask=there, other=0.0),)
        if LOW:
            known = tl.reshape(tl.load(sums + turn * COUNT), (BLOCK_M // 4, 4, COUNT))
        mine = words_of(at, turn, LOW, BITS, GROUP)
        total = add_turn(total, mine, columns, known, zero, LOW, True, BITS, GROUP)
    return total


@triton.jit
def whole_groups(
    x, q, high, scale, low, sums, has_low, zero, m, n0, M, N, K, begin, end,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`groups_part` of weights with or without lows."""
    if GROUP > 0 and has_low:
        value = groups_part(
            x, q, high, scale, low, sums, zero, m, n0, M, N, K, begin, end, True,
            BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    else:
        value = groups_part(
            x, q, high, scale, low, sums, zero, m, n0, M, N, K, begin, end, False,
            BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    return value


@triton.jit
def ask_for(
    q, n0, N, K, begin, end, BITS: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`prefetch` of the words of a tile, AHEAD bytes in all."""
    UNIT: tl.constexpr = 32 if BITS == 8 else 64
    block = tl.minimum(n0 * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16), tl.cdiv(N, 16) - 1)
    words = tl.cdiv(K, 256) * 256 // UNIT * 128  # of a block
    prefetch(q, block, words, begin // UNIT * 128, tl.cdiv(end, UNIT) * 128, AHEAD)


@triton.jit
def groups(
    x, q, high, scale, low, sums, bias, residual, out, partial, counters, has_low, zero, has_bias,
    has_residual, M, N, K, chunk, parts, BITS: tl.constexpr, GROUP: tl.constexpr,
    AHEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Weights in groups of GROUP columns: value = scale * (q - zero) + low. The integers are exact
    in the type of x; scales are applied to the sum of a group. GROUP 0: value = scale * q with q in
    e4m3 and a scale for each row. sums: those of the groups of x, which lows are multiplied with.
    A program computes one part, or all where the grid says so. If it is one of several, they have
    `partial` [parts, M, N] and a counter for each tile. Grid: tiles of M and N, parts or 1."""
    launch_dependents()
    m0, n0 = place(M, N, BLOCK_M, BLOCK_N)
    m = m0 * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1)
    each = parts // tl.num_programs(1)
    begin = first * chunk
    ask_for(q, n0, N, K, begin, tl.minimum(begin + chunk, K), BITS, AHEAD, BLOCK_N)
    wait()
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for part in range(first, first + each):
        begin = part * chunk
        end = tl.minimum(begin + chunk, K)
        total += whole_groups(
            x, q, high, scale, low, sums, has_low, zero, m, n0, M, N, K, begin, end,
            BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip
    finish(
        total, scale, bias, residual, out, partial, counters, has_bias, has_residual, m, m0, n0, M, N, parts,
        each == parts, GROUP == 0,
    )  # fmt: skip


@triton.jit
def finish(
    total, scale, bias, residual, out, partial, counters, has_bias, has_residual, m, m0, n0, M, N, parts,
    whole, FP8: tl.constexpr,
):  # fmt: skip
    """Store a tile [BLOCK_N, BLOCK_M]: whole, or a part of it, and all parts where it is the
    last."""
    BLOCK_N: tl.constexpr = total.shape[0]
    BLOCK_M: tl.constexpr = total.shape[1]
    n = n0 * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < M)[None, :] & (n < N)[:, None]
    at = m[None, :].to(tl.int64) * N + n[:, None]
    if whole:
        if FP8:
            total *= tl.load(scale + n, mask=n < N, other=0.0)[:, None]
        if has_bias:
            total += tl.load(bias + n, mask=n < N, other=0.0)[:, None]
        if has_residual:
            total = tl.load(residual + at, mask=inside, other=0.0) + total
        tl.store(out + at, total, mask=inside)
    else:
        tl.store(partial + tl.program_id(1).to(tl.int64) * M * N + at, total, mask=inside)
        if is_last(counters + tl.program_id(0), parts):
            add_up(
                partial, parts, out, scale, bias, residual, FP8, has_bias, has_residual, m0 * BLOCK_M,
                n0 * BLOCK_N, M, N, BLOCK_M, BLOCK_N,
            )  # fmt: skip


# -- few rows ------------------------------------------------------------------------------------------------
@triton.jit
def in_order(x, out, M, K, BLOCK_M: tl.constexpr):
    """The words of x in the order in which threads of the matrix unit read them: [tile of M, K in
    multiples of 256 / 32, BLOCK_M / 8, row % 8, column % 8 / 2, column % 32 / 8], zeros behind the
    last row and column. Grid: 256 columns, 8 rows."""
    start_dependent()
    e = tl.arange(0, 1024)
    block = tl.program_id(0) * 8 + e // 128
    row = tl.program_id(1) * 8 + e // 16 % 8
    word = block * 16 + e % 4 * 4 + e // 4 % 4
    value = tl.load(x + row * (K // 2) + word, mask=(row < M) & (word < K // 2), other=0)
    EIGHTS: tl.constexpr = BLOCK_M // 8
    tile = tl.program_id(1) // EIGHTS * tl.cdiv(K, 256) * (8 * EIGHTS)
    tl.store(out + (tile + block * EIGHTS + tl.program_id(1) % EIGHTS) * 128 + e % 128, value)


@triton.jit
def columns_of(x, turn, ORDERED: tl.constexpr, BLOCK_M: tl.constexpr, PIECE: tl.constexpr):
    """Load the words of x of a turn, in pieces [column % 8 / 2, row % 8, row / 8, column / 8]."""
    found = ()
    for v in tl.static_range(0, 128, PIECE):
        if ORDERED:
            at = (turn * 4 + v // 32) * (BLOCK_M * 16) + v % 32 // 8
        else:
            at = turn * 64 + v // 2
        found += (tl.load(x + at),)
    return found


@triton.jit
def operands_of(words, BLOCK_M: tl.constexpr, PIECE: tl.constexpr):
    """Return what `columns_of` loaded as bf16 [PIECE, BLOCK_M]."""
    found = ()
    for v in tl.static_range(0, 128, PIECE):
        one = tl.reshape(words[v // PIECE], (4, 8, BLOCK_M // 8, PIECE // 8, 1))
        one = tl.broadcast_to(one, (4, 8, BLOCK_M // 8, PIECE // 8, 2))
        by = tl.reshape(tl.arange(0, 2) * 16, (1, 1, 1, 1, 2))
        one = (one >> tl.broadcast_to(by, one.shape)).to(tl.int16).to(tl.bfloat16, bitcast=True)
        found += (tl.reshape(tl.permute(one, (3, 0, 4, 2, 1)), (PIECE, BLOCK_M)),)
    return found


@triton.jit
def few_part(
    x, q, high, scale, low, zero, m0, n0, M, N, K, begin, end, LOW: tl.constexpr, ORDERED: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Do as `groups_part` for few rows: everything goes from memory to the registers of the one
    warp that wants it, the weight one or two turns ahead."""
    PIECE: tl.constexpr = piece(BITS, GROUP)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    at = weight_at(q, high, scale, low, n0, N, K, BITS, GROUP, BLOCK_N)
    if ORDERED:
        e = tl.arange(0, PIECE // 8)
        x += m0 * tl.cdiv(K, 256) * (128 * BLOCK_M)
        x += tl.arange(0, 4)[:, None, None, None] * 4 + tl.arange(0, 8)[None, :, None, None] * 16
        x += tl.arange(0, BLOCK_M // 8)[None, None, :, None] * 128
        x += (e // 4 * (BLOCK_M * 16) + e % 4)[None, None, None, :]
    else:
        # behind `reshape` nobody knows that words lie beside each other: each thread loads its own
        four = tl.reshape(tl.arange(0, 4), (4, 1, 1, 1))
        eight = tl.reshape(tl.arange(0, PIECE // 8) * 4, (1, 1, 1, PIECE // 8))
        m = m0 * BLOCK_M + tl.arange(0, BLOCK_M)
        row = tl.reshape(tl.minimum(m, M - 1).to(tl.int64) * (K // 2), (BLOCK_M // 8, 8))
        x += tl.reshape(tl.permute(row, (1, 0)), (1, 8, BLOCK_M // 8, 1)) + (four + eight)
    begin = begin // 128
    last = tl.cdiv(end, 128) - 1
    mine = words_of(at, begin, LOW, BITS, GROUP)
    second = mine
    if DEPTH > 1:
        second = words_of(at, tl.minimum(begin + 1, last), LOW, BITS, GROUP)
    words = columns_of(x, begin, ORDERED, BLOCK_M, PIECE)
    for turn in tl.range(begin, last + 1, 1, num_stages=1, loop_unroll_factor=2):
        third = words_of(at, tl.minimum(turn + DEPTH, last), LOW, BITS, GROUP)
        later = columns_of(x, tl.minimum(turn + 1, last), ORDERED, BLOCK_M, PIECE)
        columns = operands_of(words, BLOCK_M, PIECE)
        total = add_turn(total, mine, columns, total, zero, LOW, False, BITS, GROUP)
        words = later
        if DEPTH > 1:
            mine, second = second, third
        else:
            mine = third
    return total


@triton.jit
def few_groups(
    x, q, high, scale, low, sums, bias, residual, out, partial, counters, has_low, zero, has_bias,
    has_residual, M, N, K, chunk, parts, ORDERED: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, AHEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """`groups` of few rows, by programs of one warp, with the same bits. x: words, as they lie, K
    being a multiple of 128, or as `in_order` writes them. sums: nothing; those of groups are
    computed here, as products with ones."""
    launch_dependents()
    m0, n0 = place(M, N, BLOCK_M, BLOCK_N)
    m = m0 * BLOCK_M + tl.arange(0, BLOCK_M)
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, K)
    ask_for(q, n0, N, K, begin, end, BITS, AHEAD, BLOCK_N)
    wait()
    if GROUP > 0 and has_low:
        total = few_part(
            x, q, high, scale, low, zero, m0, n0, M, N, K, begin, end, True, ORDERED, BITS, GROUP,
            BLOCK_M, BLOCK_N, DEPTH,
        )  # fmt: skip
    else:
        total = few_part(
            x, q, high, scale, low, zero, m0, n0, M, N, K, begin, end, False, ORDERED, BITS, GROUP,
            BLOCK_M, BLOCK_N, DEPTH,
        )  # fmt: skip
    finish(
        total, scale, bias, residual, out, partial, counters, has_bias, has_residual, m, m0, n0, M, N, parts,
        parts == 1, GROUP == 0,
    )  # fmt: skip


@triton.jit
def gated_groups(
    x, q, high, scale, low, sums, out, has_low, zero, M, N, K,
    BITS: tl.constexpr, GROUP: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """SiLU(x gate^T) * (x up^T) of a weight [2 N, K] of gate and up: bit for bit what `groups` in
    one part and `gated` behind it give. N is a multiple of 16. Grid: tiles of M and N."""
    launch_dependents()
    m0, n0 = place(M, N, BLOCK_M, BLOCK_N)
    n = n0 * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m0 * BLOCK_M + tl.arange(0, BLOCK_M)
    ask_for(q, n0, N, K, 0, K, BITS, AHEAD, BLOCK_N)
    wait()
    gate = whole_groups(
        x, q, high, scale, low, sums, has_low, zero, m, n0, M, N, K, 0, K,
        BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    wide = tl.cdiv(K, 256) * 256
    row = N.to(tl.int64) * wide  # elements of the rows of gate
    behind = N.to(tl.int64) if GROUP == 0 else row // (1 if GROUP == 0 else GROUP)
    up = whole_groups(
        x, q + row // (4 if BITS == 8 else 8), high + row // 32, scale + behind, low + behind, sums,
        has_low, zero, m, n0, M, N, K, 0, K, BITS, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
    )  # fmt: skip
    if GROUP == 0:
        gate *= tl.load(scale + n, mask=n < N, other=0.0)[:, None]
        up *= tl.load(scale + N + n, mask=n < N, other=0.0)[:, None]
    value = gate / (1.0 + tl.exp(-gate)) * up
    at = m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def group_sums(x, sums, M, K, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SPAN: tl.constexpr):
    """Sums of the groups of each row, fp32 [M, K in multiples of 256 / GROUP]: products with ones,
    by the matrix unit, as `groups` computes those of few rows. At most 16 groups are in SPAN
    columns. Grid: tiles of M, of SPAN columns."""
    start_dependent()
    COUNT: tl.constexpr = SPAN // GROUP
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    values = tl.load(
        x + m[None, :].to(tl.int64) * K + k[:, None],
        mask=(m < M)[None, :] & (k < K)[:, None],
        other=0.0,
    )
    group = tl.arange(0, 16)
    mine = (group[:, None] == tl.arange(0, SPAN)[None, :] // GROUP).to(tl.bfloat16)
    found = tl.dot(mine, values, tl.zeros((16, BLOCK_M), tl.float32))
    at = m[None, :] * (tl.cdiv(K, 256) * (256 // GROUP)) + tl.program_id(1) * COUNT + group[:, None]
    tl.store(sums + at, found, mask=(m < M)[None, :] & (group < COUNT)[:, None])
