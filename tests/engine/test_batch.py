"""Packing: what a plan becomes, row by row, against a plain loop."""

import random

import numpy as np

from pageturner.executor.batch import BlockRows, pack, pack_sliding, state_tables
from pageturner.kernels.recurrent import RecurrentSpec, alloc
from pageturner.request import Request
from pageturner.scheduler.store import Table
from pageturner.scheduler.types import Item, Plan, Sequence

SCRATCH = 999


def sequence(length: int, computed: int, block_size: int, dice: random.Random) -> Sequence:
    tokens = [dice.randrange(100) for _ in range(length)]
    blocks = dice.sample(range(500), -(-length // block_size))
    return Sequence(Request(1, tuple(tokens)), tokens=tokens, computed=computed, blocks=blocks)


def test_every_row_has_its_token_position_and_slot():
    dice = random.Random(1)
    for _ in range(200):
        block_size = dice.choice([1, 2, 16, 64])
        items = []
        for _ in range(dice.randint(1, 6)):
            length = dice.randint(1, 70)
            computed = dice.randrange(length)
            items.append(
                Item(
                    sequence(length, computed, block_size, dice),
                    dice.randint(1, length - computed),
                    computed,
                )
            )
        batch = pack(Plan(items), block_size, SCRATCH)
        row = 0
        wanted = []
        for s, item in enumerate(items):
            assert batch.query_start[s] == row
            assert batch.context_len[s] == item.sequence.computed + item.n
            for position in range(item.sequence.computed, item.sequence.computed + item.n):
                assert batch.tokens[row] == item.sequence.tokens[position]
                assert batch.positions[row] == position
                block = item.sequence.blocks[position // block_size]
                assert batch.slots[row] == block * block_size + position % block_size
                assert batch.block_table[s, position // block_size] == block
                row += 1
            if item.sequence.computed + item.n == len(item.sequence.tokens):
                wanted.append(row - 1)
        assert batch.query_start[-1] == row == len(batch.tokens)
        assert batch.logit_rows.tolist() == wanted
        for array in (
            batch.tokens,
            batch.positions,
            batch.slots,
            batch.block_table,
            batch.logit_rows,
        ):
            assert array.dtype == np.int32


def test_a_chunk_in_the_middle_of_a_prompt_wants_no_logits():
    s = sequence(40, 0, 16, random.Random(2))
    assert pack(Plan([Item(s, 39, s.computed)]), 16, SCRATCH).logit_rows.tolist() == []
    assert pack(Plan([Item(s, 40, s.computed)]), 16, SCRATCH).logit_rows.tolist() == [39]


def test_ballast_reads_scratch_and_writes_nowhere():
    s = sequence(5, 4, 16, random.Random(3))
    batch = pack(Plan([Item(s, 1, s.computed)], ballast=[(3, 40), (1, 7)]), 16, SCRATCH)
    assert batch.slots.tolist()[1:] == [-1, -1, -1, -1]
    assert batch.positions.tolist() == [4, 37, 38, 39, 6]
    assert batch.context_len.tolist() == [5, 40, 7]
    assert (batch.block_table[1:] == SCRATCH).all()
    assert batch.logit_rows.tolist() == [0]


def test_recent_blocks_and_what_was_given_back():
    s = sequence(40, 30, 4, random.Random(6))
    s.sliding = Table([-1, -1, -1, 7, 3, 8, 1, 4, 2, 9], 3)
    plan = Plan([Item(s, 5, s.computed)], ballast=[(1, 7)])
    full = pack(plan, 4, SCRATCH)
    batch = pack_sliding(full, plan, 4, 77)
    assert batch.block_table[0].tolist() == [77, 77, 77, 7, 3, 8, 1, 4, 2]
    assert (batch.block_table[1] == 77).all()
    assert batch.slots.tolist() == [4 * 4 + 2, 4 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2, -1]
    assert batch.block_table.dtype == batch.slots.dtype == np.int32
    assert batch.positions is full.positions


def test_a_table_longer_than_the_context_is_cut():
    """Admission may reserve blocks ahead of need: they are not this step's business."""
    s = sequence(40, 2, 4, random.Random(4))
    s.tokens = s.tokens[:3]
    batch = pack(Plan([Item(s, 1, s.computed)]), 4, SCRATCH)
    assert batch.block_table.shape == (1, 1)


def test_scored_positions_come_behind_the_ends():
    dice = random.Random(5)
    for _ in range(200):
        items = []
        for id in range(dice.randint(1, 5)):
            length, prompt = dice.randint(2, 40), dice.randint(1, 40)
            one = sequence(max(length, prompt), 0, 4, dice)
            start = dice.choice([None, 0, dice.randrange(prompt)])
            one.request = Request(id, tuple(one.tokens[:prompt]), logits_from=start)
            one.computed = dice.randint(0, min(start or 0, len(one.tokens) - 1))
            items.append(Item(one, dice.randint(1, len(one.tokens) - one.computed), one.computed))
        batch = pack(Plan(items), 4, SCRATCH)
        ends, scored = [], []
        for s, item in enumerate(items):
            one, row = item.sequence, batch.query_start[s]
            for position in range(one.computed, one.computed + item.n):
                start = one.request.logits_from
                if start is not None and start <= position < one.prompt_len - 1:
                    scored.append(row + position - one.computed)
                if position == len(one.tokens) - 1:
                    ends.append(row + position - one.computed)
        assert batch.logit_rows.tolist() == ends + scored


def test_blocks_that_are_kept_are_those_of_now():
    """Sequences come, go, grow, and have blocks taken in exchange for others."""
    dice = random.Random(3)
    kept, every = BlockRows(), [sequence(40, 39, 4, dice) for _ in range(6)]
    for _ in range(50):
        one = dice.choice(every)
        one.blocks[dice.randrange(10)] = dice.randrange(500)
        if dice.random() < 0.3:
            one.blocks.append(dice.randrange(500))
        plan = Plan([Item(each, 1, 39) for each in dice.sample(every, 3)], [(2, 9)])
        found = pack(plan, 4, SCRATCH, kept=kept).block_table
        assert found.tolist() == pack(plan, 4, SCRATCH).block_table.tolist()
        assert found.tolist()[:3] == [item.sequence.blocks[:10] for item in plan.items]


def test_tables_of_recurrent_layers() -> None:
    """Of a step from position 40 to 99: the state before 32 is read, those before 64 and 96 are written as far as
    there is a slot, and the rows of the first and of the last chunk are kept."""
    one = Sequence(Request(1, tuple(range(99))), tokens=list(range(99)), computed=40, blocks=[0])
    one.states, one.tail = Table([-1, 5, -1, 7], 1), Table([-1, 3, -1, 4], 1)
    new = Sequence(Request(2, (1, 2)), tokens=[1, 2], blocks=[1])
    new.states, new.tail = Table([-1]), Table([9])
    plan = Plan([Item(one, 59, 40), Item(new, 2, 0)], ballast=[(2, 50)])
    cache = alloc(RecurrentSpec(1, 8, 4), 10, 10)
    tables = state_tables(plan, cache, (8, 9))
    assert tables.state_read.tolist() == [5, -1, 8]
    assert tables.state_writes.tolist() == [[0, 3, 7]]
    assert tables.tail_table.tolist() == [[3, 4], [9, -1], [9, -1]]
    assert tables.cache is cache
