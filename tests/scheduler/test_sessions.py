"""Sessions: what is claimed stays, within bounds, as long as nobody needs the memory; and nothing leaks."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.ipc.session_messages import RestoreSession
from pageturner.policies.eviction_order import EvictionOrder
from pageturner.policies.session_claims import Claims, KeptConversation
from pageturner.policies.session_starts import peak
from pageturner.policies.session_worth import FIRST_GAP, PATIENCE, Gaps, worth
from pageturner.request import SessionHint
from pageturner.scheduler.store import Store
from pageturner.telemetry.kv_usage import store_stats
from support.schedulers import check, make_stack

from .session_bench import PROMISES, Bench, fresh


def flood(bench: Bench, count: int = 12) -> None:
    """Others who say nothing, more than fit."""
    for number in range(count):
        bench.turn(fresh(100 + number))


@pytest.mark.parametrize("promise", PROMISES)
def test_promises_hold(promise: Callable[..., None]) -> None:
    """Those that seeded bugs break (tests/mutants/sessions.py)."""
    promise(make_stack)


# -- what is kept --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("keep", "found"), [(60.0, True), (0.0, False)])
def test_a_conversation_finds_what_it_had_kept_and_another_one_does_not(
    keep: float, found: bool
) -> None:
    bench = Bench()
    said, _ = bench.turn(fresh(1), name="a", keep=keep)
    flood(bench)
    _, cached = bench.turn([*said, 1, 2, 3], name="a", keep=keep)
    assert cached == (28 if found else 0)


def test_nobody_is_refused_or_waits_because_something_is_kept() -> None:
    bench = Bench(20, max_session_share=1.0)
    for number in range(4):
        bench.turn(fresh(number, 12), name=f"s{number}", keep=60.0)
    assert bench.claimed() == 16
    bench.add(fresh(50, 60), tokens=16)  # 19 blocks: all but one
    assert bench.step().items, "it begins at once"
    bench.drain()
    assert bench.claimed() <= 4
    assert not store_stats(bench.pool.full)["blocks_used"]


def test_its_time_over_a_conversation_is_like_any_other() -> None:
    bench = Bench()
    said, _ = bench.turn(fresh(1), name="a", keep=5.0)
    bench.now += 6.0
    flood(bench, 4)  # first a place is found for whoever comes where nobody is waited for
    assert bench.claimed() == 0
    assert len(bench.sessions) == 0
    flood(bench)
    assert bench.turn([*said, 1], name="a", keep=5.0)[1] == 0


def test_a_fork_shares_and_outlives_what_it_was_forked_from() -> None:
    bench = Bench()
    said, _ = bench.turn(fresh(1), name="a", keep=60.0)
    bench.turn([*said, 1, 2], name="b", keep=60.0, fork_of="a")
    a, b = bench.sessions
    assert (a.pays, len(a.keys), b.pays, len(b.keys)) == (7, 7, 2, 9), "who shares pays once"
    bench.sessions.release("a")
    assert b.pays == 9
    flood(bench)
    assert bench.turn([*said, 1, 2, 3], name="b", keep=60.0)[1] == 32


def test_a_fork_keeps_what_it_begins_with_before_its_first_turn_has_run() -> None:
    bench = Bench()
    said, _ = bench.turn(fresh(1), name="a", keep=60.0)
    waiting = bench.add([*said, 5], name="b", keep=60.0, fork_of="a")
    bench.sessions.release("a")
    assert bench.claimed() == 7
    bench.drain()
    assert bench.cached[waiting] == 28


@pytest.mark.parametrize("supersede", [True, False])
def test_what_is_superseded_goes_before_what_is_older(supersede: bool) -> None:
    bench = Bench(18)
    older, _ = bench.turn(fresh(3, 16))  # 5 blocks that can be found
    system = fresh(1, 8)
    bench.turn(system + fresh(2, 16), name="a", keep=60.0)  # 7 blocks
    bench.turn([*system, 1, 2, 3, 4, 5], name="a", keep=60.0, supersede=supersede)  # 2 more
    assert bench.claimed() == 4
    bench.turn(fresh(4, 22))  # takes 7, and 4 are empty
    assert (bench.turn([*older, 1])[1] == 20) == supersede


def test_what_is_released_goes_before_what_was_used_longer_ago() -> None:
    bench = Bench(24)
    old, _ = bench.turn(fresh(1))
    bench.turn(fresh(2), name="a", keep=60.0, release=True)
    assert (bench.claimed(), len(bench.sessions)) == (0, 0)
    bench.turn(fresh(3, 30))
    assert bench.turn([*old, 1])[1] == 28


def test_a_turn_that_is_aborted_while_it_waits_changes_nothing() -> None:
    bench = Bench()
    said, _ = bench.turn(fresh(1), name="a", keep=60.0)
    id = bench.add([*said, 1], name="a", keep=60.0)
    bench.stack.scheduler.abort(id)
    (one,) = bench.sessions
    assert (one.open, len(one.keys), bench.claimed()) == (0, 7, 7)


def test_a_release_while_a_turn_runs_holds_when_it_has_ended() -> None:
    bench = Bench()
    bench.add(fresh(1), name="a", keep=60.0)
    bench.step()
    bench.sessions.release("a")
    assert len(bench.sessions) == 1
    bench.drain()
    assert (len(bench.sessions), bench.claimed()) == (0, 0)


HYBRID = {"states": 24, "tails": 16, "chunk": 8, "snapshot_interval": 2048}


@pytest.mark.parametrize(("keep", "found"), [(60.0, True), (0.0, False)])
def test_a_conversation_keeps_the_state_at_its_end(keep: float, found: bool) -> None:
    """Of recurrent layers: the others leave eight states, and want many more."""
    bench = Bench(400, max_session_share=0.5, **HYBRID)
    said, _ = bench.turn(fresh(25), name="a", keep=keep)
    for end in (24, 32, 40):  # 29, 38 and 47 tokens were computed
        flood(bench, 40)
        said, cached = bench.turn([*said, 1, 2, 3], name="a", keep=keep)
        assert cached == (end if found else 0)
    flood(bench, 40)
    cached = bench.turn([*said, 5], name="b", keep=keep, fork_of="a")[1]
    assert (cached > 0) == found
    assert bench.sessions.claims.ends.total() == 2 * found


def test_conversations_claim_a_part_of_the_states() -> None:
    bench = Bench(400, max_session_share=0.5, session_wait=0.0, **HYBRID)
    said = {n: bench.turn(fresh(n), name=f"s{n}", keep=60.0)[0] for n in range(20, 29)}
    assert len(bench.sessions.claims.ends) == 4, "half of the eight that are not for running ones"
    kept = [one.name for one in bench.sessions if one.keys]
    flood(bench, 40)
    for n, before in said.items():
        found = bench.turn([*before, 1], name=f"s{n}", keep=0.0)[1]
        assert (found > 0) == (f"s{n}" in kept)


def test_with_sliding_windows_hints_change_nothing() -> None:
    bench = Bench(window=8, sliding=40)
    bench.turn(fresh(1), name="a", keep=60.0)
    assert (len(bench.sessions), bench.claimed()) == (0, 0)


def test_a_prefix_cache_that_is_emptied_is_empty_of_sessions_too() -> None:
    bench = Bench()
    said, _ = bench.turn(fresh(1), name="a", keep=60.0)
    bench.stack.pins.forget_others()
    assert bench.claimed() == 0
    check(bench.stack)
    assert bench.turn([*said, 1], name="a", keep=60.0)[1] == 0


# -- bounds and fairness -------------------------------------------------------------------------------------
def test_claims_beyond_the_share_are_given_up_the_cheapest_first() -> None:
    bench = Bench(40, max_session_share=0.5, session_wait=0.0)
    for number, gap in enumerate((1.0, 50.0, 1.0)):  # 8 blocks each, of 20
        bench.turn(fresh(number, 28), name=f"s{number}", keep=60.0, next_in=gap)
    sizes = {one.name: len(one.keys) for one in bench.sessions}
    assert bench.claimed() <= 20
    assert (sizes["s0"], sizes["s2"]) == (8, 8)
    assert sizes["s1"] == 0, (
        "who comes back in a minute is worth less than who comes back in a second"
    )


def test_who_never_comes_back_gives_way_to_who_does() -> None:
    """A silent conversation decays, whatever it says of itself."""
    bench = Bench(40, max_session_share=0.5, session_wait=0.0)
    bench.turn(fresh(0, 28), name="hog", keep=60.0, next_in=0.001)
    said, _ = bench.turn(fresh(1, 28), name="a", keep=60.0, next_in=2.0)
    bench.now += 10.0
    said, cached = bench.turn([*said, 5], name="a", keep=60.0, next_in=2.0)
    bench.turn(fresh(2, 28), name="b", keep=60.0, next_in=2.0)
    sizes = {one.name: len(one.keys) for one in bench.sessions}
    assert cached == 32
    assert sizes["hog"] == 0
    assert (sizes["a"], sizes["b"]) == (10, 8)


def test_a_tenant_that_has_more_than_its_part_loses_before_one_that_has_less() -> None:
    bench = Bench(40, max_session_share=1.0, session_wait=0.0)
    for number in range(4):
        bench.turn(fresh(number, 28), name=f"hog{number}", owner="hog", keep=60.0, next_in=0.1)
    bench.turn(fresh(9, 28), name="small", owner="small", keep=60.0, next_in=2.0)
    flood(bench, 1)
    sizes = {one.name: len(one.keys) for one in bench.sessions}
    assert sizes["small"] == 8
    assert bench.sessions.claims.pays["hog"] <= 32


def test_the_share_of_a_key_is_a_bound() -> None:
    bench = Bench(40, max_session_share=1.0, session_wait=0.0)
    for number in range(3):
        bench.turn(fresh(number, 28), name=f"s{number}", owner="t", keep=60.0, share=0.25)
    assert bench.sessions.claims.pays["t"] <= 10


def test_no_more_conversations_than_the_setting_says() -> None:
    bench = Bench(100, max_sessions=3)
    for number in range(6):
        bench.turn(fresh(number, 8), name=f"s{number}", keep=60.0)
    assert [one.name for one in bench.sessions] == ["s3", "s4", "s5"]


def test_worth_falls_with_silence_and_rises_with_place_and_haste() -> None:
    one = KeptConversation("a", "", ended=10.0)
    assert worth(one, 10.0, 2.0, 16.0, 1.0) == 8.0
    assert worth(one, 16.0, 2.0, 16.0, 1.0) == 2.0
    assert worth(one, 10.0, 2.0, 16.0, 0.5) == 4.0
    one.open = 1
    assert worth(one, 1e9, 2.0, 16.0, 0.001) == float("inf")


def test_nobody_waits_for_a_conversation_longer_than_it_has_reason_to() -> None:
    one, gaps = KeptConversation("a", "", keep=60.0, next_in=2.0, keys=[b"k"]), Gaps()
    assert gaps.expected(one) == 2.0
    assert gaps.awaited(one, PATIENCE * FIRST_GAP)
    assert not gaps.awaited(one, PATIENCE * FIRST_GAP + 0.1)
    one.next_in = 0.0
    gaps.saw(one, 8.0)
    assert gaps.expected(one) == 8.0
    assert gaps.awaited(one, PATIENCE * 8.0)
    one.keep = 20.0
    assert not gaps.awaited(one, PATIENCE * 8.0)


# -- who may begin -------------------------------------------------------------------------------------------
def awaiting(bench: Bench) -> Callable[[], bool]:
    """A conversation that would be one too many waits; whether it still does."""
    for number in range(2):
        bench.turn(fresh(number, 28), name=f"s{number}", owner="t", keep=60.0, next_in=2.0)
    id = bench.add(fresh(5, 28), name="late", owner="t", keep=60.0)
    return lambda: not bench.answers[id] and id not in bench.cached


def test_one_more_conversation_waits_until_there_is_room_and_others_pass_it() -> None:
    bench = Bench(25, max_session_share=0.8)
    waits = awaiting(bench)
    passing = bench.add(fresh(7, 8))
    for _ in range(8):
        bench.step()
    assert waits()
    assert len(bench.answers[passing]) == 6
    bench.sessions.release("s0")
    bench.step()
    bench.step()
    assert not waits()
    bench.drain()


def test_a_silent_server_is_asked_again_when_nobody_is_waited_for_any_more() -> None:
    bench = Bench(25, max_session_share=0.8)
    waits = awaiting(bench)
    wake = bench.step().wake
    assert waits()
    assert wake is not None
    assert bench.now < wake < bench.now + PATIENCE * FIRST_GAP
    bench.now = wake
    bench.step()
    bench.step()
    assert not waits()


def test_nobody_waits_longer_than_the_setting_says() -> None:
    bench = Bench(25, max_session_share=0.8, session_wait=1.0)
    waits = awaiting(bench)
    bench.now += 0.9
    assert bench.step().wake == pytest.approx(bench.now + 0.05)
    assert waits()
    bench.now += 0.1
    bench.drain()
    assert not waits()


def test_who_has_less_than_its_part_waits_for_nobody() -> None:
    bench = Bench(25, max_session_share=0.8)
    waits = awaiting(bench)
    bench.add(fresh(6, 12), name="other", owner="u", keep=60.0)
    plan = bench.step()
    assert waits()
    assert len(plan.items) == 1


@pytest.mark.parametrize(
    ("ahead", "growth", "most"),
    [
        ([], 2.0, 0.0),
        ([(3.0, 10.0)], 2.0, 16.0),
        ([(3.0, 10.0), (1.0, 20.0)], 2.0, 34.0),  # just before the second one ends
        ([(9.0, 10.0), (1.0, 2.0)], 2.0, 28.0),  # the first one, alone
        ([(2.0, 5.0), (2.0, 5.0)], 0.0, 10.0),
    ],
)
def test_the_most_that_conversations_will_need(
    ahead: list[tuple[float, float]], growth: float, most: float
) -> None:
    assert peak(ahead, growth) == most
    by_hand = max((sum(s + growth * t for r, s in ahead if r >= t) for t, _ in ahead), default=0.0)
    assert most == by_hand


# -- after a crash -------------------------------------------------------------------------------------------
def test_what_another_engine_kept_is_claimed_as_far_as_it_is_there() -> None:
    bench = Bench()
    said, _ = bench.turn(fresh(1))
    hint = SessionHint("a", keep=60.0)
    bench.sessions.restore(RestoreSession(hint, array("I", said).tobytes()), bench.now)
    bench.sessions.restore(
        RestoreSession(SessionHint("b", keep=60.0), array("I", fresh(2)).tobytes()), bench.now
    )
    assert [(one.name, len(one.keys)) for one in bench.sessions] == [("a", 7), ("b", 0)]
    flood(bench)
    assert bench.turn([*said, 1], name="a", keep=60.0)[1] == 28


# -- properties ----------------------------------------------------------------------------------------------
HINTS = st.fixed_dictionaries(
    {
        "name": st.sampled_from("abcdef"),
        "owner": st.sampled_from(("", "t", "u")),
        "keep": st.sampled_from((0.0, 1.0, 30.0)),
        "next_in": st.sampled_from((0.0, 0.2, 5.0)),
        "fork_of": st.sampled_from(("", "", "a", "b")),
        "supersede": st.booleans(),
        "release": st.sampled_from((False, False, True)),
        "share": st.sampled_from((0.0, 0.0, 0.2)),
    }
)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("turn"), HINTS, st.integers(0, 9), st.integers(1, 8)),
        st.tuples(st.just("other"), st.integers(0, 9), st.integers(1, 30)),
        st.tuples(st.just("steps"), st.integers(1, 12)),
        st.tuples(st.just("wait"), st.sampled_from((0.1, 2.0, 40.0))),
        st.tuples(st.just("release"), st.sampled_from("abcdef")),
        st.tuples(st.just("abort"), st.integers(0, 5)),
        st.tuples(
            st.just("forget"),
        ),
    ),
    max_size=30,
)


def audit(bench: Bench) -> None:
    """What must be so between any two calls."""
    check(bench.stack)
    sessions, store = bench.sessions, bench.pool.full
    claims = sessions.claims
    listed = {key for one in sessions for key in one.keys}
    assert set(claims) == listed, "a claim of nobody, or none of somebody"
    assert len(claims) <= sessions.most, "more is kept than may be"
    assert all(key in store.index for key in claims), "what is claimed is not there"
    assert sum(one.pays for one in sessions) == len(claims) == sum(claims.pays.values()), (
        "paid for twice"
    )
    if isinstance(store.cached, EvictionOrder):
        cached = [block for block in store.cached if store.keys[block] in claims]
        assert store.cached.kept == len(cached), "kept blocks are not where they should be"
    if bench.pool.states.num_blocks:
        ends = {one.keys[-1] for one in sessions if one.keys}
        assert ends == {*claims.ends}
        assert all(key in bench.pool.states.index for key in ends), "a state that was kept is gone"
        assert len(ends) <= (bench.pool.states.num_blocks - bench.pool.tails.num_blocks)
    for one in sessions:
        assert one.keys or one.open or one.keep, "a conversation is remembered for nothing"


@settings(max_examples=90, deadline=None)
@given(
    ACTS,
    st.sampled_from((0.3, 0.8, 1.0)),
    st.sampled_from((0.0, 1.0)),
    st.sampled_from(({}, {}, {"states": 19, "tails": 16}, {"states": 40, "tails": 16})),
)
def test_whatever_is_said_bounds_hold_and_nothing_leaks(
    acts: list[Any], share: float, wait: float, states: dict[str, int]
) -> None:
    sizes = states | {"chunk": 8}
    bench = Bench(20, max_session_share=share, session_wait=wait, max_sessions=5, **sizes)
    said: dict[str, list[int]] = {}
    for act in acts:
        match act:
            case ("turn", hint, number, more):
                before = said.get(hint["name"], said.get(hint["fork_of"], fresh(number, 8)))
                prompt = (fresh(number, 10) if hint["supersede"] else before)[-40:] + [more] * more
                said[hint["name"]] = prompt
                bench.add(prompt, more, **hint)
            case ("other", number, length):
                bench.add(fresh(number, length), 3)
            case ("steps", count):
                for _ in range(count):
                    bench.step()
                    audit(bench)
            case ("wait", seconds):
                bench.now += seconds
            case ("release", name):
                bench.sessions.release(name)
            case ("abort", back):
                bench.stack.scheduler.abort(bench.ids - back)
            case ("forget",):
                bench.stack.pins.forget_others()
        audit(bench)
    bench.drain()
    audit(bench)
    for name in [one.name for one in bench.sessions]:
        bench.sessions.release(name)
    assert (len(bench.sessions), bench.claimed()) == (0, 0)
    assert not store_stats(bench.pool.full)["blocks_used"], "blocks leaked"
    audit(bench)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_without_claims_the_order_is_that_of_a_plain_store(seed: int) -> None:
    """Which block is overwritten, through hits, releases and copies."""

    def overwritten(replace: bool) -> list[tuple[bytes, int]]:
        dice, store, found = random.Random(seed), Store(8), list[tuple[bytes, int]]()
        store.on_evict = lambda key, block: found.append((key, block))
        if replace:
            EvictionOrder(store, Claims(lambda key: None, lambda key, fate: None), lambda: None)
        assert isinstance(store.cached, EvictionOrder if replace else OrderedDict)
        tables: list[list[int]] = []
        for number in range(60):
            if tables and (dice.random() < 0.4 or store.available < 3):
                store.truncate(tables.pop(dice.randrange(len(tables))), 0)
                continue
            known = [block for block in store.index.values() if dice.random() < 0.3][:2]
            table = list(known)
            store.share(known)
            if store.available:
                store.write(table, len(table), len(table) + 1)
                store.publish(table, len(table) - 1, b"%d" % number)
            tables.append(table)
        return found

    assert overwritten(True) == overwritten(False)
