"""One step ahead: the answers of the plain loop, whoever comes, goes, fails or looks at its tokens."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine import Engine, EngineParts
from pageturner.engine.engine_factory import async_runner_of, make_engine
from pageturner.executor import async_runner
from pageturner.executor.batch import pack
from pageturner.ipc.ledger import Ledger
from pageturner.models.lora import read_folder
from pageturner.params import SamplingParams
from pageturner.policies.suffix_drafts import suffix_drafter
from pageturner.request import Event, Request
from pageturner.scheduler.types import Item, Plan, Sequence
from support.adapters import ALL, TOP, write_adapter
from support.engines import GOLDENS, Model, Setup, answers
from support.later_ops import LaterExecutor, LaterOps
from support.schedulers import check, make_stack

VOCABULARY = 50


def fake_engine(ahead: bool, executor: LaterExecutor | None = None, **options: Any) -> Engine:
    executor = executor or LaterExecutor(VOCABULARY)
    stack = make_stack(**{"num_blocks": 60, "block_size": 4, "max_model_len": 120} | options)
    parts = EngineParts(async_executor=executor if ahead else None)
    return Engine(stack, executor, parts=parts)


def requests(seed: int, count: int, **params: Any) -> list[Request]:
    dice = random.Random(seed)
    made = []
    for id in range(1, count + 1):
        prompt = tuple(dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 30)))
        mine = {
            "max_tokens": dice.randint(1, 30),
            "stop_ids": (3, 4),
            "seed": id,
            "temperature": 0.0,
        } | params
        made.append(Request(id, prompt, SamplingParams(**mine)))
    return made


def played(
    engine: Engine, asked: list[Request], leaves: set[int] = frozenset()
) -> dict[int, list[Event]]:  # type: ignore[assignment]
    """Everybody's events. One request comes with each step; who leaves does so three steps after it came."""
    events: list[Event] = []
    coming, step = list(asked), 0
    while coming or engine.has_work:
        if coming:
            events += engine.submit(coming.pop(0))
        for id in leaves & {request.id for request in asked[: max(0, step - 2)]}:
            engine.abort(id)
        events += engine.step()
        check(engine.stack)
        step += 1
    return {request.id: [event for event in events if event.id == request.id] for request in asked}


def told(events: list[Event]) -> tuple[list[int], str | None, str | None]:
    failure = events[-1].failure if events else None
    tokens = [token for event in events for token in event.tokens]
    return tokens, events[-1].finish if events else None, failure and failure.code


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_those_of_the_plain_loop(seed: int) -> None:
    asked = requests(seed, 14)
    options = {"num_blocks": 60 - 8 * seed, "token_budget": (0, 16)[seed % 2]}
    plain = played(fake_engine(False, **options), asked)
    engine = fake_engine(True, **options)
    got = played(engine, asked)
    assert {id: told(events) for id, events in got.items()} == {
        id: told(one) for id, one in plain.items()
    }
    assert engine.async_steps is not None
    assert engine.async_steps.made > 20
    assert not engine.in_flight
    assert engine.stats()["blocks_used"] == 0


def test_who_leaves_leaves_nothing_and_changes_nobody() -> None:
    asked = requests(7, 14)
    plain = played(fake_engine(False), asked)
    engine = fake_engine(True)
    got = played(engine, asked, leaves={2, 5, 11})
    for id, events in got.items():
        if id not in (2, 5, 11):
            assert told(events) == told(plain[id])
    assert engine.stats()["blocks_used"] == 0


@pytest.mark.parametrize("where", ["launch", "collect"])
def test_one_that_raises_fails_alone(where: str) -> None:
    asked = requests(3, 8, stop_ids=(), max_tokens=20)
    plain = played(fake_engine(False), asked)
    engine = fake_engine(True, LaterExecutor(VOCABULARY, poison=4, where=where))
    got = played(engine, asked)
    assert told(got[4])[1:] == ("error", "step_failed")
    assert told(got[4])[0] == told(plain[4])[0][: len(told(got[4])[0])]
    assert {id: told(got[id]) for id in got if id != 4} == {
        id: told(plain[id]) for id in plain if id != 4
    }
    assert engine.async_steps is not None
    assert engine.async_steps.made > 10, "it goes on ahead afterwards"
    assert engine.stats()["blocks_used"] == 0


def test_who_looks_at_tokens_has_the_plain_loop_while_it_is_here() -> None:
    asked = requests(5, 3, stop_ids=(), max_tokens=12)
    asked[1] = replace(asked[1], params=replace(asked[1].params, logprobs=2, max_tokens=4))
    executor = LaterExecutor(VOCABULARY)
    engine = fake_engine(True, executor)
    got, plain = played(engine, asked), played(fake_engine(False), asked)
    assert {id: told(events) for id, events in got.items()} == {
        id: told(one) for id, one in plain.items()
    }
    assert [e.logprobs for e in got[2]] == [e.logprobs for e in plain[2]]
    assert 4 <= executor.run_plainly <= 5
    assert executor.launched > 8


def test_other_settings_are_taken_while_requests_run() -> None:
    engine = fake_engine(True)
    for request in requests(1, 4, stop_ids=(), max_tokens=30):
        engine.submit(request)
    for _ in range(5):
        engine.step()
    assert engine.async_steps is not None
    assert engine.in_flight
    wanted = replace(engine.stack.config, max_num_seqs=2)
    assert not engine.reconfigure(wanted, 1)
    engine.step()
    assert engine.reconfigure(wanted, 1)
    engine.step()
    assert engine.in_flight, "and then it goes on ahead"


def test_a_crash_has_the_suspects_of_both_steps() -> None:
    ledger, _ = Ledger.create()
    engine = fake_engine(True, max_num_seqs=2)
    engine.ledger = ledger
    one, two = requests(1, 2, stop_ids=(), max_tokens=9)
    engine.submit(one)
    engine.step()
    engine.submit(two)
    suspects: list[set[int]] = []
    collect = engine.executor.collect  # type: ignore[attr-defined]

    def seen(launched: Any) -> Any:
        suspects.append(set(ledger.read()[4]))
        return collect(launched)

    engine.executor.collect = seen  # type: ignore[attr-defined]
    engine.step()
    assert suspects == [{1, 2}], "the second one is in the step that was launched behind"


def test_every_second_has_a_cause() -> None:
    times = iter(range(10**6))
    executor = LaterExecutor(VOCABULARY)
    stack = make_stack(num_blocks=60, block_size=4, max_model_len=120)
    parts = EngineParts(async_executor=executor)
    engine = Engine(stack, executor, lambda: float(next(times)), parts)
    for events in played(engine, requests(2, 5)).values():
        timings = events[-1].timings
        assert timings is not None
        assert sum(timings.parts.values()) == pytest.approx(timings.until - timings.received)


def test_a_batch_names_the_rows_of_the_step_before() -> None:
    known = Sequence(Request(1, (1, 2, 3)), tokens=[1, 2, 3], computed=2, blocks=[5])
    ahead = Sequence(Request(2, (7, 8)), tokens=[7, 8, 9], computed=2, inflight=2, blocks=[6])
    plan = Plan([Item(known, 1, 2), Item(ahead, 1, 3)])
    batch = pack(plan, 4, 0, {ahead: 4})
    assert batch.tokens.tolist() == [3, -5]
    assert batch.positions.tolist() == [2, 3]
    assert batch.context_len.tolist() == [3, 4]
    assert batch.logit_rows.tolist() == [0, 1]


# -- with a model
def model(ops: Any) -> Model:
    return Model(GOLDENS / "tiny_llama.gguf", ops, dtype="float32", kv_dtype="float32")


def of_model(count: int, **params: Any) -> list[Request]:
    dice = random.Random(4)
    return [
        Request(
            id,
            tuple(dice.randrange(5, 90) for _ in range(dice.randint(2, 20))),
            SamplingParams(
                **{"max_tokens": 4 + id, "temperature": 0.8, "top_k": 20, "seed": id} | params
            ),
        )
        for id in range(1, count + 1)
    ]


def test_noise_and_positions_are_those_of_the_plain_loop() -> None:
    asked = of_model(6)
    expected = answers(model(LaterOps()).engine(Setup(token_budget=16)), asked, spread=1)
    engine = model(LaterOps()).engine(Setup(token_budget=16, ahead=True))
    assert answers(engine, asked, spread=1) == expected
    assert engine.async_steps is not None
    assert engine.async_steps.made > 10


def test_adapters_and_who_has_none_are_planned_ahead(tmp_path: Path) -> None:
    """Three adapters, of which two are in memory: the third is read when another's requests have ended."""
    spec = model(LaterOps()).decoder.spec
    folders = {
        name: write_adapter(tmp_path / name, spec, ALL + TOP, seed=i)
        for i, name in enumerate("abc")
    }
    digests = ["", *(read_folder(path).digest for path in folders.values())]
    asked = [replace(one, adapter=digests[one.id % 4]) for one in of_model(9)]
    found = []
    for ahead in (False, True):
        here = model(LaterOps())
        here.adapters = folders
        engine = here.engine(Setup(token_budget=16, ahead=ahead, adapters=2))
        found.append(answers(engine, asked, spread=1))
    assert found[0] == found[1]
    assert engine.async_steps is not None
    assert engine.async_steps.made > 10
    assert engine.adapters.stats()["adapter_evictions"] > 0
    plain = answers(model(LaterOps()).engine(Setup(token_budget=16)), of_model(9), spread=1)
    changed = [id for id in plain if plain[id] != found[0][id]]
    assert changed == [one.id for one in asked if one.adapter]


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 2},
        {"repetition_penalty": 1.3},
        {"min_tokens": 3, "stop_ids": (5,)},
        {"beam_width": 2, "temperature": 0.0},
        {"structured_outputs": "x"},
        {"logit_bias": {4: 1.0}},
    ],
)
def test_who_is_not_foreseen(params: dict[str, Any]) -> None:
    runner = async_runner.AsyncRunner(*[None] * 3)  # type: ignore[list-item]
    request = of_model(1)[0]
    assert runner.can_run_async(request)
    assert not runner.can_run_async(replace(request, params=replace(request.params, **params)))
    assert not runner.can_run_async(replace(request, logits_from=0))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_where_they_pay_and_steps_ahead_elsewhere(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks again is answered again: the whole answer was told to the tenant before."""
    asked = of_model(5, temperature=temperature, max_tokens=40, ignore_eos=True)
    asked += [replace(one, id=one.id + 5) for one in asked]
    expected = answers(model(LaterOps()).engine(Setup(token_budget=40)), asked, spread=45)
    clock = (0.001 * tick for tick in count())
    waits = count()  # a second for each step
    monkeypatch.setattr(async_runner, "perf_counter", lambda: float(next(waits)))
    setup = Setup(
        token_budget=40, ahead=True, drafter=lambda: suffix_drafter("suffix", lambda: next(clock))
    )
    engine = model(LaterOps()).engine(setup)
    assert answers(engine, asked, spread=45) == expected
    assert engine.scheduler.stats()["accepted_tokens"] > 30
    assert engine.async_steps is not None
    assert engine.async_steps.made > 20
    assert engine.stats()["blocks_used"] == 0


def test_a_cpu_keeps_the_plain_loop() -> None:
    for backend in ("reference", "auto", "fake"):
        config = EngineConfig(
            model=str(GOLDENS / "tiny_llama.gguf"), backend=backend, kv_cache_memory=1 << 20
        )
        built = make_engine(config)
        assert built.async_runner is None
        assert built.engine.async_steps is None


def test_a_backend_that_need_not_wait_is_not_waited_for_unless_somebody_says_so() -> None:
    ops, config = LaterOps(), EngineConfig()
    assert config.async_scheduling
    found = async_runner_of(config, None, None, ops)  # type: ignore[arg-type]
    assert isinstance(found, async_runner.AsyncRunner)
    for other in ({"async_scheduling": False}, {"step_log": "steps"}, {"speculation": "mtp"}):
        assert async_runner_of(replace(config, **other), None, None, ops) is None  # type: ignore[arg-type]
