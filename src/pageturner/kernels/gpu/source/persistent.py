"""Products of many rows with a weight [N, K] transposed on sm_90, in Gluon. Bits are those of
`products.dense`.

A persistent program: one warp fetches boxes of x and of the weight by TMA into a ring of STAGES,
and WARPS warps multiply. Each stage has two barriers. `full` completes its n-th phase when the
boxes of the n-th use of the stage are there; `empty` completes its n-th phase when the n-th use is
over. Use n of a stage is step i = n * STAGES + stage of the program; so

    the warps that multiply wait for phase n of full:   parity (i // STAGES) & 1
    the warp that fetches waits for phase n - 1 of empty: parity ((i // STAGES) & 1) ^ 1, which a
    new barrier
                                                          passes

Both go through the same steps i of the same tiles, whatever M, N and K are, so neither waits for a
phase that nobody completes. A matrix instruction goes on reading its stage after it was issued: a
stage is given back when the step behind it was issued and all before that one are done, the last
one when all are done. TMA reads zeros behind the last row or column, and writes nothing there.

Each part of K is summed from zero in the steps of one matrix instruction (k16), and parts are added
from the first to the last through `out`; the element is read by the thread that wrote it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


# -- the ring ------------------------------------------------------------------------------------------------
@gluon.jit
def ring(x, w, BM: gl.constexpr, WIDE: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr):
    """Allocate the stages of x and of the weight, and the barriers `full` and `empty`."""
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    ws = gl.allocate_shared_memory(w.dtype, [STAGES, WIDE, BK], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    return xs, ws, full, empty


@gluon.jit
def tile_of(tile, high, wide, BM: gl.constexpr, BN: gl.constexpr):
    """Return the first row and column of a tile of high times wide: eight tiles over M lie beside
    each other, as in `products.place`."""
    first = tile // (8 * wide) * 8
    tall = gl.minimum(high - first, 8)
    within = tile % (8 * wide)
    m = first + within % tall
    n = within // tall
    return m * BM, n * BN


# -- the warp that fetches -----------------------------------------------------------------------------------
@gluon.jit
def prefetch_residual(residual, m0, n0, M, N, BM: gl.constexpr, BN: gl.constexpr):
    """Bring a tile of the residual into the L2 cache before it is added."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, 1], [1, 0])
    LINES: gl.constexpr = BN // 32
    n = n0 + 32 * gl.arange(0, LINES, gl.SliceLayout(0, layout))
    for rows in range(0, BM, 32):
        m = m0 + rows + gl.arange(0, 32, gl.SliceLayout(1, layout))
        at = (gl.minimum(m, M - 1).to(gl.int64) * N)[:, None] + gl.minimum(n, N - 1)[None, :]
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [residual + at], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@gluon.jit
def fetch(
    x,
    w,
    xs,
    ws,
    full,
    empty,
    residual,
    has_residual,
    M,
    N,
    K,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fetch the boxes of every step. A tile of gate and up has columns of both, one box below the
    other."""
    BM: gl.constexpr = xs.shape[1]
    WIDE: gl.constexpr = ws.shape[1]
    BK: gl.constexpr = xs.shape[2]
    high, wide = gl.cdiv(M, BM), gl.cdiv(N, BN)
    i = 0
    for tile in range(gl.program_id(0), high * wide, gl.num_programs(0)):
        m0, n0 = tile_of(tile, high, wide, BM, BN)
        for k in range(0, K, BK):
            at = i % STAGES
            mbarrier.wait(empty.index(at), ((i // STAGES) & 1) ^ 1)
            ready = full.index(at)
            mbarrier.expect(ready, 2 * BK * (BM + WIDE))
            tma.async_copy_global_to_shared(x, [m0, k], ready, xs.index(at))
            stage = ws.index(at)
            if BN == WIDE:
                tma.async_copy_global_to_shared(w, [n0, k], ready, stage)
            else:
                tma.async_copy_global_to_shared(w, [n0, k], ready, stage.slice(0, BN))
                tma.async_copy_global_to_shared(w, [N + n0, k], ready, stage.slice(BN, BN))
            i += 1
        if has_residual:
            prefetch_residual(residual, m0, n0, M, N, BM, BN)


# -- the warps that multiply ---------------------------------------------------------------------------------
@gluon.jit
def release(empty, i, steps, STAGES: gl.constexpr):
    """Give back the stage of the step before i, if there are steps before. All threads meet at the
    arrival."""
    mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=steps > 0)


@gluon.jit
def multiply(xs, ws, full, empty, i, steps, STAGES: gl.constexpr, WARPS: gl.constexpr):
    """Sum the next `steps` boxes."""
    BM: gl.constexpr = xs.shape[1]
    WIDE: gl.constexpr = ws.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, WIDE, 16]
    )
    acc = gl.zeros((BM, WIDE), gl.float32, layout)
    for step in range(steps):
        at = i % STAGES
        mbarrier.wait(full.index(at), (i // STAGES) & 1)
        acc = warpgroup_mma(xs.index(at), ws.index(at).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        release(empty, i, step, STAGES)
        i += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    release(empty, i, steps, STAGES)
    return acc


@gluon.jit
def halves(value, WARPS: gl.constexpr):
    """Split a tile into its left and its right columns; no element moves."""
    columns: gl.constexpr = value.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, columns, 16]
    )
    left, right = gl.split(gl.permute(gl.reshape(value, (value.shape[0], 2, columns)), (0, 2, 1)))
    return (
        gl.convert_layout(left, layout, assert_trivial=True),
        gl.convert_layout(right, layout, assert_trivial=True),
    )


@gluon.jit
def now(value):
    """Return the same value, of which nothing is computed before: the addresses of all pieces of a
    tile take more registers than there are beside its sums."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store(
    value, out, bias, residual, so_far, has_bias, has_residual, m0, n0, M, N, WARPS: gl.constexpr
):
    """Store residual + (value + bias), each step rounded; with so_far what `out` holds is added to
    value first. Each thread stores pieces of 32 elements, which take few registers."""
    WIDE: gl.constexpr = value.shape[1]
    if WIDE * value.shape[0] > 1024 * WARPS:
        left, right = halves(value, WARPS)
        half: gl.constexpr = WIDE // 2
        store(left, out, bias, residual, so_far, has_bias, has_residual, m0, n0, M, N, WARPS)
        store(
            right, out, bias, residual, so_far, has_bias, has_residual, m0, n0 + half, M, N, WARPS
        )
    else:
        layout: gl.constexpr = value.type.layout
        m = now(m0) + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
        column = gl.arange(0, WIDE, gl.SliceLayout(0, layout))
        n0 = (
            now(n0 // 16) * 16
        )  # a multiple of 16 for the compiler: two columns are written at once
        behind = column < N - n0
        inside = (m < M)[:, None] & behind[None, :]
        row = m.to(gl.int64) * N + n0
        if so_far:
            value = gl.load((out + row)[:, None] + column[None, :], mask=inside, other=0.0) + value
        if has_bias:
            value += gl.load(bias + n0 + column, mask=behind, other=0.0)[None, :]
        if has_residual:
            value = (
                gl.load((residual + row)[:, None] + column[None, :], mask=inside, other=0.0) + value
            )
        gl.store((out + row)[:, None] + column[None, :], value, mask=inside)


@gluon.jit
def dense_tiles(
    xs, ws, full, empty, bias, residual, out, has_bias, has_residual, M, N, K, chunk, parts,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Compute the tiles of `dense`."""
    BM: gl.constexpr = xs.shape[1]
    BN: gl.constexpr = ws.shape[1]
    high, wide = gl.cdiv(M, BM), gl.cdiv(N, BN)
    i = 0
    for tile in range(gl.program_id(0), high * wide, gl.num_programs(0)):
        m0, n0 = tile_of(tile, high, wide, BM, BN)
        for part in range(parts):
            steps = gl.cdiv(gl.minimum(chunk, K - part * chunk), xs.shape[2])
            last = part == parts - 1
            value = multiply(xs, ws, full, empty, i, steps, STAGES, WARPS)
            i += steps
            store(
                value, out, bias, residual, part > 0, has_bias & last, has_residual & last, m0, n0, M, N, WARPS
            )  # fmt: skip


@gluon.jit
def gated_tiles(
    xs, ws, joined, full, empty, out, M, N, K, STAGES: gl.constexpr, WARPS: gl.constexpr
):
    """Compute the tiles of `gated_dense`, and write them through `joined` while the next are
    computed."""
    BM: gl.constexpr = xs.shape[1]
    BN: gl.constexpr = joined.shape[1]
    high, wide = gl.cdiv(M, BM), gl.cdiv(N, BN)
    steps = gl.cdiv(K, xs.shape[2])
    i = 0
    for tile in range(gl.program_id(0), high * wide, gl.num_programs(0)):
        m0, n0 = tile_of(tile, high, wide, BM, BN)
        gate, up = halves(multiply(xs, ws, full, empty, i, steps, STAGES, WARPS), WARPS)
        i += steps
        value = gate / (1.0 + gl.exp(-gate)) * up
        tma.store_wait(0)
        joined.store(value.to(joined.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [m0, n0], joined)
    tma.store_wait(0)


# -- the kernels ---------------------------------------------------------------------------------------------
@gluon.jit
def launch_dependents():
    """Do as `dependent.launch_dependents`, which Gluon cannot call."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait():
    """Do as `dependent.wait`. The warp that fetches meets those that call this, and so waits as
    well."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def dense(
    x, w, bias, residual, out, has_bias, has_residual, M, N, K, chunk, parts,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """residual + (x w^T + bias) in fp32, of several parts of K too. Grid: any number of
    programs."""
    launch_dependents()
    xs, ws, full, empty = ring(x, w, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    wait()
    gl.warp_specialize(
        [
            (
                dense_tiles,
                (xs, ws, full, empty, bias, residual, out, has_bias, has_residual, M, N, K, chunk, parts,
                 STAGES, WARPS),
            ),
            (fetch, (x, w, xs, ws, full, empty, residual, has_residual, M, N, K, BLOCK_N, STAGES)),
        ],
        [1], [48],
    )  # fmt: skip


@gluon.jit
def gated_dense(
    x, w, out, M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """SiLU(x gate^T) * (x up^T) of a weight [2 N, K], in the type of x. BLOCK_N: outputs of a
    tile."""
    launch_dependents()
    xs, ws, full, empty = ring(x, w, BLOCK_M, 2 * BLOCK_N, BLOCK_K, STAGES)
    joined = gl.allocate_shared_memory(out.dtype, [BLOCK_M, BLOCK_N], out.layout)
    wait()
    gl.warp_specialize(
        [
            (gated_tiles, (xs, ws, joined, full, empty, out, M, N, K, STAGES, WARPS)),
            (fetch, (x, w, xs, ws, full, empty, None, 0, M, N, K, BLOCK_N, STAGES)),
        ],
        [1], [48],
    )  # fmt: skip
