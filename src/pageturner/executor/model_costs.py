"""The costs of the steps of a loaded model: operations and bytes, by its weights as they are
packed.

Owns the way from weights and KV types to telemetry/work.py. Must not know what is done with the
figures.
"""

from __future__ import annotations

from pageturner.models.decoder import Decoder
from pageturner.telemetry.work import ModelCosts


def model_costs(decoder: Decoder, kv_dtype: str) -> ModelCosts:
    """Layers with a sliding window count as such where sequences can be longer than the window."""
    spec, sizes = decoder.spec, decoder.sizes
    layers, ending, experts, last = (
        sizes[name] for name in ("layers", "ending", "experts", "last_experts")
    )
    chosen = spec.experts.top_k / spec.experts.count if spec.experts else 1.0
    # query times key, weight times value; layers that share KV read it as others do
    kinds = decoder.kv_spec(1, 1, kv_dtype).split(decoder.windowed)
    sliding = len(spec.windowed) if decoder.windowed else 0
    counts = (sum(spec.attends(i) for i in range(spec.layers)) - sliding, sliding)
    pairs = [4.0 * spec.heads * kind.head_dim for kind in kinds]
    positions = [kind.bytes_per_token / max(kind.layers, 1) for kind in kinds]
    return ModelCosts(
        int8=2.0 * (layers.int8 + chosen * experts.int8),
        fp32=2.0 * (layers.fp32 + chosen * experts.fp32),
        layers=layers.nbytes,
        ending_int8=2.0 * (ending.int8 + chosen * last.int8),
        ending_fp32=2.0 * (ending.fp32 + chosen * last.fp32),
        ending=ending.nbytes,
        pair=pairs[0] * counts[0],
        position=positions[0] * counts[0],
        experts=experts.nbytes + last.nbytes,
        chosen=chosen,
        recent_pair=pairs[1] * sliding,
        recent_position=positions[1] * sliding,
        window=decoder.window if sliding else 0,
    )
