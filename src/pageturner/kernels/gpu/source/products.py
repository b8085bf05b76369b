"""Products of activations [M, K] with a weight [N, K] transposed.

Bits of a row do not depend on M: the tile over K and the parts of K (`chunk` columns each) are
given by the weight's shape. Each part is summed on its own from zero, and the parts are added from
the first to the last: by one program (WHOLE), or by the one of a tile's programs that ends last.
Row tiles of different heights use one matrix instruction.
"""

import triton
import triton.language as tl

from pageturner.kernels.gpu.source.dependent import launch_dependents, prefetch, wait


@triton.jit
def e4m3_fields(bits):
    """fp8 e4m3 as fp16 divided by 256, exactly: the same fields with an exponent that is 8 too
    small."""
    wide = bits.to(tl.uint16)
    fields = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return fields.to(tl.float16, bitcast=True)


@triton.jit
def e4m3(bits):
    """fp8 e4m3 as fp16, exactly."""
    return e4m3_fields(bits) * 256.0


@triton.jit
def place(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tile over M and over N of a program: eight tiles of M beside each other, then the next of
    N, so that programs that run at once share rows and weights in the cache."""
    high, wide = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first = program // (8 * wide) * 8
    tall = tl.minimum(high - first, 8)
    within = program % (8 * wide)
    return first + within % tall, within // tall


@triton.jit
def halves(value):
    """Split a tile into its left and its right columns."""
    rows: tl.constexpr = value.shape[0]
    columns: tl.constexpr = value.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(value, (rows, 2, columns)), (0, 2, 1)))


@triton.jit
def addend(residual, wanted, m, n0, M, N, WIDTH: tl.constexpr):
    """Load a tile of the residual. Asked for before a sum is computed, it comes meanwhile."""
    n = n0 + tl.arange(0, WIDTH)
    inside = (m < M)[:, None] & (n < N)[None, :] & wanted
    return tl.load((residual + m.to(tl.int64) * N)[:, None] + n[None, :], mask=inside, other=0.0)


@triton.jit
def store_columns(value, out, bias, before, so_far, has_bias, has_residual, m, n0, M, N):
    """Store a tile as `store_rows` does. before: the tile of the residual."""
    n = n0 + tl.arange(0, value.shape[1])
    inside = (m < M)[:, None] & (n < N)[None, :]
    row = m.to(tl.int64) * N
    if so_far:
        value = tl.load((out + row)[:, None] + n[None, :], mask=inside, other=0.0) + value
    if has_bias:
        value += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    if has_residual:
        value = before + value
    tl.store((out + row)[:, None] + n[None, :], value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_rows(value, out, bias, residual, so_far, has_bias, has_residual, m, n0, M, N):
    """out = residual + (value + bias), each step rounded; so_far: with what is there already before
    all of that. Wide tiles in pieces, which take fewer registers. n0: the first column."""
    WIDE: tl.constexpr = value.shape[1]
    if WIDE > 64:
        left, right = halves(value)
        half: tl.constexpr = WIDE // 2
        store_rows(left, out, bias, residual, so_far, has_bias, has_residual, m, n0, M, N)
        store_rows(right, out, bias, residual, so_far, has_bias, has_residual, m, n0 + half, M, N)
    else:
        before = value
        if has_residual:
            before = addend(residual, True, m, n0, M, N, WIDE)
        store_columns(value, out, bias, before, so_far, has_bias, has_residual, m, n0, M, N)


@triton.jit
def is_last(counter, parts):
    """Return whether all other programs of a tile have stored their parts, which can be read then.
    The counter is 0 again behind the last one. No order in which programs end is known, and none
    matters."""
    tl.debug_barrier()  # every thread of this program has stored before one of them says so
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def add_up(
    partial, parts, out, scale, bias, residual, has_scale: tl.constexpr, has_bias, has_residual, m0, n0, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sum of the parts of a tile, from the first to the last, some rows at once: the whole tile
    would take too many registers."""
    ROWS: tl.constexpr = min(BLOCK_M, 1024 // BLOCK_N)
    n = n0 + tl.arange(0, BLOCK_N)
    for i in range(0, tl.minimum(M - m0, BLOCK_M), ROWS):
        m = m0 + i + tl.arange(0, ROWS)
        inside = (m < M)[:, None] & (n < N)[None, :]
        at = partial + (m.to(tl.int64) * N)[:, None] + n[None, :]
        before = addend(residual, has_residual != 0, m, n0, M, N, BLOCK_N)
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for _ in range(0, parts):
            total += tl.load(at, mask=inside, other=0.0)
            at += M.to(tl.int64) * N
        if has_scale:
            total *= tl.load(scale + n, mask=n < N, other=0.0)[None, :]
        store_columns(total, out, bias, before, False, has_bias, has_residual, m, n0, M, N)


@triton.jit
def zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP: tl.constexpr):
    """The sum that `add_dot` begins with."""
    return tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)


@triton.jit
def add_dot(rows, columns, total, SWAP: tl.constexpr):
    """total + rows columns, or all of it transposed."""
    if SWAP:
        return tl.dot(tl.trans(columns), tl.trans(rows), total, input_precision="ieee")
    else:
        return tl.dot(rows, columns, total, input_precision="ieee")


@triton.jit
def dense_part(
    x, w, m, n, M, N, K, begin, end, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr = False,
):  # fmt: skip
    """Sum the columns begin to end. Rows and columns behind the last are computed from the last
    one, and not stored. Where rows are few, rows that are not there are not read. SWAP: the weight
    is the first operand, which fills the matrix instruction where rows are few."""
    total = zeros(BLOCK_M, BLOCK_N, SWAP)
    k = tl.arange(0, BLOCK_K)
    x += tl.minimum(m, M - 1)[:, None].to(tl.int64) * K + k[None, :]
    w += tl.minimum(n, N - 1)[None, :].to(tl.int64) * K + k[:, None]
    for k0 in range(begin, end, BLOCK_K):
        inside = k < K - k0
        if WHOLE:
            rows = tl.load(x + k0, mask=inside[None, :], other=0.0)
        else:
            rows = tl.load(x + k0, mask=(m < M)[:, None] & inside[None, :], other=0.0)
        columns = tl.load(w + k0, mask=inside[:, None], other=0.0)
        total = add_dot(rows, columns, total, SWAP)
    return tl.trans(total) if SWAP else total


@triton.jit
def dense(
    x, w, bias, residual, out, partial, counters, has_bias, has_residual, M, N, K, chunk, parts,
    WHOLE: tl.constexpr, SWAP: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Weights in the type of x. Grid: tiles of M and N, parts or 1. Of several parts WHOLE keeps
    the sum so far in `out`; the others have `partial` [parts, M, N] and a counter for each tile."""
    launch_dependents()
    m0, n0 = place(M, N, BLOCK_M, BLOCK_N)
    n = n0 * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m0 * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = n0 * BLOCK_N
    if WHOLE:
        wait()
        for part in range(0, parts - 1):
            total = dense_part(
                x, w, m, n, M, N, K, part * chunk, part * chunk + chunk, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K
            )  # fmt: skip
            store_rows(total, out, bias, residual, part > 0, False, False, m, n0, M, N)
            tl.debug_barrier()  # another thread of the program may read it next
        total = dense_part(
            x, w, m, n, M, N, K, (parts - 1) * chunk, K, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K
        )  # fmt: skip
        store_rows(total, out, bias, residual, parts > 1, has_bias, has_residual, m, n0, M, N)
    else:
        part = tl.program_id(1)
        begin = part * chunk
        end = tl.minimum(begin + chunk, K)
        prefetch(w, tl.minimum(n, N - 1), K, begin, end, AHEAD)
        wait()
        if BLOCK_N <= 64:  # else it would take too many registers
            before = addend(residual, (has_residual != 0) & (parts == 1), m, n0, M, N, BLOCK_N)
        total = dense_part(x, w, m, n, M, N, K, begin, end, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K, SWAP)
        if parts == 1:
            if BLOCK_N <= 64:
                store_columns(total, out, bias, before, False, has_bias, has_residual, m, n0, M, N)
            else:
                store_rows(total, out, bias, residual, False, has_bias, has_residual, m, n0, M, N)
        else:
            to = partial + part.to(tl.int64) * M * N
            store_rows(total, to, bias, residual, False, False, False, m, n0, M, N)
            if is_last(counters + tl.program_id(0), parts):
                add_up(
                    partial, parts, out, bias, bias, residual, False, has_bias, has_residual,
                    m0 * BLOCK_M, n0, M, N, BLOCK_M, BLOCK_N,
                )  # fmt: skip


@triton.jit
def gated_dense(
    x, w, out, M, N, K,
    WHOLE: tl.constexpr, SWAP: tl.constexpr, AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """SiLU(x gate^T) * (x up^T) of a weight [2 N, K] of gate and up: bit for bit what `dense` in
    one part and `gated` behind it give. Grid: tiles of M and N."""
    launch_dependents()
    m0, n0 = place(M, N, BLOCK_M, BLOCK_N)
    n = n0 * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m0 * BLOCK_M + tl.arange(0, BLOCK_M)
    if not WHOLE:
        row = tl.minimum(n, N - 1)
        prefetch(w, row, K, 0, K, AHEAD // 2)
        prefetch(w, N + row, K, 0, K, AHEAD // 2)
    wait()
    gate, up = zeros(BLOCK_M, BLOCK_N, SWAP), zeros(BLOCK_M, BLOCK_N, SWAP)
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
        left = tl.load(w + k0, mask=inside[:, None], other=0.0)
        right = tl.load(w + (behind + k0), mask=inside[:, None], other=0.0)
        gate = add_dot(rows, left, gate, SWAP)
        up = add_dot(rows, right, up, SWAP)
    if SWAP:
        gate, up = tl.trans(gate), tl.trans(up)
    value = gate / (1.0 + tl.exp(-gate)) * up
    to = (out + m.to(tl.int64) * N)[:, None] + n[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
