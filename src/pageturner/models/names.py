"""Where each weight of a model lies in its file: tensor names, their shapes, and how fused ones are cut.

Owns what weights a model has, and their names in GGUF, as tables; those of Hugging Face folders are in
hf_names.py. Must not know backends or what layers compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pageturner.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Part:
    """A weight, or some rows of one. A row is one output; of a vector, one element.

    name, shape  the tensor in the file; no name: there is none, and all of it are ones
    index        of several behind each other in a tensor, the one with this index
    cut          (start, count, stride): rows start..start+count-1 of every `stride` rows; None: all
    transposed   the file has inputs first (GPT-2's Conv1D); turned before it is cut
    turned       the same, behind the cut; a quantised one becomes fp32
    plus, times  of each element of a vector (Gemma's norms are stored as what they add to 1)
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[int, int, int] | None = None
    transposed: bool = False
    plus: float = 0.0
    times: float = 1.0
    index: int | None = None
    turned: bool = False


Parts = dict[str, Part]


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of a model: those outside of the layers by name, those of each layer by field of
    `kernels.base.Layer`, "sinks", or by "q_rope", "k_rope" and "latent_norm" of its `Latent`; of experts
    "router", "gates", "ups", "downs" and their biases, by field and expert, and of a latent KV "k_up" and
    "v_up", by field and head.

    ignored  endings of names that carry no weight
    foreign  beginnings of names of what is no part of the decoder
    """

    top: Parts
    layers: list[Parts]
    experts: list[dict[str, list[Part]]] = field(default_factory=list)
    ignored: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    heads: list[dict[str, list[Part]]] = field(default_factory=list)

    def several(self, layer: int) -> dict[str, list[Part]]:
        """The parts of a layer that there are several of, by field."""
        return self.experts[layer] | (self.heads[layer] if self.heads else {})

    def all(self) -> list[Part]:
        """Every part."""
        listed = [self.several(i) for i in range(len(self.experts))]
        several = [part for each in listed for parts in each.values() for part in parts]
        single = [part for layer in self.layers for part in layer.values() if part.name]
        return [*self.top.values(), *single, *several]


def shapes_of(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    """Field of `Layer` -> shape with the outputs first, of everything that this layer has."""
    f, vector = spec.family, (spec.dim,)
    shapes: dict[str, tuple[int, ...]] = _attention_shapes(spec, layer)
    if f.pre_norms:
        shapes |= {"attn_norm": vector, "mlp_norm": vector}
    if f.layer_norm:
        shapes |= {"attn_norm_bias": vector, "mlp_norm_bias": vector}
    if f.o_bias:
        shapes["o_bias"] = vector
    if f.post_norms:
        shapes |= {"attn_post_norm": vector, "mlp_post_norm": vector}
    inner = spec.ffn
    if spec.experts is not None and spec.sparse(layer):
        inner = spec.experts.shared
    if not inner:
        return shapes
    if f.gated:
        shapes["gate"] = (inner, spec.dim)
    shapes |= {"up": (inner, spec.dim), "down": (spec.dim, inner)}
    if f.mlp_bias:
        shapes |= {"up_bias": (inner,), "down_bias": vector}
    return shapes


def _attention_shapes(spec: ModelSpec, layer: int) -> dict[str, tuple[int, ...]]:
    f, dim, heads, latent = spec.family, spec.dim, spec.heads, spec.latent
    if latent is not None:
        return {
            "q": (heads * latent.nope, dim),
            "q_rope": (heads * latent.rotary, dim),
            "k": (latent.rank, dim),
            "k_rope": (latent.rotary, dim),
            "latent_norm": (latent.rank,),
            "o": (dim, heads * latent.value),
        }
    q, kv, head = heads * spec.head_dim, spec.kv_heads * spec.head_dim, (spec.head_dim,)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (q, dim),
        "k": (kv, dim),
        "v": (kv, dim),
        "o": (dim, q),
    }
    if f.qk_norm == "wide":
        shapes |= {"q_norm": (q,), "k_norm": (kv,)}
    elif f.qk_norm == "head" or (f.qk_norm == "unit" and layer not in spec.no_rope):
        shapes |= {"q_norm": head, "k_norm": head}
    if f.qkv_bias:
        shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if f.sinks:
        shapes["sinks"] = (heads,)
    return shapes


def without_weights(spec: ModelSpec, parts: Parts) -> Parts:
    """The parts, of which norms without weights have no tensor."""
    if spec.family.qk_norm != "unit":
        return parts
    return {
        f: Part("", part.shape) if f in ("q_norm", "k_norm") else part for f, part in parts.items()
    }


def scaled_logits(spec: ModelSpec, top: Parts) -> Parts:
    """The final norm scaled as the logits are: they are a product with what it gives."""
    if spec.logit_scale == 1:
        return top
    fields = ("norm", "norm_bias")
    return {
        f: replace(part, times=spec.logit_scale) if f in fields else part for f, part in top.items()
    }


def top_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab, spec.dim), "norm": (spec.dim,)}
    if spec.family.layer_norm:
        shapes["norm_bias"] = (spec.dim,)
    if spec.family.embed_norm:
        shapes |= {"embed_norm": (spec.dim,), "embed_norm_bias": (spec.dim,)}
    if spec.family.positions == "learned":
        shapes["positions"] = (spec.context, spec.dim)
    if not spec.tied:
        shapes["head"] = (spec.vocab, spec.dim)
    return shapes


def cut_queries(parts: Parts, spec: ModelSpec, q: str, kv: str) -> Parts:
    """With a latent KV: of each head of `q` first the plain rows and then the rotary ones; of `kv` all of the
    latent and then the rotary key."""
    latent = spec.latent
    if latent is None:
        return parts
    head, both = latent.nope + latent.rotary, latent.rank + latent.rotary
    queries, keys = (spec.heads * head, spec.dim), (both, spec.dim)
    return parts | {
        "q": Part(q, queries, (0, latent.nope, head)),
        "q_rope": Part(q, queries, (latent.nope, latent.rotary, head)),
        "k": Part(kv, keys, (0, latent.rank, both)),
        "k_rope": Part(kv, keys, (latent.rank, latent.rotary, both)),
    }


def fuse(parts: Parts, fields: tuple[str, ...], name: str) -> Parts:
    """The parts with those fields that are there as consecutive rows of one tensor."""
    rows = [parts[f].shape[0] for f in fields]
    shape = (sum(rows), *parts[fields[0]].shape[1:])
    starts = [sum(rows[:i]) for i in range(len(rows))]
    fused = {
        f: Part(name, shape, (start, count, sum(rows)))
        for f, start, count in zip(fields, starts, rows, strict=True)
    }
    return parts | fused


# -- GGUF ----------------------------------------------------------------------------------------------------

_GGUF = {
    "attn_norm": "attn_norm.weight",
    "attn_norm_bias": "attn_norm.bias",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_norm_bias": "ffn_norm.bias",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "router": "ffn_gate_inp.weight",
    "router_bias": "ffn_gate_inp.bias",
    "gates": "ffn_gate_exps.weight",
    "ups": "ffn_up_exps.weight",
    "downs": "ffn_down_exps.weight",
    "gate_biases": "ffn_gate_exps.bias",
    "up_biases": "ffn_up_exps.bias",
    "down_biases": "ffn_down_exps.bias",
    "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
    "sinks": "attn_sinks.weight",
    "latent_norm": "attn_kv_a_norm.weight",
    "q_rope": "",
    "k_rope": "",
}
# Architectures that call a tensor otherwise.
_GGUF_OWN = {"gpt-oss": {"mlp_norm": "post_attention_norm.weight"}}
_GGUF_TOP = {
    "embed": "token_embd.weight",
    "positions": "position_embd.weight",
    "norm": "output_norm.weight",
    "norm_bias": "output_norm.bias",
    "embed_norm": "token_embd_norm.weight",
    "embed_norm_bias": "token_embd_norm.bias",
    "head": "output.weight",
}


def gguf_layout(spec: ModelSpec, present: Callable[[str], bool]) -> Layout:
    """Where llama.cpp's converter puts the weights. `present` tells whether a tensor is there: older files
    have what makes keys and values of a latent KV in one."""
    top = {f: Part(_GGUF_TOP[f], shape) for f, shape in top_shapes(spec).items()}
    table = _GGUF | _GGUF_OWN.get(spec.arch, {})
    layers, experts = [], []
    for i in range(spec.layers):
        prefix, shapes = f"blk.{i}.", shapes_of(spec, i)
        parts = {f: Part(prefix + table[named(spec, i, f)], shape) for f, shape in shapes.items()}
        parts = cut_queries(parts, spec, prefix + _GGUF["q"], prefix + "attn_kv_a_mqa.weight")
        if spec.arch in ("gpt2", "bloom", "phi3"):
            parts = fuse(parts, ("q", "k", "v"), f"blk.{i}.attn_qkv.weight")
        if spec.arch in ("gpt2", "bloom"):
            parts = fuse(parts, ("q_bias", "k_bias", "v_bias"), f"blk.{i}.attn_qkv.bias")
        if spec.arch in ("phi3", "glm4"):
            parts = fuse(parts, ("gate", "up"), f"blk.{i}.ffn_up.weight")
        layers.append(without_weights(spec, parts))
        experts.append(_gguf_experts(spec, i))
    names = [f"blk.{i}.attn_kv_b.weight" for i in range(spec.layers)]
    heads = [
        fused_heads(spec, n) if present(n) else _gguf_heads(spec, i) for i, n in enumerate(names)
    ]
    return Layout(scaled_logits(spec, top), layers, experts, heads=heads)


def named(spec: ModelSpec, layer: int, field: str) -> str:
    """The field by which a table has it: the MLP of a layer with experts is their shared one."""
    shared = spec.sparse(layer) and field in ("gate", "up", "down")
    return f"shared_{field}" if shared else field


def fused_heads(spec: ModelSpec, name: str) -> dict[str, list[Part]]:
    """Of each head the rows of one tensor that make its keys of the latent, and behind them its values'."""
    latent = spec.latent
    if latent is None:
        return {}
    head = latent.nope + latent.value
    whole = spec.heads * head
    shape = (whole, latent.rank)
    return {
        "k_up": [
            Part(name, shape, (head * i, latent.nope, whole), turned=True)
            for i in range(spec.heads)
        ],
        "v_up": [
            Part(name, shape, (head * i + latent.nope, latent.value, whole))
            for i in range(spec.heads)
        ],
    }


def _gguf_heads(spec: ModelSpec, layer: int) -> dict[str, list[Part]]:
    latent, heads = spec.latent, spec.heads
    if latent is None:
        return {}

    def each(name: str, rows: int, columns: int) -> list[Part]:
        shape, whole = (heads, rows, columns), heads * rows
        return [Part(f"blk.{layer}.{name}", shape, (rows * i, rows, whole)) for i in range(heads)]

    return {
        "k_up": each("attn_k_b.weight", latent.rank, latent.nope),
        "v_up": each("attn_v_b.weight", latent.value, latent.rank),
    }


def _gguf_experts(spec: ModelSpec, layer: int) -> dict[str, list[Part]]:
    """All experts of a kind lie in one tensor of three dimensions, one behind the other."""
    e = spec.experts
    if e is None or not spec.sparse(layer):
        return {}

    def stacked(field: str, rows: int, columns: int) -> list[Part]:
        name, all_rows = f"blk.{layer}.{_GGUF[field]}", e.count * rows
        shape = (e.count, rows, columns)
        return [Part(name, shape, (rows * i, rows, all_rows)) for i in range(e.count)]

    def biases(field: str, rows: int) -> list[Part]:
        name = f"blk.{layer}.{_GGUF[field]}"
        return [Part(name, (e.count, rows), index=i) for i in range(e.count)]

    own = {}
    if spec.family.expert_bias:
        own = {
            "router_bias": [Part(f"blk.{layer}.{_GGUF['router_bias']}", (e.count,))],
            "gate_biases": biases("gate_biases", e.ffn),
            "up_biases": biases("up_biases", e.ffn),
            "down_biases": biases("down_biases", spec.dim),
        }
    return own | {
        "router": [Part(f"blk.{layer}.{_GGUF['router']}", (e.count, spec.dim))],
        "gates": stacked("gates", e.ffn, spec.dim),
        "ups": stacked("ups", e.ffn, spec.dim),
        "downs": stacked("downs", spec.dim, e.ffn),
    }
