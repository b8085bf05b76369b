"""Products of many rows with a weight [N, K] transposed on sm_90, in Gluon. Bits are those of
`products.dense`.

A persistent program: some warps fetch boxes of x and of the weight by TMA into a ring of STAGES, and eight
warps multiply. For each stage there are two barriers. `full` completes its n-th phase when the boxes of the
n-th use of the stage are there; `empty` completes its n-th phase when the n-th use is over. Use n of a stage
is step i = n * STAGES + stage of the program; so

    who multiplies waits for phase n of full:      parity (i // STAGES) & 1
    who fetches waits for phase n - 1 of empty:    parity ((i // STAGES) & 1) ^ 1, which a new barrier passes

Both go through the same steps i of the same tiles, whatever M, N and K are, so neither waits for a phase that
nobody completes. A matrix instruction goes on reading its stage after it was issued: a stage is given back
when the step behind it was issued and all before that one are done, the last one when all are done. What lies
behind the last row or column TMA reads as zeros, and does not write.

A cluster is OVER_M times OVER_N programs with tiles beside each other. Those with the same columns fetch a
part of the weight's box each, for all of them, by a multicast that tells the `full` of each; those with the
same rows fetch parts of the box of x. So a stage is written by OVER_M + OVER_N - 1 programs, its own among
them, and who has done with it tells all of these: `empty` counts as many arrivals. All have equally many
steps: a tile may lie behind the last row or column. No program begins before the barriers of all are made,
nor ends before all have done with its memory. Gluon 3.6 has no words for it: `spread`, `release_others` and
`meet_others` say it in PTX, with addresses from the beginning of shared memory, where the ring is the first
piece and the largest (bench/gpu/compile_kernels.py checks that).

Two groups of warps share the rows of a tile, or take tiles in TURNS: one writes while the other multiplies. A
wait for a phase passes as well while the phase before it is not over, so a group must not begin while
another has not seen all of its own: `order` has a barrier for each group, whose n-th phase the other
completes when it has issued the last step of its n-th turn (of the turn before, for the first group).

Each part of K is summed from zero in the steps of one matrix instruction (k16), and parts are added from the
first to the last through `out`; the element is read by the thread that wrote it.
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

typed = gl.shared_memory_descriptor._reinterpret  # the same memory as an array of another type


# -- the ring ------------------------------------------------------------------------------------------------
@gluon.jit
def ring(
    x, w, BM: gl.constexpr, WIDE: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, OVER_M: gl.constexpr, OVER_N: gl.constexpr,
):  # fmt: skip
    """Stages of x and of the weight, and barriers `full` and `empty`. Those of a cluster are pieces of one
    piece of memory, the weight's at its beginning; the others begin where `begins` says."""
    CLUSTER: gl.constexpr = OVER_M * OVER_N
    if CLUSTER == 1:
        xs = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
        ws = gl.allocate_shared_memory(w.dtype, [STAGES, WIDE, BK], w.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    else:
        pool = gl.allocate_shared_memory(x.dtype, [STAGES * (BM + WIDE) // 8 + 1, 8, BK], x.layout)
        ws = typed(pool, w.dtype, [STAGES, WIDE, BK], w.layout)
        xs = typed(pool, x.dtype, [STAGES * (BM + WIDE) // BM, BM, BK], x.layout)
        count: gl.constexpr = STAGES * (BM + WIDE) * BK // 4 + 2 * STAGES
        full = typed(pool, gl.int64, [count, 1], mbarrier.MBarrierLayout())
        empty = full
    begin: gl.constexpr = begins(BM, WIDE, BK, STAGES, CLUSTER)
    arrivals: gl.constexpr = (OVER_M + OVER_N - 1) * GROUPS // TURNS  # of who has done with a stage
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(begin[1] + stage), count=1)
        mbarrier.init(empty.index(begin[2] + stage), count=arrivals)
    fence_async_shared(cluster=CLUSTER > 1)
    return xs, ws, full, empty


@gluon.jit
def orders(full, TURNS: gl.constexpr):
    """A barrier for each group of warps that take turns; nothing of use where they do not."""
    if TURNS == 1:
        return full
    else:
        made = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
        for group in gl.static_range(TURNS):
            mbarrier.init(made.index(group), count=1)
        fence_async_shared()
        return made


@gluon.constexpr_function
def begins(bm, wide, bk, stages, cluster):
    """Where x, `full` and `empty` begin, in stages and in barriers of 8 bytes."""
    barriers = 2 * stages * (bm + wide) * bk // 8
    return (0, 0, 0) if cluster == 1 else (stages * wide // bm, barriers, barriers + stages)


@gluon.constexpr_function
def masks(over_m, over_n):
    """The first programs of a cluster with the same columns, and with the same rows, as bits."""
    return (1 << over_m) - 1, sum(1 << over_m * n for n in range(over_n))


# -- clusters ------------------------------------------------------------------------------------------------
@gluon.constexpr_function
def spread_ptx(parameter, thread):
    return f"""{{
    .reg .pred me; .reg .b64 from; .reg .b32 t, base, target, barrier; .reg .b16 to;
    mov.u32 t, %tid.x;
    setp.eq.u32 me, t, {thread};
    mov.b64 from, {parameter};
    cvta.param.u64 from, from;
    cvt.u16.u32 to, $5;
    mov.u32 base, global_smem;
    add.u32 target, base, $3;
    add.u32 barrier, base, $4;
    @me cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [target], [from, {{$2, $1}}], [barrier], to;
    mov.u32 $0, 0;
    }}"""


@gluon.jit
def spread(plane, PARAMETER: gl.constexpr, row, k, target, ready, to, THREAD: gl.constexpr):
    """One thread fetches a box of a plane into the shared memory of some programs of the cluster, to the same
    place, and tells the same barrier of each. target, ready: bytes from the beginning of shared memory; to:
    the programs as bits."""
    gl.inline_asm_elementwise(
        spread_ptx(PARAMETER, THREAD), "=r,r,r,r,r,r", [row, k, target, ready, to], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def release_ptx(thread, over_m, over_n):
    """A thread from 1 on is for one of the programs with the same columns, from over_m on of the same
    rows."""
    return f"""{{
    .reg .pred me, below; .reg .b32 t, rank, m, n, other, beside, barrier;
    mov.u32 t, %tid.x;
    sub.u32 t, t, {thread};
    setp.ne.u32 me, $2, 0;
    setp.lt.and.u32 me, t, {over_m + over_n - 1}, me;
    setp.gt.and.u32 me, t, 0, me;
    mov.u32 rank, %cluster_ctarank;
    and.b32 m, rank, {over_m - 1};
    shr.u32 n, rank, {over_m.bit_length() - 1};
    add.u32 other, m, t;
    and.b32 other, other, {over_m - 1};
    mad.lo.u32 other, n, {over_m}, other;
    add.u32 beside, n, t;
    sub.u32 beside, beside, {over_m - 1};
    and.b32 beside, beside, {over_n - 1};
    mad.lo.u32 beside, beside, {over_m}, m;
    setp.lt.u32 below, t, {over_m};
    selp.b32 other, other, beside, below;
    mov.u32 barrier, global_smem;
    add.u32 barrier, barrier, $1;
    mapa.shared::cluster.u32 barrier, barrier, other;
    @me mbarrier.arrive.shared::cluster.b64 _, [barrier];
    mov.u32 $0, 0;
    }}"""


@gluon.jit
def release_others(
    barrier, steps, THREAD: gl.constexpr, OVER_M: gl.constexpr, OVER_N: gl.constexpr
):  # fmt: skip
    """Arrive at the same barrier of every other program that writes to this one's memory, by a thread for
    each from THREAD on, if there are steps. barrier: bytes from the beginning of shared memory."""
    gl.inline_asm_elementwise(
        release_ptx(THREAD, OVER_M, OVER_N), "=r,r,r", [barrier, steps], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def meet_others():
    """Wait for all warps of the cluster."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def tile_of(
    tile, high, wide, BM: gl.constexpr, BN: gl.constexpr, OVER_M: gl.constexpr, OVER_N: gl.constexpr
):
    """The first row and column of this program's tile: of the tiles of clusters, of which there are high
    times wide, eight over M lie beside each other, as in `products.place`."""
    first = tile // (8 * wide) * 8
    tall = gl.minimum(high - first, 8)
    within = tile % (8 * wide)
    rank = gl.program_id(0) % (OVER_M * OVER_N)
    m = (first + within % tall) * OVER_M + rank % OVER_M
    n = within // tall * OVER_N + rank // OVER_M
    return m * BM, n * BN


# -- the warps that fetch ------------------------------------------------------------------------------------
@gluon.jit
def fetch_box(
    plane, PARAMETER: gl.constexpr, row, k, stage, target, ready, ready_at, part, to, THREAD: gl.constexpr,
    SHARERS: gl.constexpr,
):  # fmt: skip
    """A box into a stage, or a part of it for all programs that share it. target, ready_at: where the stage
    and its barrier are, in bytes; to: the programs as bits."""
    if SHARERS == 1:
        tma.async_copy_global_to_shared(plane, [row, k], ready, stage)
    else:
        rows = part * (stage.shape[0] // SHARERS)
        spread(
            plane,
            PARAMETER,
            row + rows,
            k,
            target + rows * 2 * stage.shape[1],
            ready_at,
            to,
            THREAD,
        )


@gluon.jit
def ask_for(residual, m0, n0, M, N, BM: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr):
    """Rows and columns of the residual will be in the L2 cache when they are added."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [WARPS, 1], [1, 0])
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
    x, w, xs, ws, full, empty, residual, has_residual, M, N, K, KERNEL: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, OVER_M: gl.constexpr, OVER_N: gl.constexpr,
):  # fmt: skip
    """Of gate and up the boxes lie below each other: a tile has columns of both."""
    BM: gl.constexpr = xs.shape[1]
    WIDE: gl.constexpr = ws.shape[1]
    BK: gl.constexpr = xs.shape[2]
    CLUSTER: gl.constexpr = OVER_M * OVER_N
    begin: gl.constexpr = begins(BM, WIDE, BK, STAGES, CLUSTER)
    mask: gl.constexpr = masks(OVER_M, OVER_N)
    X: gl.constexpr = KERNEL + "_param_0"
    W: gl.constexpr = KERNEL + "_param_5"
    THREAD: gl.constexpr = 32 * WARPS
    if CLUSTER > 1:
        meet_others()
    rank = gl.program_id(0) % CLUSTER
    m, n = rank % OVER_M, rank // OVER_M
    same_n, same_m = mask[0] << (n * OVER_M), mask[1] << m
    high, wide = gl.cdiv(M, BM * OVER_M), gl.cdiv(N, BN * OVER_N)
    i = 0
    for tile in range(gl.program_id(0) // CLUSTER, high * wide, gl.num_programs(0) // CLUSTER):
        m0, n0 = tile_of(tile, high, wide, BM, BN, OVER_M, OVER_N)
        for k in range(0, K, BK):
            at = i % STAGES
            mbarrier.wait(empty.index(begin[2] + at), ((i // STAGES) & 1) ^ 1)
            ready, ready_at = full.index(begin[1] + at), 8 * (begin[1] + at)
            mbarrier.expect(ready, 2 * BK * (BM + WIDE))
            stage = xs.index(begin[0] + at)
            to = 2 * BK * (STAGES * WIDE + at * BM)
            fetch_box(x, X, m0, k, stage, to, ready, ready_at, n, same_m, THREAD, OVER_N)
            stage, to = ws.index(at), 2 * BK * at * WIDE
            if BN == WIDE:
                fetch_box(w, W, n0, k, stage, to, ready, ready_at, m, same_n, THREAD, OVER_M)
            else:
                fetch_box(
                    w, W, n0, k, stage.slice(0, BN), to, ready, ready_at, m, same_n, THREAD, OVER_M
                )
                to += 2 * BK * BN
                stage = stage.slice(BN, BN)
                fetch_box(w, W, N + n0, k, stage, to, ready, ready_at, m, same_n, THREAD, OVER_M)
            i += 1
        if has_residual:
            ask_for(residual, m0, n0, M, N, BM, BN, 1 if CLUSTER == 1 else 4)
    if CLUSTER > 1:
        meet_others()


# -- the warps that multiply ---------------------------------------------------------------------------------
@gluon.jit
def release(
    empty, i, steps, EMPTY: gl.constexpr, STAGES: gl.constexpr, THREAD: gl.constexpr, OVER_M: gl.constexpr,
    OVER_N: gl.constexpr,
):  # fmt: skip
    """Give back the stage of the step before i, if there are steps before. All threads meet at the arrival,
    before the others are told."""
    at = EMPTY + (i + STAGES - 1) % STAGES
    mbarrier.arrive(empty.index(at), count=1, pred=steps > 0)
    if OVER_M * OVER_N > 1:
        release_others(8 * at, steps, THREAD, OVER_M, OVER_N)


@gluon.jit
def multiply(
    xs, ws, full, empty, order, i, steps, last, GROUP: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, TURNS: gl.constexpr, OVER_M: gl.constexpr,
    OVER_N: gl.constexpr,
):  # fmt: skip
    """The sum of the next `steps` boxes, of the rows that this group of warps has. last: whether its turn
    ends with them."""
    BM: gl.constexpr = xs.shape[1]
    first: gl.constexpr = GROUP * ROWS % BM
    WIDE: gl.constexpr = ws.shape[1]
    THREAD: gl.constexpr = 32 * WARPS * GROUP
    begin: gl.constexpr = begins(BM, WIDE, xs.shape[2], STAGES, OVER_M * OVER_N)
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, WIDE, 16]
    )
    total = gl.zeros((ROWS, WIDE), gl.float32, layout)
    for step in range(steps):
        at = i % STAGES
        mbarrier.wait(full.index(begin[1] + at), (i // STAGES) & 1)
        rows = xs.index(begin[0] + at).slice(first, ROWS)
        total = warpgroup_mma(rows, ws.index(at).permute((1, 0)), total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))
        release(empty, i, step, begin[2], STAGES, THREAD, OVER_M, OVER_N)
        i += 1
    if TURNS > 1:
        mbarrier.arrive(order.index(1 - GROUP), count=1, pred=last)
    total = warpgroup_mma_wait(0, deps=(total,))
    release(empty, i, steps, begin[2], STAGES, THREAD, OVER_M, OVER_N)
    return total


@gluon.jit
def halves(value, WARPS: gl.constexpr):
    """Its left and its right columns; no element moves."""
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
    """The same value, of which nothing is computed before: the addresses of all pieces of a tile take more
    registers than there are beside its sums."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def store(
    value, out, bias, residual, so_far, has_bias, has_residual, m0, n0, M, N, WARPS: gl.constexpr
):  # fmt: skip
    """out = residual + (value + bias), each step rounded; so_far: with what is there already before all of
    that. In pieces of 32 elements for each thread, which take few registers."""
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
        )  # known as a multiple of 16, so pairs of columns are written at once
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
    xs, ws, full, empty, order, bias, residual, out, has_bias, has_residual, M, N, K, chunk, parts,
    GROUP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, TURNS: gl.constexpr,
    OVER_M: gl.constexpr, OVER_N: gl.constexpr,
):  # fmt: skip
    """Those of `dense`: ROWS of each tile, or every tile of which it is this group's turn."""
    BM: gl.constexpr = xs.shape[1]
    BN: gl.constexpr = ws.shape[1]
    CLUSTER: gl.constexpr = OVER_M * OVER_N
    first: gl.constexpr = GROUP * ROWS % BM
    turn: gl.constexpr = GROUP % TURNS
    if CLUSTER > 1:
        meet_others()
    high, wide = gl.cdiv(M, BM * OVER_M), gl.cdiv(N, BN * OVER_N)
    programs = gl.num_programs(0) // CLUSTER
    i = turn * gl.cdiv(K, xs.shape[2])
    turns = 0
    for tile in range(gl.program_id(0) // CLUSTER + turn * programs, high * wide, TURNS * programs):
        m0, n0 = tile_of(tile, high, wide, BM, BN, OVER_M, OVER_N)
        if TURNS > 1:
            mbarrier.wait(order.index(GROUP), (turns & 1) ^ (1 - GROUP))
            turns += 1
        for part in range(parts):
            steps = gl.cdiv(gl.minimum(chunk, K - part * chunk), xs.shape[2])
            last = part == parts - 1
            value = multiply(
                xs, ws, full, empty, order, i, steps, last, GROUP, ROWS, STAGES, WARPS, TURNS, OVER_M, OVER_N
            )  # fmt: skip
            i += steps
            store(
                value, out, bias, residual, part > 0, has_bias & last, has_residual & last, m0 + first, n0, M,
                N, WARPS,
            )  # fmt: skip
        i += (TURNS - 1) * gl.cdiv(K, xs.shape[2])
    if CLUSTER > 1:
        meet_others()


@gluon.jit
def gated_tiles(
    xs, ws, joined, full, empty, order, out, M, N, K, GROUP: gl.constexpr, ROWS: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, TURNS: gl.constexpr, OVER_M: gl.constexpr,
    OVER_N: gl.constexpr,
):  # fmt: skip
    """Those of `gated_dense`. What they write goes through `joined`, while they go on."""
    BM: gl.constexpr = xs.shape[1]
    BN: gl.constexpr = joined.shape[2]
    CLUSTER: gl.constexpr = OVER_M * OVER_N
    first: gl.constexpr = GROUP * ROWS % BM
    turn: gl.constexpr = GROUP % TURNS
    mine = joined.index(GROUP)
    if CLUSTER > 1:
        meet_others()
    high, wide = gl.cdiv(M, BM * OVER_M), gl.cdiv(N, BN * OVER_N)
    programs = gl.num_programs(0) // CLUSTER
    steps = gl.cdiv(K, xs.shape[2])
    i = turn * steps
    turns = 0
    for tile in range(gl.program_id(0) // CLUSTER + turn * programs, high * wide, TURNS * programs):
        m0, n0 = tile_of(tile, high, wide, BM, BN, OVER_M, OVER_N)
        if TURNS > 1:
            mbarrier.wait(order.index(GROUP), (turns & 1) ^ (1 - GROUP))
            turns += 1
        both = multiply(
            xs, ws, full, empty, order, i, steps, True, GROUP, ROWS, STAGES, WARPS, TURNS, OVER_M, OVER_N
        )  # fmt: skip
        gate, up = halves(both, WARPS)
        i += TURNS * steps
        value = gate / (1.0 + gl.exp(-gate)) * up
        tma.store_wait(0)
        mine.store(value.to(joined.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [m0 + first, n0], mine)
    tma.store_wait(0)
    if CLUSTER > 1:
        meet_others()


# -- the kernels ---------------------------------------------------------------------------------------------
@gluon.jit
def launch_dependents():
    """As `dependent.launch_dependents`, which Gluon cannot call."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait():
    """As `dependent.wait`. The warps that fetch meet those that call this, and so wait as well."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def dense(
    x, w, bias, residual, out, has_bias, has_residual, M, N, K, chunk, parts,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr, OVER_M: gl.constexpr,
    OVER_N: gl.constexpr,
):  # fmt: skip
    """residual + (x w^T + bias) in fp32, of several parts of K too. Grid: any number of clusters."""
    launch_dependents()
    xs, ws, full, empty = ring(
        x, w, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUPS, TURNS, OVER_M, OVER_N
    )
    order = orders(full, TURNS)
    wait()
    ROWS: gl.constexpr = BLOCK_M * TURNS // GROUPS
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (
                    dense_tiles,
                    (xs, ws, full, empty, order, bias, residual, out, has_bias, has_residual, M, N, K, chunk,
                     parts, 0, ROWS, STAGES, WARPS, TURNS, OVER_M, OVER_N),
                ),
                (
                    fetch,
                    (x, w, xs, ws, full, empty, residual, has_residual, M, N, K, "dense", BLOCK_N, STAGES,
                     WARPS * GROUPS, OVER_M, OVER_N),
                ),
            ],
            [1 if OVER_M * OVER_N == 1 else 4], [48],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    dense_tiles,
                    (xs, ws, full, empty, order, bias, residual, out, has_bias, has_residual, M, N, K, chunk,
                     parts, 0, ROWS, STAGES, WARPS, TURNS, OVER_M, OVER_N),
                ),
                (
                    dense_tiles,
                    (xs, ws, full, empty, order, bias, residual, out, has_bias, has_residual, M, N, K, chunk,
                     parts, 1, ROWS, STAGES, WARPS, TURNS, OVER_M, OVER_N),
                ),
                (
                    fetch,
                    (x, w, xs, ws, full, empty, residual, has_residual, M, N, K, "dense", BLOCK_N, STAGES,
                     WARPS * GROUPS, OVER_M, OVER_N),
                ),
            ],
            [4, 1 if OVER_M * OVER_N == 1 else 4], [224, 56],
        )  # fmt: skip


@gluon.jit
def gated_dense(
    x, w, out, M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr,
    OVER_M: gl.constexpr, OVER_N: gl.constexpr,
):  # fmt: skip
    """SiLU(x gate^T) * (x up^T) of a weight [2 N, K], in the type of x. BLOCK_N: outputs of a tile."""
    launch_dependents()
    xs, ws, full, empty = ring(
        x, w, BLOCK_M, 2 * BLOCK_N, BLOCK_K, STAGES, GROUPS, TURNS, OVER_M, OVER_N
    )
    joined = gl.allocate_shared_memory(
        out.dtype, [GROUPS, BLOCK_M * TURNS // GROUPS, BLOCK_N], out.layout
    )
    order = orders(full, TURNS)
    wait()
    ROWS: gl.constexpr = BLOCK_M * TURNS // GROUPS
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (
                    gated_tiles,
                    (xs, ws, joined, full, empty, order, out, M, N, K,
                     0, ROWS, STAGES, WARPS, TURNS, OVER_M, OVER_N),
                ),
                (
                    fetch,
                    (x, w, xs, ws, full, empty, None, 0, M, N, K, "gated_dense", BLOCK_N, STAGES,
                     WARPS * GROUPS, OVER_M, OVER_N),
                ),
            ],
            [1 if OVER_M * OVER_N == 1 else 4], [48],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    gated_tiles,
                    (xs, ws, joined, full, empty, order, out, M, N, K,
                     0, ROWS, STAGES, WARPS, TURNS, OVER_M, OVER_N),
                ),
                (
                    gated_tiles,
                    (xs, ws, joined, full, empty, order, out, M, N, K,
                     1, ROWS, STAGES, WARPS, TURNS, OVER_M, OVER_N),
                ),
                (
                    fetch,
                    (x, w, xs, ws, full, empty, None, 0, M, N, K, "gated_dense", BLOCK_N, STAGES,
                     WARPS * GROUPS, OVER_M, OVER_N),
                ),
            ],
            [4, 1 if OVER_M * OVER_N == 1 else 4], [224, 56],
        )  # fmt: skip
