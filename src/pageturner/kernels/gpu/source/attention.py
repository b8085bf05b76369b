"""Attention over block tables. Tiles of KV begin at absolute positions that are multiples of
BLOCK_T.

A tile of rows holds rows of one sequence with query heads that share a KV head. The partials of a
segment of 256 positions (m, l, acc: the maximum, the sum of exponentials, and the sum of values, as
FlashAttention calls them) are computed on their own and merged from the first to the last. Long
chunks of a prompt have one program for all segments (WHOLE). Few rows have a program for each
segment, and the one that finishes last merges all of them. A position that a row does not see
leaves its partials as they were, bit for bit, so the other rows of its tile cannot matter; sums
over positions are matrix products, whose order is that of the instruction, and not of a layout.
"""
# ruff: noqa: E741

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from pageturner.kernels.gpu.source.dependent import launch_dependents, wait
from pageturner.kernels.gpu.source.products import e4m3_fields, is_last
from pageturner.kernels.gpu.source.rows import tanh

SEGMENT = tl.constexpr(256)
MERGED = tl.constexpr(4)
# Scores are kept times log2(e), so that an exponential is one instruction.
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def bytes_of(value, R: tl.constexpr):
    """The same bytes, copied by an instruction that is not pure. Triton's search for the loads of
    an operand stops there. Where it finds bytes, it gives an instruction of one warp the columns 0,
    1, 4, 5, ... of 32 instead of 16 neighbours (kWidth 4), and few rows would be summed in another
    order than many. 64 rows on sm_100 have operands in shared memory alone, and a pipeline that
    does not take such an instruction."""
    copied = value
    if not (R >= 64 and cuda_capability_geq(10, 0)) or cuda_capability_geq(12, 0):
        copied = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [value], value.dtype, False, 4
        )
    return copied


@triton.jit
def load_heads(
    kv, scales, slot, head, heads, stride, dim, d, KIND: tl.constexpr, COMPUTE: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Load the elements d, those below `dim`, of one head of each slot [positions, D] in the type
    that products are computed in. Heads are `stride` apart."""
    index = slot * heads + head
    # pointers of rows in one dimension: threads share them, where [:, None] earlier lets each
    # compute its own
    rows = kv + index.to(tl.int64) * stride
    value = tl.load(rows[:, None] + d[None, :], mask=(d < dim)[None, :], other=0)
    if KIND == "int8" or KIND == "fp8_e4m3":
        value = bytes_of(value, R)
    if KIND == "int8":
        scale = tl.load(scales + index)
        heads_of = (value.to(tl.float32) * scale[:, None]).to(COMPUTE)
    elif KIND == "fp8_e4m3":
        # a power of two from 2^-14 to 2^7, so that the product is exact in fp16
        scale = tl.load(scales + index)
        if cuda_capability_geq(8, 9):
            halves = tl.inline_asm_elementwise(
                "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
                " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
                "=r,=r,r", [value], dtype=tl.float16, is_pure=True, pack=4,
            )  # fmt: skip
            heads_of = halves * scale.to(tl.float16)[:, None]
        else:
            heads_of = e4m3_fields(value) * (scale * 256.0).to(tl.float16)[:, None]
    else:
        heads_of = value
    return heads_of


@triton.jit
def finite(m):
    """Return 0 in place of the maximum of nothing, which is -inf: 2^(-inf - 0) is 0, and not a
    NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def nothing(R: tl.constexpr, D: tl.constexpr):
    """The partial of R rows that saw nothing."""
    return (
        tl.full((R,), float("-inf"), tl.float32),
        tl.zeros((R,), tl.float32),
        tl.zeros((R, D), tl.float32),
    )


@triton.jit
def first_seen(position, window, chunked):
    """The first position that a row sees."""
    first = tl.where(
        chunked != 0, position - position % tl.maximum(window, 1), position - window + 1
    )
    return tl.where(window > 0, tl.maximum(first, 0), 0)


@triton.jit
def merged(m, l, acc, part_m, part_l, part_acc):
    """Two partials as one; one that saw nothing changes nothing."""
    new_m = tl.maximum(m, part_m)
    old, new = tl.exp2(m - finite(new_m)), tl.exp2(part_m - finite(new_m))
    l = l * old + part_l * new
    acc = acc * old[:, None] + part_acc * new[:, None]
    return new_m, l, acc


@triton.jit
def store_out(
    m, l, acc, out, sinks, has_sinks, row, head, valid, heads, dim, d
):  # fmt: skip
    """The quotient, the sink last. Rows of a tile that are none are not stored."""
    if has_sinks:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * LOG2E
        new_m = tl.maximum(m, sink)
        old = tl.exp2(m - new_m)
        l = l * old + tl.exp2(sink - new_m)
        acc = acc * old[:, None]
    value = acc / tl.where(l > 0, l, 1.0)[:, None]
    at = (row * heads + head)[:, None] * dim + d[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=valid[:, None] & (d[None, :] < dim))


@triton.jit
def block_of(position, inverse, shift, MANY: tl.constexpr):
    """Return the block of a position, as `steps.inverse_of` says. Products of 32 bits take fewer
    instructions. With 64 bits the compiler lets threads share their slots, which takes fewer still
    where a tile has few rows."""
    if MANY:
        high = tl.umulhi((position + position).to(tl.uint32), inverse.to(tl.uint32) << 7)
        block = (high >> (shift - 24)).to(tl.int32)
    else:
        block = ((position.to(tl.int64) * inverse) >> shift).to(tl.int32)
    return block


@triton.jit
def attend_tile(
    q, turned, keys, values, k_scales, v_scales, table, slopes, has_slopes, position, first, last, lowest,
    every_first, every_last, start, kv_head, query_head, kv_heads, dim, mixed_dim, block, inverse, shift,
    soft_cap, valid, d, m, l, acc, KIND: tl.constexpr, BLOCK_T: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """The partial (m, l, acc) of R rows with the positions of one tile more. first [R]: the first
    position that a row sees; lowest and last: the first and the last one that any row of the tile
    sees, and every_first and every_last those that all of them see. What no row sees is read of the
    nearest that one does. A block has `block` positions; `inverse` and `shift` divide by it
    (`steps.inverse_of`)."""
    ones = tl.full((BLOCK_T, 16), 1.0, tl.float32).to(q.dtype)
    j = start + tl.arange(0, BLOCK_T)
    there = tl.minimum(tl.maximum(j, lowest), last)
    R: tl.constexpr = q.shape[0]
    column = block_of(there, inverse, shift, R > 16)
    slot = tl.load(table + column) * block + (there - column * block)
    k = load_heads(keys, k_scales, slot, kv_head, kv_heads, dim, mixed_dim, d, KIND, q.dtype, R)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if ROTARY > 0:
        behind = mixed_dim + tl.arange(0, ROTARY)
        rest = load_heads(
            keys, k_scales, slot, kv_head, kv_heads, dim, dim, behind, KIND, q.dtype, R
        )
        scores = tl.dot(turned, tl.trans(rest), scores, input_precision="ieee")
    if soft_cap > 0:
        cap = soft_cap * LOG2E
        scores = cap * tanh(scores / cap)
    if has_slopes:
        slope = tl.load(slopes + query_head, mask=valid, other=0.0) * LOG2E
        scores += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
    if (start < every_first) | (start + BLOCK_T > every_last + 1):
        sees = (j[None, :] <= position[:, None]) & (j[None, :] >= first[:, None])
        scores = tl.where(sees, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, axis=1))
    base = finite(new_m)
    old = tl.exp2(m - base)
    weights = tl.exp2(scores - base[:, None]).to(q.dtype)
    if ROTARY > 0:
        v = k
    else:
        v = load_heads(
            values, v_scales, slot, kv_head, kv_heads, dim, mixed_dim, d, KIND, q.dtype, R
        )
    sums = tl.max(tl.dot(weights, ones, input_precision="ieee"), axis=1)
    l = l * old + sums
    acc = acc * old[:, None] + tl.dot(weights, v, input_precision="ieee")
    return new_m, l, acc


@triton.jit
def partials(maxes_sums, accs, at, apart, count, there, d, D: tl.constexpr):
    """The partials of four segments, of which `count` are there, from the cache that all programs
    share."""
    return (
        partial(maxes_sums, accs, at, there & (count > 0), d, D),
        partial(maxes_sums, accs, at + apart, there & (count > 1), d, D),
        partial(maxes_sums, accs, at + 2 * apart, there & (count > 2), d, D),
        partial(maxes_sums, accs, at + 3 * apart, there & (count > 3), d, D),
    )


@triton.jit
def partial(maxes_sums, accs, at, there, d, D: tl.constexpr):
    m = tl.load(maxes_sums + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(maxes_sums + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    rows = accs + at[:, None] * D + d[None, :]
    return m, l, tl.load(rows, mask=there[:, None], other=0.0, cache_modifier=".cg")


@triton.jit
def all_merged(m, l, acc, parts):
    """Merge four partials more, one after the other."""
    m, l, acc = merged(m, l, acc, parts[0][0], parts[0][1], parts[0][2])
    m, l, acc = merged(m, l, acc, parts[1][0], parts[1][1], parts[1][2])
    m, l, acc = merged(m, l, acc, parts[2][0], parts[2][1], parts[2][2])
    return merged(m, l, acc, parts[3][0], parts[3][1], parts[3][2])


@triton.jit
def merge(
    works, maxes_sums, accs, out, sinks, has_sinks, kv_head, kv_heads, heads, dim, part, D: tl.constexpr,
):  # fmt: skip
    """All partials of a tile, from the first to the last, whoever computed them. MERGED of its rows
    and heads at once: most tiles have no more, and 16 at once would take several times as long."""
    row0, count, head0 = tl.load(works + 1), tl.load(works + 2), tl.load(works + 3)
    segments, first = tl.load(works + 5), tl.load(works + 6)
    mine = tl.minimum(part, heads // kv_heads - head0)
    d = tl.arange(0, D)
    for begin in range(0, count * mine, MERGED):
        r = begin + tl.arange(0, MERGED)
        valid = r < count * mine
        row = (row0 + tl.where(valid, r // mine, 0)).to(tl.int64)
        head = kv_head * (heads // kv_heads) + head0 + r % mine
        at = first * kv_heads + kv_head * count * mine + r
        m, l, acc = nothing(MERGED, D)
        apart = count * mine * kv_heads  # from a segment to the next
        for segment in tl.range(
            0, segments, 8, num_stages=1
        ):  # the loads of eight are under way together
            some = partials(maxes_sums, accs, at, apart, segments - segment, valid, d, D)
            others = partials(
                maxes_sums, accs, at + 4 * apart, apart, segments - segment - 4, valid, d, D
            )
            m, l, acc = all_merged(m, l, acc, some)
            m, l, acc = all_merged(m, l, acc, others)
            at += 8 * apart
        store_out(m, l, acc, out, sinks, has_sinks, row, head, valid, heads, dim, d)


@triton.jit
def queries(q, d, mixed_dim, dim, valid, scale, COMPUTE: tl.constexpr, ROTARY: tl.constexpr):
    """Load and scale the elements d of the queries q [R, 1] of a tile, those below `mixed_dim`, and
    those behind it where it is not `dim`."""
    query = tl.load(q + d[None, :], mask=valid[:, None] & (d[None, :] < mixed_dim), other=0.0)
    query = (query * (scale * LOG2E)).to(COMPUTE)
    turned = query
    if ROTARY > 0:
        behind = mixed_dim + tl.arange(0, ROTARY)
        turned = tl.load(
            q + behind[None, :], mask=valid[:, None] & (behind[None, :] < dim), other=0.0
        )
        turned = (turned * (scale * LOG2E)).to(COMPUTE)
    return query, turned


@triton.jit
def attend(
    q, keys, values, k_scales, v_scales, blocks, positions, works, slopes, sinks, out, maxes_sums, accs, arrived,
    stride, has_slopes, has_sinks, heads, kv_heads, dim, mixed_dim, part, block, inverse, shift, window,
    chunked, scale, soft_cap, KIND: tl.constexpr, COMPUTE: tl.constexpr, WHOLE: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, BLOCK_T: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """q fp32 [T, heads * dim], rows `stride` apart. works [n, 8], as in `steps.Works`: where the
    block ids of its sequence begin in `blocks`, first row, rows, first head of the group; and if
    not WHOLE which segment of its tile, how many the tile has, first partial of the tile, counter.
    A tile has at most `part` heads of a group. Grid: kv_heads * n. A work of no rows does nothing.
    Partials of a KV head lie beside each other: maxes_sums [P * kv_heads, 2], accs [P * kv_heads,
    D]. arrived int32 [counters, kv_heads] is 0 before and after. Of long chunks the last tile is
    first: it takes longest. Absent rows see what the first does."""
    wait()
    kv_head, work = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    work = tl.num_programs(0) // kv_heads - 1 - work if WHOLE else work
    works += work.to(tl.int64) * 8
    row0, count, head0 = tl.load(works + 1), tl.load(works + 2), tl.load(works + 3)
    mine = tl.minimum(part, heads // kv_heads - head0)
    r, d = tl.arange(0, R), tl.arange(0, D)
    valid = r < count * mine
    row = tl.where(valid, row0 + r // mine, row0).to(tl.int64)
    head = kv_head * (heads // kv_heads) + head0 + r % mine
    position = tl.load(positions + row)
    first = first_seen(position, window, chunked)
    last, every_last = tl.max(position, axis=0), tl.min(position, axis=0)
    lowest, every_first = tl.min(first, axis=0), tl.max(first, axis=0)
    q += (row * stride + head * dim)[:, None]
    query, turned = queries(q, d, mixed_dim, dim, valid, scale, COMPUTE, ROTARY)
    table = blocks + tl.load(works)
    begin, end = lowest // BLOCK_T * BLOCK_T, tl.where(count > 0, last + 1, 0)
    m, l, acc = nothing(R, D)
    every_m, every_l, every_acc = m, l, acc
    if not WHOLE:
        segment = (lowest // SEGMENT + tl.load(works + 4)) * SEGMENT
        begin, end = tl.maximum(begin, segment), tl.minimum(end, segment + SEGMENT)
    for start in range(begin, end, BLOCK_T):
        if WHOLE and (start + 0 * last) % SEGMENT == 0:  # a tensor for the interpreter too
            every_m, every_l, every_acc = merged(
                every_m, every_l, every_acc, m, l, acc
            )  # fmt: skip
            m, l, acc = nothing(R, D)
        m, l, acc = attend_tile(
            query, turned, keys, values, k_scales, v_scales, table, slopes, has_slopes, position, first,
            last, lowest, every_first, every_last, start, kv_head, head, kv_heads, dim, mixed_dim, block,
            inverse, shift, soft_cap, valid, d, m, l, acc, KIND, BLOCK_T, ROTARY,
        )  # fmt: skip
    launch_dependents()  # earlier, keys would push the weights that they ask for out of the cache
    if WHOLE or tl.load(works + 5) <= 1:
        m, l, acc = merged(every_m, every_l, every_acc, m, l, acc)
        store_out(m, l, acc, out, sinks, has_sinks, row, head, valid, heads, mixed_dim, d)
    else:
        here = tl.load(works + 6) + tl.load(works + 4) * count * mine
        here = here * kv_heads + kv_head * count * mine + r
        tl.store(maxes_sums + here * 2, m, mask=valid)
        tl.store(maxes_sums + here * 2 + 1, l, mask=valid)
        tl.store(accs + here[:, None] * D + d[None, :], acc, mask=valid[:, None])
        if is_last(arrived + tl.load(works + 7) * kv_heads + kv_head, tl.load(works + 5)):
            merge(
                works, maxes_sums, accs, out, sinks, has_sinks, kv_head, kv_heads, heads, mixed_dim, part, D
            )  # fmt: skip
