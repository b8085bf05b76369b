"""Models with recurrent layers: a request has the same bits alone, in crowds, by any chunks and blocks, from a
snapshot, after preemption, and with drafts that are rejected on both sides of a boundary."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from pageturner import LLM
from pageturner.kernels import recurrent
from pageturner.kernels.base import Ops
from pageturner.params import SamplingParams
from pageturner.policies.suffix_drafts import SuffixDrafts
from pageturner.request import Refused, Request
from pageturner.scheduler import blocks
from support.decoding import backend
from support.engines import GOLDENS, Answer, Model, Setup, answers

NAMES = (
    "qwen3_5",
    "lfm2",
    "lfm2_moe",
    "granite_h",
    "granite_h_dense",
    "nemotron_h",
    "nemotron_h_moe",
    "falcon_h1",
    "falcon_h1_norm",
)


def test_scheduler_and_kernels_have_states_at_the_same_places() -> None:
    assert blocks.CHUNK == recurrent.CHUNK


@cache
def model(name: str, ops_name: str = "native") -> Model:
    ops: Ops = backend(ops_name)
    return Model(GOLDENS / "families" / name, ops, dtype="auto")


def requests(seed: int = 0, count: int = 6) -> list[Request]:
    """Prompts of 1 to 150 tokens that share beginnings, with answers that pass a boundary."""
    dice = random.Random(seed)
    common = [dice.randrange(3, 300) for _ in range(260)]
    found = []
    for id in range(count):
        shared = common[: (0, 33, 64, 97, 140, 260)[id % 6]]
        own = [dice.randrange(3, 300) for _ in range(dice.randrange(1, 10))]
        params = SamplingParams(
            max_tokens=40,
            temperature=dice.choice((0.0, 1.0)),
            seed=id,
            logprobs=0,
        )
        found.append(Request(id, (*shared, *own), params))
    return found


@cache
def truth(name: str) -> dict[int, Answer]:
    """Each request in an engine of its own."""
    found: dict[int, Answer] = {}
    for request in requests():
        engine = model(name).engine(Setup(prefix_caching=False, max_num_seqs=1))
        found |= answers(engine, [request])
    return found


SETUPS = {
    "crowd": Setup(),
    "chunks of 7": Setup(token_budget=7),
    "chunks of 33": Setup(token_budget=33, snapshot_interval=32),
    "no cache": Setup(prefix_caching=False, token_budget=40),
    "blocks of 1": Setup(block_size=1, token_budget=50),
    "blocks of 32": Setup(block_size=32),
    "blocks of 48": Setup(block_size=48, token_budget=64),
    "blocks of 256": Setup(block_size=256),
    "preemption": Setup(kv_tokens=320, block_size=1),
    "few states": Setup(max_num_seqs=3, snapshots=0),
    "orca": Setup(policy="orca"),
    "padding": Setup(policy="static", token_budget=64),
    "drafts": Setup(drafter=SuffixDrafts),
    "drafts in chunks": Setup(drafter=SuffixDrafts, token_budget=20, block_size=48),
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_changes_a_bit(name: str, setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    engine = model(name).engine(setup)
    for turn in range(2):  # the second finds what the first left
        again = [replace(one, id=one.id + 100 * turn) for one in requests()]
        found = answers(engine, again, spread=turn * 3)
        assert {id % 100: answer for id, answer in found.items()} == truth(name)
    assert "in halves" not in caplog.text, "a step was run in halves"
    stats = engine.stack.scheduler.stats()
    if setup.prefix_caching:
        assert stats["cached_tokens"] > 0, "nothing was found again"
    if setup.kv_tokens < 500:
        assert stats["preemptions"] > 0


def test_a_prompt_waits_for_the_beginning_that_another_one_computes() -> None:
    common = tuple(range(5, 205))
    params = SamplingParams(max_tokens=8, logprobs=0)
    alike = [Request(i, (*common, 7 + i), params) for i in range(3)]
    alone: dict[int, Answer] = {}
    for request in alike:
        alone |= answers(model(NAMES[0]).engine(Setup(prefix_caching=False)), [request])
    engine = model(NAMES[0]).engine(Setup(token_budget=64))
    assert answers(engine, alike) == alone
    assert engine.stack.scheduler.stats()["cached_tokens"] >= 2 * 192


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_a_pinned_prefix_keeps_the_state_at_its_end(name: str, salt: str) -> None:
    """Others compute more than all blocks and states hold; who begins with it finds it, whoever it is."""
    dice = random.Random(3)
    prefix = tuple(dice.randrange(3, 300) for _ in range(107))
    params = SamplingParams(max_tokens=20, logprobs=0)
    asked = Request(7, (*prefix, 5, 6), params, salt=salt)
    alone = answers(model(name).engine(Setup(prefix_caching=False)), [asked])
    engine = model(name).engine(Setup(max_num_seqs=3, snapshots=2, kv_tokens=1024))
    scheduler = engine.stack.scheduler
    pin = Request(0, prefix, SamplingParams(max_tokens=1), pin=True)
    answers(engine, [pin])
    for id in range(100, 120):
        others = tuple(dice.randrange(3, 300) for _ in range(90))
        answers(engine, [Request(id, others, params, salt=salt)], spread=2)
    cached = scheduler.stats()["cached_tokens"]
    assert answers(engine, [asked, replace(asked, id=8)], spread=3)[7] == alone[7]
    assert scheduler.stats()["cached_tokens"] - cached >= 2 * 96
    assert scheduler.stats()["state_blocks_used"] == 1
    spare = scheduler.pool.states.num_blocks - scheduler.pool.tails.num_blocks
    for id in range(1, spare):
        answers(engine, [replace(pin, id=id, prompt=prefix[: 40 + id])])
    with pytest.raises(Refused, match="unpin something") as refused:
        scheduler.add(replace(pin, id=spare))
    assert refused.value.code == "pin_too_large"
    assert engine.stack.pins.drop(0)
    assert answers(engine, [replace(asked, id=9)])[9] == alone[7]


def test_a_salt_that_parts_from_a_pinned_prefix_finds_its_own_again() -> None:
    prefix = tuple(range(3, 240))
    params = SamplingParams(max_tokens=9, logprobs=0)
    asked = Request(7, (*prefix[:200], 5, 6), params, salt="tenant")
    alone = answers(model("qwen3_5").engine(Setup(prefix_caching=False)), [asked])
    engine = model("qwen3_5").engine(Setup(max_num_seqs=3, snapshots=2))
    answers(engine, [Request(0, prefix, SamplingParams(max_tokens=1), pin=True)])
    stats, cached = engine.stack.scheduler.stats, []
    for id in (7, 8):
        assert answers(engine, [replace(asked, id=id)])[id] == alone[7]
        cached.append(stats()["cached_tokens"])
    assert cached == [96, 96 + 192], "the last state of the pin before 200, then the tenant's own"


def test_a_session_of_a_hybrid_model() -> None:
    settings = {"backend": "native", "load_format": "dummy", "kv_cache_memory": 64 << 20}
    llm = LLM(str(GOLDENS / "families" / "qwen3_5"), max_num_seqs=4, threads=1, **settings)
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = list(range(3, 80))
    stats = llm.built.engine.scheduler.stats
    with llm.session(prompt) as session:
        first = session.generate(greedy)
        assert first.token_ids == llm.generate([prompt], greedy)[0].outputs[0].token_ids
        assert session.stats["blocks"] == 96 // 16, "up to the last state"
        (fork,) = session.fork()
        computed = stats()["step_tokens"]
        second = session.append([50, 51]).generate(greedy)
        assert stats()["step_tokens"] - computed < 32 + 2 + 40
        assert fork.append([50, 51]).generate(greedy).token_ids == second.token_ids
        fork.free()
    assert (stats()["pinned"], stats()["state_blocks_used"]) == (0, 0)
