"""Records the step logs of tests/goldens/steplogs: what the engine of commit 8cc2ebe planned and answered.

    PYTHON_OF_8CC2EBE tests/tools/record_steplogs.py [--only NAME ...]      (from the top of the repository)

It drives that commit's engine under that commit's names, on a clock of its own: a step takes a fixed time and
so much for each token, so a fake engine plans the same on every machine. Run it with the Python of a virtual
environment in which 8cc2ebe is installed; any later engine then has to replay what it wrote.
"""

from __future__ import annotations

import argparse
import gzip
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from steplog_traffic import (
    VOCABULARY,
    Act,
    beams,
    change,
    crowd,
    drafts,
    forms,
    resumed,
    sampled,
    searches,
)

from pageturner.config.settings import EngineConfig
from pageturner.core.advance import cut
from pageturner.engine import steplog
from pageturner.engine.fake import next_token
from pageturner.runtime.build import Built, build, retuned
from pageturner.scheduler.types import Failure, Output, Plan, Request, Result

FOLDER = Path("tests/goldens/steplogs")
# the log's header names its file: one that is called the same everywhere
WORK = Path("build/steplogs")
BEGIN = 1000.0  # seconds of the clock at the start
TINY = "tests/goldens/tiny_llama.gguf"
FAMILIES = "tests/goldens/families"
POLICIES = (
    "chunked",
    "adaptive_chunk",
    "prefill_first",
    "served_ratio",
    "orca",
    "window",
    "static",
)
ORDERS = ("fcfs", "priority", "sjf", "deadline", "adaptive", "fair", "prefix")
PER_STEP, PER_TOKEN = 0.004, 0.0003  # seconds of a step
FAILING = 7  # with `failing`: the requests whose id is a multiple of it fail at their fourth token


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
                accepted, output.draft = _drafted(
                    seq.tokens, seq.draft[: item.drafted], output.tokens[0]
                )
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
    yield Case(
        "adaptive_chunk-20ms", crowd(13, 50, rate=60), {**slow, "max_num_batched_tokens": 256}
    )
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
    yield Case(
        "ageing", crowd(25, 40, rate=60), {"order": "sjf", "ageing": 0.4, "output_weight": 4.0}
    )
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
    small = {
        **NATIVE,
        "model": TINY,
        "kv_cache_memory": 120 * 4096,
    }  # a block of 16 tokens takes 4 KiB
    yield Case("tiny-sampling", sampled(41, 16, 60, 24), small)
    yield Case(
        "tiny-preemption",
        sampled(42, 14, 20, 60),
        {**small, "kv_cache_memory": 48 * 1024, "block_size": 4},
    )
    yield Case("tiny-drafts", drafts(43), {**small, "speculation": "ngram"})
    yield Case("tiny-beams", searches(44), small)
    yield Case("tiny-schema", forms(45, 12, 80), small)
    yield Case("tiny-schema-drafts", forms(46, 9, 80), {**small, "speculation": "ngram"})
    for family, scarce in (("gemma3", 12), ("gemma2", 12), ("mistral", 8), ("phi3", 8)):
        model = {
            **NATIVE,
            "model": f"{FAMILIES}/{family}",
            "kv_cache_memory": 1 << 18,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
        }
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
    told = ", ".join(
        f"{name} {stats[name]:.0f}" for name in ("steps", "preemptions", "draft_tokens")
    )
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
