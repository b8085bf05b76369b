"""Layouts: where each weight of a model lies in its file, and how fused tensors are cut.

Owns which weights a model has, how a file's tensors are divided into them, and the names in GGUF
files; how those of Hugging Face folders are read is in hf_names.py. The names themselves are a
table, tensor_names.json. Must not know backends or what layers compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from pageturner.models.spec import LatentSpec, LinearSpec, ModelSpec
from pageturner.models.tables import table


@dataclass(frozen=True, slots=True)
class Part:
    """A weight, or some rows of one. A row is one output; of a vector, one element.

    name, shape  the tensor in the file; no name: there is none, and all of it are `times`
    index        of several behind each other in a tensor, the one with this index
    cut          (start, count, stride): rows start..start+count-1 of every `stride` rows; None: all
    transposed   the file has inputs first (GPT-2's Conv1D); turned before it is cut
    turned       the same, behind the cut; a quantised one becomes fp32
    unit         rows of a matrix are scaled to a length of 1, in fp32
    by           the columns of a matrix are multiplied by the vector in this tensor, and by `times`,
                 in fp32
    plus, times  of each element of a vector (Gemma's norms are stored as what they add to 1)
    bare         the scale that stands beside a matrix of NVFP4 is a weight of its own, not part of it
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[int, int, int] | None = None
    transposed: bool = False
    plus: float = 0.0
    times: float = 1.0
    index: int | None = None
    turned: bool = False
    unit: bool = False
    by: str = ""
    bare: bool = False

    def cut_rows(self, whole: NDArray[Any]) -> NDArray[Any]:
        """The rows of `cut` from an array that has those of the tensor."""
        if self.cut is None:
            return whole
        start, count, stride = self.cut
        rows = whole.reshape(len(whole) // stride, stride, -1)[:, start : start + count]
        return rows.reshape(-1, *whole.shape[1:])


Parts = dict[str, Part]


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of a model: those outside of the layers by name, those of each layer by field of
    `kernels.base.Layer`, "sinks", or by "q_rope", "k_rope" and "latent_norm" of its `Latent`; of
    experts "router", "gates", "ups", "downs" and their biases, by field and expert, of a latent KV
    "k_up" and "v_up", and of norms that heads have of their own "q_norms" and "k_norms", by field
    and head. "layer_table" outside of the layers is read row by row.

    ignored  endings of names that carry no weight
    foreign  beginnings of names of what is no part of the decoder
    """

    top: Parts
    layers: list[Parts]
    several: list[dict[str, list[Part]]]
    ignored: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def all(self) -> list[Part]:
        """Every part."""
        several = [part for each in self.several for parts in each.values() for part in parts]
        single = [part for parts in (self.top, *self.layers) for part in parts.values()]
        scales = [Part(part.by, part.shape[1:]) for part in several if part.by]
        return [part for part in (*single, *several, *scales) if part.name]


def shapes_of(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """Field of `Layer` -> shape with the outputs first, of everything that this layer has."""
    f, vector = spec.family, (spec.dim,)
    shapes: dict[str, tuple[int, ...]] = _attention_shapes(spec, layer)
    before = ["attn_norm"] if f.parallel else ["attn_norm", "mlp_norm"]
    if spec.feeds is not None:
        before = ["mlp_norm" if layer in spec.feeds else "attn_norm"]
    if f.pre_norms:
        shapes |= dict.fromkeys(before, vector)
    if f.layer_norm:
        shapes |= {f"{norm}_bias": vector for norm in before}
    if f.o_bias:
        shapes["o_bias"] = vector
    if f.post_norms:
        shapes |= {"attn_post_norm": vector, "mlp_post_norm": vector}
    if f.out_scale:
        shapes["out_scale"] = (1,)
    if spec.per_layer:
        inward, outward = (spec.per_layer, spec.dim), (spec.dim, spec.per_layer)
        shapes |= {"layer_gate": inward, "layer_out": outward, "layer_post_norm": vector}
    inner = spec.inner(layer)
    if not inner:
        return shapes
    if f.gated:
        shapes["gate"] = (inner, spec.dim)
    shapes |= {"up": (inner, spec.dim), "down": (spec.dim, inner)}
    if f.mlp_bias:
        shapes |= {"up_bias": (inner,), "down_bias": vector}
    return shapes


def _linear_shapes(spec: ModelSpec, linear: LinearSpec) -> dict[str, tuple[int, ...]]:
    dim, heads = spec.dim, linear.value_heads
    shapes: dict[str, tuple[int, ...]] = {"conv": (linear.channels, linear.kernel)}
    if linear.conv_bias:
        shapes["conv_bias"] = (linear.channels,)
    if linear.kind == "conv":
        inward = (linear.width, dim)
        return shapes | {"gate_in": inward, "z": inward, "qkv": inward, "o": inward[::-1]}
    if linear.kind == "delta":
        shapes |= {"b": (heads, dim), "head_scale": (linear.value_dim,)}
    else:
        shapes["skip"] = (heads,)
        if linear.norm:
            shapes["head_scale"] = (linear.values,)
    return shapes | {
        "qkv": (linear.channels, dim),
        "z": (linear.values, dim),
        "a": (heads, dim),
        "decay": (heads,),
        "dt_bias": (heads,),
        "linear_o" if linear.beside else "o": (dim, linear.values),
    }


def _attention_shapes(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    recurrent: dict[str, tuple[int, ...]] = {}
    if spec.linear is not None and layer in spec.linear.layers:
        recurrent = _linear_shapes(spec, spec.linear)
    if not spec.attends(layer):
        return recurrent
    f, dim, heads, latent = spec.family, spec.dim, spec.heads, spec.latent
    if latent is not None:
        low = {"q_down": (latent.query, dim), "query_norm": (latent.query,)}
        seen = latent.query or dim
        return (low if latent.query else {}) | {
            "q": (heads * latent.nope, seen),
            "q_rope": (heads * latent.rotary, seen),
            "k": (latent.rank, dim),
            "k_rope": (latent.rotary, dim),
            "latent_norm": (latent.rank,),
            "o": (dim, heads * latent.value),
        }
    shape = spec.attention(layer, spec.context)
    q, kv = heads * shape.head_dim, shape.kv_heads * shape.head_dim
    head = (shape.head_dim,)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (q, dim),
        "k": (kv, dim),
        "v": (kv, dim),
        "o": (dim, q),
    }
    if f.qk_norm == "wide":
        shapes |= {"q_norm": (q,), "k_norm": (kv,)}
    elif f.qk_norm in ("head", "late") or (f.qk_norm == "unit" and layer not in spec.no_rope):
        shapes |= {"q_norm": head, "k_norm": head}
    if f.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if f.sinks:
        shapes["sinks"] = (heads,)
    if f.v_norm:
        shapes["v_norm"] = head
    absent = {"v", "v_bias"} if spec.k_as_v and layer not in spec.windowed else set()
    if spec.shares(layer):
        absent = {"k", "v", "k_bias", "v_bias", "k_norm", "v_norm"}
    return recurrent | {f: shape for f, shape in shapes.items() if f not in absent}


def top_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab, spec.dim), "norm": (spec.dim,)}
    if spec.family.layer_norm:
        shapes["norm_bias"] = (spec.dim,)
    if spec.family.embed_norm:
        shapes |= {"embed_norm": (spec.dim,), "embed_norm_bias": (spec.dim,)}
    if spec.family.positions == "learned":
        shapes["positions"] = (spec.context, spec.dim)
    if spec.family.head_bias:
        shapes["head_bias"] = (spec.vocab,)
    if not spec.tied:
        shapes["head"] = (spec.vocab, spec.dim)
    if spec.per_layer:
        shapes["layer_table"] = (spec.vocab, spec.layers * spec.per_layer)
    return shapes


@dataclass(frozen=True, slots=True)
class Names:
    """The tensor names of one family in one kind of file.

    modules     field -> module, whose tensors end in ".weight" and ".bias"; "{}" is the number of
                an expert
    roots       prefixes that all names but the head's may have
    layers      prefix of the number of a layer
    fused       fields whose rows lie one behind the other in one tensor -> its module
    adapt       changes the parts of a layer in other ways
    norm_plus   norms are stored as what they add to this number
    transposed  matrices have their inputs first
    stacked     "": each expert has its own tensors. Otherwise all experts share one tensor for each
                field: "rows" with the outputs first; "halves" and "pairs" with the inputs first and
                without an ending, gates and ups being halves or alternating columns of one tensor;
                "joined" as "halves", but with the outputs first
    unused_positions  leading rows of the position table that no position uses
    """

    modules: Mapping[str, str]
    roots: Sequence[str] = ("model.", "")
    layers: str = "layers."
    fused: Mapping[str, str] = field(default_factory=dict)
    adapt: Callable[[Parts, ModelSpec, str], Parts] | None = None
    norm_plus: float = 0.0
    transposed: bool = False
    stacked: str = ""
    unused_positions: int = 0

    def tensor(self, field: str) -> str:
        """The name of the tensor of a field, without its prefix."""
        base = field.removesuffix("_bias")
        if field.endswith("_biases"):
            base = field.removesuffix("_biases") + "s"
        if self.modules[base].endswith(_WHOLE):
            return self.modules[base]
        bare = self.stacked in ("halves", "pairs", "joined") and base in _BARE
        endings = ("", "_bias") if bare else (".weight", ".bias")
        return self.modules[base] + endings[base != field]


_WHOLE = (
    "_bias",
    ".scale",
    "_expert_scale",
    "_scalar",
    ".weight",
    "A_log",
    "ssm_a",
    ".D",
    "ssm_d",
)  # names that need no ending
_BARE = ("sinks", "gates", "ups", "downs")


# Of each kind of files the rows of architectures: the fields of `Names`, and `like`, the row whose
# fields a row has beside its own. Whoever has no row has the first.
_ROWS = table("tensor_names")
OUTER = "language_model.model."  # the root where a model that sees pictures has its text part


def names_of(kind: str, arch: str) -> Names:
    """The names of an architecture in files of a kind: "hf" or "gguf"."""
    rows = _ROWS[kind]
    row = dict(rows.get(arch) or next(iter(rows.values())))
    if "like" not in row:
        return Names(**row)
    other = names_of(kind, row.pop("like"))
    modules = {**other.modules, **row.pop("modules", {})}
    return replace(other, modules=modules, **row)


def layout_of(spec: ModelSpec, names: Names, present: Callable[[str], bool]) -> Layout:
    """The layout of a file. `present` tells whether it has a tensor: some files were saved without
    the outermost module, some have biases that others of their family lack, and older GGUF files
    have keys and values of a latent KV in one tensor."""
    embed = names.tensor("embed")
    root = next((r for r in names.roots if present(r + embed)), names.roots[0])
    outer = "language_model." if root == OUTER else ""  # of the head
    top = {}
    for f, shape in top_shapes(spec).items():
        times = spec.logit_scale if f in ("norm", "norm_bias") else 1.0  # logits follow the norm
        top[f] = _part(names, (outer if "head" in f else root, f), shape, times)
    if "norm_bias" in top and not spec.family.norm_bias:
        top["norm_bias"] = Part("", (spec.dim,), times=0.0)
    if unused := names.unused_positions:
        rows, name = spec.context + unused, top["positions"].name
        top["positions"] = Part(name, (rows, spec.dim), (unused, spec.context, rows))
    layers, several = [], []
    foreign: list[str] = []
    for i in range(spec.layers):
        prefix = f"{root}{names.layers}{i}."
        layers.append(_layer(spec, names, prefix, i, present))
        if spec.per_layer:
            layers[-1] |= _per_layer(spec, names, root, i)
        if spec.shares(i):  # files may hold what nobody reads
            foreign += [f"{prefix}{names.modules[f]}." for f in ("k", "v", "k_norm", "v_norm")]
        several.append(_heads(spec, names, prefix, present))
        if spec.sparse(i):
            several[-1] |= _experts(spec, names, prefix)
    return Layout(top, layers, several, foreign=tuple(foreign))


def _part(names: Names, where: tuple[str, str], shape: tuple[int, ...], times: float = 1.0) -> Part:
    """The whole tensor of a field. where: prefix, field."""
    prefix, field = where
    plus = names.norm_plus if field.endswith("norm") else 0.0
    return Part(prefix + names.tensor(field), shape, plus=plus, times=times)


def _layer(
    spec: ModelSpec, names: Names, prefix: str, layer: int, present: Callable[[str], bool]
) -> Parts:
    shapes = shapes_of(spec, layer)
    plain = spec.latent is None
    for f in ("q", "k", "v", "o", "up", "down")[: 4 if spec.sparse(layer) else 6]:
        module = next((m for fs, m in names.fused.items() if f in fs.split()), names.modules[f])
        alone = plain and f in shapes and module != names.fused.get("gate up")
        if alone and present(f"{prefix}{module}.bias"):
            shapes[f"{f}_bias"] = shapes[f][:1]
    parts = {f: _part(names, (prefix, named(spec, layer, f)), shape) for f, shape in shapes.items()}
    if spec.latent is not None:
        if spec.latent.query:
            parts["q"] = _part(names, (prefix, "q_up"), shapes["q"])
        parts = _cut_queries(parts, spec, spec.latent)
    if spec.family.attn_gate and "q" in parts:  # each head has its queries, then its gate
        d, rows = spec.head_dim, 2 * spec.heads * spec.head_dim
        both = replace(parts["q"], shape=(rows, spec.dim))
        parts["q"] = replace(both, cut=(0, d, 2 * d))
        parts["attn_gate"] = replace(both, cut=(d, d, 2 * d))
    for fields, module in names.fused.items():
        for kind, ending in (("", ".weight"), ("_bias", ".bias")):
            together = [f + kind for f in fields.split() if f + kind in parts]
            if together:
                parts = fuse(parts, together, prefix + module + ending)
    if spec.linear is not None and spec.linear.factors[4] != 1 and "a" in parts:
        parts["a"] = replace(parts["a"], times=spec.linear.factors[4])
    if names.adapt is not None:
        parts = names.adapt(parts, spec, prefix)
    for f, part in parts.items():
        unit = ("q_norm", "k_norm") if spec.family.qk_norm == "unit" else ("v_norm",)
        if f in unit:
            parts[f] = Part("", part.shape)  # a norm without weights
        elif f.endswith("norm_bias") and not spec.family.norm_bias:
            parts[f] = Part("", part.shape, times=0.0)
        elif names.transposed and len(part.shape) == 2:
            parts[f] = replace(part, shape=part.shape[::-1], transposed=True)
    return parts


def _per_layer(spec: ModelSpec, names: Names, root: str, layer: int) -> Parts:
    """The rows of this layer of what makes its embeddings, and their norm. The sum of both parts of
    an embedding is divided by the root of 2."""
    size = spec.per_layer
    rows = spec.layers * size
    project = Part(
        root + names.tensor("layer_project"), (rows, spec.dim), (layer * size, size, rows)
    )
    norm = Part(root + names.tensor("layer_norm"), (size,), times=2**-0.5)
    return {"layer_project": project, "layer_norm": norm}


def fuse(parts: Parts, fields: list[str], name: str) -> Parts:
    """The parts with those fields as consecutive rows of one tensor."""
    rows = [parts[f].shape[0] for f in fields]
    shape = (sum(rows), *parts[fields[0]].shape[1:])
    starts = [sum(rows[:i]) for i in range(len(rows))]
    return parts | {
        f: Part(name, shape, (start, count, sum(rows)))
        for f, start, count in zip(fields, starts, rows, strict=True)
    }


def _cut_queries(parts: Parts, spec: ModelSpec, latent: LatentSpec) -> Parts:
    """Cut queries and keys of a latent KV: each head of the query tensor has first its plain rows
    and then the rotary ones; the key tensor has first all of the latent and then the rotary key."""
    head = latent.nope + latent.rotary
    both = latent.rank + latent.rotary
    queries = replace(parts["q"], shape=(spec.heads * head, parts["q"].shape[1]))
    keys = replace(parts["k"], shape=(both, spec.dim))
    return parts | {
        "q": replace(queries, cut=(0, latent.nope, head)),
        "q_rope": replace(queries, cut=(latent.nope, latent.rotary, head)),
        "k": replace(keys, cut=(0, latent.rank, both)),
        "k_rope": replace(keys, cut=(latent.rank, latent.rotary, both)),
    }


def _heads(
    spec: ModelSpec, names: Names, prefix: str, present: Callable[[str], bool]
) -> dict[str, list[Part]]:
    """The rows of each head that make its keys and its values of the latent, or the norms that it
    has of its own."""
    latent, heads = spec.latent, range(spec.heads)
    if spec.family.qk_norm == "own":
        return {
            f"{f}_norms": _own_norms(prefix + names.tensor(f"{f}_norms"), count, spec.head_dim)
            for f, count in (("q", spec.heads), ("k", spec.kv_heads))
        }
    if latent is None:
        return {}
    name = prefix + names.tensor("kv_up")
    if "k_up" in names.modules and not present(name):
        shapes = {"k_up": (latent.rank, latent.nope), "v_up": (latent.value, latent.rank)}
        return {
            f: [Part(prefix + names.tensor(f), (spec.heads, *shape), index=i) for i in heads]
            for f, shape in shapes.items()
        }
    head = latent.nope + latent.value
    shape = (spec.heads * head, latent.rank)
    keys = [Part(name, shape, (head * i, latent.nope, shape[0]), turned=True) for i in heads]
    values = [Part(name, shape, (head * i + latent.nope, latent.value, shape[0])) for i in heads]
    return {"k_up": keys, "v_up": values}


def _own_norms(name: str, heads: int, head_dim: int) -> list[Part]:
    """The norms of heads, each in a tensor or all in one."""
    if "{}" in name:
        return [Part(name.format(i), (head_dim,)) for i in range(heads)]
    return [Part(name, (heads, head_dim), index=i) for i in range(heads)]


def _experts(spec: ModelSpec, names: Names, prefix: str) -> dict[str, list[Part]]:
    e = spec.experts
    assert e is not None
    router: dict[str, tuple[int, ...]] = {"router": (e.count, spec.dim)}
    if e.biased:
        router["choice_bias"] = (e.count,)
    if e.switched:
        router["shared_switch"] = (1, spec.dim)
    if e.normed:
        router |= dict.fromkeys(("experts_norm", "inner_norm", "experts_post_norm"), (spec.dim,))
        router |= {"router_norm": (spec.dim,), "out_scales": (e.count,)}
    inward, outward = (e.ffn, spec.dim), (spec.dim, e.ffn)
    shapes: dict[str, tuple[int, ...]] = {"gates": inward, "ups": inward, "downs": outward}
    if not spec.family.gated:
        del shapes["gates"]
    if spec.family.expert_bias:
        router["router_bias"] = (e.count,)
        shapes |= {"gate_biases": (e.ffn,), "up_biases": (e.ffn,), "down_biases": (spec.dim,)}
    parts = {f: [_part(names, (prefix, f), shape)] for f, shape in router.items()}
    if e.normed:
        by, times = prefix + names.tensor("router_scale"), spec.dim**-0.5
        parts["router"] = [replace(parts["router"][0], by=by, times=times)]
        parts["router_norm"] = [Part("", (spec.dim,))]
    for f, shape in shapes.items():
        name, cut, matrix = prefix + names.tensor(f), None, len(shape) == 2
        if not names.stacked:
            parts[f] = [Part(name.format(i), shape) for i in range(e.count)]
            continue
        if names.stacked != "rows" and not f.startswith("down"):
            second = int(f.startswith("up"))
            shape = (2 * e.ffn, *shape[1:])
            cut = (second * e.ffn, e.ffn, 2 * e.ffn)
            if names.stacked == "pairs":
                cut = (second, 1, 2)
        transposed = matrix and names.stacked in ("halves", "pairs")
        whole = (e.count, *(shape[::-1] if transposed else shape))
        part = Part(name, whole, cut, transposed, bare=e.normed and f == "downs")  # see out_scales
        parts[f] = [replace(part, index=i) for i in range(e.count)]
    return parts


def named(spec: ModelSpec, layer: int, field: str) -> str:
    """The field by which a table has it: the MLP of a layer with experts is their shared one, and
    the last product of a recurrent layer has a name of its own."""
    if field == "o" and spec.linear is not None and not spec.attends(layer):
        return "linear_o"
    shared = spec.sparse(layer) and field in ("gate", "up", "down")
    return f"shared_{field}" if shared else field


# -- GGUF ------------------------------------------------------------------------------------------


def gguf_layout(spec: ModelSpec, present: Callable[[str], bool]) -> Layout:
    """The layout of a file by llama.cpp's converter; `present` as in `layout_of`."""
    names = names_of("gguf", spec.arch)
    modules = dict(names.modules)
    if present("blk.0.attn_q.weight"):  # files of Phi-2 have them together or not
        fused = {fields: name for fields, name in names.fused.items() if fields != "q k v"}
        names = replace(names, fused=fused)
    joined = "ffn_gate_up_exps.weight"
    if spec.experts is not None and present(f"blk.{min(spec.experts.layers)}.{joined}"):
        modules |= {"gates": joined, "ups": joined, "downs": "ffn_down_exps.weight"}
        names = replace(names, stacked="joined")
    if spec.arch == "qwen3next":
        qkvz = "ssm_in" if present("blk.0.ssm_in.weight") else ""
        names = replace(names, adapt=partial(by_key_head, qkvz, "ssm_ba"))
    if spec.linear is not None and spec.linear.kind == "mamba":
        names = replace(names, adapt=partial(_in_rows, present("blk.0.ffn_norm")))
    if modules["norm"] == "token_embd_norm" and not present("token_embd_norm.weight"):
        modules["norm"] = "output_norm"
    layout = layout_of(spec, replace(names, modules=modules), present)
    for parts in layout.layers:
        if "out_scale" in parts and not present(parts["out_scale"].name):
            parts["out_scale"] = Part("", (1,))
    if spec.experts is not None or spec.linear is not None:
        layout = replace(layout, foreign=layout.foreign + second_token_layers("blk.", spec))
    return layout


def _in_rows(bare: bool, parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    """The numbers of Mamba2's heads and groups, each of which is a row. bare: the norm before the
    MLP has no ending (Falcon-H1)."""
    linear = spec.linear
    if bare:
        parts["mlp_norm"] = replace(parts["mlp_norm"], name=f"{prefix}ffn_norm")
    if linear is not None and "conv" in parts:
        rows = {"decay": linear.value_heads, "skip": linear.value_heads}
        rows["head_scale"] = linear.key_heads
        for f in rows.keys() & parts.keys():
            shape = (rows[f], parts[f].shape[0] // rows[f])
            parts[f] = replace(parts[f], shape=shape)
    return parts


def by_key_head(qkvz: str, ba: str, parts: Parts, spec: ModelSpec, prefix: str) -> Parts:
    """The parts of a gated delta net whose tensors have, for each key head, first its queries, its
    key, its values and their gates, and in another its bs and as (Qwen3-Next). qkvz: the module of
    the first, "" if these are not in one."""
    linear = spec.linear
    if linear is None or "conv" not in parts:
        return parts
    several, d = linear.value_heads // linear.key_heads, linear.key_dim
    values = several * linear.value_dim
    whole = Part(f"{prefix}{ba}.weight", (2 * linear.value_heads, spec.dim))
    parts["b"] = replace(whole, cut=(0, several, 2 * several))
    parts["a"] = replace(whole, cut=(several, several, 2 * several))
    if qkvz:
        rows = 2 * (d + values)
        whole = Part(f"{prefix}{qkvz}.weight", (linear.key_heads * rows, spec.dim))
        del parts["qkv"]
        parts["queries"] = replace(whole, cut=(0, d, rows))
        parts["keys"] = replace(whole, cut=(d, d, rows))
        parts["values"] = replace(whole, cut=(2 * d, values, rows))
        parts["z"] = replace(whole, cut=(2 * d + values, values, rows))
    return parts


def second_token_layers(prefix: str, spec: ModelSpec) -> tuple[str, ...]:
    """The beginnings of names of layers behind the last, which predict a second token."""
    return tuple(f"{prefix}{spec.layers + i}." for i in range(3))
