"""Salts: what a tenant finds depends on its own requests and on what is pinned for all, on nobody else."""

from __future__ import annotations

import random
from array import array

import pytest

from pageturner import block_keys
from pageturner.policies.pinned_prefixes import PinnedPrefixes
from pageturner.request import Request
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.types import Sequence
from support.schedulers import check_pool

SIZE = 4


def compute(pool: BlockPool, id: int, prompt: tuple[int, ...], salt: str) -> tuple[Sequence, int]:
    """A request that has come to its end, and how many tokens the cache gave."""
    seq = Sequence(Request(id, prompt, salt=salt), tokens=list(prompt))
    gained = pool.attach(seq)
    assert pool.extend(seq, seq.pending)
    pool.release_held()
    seq.computed = len(prompt)
    pool.cache_full_blocks(seq)
    return seq, gained


class Tenants:
    """A pool in which requests come one after the other, and some are pinned."""

    def __init__(self) -> None:
        self.pool = BlockPool(500, SIZE)
        self.pins = PinnedPrefixes(self.pool)

    def ask(self, id: int, prompt: tuple[int, ...], salt: str, *, pin: bool = False) -> int:
        seq, gained = compute(self.pool, id, prompt, salt)
        if pin:
            self.pins.keep(seq)
        else:
            self.pool.release(seq)
        check_pool(self.pool, self.pins.sequences)
        return gained


def test_a_tenant_begins_with_what_is_pinned_for_everybody() -> None:
    here = Tenants()
    manual = tuple(range(8))
    here.ask(0, (*manual, 99), "", pin=True)
    question = (*manual, 1, 2, 3, 4, 5)
    assert here.ask(1, question, "a") == 8, "the manual"
    assert here.ask(2, question, "a") == 12, "and its own"
    assert here.ask(3, question, "b") == 8, "and not another one's"
    assert here.ask(4, question, "") == 8, "nor does anybody without a salt find it"


def test_what_is_not_pinned_is_found_by_nobody_else() -> None:
    here = Tenants()
    prompt = tuple(range(9))
    here.ask(0, prompt, "")
    assert here.ask(1, prompt, "a") == 0
    here.ask(2, prompt, "b", pin=True)
    assert here.ask(3, (*prompt, 1), "c") == 0, "nor what a tenant has pinned"
    assert here.ask(4, (*prompt, 1), "b") == 8


def test_pins_that_went_are_nobodys() -> None:
    here = Tenants()
    prompt = tuple(range(9))
    here.ask(0, prompt, "", pin=True)
    here.ask(1, prompt, "", pin=True)
    here.pins.drop(0)
    assert here.ask(2, prompt, "a") == 8, "pinned twice"
    here.pins.drop(1)
    assert here.ask(3, prompt, "a") == 0
    assert here.ask(4, prompt, "") == 8, "cached still, where it belongs"


def test_a_tenants_blocks_below_a_pin_outlive_it() -> None:
    here = Tenants()
    manual, question = tuple(range(9)), (*range(8), 1, 2, 3, 4, 5)
    here.ask(0, manual, "", pin=True)
    mine, _ = compute(here.pool, 1, question, "a")
    here.pins.drop(0)
    check_pool(here.pool, [mine])
    here.pool.release(mine)
    assert here.ask(2, question, "a") == 0, "its beginning is nobody's now"
    here.ask(3, manual, "", pin=True)
    assert here.ask(4, question, "a") == 12, "and everybody's again"


def test_nobody_can_tell_what_other_tenants_asked() -> None:
    """Each tenant gets the same from the cache with all the others there and without them."""
    for seed in range(60):
        dice = random.Random(seed)
        together, alone = Tenants(), {salt: Tenants() for salt in "ab"}
        hits = 0
        for id in range(60):
            prompt = tuple(dice.randrange(2) for _ in range(dice.randrange(1, 20)))
            salt, pin = dice.choice(("", "a", "b")), dice.random() < 0.15
            gained = together.ask(id, prompt, salt, pin=pin)
            for mine, world in alone.items():
                if salt == mine or (pin and not salt):
                    mine_alone = world.ask(id, prompt, salt, pin=pin)
                    if salt == mine:
                        assert mine_alone == gained
                        hits += gained > 0
            if together.pins.sequences and dice.random() < 0.1:
                released = dice.choice(together.pins.sequences).request.id
                for world in (together, *alone.values()):
                    world.pins.drop(released)
        assert hits > 3


def test_a_salt_cannot_spell_tokens() -> None:
    """A client that sends the bytes of a block of tokens as its salt gets keys that are nobody else's."""
    size, pool = 16, BlockPool(64, 16)
    public, spelled, own = (1,) * size, (65,) * size, (7,) * size
    pin, _ = compute(pool, 0, (*public, 9), "")
    PinnedPrefixes(pool).keep(pin)
    compute(pool, 1, (*public, *spelled, 9), "")
    salt = array("q", spelled).tobytes().decode()
    theirs, gained = compute(pool, 2, (*public, *own, 9), salt)
    assert gained == size, "what is pinned for everybody"
    asked, gained = compute(pool, 3, (*public, *spelled, *own, 9), "")
    assert gained == 2 * size
    assert not {*asked.blocks[2:]} & {*theirs.blocks}


def test_long_salts_are_not_kept_and_long_prompts_not_hashed_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever has a salt looks at what is pinned for everybody block by block, up to the first miss."""
    pool = BlockPool(64, SIZE)
    pin, _ = compute(pool, 0, (1, 2, 3, 4, 5), "")
    PinnedPrefixes(pool).keep(pin)
    made, block_key = [0], block_keys.block_key

    def counted(parent: bytes, tokens: list[int]) -> bytes:
        made[0] += 1
        return block_key(parent, tokens)

    monkeypatch.setattr(block_keys, "block_key", counted)
    prompt = tuple(range(100, 100 + 40 * SIZE))
    assert pool.match(Sequence(Request(1, prompt, salt="a" * 10_000), tokens=list(prompt))) == []
    assert made[0] <= 2


def test_a_sequence_without_tokens_finds_nothing() -> None:
    """As those of a beam search are that have not branched yet."""
    pool = BlockPool(64, SIZE)
    pin, _ = compute(pool, 0, (1, 2, 3, 4, 5), "")
    PinnedPrefixes(pool).keep(pin)
    assert pool.match(Sequence(Request(1, (1, 2, 3), salt="a"))) == []
