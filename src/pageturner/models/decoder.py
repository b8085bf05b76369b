"""The decoder, written once for all models: a spec, packed weights, and a backend to compute with.

Owns what is handed to the backend (the order of the operations is in kernels/composites.py). Must
not know what a backend's arrays are, nor requests, files or policies.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pageturner.kernels.adapters import Adapter, Adapters, AdapterWeights, of_rows
from pageturner.kernels.base import F32, KV, Array, Batch, KVSpec, Ops, Stack
from pageturner.kernels.choosing import ChooseArgs, Head, SamplerOutput
from pageturner.models.spec import ModelSpec, unsupported
from pageturner.models.weights import Weights


class Decoder:
    """A transformer decoder.

    head      what makes logits of hidden rows, which `stack` makes
    mtp       the head that predicts a second token, where it was loaded
    shard     which slice of the model its weights are; None: all of it
    adapters  those that may be in a step, by name: put there and taken away by whoever loads them
    """

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        self.spec = spec
        self._ops = ops
        self.stack = Stack(
            weights.embed,
            weights.layers,
            spec.eps,
            spec.embed_scale,
            weights.positions,
            weights.embed_norm,
            weights.embed_norm_bias,
            weights.shard.first_token if weights.shard else 0,
            spec.vocab,
        )
        ops.prepare_stack(self.stack)
        cap = spec.logit_soft_cap
        self.head = Head(
            weights.norm, spec.eps, weights.head, weights.norm_bias, cap, weights.head_bias
        )
        self.mtp = weights.mtp
        self.sizes = weights.sizes
        self.shard = weights.shard
        self.adapters: dict[str, Adapter] = {}
        # layers with KV that see only the last `window` positions
        own = weights.windows[: spec.layers - spec.sharing]
        self.windowed = sum(window > 0 for window in own)
        self.window = max(weights.windows)
        self._inner = weights.inner

    def kv_spec(self, blocks: int, block_size: int, dtype: str) -> KVSpec:
        """The KV storage of `blocks` blocks of `block_size` tokens, that of all ranks together."""
        whole = self.spec.kv_spec(blocks, block_size, dtype, self._ops.gpu_kv)
        return whole if self.shard is None else replace(whole, kv_heads=self.shard.kv_heads)

    def kv_specs(
        self, blocks: int, sliding: int, block_size: int, dtype: str
    ) -> tuple[KVSpec, KVSpec]:
        """The same in two: `blocks` blocks of the layers that see everything, which may be none,
        and `sliding` blocks of the windowed ones."""
        whole, windowed = self.kv_spec(blocks, block_size, dtype).split(self.windowed)
        return whole, replace(windowed, blocks=sliding)

    def forward(self, batch: Batch, kv: KV) -> F32:
        """One step: writes K and V of every row, returns the logits [R, vocab] of the wanted rows,
        which are valid until the next step."""
        each = of_rows(batch.adapters, batch.query_start)
        return self.logits(self.hidden(batch, kv), each and [each[row] for row in batch.logit_rows])

    def adapters_of(self, names: list[str]) -> Adapters | None:
        """The adapters of these names, None for ""; in place of a list of nothing else None."""
        return [self.adapters[name] if name else None for name in names] if any(names) else None

    def pack_adapter(self, weights: AdapterWeights) -> Adapter:
        """The adapter for this decoder, as its backend wants it. EngineFault: it computes none."""
        if self.spec.composed:
            raise unsupported(
                f"this model has {self.spec.composed}, beside which no adapter works yet"
            )
        return self._ops.pack_adapter(weights.of_neurons(self._inner), self.stack)

    def hidden(self, batch: Batch, kv: KV, sliding: tuple[Batch, KV] | None = None) -> Array:
        """The first part of `forward`: the wanted rows [R, d] before the final norm.

        sliding  of the windowed layers, where these have block tables and storage of their own
                 (`kv_specs`)
        """
        return self._ops.hidden(self.stack, batch, kv, sliding)

    def logits(self, hidden: Array, adapters: Adapters | None = None) -> F32:
        """The second part: logits [R, vocab] of some rows [R, d], valid until the next call."""
        if not len(hidden):
            return np.empty((0, self.spec.vocab), np.float32)
        return self._ops.logits(hidden, self.head, adapters)

    def normed(self, hidden: Array) -> F32:
        """Rows [R, d] behind the final norm, which is what the head sees: fp32."""
        head = self.head
        if head.norm_bias is not None:
            rows = self._ops.layer_norm(hidden, head.norm, head.norm_bias, head.eps)
            return self._ops.to_numpy(rows)
        normed = self._ops.to_numpy(self._ops.norm(hidden, head.norm, head.eps))
        scale = self.spec.logit_scale  # the head's norm has it
        return normed if scale == 1 else normed / np.float32(scale)

    def choose(self, hidden: Array, args: ChooseArgs) -> SamplerOutput:
        """Choose a token for each row [R, d], with the wanted logprobs (`Ops.choose`)."""
        return self._ops.choose(hidden, self.head, args)
