"""Costs: the fit finds what it was made from, the roofline is the arithmetic it says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.lab.planning.model_outline import Outline, read_outline
from pageturner.lab.simulation import step_cost
from pageturner.lab.simulation.roofline import GPUS, Reach, kv_tokens, roofline
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.telemetry.step_log import ItemRecord, StepRecord
from pageturner.telemetry.work import StepWork
from support.engines import GOLDENS
from support.refusals import engine_fault

TRUTH = CalibratedCost(
    [2e-3, 4e-4, 5e-5, 0.0, 2e-5, 4e-8, 1e-9], (0, 0), 0, 3e-4, {}, [0.0] * 2 + [1e-3] * 6
)


def steps(count: int, noise: float, seed: int = 0) -> list[StepRecord]:
    """Random steps that take as long as TRUTH says, give or take."""
    dice, found, now = random.Random(seed), [], 0.0
    for _ in range(count):
        items = []
        for id in range(dice.randint(1, 20)):
            n = dice.choice([1, 1, 1, dice.randint(2, 300)])
            items.append(
                ItemRecord(
                    id, 0, n, dice.randrange(2000), [5] if dice.random() < 0.8 else [], [], False
                )
            )
        step = StepRecord(now, 0.0, items, 0, 0, [], [], [], 0, 1, 0)
        took = TRUTH.seconds(step_cost.work_of_step(step)) - TRUTH.gap
        end = now + took * dice.lognormvariate(0, noise)
        found.append(StepRecord(now, end, items, 0, 0, [], [], [], 0, 1, 0))
        now = end + TRUTH.gap
    return found


def test_the_fit_finds_what_the_steps_were_made_from() -> None:
    found = step_cost.fit(steps(400, 0.0), {})
    assert found.weights == pytest.approx(TRUTH.weights, rel=1e-3, abs=1e-10)
    assert found.levels == pytest.approx(TRUTH.levels, rel=0.02, abs=1e-6)
    assert found.gap == pytest.approx(TRUTH.gap)
    assert found.error[1] < 1e-3


def test_noise_and_a_machine_that_was_held_up_hardly_matter() -> None:
    noisy = [
        StepRecord(
            s.start, s.end + (0.5 if i % 20 == 0 else 0.0), s.items, 0, 0, [], [], [], 0, 1, 0
        )
        for i, s in enumerate(steps(600, 0.05))
    ]
    found = step_cost.fit(noisy, {})
    for step in steps(50, 0.0, seed=9):
        work = step_cost.work_of_step(step)
        assert found.seconds(work) == pytest.approx(TRUTH.seconds(work), rel=0.06)
    assert 0.02 < found.error[0] < 0.08


def test_quick_steps_count_no_more_than_slow_ones() -> None:
    """What many steps take in all is what the fit says: throughput hangs on it."""
    noisy = steps(2000, 0.3, seed=4)
    found = step_cost.fit(noisy, {})
    told = sum(found.seconds(step_cost.work_of_step(step)) - found.gap for step in noisy)
    assert told == pytest.approx(sum(step.end - step.start for step in noisy), rel=0.04)


def test_least_squares_beats_every_neighbour_and_stays_positive() -> None:
    dice = np.random.default_rng(3)
    for _ in range(20):
        a, b = dice.normal(size=(30, 5)), dice.normal(size=30)
        x = step_cost.nonnegative_least_squares(a, b)
        best = float(np.sum((a @ x - b) ** 2))
        assert (x >= 0).all()
        for i in range(5):
            for step in (1e-4, -1e-4):
                other = x.copy()
                other[i] = max(0.0, other[i] + step)
                assert float(np.sum((a @ other - b) ** 2)) >= best - 1e-9


def test_a_calibration_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    TRUTH.save(path)
    assert step_cost.load_calibration(path) == TRUTH
    for text, said in (("{}", "is not a calibration"), ("x", "is not a calibration")):
        path.write_text(text)
        with engine_fault(said):
            step_cost.load_calibration(path)
    other: dict[str, Any] = {
        "weights": [1.0],
        "error": [0, 0],
        "steps": 1,
        "gap": 0,
        "engine": {},
    }
    path.write_text(json.dumps(other))
    with engine_fault("another version"):
        step_cost.load_calibration(path)
    with engine_fault("cannot read"):
        step_cost.load_calibration(tmp_path / "none")
    with engine_fault("too few"):
        step_cost.fit(steps(5, 0.0), {})


# -- roofline ------------------------------------------------------------------------------------------------
def test_the_host_takes_its_time_before_a_step_or_behind_the_one_before(tmp_path: Path) -> None:
    """One step ahead the device waits only where the host takes longer than it."""
    model, gpu, work = outline(tmp_path, LLAMA_8B), GPUS["H200"], StepWork(8, 8, 8, 800, 800)
    alone = roofline(model, gpu, Reach()).seconds(work)
    for host in (0.0, 0.3 * alone, 2 * alone):
        plain = roofline(model, gpu, Reach(host=host))
        ahead = roofline(model, gpu, Reach(host=host, ahead=True))
        assert plain.seconds(work) == pytest.approx(host + alone)
        assert ahead.seconds(work) == pytest.approx(max(host, alone))
        for cost in (plain, ahead):  # many steps at once take what each of them does
            each = [cost.seconds(StepWork(8, 8, 8, 808 + 8 * k, 808 + 8 * k)) for k in range(3)]
            assert cost.ends(1.0, 8, 800, 3) == pytest.approx(
                [1 + sum(each[: k + 1]) for k in range(3)]
            )
    with engine_fault("--host-ms"):
        Reach(host=-1.0).check()


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
MIXTRAL = LLAMA_8B | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def outline(tmp_path: Path, config: dict[str, Any]) -> Outline:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return read_outline(path)


def test_the_products_of_an_8b_model(tmp_path: Path) -> None:
    model = outline(tmp_path, LLAMA_8B)
    assert model.spec is not None
    embedding, norms = 128256 * 4096, 65 * 4096
    assert model.spec.active == 8_030_261_248 - 2 * embedding - norms
    reach = Reach(1.0, 1.0, 0.0, 1.0)
    made = roofline(model, GPUS["A100-80G"], reach)
    one = made.seconds(StepWork(1, 1, 1, 1, 1))
    read = 2 * (8_030_261_248 - embedding) / 2.039e12  # everything but the embedding table, once
    assert one == pytest.approx(read, rel=0.01)
    many = made.seconds(StepWork(8192, 8, 8, 8192, 8 * 1024 * 1025 // 2))
    assert many == pytest.approx(2 * model.spec.active * 8192 / 312e12, rel=0.02)
    decode = made.seconds(StepWork(64, 64, 64, 64 * 8000, 64 * 8000)) - made.seconds(
        StepWork(64, 64, 64, 0, 0)
    )
    assert decode == pytest.approx(64 * 8000 * 131072 / 2.039e12, rel=0.01)
    free = replace(reach, link=1e30, latency=0.0)
    both = roofline(model, GPUS["A100-80G"], free, 2).seconds(StepWork(1, 1, 1, 1, 1))
    assert both == pytest.approx(one / 2)


@pytest.mark.parametrize(
    ("ranks", "rows", "sent", "exchanges"),
    [
        (2, 1, 1, 1),
        (2, 4000, 4000, 1),  # of two each sends all that it has
        (4, 32, 3 * 32, 1),
        (4, 33, 2 * 3 / 4 * 33, 2),  # 512 KB of rows of 16 KB
        (8, 16, 7 * 16, 1),
        (8, 17, 2 * 7 / 8 * 17, 2),
    ],
)
def test_gpus_of_a_replica_pay_for_their_links(
    ranks: int, rows: int, sent: float, exchanges: int, tmp_path: Path
) -> None:
    """Two sums of fp32 rows in each of 32 layers and one of the embedding, and logits that come together."""
    model, work = outline(tmp_path, LLAMA_8B), StepWork(rows, 3, 3, rows, 5050)
    costs = [
        roofline(model, GPUS["H100"], Reach(link=link, latency=latency), ranks).seconds(work)
        for link, latency in ((0.0, 0.0), (1e30, 0.0), (1e30, 10e-6))
    ]
    nbytes = 65 * sent * 4096 * 4 + 3 * 128256 * 4 * (ranks - 1) / ranks
    assert costs[0] - costs[1] == pytest.approx(nbytes / 450e9, rel=1e-6)
    assert costs[2] - costs[1] == pytest.approx((65 * exchanges + 1) * 10e-6, rel=1e-6)
    with engine_fault("--link-gb-s"):
        Reach(link=-1.0).check()


def test_steps_in_a_row_end_when_they_would_one_by_one(tmp_path: Path) -> None:
    """To the last bit: plans hang on it."""
    gpu, reach = GPUS["H100"], Reach()
    dense, experts = (
        roofline(outline(tmp_path, one), gpu, reach, 2) for one in (LLAMA_8B, MIXTRAL)
    )
    for made in (TRUTH, dense, experts):
        for rows, context in ((1, 0), (7, 12_345), (256, 3_000_000)):
            now, found = 3.7, []
            for step in range(1, 40):
                seen = context + rows * step
                now += made.seconds(StepWork(rows, rows, rows, seen, seen))
                found.append(now)
            assert made.ends(3.7, rows, context, 39) == found


def test_experts_are_read_as_far_as_somebody_is_sent_to_them(tmp_path: Path) -> None:
    model = outline(tmp_path, MIXTRAL)
    assert model.spec is not None
    assert model.spec.active / 1e9 == pytest.approx(12.6, abs=0.1)  # 12.9 with embedding and head
    made = roofline(model, GPUS["H100"], Reach(1.0, 1.0, 0.0, 1.0))
    alone, crowd = (made.seconds(StepWork(n, n, n, n, n)) for n in (1, 64))
    assert alone == pytest.approx(2 * 12.75e9 / 3.35e12, rel=0.02)
    assert crowd == pytest.approx(2 * 46.6e9 / 3.35e12, rel=0.02)


def test_adapters_are_read_once_a_step_each_and_take_memory(tmp_path: Path) -> None:
    model, gpu, reach = outline(tmp_path, LLAMA_8B), GPUS["L4"], Reach(1.0, 1.0, 0.0, 1.0)
    plain, one, many = (roofline(model, gpu, reach, adapters=[10**8] * n) for n in (0, 1, 100))
    work = StepWork(32, 32, 32, 32, 32)
    each = 1e8 / 0.3e12
    assert one.seconds(work) - plain.seconds(work) == pytest.approx(each)
    assert many.seconds(work) - plain.seconds(work) == pytest.approx(each * 100 * (1 - 0.99**32))
    prompts = StepWork(8192, 32, 32, 8192, 32)  # bound by their products
    assert one.seconds(prompts) - plain.seconds(prompts) == pytest.approx(1e8 * 8192 / 121e12)
    now, found = 3.7, []
    for _ in range(5):
        work = work.plus(StepWork(0, 0, 0, 32, 32))
        now += many.seconds(work)
        found.append(now)
    assert many.ends(3.7, 32, 32, 5) == found, "bit for bit"
    tokens = [kv_tokens(model, GPUS["H100"], Reach(), beside=n) for n in (0, 10 * 131072)]
    assert tokens[0] - tokens[1] == 10


@pytest.mark.parametrize(
    ("family", "dims"), [("qwen3_5", 32), ("gemma4_e2b", 80), ("falcon_h1", 24)]
)
def test_layers_without_attention_read_no_keys(family: str, dims: int) -> None:
    made = roofline(read_outline(GOLDENS / "families" / family), GPUS["H100"], Reach())
    assert made.needs.pair == 4 * 4 * dims


def test_kv_is_what_the_weights_leave(tmp_path: Path) -> None:
    model = outline(tmp_path, LLAMA_8B)
    assert kv_tokens(model, GPUS["H100"], Reach()) == int(
        (0.9 * GPUS["H100"].memory - 2 * 8_030_261_248) // 131072
    )
    with engine_fault("give --gpus more"):
        kv_tokens(outline(tmp_path, MIXTRAL), GPUS["H100"], Reach())
    unknown = outline(tmp_path, LLAMA_8B | {"model_type": "something_new"})
    with engine_fault("calibrate a running engine"):
        roofline(unknown, GPUS["H100"], Reach())
    with engine_fault("at most 1"):
        Reach(compute=1.5).check()


def test_every_gpu_names_its_source() -> None:
    for gpu in GPUS.values():
        assert gpu.source.startswith(("NVIDIA ", "AMD "))
        assert 1e13 < gpu.flops < 1e16
        assert 1e11 < gpu.bandwidth < 1e13
        assert 1e10 < gpu.memory < 1e12
