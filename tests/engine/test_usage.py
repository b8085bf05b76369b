"""What a step must compute and read: by hand, against a plain loop, and as an engine adds it up."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine import machine_limits
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.executor.batch import pack
from pageturner.kernels.cpu.native_module import supported
from pageturner.kernels.peak import READ, Peak
from pageturner.lab.simulation.step_cost import work_of_step
from pageturner.models.load import open_model
from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.scheduler.types import Item, Plan, Sequence
from pageturner.telemetry import step_log
from pageturner.telemetry.work import (
    MachineLimits,
    ModelCosts,
    StepDemand,
    StepWork,
    WorkTotals,
    work_of,
)
from support.smollm2 import model_path

GOLDENS = Path(__file__).parents[1] / "goldens"
NATIVE = "native" if supported()[0] else "reference"
native = pytest.mark.skipif(not supported()[0], reason="the native kernels are not built")


def built(name: str, backend: str = NATIVE, **settings: object) -> LoadedEngine:
    config = {
        "model": str(GOLDENS / name),
        "backend": backend,
        "threads": 1,
        "kv_cache_memory": 1 << 20,
    }
    return make_engine(EngineConfig(**config | settings))  # type: ignore[arg-type]


def test_floats_by_hand() -> None:
    # 64 wide, 4 heads and 2 of KV of 16, MLP of 128, vocabulary of 320, all in fp32, twice
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64
    needs = built("tiny_llama.gguf").needs
    every, ending = (
        layer + 2 * 32 * 64,
        layer - 2 * 32 * 64 + 320 * 64,
    )  # behind the last K and V, and the head
    assert needs == ModelCosts(
        int8=0,
        fp32=2 * every,
        layers=4 * every,
        ending_int8=0,
        ending_fp32=2 * ending,
        ending=4 * ending,
        pair=2 * 4 * 4 * 16,
        position=2 * 2 * 2 * 2 * 16,
    )
    # five rows of a prompt of 9, of which 4 are there, and one token behind 20
    work = StepWork(tokens=6, sequences=2, logits=2, context=30, pairs=5 + 6 + 7 + 8 + 9 + 21)
    demand = needs.demand(work)
    assert demand.fp32 == 6 * 81_920 + 2 * 106_496 + 512 * 56
    assert (demand.int8, demand.weights, demand.kv) == (0, 4 * (2 * layer + 320 * 64), 256 * 30)
    assert needs.demand(work._replace(logits=0)).weights == 4 * every, "nobody reads the head"


@native
@pytest.mark.parametrize(("bits", "terms"), [("8", 1.0), ("12", 1.5), ("15", 2.0)])
def test_quantised_weights_by_hand(bits: str, terms: float) -> None:
    # the first layer in Q4_1, 20 bytes for 32 weights, the second and the head in Q8_0, 34 bytes
    layer, head = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64, 320 * 64
    needs = built("tiny_llama_quant.gguf", activation_bits=bits).needs
    assert needs is not None
    kv = 2 * 32 * 64
    assert needs.layers == layer * 20 / 32 + kv * 34 / 32
    assert needs.ending == (layer - kv + head) * 34 / 32
    assert needs.int8 == 2 * (layer + kv) * terms
    assert needs.ending_int8 == 2 * (layer - kv + head) * terms
    assert needs.fp32 == needs.ending_fp32 == 0


def test_int8_kv_has_its_scales_and_floats_are_dequantised() -> None:
    int8 = built("tiny_llama_quant.gguf", kv_cache_dtype="int8", dtype="float32").needs
    assert int8 is not None
    assert int8.position == 2 * 2 * 2 * (16 + 4), "layers, K and V, heads, a scale for each"
    assert int8.int8 == 0
    assert int8.fp32 + int8.ending_fp32 == 2 * (2 * 36_864 + 320 * 64)


def test_experts_count_as_far_as_they_are_used() -> None:
    needs = built("experts_mixtral.gguf").needs
    assert needs is not None
    experts = 2 * 4 * 3 * 32 * 32
    assert (needs.experts, needs.chosen) == (4 * experts, 0.5)
    _, spec, _ = open_model(GOLDENS / "experts_mixtral.gguf")
    assert needs.fp32 + needs.ending_fp32 == 2 * (spec.active + 320 * 32)
    one, many = needs.weight_bytes(1, 0), needs.weight_bytes(1000, 0)
    assert one == needs.layers + 0.5 * needs.experts
    assert needs.fp32 == 2 * (2 * 2 * 32 * 16 + 2 * 32 * 32 + 4 * 32 + experts / 4), (
        "half of one of two layers"
    )
    assert many == pytest.approx(needs.layers + needs.experts)


def test_windows_are_seen_by_half_of_the_layers() -> None:
    needs = built("families/gemma3").needs
    assert needs is not None
    assert (needs.pair, needs.recent_pair, needs.window) == (4 * 4 * 8, 4 * 4 * 8, 8)
    short = built("families/gemma3", max_model_len=8).needs
    assert short is not None
    assert (short.pair, short.recent_pair, short.window) == (2 * 4 * 4 * 8, 0, 0), (
        "it hides nothing"
    )


def some_plan(dice: random.Random) -> Plan:
    """Prompts, decoding, drafts behind the last token, prompt positions that are scored, and padding."""
    items, ballast = [], []
    for number in range(dice.randint(1, 6)):
        length, drafted = dice.randint(1, 60), dice.choice([0, 0, 3])
        computed = dice.choice([length - 1, dice.randrange(length)])
        scored = dice.choice([None, None, computed])
        request = Request(number, (1,) * dice.randint(1, length), logits_from=scored)
        seq = Sequence(request, tokens=[1] * length, computed=computed, draft=[2] * drafted)
        seq.blocks = [0] * (length + drafted)
        items.append(
            Item(seq, dice.choice([1, dice.randint(1, length + drafted - computed)]), computed)
        )
    if dice.random() < 0.5:
        ballast = [(rows, rows + dice.randrange(20)) for rows in (1, dice.randint(1, 5))]
    return Plan(items, ballast=ballast)


def test_the_work_of_a_plan_against_a_plain_loop_and_what_is_packed() -> None:
    dice = random.Random(5)
    for _ in range(400):
        plan, window = some_plan(dice), dice.choice([1, 5, 16, 40])
        spans = [(item.sequence.computed, item.sequence.computed + item.n) for item in plan.items]
        spans += [(seen - rows, seen) for rows, seen in plan.ballast]
        rows = [p for begin, end in spans for p in range(begin, end)]
        seen = [{j for p in range(b, e) for j in range(p + 1) if j > p - window} for b, e in spans]
        batch = pack(plan, 1, 0)
        work = work_of(plan, window)
        assert work == StepWork(
            tokens=len(batch.tokens),
            sequences=len(batch.context_len),
            logits=len(batch.logit_rows),
            context=sum(end for _, end in spans),
            pairs=sum(p + 1 for p in rows),
            window_context=sum(map(len, seen)),
            window_pairs=sum(min(p + 1, window) for p in rows),
        )
        assert work.tokens == len(rows)
        assert work_of(plan) == work._replace(window_context=0, window_pairs=0), (
            "no layer has a window"
        )


def test_a_step_of_an_older_log_counts_as_its_plan() -> None:
    """Without drafts and scored prompts: their rows of logits are not in such a log."""
    dice = random.Random(6)
    for _ in range(200):
        plan, window = some_plan(dice), dice.choice([0, 1, 5, 16, 40])
        for item in plan.items:
            item.sequence.draft.clear()
        plan.items = [
            Item(i.sequence, min(i.n, i.sequence.pending), i.start)
            for i in plan.items
            if i.sequence.request.logits_from is None
        ]
        items = [
            step_log.ItemRecord(
                i, 0, one.n, one.sequence.computed, [1] * one.wants_logits, [], False
            )
            for i, one in enumerate(plan.items)
        ]
        record = step_log.StepRecord(0.0, 1.0, items, plan.tokens, 0, plan.ballast, [], [], 0, 0, 0)
        assert work_of_step(record, window) == work_of(plan, window)


def test_the_step_log_holds_the_work_of_each_step(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    one = built(
        "families/gemma3", step_log=str(path), max_num_batched_tokens=6, enable_prefix_caching=False
    )
    for id in (1, 2):
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        one.engine.submit(Request(id, tuple(range(10, 30)), params))
    while one.engine.has_work:
        one.engine.step()
    one.engine.close()
    steps = [record for record in step_log.read(path) if isinstance(record, step_log.StepRecord)]
    assert len(steps) > 8
    for step in steps:
        older = msgspec.structs.replace(step, work=None)
        assert step.work == work_of_step(older, window=8)
        assert step.work.window_context < step.work.context or step.work.context <= 16
        told = msgspec.to_builtins(older)[:-1]
        assert msgspec.convert(told, step_log.StepRecord) == older, "an older log can be read"


def test_an_engine_adds_up_what_its_steps_need() -> None:
    one = built("tiny_llama.gguf", enable_prefix_caching=False)
    assert one.engine.stats().keys().isdisjoint(WorkTotals().__slots__)
    one.engine.submit(
        Request(1, tuple(range(10, 20)), SamplingParams(max_tokens=3, ignore_eos=True))
    )
    while one.engine.has_work:
        one.engine.step()
    assert one.needs is not None
    works = [StepWork(10, 1, 1, 10, 55), StepWork(1, 1, 1, 11, 11), StepWork(1, 1, 1, 12, 12)]
    wanted = [sum(column) for column in zip(*map(one.needs.demand, works), strict=True)]
    told = one.engine.stats()
    names = ("int8_operations", "fp32_operations", "weight_bytes", "kv_bytes")
    assert [told[name] for name in names] == wanted
    assert 0 < told["kernel_seconds"] < told["step_seconds"]


def test_an_engine_without_a_model_says_nothing() -> None:
    fake = make_engine(EngineConfig(backend="null"))
    fake.engine.submit(Request(1, (1, 2, 3), SamplingParams(max_tokens=3)))
    while fake.engine.has_work:
        fake.engine.step()
    assert (fake.needs, fake.limits, fake.engine.work) == (None, None, WorkTotals())
    assert "step_seconds" not in fake.engine.stats()


def test_shares_of_limits() -> None:
    used = WorkTotals()
    assert (used.achieved, used.shares(MachineLimits(1, 1, 1))) == ({}, {})
    used.add(StepDemand(int8=4e9, fp32=1e9, weights=3e9, kv=1e9), step=2.0, kernels=1.5)
    assert used.achieved == {"read_gb_s": 2.0, "int8_gop_s": 2.0, "fp32_gop_s": 0.5}
    assert used.shares(MachineLimits(20.0, 100.0, 10.0)) == pytest.approx(
        {"kernels": 0.75, "read": 0.1, "compute": 0.07}
    )
    assert used.shares(None) == {"kernels": 0.75}
    assert used.shares(MachineLimits(20.0, None, 10.0)) == {"kernels": 0.75, "read": 0.1}, (
        "not known, not 0"
    )
    assert used.since(WorkTotals(1.0, 1.0, 1e9)) == WorkTotals(1.0, 0.5, 3e9, 1e9, 3e9, 1e9)
    assert used.plus(used).achieved == used.achieved


# -- limits --------------------------------------------------------------------------------------------------


def peak(threads: int, integer: float | None, read: float) -> Peak:
    return Peak("avx2", threads, integer, 50.0, dict.fromkeys(READ, read), 5.0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    return tmp_path


def test_limits_are_kept_by_instruction_set_and_threads(cache: Path) -> None:
    assert machine_limits.stored_peak("avx2", 2) is None
    assert machine_limits.store_peak(peak(2, 100.0, 30.0))
    assert machine_limits.store_peak(peak(2, 90.0, 40.0)), "a busy machine"
    assert machine_limits.store_peak(peak(1, None, 20.0))
    assert machine_limits.stored_peak("avx2", 2) == peak(2, 100.0, 40.0)
    assert machine_limits.stored_peak("avx2", 1) == peak(1, None, 20.0)
    assert machine_limits.stored_peak("avx512vnni", 2) is None
    assert [path.name for path in cache.iterdir()] == ["limits.json"]


def test_a_file_of_limits_that_is_none_is_written_anew(cache: Path) -> None:
    machine_limits.limits_file().write_text("{]")
    assert machine_limits.stored_peak("avx2", 2) is None
    assert machine_limits.store_peak(peak(2, 100.0, 30.0))
    assert machine_limits.stored_peak("avx2", 2) == peak(2, 100.0, 30.0)


def test_where_nothing_can_be_written_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path / "file"))
    assert not machine_limits.store_peak(peak(2, 100.0, 30.0))
    assert machine_limits.stored_peak("avx2", 2) is None


def test_a_processor_without_a_name_has_numbers(tmp_path: Path) -> None:
    assert machine_limits.processor(tmp_path) == "unknown"
    (tmp_path / "cpuinfo").write_text(
        "CPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: 0xd40\n"
    )
    assert machine_limits.processor(tmp_path) == "0x41 0xd40 0x1"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A: B\nmodel name\t: A: B\n")
    assert machine_limits.processor(tmp_path) == "A: B"


@native
def test_an_engine_finds_the_limits_of_its_threads(cache: Path) -> None:
    one = built("tiny_llama.gguf")
    isa = one.fingerprint.split("-")[1]
    assert one.limits is None
    read = dict(zip(READ, (40.0, 30.0, 20.0, 10.0), strict=True))
    measured = Peak(isa, 1, 100.0, 50.0, read, 5.0)
    machine_limits.store_peak(measured)
    assert built("tiny_llama.gguf").limits == MachineLimits(
        measured.read_of(294_912 + 81_920), 100.0, 50.0
    )
    assert built("tiny_llama.gguf", threads=2).limits is None
    assert built("tiny_llama.gguf", backend="reference").limits is None


@pytest.mark.model
@native
def test_smollm2_by_hand() -> None:
    needs = make_engine(EngineConfig(model=str(model_path()), activation_bits="12")).needs
    assert needs is not None
    attention, mlp = 2 * 576 * 576 + 2 * 192 * 576, 3 * 576 * 1536
    kv, head = 2 * 192 * 576, 49_152 * 576
    assert needs.layers == (29 * (attention + mlp) + kv) * 20 / 32
    assert needs.int8 == 3 * (29 * (attention + mlp) + kv)
    assert needs.ending == (attention - kv + mlp) * 20 / 32 + head * 34 / 32
    assert needs.ending_int8 == 3 * (attention - kv + mlp + head)
    assert (needs.pair, needs.position) == (30 * 4 * 9 * 64, 30 * 2 * 3 * 64 * 2)
