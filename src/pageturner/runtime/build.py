"""From settings to an engine: backend, model, KV storage, scheduler. Says how long each phase took.

Owns the memory arithmetic of the KV cache. Everything that cannot work is an EngineFault before a request is
taken.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pageturner.config import EngineConfig
from pageturner.core import scheduler
from pageturner.errors import EngineFault
from pageturner.files import hub
from pageturner.kernels.base import KVSpec, Ops
from pageturner.models.load import load_model
from pageturner.runtime.fake import FakeExecutor, NullExecutor
from pageturner.runtime.loop import Engine
from pageturner.runtime.runner import Executor, Runner

T = TypeVar("T")
GIB = 1024**3
MOST_KV_BYTES = 4 * GIB  # what is taken unasked; ask for more with --kv-cache-memory
FAKE_MODEL_LEN = 8192


@dataclass(frozen=True, slots=True)
class Built:
    """An engine that is ready, and what its users must know. Lengths in tokens."""

    engine: Engine
    executor: Executor
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    kv_bytes: int
    fingerprint: str
    phases: dict[str, float]


class Phases:
    """Seconds by phase of the start-up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], T]) -> T:
        begin = time.perf_counter()
        result = work()
        self.seconds[name] = round(time.perf_counter() - begin, 4)
        return result


def make_ops(config: EngineConfig) -> Ops:
    """The backend that was asked for. `auto` falls back to the reference, loudly."""
    from pageturner.kernels import native  # imports the compiled module, which may be absent

    if config.backend == "reference":
        return _reference()
    usable, reason = native.supported()
    if usable or (config.backend == "native" and native.available_isas()):
        return native.NativeOps(threads=config.threads)
    if config.backend == "native":
        raise EngineFault("no_native_backend", f"the native kernels cannot run here: {reason}")
    if native.available_isas():
        _warn(f"{reason}: plain C++ runs instead; every answer is right, and many times slower")
        return native.NativeOps(threads=config.threads)
    _warn(f"{reason}: the numpy reference runs instead; every answer is right, and hundreds of times slower")
    return _reference()


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _reference() -> Ops:
    from pageturner.kernels.reference import ReferenceOps

    return ReferenceOps()


def available_memory() -> int:
    """Bytes that this process may still take: MemAvailable, less where a cgroup allows less."""
    meminfo = Path("/proc/meminfo").read_text()
    free = next(
        int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable")
    )
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, max(int(limit) - used, 0))


def count_blocks(spec: KVSpec, config: EngineConfig, max_model_len: int, available: int) -> int:
    """How many KV blocks to allocate; `spec` describes one block."""
    size = config.block_size
    asked = config.kv_cache_memory
    if asked > available:
        raise EngineFault(
            "kv_memory",
            f"--kv-cache-memory asks for {asked / GIB:.2f} GiB, and {available / GIB:.2f} GiB are free:"
            " ask for less, or leave it away to have it chosen",
        )
    useful = config.max_num_seqs * -(-max_model_len // size)
    blocks = (asked or min(MOST_KV_BYTES, available // 2)) // spec.nbytes
    if not asked:
        blocks = min(blocks, useful)
    if blocks < 2:
        raise EngineFault(
            "kv_memory",
            f"no room for the KV cache: one block of {size} tokens takes {spec.nbytes / 1024:.0f} KiB and"
            f" {(asked or available // 2) / GIB:.3f} GiB may be used: free some memory, raise"
            " --kv-cache-memory or lower --block-size",
        )
    return int(blocks)


def build(config: EngineConfig, wrap: Callable[[Ops], Ops] = lambda ops: ops) -> Built:
    """Load the model and put the engine together. EngineFault when that cannot be done.

    wrap  puts something around the backend, such as a clock
    """
    if not 1 <= config.block_size <= 256:
        raise EngineFault("bad_setting", f"block_size is 1 to 256, not {config.block_size}")
    if config.backend in ("fake", "null"):
        return _build_fake(config)
    phases = Phases()
    ops = phases.run("kernels", lambda: wrap(make_ops(config)))
    model = phases.run("find", lambda: hub.resolve(config.model))
    decoder = phases.run(
        "load",
        lambda: load_model(
            model.path, ops, dtype=config.dtype, max_positions=config.max_model_len,
            quantization=config.quantization, activation_bits=config.activation_bits,
        ),
    )  # fmt: skip
    max_model_len = _model_len(config, decoder.spec.context)
    kv_dtype = "float16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    num_blocks = count_blocks(
        decoder.kv_spec(1, config.block_size, kv_dtype), config, max_model_len, available_memory()
    )
    spec = decoder.kv_spec(num_blocks + 1, config.block_size, kv_dtype)  # one more: scratch for ballast
    kv = phases.run("kv", lambda: ops.alloc_kv(spec))
    runner = Runner(decoder, ops, kv, num_blocks=num_blocks, block_size=config.block_size)
    return _assemble(
        config, runner, max_model_len, num_blocks, decoder.spec.vocab, spec.nbytes,
        _fingerprint(ops, config, kv_dtype), phases,
    )  # fmt: skip


def _fingerprint(ops: Ops, config: EngineConfig, kv_dtype: str) -> str:
    """What the bits of an answer depend on."""
    weights = config.dtype if config.quantization == "none" else f"{config.dtype}-{config.quantization}"
    return f"{ops.fingerprint}-{weights}-act_{config.activation_bits}-kv_{kv_dtype}"


def _model_len(config: EngineConfig, context: int) -> int:
    if config.max_model_len > context:
        raise EngineFault(
            "bad_setting",
            f"max_model_len {config.max_model_len} is over the model's context of {context} tokens",
        )
    return config.max_model_len or context


def _build_fake(config: EngineConfig) -> Built:
    """No model at all: for tests of the server and for measuring the engine itself."""
    vocab = int(os.environ.get("PAGETURNER_FAKE_VOCAB", "320"))
    seconds = float(os.environ.get("PAGETURNER_FAKE_STEP_SECONDS", "0"))
    executor: Executor = FakeExecutor(vocab, seconds) if config.backend == "fake" else NullExecutor()
    max_model_len = config.max_model_len or FAKE_MODEL_LEN
    num_blocks = config.kv_cache_memory // config.block_size or 64 * max_model_len // config.block_size
    return _assemble(config, executor, max_model_len, num_blocks, vocab, 0, config.backend, Phases())


def _assemble(
    config: EngineConfig,
    executor: Executor,
    max_model_len: int,
    num_blocks: int,
    vocab_size: int,
    kv_bytes: int,
    fingerprint: str,
    phases: Phases,
) -> Built:
    built = scheduler.build(
        num_blocks=num_blocks,
        block_size=config.block_size,
        prefix_caching=config.enable_prefix_caching,
        policy=config.policy,
        order=config.order,
        admission=config.admission,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_queue=config.max_queue,
        ageing=config.ageing,
        static_batch=config.static_batch,
        static_patience=config.static_patience,
        window_ms=config.window_ms,
        served_ratio=config.served_ratio,
        served_steps=config.served_steps,
    )
    return Built(
        Engine(built, executor), executor, max_model_len, num_blocks, config.block_size, vocab_size, kv_bytes,
        fingerprint, phases.seconds,
    )  # fmt: skip
