"""The check that a draft model goes with a target, and how much less it computes.

Owns what two models must share. Must not load any weights, nor know how drafts are made.
"""

from __future__ import annotations

from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault, bad_setting
from pageturner.formats.tokenizer import Tokenizer
from pageturner.models.spec import ModelSpec


def check_speculation(config: EngineConfig) -> None:
    """EngineFault unless a draft model is named where one is wanted, and only there."""
    if (config.speculation == "draft") != bool(config.draft_model):
        raise bad_setting("--speculation draft and --draft-model MODEL go together")


def check_draft(spec: ModelSpec) -> None:
    """EngineFault for a draft model whose drafts could not be taken back."""
    if spec.linear is not None:
        raise EngineFault(
            "draft_model",
            "a model with recurrent layers cannot be a draft model yet: use another one",
        )


def check_tokens(target: Tokenizer, draft: Tokenizer, path: str) -> None:
    """EngineFault('draft_model') unless a token means the same to both. One of the two may have
    padding behind the tokens of the other."""
    common = min(target.vocab_size, draft.vocab_size)
    problem = ""
    differs = (i for i in range(common) if target.token_bytes(i) != draft.token_bytes(i))
    special = sorted(i for i in target.special_ids ^ draft.special_ids if i < common)
    if (first := next(differs, None)) is not None:
        one, other = target.token_bytes(first), draft.token_bytes(first)
        problem = f"token {first} is {one!r} to the model and {other!r} to the draft model"
    elif special:
        problem = f"token {special[0]} is a control token to one of them and text to the other"
    if problem:
        raise EngineFault(
            "draft_model",
            f"{path} cannot draft for this model, whose tokenizer is another one: {problem};"
            " use a smaller model of the same family",
        )


def cost_of(draft: ModelSpec, target: ModelSpec) -> float:
    """Time of a step of the draft model over that of the target, by what both multiply."""
    return _products(draft) / _products(target)


def _products(spec: ModelSpec) -> int:
    """Multiplications for one token, attention itself left out."""
    matrices = 3 if spec.family.gated else 2
    total = spec.dim * spec.vocab
    for layer in range(spec.layers):
        inner = spec.inner(layer)
        if spec.experts is not None and spec.sparse(layer):
            inner += spec.experts.ffn * spec.experts.top_k
        total += spec.attention_weights(layer) + matrices * spec.dim * inner
    return total
