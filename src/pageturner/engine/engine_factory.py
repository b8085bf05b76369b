"""From settings to an engine: backend, model, KV storage, scheduler. Says how long each phase took.

Everything that cannot work is an EngineFault before a request is taken.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from pageturner import logs
from pageturner.config.settings import EngineConfig
from pageturner.engine import devices
from pageturner.engine.backends import make_ops, warn
from pageturner.engine.device_trust import self_test
from pageturner.engine.engine import Engine, EngineParts
from pageturner.engine.fake import FakeExecutor, NullExecutor
from pageturner.engine.machine_limits import limits_of, stored_peak
from pageturner.engine.step_sizes import with_step_sizes
from pageturner.errors import EngineFault
from pageturner.executor.adapters import AdapterStore
from pageturner.executor.async_runner import AsyncRunner
from pageturner.executor.draft import Costs, Drafter, PromptLookup, best_length
from pageturner.executor.draft_compatibility import check_speculation, check_tokens, cost_of
from pageturner.executor.draft_model import MOST, DraftModel
from pageturner.executor.grammar import Compiler, Grammars
from pageturner.executor.kv_memory import KVSizes, available_memory, plan_kv
from pageturner.executor.runner import Executor, Runner
from pageturner.formats import hub
from pageturner.formats.load_tokenizer import Tokenizer, load_tokenizer, load_with_defaults
from pageturner.kernels.base import KVSpec, Ops
from pageturner.kernels.peak import glance
from pageturner.kv.kv_connectors import KVConnectors, KVStorage, wants_tiers
from pageturner.kv.kv_survival import SurvivingKV
from pageturner.models.decoder import Decoder
from pageturner.models.weights import AUTO
from pageturner.parallel import tensor_parallel
from pageturner.policies.scheduler_factory import SchedulerStack, make_scheduler
from pageturner.scheduler.listener import Listener
from pageturner.telemetry.step_log import Header, StepLog
from pageturner.telemetry.work import MachineLimits, ModelCosts
from pageturner.telemetry.work_price import context_price

T = TypeVar("T")
FAKE_MODEL_LEN = 8192
SAMPLES, SAMPLE_BYTES = (
    32,
    16 << 10,
)  # of each file of a model: half a megabyte is read in a millisecond


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready, and what its users must know. Lengths in tokens.

    needs       of its steps; limits: of this machine. Where they are known
    taken_back  KV blocks that another engine process had computed before it died
    ahead       the same executor, where it can begin a step before the one before it is known
    pace        limits by which steps are sized: those, or what a glance at the machine found
    device      where it computes, and why
    """

    engine: Engine
    executor: Executor
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    kv_bytes: int
    fingerprint: str
    phases: dict[str, float]
    sizes: KVSizes
    needs: ModelCosts | None = None
    limits: MachineLimits | None = None
    taken_back: int = 0
    pace: MachineLimits | None = None
    device: str = ""
    ahead: AsyncRunner | None = None


class Phases:
    """Seconds by phase of the start-up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def run(self, name: str, work: Callable[[], T]) -> T:
        begin = time.perf_counter()
        result = work()
        self.seconds[name] = round(time.perf_counter() - begin, 4)
        return result


def make_engine(
    config: EngineConfig,
    wrap: Callable[[Ops], Ops] = lambda ops: ops,
    tokenizer: Callable[[], Tokenizer] | None = None,
    kv_fd: int | None = None,
) -> LoadedEngine:
    """Load the model and put the engine together. EngineFault when that cannot be done.

    wrap       puts something around the backend, such as a clock
    tokenizer  asked when the first grammar comes, by another thread; None: read from the model's files then
    kv_fd      memory file for KV, which somebody keeps for the next engine; None: KV goes with this process
    """
    _check(config)
    beside = KVConnectors(config)
    if config.backend in ("fake", "null"):
        return _build_fake(config, beside)
    phases = Phases()
    model = phases.run("find", lambda: hub.resolve(config.model))
    chosen = phases.run("device", lambda: _device(config, model))
    ranks = tensor_parallel.processes_of(config, chosen.ops)
    ops = phases.run(
        "kernels", lambda: wrap((ranks.ops if ranks else chosen.ops) or make_ops(config))
    )
    read = tokenizer or (lambda: _texts(config, model))
    drafts = config.speculation == "draft"
    smaller = phases.run("draft", lambda: _load_draft_model(config, ops, read)) if drafts else None
    decoder = phases.run("load", lambda: tensor_parallel.load(model.path, ops, config, ranks))
    max_model_len = _model_len(config, decoder.spec.context)
    kv_dtype = devices.kv_type(config)
    config = _tried(phases, decoder, chosen, ranks and ranks.ops, config, max_model_len)
    one = decoder.kv_spec(1, config.block_size, kv_dtype)
    of_draft = smaller.kv_spec(1, config.block_size, kv_dtype).nbytes if smaller else 0
    fingerprint = _fingerprint(ops, config, kv_dtype, decoder.spec.rope.choice(max_model_len))
    kept = _surviving_kv(
        config,
        ops,
        kv_fd,
        (fingerprint, one, decoder.windowed, decoder.window, wants_tiers(config)),
    )
    with devices.memory_lock(chosen.ops):
        # what was kept has its memory already, and what is free says nothing
        sizes = (kept and kept.sizes) or _kv_sizes(
            config, ops, decoder, one, max_model_len, of_draft
        )
        compiler = Compiler(read)
        places = 2 * config.max_num_seqs
        grammars = Grammars(
            compiler, least=compiler.least, most_waiting=config.max_queue, most_places=places
        )
        drafter: Drafter | None = PromptLookup() if config.speculation == "ngram" else None
        if smaller:
            costs = _costs(smaller, decoder)
            drafter = DraftModel(smaller, ops, sizes.blocks, config.block_size, kv_dtype, costs)
        alloc = kept.begin(sizes) if kept else ops.alloc_kv
        runner = phases.run(
            "kv",
            lambda: Runner(
                decoder, ops, sizes, config.block_size, kv_dtype, grammars, drafter, alloc
            ),
        )
    devices.tell_start(chosen, phases.seconds)
    limits = _limits(ops, config, runner.needs) or devices.limits_of(chosen.ops)
    pace = limits or phases.run("pace", lambda: _pace(ops, config))
    built = _assemble(
        with_step_sizes(config, runner.needs, pace),
        runner,
        grammars,
        max_model_len,
        sizes,
        decoder.spec.vocab,
        runner.nbytes,
        fingerprint,
        phases,
        runner.needs,
        limits,
        kept,
        AdapterStore(decoder, config.max_loras),
        beside,
        KVStorage(ops, runner.storage[0], one),
        async_runner_of(config, runner, decoder, ops),
    )
    return replace(built, pace=pace, device=chosen.text)


def _texts(config: EngineConfig, model: hub.ModelFile) -> Tokenizer:
    return load_with_defaults(model.path, config.generation_config, config.load_format)[0]


def _device(config: EngineConfig, model: hub.ModelFile) -> devices.DeviceChoice:
    """Where the model is computed; tells the plan of a device's memory before anything is loaded."""
    chosen = devices.choose(config, lambda: devices.needs_of(model.path, config))
    if chosen.ops is not None:
        logs.say(devices.plan_text(chosen.ops, devices.needs_of(model.path, config), config))
    return chosen


def _tried(
    phases: Phases,
    decoder: Decoder,
    chosen: devices.DeviceChoice,
    ranks: Any,
    config: EngineConfig,
    length: int,
) -> EngineConfig:
    """What a device does before it serves: its largest step, smaller ones, and the test that it computes
    right. Gives the settings, with a token budget that fits. Of several ranks the first one does it alone: a
    step that does not fit would end the others. Then all do it, for what they take is not free for KV.

    ranks  their backend; None: there is one device
    """
    if chosen.ops is None:
        return config
    steps, kv_dtype = (decoder, ranks or chosen.ops), devices.kv_type(config)
    with ranks.alone() if ranks else nullcontext():
        config = phases.run("dry_run", lambda: devices.dry_run(*steps, config, kv_dtype, length))
        phases.run("first_step", lambda: devices.smaller_steps(*steps, config, kv_dtype, length))
        test = (*steps, chosen.mark, config.block_size, kv_dtype, length)
        phases.run("proof", lambda: self_test(*test))
    if ranks:
        phases.run("ranks", lambda: devices.by_all_ranks(*steps, config, kv_dtype, length))
    return config


def _kv_sizes(
    config: EngineConfig, ops: Ops, decoder: Decoder, one: KVSpec, max_model_len: int, of_draft: int
) -> KVSizes:
    """A tier holds blocks of all layers: with one they are kept as if no layer had a window."""
    windows = (0, 0) if wants_tiers(config) else (decoder.windowed, decoder.window)
    asked, free = devices.kv_bytes(ops, config.kv_cache_memory, available_memory())
    free -= config.kv_host_memory
    return plan_kv(
        one, *windows, replace(config, kv_cache_memory=asked), max_model_len, free, of_draft
    )


def async_runner_of(
    config: EngineConfig, runner: Runner, decoder: Decoder, ops: Ops
) -> AsyncRunner | None:
    """How steps are begun ahead; None for the plain loop. A step log is replayed by plans that know every
    token, and who drafts must know them."""
    plain = not config.async_scheduling or config.step_log or config.speculation != "off"
    later = getattr(ops, "later", None)  # a backend that need not wait says so: ChoosesLater
    return None if plain or later is None else AsyncRunner(runner, decoder, later)


def _surviving_kv(
    config: EngineConfig, ops: Ops, kv_fd: int | None, depends_on: tuple[object, ...]
) -> SurvivingKV | None:
    """Where KV that is to outlive this process lies. None without the prefix cache: only what is findable can
    be taken back; and with the reference, whose KV lies in arrays of numpy."""
    wanted = config.kv_survival and config.enable_prefix_caching and ops.name == "native"
    wanted &= tensor_parallel.ranks_of(config) == 1  # each rank has a part of each block
    if kv_fd is None or not wanted:
        return None
    identity = hashlib.blake2b(
        repr((weights_digest(config), *depends_on)).encode(), digest_size=32
    ).digest()
    return SurvivingKV(kv_fd, identity, config.threads or len(os.sched_getaffinity(0)))


def _limits(ops: Ops, config: EngineConfig, needs: ModelCosts) -> MachineLimits | None:
    if ops.name != "native":
        return None
    threads = config.threads or len(os.sched_getaffinity(0))
    return limits_of(
        stored_peak(ops.fingerprint.split("-")[1], threads), needs.weight_bytes(1 << 30, 1)
    )


def _pace(ops: Ops, config: EngineConfig) -> MachineLimits | None:
    """Where nobody has measured the machine: a glance that a start has time for. Reading is not looked at: a
    step full of prompts hides it."""
    if ops.name != "native":
        return None
    threads = config.threads or len(os.sched_getaffinity(0))
    return MachineLimits(math.inf, *glance(ops.fingerprint.split("-")[1], threads))


def _check(config: EngineConfig) -> None:
    if not 1 <= config.block_size <= 256:
        raise EngineFault("bad_setting", f"block_size is 1 to 256, not {config.block_size}")
    check_speculation(config)
    tensor_parallel.check(config)


def _load_draft_model(config: EngineConfig, ops: Ops, target: Callable[[], Tokenizer]) -> Decoder:
    """EngineFault('draft_model') if its tokens are not the target's."""
    path = hub.resolve(config.draft_model).path
    check_tokens(target(), load_tokenizer(path), str(path))
    return tensor_parallel.load(path, ops, config)


def _costs(smaller: Decoder, decoder: Decoder) -> Costs:
    """Warns where drafting can hardly pay."""
    costs = Costs(cost_of(smaller.spec, decoder.spec))
    if not best_length(costs, 90, 1, MOST)[0]:
        warn(
            f"a step of the draft model takes {costs.step:.0%} of one of the model: it will not be used"
        )
    return costs


def _fingerprint(ops: Ops, config: EngineConfig, kv_dtype: str, rope: str) -> str:
    """What the bits of an answer depend on. rope: which divisors longrope took; "": it had no choice."""
    weights = (
        config.dtype if config.quantization == "none" else f"{config.dtype}-{config.quantization}"
    )
    activations = AUTO if config.activation_bits == "auto" else config.activation_bits
    ending = f"-rope_{rope}" if rope else ""
    if config.tensor_parallel_size > 1:  # sums over ranks are rounded otherwise
        ending += f"-tp_{config.tensor_parallel_size}"
    return f"{ops.fingerprint}-{weights}-act_{activations}-kv_{kv_dtype}{ending}"


def settings_of(fingerprint: str) -> dict[str, str | int]:
    """The settings of EngineConfig that a fingerprint of `_fingerprint` tells; {} for one that is none."""
    found = re.fullmatch(
        r"(.+)-(auto|float32)(?:-(int8|int4))?-act_(\w+)-kv_([a-z0-9_]+?)(?:-rope_\w+?)?(?:-tp_(\d+))?",
        fingerprint,
    )
    if found is None:
        return {}
    ops, dtype, quantization, activations, kv_dtype, ranks = found.groups()
    return {
        "backend": "reference" if ops.startswith("reference") else "auto",
        "dtype": dtype,
        "quantization": quantization or "none",
        "activation_bits": activations if activations in ("8", "12", "15") else "auto",
        "kv_cache_dtype": kv_dtype,
        "tensor_parallel_size": int(ranks or 1),
    }


def _model_len(config: EngineConfig, context: int) -> int:
    if config.max_model_len > context:
        raise EngineFault(
            "bad_setting",
            f"max_model_len {config.max_model_len} is over the model's context of {context} tokens",
        )
    return config.max_model_len or context


def _build_fake(config: EngineConfig, beside: KVConnectors) -> LoadedEngine:
    """No model at all: for tests of the server and for measuring the engine itself."""
    vocab = int(os.environ.get("PAGETURNER_FAKE_VOCAB", "320"))
    seconds = float(os.environ.get("PAGETURNER_FAKE_STEP_SECONDS", "0"))
    executor: Executor = (
        FakeExecutor(vocab, seconds) if config.backend == "fake" else NullExecutor()
    )
    max_model_len = config.max_model_len or FAKE_MODEL_LEN
    num_blocks = (
        config.kv_cache_memory // config.block_size or 64 * max_model_len // config.block_size
    )
    sizes = KVSizes(num_blocks)
    return _assemble(
        config,
        executor,
        None,
        max_model_len,
        sizes,
        vocab,
        0,
        config.backend,
        Phases(),
        beside=beside,
    )


def _assemble(
    config: EngineConfig,
    executor: Executor,
    grammars: Grammars | None,
    max_model_len: int,
    sizes: KVSizes,
    vocab_size: int,
    kv_bytes: int,
    fingerprint: str,
    phases: Phases,
    needs: ModelCosts | None = None,
    limits: MachineLimits | None = None,
    kept: SurvivingKV | None = None,
    adapters: AdapterStore | None = None,
    beside: KVConnectors | None = None,
    storage: KVStorage | None = None,
    ahead: AsyncRunner | None = None,
) -> LoadedEngine:
    model = f"{weights_digest(config)}-{fingerprint}"
    config = _with_context_price(config, needs)
    told = (*((kept.listener,) if kept else ()), *(beside.listeners if beside else ()))
    stack = scheduler_of(config, sizes, max_model_len, model, told)
    taken_back = phases.run("kv_taken_back", lambda: kept.attach(stack.pool)) if kept else 0
    if beside is not None:
        beside.attach(stack.pool, storage, model, vocab_size)
    log = _step_log(config, sizes, max_model_len, fingerprint, needs, limits, taken_back)
    parts = EngineParts(grammars, log, needs, adapters, beside, ahead)
    engine = Engine(stack, executor, parts=parts)
    return LoadedEngine(
        engine,
        executor,
        max_model_len,
        sizes.blocks,
        config.block_size,
        vocab_size,
        kv_bytes,
        fingerprint,
        phases.seconds,
        sizes,
        needs,
        limits,
        taken_back,
        ahead=ahead,
    )


def _with_context_price(config: EngineConfig, needs: ModelCosts | None) -> EngineConfig:
    """The settings, with what the attention of the model costs where they leave it to the model."""
    if config.context_price >= 0 or needs is None:
        return config
    return replace(config, context_price=round(context_price(needs), 4))


def scheduler_of(
    config: EngineConfig,
    sizes: KVSizes,
    max_model_len: int,
    model: str = "",
    listeners: tuple[Listener, ...] = (),
) -> SchedulerStack:
    """The scheduler of an engine with these settings and so many blocks. model: what the bits of its KV
    depend on, for the keys of blocks. listeners: who else wants to be told."""
    return make_scheduler(
        config,
        num_blocks=sizes.blocks,
        window=sizes.window,
        sliding=sizes.sliding,
        max_model_len=max_model_len,
        model=model,
        listeners=listeners,
    )


def engine_again(built: LoadedEngine, config: EngineConfig) -> Engine:
    """A new engine around the loaded model, without grammars, with another step log: for measuring. The old
    one must not be used any more."""
    config = _with_context_price(with_step_sizes(config, built.needs, built.pace), built.needs)
    stack = scheduler_of(config, built.sizes, built.max_model_len)
    about = (built.fingerprint, built.needs, built.limits)
    log = _step_log(config, built.sizes, built.max_model_len, *about)
    ahead = None if log else built.ahead
    parts = EngineParts(log=log, costs=built.needs, async_executor=ahead)
    return Engine(stack, built.executor, parts=parts)


def _step_log(
    config: EngineConfig,
    sizes: KVSizes,
    max_model_len: int,
    fingerprint: str,
    needs: ModelCosts | None,
    limits: MachineLimits | None,
    taken_back: int = 0,
) -> StepLog | None:
    if not config.step_log:
        return None
    header = Header(
        model=model_mark(config),
        fingerprint=fingerprint,
        config=msgspec.to_builtins(config),
        num_blocks=sizes.blocks,
        sliding=sizes.sliding,
        window=sizes.window,
        max_model_len=max_model_len,
        clock=time.monotonic(),
        wall=time.time(),
        content="tokens" if config.step_log_tokens else "digests",
        needs=needs,
        limits=limits,
        taken_back=taken_back,
    )
    return StepLog(config.step_log, header)


def model_mark(config: EngineConfig) -> str:
    """Size and digest of the beginning of the model's file or of its folder's config.json; "" without."""
    if config.backend in ("fake", "null"):
        return ""
    path = hub.resolve(config.model, offline=True).path
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        return f"{path.stat().st_size}-{hashlib.sha256(file.read(1 << 20)).hexdigest()[:16]}"


def weights_digest(config: EngineConfig) -> str:
    """Tells the weights of one model from those of another, a fine-tune of it included: a digest of samples
    that lie evenly over its files. "" without a model."""
    if config.backend in ("fake", "null"):
        return ""
    path = hub.resolve(config.model, offline=True).path
    files = [*sorted(path.glob("*.safetensors")), path / "config.json"] if path.is_dir() else [path]
    files = [file for file in files if file.is_file()]
    digest = hashlib.blake2b(digest_size=16)
    if config.load_format == "dummy":
        files = [file for file in files if file.name == "config.json"]
        digest.update(f"dummy {config.load_seed} ".encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size} ".encode())
        with open(file, "rb") as opened:
            for sample in range(SAMPLES):
                opened.seek(sample * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()
