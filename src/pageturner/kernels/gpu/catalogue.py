"""Which kernels there are: the variants that are compiled for each architecture, and what each is given.

Owns names, types of arguments, tile sizes. Plain data, read without Triton and without a device. Tile sizes
over K and over positions are the same for every number of rows, and products of different heights use one
matrix instruction (`make gpu-kernels` checks them). Attention of few rows has that of 16 rows everywhere,
whose bits were those of the taller one where it has run (sm_90).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
TALL = (
    90,
    100,
)  # whose matrix instructions have 64 rows; a tile of few rows is as tall, for the same bits
# Bytes of shared memory that a block may have when it asks for it: max_shared_memory_per_block_optin in
# cuda/__device/arch_traits.h of NVIDIA's libcudacxx, which is what a multiprocessor has (164, 100, 228 KB)
# less the 1 KB of a block that the system keeps
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
PORTABLE = 80  # its PTX runs on every later device
SEGMENT = 256  # positions of one softmax partial, as everywhere
GROUP_ROWS = 1024  # elements of a tile of what is done element by element
NORM_ROWS = 4096  # elements of a row that are normed at once
# Of sampling: logits that are read at once; segments of a row at most; places of a distance; integers of a
# row's state; tokens that are sorted
VOCABULARY_TILE, VOCABULARY_SEGMENTS = 2048, 128
SAMPLE_BINS, SAMPLE_STATE, SAMPLE_SORTED = 256, 16, 2048
# Rows of a product: few ones with a narrow or a wide weight, more of them likewise, and many. Attention
# knows few and many, weights in groups slim as well.
THIN, SLIM, FEW, HALF, SOME, MANY = HEIGHTS = "thin", "slim", "few", "half", "some", "many"
STEP = 16  # columns of a weight are a multiple of it: kernels read so many at once
# Up to so many rows the parts of K are computed beside each other
THIN_ROWS, FEW_ROWS, SOME_ROWS = 16, 64, 256
MAX_SPLIT_TILES = 2048  # tiles of a product whose parts of K are computed beside each other
WHOLE_TILES = (
    256  # of weights in groups and more rows than few: so many tiles fill a device without that
)
# Of the products of adapters: rows of a tile, ranks of a block, outputs of a tile, most parts of K
LORA_ROWS, LORA_RANKS, LORA_OUTPUTS, LORA_PARTS = 16, 16, 128, 8

# Of sums over ranks: programs of a launch at most, ranks at most, elements that a program moves at once, and
# those of an area of a program: two for each of 128 programs are 134 MB
EXCHANGE_PROGRAMS, EXCHANGE_RANKS, EXCHANGE_BLOCK, EXCHANGE_AREA = 128, 16, 1024, 1 << 17
# Up to so many bytes, divided by the number of ranks, a sum over more than two ranks takes one exchange: at 4
# and 8 ranks that is where vLLM's own all-reduce goes over to two (512 and 256 KB). Of two ranks both ways
# move as much, and a sum always takes one
ONE_EXCHANGE = 2 << 20

FLOATS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}  # what products are computed in
KV_KINDS = {  # KV type -> (how it lies in memory, what products are computed in)
    "float16": ("fp16", "fp16"),
    "bfloat16": ("bf16", "bf16"),
    "float32": ("fp32", "fp32"),
    "int8": ("i8", "fp16"),
    "fp8_e4m3": ("u8", "fp16"),
}
MIXED = ("fp32", "bf16")  # types of what attention mixes
HEAD_SIZES = (64, 128, 256)  # a head is padded to the next one
LATENT_KINDS = ("float16", "bfloat16", "int8", "fp8_e4m3")  # KV types of a latent KV
LATENT, LATENT_ROTARY = 512, 64  # a latent, and the rotary key behind it, are padded to them
GATED = ("bf16", "fp16")  # weights of gate and up that are multiplied and joined in one kernel
# Weights in groups: bits, columns of a group (0: a whole row, in fp8), type of scales
GROUPED = {
    "8.16": (8, 16, "fp32"), "8.32": (8, 32, "fp32"), "4.32": (4, 32, "fp32"), "4.32.fp16": (4, 32, "fp16"),
    "4.128": (4, 128, "fp32"), "5.32": (5, 32, "fp32"), "fp8": (8, 0, "fp32"),
}  # fmt: skip
# As GATED, of many rows: with fewer the programs would be half as many, and wait for each other longer
GATED_GROUPS = ("4.32.fp16", "4.128", "fp8")
SUMS_SPAN = 256  # columns of a tile of `group_sums`
GROUPS_K = 128  # what parts of K of a product with them are multiples of
BINARY = ("act_mul", "add", "mul", "clamped_swiglu")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
UNARY = ("scale", "soft_cap", *ACTIVATIONS)
ROUTED = (512, 4096)  # outputs of a router: lanes of the kernels that choose among them


Constants = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A variant. arguments: (name, type) in the order of the function, "bf16[128,64]" for a matrix of which
    boxes of so many rows and columns are copied; constants: of its constexprs, "dtype:x" for a type; aligned:
    integers that are multiples of 16. Pointers are too, but for those in `unaligned`."""

    name: str
    function: str
    arguments: tuple[tuple[str, str], ...]
    constants: Constants
    warps: int = 4
    stages: int = 2
    aligned: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()

    @property
    def multiples_of_16(self) -> list[str]:
        """Arguments that the kernel is compiled for as such."""
        pointers = [name for name, kind in self.arguments if kind.startswith("*")]
        return [name for name in (*pointers, *self.aligned) if name not in self.unaligned]


def _arguments(text: str) -> tuple[tuple[str, str], ...]:
    """ "x:*bf16 M:i32" as pairs; names without a type are i32."""
    pairs = (part.partition(":") for part in text.split())
    return tuple((name, kind or "i32") for name, _, kind in pairs)


class Tile(NamedTuple):
    """Of a dense product: its sides, and what a program has. swap: the weight is the first operand of the
    matrix instruction, and rows may be fewer than that has."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    swap: bool = False


WIDE = 8192  # from so many outputs on there are enough tiles of 64 of them for every multiprocessor


def tiles_of(architecture: int, kind: str) -> dict[str, Tile]:
    """The tiles that dense products have, by how many rows there are and how wide the weight is. No order of
    sums depends on them. On sm_90 they are the fastest of `bench/gpu/tune_decode.py` and `tune.py`: there the
    weight is the first operand where rows are few, which had the same bits on a device."""
    if kind == "fp32":
        few, many = Tile(16, 64, 32, 4, 4), Tile(64, 64, 32, 4, 3)
        return {SLIM: few, FEW: few, HALF: many, SOME: many, MANY: many}
    if architecture not in TALL:
        some = Tile(128, 128, 64, 8, 3)
        return {SLIM: Tile(16, 32, 128, 4, 4), FEW: Tile(16, 64, 64, 4, 4), HALF: Tile(64, 64, 64, 4, 4),
                SOME: some, MANY: some}  # fmt: skip
    low = {SLIM: Tile(64, 32, 128, 4, 5), FEW: Tile(64, 64, 64, 4, 3)}
    if architecture == 90:
        low = {THIN: Tile(16, 64, 128, 4, 6, True), SLIM: Tile(32, 64, 128, 4, 6, True),
               FEW: Tile(64, 64, 64, 4, 6, True)}  # fmt: skip
    return {**low, HALF: Tile(64, 128, 64, 4, 4), SOME: Tile(128, 128, 64, 8, 4),
            MANY: Tile(128, 256, 64, 8, 3)}  # fmt: skip


def gated_tile(tiles: dict[str, Tile], height: str) -> Tile:
    """The tile of gate and up; a swapped one has its outputs twice."""
    return Tile(16, 64, 64, 4, 8, True) if height == THIN else tiles[height]


def height_of(rows: int, outputs: int, thin: bool = False) -> str:
    """Which of `tiles_of` a product of so many rows with a weight of so many outputs takes; thin: whether
    there is such a one. MANY where outputs are no multiple of 16, for which no other is compiled."""
    if outputs % 16:
        return MANY
    if thin and rows <= THIN_ROWS:
        return THIN
    if rows <= FEW_ROWS:
        return SLIM if outputs <= WIDE else FEW
    if rows > SOME_ROWS and -(-rows // 128) * -(-outputs // 256) >= 96:
        return MANY
    return HALF if rows <= SOME_ROWS and outputs <= WIDE else SOME


def gated_height(height: str) -> str:
    """Which of them that of gate and up takes."""
    if height == SLIM:
        return FEW
    return SOME if height == HALF else height


class Ring(NamedTuple):
    """The ring of a persistent product: the sides of a tile, stages, programs of a cluster over M and over N,
    and groups of warps that share the rows of a tile or, where turns is 2, take tiles in turn."""

    m: int
    n: int
    k: int
    stages: int
    over_m: int = 1
    over_n: int = 1
    groups: int = 1
    turns: int = 1

    @property
    def cluster(self) -> int:
        return self.over_m * self.over_n

    @property
    def name(self) -> str:
        shared = f".{self.over_m}x{self.over_n}" if self.cluster > 1 else ""
        groups = ("", ".two", ".turns")[self.groups - 1 + (self.turns - 1)]
        return f"{self.m}x{self.n}{shared}{groups}"


# Rings of persistent products on sm_90, and what an element of a tile costs: smaller tiles need more bytes
# for each product. Found by `bench/gpu/tune_persistent.py --fit`.
PERSISTENT = {Ring(128, 256, 64, 4): 1.0, Ring(128, 128, 64, 6): 1.02, Ring(128, 64, 64, 8): 1.34}
PERSISTENT_KINDS = ("bf16", "fp16")
MULTIPROCESSORS = 132  # of an H100: by them a ring is chosen, on which no order of sums depends


def persistent_ring(architecture: int, kind: str, rows: int, outputs: int) -> Ring | None:
    """The ring of a persistent product of so many rows with so many outputs: that which is done first. None
    where `dense` computes it: few rows, other types and architectures, and outputs of which not every row
    begins at a multiple of 16 bytes. Of gate and up a tile has half of its columns each."""
    if architecture != 90 or kind not in PERSISTENT_KINDS or rows <= FEW_ROWS or outputs % STEP:
        return None

    def cost(ring: Ring) -> float:
        clusters = -(-rows // (ring.m * ring.over_m)) * -(-outputs // (ring.n * ring.over_n))
        turns = -(-clusters // (MULTIPROCESSORS // ring.cluster))
        return turns * ring.m * ring.n * PERSISTENT[ring]

    return min(PERSISTENT, key=cost)


def groups_tile(architecture: int, rows: str, form: str) -> Tile:
    """The same of weights in groups: they are the first operand. Up to 16 rows take the matrix instruction of
    one warp, which nobody waits for; on sm_90 its bits are those of the taller one, and the tiles are the
    fastest of `bench/gpu/tune_groups.py`. On sm_100 all do: Triton 3.6 cannot lay these operands out for the
    taller one there."""
    group = GROUPED[form][1]
    if architecture == 90 and rows == SLIM:
        return Tile(8, 32, 128, 2, 6 if group == 128 else 3)
    if architecture == 90 and rows == FEW:
        return Tile(16, 32 if group else 64, 128, 1 if group == 128 else 2, 4)
    if rows in (SLIM, FEW):
        return Tile(8 if rows == SLIM else 16, 32, 128, 2, 4)
    if architecture == 100:
        return Tile(64, 32, 128, 2, 3)
    height = 32 if group == 16 else 64  # rows with scales of many groups have no registers for more
    if architecture == 90:
        return Tile(height, 64, 128, 4, 3)
    return Tile(height, 128, 128, 8, 2 if SHARED[architecture] <= 101376 else 3)


def block_k(kind: str) -> int:
    """What parts of K of a dense product are multiples of."""
    return 32 if kind == "fp32" else 128


# Bytes of its weight that a program asks for before the kernel in front has ended, and bytes of a request: on
# an H200 none, 32 and 64 KB were slower
_AHEAD: Constants = (("AHEAD", 1 << 14), ("LINE", 64))

# Bytes of the matrices of a layer up to which its kernels begin beside the one in front. On an H200 that made
# steps of 30 MB a layer 1.02 to 1.13 times as fast, and steps of 436 MB a layer 0.95 to 1.02 times
DEPENDENT_BYTES = 128 << 20

_OUT, _PARTS = "bias:*fp32 residual:*fp32 out:*fp32", "partial:*fp32 counters:*i32"


def _dense_constants(rows: str, tile: Tile, outputs: int) -> Constants:
    """outputs: of a tile of one weight."""
    of_kernel = (("WHOLE", rows == MANY), ("SWAP", tile.swap), *_AHEAD)
    return (*of_kernel, ("BLOCK_M", tile.m), ("BLOCK_N", outputs), ("BLOCK_K", tile.k))


def dense(name: str, kind: str, rows: str, tile: Tile) -> Kernel:
    """A product of floats with this tile."""
    text = f"x:*{kind} w:*{kind} {_OUT} {_PARTS} has_bias has_residual M N K chunk parts"
    constants = _dense_constants(rows, tile, tile.n)
    aligned = (
        ("K", "chunk") if rows == MANY else ("N", "K", "chunk")
    )  # MANY takes whatever N there is
    return Kernel(
        name, "products.dense", _arguments(text), constants, tile.warps, tile.stages, aligned
    )


def groups(form: str, rows: str, tile: Tile, gated: bool = False) -> Kernel:
    """A product of weights in groups with this tile; gated: of gate and up."""
    bits, group, scales = GROUPED[form]
    text = f"x:*bf16 q:*i32 high:*i32 scale:*{scales} low:*{scales} sums:*fp32"
    constants: Constants = (("BITS", bits), ("GROUP", group), ("SUMS", rows == MANY),
                            ("AHEAD", tile.n << 9), ("LINE", 64), ("BLOCK_M", tile.m),
                            ("BLOCK_N", tile.n), ("BLOCK_K", tile.k), ("STAGES", tile.stages))  # fmt: skip
    if gated:
        function, text, aligned = "gated_groups", f"{text} out:*bf16 has_low zero M N K", ("N", "K")
    else:
        function, aligned = "groups", ("K", "chunk")
        text += f" {_OUT} {_PARTS} has_low zero has_bias has_residual M N K chunk parts"
        constants = (("WHOLE", rows == MANY), *constants)
    name = f"{function}.{form}.{rows}"
    return Kernel(
        name, f"groups.{function}", _arguments(text), constants, tile.warps, tile.stages, aligned
    )


def gated_outputs(tile: Tile) -> int:
    """Outputs of gate, and as many of up, of a tile: together what a tile has, or more where weights are the
    first operand, which has at least 64 rows."""
    return tile.n if tile.swap else tile.n // 2


def gated_dense(name: str, kind: str, rows: str, tile: Tile) -> Kernel:
    """Half of the outputs of a tile are of gate, the others of up."""
    text = f"x:*{kind} w:*{kind} out:*{kind} M N K"
    constants = _dense_constants(rows, tile, gated_outputs(tile))
    aligned = ("N", "K")
    return Kernel(
        name, "products.gated_dense", _arguments(text), constants, tile.warps, tile.stages, aligned
    )


PERSISTENT_WARPS = 8  # that multiply, beside those that fetch


def persistent(name: str, kind: str, ring: Ring, gated: bool = False) -> Kernel:
    """A persistent product with this ring. A tile of a gated one has half of its columns of gate, the others
    of up."""
    outputs, warps = ring.n // 2 if gated else ring.n, PERSISTENT_WARPS // ring.groups
    boxes = (
        f"x:{kind}[{ring.m // ring.over_n},{ring.k}] w:{kind}[{outputs // ring.over_m},{ring.k}]"
    )
    constants: Constants = (
        ("BLOCK_M", ring.m), ("BLOCK_N", outputs), ("BLOCK_K", ring.k), ("STAGES", ring.stages),
        ("WARPS", warps), ("GROUPS", ring.groups), ("TURNS", ring.turns), ("OVER_M", ring.over_m),
        ("OVER_N", ring.over_n),
    )  # fmt: skip
    if gated:
        aligned: tuple[str, ...] = ("N", "K")
        text = f"{boxes} out:{kind}[{ring.m * ring.turns // ring.groups},{outputs}] M N K"
    else:
        text = f"{boxes} {_OUT} has_bias has_residual M N K chunk parts"
        aligned = ("N", "K", "chunk")
    function = "persistent.gated_dense" if gated else "persistent.dense"
    return Kernel(name, function, _arguments(text), constants, warps, ring.stages, aligned)


def _persistent(architecture: int) -> list[Kernel]:
    if architecture != 90:
        return []
    return [
        persistent(f"{'gated_' * gated}persistent.{kind}.{ring.name}", kind, ring, gated)
        for kind in PERSISTENT_KINDS for ring in PERSISTENT for gated in (False, True)
    ]  # fmt: skip


def _products(architecture: int) -> list[Kernel]:
    found = []
    for kind in FLOATS:
        tiles = tiles_of(architecture, kind)
        for rows, tile in tiles.items():
            found.append(dense(f"dense.{kind}.{rows}", kind, rows, tile))
            if kind in GATED and gated_height(rows) == rows:
                joined = gated_tile(tiles, rows)
                found.append(gated_dense(f"gated_dense.{kind}.{rows}", kind, rows, joined))
    for rows in (SLIM, FEW, MANY):
        for form in GROUPED:
            tile = groups_tile(architecture, rows, form)
            found.append(groups(form, rows, tile))
            if form in GATED_GROUPS and rows == MANY:
                found.append(groups(form, rows, tile, gated=True))
    for group in sorted({group for _, group, _ in GROUPED.values() if group}):
        span: Constants = (("GROUP", group), ("BLOCK_M", 16), ("SPAN", SUMS_SPAN))
        text = "x:*bf16 sums:*fp32 M K"
        found.append(
            Kernel(f"group_sums.{group}", "groups.group_sums", _arguments(text), span, 1, 2, ("K",))
        )
    return found


def _rows() -> list[Kernel]:
    found = []
    block: Constants = (("BLOCK", GROUP_ROWS),)
    for kind in FLOATS:
        text = f"table:*{kind} tokens:*i32 chosen:*i32 out:*fp32 first rows K"
        found.append(Kernel(f"embed.{kind}", "rows.embed", _arguments(text), block))
    for form, (bits, group, scales) in GROUPED.items():
        text = (
            f"q:*i32 high:*u8 scale:*{scales} low:*{scales} tokens:*i32 chosen:*i32 out:*fp32 has_low zero"
            " first rows K"
        )
        element: Constants = (("BITS", bits), ("GROUP", group), *block)
        found.append(Kernel(f"embed_groups.{form}", "rows.embed_groups", _arguments(text), element))
    for out in FLOATS:
        text = f"x:*fp32 weight:*fp32 out:*{out} eps:fp32 d heads stride"
        wide: Constants = (("BLOCK", NORM_ROWS),)
        aligned = ("d", "stride")
        found.append(
            Kernel(f"rms_norm.{out}", "rows.rms_norm", _arguments(text), wide, 8, 2, aligned)
        )
        head: Constants = (("BLOCK", HEAD_SIZES[-1]),)
        found.append(Kernel(f"head_norm.{out}", "rows.rms_norm", _arguments(text), head, 1))
        text = f"x:*fp32 weight:*fp32 bias:*fp32 out:*{out} eps:fp32 d"
        found.append(Kernel(f"layer_norm.{out}", "rows.layer_norm", _arguments(text), block))
        for act in (*ACTIVATIONS, "clamped_swiglu"):
            constants = (("ACT", act), *block)
            text = f"x:*fp32 out:*{out} d"
            found.append(Kernel(f"gated.{act}.{out}", "rows.gated", _arguments(text), constants))
        for op in ("cast", "act_mul"):
            found.append(_elementwise(op, out))
    found += [_elementwise(op, "fp32") for op in (*BINARY[1:], *UNARY)]
    text = "x:*fp32 rows:*i32 factors:*fp32 out:*fp32 d scaled"
    found.append(Kernel("take_rows", "rows.take_rows", _arguments(text), block))
    text = "x:*bf16 order:*i32 out:*bf16 d"
    found.append(Kernel("take_columns", "rows.take_columns", _arguments(text), block))
    return found


def _heads() -> list[Kernel]:
    """What is done to the heads of rows, and how they go to the KV."""
    found, head = [], (("BLOCK", HEAD_SIZES[-1]),)
    text = "x:*fp32 cos:*fp32 sin:*fp32 positions:*i32 out:*fp32 stride heads dim half interleaved"
    found.append(Kernel("rotate", "rows.rotate", _arguments(text), head, 1))
    for kind, (lies, _) in KV_KINDS.items():
        text = (
            f"k_rows:*fp32 v_rows:*fp32 keys:*{lies} values:*{lies} k_scales:*fp32 v_scales:*fp32 slots:*i32"
            " cos:*fp32 sin:*fp32 positions:*i32 k_stride v_stride heads dim room half interleaved"
        )
        found.append(
            Kernel(
                f"kv_write.{kind}", "rows.kv_write", _arguments(text), (("KIND", kind), *head), 1
            )
        )
        text = (
            f"rows:*fp32 q:*fp32 q_norm:*fp32 k_norm:*fp32 keys:*{lies} values:*{lies} k_scales:*fp32"
            " v_scales:*fp32 slots:*i32 cos:*fp32 sin:*fp32 positions:*i32"
            " has_norm eps:fp32 stride heads kv_heads dim room half interleaved"
        )
        for size in HEAD_SIZES[: -1 if kind == "float32" else None]:  # as `_attention`
            constants = (("KIND", kind), ("BLOCK", size))
            found.append(
                Kernel(
                    f"place_heads.{kind}.{size}", "rows.place_heads", _arguments(text), constants, 1
                )
            )
    for kind in MIXED:
        text = f"x:*{kind} out:*{kind} stride heads dim room"
        found.append(Kernel(f"fit_heads.{kind}", "rows.fit_heads", _arguments(text), head, 1))
    for kind in LATENT_KINDS:
        for compute in FLOATS:
            text = (
                f"rows:*fp32 plain:*{compute} q:*fp32 norm:*fp32 keys:*{KV_KINDS[kind][0]} k_scales:*fp32"
                " slots:*i32 cos:*fp32 sin:*fp32 positions:*i32 has_norm eps:fp32 stride heads plain_dim rank"
                " rotary dim half interleaved"
            )
            constants = (("KIND", kind), ("BLOCK", 2 * LATENT))
            name = f"place_latent.{kind}.{compute}"
            found.append(Kernel(name, "rows.place_latent", _arguments(text), constants))
    text = "x:*fp32 y:*fp32 out:*fp32 first second"
    found.append(
        Kernel("join_heads", "rows.join_heads", _arguments(text), (("BLOCK", GROUP_ROWS),))
    )
    return found


def _elementwise(op: str, out: str) -> Kernel:
    text = f"x:*fp32 y:*fp32 out:*{out} factor:fp32 count"
    constants: Constants = (("OP", op), ("BLOCK", GROUP_ROWS))
    return Kernel(f"elementwise.{op}.{out}", "rows.elementwise", _arguments(text), constants)


def attention_size(head_dim: int, latent: int) -> int:
    """What a head is padded to that is mixed: one of HEAD_SIZES, or LATENT."""
    return LATENT if latent else next(size for size in HEAD_SIZES if size >= head_dim)


def largest_head(dtype: str, latent: bool) -> int:
    """Elements of the largest head that attention computes over a KV of this type; 0: none."""
    if latent:
        return LATENT + LATENT_ROTARY if dtype in LATENT_KINDS else 0
    return HEAD_SIZES[-2] if dtype == "float32" else HEAD_SIZES[-1]


def attention_rows(architecture: int, rows: str, size: int) -> int:
    """Rows times query heads of a tile, by what heads are padded to: more of a latent would not fit the
    registers."""
    if rows == FEW:
        return 16
    return 32 if size == LATENT else 64


def tile_t(kind: str) -> int:
    """Positions of one tile of KV."""
    return 16 if kind == "float32" else 64


def latent_tile_t(architecture: int) -> int:
    """The same of a latent KV, of which a tile is larger."""
    return 16 if SHARED[architecture] <= 101376 else 32


def attention_stages(architecture: int, rows: str, size: int) -> int:
    """Tiles of KV that are held at once: two of the largest heads do not fit where a block may have 99 KB.
    No order of sums depends on it."""
    small = SHARED[architecture] <= 101376
    if size >= HEAD_SIZES[-1]:
        return 1 if small else 2
    return 3 if rows == FEW else 2


def attention_warps(architecture: int, rows: str, size: int) -> int:
    """Twice as many for tiles of 64 rows of large heads, which would not fit the registers of four: of the
    largest everywhere, of 128 where the compiler gives more to each thread. No order of sums depends on it: a
    matrix instruction goes through K by itself, and the other sums are such products too."""
    if rows == FEW and size <= HEAD_SIZES[-1]:
        return 4 if size == HEAD_SIZES[-1] else 2
    return 8 if size >= HEAD_SIZES[-1] or (size == 128 and architecture >= 100) else 4


def _attend(architecture: int, kind: str, size: int, rows: str, out: str) -> Kernel:
    """size: one of HEAD_SIZES, or LATENT, of which V is the first part of K."""
    latent = size == LATENT
    lies, compute = KV_KINDS[kind]
    text = (
        f"q:*fp32 keys:*{lies} values:*{lies} k_scales:*fp32 v_scales:*fp32 blocks:*i32"
        f" positions:*i32 works:*i32 slopes:*fp32 sinks:*fp32 out:*{out} peaks:*fp32 mixes:*fp32 arrived:*i32"
        " stride has_slopes has_sinks heads kv_heads dim mixed_dim part block inverse shift window chunked"
        " scale:fp32 soft_cap:fp32"
    )
    constants: Constants = (
        ("KIND", kind), ("COMPUTE", f"dtype:{compute}"), ("WHOLE", rows == MANY),
        ("R", attention_rows(architecture, rows, size)), ("D", size),
        ("BLOCK_T", latent_tile_t(architecture) if latent else tile_t(kind)),
        ("ROTARY", LATENT_ROTARY if latent else 0),
    )  # fmt: skip
    name = f"attend.{kind}.{size}.{rows}.{out}"
    warps, stages = (
        attention_warps(architecture, rows, size),
        attention_stages(architecture, rows, size),
    )
    aligned = ("dim", "mixed_dim", "stride")
    return Kernel(name, "attention.attend", _arguments(text), constants, warps, stages, aligned)


def _attention(architecture: int) -> list[Kernel]:
    """What is mixed is written as fp32, or as the next product wants it."""
    found = []
    for size in HEAD_SIZES:
        for kind in KV_KINDS:
            if kind == "float32" and size == HEAD_SIZES[-1]:
                continue  # nobody keeps such a KV
            found += [
                _attend(architecture, kind, size, rows, out)
                for rows in (FEW, MANY)
                for out in MIXED
            ]
    for kind in LATENT_KINDS:
        found += [
            _attend(architecture, kind, LATENT, rows, out) for rows in (FEW, MANY) for out in MIXED
        ]
    return found


def _choosing() -> list[Kernel]:
    block = (("BLOCK", GROUP_ROWS),)
    edit = "logits:*fp32 entries:*i32 amounts:*fp32 count vocabulary"
    forbid = "logits:*fp32 bits:*i32 rows:*i32 words vocabulary"
    draw = "temperatures:*fp32 top_ks:*i32 top_ps:*fp32 min_ps:*fp32"
    tile = ("BLOCK", VOCABULARY_TILE), ("SEGMENTS", VOCABULARY_SEGMENTS)
    bins, state = ("BINS", SAMPLE_BINS), ("STATE", SAMPLE_STATE)
    best = "logits:*fp32 pairs:*i64 counts:*i32 state:*i32 vocabulary chunks"
    scan = (
        f"logits:*fp32 {draw} pairs:*i64 masses:*fp64 counts:*i32 state:*i32 vocabulary chunks most"
    )
    collect = f"logits:*fp32 {draw} pairs:*i64 masses:*fp64 found:*i64 cuts:*i64 state:*i32 vocabulary chunks"
    chosen = (
        f"logits:*fp32 {draw} uniforms:*fp32 pairs:*i64 masses:*fp64 cuts:*i64 state:*i32 ids:*i32"
        " values:*fp32 vocabulary chunks"
    )

    def sample(name: str, text: str, *constants: tuple[str, object], warps: int = 4) -> Kernel:
        function = f"sampling.{name.partition('.')[0]}"
        return Kernel(
            f"sample.{name}", function, _arguments(text), (*tile, state, *constants), warps
        )

    return [
        Kernel("edit", "sampling.edit", _arguments(edit), block),
        Kernel("forbid", "sampling.forbid", _arguments(forbid), block),
        sample("best", best, bins),
        *(sample(f"scan.{level}", scan, bins, ("LEVEL", level)) for level in (0, 1)),
        sample("collect", collect, bins, ("MOST", SAMPLE_SORTED), warps=8),
        replace(sample("draw", chosen), unaligned=("ids", "values")),
    ]


def experts_tile(architecture: int, rows: str, sort: str) -> Tile:
    """The tile of products of experts, by how many rows most of them have. sort: of their weights."""
    if sort == "fp32":
        return Tile(64, 64, block_k(sort), 4, 3)
    if sort in FLOATS:
        return Tile(128, 64, 64, 8, 4) if rows == MANY else Tile(64, 64, 64, 4, 4)
    return groups_tile(architecture, rows, sort)


def _experts(architecture: int) -> list[Kernel]:
    found = []
    text = "logits:*fp32 ids:*i32 weights:*fp32 experts top_k normalise factor:fp32"
    for scoring in ("softmax", "sigmoid"):
        for lanes in ROUTED:
            constants: Constants = (("SIGMOID", scoring == "sigmoid"), ("BLOCK", lanes))
            warps = 1 if lanes == ROUTED[0] else 8
            name = f"route.{scoring}.{lanes}"
            found.append(Kernel(name, "experts.route", _arguments(text), constants, warps))
    text = "ids:*i32 order:*i32 bounds:*i32 count experts"
    found.append(
        Kernel("group_rows", "experts.group_rows", _arguments(text), (("BLOCK", GROUP_ROWS),))
    )
    found += [_of_experts(architecture, sort, rows) for sort in (*FLOATS, *GROUPED) for rows in (FEW, MANY)
              if sort != "fp32" or rows == FEW]  # fmt: skip
    block: Constants = (("BLOCK", GROUP_ROWS),)
    for kind in FLOATS:
        text = f"x:*fp32 weights:*fp32 out:*{kind} d top_k"
        found.append(Kernel(f"weigh_rows.{kind}", "experts.weigh_rows", _arguments(text), block))
    text = "x:*fp32 y:*fp32 rows:*i32 weights:*fp32 d"
    found.append(Kernel("add_rows", "experts.add_rows", _arguments(text), block))
    text = "x:*fp32 y:*fp32 weights:*fp32 out:*fp32 weighed d top_k"
    found.append(Kernel("add_experts", "experts.add_experts", _arguments(text), block))
    return found


def _of_experts(architecture: int, sort: str, rows: str) -> Kernel:
    """A product of weights of this sort, floats or groups."""
    tile, name = experts_tile(architecture, rows, sort), f"experts.{sort}.{rows}"
    blocks: Constants = (("BLOCK_M", tile.m), ("BLOCK_N", tile.n), ("BLOCK_K", tile.k))
    beside = "out:*fp32 shared N K chunk parts x_rows experts halves by_head stride"
    if sort in FLOATS:
        text = f"x:*{sort} table:*i64 order:*i32 bounds:*i32 {beside}"
        function, constants = "experts.product", blocks
    else:
        bits, group, scales = GROUPED[sort]
        text = f"x:*bf16 table:*i64 order:*i32 bounds:*i32 sums:*fp32 {beside}"
        function = "experts.group_product"
        constants = (("SCALES", f"dtype:{scales}"), ("BITS", bits), ("GROUP", group), *blocks,
                     ("STAGES", tile.stages))  # fmt: skip
    return Kernel(
        name, function, _arguments(text), constants, tile.warps, tile.stages, ("K", "chunk")
    )


def _lora() -> list[Kernel]:
    """One height on every architecture, and so one matrix instruction. Factors and rows of one 16-bit type
    are multiplied in it; all others in fp32, to which both are widened."""
    found = []
    blocks: Constants = (("BLOCK_M", LORA_ROWS), ("BLOCK_R", LORA_RANKS))
    for factor in FLOATS:
        kind = ("FACTOR", f"dtype:{factor}")
        for x in FLOATS:
            compute = lora_compute(x, factor)
            text = f"x:*{x} rows:*i32 tiles:*i32 bases:*i64 h:*fp32 entry most height width each chunk parts K"
            constants = (
                kind,
                ("COMPUTE", f"dtype:{compute}"),
                *blocks,
                ("BLOCK_K", block_k(compute)),
            )
            found.append(
                Kernel(f"lora_shrink.{x}.{factor}", "lora.shrink", _arguments(text), constants, 2, 4,
                       ("chunk", "width", "K"))
            )  # fmt: skip
        for compute in sorted({factor, "fp32"}):
            text = (
                "h:*fp32 rows:*i32 tiles:*i32 bases:*i64 y:*fp32 entry most height width parts stride"
                " n0 n1 n2"
            )
            constants = (kind, ("COMPUTE", f"dtype:{compute}"), ("PARTS", LORA_PARTS), *blocks,
                         ("BLOCK_N", LORA_OUTPUTS))  # fmt: skip
            found.append(
                Kernel(f"lora_expand.{compute}.{factor}", "lora.expand", _arguments(text), constants, 4, 2,
                       ("height", "width"))
            )  # fmt: skip
        text = "tokens:*i32 chosen:*i32 rows:*i32 tiles:*i32 bases:*i64 h:*fp32 entry width"
        found.append(
            Kernel(f"lora_pick.{factor}", "lora.pick", _arguments(text), (kind, *blocks), 1)
        )
    return found


def lora_compute(x: str, factor: str) -> str:
    """What products of rows and factors of these kinds are computed in."""
    return x if x == factor else "fp32"


def lora_parts(columns: int) -> tuple[int, int]:
    """Columns of each part of K of a first product, and how many: by K alone."""
    parts = max(1, min(columns // 1024, LORA_PARTS))
    chunk = -(-columns // (parts * 64)) * 64
    return chunk, -(-columns // chunk)


def exchange_words() -> int:
    """Of a rank's region, the words before the areas: flags, counters, and whether something went wrong."""
    return 2 * EXCHANGE_RANKS * EXCHANGE_PROGRAMS + EXCHANGE_PROGRAMS + 64


def exchange_bytes(area: int = EXCHANGE_AREA) -> int:
    """Bytes of a rank's region."""
    return 4 * (exchange_words() + 2 * EXCHANGE_PROGRAMS * area)


def _exchange() -> list[Kernel]:
    """Between ranks."""
    constants: Constants = (("PROGRAMS", EXCHANGE_PROGRAMS), ("SOURCES", EXCHANGE_RANKS),
                            ("BLOCK", EXCHANGE_BLOCK))  # fmt: skip
    text = (
        "partial:*fp32 residual:*fp32 out:*fp32 peers:*i64 stop:*i32 has_residual rank size count room"
        " area patience"
    )
    found = []
    for name in ("all_reduce", "all_reduce_twice"):
        aligned: tuple[str, ...] = ("count", "room", "area")
        found.append(Kernel(name, f"ranks.{name}", _arguments(text), constants, 8, 2, aligned))
    text = (
        "mine:*fp32 out:*fp32 starts:*i32 peers:*i64 stop:*i32 rank size rows chunk area patience"
    )
    aligned = ("chunk", "area")
    found.append(Kernel("gather", "ranks.gather", _arguments(text), constants, 8, 2, aligned))
    return found


def kernels_of(architecture: int) -> dict[str, Kernel]:
    """Every kernel of an architecture, by name."""
    own = [*_products(architecture), *_persistent(architecture), *_attention(architecture)]
    own += _experts(architecture)
    every = [*own, *_rows(), *_heads(), *_choosing(), *_lora(), *_exchange()]
    return {kernel.name: kernel for kernel in every}


def parts_of(rows: int, columns: int, step: int) -> tuple[int, int]:
    """Columns of each part of K, and how many parts, of a weight [rows, columns]: by its shape alone. A small
    weight is cut until some 96 programs of 32 outputs read it; a part has at least 1,024 columns."""
    programs = -(-rows // 32)
    return cut(columns, max(1, min(96 // programs, columns // 1024, 16)), step)


def group_parts_of(rows: int, columns: int) -> tuple[int, int]:
    """The same of weights in groups: until some 256 programs of 64 outputs read it, each of at least 512
    columns. With 512 of them a layer took no less time for one row, and more for 64."""
    programs = -(-rows // 64)
    return cut(columns, max(1, min(256 // programs, columns // 512, 16)), GROUPS_K)


def cut(columns: int, parts: int, step: int) -> tuple[int, int]:
    """Columns of each of so many parts, in multiples of a step, and how many there are then."""
    chunk = -(-columns // (parts * step)) * step
    return chunk, -(-columns // chunk)
