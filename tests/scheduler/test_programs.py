"""Programs and boosted arrivals: who belongs together, what each was served, and what that bounds."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from pageturner.policies.programs import GRAIN, MAX_PROGRAMS, AttainedService, Programs
from pageturner.policies.uniboost import BOOSTS, boost
from pageturner.request import Request, SessionHint
from pageturner.scheduler.types import Sequence
from support.schedulers import make_stack

from .promises import Run, ask
from .session_bench import Bench


def sequence(id: int, tokens: list[int], **fields: Any) -> Sequence:
    return Sequence(Request(id, tuple(tokens), **fields), tokens=[*tokens], limit=1 << 20)


def said(number: int, length: int) -> list[int]:
    return [1000 * number + i for i in range(length)]


def ended(programs: Programs, seq: Sequence, answer: list[int]) -> list[int]:
    """All that was said when it has ended."""
    programs.name_of(seq)
    seq.tokens += answer
    programs.ended(seq, "stop")
    return seq.tokens


# -- who belongs together ------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [GRAIN, GRAIN + 5, 3 * GRAIN - 1])
@pytest.mark.parametrize("answer", [1, 2 * GRAIN])
def test_a_prompt_that_goes_on_with_another_belongs_to_its_program(
    length: int, answer: int
) -> None:
    programs = Programs()
    first = sequence(1, said(1, length))
    name = programs.name_of(first)
    assert programs.hint_of(first) is None
    all_said = ended(programs, first, said(2, answer))
    following = sequence(2, [*all_said, *said(3, 7)])
    hint = programs.hint_of(following)
    assert hint is not None
    assert hint.name == programs.name_of(following) == name
    # an answer that its client cut out
    other = sequence(3, [*said(1, length), *said(4, GRAIN)])
    assert programs.name_of(other) == hint.name


def test_others_begin_programs_of_their_own() -> None:
    programs = Programs()
    ended(programs, sequence(1, said(1, 4 * GRAIN), tenant="a"), said(2, 9))
    others = [
        sequence(2, said(1, 4 * GRAIN), tenant="b"),
        sequence(3, said(1, 4 * GRAIN), tenant="a", salt="x"),
        sequence(4, said(1, 4 * GRAIN), tenant="a", adapter="x"),
        sequence(5, said(1, 3 * GRAIN), tenant="a"),
        sequence(6, said(9, 3 * GRAIN), tenant="a"),
        sequence(7, [1], tenant="a"),
    ]
    assert len({programs.name_of(seq) for seq in others}) == len(others)
    assert [programs.hint_of(seq) for seq in others] == [None] * len(others)


def test_a_session_is_a_program_and_says_itself_what_is_kept() -> None:
    programs, hint = Programs(), SessionHint("t/one", keep=3.0)
    turns = [sequence(id, said(id, 50), session=hint) for id in (1, 2)]
    assert {programs.name_of(seq) for seq in turns} == {"t/one"}
    assert programs.hint_of(turns[0]) is hint


def test_what_is_remembered_is_bounded() -> None:
    programs = Programs()
    for id in range(2 * MAX_PROGRAMS + 9):
        ended(programs, sequence(id, said(id, GRAIN)), [1])
    assert programs.hint_of(sequence(-1, said(2 * MAX_PROGRAMS, GRAIN))) is not None
    assert programs.hint_of(sequence(-2, said(3, GRAIN))) is None


# -- what each was served ------------------------------------------------------------------------------------
def test_service_is_what_was_computed_once() -> None:
    service = AttainedService(2.0, lambda seq: seq.request.tenant)
    one = sequence(1, said(1, 30), tenant="a")
    one.computed = one.max_computed_tokens = 10  # cached
    service.served(one, 20, 0.0)
    assert service[one] == 20.0
    one.tokens += [1, 2]
    one.computed = 30
    service.served(one, 2, 0.0)
    assert service[sequence(2, [1], tenant="a")] == 24.0
    one.max_computed_tokens, one.computed = 32, 0  # preempted
    service.served(one, 32, 0.0)
    assert service[one] == 24.0
    assert service[sequence(3, [1], tenant="b")] == 0.0


@pytest.mark.parametrize("seed", range(6))
def test_programs_with_work_at_all_times_are_served_alike(seed: int) -> None:
    """None is ahead by more than 2 max(longest prompt, w tokens that fit in memory), whoever asks for more."""
    dice = random.Random(seed)
    names = [f"p{i}" for i in range(6)]
    load = []
    for place, name in enumerate(names):
        for i in range(60 * (1 + 4 * (place == 0))):
            fields = {"session": SessionHint(name), "tenant": name}
            load.append((ask(1000 * place + i, dice.randint(8, 64), **fields), dice.randint(1, 40)))
    run = Run(make_stack, {"order": "programs", "max_num_seqs": 4})
    run.service = defaultdict(float, dict.fromkeys(names, 0.0))
    while len(run.ended) < 150:
        run.go(load if not run.ended else [], until=run.now + 1.0)
    served = run.service.values()
    assert max(served) - min(served) <= 2 * max(64, 2.0 * 4 * 104), dict(run.service)


@pytest.mark.parametrize("order", ["programs", "uniboost"])
@pytest.mark.parametrize("seed", range(6))
def test_nobody_is_admitted_past_an_aged_request(order: str, seed: int) -> None:
    """Agents in too little memory, some with a session, and strangers between: nobody starves."""
    dice = random.Random(seed)
    ageing = dice.choice((0.0, 1.0, 3.0))
    bench = Bench(60, order=order, ageing=ageing, max_num_seqs=4, session_wait=dice.choice((0, 60)))
    talks = [said(one, dice.randint(30, 60)) for one in range(12)]
    turns, here = [0] * len(talks), dict[int, int]()
    scheduler, joined = bench.stack.scheduler, set[int]()
    for _ in range(1500):
        for one, talk in enumerate(talks):
            if one not in here.values() and turns[one] < 4 and dice.random() < 0.1:
                named = {"name": f"s{one}", "keep": 9.0} if one % 3 == 0 else {}
                tokens = [token % 60 for token in talk[: 120 + one]]
                here[bench.add(tokens, **named)] = one
                turns[one] += 1
        before = bench.now
        plan = bench.step()
        arrived = {item.sequence.request.id: item.sequence.request.arrival for item in plan.items}
        new = [at for id, at in arrived.items() if id not in joined]
        joined.update(arrived)
        for seq in scheduler.waiting:
            if new and seq.rank is None and before >= seq.request.arrival + ageing:
                assert seq.request.arrival >= max(new)
        for id in [id for id in here if len(bench.answers[id]) == 6]:
            talks[here.pop(id)] += bench.answers[id]
    assert sum(turns) == 4 * len(talks)
    bench.drain()


@pytest.mark.parametrize("seed", range(4))
def test_the_order_is_total_and_the_same_every_time(seed: int) -> None:
    def arranged(order: str) -> list[list[int]]:
        dice = random.Random(seed)
        run = Run(make_stack, {"order": order, "max_num_seqs": 2})
        found, asks = [], [ask(i, dice.randint(1, 90), i / 100) for i in range(40)]
        for request in asks:
            run.lengths[request.id] = 1 + request.id % 7
            run.scheduler.add(request)
        for _ in range(30):
            run.step(run.scheduler.plan(run.now))
            queue = run.scheduler.queue(run.now)
            found.append([seq.request.id for seq in queue])
        return found

    for order in ("programs", "uniboost"):
        assert arranged(order) == arranged(order)


# -- eviction ------------------------------------------------------------------------------------------------
def test_a_program_that_goes_on_is_kept_and_strangers_are_not() -> None:
    def cached(order: str) -> int:
        bench = Bench(40, order=order)
        talk = [i % 60 for i in said(1, 40)]
        for _ in range(2):
            talk, _ = bench.turn([*talk, 1, 2, 3])
        for number in range(12):
            bench.turn([(7 * number + i * i) % 60 for i in range(30)])
        return bench.turn([*talk, 4])[1]

    assert cached("programs") >= 48 > cached("fcfs") == 0


# -- uniboost ------------------------------------------------------------------------------------------------
def test_the_boost_falls_from_much_to_nothing() -> None:
    works = [0.0, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0]
    boosts = [boost(work, 30.0) for work in works]
    assert boosts[0] == boosts[1] < 2 * 30.0
    assert all(more > less >= 0 for more, less in pairwise(boosts[1:]))
    assert boosts[-1] < 1e-6
    # gamma s = ln 2 halves the exponential: ln 2 / gamma
    gamma = BOOSTS / 30.0
    assert boost(0.6931471805599453 / gamma, 30.0) == pytest.approx(0.6931471805599453 / gamma)
    assert boost(1.0, 0.0) == 0.0, "without ageing it is first come, first served"
