"""The same requests under several policies and orders, on one engine, real or simulated.

Owns who competes, what each is sent, and the turns they take. What happened is in the step log of each run
and nowhere else: figures, pictures and the report are made from it. Must not know how they are made.

No oracle (docs/adr/0006): every request names the same cap as its max_tokens; where its answer ends only the
executor knows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pageturner.config import EngineConfig
from pageturner.core.types import Plan, Request, Result, SamplingParams
from pageturner.errors import EngineFault
from pageturner.files import hub
from pageturner.files.load_tokenizer import load_tokenizer
from pageturner.lab import history
from pageturner.lab.calibrate import engine_of
from pageturner.lab.cost import Calibrated
from pageturner.lab.drive import Clock, SimulatedClock, WallClock, drive
from pageturner.lab.history import Run
from pageturner.lab.workload import Job
from pageturner.observe.work import MachineLimits, ModelCosts, work_of
from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS
from pageturner.progress import Progress
from pageturner.runtime.engine_factory import LoadedEngine, engine_again, make_engine
from pageturner.runtime.fake import FakeExecutor

STOP = 0  # the token that ends an answer; most tokenizers have a special one there
UNBATCHED = "unbatched"  # one request at a time: not a policy, but what batching is measured against
FAKE_VOCAB = 320


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with an order."""

    policy: str
    order: str = "fcfs"

    @property
    def name(self) -> str:
        return self.policy if self.order == "fcfs" else f"{self.policy} + {self.order}"

    def settings(self, config: EngineConfig) -> EngineConfig:
        """The engine's settings with these two."""
        if self.policy == UNBATCHED:
            return replace(config, policy="chunked", order=self.order, max_num_seqs=1)
        return replace(config, policy=self.policy, order=self.order)


def contenders(policies: list[str], orders: list[str]) -> list[Contender]:
    """Each policy with each order, once. EngineFault('bad_setting') for names that do not exist."""
    known = {"policy": (policies, [*POLICIES, UNBATCHED]), "order": (orders, list(ORDERS))}
    for kind, (names, there) in known.items():
        if not names:
            raise EngineFault("bad_setting", f"name at least one {kind}: {', '.join(there)}")
        for name in names:
            if name not in there:
                raise EngineFault("bad_setting", f"unknown {kind} {name!r}: one of {', '.join(there)}")
    return list(dict.fromkeys(Contender(policy, order) for policy in policies for order in orders))


class Predicted:
    """An executor without a model: a step takes the time that a calibration says."""

    def __init__(self, cost: Calibrated, clock: SimulatedClock) -> None:
        self._cost = cost
        self._clock = clock
        self._tokens = FakeExecutor(FAKE_VOCAB)

    def run(self, plan: Plan) -> Result:
        self._clock.sleep(self._clock.now() + self._cost.seconds(work_of(plan)))
        return self._tokens.run(plan)


# -- engines -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bench:
    """An engine that can be put together again under other rules. encode: text to tokens."""

    built: LoadedEngine
    config: EngineConfig
    clock: Clock
    encode: Callable[[str], list[int]]

    def run(self, contender: Contender, requests: list[Request], log: Path, told: Callable[[], None]) -> Run:
        """Send all, step until all are answered; what happened. `told` at the end of each request."""
        config = replace(contender.settings(self.config), step_log=str(log), step_log_tokens=True)
        try:
            engine = engine_again(self.built, config)
        except ValueError as error:
            raise EngineFault("bad_setting", str(error)) from error
        engine.clock = self.clock.now
        try:
            drive(engine, requests, self.clock, told)
        finally:
            engine.close()
        run = history.last(log)
        if run.lost:
            raise EngineFault("step_log", f"the disk of {log} is too slow: {run.lost} records were lost")
        return run


def real(config: EngineConfig) -> Bench:
    """This machine, this model. Warm when it comes back."""
    built = make_engine(replace(config, step_log=""))
    encode = _words if config.backend in ("fake", "null") else _encoder(config.model)
    bench = Bench(built, config, WallClock(), encode)
    params = SamplingParams(temperature=0.0, max_tokens=4, stop_ids=(STOP,))
    warm = [Request(number, (7, 8, 9, 10 + number), params) for number in range(1, 4)]
    drive(built.engine, warm, bench.clock, lambda: None)
    return bench


def simulated(cost: Calibrated, change: Callable[[EngineConfig], EngineConfig]) -> Bench:
    """The engine that was calibrated, with the settings that `change` changes."""
    known, sizes, longest = engine_of(cost)
    config = replace(change(known), backend="fake")
    clock = SimulatedClock()
    sizes = replace(sizes, blocks=sizes.blocks * known.block_size // config.block_size)
    fake = make_engine(replace(config, step_log="", max_model_len=longest, speculation="off"))
    needs, limits = (cost.engine.get(name) for name in ("needs", "limits"))
    built = replace(
        fake,
        executor=Predicted(cost, clock),
        sizes=sizes,
        num_blocks=sizes.blocks,
        needs=msgspec.convert(needs, ModelCosts | None),
        limits=msgspec.convert(limits, MachineLimits | None),
    )
    try:
        encode = _encoder(config.model)
    except EngineFault:  # a calibration may come from another machine
        encode = _words
    return Bench(built, config, clock, encode)


def _encoder(model: str) -> Callable[[str], list[int]]:
    tokenizer = load_tokenizer(hub.resolve(model, offline=True).path)
    return lambda text: tokenizer.encode(text, add_special=True, parse_special=False)


def _words(text: str) -> list[int]:
    """A token a word, where there is no model."""
    return [1 + zlib.crc32(word.encode()) % (FAKE_VOCAB - 1) for word in text.split()]


# -- what is sent, and turns ---------------------------------------------------------------------------------


def make_requests(
    jobs: list[Job], cap: int, context: int, encode: Callable[[str], list[int]]
) -> list[Request]:
    """One request a job, by arrival. A job without `forced_end` ends at its `max_tokens`; longer answers than
    `cap` are cut there. EngineFault for one that has no place in a context of so many tokens, for times out
    of order and for no job at all."""
    if not jobs:
        raise EngineFault("workload", "the workload holds no request")
    found, before = [], 0.0
    for number, job in enumerate(jobs, 1):
        if not before <= job.arrival_s < float("inf"):
            message = f"request {number} arrives at {job.arrival_s:g} s, the one before it at {before:g} s"
            raise EngineFault("workload", f"{message}: sort the workload by arrival_s")
        before = job.arrival_s
        prompt, end = tuple(encode(job.prompt)), min(job.forced_end or job.max_tokens, cap)
        if not prompt or len(prompt) + end > context:
            message = (
                f"request {number} has {len(prompt)} + {end} tokens, and there is room for 1 to {context}"
            )
            raise EngineFault("workload", f"{message}: shorten it, or raise --max-model-len")
        params = SamplingParams(temperature=0.0, max_tokens=cap, stop_ids=(STOP,), forced_end=end)
        found.append(Request(number, prompt, params, job.arrival_s, tenant=job.tenant))
    return found


def compare(
    bench: Bench,
    each: list[Contender],
    requests: list[Request],
    rounds: int,
    folder: Path,
    *,
    progress: bool | None = None,
) -> dict[Contender, list[Run]]:
    """All contenders in turn, so many times: A B C, A B C, that a machine that drifts is unfair to nobody."""
    found: dict[Contender, list[Run]] = {contender: [] for contender in each}
    done = 0
    with Progress("comparing", rounds * len(each) * len(requests), enabled=progress) as line:
        for number in range(rounds):
            for contender in each:

                def told(name: str = contender.name) -> None:
                    nonlocal done
                    done += 1
                    line.update(done, name)

                log = folder / f"{contender.policy}-{contender.order}-{number + 1}.steps"
                log.unlink(missing_ok=True)
                found[contender].append(bench.run(contender, requests, log, told))
    return found


def answers(run: Run) -> dict[int, list[int]]:
    """The tokens of each answer, by request."""
    found: dict[int, list[int]] = {}
    for step in run.steps:
        for item in step.items:
            found.setdefault(item.id, []).extend(item.tokens)
    return found
