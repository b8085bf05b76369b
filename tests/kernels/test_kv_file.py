"""KV storage in a memory file: what is written stays for whoever maps it next. Checksums against published
values of XXH64."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from pageturner.kernels.base import KVSpec
from pageturner.kernels.cpu import native_module
from pageturner.kv.kv_file import KVBytes, alloc, room

pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
SPEC = KVSpec(layers=3, blocks=20, block_size=16, kv_heads=2, head_dim=24, dtype="int8")
PRIME = 2654435761  # seed of the published values, and of the bytes that they are of
PUBLISHED = {
    0: ("EF46DB3751D8E999", "AC75FDA2929B17EF"),
    1: ("4FCE394CC88952D8", "739840CB819FA723"),
    14: ("CFFA8DB881BC3A3D", "5B9611585EFCC9CB"),
    101: ("0EAB543384F878AD", "CAA65939306F1E21"),
}


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * room(SPEC))
    yield fd
    os.close(fd)


@pytest.mark.parametrize("length", PUBLISHED)
def test_the_checksum_is_xxh64(length: int) -> None:
    data, byte = bytearray(), PRIME
    for _ in range(length):
        data.append(byte >> 24)
        byte = byte * byte % 2**32
    made = tuple(f"{native_module.module().xxh64(bytes(data), seed):016X}" for seed in (0, PRIME))
    assert made == PUBLISHED[length]


def test_what_is_written_stays_in_its_part_of_the_file(fd: int) -> None:
    first, second = (alloc(SPEC, fd, offset) for offset in (0, room(SPEC)))
    first.memory[:], second.memory[:] = 7, 9
    KVBytes(first, 1).take_huge_pages(SPEC.blocks)
    del first
    again = alloc(SPEC, fd, 0)
    assert (again.memory == 7).all()
    assert (second.memory == 9).all()


@pytest.mark.parametrize("offset", [4096, 2 * room(SPEC)])
def test_a_part_that_is_not_there_is_refused(fd: int, offset: int) -> None:
    with pytest.raises(ValueError, match="no such part"):
        alloc(SPEC, fd, offset)


@pytest.mark.parametrize("threads", [1, 3])
def test_each_bit_of_a_block_and_its_seed_count(fd: int, threads: int) -> None:
    kv = alloc(SPEC, fd, 0)
    kv.memory[:] = np.random.default_rng(1).integers(0, 256, kv.memory.shape, np.uint8)
    blocks, seeds = np.arange(20, dtype=np.int32), np.zeros(20, np.uint64)
    stored = KVBytes(kv, threads)
    before = stored.checksums(blocks, seeds)
    assert len(set(before.tolist())) == 20
    kv.memory[7, -1] ^= 1
    seeds[9] = 1
    after = stored.checksums(blocks, seeds)
    assert np.flatnonzero(after != before).tolist() == [7, 9]
    assert before[3] == native_module.module().xxh64(kv.memory[3].tobytes(), 0)


def test_a_block_that_does_not_exist_has_no_checksum(fd: int) -> None:
    whole = KVBytes(alloc(SPEC, fd, 0), 1)
    with pytest.raises(ValueError, match="no such block"):
        whole.checksums(np.array([20], np.int32), np.zeros(1, np.uint64))
