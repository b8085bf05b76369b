"""Programmatic dependent launch: a kernel may begin while the one in front of it still runs.

A kernel that is launched so must call `wait` in all threads before it reads what an earlier kernel
wrote, and before it writes anything: the one in front may still read it. `compile_kernels.py`
refuses a kernel that does either too early. What nobody writes, the weights, may be asked for
before. Devices before sm_90, and the interpreter, know nothing of this: there these calls do
nothing.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

LINE = tl.constexpr(64)  # bytes of a request


@triton.jit
def launch_dependents():
    """The next kernel may begin as soon as every program of this one has called this or ended. It
    takes no multiprocessor from programs of this one, all of which have begun by then, so it is
    called first."""
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()


@triton.jit
def wait():
    """Wait until the kernels in front have ended and what they wrote can be read. As each of them
    waits too, all that came before them have ended."""
    if cuda_capability_geq(9, 0):
        gdc_wait()


@triton.jit
def start_dependent():
    """Begin a kernel that has nothing to do before it waits."""
    launch_dependents()
    wait()


@triton.jit
def prefetch(w, rows, K, first, end, BYTES: tl.constexpr):
    """Ask for the beginning of some rows of a weight [N, K], from column `first` on and before
    `end`, some BYTES in all, by requests of LINE bytes: they come into the L2 cache while the
    kernel in front ends. K, first and end are multiples of 16."""
    if cuda_capability_geq(9, 0) and BYTES > 0:
        COUNT: tl.constexpr = rows.shape[0]
        WIDTH: tl.constexpr = w.dtype.element_ty.primitive_bitwidth // 8
        PIECES: tl.constexpr = BYTES // (COUNT * LINE)
        PIECE: tl.constexpr = BYTES // (COUNT * PIECES * WIDTH)
        columns = first + tl.arange(0, PIECES) * PIECE
        addresses = w + rows[:, None].to(tl.int64) * K + columns[None, :]
        sizes = tl.minimum(tl.maximum(end - columns, 0), PIECE) * WIDTH
        sizes = tl.broadcast_to(sizes[None, :], addresses.shape)
        tl.inline_asm_elementwise(
            "{ .reg .pred some; setp.gt.s32 some, $2, 0; @some prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r", [addresses, sizes], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_vector(v, d, MAX: tl.constexpr):
    """Ask for the first MAX of the d elements of a vector in fp32."""
    if cuda_capability_geq(9, 0):
        k = tl.arange(0, MAX // 16) * 16
        tl.inline_asm_elementwise(
            "{ .reg .pred some; setp.ne.s32 some, $2, 0; @some prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r", [v + k, (k < d).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
