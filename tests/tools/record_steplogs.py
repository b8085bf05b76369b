"""Records the step logs of tests/goldens/steplogs: what the engine of commit 8cc2ebe planned and answered.

    PYTHON_OF_8CC2EBE tests/tools/record_steplogs.py [--only NAME ...]      (from the top of the repository)

It drives that commit's engine under that commit's names, on a clock of its own: a step takes a fixed time and
so much for each token, so a fake engine plans the same on every machine. Run it with the Python of a virtual
environment in which 8cc2ebe is installed; any later engine then has to replay what it wrote.
"""

from __future__ import annotations

import argparse
import gzip
import random
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from pageturner.config import EngineConfig
from pageturner.core.advance import cut
from pageturner.core.types import Failure, Output, Plan, Request, Result, Resume, SamplingParams
from pageturner.runtime import steplog
from pageturner.runtime.build import Built, build, retuned
from pageturner.runtime.fake import next_token
from pageturner.structured import StructuredOutputsParams

FOLDER = Path("tests/goldens/steplogs")
WORK = Path("build/steplogs")  # the log's header names its file: one that is called the same everywhere
BEGIN = 1000.0  # seconds of the clock at the start
TINY = "tests/goldens/tiny_llama.gguf"
FAMILIES = "tests/goldens/families"
POLICIES = ("chunked", "adaptive_chunk", "prefill_first", "served_ratio", "orca", "window", "static")
ORDERS = ("fcfs", "priority", "sjf", "deadline", "adaptive", "fair", "prefix")
VOCABULARY = 320  # of the fake engine and of the tiny models
END = 2  # the end-of-sequence token
PER_STEP, PER_TOKEN = 0.004, 0.0003  # seconds of a step
FAILING = 7  # with `failing`: the requests whose id is a multiple of it fail at their fourth token
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = BEGIN

    def __call__(self) -> float:
        return self.now


class Clocked:
    """An executor whose steps take the time they are said to take. drafting: of the fake engine, whose
    tokens are known beforehand: drafts are right in three of four places. failing: see FAILING."""

    def __init__(self, built: Built, clock: Clock, drafting: bool, failing: bool) -> None:
        self._inner, self._clock = built.executor, clock
        self._drafting, self._failing = drafting, failing

    def run(self, plan: Plan) -> Result:
        result = self._inner.run(plan)
        self._clock.now += PER_STEP + PER_TOKEN * plan.tokens
        for number, item in enumerate(plan.items):
            seq, output = item.sequence, result.outputs[number]
            if self._drafting and output.tokens:
                accepted, output.draft = _drafted(seq.tokens, seq.draft[: item.drafted], output.tokens[0])
                output.tokens, _ = cut(seq, accepted)
                output.logprobs = output.logprobs * len(output.tokens)
            if self._failing and seq.request.id % FAILING == 0 and seq.generated >= 3:
                result.outputs[number] = Output(failure=Failure("recorded", "it was made to fail"))
        return result


def _drafted(tokens: list[int], draft: list[int], chosen: int) -> tuple[list[int], list[int]]:
    """What the fake engine says to drafted tokens, behind the token it has chosen, and its next guesses."""
    accepted = [chosen]
    for guess in draft:
        if guess != accepted[-1]:
            break
        accepted.append(next_token(tokens + accepted, VOCABULARY))
    guesses: list[int] = []
    for _ in range(zlib.crc32(bytes(t % 256 for t in accepted)) % 5):
        true = next_token(tokens + accepted + guesses, VOCABULARY)
        guesses.append(true if len(guesses) % 4 != 3 else (true + 1) % VOCABULARY)
    return accepted, guesses


@dataclass(frozen=True, slots=True)
class Act:
    """Something that happens at a time: `what` is called with the engine."""

    at: float
    what: Callable[[Driver], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One log: the settings of its engine and what was asked of it."""

    name: str
    acts: list[Act]
    settings: dict[str, Any] = field(default_factory=dict)
    drafting: bool = False
    failing: bool = False


class Driver:
    """An engine with a step log, and its clock."""

    def __init__(self, case: Case, path: Path) -> None:
        fake = {"backend": "fake", "kv_cache_memory": 36 * 8, "max_model_len": 512, "block_size": 8}
        common = {"step_log": str(path), "step_log_tokens": True, "max_num_seqs": 8}
        settings = {**common, **fake, "max_num_batched_tokens": 64, **case.settings}
        self.config = EngineConfig(**settings)
        self.clock = Clock()
        built = build(self.config)
        self.engine = built.engine
        self.engine.clock = self.clock
        self.engine.executor = Clocked(built, self.clock, case.drafting, case.failing)
        self._wanted: EngineConfig | None = None

    def submit(self, request: Request) -> None:
        self.engine.submit(replace(request, arrival=self.clock.now))

    def change(self, **settings: Any) -> None:
        """As POST /v1/admin/config does, between two steps."""
        self._wanted = replace(self.config, **settings)

    def configure(self) -> None:
        wanted = self._wanted
        if wanted is None or not retuned(self.engine.scheduler, self.config, wanted, 8):
            return
        names = ("max_num_batched_tokens", "max_num_seqs", "policy", "order")
        self.engine.changed({name: getattr(wanted, name) for name in names}, 8)
        self.config, self._wanted = wanted, None

    def run(self, acts: list[Act]) -> None:
        """Everything that happens, until nothing is left to do."""
        waiting = sorted(acts, key=lambda act: act.at)
        begin = self.clock.now
        while waiting or self.engine.has_work:
            while waiting and begin + waiting[0].at <= self.clock.now:
                waiting.pop(0).what(self)
            self.configure()
            before = self.clock.now
            self.engine.step()
            if self.clock.now == before:
                self._idle(begin + waiting[0].at if waiting else None)
        self.engine.close()

    def _idle(self, next_act: float | None) -> None:
        """Let time pass until something can happen."""
        if not self.engine.scheduler.has_work and self.engine.has_work:
            time.sleep(0.002)  # a grammar is being compiled, by another thread
        times = [moment for moment in (self.engine.wake, next_act) if moment is not None]
        self.clock.now = max(self.clock.now + 0.001, min(times, default=0.0))


# -- what is asked -------------------------------------------------------------------------------------------


def submit(at: float, request: Request) -> Act:
    return Act(at, lambda driver: driver.submit(request))


def prompt_of(dice: random.Random, shared: tuple[int, ...], most: int) -> tuple[int, ...]:
    begin = shared[: dice.choice((0, 0, len(shared) // 2, len(shared)))]
    return begin + tuple(dice.randrange(3, VOCABULARY) for _ in range(dice.randint(1, most)))


def crowd(
    seed: int,
    count: int = 26,
    *,
    rate: float = 50.0,
    begin: int = 64,
    most: int = 60,
    output: int = 70,
    stops: int = 2,
    targets: bool = True,
) -> list[Act]:
    """Requests of every kind that needs no model: tenants, salts, priorities, targets, deadlines, choices of
    one prompt, echoes, pins; some leave.

    begin  tokens that many prompts begin with; most: others of a prompt; output: of an answer
    stops  how many tokens end an answer, beside the end of sequence
    targets  whether some have deadlines and targets
    """  # fmt: skip
    dice = random.Random(seed)
    shared = tuple(dice.randrange(3, VOCABULARY) for _ in range(begin))
    acts: list[Act] = []
    at, number = 0.0, 1
    for _ in range(count):
        at += dice.expovariate(rate)
        params = SamplingParams(
            temperature=0.0, seed=0, max_tokens=dice.randint(1, output), ignore_eos=dice.random() < 0.3,
            stop_ids=(END, *range(10, 10 + stops)), min_tokens=dice.choice((0, 0, 1)),
            logprobs=dice.choice((None, 1)),
        )  # fmt: skip
        request = Request(
            number, prompt_of(dice, shared, most), params,
            priority=dice.choice((0, 0, 0, -1, 2)), tenant=dice.choice(("red", "red", "red", "blue", "")),
            salt=dice.choice(("", "", "", "s")),
            ttft_target=dice.choice((None, None, None, 0.4, 3.0)),
            tpot_target=dice.choice((None, None, 0.02)),
            logits_from=dice.choice((None, None, None, None, 0)),
            pin=dice.random() < 0.08,
        )  # fmt: skip
        if request.logits_from is not None:
            request = replace(request, params=replace(params, prompt_logprobs=1))
        if not targets:
            request = replace(request, ttft_target=None, tpot_target=None)
        if dice.random() < 0.15 and targets:
            acts.append(_with_deadline(at, request, dice.uniform(0.3, 3.0)))
        else:
            acts.append(submit(at, request))
        if dice.random() < 0.15:
            acts += [
                submit(at, replace(request, id=number + index, index=index, parent=number, pin=False))
                for index in (1, 2)
            ]
        if request.pin:
            acts.append(_call(at + dice.uniform(1.0, 3.0), "unpin", number))
        if dice.random() < 0.12:
            acts.append(_call(at + dice.uniform(0.05, 1.0), "abort", number))
        number += 3
    return acts


def _with_deadline(at: float, request: Request, patience: float) -> Act:
    return Act(at, lambda driver: driver.submit(replace(request, deadline=driver.clock.now + patience)))


def _call(at: float, name: str, id: int) -> Act:
    return Act(at, lambda driver: getattr(driver.engine, name)(id))


def change(at: float, **settings: Any) -> Act:
    return Act(at, lambda driver: driver.change(**settings))


def beams(seed: int, count: int, **more: int) -> list[Act]:
    """Beam searches among other requests."""
    dice = random.Random(seed)
    acts = crowd(seed, count, **more)
    for number in range(count // 2):
        width = dice.choice((2, 3, 4))
        early = dice.choice((False, True, "never"))
        params = SamplingParams(
            temperature=0.0, seed=0, max_tokens=dice.randint(2, 16), stop_ids=(END,), beam_width=width,
            length_penalty=dice.choice((0.5, 1.0, 2.0)), early_stopping=early, n=width,
        )  # fmt: skip
        request = Request(1000 + number, prompt_of(dice, (5, 6, 7, 8) * 8, 50), params)
        acts.append(submit(dice.uniform(0, 1.2), request))
    return acts


def resumed(seed: int) -> list[Act]:
    """What a server hands the engine that it starts when another has died: answers that had begun."""
    dice = random.Random(seed)
    acts = crowd(seed, 20)
    for number in range(12):
        prompt = prompt_of(dice, (9,) * 40, 60)
        begun: list[int] = []
        for _ in range(dice.randint(1, 12)):
            begun.append(next_token([*prompt, *begun], VOCABULARY))
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=30, stop_ids=(1,))
        taken_up = Request(2000 + number, prompt, params, resume=(Resume(0, tuple(begun)),))
        acts.append(submit(0.01 * number, taken_up))
    return acts


def sampled(seed: int, count: int, most: int, output: int, **more: Any) -> list[Act]:
    """Requests to a model: drawn and greedy, with penalties, biases, logprobs, several choices."""
    dice = random.Random(seed)
    shared = tuple(dice.randrange(3, 256) for _ in range(48))
    acts: list[Act] = []
    for number in range(count):
        id, at = 10 * number + 1, number * 0.02
        begin = shared[: dice.choice((0, 24, 48))]
        prompt = begin + tuple(dice.randrange(3, 256) for _ in range(dice.randint(1, most)))
        params = SamplingParams(
            temperature=dice.choice((0.0, 0.8)), seed=number, max_tokens=dice.randint(2, output),
            stop_ids=(END,), top_k=dice.choice((0, 20)), top_p=dice.choice((1.0, 0.9)),
            repetition_penalty=dice.choice((1.0, 1.0, 1.3)), presence_penalty=dice.choice((0.0, 0.5)),
            frequency_penalty=dice.choice((0.0, 0.4)), logit_bias=dice.choice((None, None, {40: 5.0})),
            logprobs=dice.choice((None, 2)), **more,
        )  # fmt: skip
        request = Request(id, prompt, params)
        acts += [
            submit(at, replace(request, id=id + index, index=index, parent=id if index else None))
            for index in range(dice.choice((1, 1, 3)))
        ]
    return acts


def drafts(seed: int) -> list[Act]:
    """Prompts that repeat themselves, which is what prompt lookup guesses from."""
    dice = random.Random(seed)
    acts = sampled(seed, 6, 30, 30)
    for number in range(14):
        phrase = tuple(dice.randrange(3, 256) for _ in range(9))
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True)
        if number % 3 == 0:  # an answer that copies its prompt, as an edited text does
            params = replace(params, force_ids=(phrase * 4)[:30])
        acts.append(submit(number * 0.03, Request(500 + number, phrase * 3, params)))
    return acts


def searches(seed: int) -> list[Act]:
    acts = sampled(seed, 6, 30, 24)
    for number in range(6):
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=12, stop_ids=(END,), beam_width=3, n=3)
        acts.append(submit(number * 0.05, Request(700 + number, tuple(range(20, 40 + 3 * number)), params)))
    return acts


def forms(seed: int, count: int, output: int, **more: Any) -> list[Act]:
    """Answers held to a schema, a pattern or a choice, among free ones."""
    asked = ({"json": SCHEMA, "disable_any_whitespace": True}, {"regex": r"[a-f]{2,6}-\d{3}"},
             {"choice": ["yes", "no"]})  # fmt: skip
    acts = sampled(seed, 4, 20, 16)
    for number in range(count):
        grammar = StructuredOutputsParams(**asked[number % 3])  # type: ignore[arg-type]
        params = SamplingParams(
            temperature=float(number % 2), seed=number, max_tokens=output, stop_ids=(END,),
            structured_outputs=grammar, **more,
        )  # fmt: skip
        acts.append(submit(number * 0.02, Request(600 + number, (20, 30, 40 + number), params)))
    return acts


# -- the logs ------------------------------------------------------------------------------------------------

NATIVE = {"backend": "native", "threads": 1, "max_model_len": 512, "kv_cache_dtype": "float16"}
CHANGES = [
    change(0.3, max_num_seqs=3, max_num_batched_tokens=16),
    change(0.6, order="fair"),
    change(0.9, policy="prefill_first", order="priority", max_num_batched_tokens=128),
    change(1.3, policy="static", max_num_seqs=6),
    change(2.0, policy="chunked", order="sjf", max_num_seqs=10),
]


def cases() -> Iterator[Case]:
    for policy in POLICIES:
        for order in ORDERS:
            seed = zlib.crc32(f"{policy} {order}".encode())
            settings = {"policy": policy, "order": order, "tpot_ms": 12.0}
            yield Case(f"{policy}-{order}", crowd(seed), settings)
    for policy in ("chunked", "static", "prefill_first"):
        for admission in ("full", "predicted"):
            settings = {"policy": policy, "admission": admission, "order": "sjf"}
            acts = crowd(7, 40, begin=16, most=20, output=160, stops=10, targets=False)
            yield Case(f"admission-{admission}-{policy}", acts, settings)
    acts = crowd(7, 40, begin=16, most=20, output=160, stops=10)
    yield Case("admission-predicted-targets", acts, {"admission": "predicted", "order": "sjf"})
    yield from _fake_cases()
    yield from _model_cases()


def _fake_cases() -> Iterator[Case]:
    scarce = {"kv_cache_memory": 52 * 4, "block_size": 4}
    acts = crowd(11, 40, begin=16, most=10, output=120)
    for policy in ("chunked", "prefill_first", "served_ratio", "adaptive_chunk"):
        yield Case(f"preemption-{policy}", acts, {**scarce, "policy": policy, "tpot_ms": 15.0})
    yield Case("preemption-priority", acts, {**scarce, "order": "priority"})
    slow = {"policy": "adaptive_chunk", "tpot_ms": 20.0, "knee_tokens": 32, "knee_seqs": 4}
    yield Case("adaptive_chunk-20ms", crowd(13, 50, rate=60), {**slow, "max_num_batched_tokens": 256})
    for policy in ("chunked", "prefill_first", "orca", "static"):
        yield Case(f"beams-{policy}", beams(14, 16), {"policy": policy})
    yield Case("beams-preemption", beams(15, 24, begin=16, most=10, output=120), scarce)
    yield Case("drafts-chunked", crowd(16, 40), drafting=True)
    yield Case("drafts-preemption", acts, scarce, drafting=True)
    yield Case("drafts-served_ratio", crowd(18, 40), {"policy": "served_ratio"}, drafting=True)
    yield Case("blocks-of-1", crowd(19, 24, most=40), {"block_size": 1, "kv_cache_memory": 300})
    yield Case("blocks-of-64", crowd(20, 30), {"block_size": 64, "kv_cache_memory": 12 * 64})
    yield Case("no-prefix-cache", crowd(21, 40), {"enable_prefix_caching": False})
    yield Case("no-token-limit", crowd(22, 40), {"max_num_batched_tokens": 0})
    yield Case("one-token-steps", crowd(23, 14, most=20, output=12), {"max_num_batched_tokens": 2})
    yield Case("short-queue", crowd(24, 60, rate=400), {"max_queue": 6})
    yield Case("ageing", crowd(25, 40, rate=60), {"order": "sjf", "ageing": 0.4, "output_weight": 4.0})
    yield Case("changed-settings", crowd(26, 70) + CHANGES)
    yield Case("failures", beams(28, 30), failing=True)
    yield Case("resumed", resumed(29))
    yield Case("digests", crowd(30, 30), {"step_log_tokens": False, "order": "prefix"})
    batch = {"static_batch": 4, "static_patience": 0.2, "window_ms": 30.0}
    yield Case("static-of-4", crowd(31, 40), {"policy": "static", **batch})
    yield Case("window-of-4", crowd(32, 40), {"policy": "window", **batch})
    ratio = {"policy": "served_ratio", "served_ratio": 0.5, "served_steps": 4}
    yield Case("served_ratio-often", crowd(33, 40), ratio)


def _model_cases() -> Iterator[Case]:
    small = {**NATIVE, "model": TINY, "kv_cache_memory": 120 * 4096}  # a block of 16 tokens takes 4 KiB
    yield Case("tiny-sampling", sampled(41, 16, 60, 24), small)
    yield Case(
        "tiny-preemption", sampled(42, 14, 20, 60), {**small, "kv_cache_memory": 48 * 1024, "block_size": 4}
    )
    yield Case("tiny-drafts", drafts(43), {**small, "speculation": "ngram"})
    yield Case("tiny-beams", searches(44), small)
    yield Case("tiny-schema", forms(45, 12, 80), small)
    yield Case("tiny-schema-drafts", forms(46, 9, 80), {**small, "speculation": "ngram"})
    for family, scarce in (("gemma3", 12), ("gemma2", 12), ("mistral", 8), ("phi3", 8)):
        model = {**NATIVE, "model": f"{FAMILIES}/{family}", "kv_cache_memory": 1 << 18, "max_num_seqs": 4,
                 "max_num_batched_tokens": 32}  # fmt: skip
        yield Case(f"windows-{family}", sampled(47, 10, 90, 40), model)
        few = {**model, "kv_cache_memory": scarce << 10, "block_size": 8}
        yield Case(f"windows-{family}-scarce", sampled(49, 10, 40, 50), few)
    smollm2 = {**NATIVE, "model": "smollm2", "threads": 0, "kv_cache_memory": 64 << 20}
    yield Case("smollm2-schema", forms(48, 9, 48), smollm2)


def timeless(log: bytes) -> bytes:
    """The log with the clock of this recording, and no time of day, in its header."""
    start = len(steplog.MAGIC) + 1
    (size,) = struct.unpack_from("<I", log, start)
    first = log[start + 4 : start + 4 + size]
    header = msgspec.msgpack.decode(first, type=steplog.Header)
    body = msgspec.msgpack.encode(msgspec.structs.replace(header, clock=BEGIN, wall=0.0))
    return log[:start] + struct.pack("<I", len(body)) + body + log[start + 4 + size :]


def record(case: Case) -> None:
    """Write one log, packed."""
    plain, target = WORK / f"{case.name}.steps", FOLDER / f"{case.name}.steps.gz"
    plain.unlink(missing_ok=True)
    driver = Driver(case, plain)
    driver.run(case.acts)
    with gzip.GzipFile(target, "wb", 9, mtime=0) as packed:
        packed.write(timeless(plain.read_bytes()))
    stats = driver.engine.scheduler.stats()
    told = ", ".join(f"{name} {stats[name]:.0f}" for name in ("steps", "preemptions", "draft_tokens"))
    print(f"{case.name}: {told}; {target.stat().st_size} bytes", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", help="these logs alone")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    for case in cases():
        if arguments.only is None or case.name in arguments.only:
            record(case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
