"""Cores and memory of NUMA nodes, on machines that are made up and on this one."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from pathlib import Path

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.parallel import numa, tensor_parallel


def machine(folder: Path, *lists: str) -> Path:
    """A folder as /sys/devices/system/node, of nodes with these cores."""
    for number, cores in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cores + "\n")
    (folder / "online").write_text(f"0-{len(lists) - 1}\n")
    return folder


def test_lists_of_cores_are_read() -> None:
    assert numa.parsed("0-3,8-9,11\n") == [0, 1, 2, 3, 8, 9, 11]
    assert numa.parsed("\n") == []


def test_cores_of_a_node_stand_together_however_they_are_numbered(tmp_path: Path) -> None:
    nodes = machine(tmp_path, "0-1,4-5", "2-3,6-7", "")  # the last has memory alone
    assert numa.cores_of_nodes(nodes) == {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}
    assert numa.by_node(range(8), nodes) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert numa.by_node({7, 1, 2, 9}, nodes) == [
        1,
        2,
        7,
        9,
    ]  # some of them, and one that no node has


def test_cores_have_a_node_where_it_is_one_of_several(tmp_path: Path) -> None:
    nodes = machine(tmp_path, "0-1", "2-3")
    assert numa.node_of([2, 3], nodes) == 1
    assert numa.node_of([0], nodes) == 0
    assert numa.node_of([1, 2], nodes) is None
    (tmp_path / "one").mkdir()
    assert numa.node_of([0], machine(tmp_path / "one", "0-3")) is None
    assert numa.node_of([0], tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (2, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (4, [[0, 2], [4, 6], [1, 3], [5, 7]]),
    ],
)
def test_ranks_have_the_cores_of_their_node(
    size: int, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = machine(tmp_path, "0,2,4,6", "1,3,5,7")  # in turns, as some machines number them
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(numa, "by_node", lambda cores, by_node=numa.by_node: by_node(cores, nodes))
    config = EngineConfig(tensor_parallel_size=size, pin_threads=True)
    places = tensor_parallel.places_of(config)
    assert places == expected
    assert [numa.node_of(cores, nodes) for cores in places] == sorted([0, 1] * (size // 2))
    assert tensor_parallel.places_of(EngineConfig(tensor_parallel_size=size)) == [[]] * size


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="another system call")
def test_a_thread_and_those_it_starts_prefer_the_memory_of_a_node() -> None:
    """Node 0 is everywhere. In a thread of its own: the policy is that of a thread."""
    get = {"x86_64": 239, "aarch64": 236}[platform.machine()]

    def policy() -> tuple[int, int]:
        mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
        ctypes.CDLL(None).syscall(get, ctypes.byref(mode), mask, ctypes.c_ulong(1025), None, 0)
        return mode.value, mask[0]

    found: list[tuple[int, int]] = []

    def prefers() -> None:
        if not numa.prefer(0):
            return
        found.append(policy())
        inner = threading.Thread(target=lambda: found.append(policy()))
        inner.start()
        inner.join()

    before = policy()
    thread = threading.Thread(target=prefers)
    thread.start()
    thread.join()
    if not found:
        pytest.skip("the system does not let a process choose its memory")
    assert found == [(1, 1), (1, 1)]
    assert policy() == before
    assert not numa.prefer(None)
    assert not numa.prefer(4096)
