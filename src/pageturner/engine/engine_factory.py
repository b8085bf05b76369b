"""The engine factory, from settings to an engine: backend, model, KV storage, scheduler. Says how
long each phase took.

Everything that cannot work is an EngineFault before a request is taken.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from pageturner import logs
from pageturner.config.settings import EngineConfig
from pageturner.engine import devices
from pageturner.engine.backends import make_ops, warn
from pageturner.engine.device_trust import self_test
from pageturner.engine.engine import Engine, EngineParts
from pageturner.engine.fake import FakeExecutor, NullExecutor
from pageturner.engine.fingerprint import fingerprint_of, model_mark, weights_digest
from pageturner.engine.machine_limits import limits_of, stored_peak
from pageturner.engine.step_sizes import with_step_sizes
from pageturner.errors import bad_setting
from pageturner.executor.adapters import AdapterStore
from pageturner.executor.async_runner import AsyncRunner
from pageturner.executor.draft import Costs, Drafter, best_length
from pageturner.executor.draft_compatibility import (
    check_draft,
    check_speculation,
    check_tokens,
    cost_of,
)
from pageturner.executor.draft_model import MAX_DRAFT, DraftModel
from pageturner.executor.grammar import Grammars
from pageturner.executor.kv_memory import KVForm, KVLayout, KVSizes, available_memory, plan_kv
from pageturner.executor.mtp import MTPDrafter
from pageturner.executor.runner import Executor, Runner
from pageturner.formats import hub
from pageturner.formats.load_tokenizer import Tokenizer, load_tokenizer, load_with_defaults
from pageturner.kernels.base import KVSpec, Ops
from pageturner.kernels.peak import quick_peak
from pageturner.kv.kv_connectors import KVConnectors, wants_tiers
from pageturner.kv.kv_survival import SurvivingKV
from pageturner.kv.kv_transfer import KVStorage
from pageturner.models.decoder import Decoder
from pageturner.models.load import open_model
from pageturner.parallel import tensor_parallel
from pageturner.policies.drafts import PricedDrafts
from pageturner.policies.scheduler_factory import SchedulerStack, make_scheduler
from pageturner.policies.suffix_drafts import suffix_drafter
from pageturner.scheduler.listener import Listener
from pageturner.telemetry.step_log import Header, StepLog
from pageturner.telemetry.work import MachineLimits, ModelCosts
from pageturner.telemetry.work_price import context_price
from pageturner.text.grammar.compiler import Compiler

T = TypeVar("T")
FAKE_MODEL_LEN = 8192


@dataclass(slots=True, kw_only=True)
class LoadedEngine:
    """An engine that is ready, and what its users must know. Lengths in tokens.

    needs         what its steps compute and read; limits: of this machine. None where they are not
                  known
    taken_back    KV blocks that another engine process had computed before it died
    async_runner  the same executor, where it can begin a step before the one before it is known
    pace          limits by which steps are sized: those, or what a short look at the machine found
    device        where it computes, and why
    """

    engine: Engine = field(init=False)
    executor: Executor
    max_model_len: int
    sizes: KVSizes
    block_size: int
    vocab_size: int
    fingerprint: str
    phases: dict[str, float] = field(default_factory=dict)
    kv_bytes: int = 0
    needs: ModelCosts | None = None
    limits: MachineLimits | None = None
    pace: MachineLimits | None = None
    taken_back: int = 0
    device: str = ""
    async_runner: AsyncRunner | None = None

    @property
    def num_blocks(self) -> int:
        return self.sizes.blocks


class Phases:
    """Seconds by phase of the start-up. on_phase: called when one begins."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._on_phase = on_phase

    def run(self, name: str, work: Callable[[], T]) -> T:
        self._on_phase(name)
        begin = time.perf_counter()
        result = work()
        self.seconds[name] = round(time.perf_counter() - begin, 4)
        return result


def make_engine(
    config: EngineConfig,
    wrap: Callable[[Ops], Ops] = lambda ops: ops,
    tokenizer: Callable[[], Tokenizer] | None = None,
    kv_fd: int | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> LoadedEngine:
    """Load the model and put the engine together. EngineFault when that cannot be done.

    wrap       puts something around the backend, such as a clock
    tokenizer  asked when the first grammar comes, by another thread; None: read from the model's
               files then
    kv_fd      memory file for KV, which somebody keeps for the next engine; None: KV goes with this
               process
    on_phase   called with each phase of the start-up when it begins
    """
    _check(config)
    connectors = KVConnectors(config)
    if config.backend in ("fake", "null"):
        return _build_fake(config, connectors)
    phases = Phases(on_phase)
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
    length = _model_len(config, decoder.spec.context)
    config = _tried(phases, decoder, chosen, ranks and ranks.ops, config, length)
    rope = decoder.spec.rope.choice(length)
    fingerprint = fingerprint_of(ops, config, devices.kv_type(config), rope)
    kept = _surviving_kv(config, ops, kv_fd, decoder, fingerprint)
    with devices.memory_lock(chosen.ops):
        # what was kept has its memory already, and what is free says nothing
        sizes = (kept and kept.sizes) or _kv_sizes(config, ops, decoder, length, smaller)
        layout = KVLayout(sizes, config.block_size, devices.kv_type(config))
        compiler = Compiler(read)
        grammars = Grammars(
            compiler,
            least=compiler.least,
            most_waiting=config.max_queue,
            most_places=2 * config.max_num_seqs,
        )
        priced = suffix_drafter(config.speculation)
        drafter: Drafter | None = priced
        if smaller:
            costs = _costs(smaller, decoder)
            drafter = DraftModel(smaller, ops, layout, costs)
        elif decoder.mtp is not None:
            drafter = MTPDrafter(decoder, ops, layout)
        alloc = kept.begin(sizes) if kept else ops.alloc_kv
        runner = phases.run("kv", lambda: Runner(decoder, ops, layout, grammars, drafter, alloc))
        if kept is not None and runner.recurrent is not None:
            runner.recurrent = kept.place(runner.recurrent)
    devices.tell_start(chosen, phases.seconds)
    limits = _limits(ops, config, runner.needs) or devices.limits_of(chosen.ops)
    built = LoadedEngine(
        executor=runner,
        max_model_len=length,
        sizes=sizes,
        block_size=config.block_size,
        vocab_size=decoder.spec.vocab,
        fingerprint=fingerprint,
        kv_bytes=runner.nbytes,
        needs=runner.needs,
        limits=limits,
        pace=limits or phases.run("pace", lambda: _pace(ops, config)),
        phases=phases.seconds,
        device=chosen.text,
        async_runner=async_runner_of(config, runner, decoder, ops, priced),
    )
    parts = EngineParts(
        grammars=grammars,
        adapters=AdapterStore(decoder, config.max_loras),
        connectors=connectors,
        async_executor=built.async_runner,
    )
    states = None if runner.recurrent is None else runner.recurrent.states
    storage = KVStorage(ops, runner.storage[0], _block_spec(decoder, config), states)
    _assemble(with_step_sizes(config, built.needs, built.pace), built, parts, kept, storage)
    return built


def _texts(config: EngineConfig, model: hub.ModelFile) -> Tokenizer:
    return load_with_defaults(model.path, config.generation_config, config.load_format)[0]


def _device(config: EngineConfig, model: hub.ModelFile) -> devices.DeviceChoice:
    """Choose where the model is computed, and say what a device's memory is for before anything is
    loaded."""
    chosen = devices.choose(config, lambda: devices.needs_of(model.path, config))
    if chosen.ops is not None:
        if config.speculation == "mtp":
            raise bad_setting(
                "--speculation mtp does not work on GPUs yet: use --device cpu, or leave it out"
            )
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
    """Do what a device does before it serves: its largest step, smaller ones, and the test that it
    computes right. Gives the settings, with a token budget that fits. Of several ranks the first
    one does it alone: a step that does not fit would end the others. Then all do it, for what they
    take is not free for KV.

    ranks  their backend; None: there is one device
    """
    if chosen.ops is None:
        return config
    ops = ranks or chosen.ops
    with ranks.alone() if ranks else nullcontext():
        config = phases.run("dry_run", lambda: devices.dry_run(decoder, ops, config, length))
        phases.run("first_step", lambda: devices.smaller_steps(decoder, ops, config, length))
        spec = _block_spec(decoder, config)
        phases.run("proof", lambda: self_test(decoder, ops, spec, chosen.mark, length))
    if ranks:
        phases.run("ranks", lambda: devices.by_all_ranks(decoder, ops, config, length))
    return config


def _block_spec(decoder: Decoder, config: EngineConfig) -> KVSpec:
    """Return the form of one KV block of a model."""
    return decoder.kv_spec(1, config.block_size, devices.kv_type(config))


def _kv_sizes(
    config: EngineConfig, ops: Ops, decoder: Decoder, max_model_len: int, smaller: Decoder | None
) -> KVSizes:
    """Return how many blocks there are. A tier holds blocks of all layers: with one they are kept
    as if no layer had a window. smaller: the draft model."""
    windows = (0, 0) if wants_tiers(config) else (decoder.windowed, decoder.window)
    asked, free = devices.kv_bytes(ops, config, available_memory())
    free -= config.kv_host_memory
    config = replace(config, kv_cache_memory=asked)
    of_draft = _block_spec(smaller, config).nbytes if smaller else 0
    if decoder.mtp is not None:
        kv_dtype = devices.kv_type(config)
        of_draft = decoder.spec.mtp.kv_spec(1, config.block_size, kv_dtype).nbytes
    recurrent = decoder.spec.recurrent_spec(devices.kv_type(config))
    form = KVForm(_block_spec(decoder, config), *windows, of_draft, recurrent)
    return plan_kv(form, config, max_model_len, free)


def async_runner_of(
    config: EngineConfig,
    runner: Runner,
    decoder: Decoder,
    ops: Ops,
    drafts: PricedDrafts | None = None,
) -> AsyncRunner | None:
    """Return the runner of asynchronous steps; None for synchronous ones. A step log is replayed by
    plans that know every token, and drafts of a model or a head are made in every step. drafts:
    those that are made only where they pay."""
    plain = not config.async_scheduling or config.step_log != ""
    plain |= config.speculation in ("draft", "mtp")
    later = getattr(ops, "later", None)  # a backend that need not wait says so: ChoosesLater
    return None if plain or later is None else AsyncRunner(runner, decoder, later, drafts)


def _surviving_kv(
    config: EngineConfig, ops: Ops, kv_fd: int | None, decoder: Decoder, fingerprint: str
) -> SurvivingKV | None:
    """Return the KV that is to outlive this process. None without the prefix cache: only what is
    findable can be taken back; and with the reference, whose KV lies in arrays of numpy."""
    wanted = config.kv_survival and config.enable_prefix_caching and ops.name == "native"
    wanted &= tensor_parallel.ranks_of(config) == 1  # each rank has a part of each block
    if kv_fd is None or not wanted:
        return None
    spec, tiers = _block_spec(decoder, config), wants_tiers(config)
    about: tuple[Any, ...] = (weights_digest(config), fingerprint, spec, decoder.windowed)
    about += (decoder.window, tiers, decoder.spec.recurrent_spec(devices.kv_type(config)))
    identity = hashlib.blake2b(repr(about).encode(), digest_size=32).digest()
    return SurvivingKV(kv_fd, identity, _threads(config))


def _threads(config: EngineConfig) -> int:
    return config.threads or len(os.sched_getaffinity(0))


def _limits(ops: Ops, config: EngineConfig, needs: ModelCosts) -> MachineLimits | None:
    if ops.name != "native":
        return None
    peak = stored_peak(ops.fingerprint.split("-")[1], _threads(config))
    return limits_of(peak, needs.weight_bytes(1 << 30, 1))


def _pace(ops: Ops, config: EngineConfig) -> MachineLimits | None:
    """Return rough limits where nobody has measured the machine, from a look that a start has time
    for. Reading is not looked at: a step full of prompts hides it."""
    if ops.name != "native":
        return None
    return MachineLimits(math.inf, *quick_peak(ops.fingerprint.split("-")[1], _threads(config)))


def _check(config: EngineConfig) -> None:
    if not 1 <= config.block_size <= 256:
        raise bad_setting(f"block_size is 1 to 256, not {config.block_size}")
    check_speculation(config)
    tensor_parallel.check(config)


def _load_draft_model(config: EngineConfig, ops: Ops, target: Callable[[], Tokenizer]) -> Decoder:
    """EngineFault('draft_model') if its tokens are not the target's."""
    path = hub.resolve(config.draft_model).path
    check_draft(open_model(path, config.load_format, config.load_seed).spec)
    check_tokens(target(), load_tokenizer(path), str(path))
    return tensor_parallel.load(path, ops, config)


def _costs(smaller: Decoder, decoder: Decoder) -> Costs:
    """Warns where drafting can hardly pay."""
    costs = Costs(cost_of(smaller.spec, decoder.spec))
    if not best_length(costs, 90, 1, MAX_DRAFT)[0]:
        warn(
            f"a step of the draft model takes {costs.step:.0%} of one of the model: it will not be used"
        )
    return costs


def _model_len(config: EngineConfig, context: int) -> int:
    if config.max_model_len > context:
        raise bad_setting(
            f"max_model_len {config.max_model_len} is over the model's context of {context} tokens",
        )
    return config.max_model_len or context


def _build_fake(config: EngineConfig, connectors: KVConnectors) -> LoadedEngine:
    """Make an engine without a model: for tests of the server and for measuring the engine
    itself."""
    vocab = int(os.environ.get("PAGETURNER_FAKE_VOCAB", "320"))
    seconds = float(os.environ.get("PAGETURNER_FAKE_STEP_SECONDS", "0"))
    length = config.max_model_len or FAKE_MODEL_LEN
    blocks = config.kv_cache_memory // config.block_size or 64 * length // config.block_size
    built = LoadedEngine(
        executor=FakeExecutor(vocab, seconds) if config.backend == "fake" else NullExecutor(),
        max_model_len=length,
        sizes=KVSizes(blocks),
        block_size=config.block_size,
        vocab_size=vocab,
        fingerprint=config.backend,
    )
    _assemble(config, built, EngineParts(connectors=connectors))
    return built


def _assemble(
    config: EngineConfig,
    built: LoadedEngine,
    parts: EngineParts,
    kept: SurvivingKV | None = None,
    storage: KVStorage | None = None,
) -> None:
    """Put the engine together. kept: KV of the process before; storage: where the KV of the model
    lies."""
    assert parts.connectors is not None
    model = f"{weights_digest(config)}-{built.fingerprint}"
    config = _with_context_price(config, built.needs)
    listeners = parts.connectors.listeners
    if kept:
        listeners = (kept.listener, *listeners)
    stack = scheduler_of(config, built.sizes, built.max_model_len, model, listeners)
    if kept:
        begin = time.perf_counter()
        if taken_back := kept.attach(stack.pool):
            built.taken_back = taken_back
            built.phases["kv_taken_back"] = round(time.perf_counter() - begin, 4)
    parts.connectors.attach(stack.pool, storage, model, built.vocab_size)
    parts = replace(parts, log=_step_log(config, built, built.taken_back), costs=built.needs)
    built.engine = Engine(stack, built.executor, parts=parts)


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
    """The scheduler of an engine with these settings and so many blocks. model: what the bits of
    its KV depend on, for the keys of blocks. listeners: who else wants to be told."""
    return make_scheduler(
        config,
        num_blocks=sizes.blocks,
        window=sizes.window,
        sliding=sizes.sliding,
        states=sizes.states,
        tails=sizes.tails,
        max_model_len=max_model_len,
        model=model,
        listeners=listeners,
    )


def engine_again(built: LoadedEngine, config: EngineConfig) -> Engine:
    """Return a new engine around the loaded model, without grammars, with another step log: for
    measuring. The old one must not be used any more."""
    config = _with_context_price(with_step_sizes(config, built.needs, built.pace), built.needs)
    stack = scheduler_of(config, built.sizes, built.max_model_len)
    log = _step_log(config, built)
    ahead = None if log else built.async_runner
    parts = EngineParts(log=log, costs=built.needs, async_executor=ahead)
    return Engine(stack, built.executor, parts=parts)


def _step_log(config: EngineConfig, built: LoadedEngine, taken_back: int = 0) -> StepLog | None:
    if not config.step_log:
        return None
    header = Header(
        model=model_mark(config),
        fingerprint=built.fingerprint,
        config=msgspec.to_builtins(config),
        num_blocks=built.sizes.blocks,
        sliding=built.sizes.sliding,
        window=built.sizes.window,
        max_model_len=built.max_model_len,
        clock=time.monotonic(),
        wall=time.time(),
        content="tokens" if config.step_log_tokens else "digests",
        needs=built.needs,
        limits=built.limits,
        taken_back=taken_back,
        states=built.sizes.states,
        tails=built.sizes.tails,
    )
    return StepLog(config.step_log, header)
