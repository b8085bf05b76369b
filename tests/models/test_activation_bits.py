"""How many bits the activations of a product have."""

from __future__ import annotations

import pytest

from pageturner.kernels.reference import Quantised, ReferenceOps
from pageturner.models.load import open_model
from pageturner.models.weights import LoadOptions, Weights, load_weights
from support.smollm2 import GOLDENS

MATRICES = {"q", "k", "v", "o", "gate", "up", "down"}


class WithoutTwelve(ReferenceOps):
    """A backend for which more bits than 8 cost as much again."""

    def default_activation_bits(self, kind: str) -> int:
        return 8


def loaded(model: str, bits: str, ops: ReferenceOps | None = None) -> Weights:
    options = LoadOptions(max_positions=64, activation_bits=bits)
    return load_weights(open_model(GOLDENS / f"{model}.gguf"), ops or ReferenceOps(), options)


def bits_of(weights: Weights) -> set[int]:
    """Of the activations of every quantised matrix."""
    found = {weights.head.bits, weights.embed.bits}
    for layer in weights.layers:
        parts = [getattr(layer, name) for name in MATRICES]
        if layer.experts is not None:
            parts += [*layer.experts.gate, *layer.experts.up, *layer.experts.down]
        found |= {part.bits for part in parts if isinstance(part, Quantised)}
    return found


@pytest.mark.parametrize("model", ["tiny_llama_quant", "experts_mixtral_quant"])
@pytest.mark.parametrize(("bits", "expected"), [("8", 8), ("12", 12), ("15", 15), ("auto", 12)])
def test_all_matrices_have_them(model: str, bits: str, expected: int) -> None:
    assert bits_of(loaded(model, bits)) == {expected}


def test_where_they_are_dear_keys_values_the_last_mlp_and_the_head_have_more() -> None:
    weights = loaded("tiny_llama_quant", "auto", WithoutTwelve())
    found = [
        {
            name
            for name in MATRICES
            if isinstance(w := getattr(layer, name), Quantised) and w.bits == 15
        }
        for layer in weights.layers
    ]
    assert found[0] == {"k", "v"}
    assert found[-1] == {"k", "v", "gate", "up", "down"}
    assert weights.head.bits == 15
    assert weights.layers[0].q.bits == 8
    experts = [
        layer.experts for layer in loaded("experts_mixtral_quant", "auto", WithoutTwelve()).layers
    ]
    assert [{w.bits for w in each.gate} for each in experts if each] == [{8}] * (
        len(experts) - 1
    ) + [{15}]


class Widened(ReferenceOps):
    """A backend that multiplies weights of 8 bits as 16."""

    def default_activation_bits(self, kind: str) -> int:
        return 15 if kind == "Q8_0" else 8


def test_weights_of_eight_bits_have_more_where_these_are_free() -> None:
    """The first layer is of 4 bits, the second of 8."""
    first, second = loaded("tiny_llama_quant", "auto", Widened()).layers
    assert [getattr(first, name).bits for name in ("q", "k", "gate")] == [8, 15, 8]
    assert [getattr(second, name).bits for name in ("q", "k", "o", "gate")] == [15, 15, 15, 15]
