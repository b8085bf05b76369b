"""The kernels of the GPU backend: the variants that are compiled for each architecture, and what
each takes.

Owns names, types of arguments and tile sizes. Plain data, read without Triton and without a device.
Must not know how a kernel is compiled or launched. Tile sizes over K and over positions are the
same for every number of rows, and products of different heights use one matrix instruction (`make
gpu-kernels` checks them). Attention of few rows uses the instruction of 16 rows everywhere; its
bits were those of the taller instruction where it has run (sm_90).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# Architectures whose matrix instruction has 64 rows: a tile of few rows is as tall there, for the
# same bits
WGMMA_ARCHS = (90, 100)
# Bytes of shared memory that a block may have when it asks for it:
# max_shared_memory_per_block_optin in cuda/__device/arch_traits.h of NVIDIA's libcudacxx, which is
# what a multiprocessor has (164, 100, 228 KB) less the 1 KB of a block that the system keeps
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
SMALL_SHARED = 101376
PORTABLE = 80  # its PTX runs on every later device
SEGMENT = 256  # positions of one softmax partial, as everywhere
GROUP_ROWS = 1024  # elements of a tile of a kernel that works element by element
NORM_ROWS = 4096  # elements of a row that are normed at once
# Sampling: logits that are read at once; segments of a row at most; places of a distance; tokens
# among which the last one is looked for that stays
VOCABULARY_TILE, VOCABULARY_SEGMENTS = 1024, 32
SAMPLE_PLACES, SAMPLE_MOST = 64, 8192


class Height(StrEnum):
    """The part of a kernel's name that says which products it is for: `m64` is for up to 64 rows,
    `_wide` for weights of more than WIDE outputs. Attention and experts only distinguish few rows
    and many."""

    M8 = "m8"
    M16 = "m16"
    M64 = "m64"
    M64_WIDE = "m64_wide"
    M256 = "m256"
    M256_WIDE = "m256_wide"
    FEW = "few"
    MANY = "many"


M8, M16, M64, M64_WIDE, M256, M256_WIDE, FEW, MANY = Height
STEP = 16  # columns of a weight are a multiple of it: kernels read so many at once
MAX_SPLIT_TILES = 2048  # tiles of a product whose parts of K are computed in parallel
WHOLE_TILES = 256  # so many tiles of a weight in groups fill a device without parallel parts of K
# Products of adapters: rows of a tile, ranks of a block, outputs of a tile, most parts of K
LORA_ROWS, LORA_RANKS, LORA_OUTPUTS, LORA_PARTS = 16, 16, 128, 8

# Sums over ranks: programs of a launch at most, ranks at most, elements that a program moves at
# once, and elements of an area of a program: two for each of 128 programs are 134 MB
EXCHANGE_PROGRAMS, EXCHANGE_RANKS, EXCHANGE_BLOCK, EXCHANGE_AREA = 128, 16, 1024, 1 << 17
# Up to so many bytes, divided by the number of ranks, a sum over more than two ranks takes one
# exchange: at 4 and 8 ranks that is where vLLM's own all-reduce goes over to two (512 and 256 KB).
# With two ranks both ways move as much, and a sum always takes one exchange
ONE_EXCHANGE = 2 << 20

FLOATS = ("bf16", "fp16", "fp32")  # types that products are computed in
KV_KINDS = {  # KV type -> (type in memory, type that products are computed in)
    "float16": ("fp16", "fp16"),
    "bfloat16": ("bf16", "bf16"),
    "float32": ("fp32", "fp32"),
    "int8": ("i8", "fp16"),
    "fp8_e4m3": ("u8", "fp16"),
}
MIXED = ("fp32", "bf16")  # types of the output of attention: fp32, or the type of the next product
HEAD_SIZES = (64, 128, 256)  # a head is padded to the next of these sizes
LATENT_KINDS = ("float16", "bfloat16", "int8", "fp8_e4m3")  # KV types of a latent KV
LATENT, LATENT_ROTARY = 512, 64  # a latent, and the rotary key behind it, are padded to these sizes
GATED = ("bf16", "fp16")  # weights of gate and up that are multiplied and joined in one kernel
# Weights in groups: bits, columns of a group (0: a whole row, in fp8), type of scales
GROUPED = {
    "8.16": (8, 16, "fp32"),
    "8.32": (8, 32, "fp32"),
    "4.32": (4, 32, "fp32"),
    "4.32.fp16": (4, 32, "fp16"),
    "4.128": (4, 128, "fp32"),
    "5.32": (5, 32, "fp32"),
    "fp8": (8, 0, "fp32"),
}
# As GATED, for many rows: with fewer rows half as many programs would run, and wait for each other
# longer
GATED_GROUPS = ("4.32.fp16", "4.128", "fp8")
SUMS_SPAN = 256  # columns of a tile of `group_sums`
FEW_ROWS = 16  # of x that `in_order` puts in the order of the matrix unit
GROUPS_K = 128  # parts of K of a product with weights in groups are multiples of it
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
ROUTED = (512, 4096)  # outputs of a router: lanes of the kernels that choose among them

Arguments = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled variant.

    arguments   (name, type) in the order of the function; "bf16[128,64]" is a matrix of which boxes
                of so many rows and columns are copied
    constants   its constexprs; "dtype:x" stands for a type
    aligned     arguments that are multiples of 16
    """

    name: str
    function: str
    arguments: Arguments
    constants: dict[str, Any]
    warps: int
    stages: int
    aligned: tuple[str, ...]


def _kernel(
    name: str, function: str, arguments: str, warps: int = 4, stages: int = 2, **constants: Any
) -> Kernel:
    """Return a kernel whose arguments are written "x:*bf16 M:i32": i32 where there is no type. An
    integer that ends in "!" is a multiple of 16, and so is every pointer that does not end in
    "?"."""
    pairs = [
        (key, kind or "i32") for key, _, kind in (one.partition(":") for one in arguments.split())
    ]
    aligned = [key for key, kind in pairs if key[-1] == "!" or (kind[0] == "*" and kind[-1] != "?")]
    plain = tuple((key.rstrip("!"), kind.rstrip("?")) for key, kind in pairs)
    return Kernel(
        name, function, plain, constants, warps, stages, tuple(key.rstrip("!") for key in aligned)
    )


class Tile(NamedTuple):
    """The tile of a dense product: its sides, and the warps and stages of a program. With `swap`
    the weight is the first operand of the matrix instruction, and a tile may have fewer rows than
    the instruction."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    swap: bool = False

    @property
    def blocks(self) -> dict[str, Any]:
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k}


WIDE = 8192  # from so many outputs on there are enough tiles of 64 of them for every multiprocessor


def tiles_of(architecture: int, kind: str) -> dict[Height, Tile]:
    """Return the tiles of dense products by height. No order of sums depends on them. On sm_90 they
    are the fastest that were measured; there the weight is the first operand where rows are few,
    which had the same bits on a device."""
    if kind == "fp32":
        few, many = Tile(16, 64, 32, 4, 4), Tile(64, 64, 32, 4, 3)
        return {M64: few, M64_WIDE: few, M256: many, M256_WIDE: many, MANY: many}
    if architecture not in WGMMA_ARCHS:
        many = Tile(128, 128, 64, 8, 3)
        narrow = {M64: Tile(16, 32, 128, 4, 4), M64_WIDE: Tile(16, 64, 64, 4, 4)}
        return {**narrow, M256: Tile(64, 64, 64, 4, 4), M256_WIDE: many, MANY: many}
    low = {M64: Tile(64, 32, 128, 4, 5), M64_WIDE: Tile(64, 64, 64, 4, 3)}
    if architecture == 90:
        low = {
            M16: Tile(16, 64, 128, 4, 6, True),
            M64: Tile(32, 64, 128, 4, 6, True),
            M64_WIDE: Tile(64, 64, 64, 4, 6, True),
        }
    high = {M256: Tile(64, 128, 64, 4, 4), M256_WIDE: Tile(128, 128, 64, 8, 4)}
    return {**low, **high, MANY: Tile(128, 256, 64, 8, 3)}


def gated_tile(tiles: dict[Height, Tile], height: Height) -> Tile:
    """Return the tile of gate and up; a swapped one has its outputs twice."""
    return Tile(16, 64, 64, 4, 8, True) if height == M16 else tiles[height]


def height_of(rows: int, outputs: int, has_m16: bool = False) -> Height:
    """Return the height of `tiles_of` that a product of so many rows and outputs takes; MANY where
    outputs are no multiple of 16, for which no other is compiled. has_m16: whether there is a tile
    of M16."""
    if outputs % 16:
        return MANY
    if has_m16 and rows <= 16:
        return M16
    if rows <= 64:
        return M64 if outputs <= WIDE else M64_WIDE
    if rows > 256 and -(-rows // 128) * -(-outputs // 256) >= 96:
        return MANY
    return M256 if rows <= 256 and outputs <= WIDE else M256_WIDE


def gated_height(height: Height) -> Height:
    """Return the height that the product of gate and up takes instead."""
    return {M64: M64_WIDE, M256: M256_WIDE}.get(height, height)


class Ring(NamedTuple):
    """The ring of a persistent product: the sides of a tile, and stages."""

    m: int
    n: int
    k: int
    stages: int

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}"


# Rings of persistent products on sm_90, and the cost of an element of a tile as `tune.py
# persistent` measured it on an H200: smaller tiles need more bytes for each product
PERSISTENT = {Ring(128, 256, 64, 4): 1.0, Ring(128, 128, 64, 6): 1.02, Ring(128, 64, 64, 8): 1.34}
PERSISTENT_KINDS = ("bf16", "fp16")
MULTIPROCESSORS = (
    132  # of an H100: they decide which ring is taken, on which no order of sums depends
)


def persistent_ring(architecture: int, kind: str, rows: int, outputs: int) -> Ring | None:
    """Return the ring with which a persistent product of so many rows and outputs ends first. None
    where `dense` computes it: few rows, other types and architectures, and outputs of which not
    every row begins at a multiple of 16 bytes. A tile of gate and up has half of its columns of
    each."""
    if architecture != 90 or kind not in PERSISTENT_KINDS or rows <= 64 or outputs % STEP:
        return None

    def cost(ring: Ring) -> float:
        waves = -(-(-(-rows // ring.m) * -(-outputs // ring.n)) // MULTIPROCESSORS)
        return waves * ring.m * ring.n * PERSISTENT[ring]

    return min(PERSISTENT, key=cost)


def groups_tile(architecture: int, height: Height, form: str) -> Tile:
    """Return the tile of weights in groups, which are the first operand. Up to 16 rows take the
    matrix instruction of one warp, which is not waited for; on sm_90 its bits are those of the
    taller instruction, and the tiles are the fastest of `bench/gpu/tune.py groups`. On sm_100 all
    rows take it: Triton 3.6 cannot lay these operands out for the taller instruction there."""
    group = GROUPED[form][1]
    if height == M8:
        return Tile(8, 16, 128, 1, 2)
    if height == M16:
        return Tile(FEW_ROWS, 16, 128, 1, 2 if form in GATED_GROUPS else 1)
    if height == FEW and architecture == 90:
        return Tile(16, 32 if group else 64, 128, 1 if group == 128 else 2, 4)
    if height == FEW:
        return Tile(16, 32, 128, 2, 4)
    if architecture == 100:
        return Tile(64, 32, 128, 2, 3)
    rows = 32 if group == 16 else 64  # rows with scales of many groups have no registers for more
    if architecture == 90:
        return Tile(rows, 64, 128, 4, 3)
    return Tile(rows, 128, 128, 8, 2 if SHARED[architecture] <= SMALL_SHARED else 3)


def block_k(kind: str) -> int:
    """Return the number that parts of K of a dense product are multiples of."""
    return 32 if kind == "fp32" else 128


# Bytes of its weight that a program asks for before the kernel in front has ended: on an H200 none,
# 32 and 64 KB were slower
AHEAD = 1 << 14

# Bytes of the matrices of a layer up to which its kernels begin beside the one in front. On an H200
# that made steps of 30 MB a layer 1.02 to 1.13 times as fast, and steps of 436 MB a layer 0.95 to
# 1.02 times
DEPENDENT_BYTES = 128 << 20

_OUT, _PARTS = "bias:*fp32 residual:*fp32 out:*fp32", "partial:*fp32 counters:*i32"


def dense(name: str, kind: str, height: Height, tile: Tile) -> Kernel:
    """Return a product of floats with this tile."""
    outputs = "N" if height == MANY else "N!"  # MANY takes whatever N there is
    text = f"x:*{kind} w:*{kind} {_OUT} {_PARTS} has_bias has_residual M {outputs} K! chunk! parts"
    return _kernel(
        name, "products.dense", text, tile.warps, tile.stages,
        WHOLE=height == MANY, SWAP=tile.swap, AHEAD=AHEAD, **tile.blocks,
    )  # fmt: skip


def gated_outputs(tile: Tile) -> int:
    """Return the outputs of gate, and as many of up, of a tile: together what a tile has, or more
    where weights are the first operand, which has at least 64 rows."""
    return tile.n if tile.swap else tile.n // 2


def gated_dense(name: str, kind: str, height: Height, tile: Tile) -> Kernel:
    """Return a product of gate and up with this tile: half of its outputs are of gate, the others
    of up."""
    blocks = {**tile.blocks, "BLOCK_N": gated_outputs(tile)}
    return _kernel(
        name, "products.gated_dense", f"x:*{kind} w:*{kind} out:*{kind} M N! K!", tile.warps, tile.stages,
        WHOLE=height == MANY, SWAP=tile.swap, AHEAD=AHEAD, **blocks,
    )  # fmt: skip


def groups(form: str, height: Height, tile: Tile, gated: bool = False) -> Kernel:
    """Return a product of weights in groups with this tile; gated: of gate and up."""
    bits, group, scales = GROUPED[form]
    text = f"x:*bf16 q:*i32 high:*i32 scale:*{scales} low:*{scales} sums:*fp32"
    constants = {"BITS": bits, "GROUP": group, "AHEAD": tile.n << 9, **tile.blocks}
    if gated:
        function, text = "gated_groups", f"{text} out:*bf16 has_low zero M N! K!"
    else:
        function = "groups"
        text += f" {_OUT} {_PARTS} has_low zero has_bias has_residual M N K! chunk! parts"
    name = f"{function}.{form}.{height}"
    if height == MANY:
        constants["STAGES"] = tile.stages
    else:
        del constants["BLOCK_K"]
        function = "few_groups"
        constants |= {"ORDERED": height == M16, "DEPTH": tile.stages}
        text = text.replace("*bf16", "*i32")
    return _kernel(
        name,
        f"groups.{function}",
        text,
        tile.warps,
        tile.stages,
        **constants,
    )


PERSISTENT_WARPS = 8  # that multiply, beside the one that fetches


def persistent(name: str, kind: str, ring: Ring, gated: bool = False) -> Kernel:
    """Return a persistent product with this ring. A tile of a gated one has half of its columns of
    gate, the others of up."""
    outputs = ring.n // 2 if gated else ring.n
    text = f"x:{kind}[{ring.m},{ring.k}] w:{kind}[{outputs},{ring.k}]"
    if gated:
        function, text = "gated_dense", f"{text} out:{kind}[{ring.m},{outputs}] M N! K!"
    else:
        function, text = "dense", f"{text} {_OUT} has_bias has_residual M N! K! chunk! parts"
    return _kernel(
        name, f"persistent.{function}", text, PERSISTENT_WARPS, ring.stages,
        BLOCK_M=ring.m, BLOCK_N=outputs, BLOCK_K=ring.k, STAGES=ring.stages, WARPS=PERSISTENT_WARPS,
    )  # fmt: skip


def _products(architecture: int) -> list[Kernel]:
    found = []
    for kind in FLOATS:
        tiles = tiles_of(architecture, kind)
        for height, tile in tiles.items():
            found.append(dense(f"dense.{kind}.{height}", kind, height, tile))
            if kind in GATED and gated_height(height) == height:
                joined = gated_tile(tiles, height)
                found.append(gated_dense(f"gated_dense.{kind}.{height}", kind, height, joined))
    for form in GROUPED:
        found += [
            groups(form, height, groups_tile(architecture, height, form))
            for height in (M8, M16, MANY)
        ]
        if form in GATED_GROUPS:
            found.append(groups(form, MANY, groups_tile(architecture, MANY, form), gated=True))
    for group in sorted({group for _, group, _ in GROUPED.values() if group}):
        text, sides = "x:*bf16 sums:*fp32 M K!", {"BLOCK_M": 16, "SPAN": SUMS_SPAN}
        found.append(
            _kernel(f"group_sums.{group}", "groups.group_sums", text, 1, GROUP=group, **sides)
        )
    text = "x:*i32 out:*i32 M K!"
    found.append(_kernel("in_order", "groups.in_order", text, BLOCK_M=FEW_ROWS))
    if architecture == 90:
        for kind in PERSISTENT_KINDS:
            for ring in PERSISTENT:
                name = f"persistent.{kind}.{ring.name}"
                found.append(persistent(name, kind, ring))
                found.append(persistent(f"gated_{name}", kind, ring, gated=True))
    return found


def _rows() -> list[Kernel]:
    found, block = [], GROUP_ROWS
    for out in FLOATS:
        text = f"table:*{out} tokens:*i32 chosen:*i32 out:*fp32 first rows K"
        found.append(_kernel(f"embed.{out}", "rows.embed", text, BLOCK=block))
        text = f"x:*fp32 weight:*fp32 out:*{out} eps:fp32 d! heads stride!"
        found.append(_kernel(f"rms_norm.{out}", "rows.rms_norm", text, 8, BLOCK=NORM_ROWS))
        text = text.replace("!", "")
        found.append(_kernel(f"head_norm.{out}", "rows.rms_norm", text, 1, BLOCK=HEAD_SIZES[-1]))
        text = f"x:*fp32 weight:*fp32 bias:*fp32 out:*{out} eps:fp32 d"
        found.append(_kernel(f"layer_norm.{out}", "rows.layer_norm", text, BLOCK=block))
        for act in (*ACTIVATIONS, "clamped_swiglu"):
            name, text = f"gated.{act}.{out}", f"x:*fp32 out:*{out} d"
            found.append(_kernel(name, "rows.gated", text, ACT=act, BLOCK=block))
    for form, (bits, group, scales) in GROUPED.items():
        text = (
            f"q:*i32 high:*u8 scale:*{scales} low:*{scales} tokens:*i32 chosen:*i32 out:*fp32 has_low zero"
            " first rows K"
        )
        name = f"embed_groups.{form}"
        found.append(_kernel(name, "rows.embed_groups", text, BITS=bits, GROUP=group, BLOCK=block))
    every = [(op, out) for op in ("cast", "act_mul") for out in FLOATS]
    every += [
        (op, "fp32") for op in ("add", "mul", "clamped_swiglu", "scale", "soft_cap", *ACTIVATIONS)
    ]
    for op, out in every:
        text = f"x:*fp32 y:*fp32 out:*{out} factor:fp32 count"
        found.append(
            _kernel(f"elementwise.{op}.{out}", "rows.elementwise", text, OP=op, BLOCK=block)
        )
    text = "x:*fp32 rows:*i32 factors:*fp32 out:*fp32 d scaled"
    found.append(_kernel("take_rows", "rows.take_rows", text, BLOCK=block))
    text = "x:*bf16 order:*i32 out:*bf16 d"
    return [*found, _kernel("take_columns", "rows.take_columns", text, BLOCK=block)]


def _heads() -> list[Kernel]:
    """Return the kernels that prepare heads of rows and write them to the KV."""
    found, head = [], HEAD_SIZES[-1]
    text = "x:*fp32 cos:*fp32 sin:*fp32 positions:*i32 out:*fp32 stride heads dim half interleaved"
    found.append(_kernel("rotate", "rows.rotate", text, 1, BLOCK=head))
    for kind, (stored, _) in KV_KINDS.items():
        kv = (
            f"keys:*{stored} values:*{stored} k_scales:*fp32 v_scales:*fp32 slots:*i32 cos:*fp32 sin:*fp32"
            " positions:*i32"
        )
        text = f"k_rows:*fp32 v_rows:*fp32 {kv} k_stride v_stride heads dim room half interleaved"
        found.append(_kernel(f"kv_write.{kind}", "rows.kv_write", text, 1, KIND=kind, BLOCK=head))
        text = (
            f"rows:*fp32 q:*fp32 q_norm:*fp32 k_norm:*fp32 {kv} has_norm eps:fp32 stride heads kv_heads dim"
            " room half interleaved"
        )
        for size in HEAD_SIZES[: -1 if kind == "float32" else None]:  # as `_attention`
            name = f"qk_norm_rope_kv_write.{kind}.{size}"
            found.append(
                _kernel(name, "rows.qk_norm_rope_kv_write", text, 1, KIND=kind, BLOCK=size)
            )
    for kind in MIXED:
        text = f"x:*{kind} out:*{kind} stride heads dim room"
        found.append(_kernel(f"fit_heads.{kind}", "rows.fit_heads", text, 1, BLOCK=head))
    for kind in LATENT_KINDS:
        for compute in FLOATS:
            text = (
                f"rows:*fp32 plain:*{compute} q:*fp32 norm:*fp32 keys:*{KV_KINDS[kind][0]} k_scales:*fp32"
                " slots:*i32 cos:*fp32 sin:*fp32 positions:*i32 has_norm eps:fp32 stride heads plain_dim rank"
                " rotary dim half interleaved"
            )
            name = f"latent_kv_write.{kind}.{compute}"
            found.append(_kernel(name, "rows.latent_kv_write", text, KIND=kind, BLOCK=2 * LATENT))
    text = "x:*fp32 y:*fp32 out:*fp32 first second"
    return [*found, _kernel("join_heads", "rows.join_heads", text, BLOCK=GROUP_ROWS)]


def attention_size(head_dim: int, latent: int) -> int:
    """Return the size that heads of V are padded to: one of HEAD_SIZES, or LATENT."""
    return LATENT if latent else next(size for size in HEAD_SIZES if size >= head_dim)


def largest_head(dtype: str, latent: bool) -> int:
    """Return the elements of the largest head that attention computes over a KV of this type; 0:
    none."""
    if latent:
        return LATENT + LATENT_ROTARY if dtype in LATENT_KINDS else 0
    return HEAD_SIZES[-2] if dtype == "float32" else HEAD_SIZES[-1]


def attention_rows(height: Height, size: int) -> int:
    """Return rows times query heads of a tile, by the size that heads are padded to: more rows of a
    latent would not fit the registers."""
    if height == FEW:
        return 16
    return 32 if size == LATENT else 64


def _attend(architecture: int, kind: str, size: int, height: Height, out: str) -> Kernel:
    """Return attention over heads of a size: one of HEAD_SIZES, or LATENT, of which V is the first
    part of K.

    No order of sums depends on stages and warps: a matrix instruction goes through K by itself, and
    the other sums are such products too. Two tiles of KV of the largest heads do not fit where a
    block may have 99 KB. Tiles of 64 rows of large heads have twice as many warps, since the
    registers of four would not hold them: the largest everywhere, those of 128 where the compiler
    gives more registers to each thread.
    """
    latent, small, large = (
        size == LATENT,
        SHARED[architecture] <= SMALL_SHARED,
        size >= HEAD_SIZES[-1],
    )
    stored, compute = KV_KINDS[kind]
    text = (
        f"q:*fp32 keys:*{stored} values:*{stored} k_scales:*fp32 v_scales:*fp32 blocks:*i32"
        f" positions:*i32 works:*i32 slopes:*fp32 sinks:*fp32 out:*{out} maxes_sums:*fp32 accs:*fp32"
        " arrived:*i32 stride! has_slopes has_sinks heads kv_heads dim! mixed_dim! part block inverse shift"
        " window chunked scale:fp32 soft_cap:fp32"
    )
    positions = 16 if kind == "float32" else 64
    if latent:
        positions = 16 if small else 32
    stages = 3 if height == FEW else 2
    if large:
        stages = 1 if small else 2
    warps = 8 if large or (size == 128 and architecture >= 100) else 4
    if height == FEW and not latent:
        warps = 4 if large else 2
    return _kernel(
        f"attend.{kind}.{size}.{height}.{out}", "attention.attend", text, warps, stages,
        KIND=kind, COMPUTE=f"dtype:{compute}", WHOLE=height == MANY, R=attention_rows(height, size), D=size,
        BLOCK_T=positions, ROTARY=LATENT_ROTARY if latent else 0,
    )  # fmt: skip


def _attention(architecture: int) -> list[Kernel]:
    sizes = [(kind, size) for size in HEAD_SIZES for kind in KV_KINDS]
    sizes.remove(("float32", HEAD_SIZES[-1]))  # no model keeps such a KV
    sizes += [(kind, LATENT) for kind in LATENT_KINDS]
    return [
        _attend(architecture, kind, size, height, out)
        for kind, size in sizes
        for height in (FEW, MANY)
        for out in MIXED
    ]


def _choosing() -> list[Kernel]:
    sides = {"BLOCK": VOCABULARY_TILE, "SEGMENTS": VOCABULARY_SEGMENTS, "STAGES": 1}
    places = sides | {"PLACES": SAMPLE_PLACES, "MOST": SAMPLE_MOST}
    few = {"SEGMENTS": VOCABULARY_SEGMENTS, "MOST": SAMPLE_MOST, "FEW": 1024, "WIDE": 4096}
    draw = "logits:*fp32 temperatures:*fp32 top_ks:*i32 top_ps:*fp32 min_ps:*fp32"
    size = "vocabulary chunks"
    out = "ids:*i32? values:*fp32?"
    best = (
        f"{draw} pairs:*i64 counts:*i32 places:*i32 scales:*fp32 masses:*fp64 arrived:*i32 {size}"
    )
    collect = f"{draw} pairs:*i64 scales:*fp32 places:*i32 masses:*fp64 found:*i32 {size}"
    cut = (
        f"{draw} uniforms:*fp32 pairs:*i64 places:*i32 masses:*fp64 found:*i32 cuts:*i64 {out}"
        " vocabulary segments length"
    )
    chosen = f"{draw} uniforms:*fp32 pairs:*i64 masses:*fp64 cuts:*i64 arrived:*i32 {out} {size}"
    edit = "logits:*fp32 entries:*i32 amounts:*fp32 count vocabulary"
    forbid = "logits:*fp32 bits:*i32 rows:*i32 words vocabulary"
    return [
        _kernel("edit", "sampling.edit", edit, BLOCK=GROUP_ROWS),
        _kernel("forbid", "sampling.forbid", forbid, BLOCK=GROUP_ROWS),
        _kernel("sample.best", "sampling.best", best, CUTS=False, **places),
        _kernel("sample.best.cuts", "sampling.best", best, CUTS=True, **places),
        _kernel("sample.collect", "sampling.collect", collect, **places),
        _kernel("sample.cut", "sampling.cut", cut, 16, **few),
        _kernel("sample.draw", "sampling.draw", chosen, **sides),
    ]


def experts_tile(architecture: int, height: Height, sort: str) -> Tile:
    """Return the tile of products of experts, by how many rows most of them have. sort: of their
    weights."""
    if sort == "fp32":
        return Tile(64, 64, block_k(sort), 4, 3)
    if sort in FLOATS:
        return Tile(128, 64, 64, 8, 4) if height == MANY else Tile(64, 64, 64, 4, 4)
    return groups_tile(architecture, height, sort)


def _experts(architecture: int) -> list[Kernel]:
    found = []
    for scoring in ("softmax", "sigmoid"):
        for lanes in ROUTED:
            text = "logits:*fp32 ids:*i32 weights:*fp32 experts top_k normalise factor:fp32"
            warps, sigmoid = 1 if lanes == ROUTED[0] else 8, scoring == "sigmoid"
            name = f"route.{scoring}.{lanes}"
            found.append(_kernel(name, "experts.route", text, warps, SIGMOID=sigmoid, BLOCK=lanes))
    texts = {
        "group_rows": "ids:*i32 order:*i32 bounds:*i32 count experts",
        "add_rows": "x:*fp32 y:*fp32 rows:*i32 weights:*fp32 d",
        "add_experts": "x:*fp32 y:*fp32 weights:*fp32 out:*fp32 weighed d top_k",
    }
    found += [
        _kernel(name, f"experts.{name}", text, BLOCK=GROUP_ROWS) for name, text in texts.items()
    ]
    for kind in FLOATS:
        text = f"x:*fp32 weights:*fp32 out:*{kind} d top_k"
        found.append(_kernel(f"weigh_rows.{kind}", "experts.weigh_rows", text, BLOCK=GROUP_ROWS))
    return [
        *found,
        *(_expert_gemm(architecture, sort, FEW) for sort in (*FLOATS, *GROUPED)),
        *(_expert_gemm(architecture, sort, MANY) for sort in (*FLOATS, *GROUPED) if sort != "fp32"),
    ]


def _expert_gemm(architecture: int, sort: str, height: Height) -> Kernel:
    """Return a product of the weights of experts of this sort, floats or groups."""
    tile = experts_tile(architecture, height, sort)
    constants = tile.blocks
    text = "table:*i64 order:*i32 bounds:*i32"
    if sort in FLOATS:
        text, function = f"x:*{sort} {text}", "gemm"
    else:
        text, function = f"x:*bf16 {text} sums:*fp32", "group_gemm"
        bits, group, scales = GROUPED[sort]
        constants |= {
            "SCALES": f"dtype:{scales}",
            "BITS": bits,
            "GROUP": group,
            "STAGES": tile.stages,
        }
    text += " out:*fp32 shared N K! chunk! parts x_rows experts halves by_head stride"
    name = f"experts.{sort}.{height}"
    return _kernel(name, f"experts.{function}", text, tile.warps, tile.stages, **constants)


def _lora() -> list[Kernel]:
    """Return the products of adapters. Every architecture has one height, and so one matrix
    instruction. Factors and rows of one 16-bit type are multiplied in it; all others in fp32, to
    which both are widened."""
    found = []
    blocks: dict[str, Any] = {"BLOCK_M": LORA_ROWS, "BLOCK_R": LORA_RANKS}
    tiles = "rows:*i32 tiles:*i32 bases:*i64"
    for factor in FLOATS:
        kind = {"FACTOR": f"dtype:{factor}", **blocks}
        for x in FLOATS:
            compute = lora_compute(x, factor)
            text = f"x:*{x} {tiles} h:*fp32 entry most height width! each chunk! parts K!"
            sides: dict[str, Any] = {
                "COMPUTE": f"dtype:{compute}",
                "BLOCK_K": block_k(compute),
                **kind,
            }
            found.append(_kernel(f"lora_shrink.{x}.{factor}", "lora.shrink", text, 2, 4, **sides))
        for compute in sorted({factor, "fp32"}):
            text = f"h:*fp32 {tiles} y:*fp32 entry most height! width! parts stride n0 n1 n2"
            sides = {
                "COMPUTE": f"dtype:{compute}",
                "BLOCK_N": LORA_OUTPUTS,
                "PARTS": LORA_PARTS,
                **kind,
            }
            found.append(_kernel(f"lora_expand.{compute}.{factor}", "lora.expand", text, **sides))
        text = f"tokens:*i32 chosen:*i32 {tiles} h:*fp32 entry width"
        found.append(_kernel(f"lora_pick.{factor}", "lora.pick", text, 1, **kind))
    return found


def lora_compute(x: str, factor: str) -> str:
    """Return the type that products of rows and factors of these types are computed in."""
    return x if x == factor else "fp32"


def lora_parts(columns: int) -> tuple[int, int]:
    """Return the columns of each part of K of a first product, and how many parts: by K alone."""
    parts = max(1, min(columns // 1024, LORA_PARTS))
    return cut(columns, parts, 64)


def exchange_words() -> int:
    """Return the words of a rank's region before the areas: flags, counters, and whether a rank
    failed."""
    return 2 * EXCHANGE_RANKS * EXCHANGE_PROGRAMS + EXCHANGE_PROGRAMS + 64


def exchange_bytes(area: int = EXCHANGE_AREA) -> int:
    """Return the bytes of a rank's region."""
    return 4 * (exchange_words() + 2 * EXCHANGE_PROGRAMS * area)


def _exchange() -> list[Kernel]:
    sides = {"PROGRAMS": EXCHANGE_PROGRAMS, "SOURCES": EXCHANGE_RANKS, "BLOCK": EXCHANGE_BLOCK}
    reduce = (
        "partial:*fp32 residual:*fp32 out:*fp32 peers:*i64 stop:*i32 has_residual rank size count! room!"
        " area! patience"
    )
    gather = (
        "mine:*fp32 out:*fp32 starts:*i32 peers:*i64 stop:*i32 rank size rows chunk! area! patience"
    )
    texts = {"all_reduce": reduce, "all_reduce_twice": reduce, "gather": gather}
    return [_kernel(name, f"ranks.{name}", text, 8, **sides) for name, text in texts.items()]


def kernels_of(architecture: int) -> dict[str, Kernel]:
    """Return every kernel of an architecture, by name."""
    own = [*_products(architecture), *_attention(architecture), *_experts(architecture)]
    every = [*own, *_rows(), *_heads(), *_choosing(), *_lora(), *_exchange()]
    return {kernel.name: kernel for kernel in every}


def parts_of(rows: int, columns: int, step: int) -> tuple[int, int]:
    """Return the columns of each part of K, and how many parts, of a weight [rows, columns]: by its
    shape alone. A small weight is cut until some 96 programs of 32 outputs read it; a part has at
    least 1,024 columns."""
    programs = -(-rows // 32)
    return cut(columns, max(1, min(96 // programs, columns // 1024, 16)), step)


def group_parts_of(rows: int, columns: int, form: str = "") -> tuple[int, int]:
    """Do as `parts_of` for weights in groups: until some 256 programs of 64 outputs read it, each
    of at least 512 columns; or 512 of at least 1,024, of the forms with the fewest bytes."""
    programs = -(-rows // 64)
    parts = min(256 // programs, columns // 512)
    if form in GATED_GROUPS:
        parts = max(parts, min(512 // programs, columns // 1024))
    return cut(columns, max(1, min(parts, 16)), GROUPS_K)


def cut(columns: int, parts: int, step: int) -> tuple[int, int]:
    """Return the columns of each of so many parts, in multiples of a step, and how many parts there
    are."""
    chunk = -(-columns // (parts * step)) * step
    return chunk, -(-columns // chunk)
