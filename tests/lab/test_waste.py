"""What reservation wastes: the allocator against a map of every token, and traces whose account is known."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kv_waste import SCHEMES, ContiguousMemory, KVServer, KVUse, contiguous, paged
from pageturner.lab.traffic.traffic_files import TraceRow

SERVER = KVServer(memory=256, longest=64, cap=32, slots=8, budget=16, block_size=4)


def holes(owners: list[int | None]) -> list[tuple[int, int]]:
    """(length, place) of every run of free tokens, by looking at each token."""
    found, start = [], None
    for place, owner in enumerate([*owners, 0]):
        if owner is None and start is None:
            start = place
        elif owner is not None and start is not None:
            found.append((place - start, start))
            start = None
    return found


@pytest.mark.parametrize("seed", range(30))
def test_pieces_lie_where_a_map_of_every_token_says(seed: int) -> None:
    dice, memory = random.Random(seed), ContiguousMemory(60)
    owners: list[int | None] = [None] * 60
    for id in range(80):
        length = dice.randint(1, 25)
        best = min((hole for hole in holes(owners) if hole[0] >= length), default=None)
        assert memory.take(id, length) == (best is not None)
        if best is not None:
            owners[best[1] : best[1] + length] = [id] * length
        assert memory.reserved == sum(owner is not None for owner in owners)
        alive = sorted({owner for owner in owners if owner is not None})
        assert len(memory) == len(alive)
        if alive and dice.random() < 0.5:
            gone = dice.choice(alive)
            memory.free(gone)
            owners = [None if owner == gone else owner for owner in owners]
    with pytest.raises(KeyError):
        memory.free(10**6)


def test_free_memory_in_fragments_serves_nobody() -> None:
    memory = ContiguousMemory(30)
    assert [memory.take(id, 10) for id in range(4)] == [True, True, True, False]
    memory.free(0)
    memory.free(2)
    assert not memory.take(4, 20), "20 tokens are free, in two holes"
    memory.free(1)
    assert memory.take(4, 30), "neighbours become one"


def test_one_request_by_hand() -> None:
    """A prompt of 6 and an answer of 3: KV of 6, 7 and 8 tokens; the last one is never computed."""
    rows = [TraceRow(6, 3)]
    account = contiguous(SERVER, rows, "oracle")
    assert (account.reserved, account.used, account.running) == ([9, 9, 0], [6, 7, 0], [1, 1, 0])
    assert contiguous(SERVER, rows, "max").reserved[:2] == [64, 64]
    assert contiguous(SERVER, rows, "cap").reserved[:2] == [38, 38]
    assert contiguous(SERVER, rows, "pow2").reserved[:2] == [10, 10]
    blocks = paged(SERVER, rows)
    assert (blocks.reserved, blocks.used) == ([8, 8, 0], [6, 7, 0])
    assert blocks.most_internal == 2 / 256


def test_who_waits_for_a_piece_leaves_memory_idle() -> None:
    """Three pieces of 64 beside one of 80 that has to wait: 256 - 192 tokens lie idle meanwhile."""
    server = KVServer(memory=256, longest=100, cap=32, slots=8, budget=1000)
    rows = [TraceRow(60, 4), TraceRow(60, 4), TraceRow(60, 4), TraceRow(76, 4), TraceRow(10, 4)]
    account = contiguous(server, rows, "oracle")
    assert account.blocked[:3] == [64, 64, 64], "and nobody overtakes it"
    assert account.running[:2] == [3, 3]
    assert account.external > 0


@pytest.mark.parametrize("scheme", ["paged", *SCHEMES])
def test_every_answer_ends_where_the_trace_does(scheme: str) -> None:
    dice = random.Random(1)
    rows = [TraceRow(dice.randint(1, 30), dice.randint(1, 30)) for _ in range(60)]
    account = paged(SERVER, rows) if scheme == "paged" else contiguous(SERVER, rows, scheme)
    assert all(used <= reserved <= SERVER.memory for used, reserved in _pairs(account))
    assert (account.used[-1], account.running[-1]) == (0, 0)
    assert account.steps >= max(row.output_tokens for row in rows)
    assert max(account.running) <= SERVER.slots


def test_the_schemes_waste_in_their_order() -> None:
    dice = random.Random(2)
    rows = [TraceRow(dice.randint(1, 30), dice.randint(1, 30)) for _ in range(120)]
    server = replace(SERVER, longest=128)
    usage = [contiguous(server, rows, scheme).usage for scheme in ("max", "cap", "pow2", "oracle")]
    in_blocks = paged(server, rows)
    assert sorted(usage) == usage, usage
    assert in_blocks.usage > usage[-1]
    assert in_blocks.internal < contiguous(server, rows, "oracle").internal


def _pairs(account: KVUse) -> list[tuple[int, int]]:
    return list(zip(account.used, account.reserved, strict=True))
