"""Which states of recurrent layers stay, and how much of a prompt they save the next one."""

from __future__ import annotations

import random
from itertools import pairwise

from pageturner.policies.snapshots import Snapshots
from pageturner.request import Request
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.store import GONE
from pageturner.scheduler.types import Sequence
from support.schedulers import check_pool

STEP = 512


def pool_of(states: int, blocks: int = 60_000, every: int = 2048) -> BlockPool:
    pool = BlockPool(blocks, 16, states=states, tails=8)
    Snapshots(pool, every)
    return pool


def compute(pool: BlockPool, tokens: list[int], prompt: int = 0, step: int = STEP) -> Sequence:
    """A sequence that has computed its tokens; those behind the prompt one by one."""
    prompt = prompt or len(tokens)
    seq = Sequence(Request(0, tuple(tokens[:prompt])), tokens=list(tokens))
    seq.cached = pool.attach(seq)
    while seq.computed < len(tokens):
        n = 1 if seq.computed >= prompt else min(step, prompt - seq.computed)
        assert pool.extend(seq, n)
        pool.begin()
        seq.computed += n
        pool.release_held()
        pool.cache_full_blocks(seq)
        pool.trim(seq)
    return seq


def kept(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Positions of a prompt whose states can be found."""
    seq = Sequence(Request(0, tuple(tokens)), tokens=list(tokens))
    keys = [pool._key(seq, place, 0) for place in range(len(tokens) // 16)]
    return [16 * (i + 1) for i, key in enumerate(keys) if key in pool.states.index]


def test_a_prompt_keeps_few_states() -> None:
    """At multiples of 2,048, and the last before its end; those where its steps ended go first."""
    pool, tokens = pool_of(30), list(range(7000))
    pool.release(compute(pool, tokens))
    assert set(kept(pool, tokens)) >= {2048, 4096, 6144, 6976}
    assert len(pool.states.index) < 30, "no state at every boundary"
    for i in range(60):  # more slots are wanted than there are
        pool.release(compute(pool, [10_000 + i] * 40))
    assert set(kept(pool, tokens)) == {2048, 4096, 6144, 6976}


def test_states_of_long_prompts_lie_apart() -> None:
    """As far as a sixteenth of what is before them."""
    pool, tokens = pool_of(60, blocks=10_000), list(range(100_000))
    pool.release(compute(pool, tokens))
    wanted = Sequence(Request(0, tuple(tokens)), tokens=tokens)
    found = [p for p in kept(pool, tokens) if p in pool.wanted(wanted, p - 1, p)]
    late = [b - a for a, b in pairwise(found[:-1]) if a > 70_000]
    assert late == [8192, 8192, 8192]


def test_where_a_prompt_parted_from_another_there_is_a_state() -> None:
    pool = pool_of(40)
    common = list(range(1500))
    pool.release(compute(pool, common + [1] * 900))
    assert compute(pool, common + [2] * 900).cached < 1472, "nothing stands there yet"
    assert compute(pool, common + [3] * 900).cached == 1472
    assert pool.state_hits >= 1
    assert pool.state_missed_tokens >= 32, "what the second one could not take"


def test_decode_leaves_its_last_boundary() -> None:
    pool = pool_of(12)
    tokens = list(range(300))
    seq = compute(pool, tokens, prompt=100)
    assert seq.states[9] != GONE
    assert [slot for slot in seq.states if slot != GONE] == [seq.states[9]]
    pool.release(seq)
    check_pool(pool, [])
    assert compute(pool, [*tokens[:290], *range(1000, 1050)]).cached == 288


def shared(pool: BlockPool, traffic: list[tuple[list[int], int, int]]) -> float:
    """The part of the tokens that were there before which no prompt computed again."""
    saved = there = 0
    for tokens, prompt, known in traffic:
        seq = compute(pool, tokens, prompt)
        saved += min(seq.cached, known)
        there += known
        pool.release(seq)
    return saved / there


def test_repeated_prefixes_are_reused() -> None:
    """Documents of up to 8,000 tokens with other questions behind them, in memory for half of what they would
    keep."""
    dice = random.Random(1)
    documents = [[(i << 16) + t for t in range(dice.randint(500, 8000))] for i in range(12)]
    seen: set[int] = set()
    traffic = []
    for request in range(150):
        which = min(int(dice.expovariate(1 / 3)), 11)
        own = [(100 + request << 16) + t for t in range(dice.randint(50, 400))]
        known = len(documents[which]) // 32 * 32 if which in seen else 0
        seen.add(which)
        traffic.append((documents[which] + own, 0, known))
    share = shared(pool_of(60), traffic)
    assert share > 0.93, share


def test_chats_are_reused() -> None:
    """20 conversations of 8 turns beside each other: each turn finds what the one before it left."""
    dice = random.Random(3)
    turns = [user for user in range(20) for _ in range(8)]
    dice.shuffle(turns)
    said: dict[int, list[int]] = {}
    traffic = []
    for number, user in enumerate(turns):
        before = said.get(user, [])
        prompt = (before or [*range(300)]) + [
            (number + 1 << 16) + t for t in range(dice.randint(100, 600))
        ]
        said[user] = prompt + [(number + 500 << 16) + t for t in range(dice.randint(30, 90))]
        known = (len(before) - 1) // 32 * 32 if before else 0
        traffic.append((said[user], len(prompt), known))
    share = shared(pool_of(120), traffic)
    assert share > 0.97, share


def test_small_states_stay_at_every_boundary() -> None:
    """Where there is a slot for each that the blocks have room for, a prompt loses less than a chunk."""
    pool, tokens = pool_of(600, blocks=1000), list(range(7000))
    pool.release(compute(pool, tokens))
    assert kept(pool, tokens) == list(range(32, 7000, 32))
    for i in range(300):  # more slots are wanted than there are: what was used last stays
        pool.release(compute(pool, [10_000 + i] * 40))
        if i % 20 == 0:
            again = compute(pool, [*tokens[:6000], 9])
            assert again.cached == 6000 // 32 * 32
            pool.release(again)
    check_pool(pool, [])


def test_a_step_over_many_boundaries_passes_all_but_the_last() -> None:
    """Whatever the steps are: what has no reason of its own goes before what has one."""
    left = []
    for step in (32, 512, 2048):
        pool, tokens = pool_of(200), list(range(3000))
        pool.release(compute(pool, tokens, step=step))
        assert len(kept(pool, tokens)) > 8
        for i in range(220):
            pool.release(compute(pool, [10_000 + i] * 40))
        left.append(kept(pool, tokens))
    assert left == [[2048, 2976]] * 3


def test_a_state_whose_kv_was_overwritten_goes_first() -> None:
    pool = pool_of(12, blocks=40)
    pool.release(compute(pool, list(range(100))))
    pool.release(compute(pool, [*range(1000, 1600)]))  # takes all blocks but a few
    lost = [key for key in pool.states.index if key not in pool.full.index]
    assert lost
    table: list[int] = []
    pool.states.write(table, 0, pool.states.available - len(pool.states.cached) + len(lost))
    assert all(key in pool.full.index for key in pool.states.index)


def test_which_state_goes_is_found_without_a_look_at_all() -> None:
    """The one of least worth, as a look at all of them says, while they come, are used and go."""
    pool = pool_of(64, blocks=2000)
    states, dice = pool.states, random.Random(7)
    snapshots = states.cached
    assert isinstance(snapshots, Snapshots)
    looked = 0
    for turn in range(400):
        start = dice.randrange(12)
        tokens = [(start << 16) + t for t in range(dice.randint(40, 1200))]
        pool.release(compute(pool, [*tokens, turn], prompt=len(tokens)))
        if snapshots._passed or not snapshots._kept:
            continue
        looked += 1
        assert states.oldest() == min(snapshots._kept.values())[2]
        assert len(snapshots._heap) <= 2 * len(snapshots._kept) + 200
    assert looked > 50
