"""The cost of a step on hardware that is not here: the model's arithmetic and bytes over a GPU's
limits.

Owns the GPU sheet (gpus.json) and the two ceilings of Williams et al., Roofline, CACM 2009. Must not know
schedulers.

A step is the products of all layers, the output head for rows that get a token, and attention; each
takes as long as its arithmetic or its bytes, whichever is slower. Layers with a window are counted
as if they saw everything. Between the GPUs of a replica go sums and logits as
kernels/gpu/exchange.py sends them, which nothing hides. The host takes its time for each step,
before it or, one step ahead (adr/0066), while the step before it runs. The reachable shares of the
limits and the times beside are assumptions: say them with the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from pageturner.errors import EngineFault, bad_setting
from pageturner.kernels.gpu.catalogue import ONE_EXCHANGE, exchange_bytes
from pageturner.lab.planning.model_outline import Outline, kv_share
from pageturner.lab.simulation.step_cost import one_by_one
from pageturner.telemetry.work import ModelCosts, StepWork


@dataclass(frozen=True, slots=True)
class GPU:
    """flops: dense 16-bit tensor operations a second; bandwidth: bytes a second; memory: bytes, as
    the driver reports them (nvidia-smi, rocm-smi); link: bytes a second that it sends to others in
    its machine; source: of all but the memory."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    source: str


MIB = 1 << 20
_SHEET = Path(__file__).with_name("gpus.json").read_bytes()
GPUS = {gpu.name: gpu for gpu in msgspec.json.decode(_SHEET, type=list[GPU])}


def gpu_named(name: str) -> GPU:
    """The sheet of a GPU, whatever the case of its name. EngineFault('bad_setting') lists the known
    ones."""
    for known, gpu in GPUS.items():
        if known.lower() == name.lower():
            return gpu
    letters = _letters(name)
    near = [known for known in GPUS if letters in _letters(known)]
    meant = f"did you mean {' or '.join(near)}? " if letters and near else ""
    message = f"unknown GPU {name!r}: {meant}known are {', '.join(GPUS)}; `plan --memory 24GB` is for any other"
    raise bad_setting(message)


def _letters(name: str) -> str:
    """Letters and digits alone: "RTX-4090" and "rtx 4090" are the same."""
    return "".join(filter(str.isalnum, name.lower()))


@dataclass(frozen=True, slots=True)
class Reach:
    """Assumptions about the software: shares of the limits, seconds of a step that nothing hides,
    and the share of the memory that weights and KV may take. link: bytes a second between the GPUs
    of a replica, 0: as the GPU's sheet says; latency: seconds of an exchange between them beside
    its bytes; host: seconds that the host takes for each step, which ahead hides behind the step
    before it."""

    compute: float = 0.6
    bandwidth: float = 0.8
    overhead: float = 0.002
    memory: float = 0.9
    link: float = 0.0
    latency: float = 10e-6
    host: float = 0.0
    ahead: bool = False

    def check(self) -> Reach:
        shares = (self.compute, self.bandwidth, self.memory)
        if not (all(0 < share <= 1 for share in shares) and self.overhead >= 0):
            raise bad_setting("--mfu, --mbu and the share of memory are above 0, at most 1")
        if not 0 <= self.host < float("inf"):
            raise bad_setting("--host-ms is 0 or more")
        if not (0 <= self.link < float("inf") and 0 <= self.latency < float("inf")):
            raise bad_setting("--link-gb-s and --link-us are 0 or more")
        return self


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The data that goes between the GPUs of a replica in a step: sums of fp32 rows over all, two
    in each layer and one of the embedding, and the logits, which come to the first one.

    row      bytes of a row; logits: bytes of a row's logits that the first GPU gets from others
    link     bytes a second that a GPU sends, or gets
    latency  seconds of an exchange beside its bytes; a sum of many rows takes two
    """

    ranks: int
    sums: int
    row: float
    logits: float
    link: float
    latency: float

    def seconds(self, rows: int, logits: int) -> float:
        if self.ranks == 1:
            return 0.0
        others, nbytes = self.ranks - 1, rows * self.row
        sent, exchanges = others * nbytes, 1
        if self.ranks > 2 and nbytes > ONE_EXCHANGE // self.ranks:
            sent, exchanges = 2 * others * nbytes / self.ranks, 2
        gathered = self.latency + logits * self.logits / self.link if logits else 0.0
        return self.sums * (exchanges * self.latency + sent / self.link) + gathered


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of a step of one model on equal GPUs that share each of its layers evenly (tensor
    parallel).

    adapters       that requests have, each as often as any other; adapter_bytes: of one, in 16 bits
    host, ahead    as in Reach
    exchanges      between the GPUs
    """

    needs: ModelCosts
    flops: float
    bandwidth: float
    overhead: float
    adapters: int = 0
    adapter_bytes: float = 0.0
    exchanges: Exchanges | None = None
    host: float = 0.0
    ahead: bool = False

    def seconds(self, work: StepWork) -> float:
        same = self._rows(work.tokens, work.logits, work.sequences)
        device = same + self._attention(work.pairs, work.context)
        return max(self.host, device) if self.ahead else self.host + device

    def _rows(self, rows: int, logits: int, sequences: int) -> float:
        """Seconds that do not depend on the context."""
        needs = self.needs
        products = max(
            needs.fp32 * rows / self.flops, needs.weight_bytes(rows, logits) / self.bandwidth
        )
        same = self.overhead + products + needs.ending_fp32 * logits / self.flops
        same += self.exchanges.seconds(rows, logits) if self.exchanges else 0.0
        return same + self._adapters(rows, sequences) if self.adapters else same

    def _adapters(self, rows: int, sequences: int) -> float:
        """Every adapter that a sequence of the step has is read, and each row multiplied with one:
        two operations for each of its values, which have two bytes."""
        present = self.adapters * (1 - (1 - 1 / self.adapters) ** sequences)
        reading = present * self.adapter_bytes / self.bandwidth
        return max(reading, self.adapter_bytes * rows / self.flops)

    def _attention(self, pairs: int, context: int) -> float:
        return max(
            self.needs.pair * pairs / self.flops, self.needs.position * context / self.bandwidth
        )

    def ends(self, now: float, rows: int, context: int, steps: int) -> list[float]:
        same, needs = self._rows(rows, rows, rows), self.needs
        seen = np.arange(context + rows, context + rows * steps + 1, rows, dtype=np.float64)
        attention = np.maximum(
            needs.pair * seen / self.flops, needs.position * seen / self.bandwidth
        )
        device = same + attention
        return one_by_one(now, np.maximum(self.host, device) if self.ahead else self.host + device)


def roofline(
    model: Outline,
    gpu: GPU,
    reach: Reach,
    count: int = 1,
    dtype: str = "float16",
    adapters: Sequence[int] = (),
) -> Roofline:
    """The model on the GPU, with LoRA adapters of so many bytes. EngineFault for a model whose
    arithmetic or weights are not known."""
    spec = model.spec
    if spec is None or model.weights is None:
        message = f"{model.name}: what its layers compute is not known here: calibrate a running engine instead"
        raise EngineFault("model_unsupported", message)
    head, table = spec.vocab * spec.dim, 0 if spec.tied else spec.vocab * spec.dim
    each = model.weights / max(spec.active + head + table, 1)
    if spec.experts is not None:
        dense = spec.active - _chosen(model)
        each = model.weights / (dense + spec.routed + head + table)
    moe, link = spec.experts, reach.link or gpu.link
    elsewhere = 4.0 * spec.vocab * (count - 1) / count  # bytes of a row's logits
    sums = 2 * spec.layers + 1
    attending = filter(spec.attends, range(spec.layers))
    heads = [spec.attention(layer, spec.context).head_dim for layer in attending]
    needs = ModelCosts(  # all products count as fp32: a GPU has one limit
        int8=0.0,
        fp32=2.0 * spec.active,
        layers=model.weights
        - each * (table + head + spec.routed),  # of the table a step reads a few rows
        ending_int8=0.0,
        ending_fp32=2.0 * head,
        ending=each * head,
        pair=4.0 * spec.heads * sum(heads),
        position=model.bytes_per_token(dtype),
        experts=each * spec.routed,
        chosen=moe.top_k / moe.count if moe else 1.0,
    )
    return Roofline(
        needs=needs,
        flops=gpu.flops * reach.compute * count,
        bandwidth=gpu.bandwidth * reach.bandwidth * count,
        overhead=reach.overhead,
        adapters=len(adapters),
        adapter_bytes=sum(adapters) / max(len(adapters), 1),
        exchanges=Exchanges(count, sums, 4.0 * spec.dim, elsewhere, link, reach.latency),
        host=reach.host,
        ahead=reach.ahead,
    )


def _chosen(model: Outline) -> int:
    """Weights of the experts that one token is sent to."""
    assert model.spec is not None
    moe = model.spec.experts
    return model.spec.routed * moe.top_k // moe.count if moe else 0


def between(count: int) -> int:
    """Bytes that so many GPUs of a replica take for what goes between them."""
    return count * exchange_bytes() if count > 1 else 0


def kv_tokens(
    model: Outline, gpu: GPU, reach: Reach, count: int = 1, dtype: str = "float16", beside: int = 0
) -> int:
    """Tokens of KV that fit beside the weights and `beside` bytes of adapters. EngineFault where
    these do not fit."""
    free = gpu.memory * reach.memory * count - (model.weights or 0) - between(count) - beside
    tokens = int(free * kv_share(model, dtype, count) // model.bytes_per_token(dtype))
    if tokens < 1:
        raise bad_setting(
            f"{model.name} takes {(model.weights or 0) / 1e9:.1f} GB and {count} x {gpu.name} leave"
            f" {gpu.memory * reach.memory * count / 1e9:.1f} GB for weights and KV: give --gpus more"
        )
    return tokens
