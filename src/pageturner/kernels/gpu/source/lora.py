"""LoRA adapters: beside a product W x stands B (A x), for the rows of each adapter.

A tile is up to BLOCK_M rows of one adapter. tiles [n, 4]: number of the adapter, where its rows
begin in `rows`, how many (0: nothing), unused. bases: addresses of adapters, each of which begins
with its records, int64 [4] for each product that can be adapted: bytes from there to A and to B,
rank (0: not adapted), and the bits of the scale. A [rank, K]; B [N, rank], its rows padded with
zeros to multiples of 8.

Bits of a row depend on the row and its adapter alone: there is one height of tiles, parts of K
follow from K, and they are added from the first to the last, by whoever adds them.
"""

import triton
import triton.language as tl

from pageturner.kernels.gpu.source.dependent import start_dependent
from pageturner.kernels.gpu.source.rows import token_at


@triton.jit
def record_of(bases, tile, entry):
    """Return the address at which the adapter of a tile begins, and its record `entry`."""
    base = tl.load(bases + tl.load(tile))
    return base, (base + 32 * entry).to(tl.pointer_type(tl.int64))


@triton.jit
def shrink(
    x, rows, tiles, bases, h, entry, most, height, width, each, chunk, parts, K,
    FACTOR: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """h = A x of the fields entry, entry + 1 ...: fp32 [programs of parts, height, width], a row
    for each row of a tile. A field has `most` blocks of ranks. Grid: tiles, fields * most, programs
    of `each` parts."""
    start_dependent()
    tile = tiles + 4 * tl.program_id(0)
    count = tl.load(tile + 2)
    if count > 0:
        base, record = record_of(bases, tile, entry + tl.program_id(1) // most)
        rank = tl.load(record + 2).to(tl.int32)
        r = (tl.program_id(1) % most) * BLOCK_R + tl.arange(0, BLOCK_R)
        if (tl.program_id(1) % most) * BLOCK_R < rank:
            a = tl.multiple_of((base + tl.load(record)).to(tl.pointer_type(FACTOR)), 16)
            i, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
            m = tl.load(rows + tl.load(tile + 1) + i, mask=i < count, other=0)
            from_x = x + m[:, None].to(tl.int64) * K + k[None, :]
            from_a = a + r[None, :].to(tl.int64) * K + k[:, None]
            total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            first = tl.program_id(2) * each
            for part in range(first, tl.minimum(first + each, parts)):
                some = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for k0 in range(part * chunk, tl.minimum(part * chunk + chunk, K), BLOCK_K):
                    left = tl.load(
                        from_x + k0, mask=(i[:, None] < count) & (k0 + k[None, :] < K), other=0.0
                    )
                    right = tl.load(
                        from_a + k0, mask=(r[None, :] < rank) & (k0 + k[:, None] < K), other=0.0
                    )
                    some = tl.dot(left.to(COMPUTE), right.to(COMPUTE), some, input_precision="ieee")
                total += some
            place = tl.program_id(2) * height + tl.program_id(0) * BLOCK_M + i
            column = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
            tl.store(h + place[:, None].to(tl.int64) * width + column[None, :], total)


@triton.jit
def expand(
    h, rows, tiles, bases, y, entry, most, height, width, parts, stride, n0, n1, n2,
    FACTOR: tl.constexpr, COMPUTE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """y += scale * B h, where the outputs of up to three fields (n0, n1, n2 of them) lie side by
    side in y. The `parts` of h, at most PARTS, are summed first, and rounded to COMPUTE. Grid:
    tiles of the columns of all fields, tiles."""
    start_dependent()
    tile = tiles + 4 * tl.program_id(1)
    count = tl.load(tile + 2)
    if count > 0:
        t = tl.program_id(0)
        first = tl.cdiv(n0, BLOCK_N)
        second = first + tl.cdiv(n1, BLOCK_N)
        field = (t >= first).to(tl.int32) + (t >= second).to(tl.int32)
        column = tl.where(field == 0, 0, tl.where(field == 1, n0, n0 + n1))
        N = tl.where(field == 0, n0, tl.where(field == 1, n1, n2))
        mine = t - tl.where(field == 0, 0, tl.where(field == 1, first, second))
        base, record = record_of(bases, tile, entry + field)
        rank = tl.load(record + 2).to(tl.int32)
        if rank > 0:
            b = tl.multiple_of((base + tl.load(record + 1)).to(tl.pointer_type(FACTOR)), 16)
            scale = tl.load(record + 3).to(tl.int32).to(tl.float32, bitcast=True)
            padded = tl.cdiv(rank, 8) * 8
            i, r, n = (
                tl.arange(0, BLOCK_M),
                tl.arange(0, BLOCK_R),
                mine * BLOCK_N + tl.arange(0, BLOCK_N),
            )
            place = tl.program_id(1) * BLOCK_M + i
            from_h = h + place[:, None].to(tl.int64) * width + field * most * BLOCK_R + r[None, :]
            from_b = b + n[None, :].to(tl.int64) * padded + r[:, None]
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for r0 in range(0, rank, BLOCK_R):
                left = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for part in tl.static_range(PARTS):
                    at = from_h + part * height.to(tl.int64) * width + r0
                    left += tl.load(at, mask=(i[:, None] < count) & (part < parts), other=0.0)
                right = tl.load(
                    from_b + r0, mask=(n[None, :] < N) & (r0 + r[:, None] < padded), other=0.0
                )
                total = tl.dot(left.to(COMPUTE), right.to(COMPUTE), total, input_precision="ieee")
            m = tl.load(rows + tl.load(tile + 1) + i, mask=i < count, other=0)
            to = y + m[:, None].to(tl.int64) * stride + column + n[None, :]
            inside = (i[:, None] < count) & (n[None, :] < N)
            tl.store(to, tl.load(to, mask=inside, other=0.0) + total * scale, mask=inside)


@triton.jit
def pick(
    tokens, chosen, rows, tiles, bases, h, entry, width, FACTOR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """h of the embedding: rows of its A, which is [V, rank], by token. Grid: tiles, blocks of
    ranks."""
    start_dependent()
    tile = tiles + 4 * tl.program_id(0)
    count = tl.load(tile + 2)
    if count > 0:
        base, record = record_of(bases, tile, entry)
        rank = tl.load(record + 2).to(tl.int32)
        r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        a = tl.multiple_of((base + tl.load(record)).to(tl.pointer_type(FACTOR)), 16)
        i = tl.arange(0, BLOCK_M)
        m = tl.load(rows + tl.load(tile + 1) + i, mask=i < count, other=0)
        token = token_at(tokens, chosen, m, i < count)
        inside = (i[:, None] < count) & (r[None, :] < rank)
        value = tl.load(a + token[:, None] * rank + r[None, :], mask=inside, other=0.0)
        place = tl.program_id(0) * BLOCK_M + i
        tl.store(h + place[:, None].to(tl.int64) * width + r[None, :], value.to(tl.float32))
