"""The same requests under several policies and orders, on one engine, real or simulated.

Owns which policies and orders are compared, what each is sent, and the order of the runs. What
happened is in the step log of each run and nowhere else: figures, pictures and the report are made
from it. Must not know how they are made.

No oracle (docs/adr/0006): every request names the same cap as its max_tokens; where its answer ends
only the executor knows.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.engine.fake import FakeExecutor
from pageturner.errors import EngineFault, bad_setting
from pageturner.formats import hub
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.lab.bench.engine_bench import EngineBench, SimulatedClock, drive
from pageturner.lab.simulation.calibration import engine_of
from pageturner.lab.simulation.recorded_runs import RecordedRun
from pageturner.lab.simulation.step_cost import CalibratedCost, StepCost
from pageturner.lab.traffic.traffic import STOP, OpenLoop, TrafficRequest, encoded
from pageturner.params import SamplingParams
from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS
from pageturner.progress import Progress
from pageturner.request import Request
from pageturner.scheduler.types import Plan, Result
from pageturner.telemetry.work import MachineLimits, ModelCosts, work_of

UNBATCHED = (
    "unbatched"  # one request at a time: not a policy, but what batching is measured against
)
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
        """The engine's settings with these two, and tokens in its log: answers are compared."""
        config = replace(config, order=self.order, step_log_tokens=True)
        if self.policy == UNBATCHED:
            return replace(config, policy="chunked", max_num_seqs=1)
        return replace(config, policy=self.policy)


def contenders(policies: list[str], orders: list[str]) -> list[Contender]:
    """Each policy with each order, once. EngineFault('bad_setting') for names that do not exist."""
    known = {"policy": (policies, [*POLICIES, UNBATCHED]), "order": (orders, list(ORDERS))}
    for kind, (names, there) in known.items():
        if not names:
            raise bad_setting(f"name at least one {kind}: {', '.join(there)}")
        for name in names:
            if name not in there:
                raise bad_setting(f"unknown {kind} {name!r}: one of {', '.join(there)}")
    return list(dict.fromkeys(Contender(policy, order) for policy in policies for order in orders))


class PredictedExecutor:
    """An executor without a model: a step takes the time that a calibration says."""

    def __init__(self, cost: StepCost, clock: SimulatedClock) -> None:
        self._cost = cost
        self._clock = clock
        self._tokens = FakeExecutor(FAKE_VOCAB)

    def run(self, plan: Plan) -> Result:
        self._clock.sleep(self._clock.now() + self._cost.seconds(work_of(plan)))
        return self._tokens.run(plan)


# -- engines ---------------------------------------------------------------------------------------

Encode = Callable[[str], list[int]]  # text to tokens


def real_engine(config: EngineConfig) -> tuple[EngineBench, Encode]:
    """This machine, this model. Warm when it comes back."""
    bench = EngineBench.load(config)
    params = SamplingParams(temperature=0.0, max_tokens=4, stop_ids=(STOP,))
    warm = [Request(number, (7, 8, 9, 10 + number), params) for number in range(1, 4)]
    drive(bench.built.engine, warm, bench.clock, lambda: None)
    return bench, words_as_tokens if config.backend in ("fake", "null") else _encoder(config)


def simulated_engine(
    cost: CalibratedCost, change: Callable[[EngineConfig], EngineConfig]
) -> tuple[EngineBench, Encode]:
    """The engine that was calibrated, with the settings that `change` changes."""
    known, sizes, longest = engine_of(cost)
    config = change(known)
    sizes = replace(sizes, blocks=sizes.blocks * known.block_size // config.block_size)
    needs, limits = (cost.engine.get(name) for name in ("needs", "limits"))
    stands = replace(
        fake_engine(config, longest),
        sizes=sizes,
        needs=msgspec.convert(needs, ModelCosts | None),
        limits=msgspec.convert(limits, MachineLimits | None),
    )
    try:
        encode = _encoder(config)
    except EngineFault:  # a calibration may come from another machine
        encode = words_as_tokens
    return predicted_engine(stands, config, cost, longest), encode


def predicted_engine(
    built: LoadedEngine, config: EngineConfig, cost: StepCost, longest: int
) -> EngineBench:
    """Return a stand-in for an engine with this memory, these needs and these limits: no model, a
    clock of its own, steps that take what `cost` says. longest: tokens of a sequence."""
    clock, config = SimulatedClock(), replace(config, backend="fake")
    fake = fake_engine(config, longest)
    fake.executor, fake.sizes = PredictedExecutor(cost, clock), built.sizes
    fake.needs, fake.limits, fake.pace = built.needs, built.limits, built.pace
    return EngineBench(fake, config, clock)


def fake_engine(config: EngineConfig, longest: int) -> LoadedEngine:
    """An engine without a model, for sequences of so many tokens."""
    return make_engine(
        replace(config, backend="fake", step_log="", max_model_len=longest, speculation="off")
    )


def _encoder(config: EngineConfig) -> Encode:
    tokenizer = load_tokenizer(hub.resolve(config.model, offline=True).path, config.load_format)
    return lambda text: tokenizer.encode(text, add_special=True, parse_special=False)


def words_as_tokens(text: str) -> list[int]:
    """One token for each word, where there is no model."""
    return [1 + zlib.crc32(word.encode()) % (FAKE_VOCAB - 1) for word in text.split()]


# -- what is sent, and turns -----------------------------------------------------------------------


def make_requests(
    each: list[TrafficRequest], cap: int, context: int, encode: Encode
) -> list[Request]:
    """Return the requests for the engine, by arrival. `cap` is the max_tokens of every request, and
    longer answers are cut there. EngineFault for a request that does not fit a context of so many
    tokens, for times out of order and for no request at all."""
    if not each:
        raise EngineFault("workload", "the workload holds no request")
    found, before = [], 0.0
    for number, one in enumerate(encoded(each, encode), 1):
        if not before <= one.arrival < float("inf"):
            message = (
                f"request {number} arrives at {one.arrival:g} s, the one before it at {before:g} s"
            )
            raise EngineFault("workload", f"{message}: sort the workload by arrival_s")
        before = one.arrival
        length, end = len(one.prompt_tokens()), min(one.answer_length, cap)
        if not length or length + end > context:
            message = f"request {number} has {length} + {end} tokens, and there is room for 1 to {context}"
            raise EngineFault("workload", f"{message}: shorten it, or raise --max-model-len")
        found.append(replace(one, output=end, max_tokens=cap))
    return OpenLoop(found).engine_requests()


MAX_ROUNDS = 5
SECONDS = 45.0  # for all rounds, where nobody says how many


def run_contenders(
    bench: EngineBench,
    each: list[Contender],
    requests: list[Request],
    rounds: int,
    folder: Path,
    *,
    progress: bool | None = None,
) -> dict[Contender, list[RecordedRun]]:
    """Run all contenders in turn, `rounds` times: A B C, A B C. So a machine that gets slower
    meanwhile is unfair to none of them. 0: as often as SECONDS allow, at least once."""
    found: dict[Contender, list[RecordedRun]] = {contender: [] for contender in each}
    begin = before = time.monotonic()
    done, a_round = 0, len(each) * len(requests)
    with Progress("comparing", (rounds or 1) * a_round, enabled=progress) as line:
        for number in range(rounds or MAX_ROUNDS):
            line.total = max(line.total, (number + 1) * a_round)
            for contender in each:

                def told(name: str = contender.name) -> None:
                    nonlocal done
                    done += 1
                    line.update(done, name)

                log = folder / f"{contender.policy}-{contender.order}-{number + 1}.steps"
                log.unlink(missing_ok=True)
                config = contender.settings(bench.config)
                found[contender].append(bench.run(requests, config, log=log, told=told))
            now = time.monotonic()
            if not rounds and now - begin + (now - before) > SECONDS:
                break
            before = now
    return found


def answers_of(run: RecordedRun) -> dict[int, list[int]]:
    """The tokens of each answer, by request."""
    found: dict[int, list[int]] = {}
    for step in run.steps:
        for item in step.items:
            found.setdefault(item.id, []).extend(item.tokens)
    return found


BEGINNING = 60  # characters of a text


def texts_of(
    config: EngineConfig, requests: list[Request], answers: dict[int, list[int]]
) -> dict[int, tuple[str, str]]:
    """Return how the prompt and the answer of each request begin, by request."""
    tokenizer = load_tokenizer(hub.resolve(config.model, offline=True).path, config.load_format)

    def beginning(tokens: Sequence[int]) -> str:
        text = tokenizer.decode(tokens[:BEGINNING])
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text if len(text) <= BEGINNING else text[: BEGINNING - 1] + "…"

    return {r.id: (beginning(r.prompt), beginning(answers.get(r.id, []))) for r in requests}
