"""Sums and gathers over devices: ranks write into memory of each other, and flags say what was
written.

Each rank has a region that all others have opened. It begins with flags, one for each phase, rank
and program of a launch; each program also has a counter of its launches, and two areas of its own,
used in turn. A program only meets the programs of the same number at the other ranks. Flags hold
the counter, so that a recording can be replayed. A rank that raised the flag of launch t has read
everything of launch t - 1, and nobody passes launch t without the flags of all others: an area is
written again in launch t + 2, and all have read it by then. Counters may wrap.

These kernels may begin beside the one in front of them, but the next one begins when they have
ended: while a rank waits for another, its programs would take places from those that the other one
needs.

A rank that waits in vain, or whose host sets `stop`, notes it, raises no flag any more and waits
for nothing.
"""

import triton
import triton.language as tl

from pageturner.kernels.gpu.source.dependent import wait


@triton.jit
def floats(address):
    """Memory of fp32 at an address that is a multiple of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def area_of(area, epoch, PROGRAMS: tl.constexpr, SOURCES: tl.constexpr):
    """Bytes from the beginning of each region to this program's area of this launch."""
    HEAD: tl.constexpr = 4 * (2 * SOURCES * PROGRAMS + PROGRAMS + 64)
    turn = 2 * tl.program_id(0).to(tl.int64) + (epoch & 1)
    return HEAD + 4 * area * turn


@triton.jit
def enter(own, PROGRAMS: tl.constexpr, SOURCES: tl.constexpr):
    """The number of this launch for this program, and whether nothing went wrong so far."""
    words = own.to(tl.pointer_type(tl.int32)) + 2 * SOURCES * PROGRAMS
    epoch = tl.load(words + tl.program_id(0)) + 1
    well = tl.load(words + PROGRAMS, volatile=True) == 0
    tl.debug_barrier()  # before one thread of the program overwrites what others read
    tl.store(words + tl.program_id(0), epoch)
    return epoch, well


@triton.jit
def meet(
    peers, own, stop, rank, size, patience, epoch, well, PHASE: tl.constexpr, PROGRAMS: tl.constexpr,
    SOURCES: tl.constexpr,
):  # fmt: skip
    """Say to all other ranks that what this program wrote is there, and wait until theirs is. Gives
    whether all came."""
    at = PHASE * SOURCES * PROGRAMS + tl.program_id(0)
    source = tl.arange(0, SOURCES)
    others = (source < size) & (source != rank)
    tl.debug_barrier()  # all threads have written
    theirs = tl.load(peers + source, mask=source < size, other=0).to(tl.pointer_type(tl.int32))
    raised = tl.zeros((SOURCES,), tl.int32) + epoch
    tl.atomic_xchg(
        theirs + at + rank * PROGRAMS, raised, mask=others & well, sem="release", scope="sys"
    )
    flags = own.to(tl.pointer_type(tl.int32)) + at + source * PROGRAMS
    left = tl.where(well, patience, 0)
    seen = tl.load(flags, mask=others, other=0, volatile=True)
    behind = tl.max(tl.where(others, epoch - seen, 0), axis=0)
    while (behind > 0) & (left > 0):
        left -= 1
        if left % 1024 == 0:
            left = tl.where(tl.load(stop, volatile=True) == 0, left, 0)
        seen = tl.load(flags, mask=others, other=0, volatile=True)
        behind = tl.max(tl.where(others, epoch - seen, 0), axis=0)
    tl.atomic_add(flags, raised * 0, mask=others, sem="acquire", scope="sys")
    tl.debug_barrier()  # one thread has seen the flags for all of them
    if behind > 0:
        tl.store(own.to(tl.pointer_type(tl.int32)) + 2 * SOURCES * PROGRAMS + PROGRAMS, 1)
        tl.store(stop, 1)
    return well & (behind <= 0)


@triton.jit
def copied(source, target, n, BLOCK: tl.constexpr):
    for k0 in range(0, n, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        tl.store(target + k, tl.load(source + k, mask=k < n, other=0.0), mask=k < n)


@triton.jit
def summed(mine, theirs, apart, rank, size, k, inside):
    """Elements of all ranks, from rank 0 to the last: this rank's own at `mine`, those of rank r at
    theirs + r * apart."""
    first = tl.where(rank == 0, mine, theirs)
    total = tl.load(floats(first) + k, mask=inside, other=0.0, cache_modifier=".cg")
    for r in range(1, size):
        here = tl.where(r == rank, mine, theirs + 4 * apart * r)
        total += tl.load(floats(here) + k, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def stored(total, residual, out, has_residual, at, inside):
    if has_residual:
        total = tl.load(residual + at, mask=inside, other=0.0) + total
    tl.store(out + at, total, mask=inside)


@triton.jit
def all_reduce(
    partial, residual, out, peers, stop, has_residual, rank, size, count, room, area, patience,
    PROGRAMS: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = residual + ((rank 0's partial + rank 1's) + ...), in one exchange: every rank gets all
    partials. Of P programs program i has the blocks i, i + P, i + 2 P ...; where a block lies does
    not depend on how many there are. peers: addresses of the regions; room: elements for each rank
    in an area. Grid: P."""
    wait()
    own = tl.load(peers + rank)
    epoch, well = enter(own, PROGRAMS, SOURCES)
    here = area_of(area, epoch, PROGRAMS, SOURCES)
    k = tl.arange(0, BLOCK)
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for away in range(1, size):
        to = floats(tl.load(peers + (rank + away) % size) + here + 4 * room * rank) + k
        for at in range(first, count, step):
            inside = at + k < count
            tl.store(to, tl.load(partial + at + k, mask=inside, other=0.0), mask=inside)
            to += BLOCK
    meet(peers, own, stop, rank, size, patience, epoch, well, 0, PROGRAMS, SOURCES)
    theirs = own + here
    for at in range(first, count, step):
        inside = at + k < count
        total = summed((partial + at).to(tl.int64), theirs, room, rank, size, k, inside)
        stored(total, residual, out, has_residual, at + k, inside)
        theirs += 4 * BLOCK


@triton.jit
def all_reduce_twice(
    partial, residual, out, peers, stop, has_residual, rank, size, count, room, area, patience,
    PROGRAMS: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same bits in two exchanges, in which each rank gets and sends less: of a program's blocks
    rank r sums r, r + size, r + 2 * size ... and sends the sums to all. Grid: programs."""
    wait()
    own = tl.load(peers + rank)
    epoch, well = enter(own, PROGRAMS, SOURCES)
    here = area_of(area, epoch, PROGRAMS, SOURCES)
    sums = here + 4 * room * size  # behind what was sent
    k = tl.arange(0, BLOCK)
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for away in range(1, size):
        peer = (rank + away) % size
        to = floats(tl.load(peers + peer) + here + 4 * room * rank) + k
        for at in range(first + peer * step, count, size * step):
            inside = at + k < count
            tl.store(to, tl.load(partial + at + k, mask=inside, other=0.0), mask=inside)
            to += BLOCK
    well = meet(peers, own, stop, rank, size, patience, epoch, well, 0, PROGRAMS, SOURCES)
    theirs, total = own + here, own + sums + 4 * BLOCK * rank
    for at in range(first + rank * step, count, size * step):
        inside = at + k < count
        value = summed((partial + at).to(tl.int64), theirs, room, rank, size, k, inside)
        tl.store(floats(total) + k, value, mask=inside)
        theirs += 4 * BLOCK
        total += 4 * BLOCK * size
    tl.debug_barrier()  # another thread of the program may read it next
    for away in range(1, size):
        to = tl.load(peers + (rank + away) % size)
        begin = sums + 4 * BLOCK * rank
        for at in range(first + rank * step, count, size * step):
            copied(floats(own + begin), floats(to + begin), tl.minimum(BLOCK, count - at), BLOCK)
            begin += 4 * BLOCK * size
    meet(peers, own, stop, rank, size, patience, epoch, well, 1, PROGRAMS, SOURCES)
    total = own + sums
    for at in range(first, count, step):
        inside = at + k < count
        value = tl.load(floats(total) + k, mask=inside, other=0.0, cache_modifier=".cg")
        stored(value, residual, out, has_residual, at + k, inside)
        total += 4 * BLOCK


@triton.jit
def gather(
    mine, out, starts, peers, stop, rank, size, rows, chunk, area, patience,
    PROGRAMS: tl.constexpr, SOURCES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rank 0 gets the columns of all ranks side by side: those of rank r, of rows [rows, columns]
    that it has in `mine`, go to columns starts[r] .. starts[r + 1] - 1 of `out`. Grid: programs."""
    wait()
    own = tl.load(peers + rank)
    epoch, well = enter(own, PROGRAMS, SOURCES)
    first = tl.program_id(0) * chunk
    here = area_of(area, epoch, PROGRAMS, SOURCES)
    if rank > 0:
        n = rows * (tl.load(starts + rank + 1) - tl.load(starts + rank))
        to = tl.load(peers) + here + 4 * chunk * rank
        copied(mine + first, floats(to), tl.minimum(chunk, n - first), BLOCK)
    meet(peers, own, stop, rank, size, patience, epoch, well, 0, PROGRAMS, SOURCES)
    if rank == 0:
        whole = tl.load(starts + size).to(tl.int64)
        for r in range(0, size):
            begin = tl.load(starts + r)
            columns = tl.load(starts + r + 1) - begin
            source = floats(
                tl.where(r == 0, (mine + first).to(tl.int64), own + here + 4 * chunk * r)
            )
            n = tl.minimum(chunk, rows * columns - first)
            for k0 in range(0, n, BLOCK):
                k = k0 + tl.arange(0, BLOCK)
                value = tl.load(source + k, mask=k < n, other=0.0, cache_modifier=".cg")
                row, column = (first + k) // columns, (first + k) % columns
                tl.store(out + row * whole + begin + column, value, mask=k < n)
