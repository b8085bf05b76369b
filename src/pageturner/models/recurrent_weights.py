"""The recurrent part of a layer, of its packed matrices and of its numbers.

Owns what a file says of recurrent layers and how kernels want it. Must not know files or backends.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pageturner.kernels.base import F32, Weight
from pageturner.kernels.layer_parts import Linear
from pageturner.kernels.recurrent import Conv, GatedNorm, Rates, StateRule
from pageturner.models.spec import LinearSpec, ModelSpec

NUMBERS = ("conv", "conv_bias", "decay", "dt_bias", "skip", "head_scale")
EXACT = ("a", "b")  # matrices in fp32: a recurrence multiplies their errors
MATRICES = ("qkv", "queries", "keys", "values", "z", "a", "b", "gate_in", "linear_o")


def linear_part(
    spec: ModelSpec, packed: dict[str, Weight], numbers: Callable[[str], F32], layer: int
) -> Linear:
    """The recurrent part of a layer; numbers: those of a field, fp32."""
    about = spec.linear
    assert about is not None
    conv = np.ascontiguousarray(numbers("conv").T)
    bias = numbers("conv_bias") if about.conv_bias else None
    number = sum(i < layer for i in about.layers)
    together = ("qkv",) if "qkv" in packed else ("queries", "keys", "values")
    products = tuple(packed[field] for field in together)
    if about.kind == "conv":
        short = Conv(conv, bias, silu=False)
        return Linear(products, packed["z"], short, number, gate_in=packed["gate_in"])
    decay = numbers("decay").reshape(-1)
    if about.log_decay:
        decay = -np.exp(decay)
    rule = StateRule(delta=True, tiled=about.tiled)
    norm: GatedNorm | None = GatedNorm(spec.eps, about.value_dim, gate_first=False, act=about.act)
    if about.kind == "mamba":
        conv = conv * _factors(about)
        rule = StateRule(delta=False, skip=numbers("skip").reshape(-1))
        group = about.values // about.key_heads
        norm = GatedNorm(spec.eps, group, about.norm == "before") if about.norm else None
    return Linear(
        products,
        packed["z"],
        Conv(conv, bias),
        number,
        packed["a"],
        packed.get("b"),
        out_norm=None if norm is None else numbers("head_scale").reshape(-1),
        rates=Rates(decay, numbers("dt_bias"), *about.limits),
        rule=rule,
        norm=norm,
        keys=about.keys,
        key_dim=about.key_dim,
        z_factor=about.factors[0],
        o=packed.get("linear_o"),
    )


def _factors(about: LinearSpec) -> F32:
    """The factor of each channel that goes into the convolution: x, B and C."""
    sizes = (about.values, about.keys, about.keys)
    return np.repeat(np.array(about.factors[1:4], np.float32), sizes)
