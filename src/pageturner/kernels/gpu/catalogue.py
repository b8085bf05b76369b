"""Which kernels there are: the variants that are compiled for each architecture, and what each is given.

Owns names, types of arguments, tile sizes. Plain data, read without Triton and without a device. Tile sizes
over K and over positions are the same for every number of rows, and kernels of different heights use one
matrix instruction (`make gpu-kernels` checks the instructions of both).
"""

from __future__ import annotations

from dataclasses import dataclass

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
TALL = (90, 100)  # whose matrix instructions have 64 rows; a tile of few rows is as tall, for the same bits
# Bytes of shared memory that a block may have when it asks for it: max_shared_memory_per_block_optin in
# cuda/__device/arch_traits.h of NVIDIA's libcudacxx, which is what a multiprocessor has (164, 100, 228 KB)
# less the 1 KB of a block that the system keeps
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
PORTABLE = 80  # its PTX runs on every later device
SEGMENT = 256  # positions of one softmax partial, as everywhere
GROUP_ROWS = 1024  # elements of a tile of what is done element by element
VOCABULARY_TILE = 2048
FEW, MANY = "few", "many"
# Of the products of adapters: rows of a tile, ranks of a block, outputs of a tile, most parts of K
LORA_ROWS, LORA_RANKS, LORA_OUTPUTS, LORA_PARTS = 16, 16, 128, 8

FLOATS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}  # what products are computed in
KV_KINDS = {  # KV type -> (how it lies in memory, what products are computed in)
    "float16": ("fp16", "fp16"),
    "bfloat16": ("bf16", "bf16"),
    "float32": ("fp32", "fp32"),
    "int8": ("i8", "fp16"),
    "fp8_e4m3": ("u8", "fp16"),
}
HEAD_SIZES = (64, 128, 256)  # a head is padded to the next one
GROUPED = ((8, 16), (8, 32), (4, 32), (4, 128), (5, 32))  # bits, group
BINARY = ("act_mul", "add", "mul", "clamped_swiglu")
UNARY = ("scale", "soft_cap", "silu", "gelu", "gelu_tanh", "relu")


Constants = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A variant. arguments: (name, type) in the order of the function; constants: of its constexprs,
    "dtype:x" for a type; aligned: integers that are multiples of 16. Pointers always are."""

    name: str
    function: str
    arguments: tuple[tuple[str, str], ...]
    constants: Constants
    warps: int = 4
    stages: int = 2
    aligned: tuple[str, ...] = ()


def _arguments(text: str) -> tuple[tuple[str, str], ...]:
    """ "x:*bf16 M:i32" as pairs; names without a type are i32."""
    pairs = (part.partition(":") for part in text.split())
    return tuple((name, kind or "i32") for name, _, kind in pairs)


def tile_of(architecture: int, rows: str, kind: str) -> dict[str, int]:
    """BLOCK_M and BLOCK_N of a product, and its warps."""
    if kind == "fp32":
        return {"BLOCK_M": 16 if rows == FEW else 64, "BLOCK_N": 64, "warps": 4}
    if rows == FEW:
        return {"BLOCK_M": 64 if architecture in TALL else 16, "BLOCK_N": 64, "warps": 4}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "warps": 8}


def block_k(kind: str) -> int:
    """Columns of one tile of a dense product."""
    return 32 if kind == "fp32" else 64


def _products(architecture: int) -> list[Kernel]:
    found = []
    shape = "bias:*fp32 residual:*fp32 out:*fp32"
    for rows in (FEW, MANY):
        for kind in (*FLOATS, "fp8"):
            tile = tile_of(architecture, rows, kind)
            x, w = ("bf16", "u8") if kind == "fp8" else (kind, kind)
            text = f"x:*{x} w:*{w} scale:*fp32 {shape} has_bias has_residual M N K chunk parts"
            constants: Constants = (("FP8", kind == "fp8"), ("WHOLE", rows == MANY),
                                    ("BLOCK_M", tile["BLOCK_M"]),
                         ("BLOCK_N", tile["BLOCK_N"]), ("BLOCK_K", block_k(kind)))  # fmt: skip
            stages = 3 if rows == MANY else 4
            found.append(
                Kernel(f"dense.{kind}.{rows}", "products.dense", _arguments(text), constants,
                       tile["warps"], stages, ("K", "chunk"))
            )  # fmt: skip
        for bits, group in GROUPED:
            tile = tile_of(architecture, rows, "groups")
            q = "i8" if bits == 8 else "u8"
            text = (
                f"x:*bf16 q:*{q} high:*u8 scale:*fp32 low:*fp32 sums:*fp32 {shape}"
                " has_low zero has_bias has_residual M N K chunk parts"
            )
            constants = (("BITS", bits), ("GROUP", group), ("WHOLE", rows == MANY),
                         ("BLOCK_M", min(tile["BLOCK_M"], 64)), ("BLOCK_N", 64))  # fmt: skip
            found.append(
                Kernel(f"groups.{bits}.{group}.{rows}", "products.groups", _arguments(text), constants,
                       4, 3, ("K", "chunk"))
            )  # fmt: skip
    text = f"partial:*fp32 scale:*fp32 {shape} has_scale has_bias has_residual M N parts"
    found.append(Kernel("add_parts", "products.add_parts", _arguments(text), (("BLOCK", GROUP_ROWS),)))
    for group in sorted({group for _, group in GROUPED}):
        constants = (("GROUP", group), ("BLOCK", 32))
        text = "x:*bf16 sums:*fp32 K"
        found.append(Kernel(f"group_sums.{group}", "products.group_sums", _arguments(text), constants))
    return found


def _rows() -> list[Kernel]:
    found = []
    block = (("BLOCK", GROUP_ROWS),)
    for kind in (*FLOATS, "fp8"):
        text = f"table:*{'u8' if kind == 'fp8' else kind} scale:*fp32 tokens:*i32 out:*fp32 K"
        found.append(
            Kernel(f"embed.{kind}", "rows.embed", _arguments(text), (("FP8", kind == "fp8"), *block))
        )
    for bits in (8, 4, 5):
        text = (
            f"q:*{'i8' if bits == 8 else 'u8'} high:*u8 scale:*fp32 low:*fp32 tokens:*i32 out:*fp32"
            " has_low zero K group"
        )
        found.append(
            Kernel(f"embed_groups.{bits}", "rows.embed_groups", _arguments(text), (("BITS", bits), *block))
        )
    for out in FLOATS:
        text = f"x:*fp32 y:*fp32 weight:*fp32 total:*fp32 out:*{out} has_y eps:fp32 d heads stride"
        found.append(Kernel(f"rms_norm.{out}", "rows.rms_norm", _arguments(text), block))
        text = f"x:*fp32 weight:*fp32 bias:*fp32 out:*{out} eps:fp32 d"
        found.append(Kernel(f"layer_norm.{out}", "rows.layer_norm", _arguments(text), block))
        found.append(Kernel(f"gated.{out}", "rows.gated", _arguments(f"x:*fp32 out:*{out} d"), block))
        for op in ("cast", "act_mul"):
            found.append(_elementwise(op, out))
    found += [_elementwise(op, "fp32") for op in (*BINARY[1:], *UNARY)]
    text = "x:*fp32 cos:*fp32 sin:*fp32 positions:*i32 out:*fp32 stride heads dim half interleaved"
    head = (("BLOCK", HEAD_SIZES[-1]),)
    found.append(Kernel("rotate", "rows.rotate", _arguments(text), head, 1))
    for kind, (lies, _) in KV_KINDS.items():
        text = (
            f"k_rows:*fp32 v_rows:*fp32 keys:*{lies} values:*{lies} k_scales:*fp32 v_scales:*fp32 slots:*i32"
            " cos:*fp32 sin:*fp32 positions:*i32 k_stride v_stride heads dim half interleaved"
        )
        found.append(
            Kernel(f"kv_write.{kind}", "rows.kv_write", _arguments(text), (("KIND", kind), *head), 1)
        )
    text = "x:*fp32 rows:*i32 factors:*fp32 out:*fp32 d scaled"
    found.append(Kernel("take_rows", "rows.take_rows", _arguments(text), block))
    return found


def _elementwise(op: str, out: str) -> Kernel:
    text = f"x:*fp32 y:*fp32 out:*{out} factor:fp32 count"
    constants: Constants = (("OP", op), ("BLOCK", GROUP_ROWS))
    return Kernel(f"elementwise.{op}.{out}", "rows.elementwise", _arguments(text), constants)


def attention_rows(architecture: int, rows: str) -> int:
    """Rows times query heads of a tile."""
    return 16 if rows == FEW and architecture not in TALL else 64


def tile_t(kind: str) -> int:
    """Positions of one tile of KV."""
    return 16 if kind == "float32" else 64


def attention_stages(architecture: int, size: int) -> int:
    """Tiles of KV that are held at once: two of the largest heads do not fit where a block may have 99 KB.
    No order of sums depends on it."""
    small = SHARED[architecture] <= 101376
    return 1 if small and size == HEAD_SIZES[-1] else 2


def attention_warps(architecture: int, rows: str, size: int) -> int:
    """Twice as many for tiles of 64 rows of the largest heads, which would not fit the registers of four. No
    order of sums depends on it: a matrix instruction goes through K by itself, and the other sums are such
    products too."""
    return 8 if size == HEAD_SIZES[-1] and attention_rows(architecture, rows) == 64 else 4


def _attention(architecture: int) -> list[Kernel]:
    found = []
    for size in HEAD_SIZES:
        for kind, (lies, compute) in KV_KINDS.items():
            if kind == "float32" and size == HEAD_SIZES[-1]:
                continue  # nobody keeps such a KV
            for rows in (FEW, MANY):
                text = (
                    f"q:*fp32 keys:*{lies} values:*{lies} k_scales:*fp32 v_scales:*fp32 tables:*i32"
                    " positions:*i32 tiles:*i32 slopes:*fp32 sinks:*fp32 out:*fp32 peaks:*fp32 mixes:*fp32"
                    " stride has_slopes has_sinks heads kv_heads dim width block_size segments window chunked"
                    " scale:fp32 soft_cap:fp32"
                )
                constants: Constants = (("KIND", kind), ("COMPUTE", f"dtype:{compute}"),
                                        ("WHOLE", rows == MANY),
                             ("R", attention_rows(architecture, rows)), ("D", size),
                             ("BLOCK_T", tile_t(kind)))  # fmt: skip
                found.append(
                    Kernel(f"attend.{kind}.{size}.{rows}", "attention.attend", _arguments(text), constants,
                           attention_warps(architecture, rows, size), attention_stages(architecture, size),
                           ("dim",))
                )  # fmt: skip
        text = (
            "peaks:*fp32 mixes:*fp32 positions:*i32 tiles:*i32 sinks:*fp32 out:*fp32"
            " has_sinks heads kv_heads dim segments window chunked"
        )
        constants = (("R", attention_rows(architecture, FEW)), ("D", size))
        warps = 8 if attention_rows(architecture, FEW) * size > 4096 else 4  # two such tiles are in registers
        found.append(Kernel(f"merge.{size}", "attention.merge", _arguments(text), constants, warps))
    return found


def _choosing() -> list[Kernel]:
    block = (("BLOCK", GROUP_ROWS),)
    edit = "logits:*fp32 entries:*i32 amounts:*fp32 count vocabulary"
    forbid = "logits:*fp32 bits:*i32 rows:*i32 words vocabulary"
    sample = (
        "logits:*fp32 temperatures:*fp32 top_ks:*i32 top_ps:*fp32 min_ps:*fp32 uniforms:*fp32 ids:*i32"
        " values:*fp32 vocabulary"
    )
    return [
        Kernel("edit", "sampling.edit", _arguments(edit), block),
        Kernel("forbid", "sampling.forbid", _arguments(forbid), block),
        Kernel("sample", "sampling.sample", _arguments(sample), (("BLOCK", VOCABULARY_TILE),), 8),
    ]


def _experts() -> list[Kernel]:
    found = []
    text = "logits:*fp32 ids:*i32 weights:*fp32 experts top_k normalise factor:fp32"
    for scoring in ("softmax", "sigmoid"):
        constants: Constants = (("SIGMOID", scoring == "sigmoid"), ("BLOCK", 512))
        found.append(Kernel(f"route.{scoring}", "experts.route", _arguments(text), constants, 1))
    text = "ids:*i32 order:*i32 bounds:*i32 count experts"
    found.append(Kernel("group_rows", "experts.group_rows", _arguments(text), (("BLOCK", GROUP_ROWS),)))
    for kind in FLOATS:
        text = f"x:*{kind} weights:*i64 order:*i32 bounds:*i32 out:*fp32 shared N K chunk parts x_rows"
        constants = (("COMPUTE", f"dtype:{kind}"), ("BLOCK_M", 64), ("BLOCK_N", 64),
                     ("BLOCK_K", block_k(kind)))  # fmt: skip
        found.append(
            Kernel(f"experts.{kind}", "experts.product", _arguments(text), constants, 4, 3, ("K", "chunk"))
        )
    text = "x:*fp32 y:*fp32 rows:*i32 weights:*fp32 d"
    found.append(Kernel("add_rows", "experts.add_rows", _arguments(text), (("BLOCK", GROUP_ROWS),)))
    text = "x:*fp32 y:*fp32 weights:*fp32 out:*fp32 d top_k"
    found.append(Kernel("add_experts", "experts.add_experts", _arguments(text), (("BLOCK", GROUP_ROWS),)))
    return found


def _lora() -> list[Kernel]:
    """One height on every architecture, and so one matrix instruction. Factors and rows of one 16-bit type
    are multiplied in it; all others in fp32, to which both are widened."""
    found = []
    blocks: Constants = (("BLOCK_M", LORA_ROWS), ("BLOCK_R", LORA_RANKS))
    for factor in FLOATS:
        kind = ("FACTOR", f"dtype:{factor}")
        for x in FLOATS:
            compute = lora_compute(x, factor)
            text = (
                f"x:*{x} rows:*i32 tiles:*i32 bases:*i64 h:*fp32 entry most height width each chunk parts K"
            )
            constants = (kind, ("COMPUTE", f"dtype:{compute}"), *blocks, ("BLOCK_K", block_k(compute)))
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
        text = "tokens:*i32 rows:*i32 tiles:*i32 bases:*i64 h:*fp32 entry width"
        found.append(Kernel(f"lora_pick.{factor}", "lora.pick", _arguments(text), (kind, *blocks), 1))
    return found


def lora_compute(x: str, factor: str) -> str:
    """What products of rows and factors of these kinds are computed in."""
    return x if x == factor else "fp32"


def lora_parts(columns: int) -> tuple[int, int]:
    """Columns of each part of K of a first product, and how many: by K alone."""
    parts = max(1, min(columns // 1024, LORA_PARTS))
    chunk = -(-columns // (parts * 64)) * 64
    return chunk, -(-columns // chunk)


def kernels_of(architecture: int) -> dict[str, Kernel]:
    """Every kernel of an architecture, by name."""
    own = [*_products(architecture), *_attention(architecture)]
    every = [*own, *_rows(), *_choosing(), *_experts(), *_lora()]
    return {kernel.name: kernel for kernel in every}


def parts_of(rows: int, columns: int, step: int) -> tuple[int, int]:
    """Columns of each part of K, and how many parts, of a weight [rows, columns]: by its shape alone. A small
    weight is cut until some 256 programs read it; a part has at least 8 steps."""
    programs = -(-rows // 64)
    parts = max(1, min(256 // programs, columns // (8 * step), 16))
    chunk = -(-columns // (parts * step)) * step
    return chunk, -(-columns // chunk)
