"""The choice of a device, CPU or CUDA, with its reason, and the division of a device's memory.

Owns the choice, the plan that is told before anything is loaded, and the dry run. Must not know
requests.
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from pageturner import logs
from pageturner.config.settings import EngineConfig
from pageturner.engine.device_trust import distrust_reason
from pageturner.engine.machine_limits import devices_file, limits_of_device
from pageturner.errors import EngineFault
from pageturner.executor.sampler import greedy
from pageturner.kernels.base import Batch
from pageturner.kernels.choosing import ChooseArgs
from pageturner.kernels.gpu.presence import nvidia_is_here
from pageturner.models.decoder import Decoder
from pageturner.models.load import open_model, weight_bytes
from pageturner.models.spec import ModelSpec
from pageturner.parallel import drivers
from pageturner.private_files import locked
from pageturner.telemetry.work import MachineLimits

if TYPE_CHECKING:
    from pageturner.kernels.gpu.driver import Driver
    from pageturner.kernels.gpu.ops import GpuOps

NO_GPU = "this machine shows no NVIDIA GPU"
BUDGETS = (
    8192,
    4096,
    2048,
    1024,
    512,
)  # tokens of a step where that was left to the machine: what fits
# Rows of the steps that are tried beside the largest: one for each height of the tiles of products
HEIGHTS = (2, 16, 64, 256, 384)
GB = 1e9
# What a start on a device is made of, in order; the other phases are the same as on the CPU.
PHASES = {
    "imports": "imports",
    "manifest": "manifest",
    "driver": "driver",
    "load": "weights",
    "dry_run": "dry run",
    "first_step": "first step",
    "proof": "proof",
    "kv": "KV",
}


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """ops: of a CUDA device; None: the CPU. reason: why, in a line. seconds: of imports, manifest
    and driver, where there is a device. mark: `ModelNeeds.mark`."""

    ops: GpuOps | None
    reason: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    mark: str = ""

    @property
    def text(self) -> str:
        return f"{'cpu' if self.ops is None else 'cuda'} ({self.reason})"


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """The needs of a model on a device. weights: bytes; block: of KV, of one block of tokens.

    mark   of models that have the same forms (`device_trust`); ""
    forms  those that are known before weights are loaded: of attention
    """

    spec: ModelSpec
    weights: int
    block: int
    mark: str = ""
    forms: tuple[str, ...] = ()


def kv_type(config: EngineConfig) -> str:
    """Return the type of KV, where the settings may leave it to us."""
    return "float16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def needs_of(path: Any, config: EngineConfig) -> ModelNeeds:
    """Return the needs of a model by the tables of its files; no weights are read."""
    from pageturner.kernels.gpu.proof import attention_form

    file, spec, layout = open_model(path, config.load_format, config.load_seed)
    weights = weight_bytes(file, layout, config.dtype, config.quantization)
    kv_dtype = kv_type(config)
    kv = spec.kv_spec(1, config.block_size, kv_dtype, True)
    kinds = sorted({info.kind for info in file.tensors.values()})
    told = spec, kinds, config.dtype, config.quantization, kv_dtype, config.block_size
    mark = blake2b(repr(told).encode(), digest_size=8).hexdigest()
    forms = (attention_form(kv_dtype, config.block_size, spec.attention(0, spec.context)),)
    return ModelNeeds(spec, weights, kv.nbytes, mark, forms)


def choose(config: EngineConfig, needs: Callable[[], ModelNeeds]) -> DeviceChoice:
    """The device for a model. With `--device cuda` an EngineFault where it cannot be: as
    drivers.open_driver, and 'gpu_model' for what is not computed there, 'gpu_memory' for a model
    larger than its memory. needs: asked once a device is found."""
    if config.device == "cpu":
        return DeviceChoice(None, "the CPU was asked for")
    if config.backend != "auto":
        return DeviceChoice(None, f"--backend {config.backend} was asked for")
    if config.device == "auto" and not (os.environ.get(drivers.DRIVER) or nvidia_is_here()):
        return DeviceChoice(None, NO_GPU)
    begin = time.perf_counter()
    from pageturner.kernels.gpu import cuda_driver, ops  # noqa: F401 (both here, so that their time is told)

    imported = time.perf_counter()
    try:
        driver = drivers.open_driver()
        opened = time.perf_counter()
        try:
            asked = needs()
            if config.device == "auto":
                why = distrust_reason(driver, asked.mark, asked.forms)
                if why is not None:
                    raise EngineFault("gpu_kernels", why)
            check_model(driver, asked, config)
        except BaseException:
            driver.close()  # whoever computes on the CPU holds no context, which takes some 0.5 GB there
            raise
    except EngineFault as fault:
        if config.device == "cuda" or not fault.code.startswith("gpu_"):
            raise
        return DeviceChoice(None, fault.message)
    told = f"{driver.name} has kernels for it (sm_{driver.architecture}), and the model fits"
    manifest = getattr(driver, "manifest_s", 0.0)  # a driver of tests has none
    seconds = {
        "imports": imported - begin,
        "manifest": manifest,
        "driver": opened - imported - manifest,
    }
    computes = ops.GpuOps(driver, drivers.workspace_of(driver))
    # whoever drops an LLM may make another; where the process ends the system gives everything back
    weakref.finalize(computes, driver.close).atexit = False
    return DeviceChoice(computes, told, seconds, asked.mark)


def check_model(driver: Driver, needs: ModelNeeds, config: EngineConfig) -> None:
    """EngineFault('gpu_model') or ('gpu_memory') where this device cannot have this model."""
    if (lacking := _lacking(needs.spec, config)) is not None:
        raise EngineFault("gpu_model", f"{lacking} on a GPU: use --device cpu")
    _check_ranks(driver, config.tensor_parallel_size)
    free, weights = driver.memory()[0], needs.weights // config.tensor_parallel_size
    least = weights + drivers.workspace_of(driver) + exchange_of(config) + 2 * needs.block
    if least > free:
        raise EngineFault(
            "gpu_memory",
            f"{driver.name} has {free / GB:.1f} GB free, and the model needs {least / GB:.1f}: weights of"
            f" {weights / GB:.1f} GB, {drivers.workspace_of(driver) / GB:.1f} GB for steps, and KV"
            "; use a smaller or quantised model (--quantization int4), or --device cpu",
        )


def _check_ranks(driver: Driver, size: int) -> None:
    """EngineFault('gpu_devices') unless each of so many ranks has a device, and they reach each
    other."""
    if size == 1:
        return
    reached, wanted = driver.peers(), drivers.ordinals(size)
    flag = f"--tensor-parallel-size {size}"
    if max(wanted) >= len(reached):
        there = f"{len(reached)} x {driver.name}" if len(reached) > 1 else f"one {driver.name}"
        limit = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f", CUDA_VISIBLE_DEVICES being {limit!r}" if limit is not None else ""
        raise EngineFault(
            "gpu_devices",
            f"{flag} wants the devices {', '.join(map(str, wanted))}, and there is {there}{why}"
            ": lower it, or use --device cpu",
        )
    apart = [str(one) for one in wanted if not reached[one]]
    if apart:
        raise EngineFault(
            "gpu_devices",
            f"{flag}: device {wanted[0]} cannot reach the memory of device {', '.join(apart)}"
            f": choose others with {drivers.ORDINALS}, or use --device cpu",
        )


def exchange_of(config: EngineConfig) -> int:
    """Bytes of each device that sums over ranks take."""
    from pageturner.kernels.gpu.catalogue import exchange_bytes

    return exchange_bytes() if config.tensor_parallel_size > 1 else 0


def _lacking(spec: ModelSpec, config: EngineConfig) -> str | None:
    from pageturner.kernels.gpu.catalogue import LATENT, LATENT_ROTARY, ROUTED, largest_head

    latent = spec.latent
    widest = largest_head(kv_type(config), latent is not None)
    experts = 0 if spec.experts is None else spec.experts.count
    found = {
        f"heads of {spec.head_dim} elements are not computed": spec.head_dim > widest,
        "such a latent KV is not computed": latent is not None
        and (latent.rank > LATENT or latent.rotary > LATENT_ROTARY),
        f"a choice among {experts} experts is not computed": experts > ROUTED[-1],
        f"{spec.composed} cannot be computed": bool(spec.composed),
        "--pipeline-parallel-size does not work": config.pipeline_parallel_size > 1,
    }
    return next((text for text, lacks in found.items() if lacks), None)


def plan_text(ops: GpuOps, needs: ModelNeeds, config: EngineConfig) -> str:
    """Return a line on what the memory of each device will be for; told before weights are
    loaded."""
    size = config.tensor_parallel_size
    weights, exchange = needs.weights // size, exchange_of(config)
    free = ops.free_memory() - weights - exchange
    kv = config.kv_cache_memory or size * int(config.gpu_memory_utilization * free)
    length = config.max_model_len or needs.spec.context
    blocks = max(kv, 0) // needs.block
    name, sums, together = ops.driver.name, "", ""
    if size > 1:
        name, sums, together = (
            f"each of {size} x {name}",
            f"sums {exchange / GB:.2f} GB, ",
            ", together",
        )
    return (
        f"{name}: weights {weights / GB:.2f} GB, steps {ops.arena.size / GB:.2f} GB, {sums}KV"
        f" {kv / size / GB:.2f} GB{together} = {blocks * config.block_size:,} tokens, which hold"
        f" {blocks * config.block_size // length:,} sequences of {length:,} tokens"
        f" ({1 - config.gpu_memory_utilization:.0%} of what is free are left as a margin)"
    )


def kv_bytes(ops: object, config: EngineConfig, host: int) -> tuple[int, int]:
    """Return for `plan_kv` bytes for KV that are asked for, and bytes that are free; of the devices
    where KV lies there. Where nothing is asked for it is a share of what is free behind a dry run;
    recordings of steps take the rest. host: bytes that are free on the host."""
    free = getattr(ops, "free_for_kv", None)
    if free is None:
        return config.kv_cache_memory, host
    here = free()
    return config.kv_cache_memory or int(config.gpu_memory_utilization * here), here


@contextmanager
def memory_lock(ops: object) -> Iterator[None]:
    """Engines of one user that start at the same time size their KV one after the other, so that
    each sees what the others left free on a device. On the CPU, and where the lock cannot be
    written, nothing is done."""
    if ops is None:
        yield
        return
    path = devices_file().with_name("device_memory.lock")
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(locked(path, fcntl.LOCK_EX))
        yield


def limits_of(ops: GpuOps | None) -> MachineLimits | None:
    """Return what `doctor` measured of this device; None where it did not."""
    return None if ops is None else limits_of_device(ops.driver.name)


def dry_run(
    decoder: Decoder, ops: GpuOps | None, config: EngineConfig, length: int
) -> EngineConfig:
    """The largest step of the token budget, computed once, so that what is free afterwards is what
    KV can have: kernels, tables and buffers are there by then. Where the budget was left to the
    machine, it becomes the largest of BUDGETS whose step fits.

    length  of the longest sequence
    EngineFault('gpu_memory') where no step fits.
    On the CPU nothing is done.
    """
    if ops is None:
        return config
    left = config.max_num_batched_tokens < 0
    budgets = BUDGETS if left else (config.token_budget or length,)
    for budget in budgets:
        try:
            _largest_step(decoder, ops, budget, config, length)
        except EngineFault as fault:
            if fault.code != "gpu_memory" or budget == budgets[-1]:
                raise
            continue
        return replace(config, max_num_batched_tokens=budget) if left else config
    return config


def by_all_ranks(decoder: Decoder, ops: Any, config: EngineConfig, length: int) -> None:
    """The largest step and the smaller ones, by all ranks."""
    _largest_step(decoder, ops, config.token_budget or length, config, length)
    smaller_steps(decoder, ops, config, length)


def smaller_steps(decoder: Decoder, ops: Any, config: EngineConfig, length: int) -> None:
    """Steps of every height that the products of a step have, with the choice of a token behind
    each row. Kernels are loaded when they are first launched: those of small steps are not to be in
    the time of the first request, and the local memory of others, some 270 MB where a thread has
    984 bytes of it, is to be taken before KV is sized. Nothing on the CPU.

    length  of the longest sequence
    """
    if ops is None:
        return
    with _scratch_kv(decoder, ops, config) as kv:
        for rows in (n for n in HEIGHTS if n <= max(config.token_budget or length, HEIGHTS[0])):
            # not one row: a step that only decodes would be counted among those that may be
            # recorded
            batch = largest_batch(rows, 1, min(rows, length), config.block_size)
            batch = replace(batch, logit_rows=np.arange(rows, dtype=np.int32))
            hidden = decoder.hidden(batch, kv)
            temperature, top_k, top_p, min_p, uniform = greedy(rows)
            # one that cuts tokens off takes every kernel of the choice
            decoder.choose(hidden, ChooseArgs((temperature + 1, top_k + 1, top_p, min_p, uniform)))


@contextmanager
def _scratch_kv(decoder: Decoder, ops: Any, config: EngineConfig) -> Iterator[Any]:
    """One block of KV, for steps that are only tried."""
    kv = ops.alloc_kv(decoder.kv_spec(1, config.block_size, kv_type(config)))
    try:
        yield kv
    finally:
        ops.free_kv(kv)
        ops.begin()


def tell_start(chosen: DeviceChoice, phases: Mapping[str, float]) -> None:
    """Say where the seconds of a start on a device went; of one on the CPU say nothing."""
    if chosen.ops is None:
        return
    known = {**phases, **chosen.seconds}
    told = [f"{text} {known[name]:.2f}" for name, text in PHASES.items() if name in known]
    whole = sum(known[name] for name in PHASES if name in known)
    logs.say(f"start on the device: {', '.join(told)}: {whole:.2f} s")


def _largest_step(
    decoder: Decoder, ops: Any, budget: int, config: EngineConfig, length: int
) -> None:
    """Compute the largest step: as many sequences as may run decode at the end of their context,
    beside prompts that fill the budget. All read one block and write nowhere."""
    with _scratch_kv(decoder, ops, config) as kv:
        batch = largest_batch(budget, min(config.max_num_seqs, budget), length, config.block_size)
        hidden = decoder.hidden(batch, kv)
        decoder.choose(hidden, ChooseArgs(greedy(len(hidden))))


def largest_batch(budget: int, sequences: int, length: int, block_size: int) -> Batch:
    """`budget` rows: `sequences` - 1 that decode, and prompts of at most `length` tokens. There are
    as many sequences as a recording has for these, and a row more, so that it fits where they
    do."""
    from pageturner.kernels.gpu.steps import bucket

    sequences = bucket(sequences)
    counts = [1] * (sequences - 1)
    rest = max(budget, sequences + 1) - len(counts)
    counts += [min(length, rest - at) for at in range(0, rest, length)]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    contexts = np.full(len(counts), length, np.int32)
    positions = np.concatenate([np.arange(length - n, length, dtype=np.int32) for n in counts])
    table = np.zeros((len(counts), -(-length // block_size)), np.int32)
    rows = len(positions)
    return Batch(
        np.zeros(rows, np.int32),
        positions,
        starts,
        contexts,
        table,
        np.full(rows, -1, np.int32),
        starts[1:] - 1,
    )
