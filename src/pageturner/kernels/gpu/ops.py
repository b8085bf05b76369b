"""`Ops` on a GPU: the primitives as launches, and layers in fewer of them.

Owns the order of launches. Host arrays in the protocol are put on the device here; whatever is
`Array` stays there. Must not know how a device is driven, nor models or requests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kernels.adapters import Adapters, AdapterWeights
from pageturner.kernels.base import (
    F32,
    FEATURES,
    GPU_HEAD_MULTIPLE,
    I32,
    KV_TYPES,
    AttentionShape,
    Batch,
    KVSpec,
    Layer,
    Rope,
    Stack,
    Tensor,
)
from pageturner.kernels.choosing import ChoosesLater, Head
from pageturner.kernels.composites import Adapted, Composites
from pageturner.kernels.gpu.adapter_rows import AdaptedRows, GpuAdapter
from pageturner.kernels.gpu.adapters import GpuAdapters, has_head, place_of
from pageturner.kernels.gpu.arrays import Arena, GpuArray, padded
from pageturner.kernels.gpu.catalogue import DEPENDENT_BYTES, largest_head
from pageturner.kernels.gpu.driver import LATER, Driver
from pageturner.kernels.gpu.exchange import DeviceExchange
from pageturner.kernels.gpu.experts import GpuExperts, WeightTable, table_of
from pageturner.kernels.gpu.graphs import Graphs, Pages
from pageturner.kernels.gpu.launches import GpuKV, Latents, Launches
from pageturner.kernels.gpu.sampling import Chooser, StepChoice
from pageturner.kernels.gpu.steps import AttentionView, Room, Step, upload, view_of, views_of
from pageturner.kernels.gpu.weights import Matrix, Vector, join, pack
from pageturner.kernels.layer_parts import Latent
from pageturner.kernels.reference import ReferenceOps

_HOST = ReferenceOps()  # what is rare and small is done there


class GpuOps(Chooser, Composites):
    """`Ops` over a driver. Arrays are `GpuArray` in an arena that each `hidden` fills from its
    beginning; whoever calls primitives alone calls `begin` before each step. `Chooser` stands
    first: `Composites` has a `choose` too, and that one takes all logits to the host.

    workspace  bytes of that arena
    graphs     whether steps that only decode are recorded and replayed
    exchange   what sums over ranks, where weights are slices of a model; None: they are the whole
    """

    name = "cuda"
    gpu_kv = True

    def __init__(self, driver: Driver, workspace: int, graphs: bool = True) -> None:
        self.driver = driver
        self.arena = Arena(driver, workspace)
        self.launches = Launches(driver, self.arena)
        # before anything is recorded: what reads it has its address
        self.launches.chosen = driver.alloc(LATER)
        self.adapters = GpuAdapters(self.launches)
        self.graphs = Graphs(driver, self.arena) if graphs else None
        self.exchange: DeviceExchange | None = None
        self._heads: dict[int, tuple[tuple[Matrix, ...], WeightTable]] = {}  # by id
        # those of the last stack: asking each layer anew takes longer than a small kernel
        self._viewed: tuple[Stack | None, list[set[AttentionView]]] = None, []
        self.fingerprint = f"cuda-sm{driver.architecture}-{driver.fingerprint}"

    @property
    def features(self) -> frozenset[str]:
        return FEATURES

    @property
    def divided(self) -> bool:
        return self.exchange is not None

    @property
    def later(self) -> ChoosesLater:
        return self

    def graphs_of(self) -> Graphs:
        """Room for recordings, none made yet: for a KV that takes the place of another. Those that
        there were are given back."""
        if self.graphs is not None:
            self.graphs.release()
        return Graphs(self.driver, self.arena)

    def begin(self) -> None:
        """The arrays of the step before are gone."""
        self.arena.reset()
        self.adapters.begin()

    def free_memory(self) -> int:
        """Bytes of the device that are free."""
        return self.driver.memory()[0]

    def free_for_kv(self) -> int:
        """The same: all KV lies on this device."""
        return self.free_memory()

    # -- storage -----------------------------------------------------------------------------------
    def pack_weight(self, tensor: Tensor) -> Vector | Matrix:
        """Pack it on the device. EngineFault('gpu_memory') where it is full."""
        return pack(self.driver, tensor)

    def pack_adapter(self, weights: AdapterWeights, stack: Stack) -> GpuAdapter:
        """Pack it on the device, by any thread. ValueError where it does not fit the stack;
        MemoryError."""
        return self.adapters.pack(weights, stack)

    def alloc_kv(self, spec: KVSpec) -> GpuKV:
        """Zeroed KV storage. EngineFault('kv_memory') when the memory is not there."""
        if spec.dtype not in KV_TYPES:
            known = ", ".join(KV_TYPES)
            raise EngineFault(
                "kv_dtype", f"KV type {spec.dtype!r} is not supported; there are {known}"
            )
        spec = replace(spec, head_multiple=GPU_HEAD_MULTIPLE)
        if spec.head_dim > largest_head(spec.dtype, spec.latent):
            raise EngineFault(
                "gpu_model", f"heads of {spec.head_dim} elements in {spec.dtype} are too large"
            )
        heads = spec.blocks * spec.block_size * spec.kv_heads
        here = padded(heads * spec.stored_head * KV_TYPES[spec.dtype])
        scales = padded(4 * heads) if spec.dtype in ("int8", "fp8_e4m3") else 0
        addresses = []
        try:
            for nbytes in (here, here, scales, scales) if not spec.latent else (here, 0, scales, 0):
                addresses.append(self.driver.alloc(spec.layers * nbytes) if nbytes else 0)
                if nbytes:
                    self.driver.clear(addresses[-1], spec.layers * nbytes)
        except EngineFault as error:
            for address in filter(None, addresses):
                self.driver.free(address)
            message = f"no memory for a KV cache of {spec.nbytes:,} bytes; lower kv_cache_memory"
            raise EngineFault("kv_memory", f"{message} ({error.message})") from error
        k, v, k_scales, v_scales = addresses
        return GpuKV(spec, k, v, k_scales, v_scales, here, scales)

    def free_kv(self, kv: GpuKV) -> None:
        """Give its memory back; nothing may use it any more."""
        for address in filter(None, kv.at(0)):
            self.driver.free(address)

    def block_bytes(self, kv: GpuKV) -> int:
        """Return the bytes of one block, all layers."""
        return sum(place.nbytes * place.rows for place in kv.places(0))

    def read_blocks(self, kv: GpuKV, blocks: I32, out: NDArray[np.uint8]) -> None:
        """Their bytes, as `GpuKV.places` has them; waits for all steps that were begun."""
        self.driver.gather(out, [place for block in blocks.tolist() for place in kv.places(block)])

    def write_blocks(self, kv: GpuKV, blocks: I32, data: NDArray[np.uint8]) -> None:
        """Before all steps that are begun later; it does not wait for those that were."""
        self.driver.scatter(
            [place for block in blocks.tolist() for place in kv.places(block)], data
        )

    def copy_blocks(self, kv: GpuKV, pairs: list[tuple[int, int]]) -> None:
        """Whole blocks (source, destination) in every layer, in order."""
        for source, destination in pairs:
            for here, there in zip(kv.places(source), kv.places(destination), strict=True):
                self.driver.copy(there.address, here.address, here.nbytes, here.rows, here.pitch)

    # -- between host and device -------------------------------------------------------------------
    def on_device(self, values: Any) -> GpuArray:
        """An array of numpy's in int32 or fp32, copied; one that is there already as it is."""
        if isinstance(values, GpuArray):
            return values
        kind, dtype = (
            ("fp32", np.float32) if np.asarray(values).dtype.kind == "f" else ("i32", np.int32)
        )
        values = np.ascontiguousarray(values, dtype)
        array = self.arena.take(values.shape, kind)
        if values.size:
            self.driver.upload(array.address, values)
        return array

    def to_numpy(self, x: GpuArray) -> F32:
        """A copy on the host; waits for the device."""
        out = np.empty(x.shape, np.float32)
        if out.size:
            self.driver.download(out, x.address)
        return out

    # -- primitives --------------------------------------------------------------------------------
    def embed(self, table: Matrix, tokens: Any) -> GpuArray:
        return self.launches.embed(table, self.on_device(tokens))

    def embed_tokens(self, stack: Stack, tokens: Any) -> GpuArray:
        return self.summed(
            self.launches.embed(stack.embed, self.on_device(tokens), stack.first_token)
        )

    def summed(self, x: GpuArray, residual: GpuArray | None = None) -> GpuArray:
        """residual + the sum of x over ranks."""
        if self.exchange is not None:
            return self.exchange.sum(x, residual)
        return x if residual is None else self.add(residual, x)

    def norm(self, x: GpuArray, weight: Vector, eps: float) -> GpuArray:
        return self.launches.rms_norm(x, weight, eps)

    def layer_norm(self, x: GpuArray, weight: Vector, bias: Vector, eps: float) -> GpuArray:
        return self.launches.layer_norm(x, weight, bias, eps, "fp32")

    def head_norm(self, x: GpuArray, weight: Vector, eps: float, head_dim: int) -> GpuArray:
        return self.launches.rms_norm(x, weight, eps, dim=head_dim)

    def linear(self, x: GpuArray, weight: Matrix, bias: Vector | None = None) -> GpuArray:
        return self.launches.gemm(x, weight, bias)

    def rope(self, x: GpuArray, positions: Any, rope: Rope, head_dim: int) -> GpuArray:
        return self.launches.rotate(x, self.on_device(positions), rope, head_dim)

    def kv_write(self, kv: GpuKV, layer: int, k: GpuArray, v: GpuArray | None, slots: Any) -> None:
        slots = self.on_device(slots)
        if v is None:
            rows = Latents(0, 0, kv.spec.head_dim, 0)
            self.launches.latent_kv_write(k, rows, 0.0, kv, layer, slots, slots)
            return
        self.launches.kv_write(kv, layer, k, v, slots, slots, None)

    def attention(
        self, q: GpuArray, kv: GpuKV, layer: int, batch: Any, shape: AttentionShape
    ) -> GpuArray:
        step = batch if isinstance(batch, Step) else self.step(batch, {view_of(shape)}, kv)
        return self.launches.attention(q, kv, layer, step, shape, "fp32")

    def step(self, batch: Batch, views: Collection[AttentionView], kv: GpuKV) -> Step:
        """A batch on the device, for attention of these views."""
        return self.steps([(batch, kv)], [views])[0][0]

    def steps(
        self,
        pages: Pages,
        views: Sequence[Collection[AttentionView]],
        room: Room | None = None,
        draw: Sequence[Any] = (),
    ) -> list[tuple[Step, GpuKV]]:
        """The batches of a step on the device. As `upload`."""
        sizes = [(batch, kv.spec.block_size) for batch, kv in pages]
        steps = upload(self.driver.architecture, self.arena, sizes, views, room, draw)
        for step, (batch, _) in zip(steps, pages, strict=True):
            step.adapted = self.adapters.of_step(batch, room is not None)
        return [(step, kv) for step, (_, kv) in zip(steps, pages, strict=True)]

    def head_linear(self, x: GpuArray, weights: tuple[Matrix, ...]) -> GpuArray:
        return self._experts.by_head(x, self._head_table(weights))

    def join_heads(self, x: GpuArray, y: GpuArray, heads: int) -> GpuArray:
        return self.launches.join_heads(x, y, heads)

    def act_mul(self, gate: GpuArray, up: GpuArray) -> GpuArray:
        return self.launches.elementwise("act_mul", gate, up)

    def clamped_swiglu(self, gate: GpuArray, up: GpuArray) -> GpuArray:
        return self.launches.elementwise("clamped_swiglu", gate, up)

    def activate(self, x: GpuArray, act: str) -> GpuArray:
        return self.launches.elementwise(act, x)

    def mul(self, x: GpuArray, y: GpuArray) -> GpuArray:
        return self.launches.elementwise("mul", x, y)

    def add(self, x: GpuArray, y: GpuArray) -> GpuArray:
        return self.launches.elementwise("add", x, y)

    def scale(self, x: GpuArray, factor: float) -> GpuArray:
        return self.launches.elementwise("scale", x, factor=float(np.float32(factor)))

    def scale_rows(self, x: GpuArray, factors: F32, rows: Any) -> GpuArray:
        known = self.launches.constants.get(id(factors))
        address = known[1] if known else self.on_device(factors).address
        return self.launches.take_rows(x, self.on_device(rows), address)

    def adapt(self, y: GpuArray, x: GpuArray, adapters: Any, layer: int, field: str) -> GpuArray:
        """Written into y. adapters: of rows, or what `row_adapters` gave."""
        with self.adapters.rows(adapters) as rows:
            self.adapters.add(rows, y, x, place_of(layer, field), (y.shape[1],))
        return y

    def adapt_embedded(self, x: GpuArray, tokens: Any, adapters: Any) -> GpuArray:
        """Do as `adapt`."""
        with self.adapters.rows(adapters) as rows:
            self.adapters.add_embedded(rows, x, self.on_device(tokens))
        return x

    def take_rows(self, x: GpuArray, rows: Any) -> GpuArray:
        return self.launches.take_rows(x, self.on_device(rows))

    def soft_cap(self, x: F32, cap: float) -> F32:
        return self.to_numpy(self.launches.elementwise("soft_cap", self.on_device(x), factor=cap))

    def route(
        self, logits: Any, top_k: int, normalise: bool, scoring: str = "softmax"
    ) -> tuple[I32, F32]:
        ids, weights = self._experts.route(self.on_device(logits), top_k, normalise, scoring)
        chosen = np.empty(ids.shape, np.int32)
        self.driver.download(chosen, ids.address)
        return chosen, self.to_numpy(weights)

    def add_rows(self, x: GpuArray, y: GpuArray, rows: I32, weights: F32) -> GpuArray:
        return self._experts.add_rows(x, y, self.on_device(rows), self.on_device(weights))

    def top_logprobs(self, logits: F32, k: int) -> tuple[F32, I32, F32]:
        return _HOST.top_logprobs(logits, k)

    @property
    def _experts(self) -> GpuExperts:
        return GpuExperts(self.launches)

    # -- composites --------------------------------------------------------------------------------
    def prepare_layer(self, layer: Layer) -> None:
        """Q, K and V become one matrix, and gate and up, where they are of one form: fewer
        launches."""
        joined: dict[str, Any] = {}
        if layer.latent is not None:
            joined |= self._join_latent(layer, layer.latent)
        elif not (layer.q_bias or layer.k_bias or layer.v_bias):
            found = join(self.driver, [layer.q, layer.k, layer.v])
            if found is not None:
                joined["qkv"], (layer.q, layer.k, layer.v) = found
        if layer.gate is not None and layer.act == "silu":
            found = join(self.driver, [layer.gate, layer.up])
            if found is not None:
                joined["gate_up"], (layer.gate, layer.up) = found
        layer.native = joined
        if layer.experts is not None:
            layer.native["experts"] = GpuExperts.tables(self.driver, layer.experts)

    def _join_latent(self, layer: Layer, latent: Latent) -> dict[str, Any]:
        """Tables of what each head has of its own; and queries, latent and their rotary parts as
        one matrix, where they are of one form."""
        found: dict[str, Any] = {
            "k_up": self._head_table(latent.k_up),
            "v_up": self._head_table(latent.v_up),
        }
        joined = join(self.driver, [layer.q, latent.q_rope, layer.k, latent.k_rope])
        if joined is not None:
            found["latent"], (layer.q, q_rope, layer.k, k_rope) = joined
            layer.latent = replace(latent, q_rope=q_rope, k_rope=k_rope)
        return found

    def _head_table(self, weights: tuple[Matrix, ...]) -> WeightTable:
        """Return the table of weights of heads, put on the device once."""
        if id(weights) not in self._heads:
            self._heads[id(weights)] = weights, table_of(self.driver, (weights,))
        return self._heads[id(weights)][1]

    def prepare_stack(self, stack: Stack) -> None:
        """Large products are longer than what an early start saves, and asking for their weights
        early takes cache from the kernel that still runs."""
        every = [(one.q, one.k, one.v, one.o, one.gate, one.up, one.down) for one in stack.layers]
        nbytes = sum(matrix.nbytes for layer in every for matrix in layer if matrix is not None)
        if nbytes > DEPENDENT_BYTES * len(stack.layers):
            self.driver.dependent_launch = False

    def hidden(
        self, stack: Stack, batch: Batch, kv: GpuKV, sliding: tuple[Batch, GpuKV] | None
    ) -> GpuArray:
        """A whole step below the head; recorded if it is small."""
        return self.computed(stack, [(batch, kv)] if sliding is None else [(batch, kv), sliding])[0]

    def computed(
        self, stack: Stack, pages: Pages, choice: StepChoice | None = None
    ) -> tuple[GpuArray, int]:
        """Hidden rows of a step, and how many tokens were chosen where there is a choice: 0 where
        that is still to be done."""
        self.begin()
        # where every layer has a window nobody keeps a KV of layers that see everything
        pages = [(batch, pages[-1][1] if kv is None else kv) for batch, kv in pages]
        if self._viewed[0] is not stack or len(self._viewed[1]) != len(pages):
            self._viewed = stack, views_of(stack, len(pages))
        views = self._viewed[1]
        found = None
        if self.graphs is not None and stack.layers:
            found = self.graphs.run(self, stack, pages, views, choice)
        if found is None:
            return self.layers(stack, self.steps(pages, views)), 0
        return found.out.rows(slice(0, len(pages[0][0].logit_rows))), len(found.out) * found.chosen

    def layers(self, stack: Stack, steps: list[tuple[Step, GpuKV]]) -> GpuArray:
        """`hidden` of a step that is on the device, with its KV, and a second pair of layers with a
        window where these have one. Each layer turns the arena twice, so the last rows lie in the
        half with which it began, and all of the other is free for the head."""
        self.arena.halve()
        (step, kv), *sliding = steps
        beside: Any = sliding[0] if sliding else None
        found: GpuArray = Composites.hidden(self, stack, step, kv, beside)  # type: ignore[arg-type]
        self.arena.rejoin()
        return found

    def add_experts(self, x: GpuArray, h: GpuArray, layer: Layer) -> GpuArray:
        tables = (layer.native or {}).get("experts")
        if (
            tables is None or layer.experts is None
        ):  # one operation after the other, as the check of a device
            found: GpuArray = super().add_experts(x, h, layer)
            return found
        return self._experts.add(x, h, layer.experts, tables, layer.act)

    def row_adapters(self, batch: Any) -> Any:
        return batch.adapted

    def adapted_attention(
        self, adapted: Adapted | None, x: GpuArray, layer: Layer, kv: GpuKV, index: int, batch: Any
    ) -> GpuArray:
        self.arena.turn()
        if "latent" in (layer.native or {}) and isinstance(batch, Step):
            return self._latent_attention(adapted, x, layer, kv, index, batch)
        joined = (layer.native or {}).get("qkv")
        if (
            joined is None
            or layer.wide_qk_norm
            or layer.attn_temperature is not None
            or not isinstance(batch, Step)
        ):
            found: GpuArray = super().adapted_attention(adapted, x, layer, kv, index, batch)
            return found
        run, shape, dim = self.launches, layer.shape, layer.shape.head_dim
        h = self._normed(x, layer.attn_norm, layer.attn_norm_bias, layer.eps, joined.compute)
        wide = run.gemm(h, joined)
        q_end, k_end = shape.heads * dim, (shape.heads + shape.kv_heads) * dim
        self._adapt(adapted, wide, h, "q", (q_end, k_end - q_end, wide.shape[1] - k_end))
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = layer.q_norm, layer.k_norm
        q = run.qk_norm_rope_kv_write(
            wide, norms, layer.eps, kv, index, batch, layer.rope, shape.heads
        )
        mixed = run.attention(q, kv, index, batch, shape, layer.o.compute)
        return self._added(adapted, x, mixed, layer, "o")

    def _latent_attention(
        self, adapted: Adapted | None, x: GpuArray, layer: Layer, kv: GpuKV, index: int, step: Step
    ) -> GpuArray:
        native, shape, latent = layer.native, layer.shape, layer.latent
        assert latent is not None
        k_up, v_up = native["k_up"], native["v_up"]
        rows = Latents(
            shape.heads,
            k_up.columns,
            k_up.rows,
            latent.k_rope.rows,
            k_up.kind,
            layer.rope,
            latent.norm,
        )
        h = self._normed(
            x, layer.attn_norm, layer.attn_norm_bias, layer.eps, native["latent"].compute
        )
        wide = self.launches.gemm(h, native["latent"])
        plain, q = self.launches.latent_kv_write(
            wide, rows, layer.eps, kv, index, step.slots, step.positions
        )
        q = self._experts.by_head(plain, k_up, q)
        mixed = self.launches.attention(q, kv, index, step, shape, v_up.kind)
        return self._added(adapted, x, self._experts.by_head(mixed, v_up), layer, "o")

    def adapted_mlp(self, adapted: Adapted | None, x: GpuArray, layer: Layer) -> GpuArray:
        self.arena.turn()
        joined = layer.native or {}
        if "gate_up" not in joined or layer.experts is not None:
            found: GpuArray = super().adapted_mlp(adapted, x, layer)
            return found
        both = joined["gate_up"]
        h = self._normed(x, layer.mlp_norm, layer.mlp_norm_bias, layer.eps, both.compute)
        if adapted is None:
            y = self.launches.gated_gemm(h, both, layer.down.compute)
        else:
            wide = self.launches.gemm(h, both)
            self._adapt(adapted, wide, h, "gate", (layer.gate.rows, layer.up.rows))
            y = self.launches.gated(wide, layer.down.compute)
        return self._added(adapted, x, y, layer, "down")

    def _normed(
        self, x: GpuArray, weight: Vector | None, bias: Vector | None, eps: float, kind: str
    ) -> GpuArray:
        """Norm in the type that is computed with: the same bits as if it were rounded
        afterwards."""
        if weight is None:
            return x
        if bias is None:
            return self.launches.rms_norm(x, weight, eps, kind)
        return self.launches.layer_norm(x, weight, bias, eps, kind)

    def _adapt(
        self, adapted: Adapted | None, y: GpuArray, x: GpuArray, first: str, sizes: tuple[int, ...]
    ) -> None:
        """Add adapters' products to a product of joined fields; none of them where there are no
        rows."""
        if adapted is not None:
            self.adapters.add(
                cast(AdaptedRows, adapted[0]), y, x, place_of(adapted[1], first), sizes
            )

    def _added(
        self, adapted: Adapted | None, x: GpuArray, y: GpuArray, layer: Layer, field: str
    ) -> GpuArray:
        """x + residual * post_norm(w y + bias), w being "o" or "down": the sum within the product
        where nothing is between. What adapters add comes behind that sum then."""
        w, bias, post = (
            (layer.o, layer.o_bias, layer.attn_post_norm)
            if field == "o"
            else (layer.down, layer.down_bias, layer.mlp_post_norm)
        )
        alone = post is None and layer.residual == 1
        z = self.launches.gemm(y, w, bias, x if alone and not self.divided else None)
        self._adapt(adapted, z, y, field, (w.rows,))
        if self.divided:
            z = self.summed(z, x if alone else None)
        if alone:
            return z
        if post is not None:
            z = self.launches.rms_norm(z, post, layer.eps)
        if layer.residual != 1:
            z = self.scale(z, layer.residual)
        return self.add(x, z)

    def raw_logits(
        self, x: GpuArray, head: Head, adapters: Adapters | AdaptedRows | None = None
    ) -> GpuArray:
        """Logits [R, V] on the device; of several ranks at rank 0. adapters: of the rows."""
        weight: Matrix = head.weight
        normed = self._normed(x, head.norm, head.norm_bias, head.eps, weight.compute)
        logits = self.launches.gemm(normed, weight)
        if self.exchange is not None:
            logits = self.exchange.gather(logits, x)
        if adapters is not None and has_head(adapters):
            self.adapt(logits, normed, adapters, -1, "head")
        if head.soft_cap:
            logits = self.launches.elementwise("soft_cap", logits, factor=head.soft_cap)
        return logits

    def logits(self, x: GpuArray, head: Head, adapters: Adapters | None = None) -> F32:
        mark = self.arena.mark
        out = self.to_numpy(self.raw_logits(x, head, adapters))
        self.arena.reset(mark)
        return out
