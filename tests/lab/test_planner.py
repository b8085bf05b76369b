"""How many sequences fit, by each scheme, against counting them one by one."""

from __future__ import annotations

import random

import pytest

from pageturner.lab.planning.kv_planner import KVPlanner, seen
from pageturner.lab.planning.model_outline import Outline
from pageturner.lab.planning.model_outline_keys import KVLayers

GIB = 1024**3


def model(*kv: KVLayers) -> Outline:
    return Outline("m", "llama", 8, kv, 4096, 0, "")


LLAMA_13B = model(KVLayers(40, 40, 128, 128))  # 2 x 40 x 40 x 128 x 2 = 819,200 bytes a token
MIXED = model(KVLayers(2, 1, 16, 16), KVLayers(4, 1, 16, 16, 100))


def test_by_hand() -> None:
    """12 GiB hold 15,728 tokens of Llama 2 13B: 7 reservations of 2,048, 15 of 1,024, 25 times 39 blocks."""
    planner = KVPlanner(LLAMA_13B, "float16", 16, 2048, 12 * GIB)
    fits = planner.fits([620])  # 38.75 blocks
    assert {name: fit.sequences for name, fit in fits.items()} == {
        "contiguous": 7,
        "power_of_two": 15,
        "paged": 25,
    }
    assert fits["contiguous"].each == 2048 * 819_200
    assert fits["power_of_two"].used == pytest.approx(620 / 1024)
    assert fits["paged"].wasted == pytest.approx(4 / 624)


def test_a_reservation_is_never_longer_than_the_longest() -> None:
    fits = KVPlanner(LLAMA_13B, "float16", 16, 3000, 12 * GIB).fits([2500])
    assert fits["power_of_two"].each == fits["contiguous"].each == 3000 * 819_200


@pytest.mark.parametrize("block", [1, 16, 100])
def test_paging_wastes_less_than_a_block(block: int) -> None:
    planner = KVPlanner(LLAMA_13B, "float16", block, 4096, GIB)
    for length in range(1, 400):
        waste = planner.sequence_bytes(length) - length * 819_200
        assert 0 <= waste < block * 819_200


@pytest.mark.parametrize("block", [1, 16, 100])
def test_windows_hold_the_blocks_that_a_token_looks_at(block: int) -> None:
    """Counted position by position, and the most at any of the last places: it moves with the window."""
    for window in (1, 16, 33, 100):
        planner = KVPlanner(model(KVLayers(1, 1, 1, 1, window)), "float16", block, 4096, GIB)
        for length in (1, 15, 16, 17, 100, 101, 300):
            held = 0
            for last in range(length):
                first = max(0, last - window + 1)
                held = max(held, last // block - first // block + 1)
            most = 2 * 2 * block * held
            assert planner.sequence_bytes(length) >= most
            if length > 2 * (window + block):  # long enough that the worst place comes by
                assert planner.sequence_bytes(length) == most


def test_what_windows_save() -> None:
    planner = KVPlanner(MIXED, "float16", 16, 4096, GIB)
    # 2 layers of 250 blocks, 4 layers of ceil(99 / 16) + 1 = 8; 2 x 16 values x 2 bytes a token and layer
    assert planner.sequence_bytes(4000) == 64 * 16 * (2 * 250 + 4 * 8)
    contiguous = planner.fits([4000])["contiguous"]
    assert contiguous.each == 64 * 6 * 4096
    assert contiguous.used == pytest.approx((2 * 4000 + 4 * 100) / (6 * 4096))


def test_lengths_of_a_trace_are_put_side_by_side() -> None:
    dice = random.Random(1)
    lengths = [dice.randint(1, 2000) for _ in range(50)]
    planner = KVPlanner(LLAMA_13B, "float16", 16, 2048, 100 * GIB)
    fits = planner.fits(lengths)
    each = [planner.fits([n]) for n in lengths]
    for name, fit in fits.items():
        assert fit.each == pytest.approx(sum(one[name].each for one in each) / 50)
        assert fit.sequences == int(100 * GIB / fit.each)
    needed = sum(seen(LLAMA_13B.kv[0], n) for n in lengths) * 819_200
    assert fits["paged"].used == pytest.approx(
        needed / sum(planner.sequence_bytes(n) for n in lengths)
    )


def test_no_room() -> None:
    fits = KVPlanner(LLAMA_13B, "float16", 16, 2048, 0).fits([100])
    assert [fit.sequences for fit in fits.values()] == [0, 0, 0]
