"""NUMA nodes of this machine: which cores each has, and where memory comes from. Linux, from sysfs.

Owns how nodes are read and preferred. Must not know ranks or what is computed.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable
from pathlib import Path

NODES = Path("/sys/devices/system/node")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system call
_PREFERRED = 1
_BITS = 1024  # of the mask of nodes


def cores_of_nodes(nodes: Path = NODES) -> dict[int, list[int]]:
    """The cores of each node, by its number; {} where the system does not say."""
    found = {}
    for path in nodes.glob("node[0-9]*/cpulist"):
        try:
            cores = parsed(path.read_text())
        except (OSError, ValueError):
            continue
        if cores:  # else it is memory alone
            found[int(path.parent.name.removeprefix("node"))] = cores
    return dict(sorted(found.items()))


def parsed(cores: str) -> list[int]:
    """The numbers of a list such as "0-3,8-11". ValueError."""
    ends = [part.split("-") for part in cores.strip().split(",") if part]
    return [core for end in ends for core in range(int(end[0]), int(end[-1]) + 1)]


def by_node(cores: Iterable[int], nodes: Path = NODES) -> list[int]:
    """The cores, those of a node next to each other, in the order of nodes and of their numbers; at
    last those that no node has."""
    node = {core: number for number, of_node in cores_of_nodes(nodes).items() for core in of_node}
    return sorted(cores, key=lambda core: (core not in node, node.get(core, 0), core))


def node_of(cores: Iterable[int], nodes: Path = NODES) -> int | None:
    """The node that has all of the cores; None where there is none, or the machine has one node
    alone."""
    wanted, known = set(cores), cores_of_nodes(nodes)
    if len(known) < 2:
        return None
    return next((number for number, of_node in known.items() if wanted <= set(of_node)), None)


def prefer(node: int | None) -> bool:
    """Memory that this thread, and those that it starts later, touch first comes from the node as
    long as it has some. False where nothing was changed: no node, another system, or it is not
    allowed."""
    call = _SET_MEMPOLICY.get(platform.machine())
    if node is None or call is None or not 0 <= node < _BITS:
        return False
    words = (ctypes.c_ulong * (_BITS // 64))()
    words[node // 64] = 1 << node % 64
    return bool(ctypes.CDLL(None).syscall(call, _PREFERRED, words, ctypes.c_ulong(_BITS + 1)) == 0)
