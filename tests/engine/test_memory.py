"""Free memory: the machine's, and that of control groups of both versions, in containers and outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from pageturner import memory

MIB = 1 << 20
NO_LIMIT = "9223372036854771712"  # how version 1 writes it


class System:
    """A /proc and a /sys to be filled."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"
        self.write(
            self.proc / "meminfo", f"MemTotal: 9999999 kB\nMemAvailable:    {100 * 1024} kB\n"
        )

    def write(self, path: Path, text: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def groups(self, *lines: str) -> None:
        self.write(self.proc / "self/cgroup", "\n".join(lines))

    def v2(self, path: str, limit: object, used: int, inactive: int = 0) -> None:
        folder = self.sys / "fs/cgroup" / path
        self.write(folder / "memory.max", limit)
        self.write(folder / "memory.current", used)
        self.write(folder / "memory.stat", f"anon 5\ninactive_file {inactive}")

    def v1(self, path: str, limit: object, used: int, inactive: int = 0) -> None:
        folder = self.sys / "fs/cgroup/memory" / path
        self.write(folder / "memory.limit_in_bytes", limit)
        self.write(folder / "memory.usage_in_bytes", used)
        self.write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {inactive}")

    @property
    def available(self) -> int | None:
        return memory.available(self.proc, self.sys)

    @property
    def limit(self) -> int | None:
        return memory.limit(self.proc, self.sys)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


def test_without_groups_the_machine_counts(system: System) -> None:
    assert (system.available, system.limit) == (100 * MIB, None)


def test_a_machine_that_does_not_say(tmp_path: Path) -> None:
    assert memory.available(tmp_path, tmp_path) is None


def test_version_2_the_tightest_group_on_the_way_up(system: System) -> None:
    system.groups("0::/user/service")
    system.v2("user/service", "max", 7 * MIB)
    assert (system.available, system.limit) == (100 * MIB, None)
    system.v2("user", 50 * MIB, 20 * MIB, 5 * MIB)
    assert (system.available, system.limit) == (35 * MIB, 50 * MIB)
    system.v2("user/service", 30 * MIB, 29 * MIB)
    assert (system.available, system.limit) == (1 * MIB, 30 * MIB)
    system.v2("", 10 * MIB, 11 * MIB)
    assert (system.available, system.limit) == (0, 10 * MIB)


def test_version_1(system: System) -> None:
    system.groups("5:cpu,cpuacct:/a", "4:memory:/a/b", "0::/")
    system.v1("", NO_LIMIT, 90 * MIB)
    system.v1("a/b", NO_LIMIT, 90 * MIB)
    assert (system.available, system.limit) == (100 * MIB, None)
    system.v1("a", 40 * MIB, 30 * MIB, 10 * MIB)
    assert (system.available, system.limit) == (20 * MIB, 40 * MIB)


@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container_the_path_is_the_hosts(system: System, version: int) -> None:
    path = "/docker/0123456789"
    system.groups(f"4:memory:{path}" if version == 1 else f"0::{path}")
    (system.v1 if version == 1 else system.v2)("", 64 * MIB, 60 * MIB)
    assert (system.available, system.limit) == (4 * MIB, 64 * MIB)


def test_a_limit_above_the_machine_does_not_add_memory(system: System) -> None:
    system.groups("0::/")
    system.v2("", 1000 * MIB, 0)
    assert system.available == 100 * MIB


def test_this_machine_says_something_sane() -> None:
    free = memory.available()
    assert free is not None
    assert 1 << 20 < free < 1 << 50
