"""Which products take their activations in two int8 terms."""

from __future__ import annotations

import pytest

from pageturner.kernels.reference import Quantised, ReferenceOps
from pageturner.models.load import open_model
from pageturner.models.weights import Weights, load_weights
from support.smollm2 import GOLDENS

MATRICES = {"q", "k", "v", "o", "gate", "up", "down"}


def loaded(model: str, bits: str) -> Weights:
    file, spec, layout = open_model(GOLDENS / f"{model}.gguf")
    return load_weights(file, spec, layout, ReferenceOps(), dtype="auto", positions=64, activation_bits=bits)


def two_terms(weights: Weights) -> list[set[str]]:
    """Fields of each layer whose matrix has them."""
    found = []
    for layer in weights.layers:
        fields = {name: getattr(layer, name) for name in MATRICES}
        found.append({name for name, w in fields.items() if isinstance(w, Quantised) and w.fine})
    return found


def test_auto_spends_them_on_keys_values_the_last_mlp_and_the_head() -> None:
    weights = loaded("tiny_llama_quant", "auto")
    *layers, last = two_terms(weights)
    assert layers
    assert all(fields == {"k", "v"} for fields in layers)
    assert last == {"k", "v", "gate", "up", "down"}
    assert weights.head.fine
    assert weights.embed.fine


@pytest.mark.parametrize(("bits", "expected"), [("8", set()), ("15", MATRICES)])
def test_all_or_none(bits: str, expected: set[str]) -> None:
    weights = loaded("tiny_llama_quant", bits)
    assert all(fields == expected for fields in two_terms(weights))
    assert weights.head.fine == bool(expected)


def test_the_last_experts_are_the_last_mlp() -> None:
    layers = loaded("experts_mixtral_quant", "auto").layers
    for layer in layers:
        assert layer.experts is not None
        routed = (*layer.experts.gate, *layer.experts.up, *layer.experts.down)
        assert [w.fine for w in routed] == [layer is layers[-1]] * len(routed)
