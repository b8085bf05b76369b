"""Tiers of KV: no bit of an answer changes, whatever is evicted, found, lost, flipped, cut off or shared."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.errors import EngineFault
from pageturner.kernels.cpu import native_module
from pageturner.kv import kv_block_file, kv_tiers
from pageturner.kv.kv_block_file import PAGE, RECORD, BlockFile, Read
from pageturner.params import SamplingParams
from pageturner.request import Request, Resume
from support.engines import GOLDENS, run
from support.schedulers import check

pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
TINY = GOLDENS / "tiny_llama.gguf"
SIZE = 4
PARAMS = SamplingParams(temperature=1.0, max_tokens=10, stop_ids=())
ID, BYTES = b"i" * 32, 5000


def config(model: Path = TINY, blocks: int = 24, **settings: Any) -> EngineConfig:
    """Of an engine with so few blocks that conversations push each other out."""
    given = {"block_size": SIZE, "threads": 1, "max_num_seqs": 3, "backend": "native"} | settings
    if "kv_cache_memory" not in given:
        other = {"kv_file": "", "kv_cache_memory": 1 << 20}
        if given.get("kv_file"):
            other["kv_host_memory"] = 1  # windows are kept in the same way
        whole = make_engine(EngineConfig(model=str(model), **given | other))
        given["kv_cache_memory"] = blocks * whole.kv_bytes // (whole.num_blocks + 1)
    return EngineConfig(model=str(model), **given)


def conversations(
    built: LoadedEngine, count: int = 6, turns: int = 3, **of: Any
) -> list[list[int]]:
    """Texts of conversations whose turns alternate; each turn begins with all turns before it."""
    texts = [[20 + n] * 3 + list(range(7 + n, 20 + n)) for n in range(count)]
    id = 0
    for turn in range(turns):
        for first in range(0, count, 2):
            given = []
            for n in (first, first + 1):
                texts[n] += [30 + turn, 31 + n]
                given.append(Request(id := id + 1, tuple(texts[n]), PARAMS, **of))
            for request, (_, tokens) in zip(
                given, sorted(run(built.engine, given).items()), strict=True
            ):
                texts[first + (request is given[1])] += tokens
    return texts


def settle(built: LoadedEngine, name: str, least: float) -> float:
    """A figure, once it is that high; threads may still be at work."""
    until = time.monotonic() + 10
    while (value := built.engine.stats()[name]) < least and time.monotonic() < until:
        time.sleep(0.002)
    return value


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a busy machine too; no warning is expected."""
    monkeypatch.setattr(kv_tiers, "PATIENCE", 60.0)
    monkeypatch.setattr(kv_tiers, "FLUSH", 60.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


KINDS: list[tuple[Path, dict[str, Any]]] = [
    (TINY, {}),
    (TINY, {"kv_cache_dtype": "int8", "backend": "reference"}),
    (TINY, {"kv_cache_dtype": "fp8_e4m3", "policy": "prefill_first"}),
    (
        GOLDENS / "families" / "gemma3",
        {"kv_cache_dtype": "int8"},
    ),  # windows: kept as if there were none
    (GOLDENS / "families" / "deepseek_v2", {}),  # a latent KV
]


@pytest.mark.parametrize(("model", "settings"), KINDS)
@pytest.mark.parametrize("tiers", ["file", pytest.param("both", marks=pytest.mark.slow), "host"])
def test_no_token_changes_and_nearly_all_is_found(
    tmp_path: Path, model: Path, settings: dict[str, Any], tiers: str
) -> None:
    want = conversations(make_engine(config(model, **settings)))
    given: dict[str, Any] = {}
    if tiers != "file":
        given["kv_host_memory"] = (1 if tiers == "host" else 0) * (1 << 22) + (1 << 16)
    if tiers != "host":
        given |= {"kv_file": str(tmp_path / "kv"), "kv_file_size": 1 << 24}
    built = make_engine(config(model, **settings, **given))
    assert conversations(built) == want
    check(built.engine.stack)
    stats = built.engine.stats()
    assert stats["kv_host_errors"] == stats["kv_file_errors"] == 0
    assert stats["kv_host_hits"] + stats["kv_file_hits"] > 20
    assert (
        stats["cached_tokens"] >= 0.8 * 6 * 16 * 2
    )  # of what the second and third turns begin with
    built.engine.close()


def test_preempted_sequences_come_back(tmp_path: Path) -> None:
    """So little memory that those who run push each other out: they find their blocks on the host."""
    prompts = [tuple(range(5 + n, 25 + n)) for n in range(3)]
    long = SamplingParams(temperature=1.0, max_tokens=24, stop_ids=())
    requests = [Request(n, prompt, long) for n, prompt in enumerate(prompts)]
    want = run(make_engine(config(blocks=64)).engine, requests)
    built = make_engine(config(blocks=20, admission="none", kv_host_memory=1 << 20))
    assert run(built.engine, requests) == want
    stats = built.engine.stats()
    assert stats["preemptions"] > 0
    assert stats["kv_host_hits"] > 0
    check(built.engine.stack)


def test_the_next_engine_finds_what_the_last_one_computed(tmp_path: Path) -> None:
    given = config(kv_file=str(tmp_path / "kv"), kv_file_size=1 << 22)
    prompt = tuple(range(5, 60))
    first = make_engine(given)
    request = Request(1, prompt, PARAMS)
    want = run(first.engine, [request])
    first.engine.close()
    second = make_engine(given)
    resumed = Request(1, prompt, PARAMS, resume=(Resume(0, tuple(want[1][:6])),))
    assert run(second.engine, [resumed])[1] == want[1][6:]
    assert second.engine.stats()["recomputed_tokens"] <= SIZE
    assert second.engine.stats()["kv_file_hits"] == (len(prompt) + 5) // SIZE
    second.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("of", [{"adapter": "other"}, {"salt": "tenant"}])
def test_nothing_crosses_salts(tmp_path: Path, of: dict[str, str]) -> None:
    given = config(kv_file=str(tmp_path / "kv"), kv_host_memory=1 << 20)
    built = make_engine(given)
    prompt = tuple(range(5, 60))
    run(built.engine, [Request(1, prompt, PARAMS)])
    built.engine.close()
    built = make_engine(given)
    if "salt" in of:
        run(built.engine, [Request(1, prompt, PARAMS, **of)])
        assert built.engine.stats()["cached_tokens"] == 0
        run(built.engine, [Request(2, prompt, PARAMS, **of)])
        assert built.engine.stats()["cached_tokens"] > 0
    else:
        [event] = built.engine.submit(Request(1, prompt, PARAMS, **of))
        assert event.failure is not None
        assert event.failure.code == "adapter_not_found"
    built.engine.close()


@pytest.mark.parametrize("where", ["file", "host"])
def test_a_flipped_bit_is_found_and_computed_again(tmp_path: Path, where: str) -> None:
    path = tmp_path / "kv"
    given = config(**({"kv_file": str(path)} if where == "file" else {"kv_host_memory": 1 << 20}))
    built = make_engine(given)
    prompt = tuple(range(5, 60))
    want = run(built.engine, [Request(1, prompt, PARAMS)])
    if where == "file":
        built.engine.close()
        flip_all(path)
        built = make_engine(given)
    else:
        built.engine.stack.pins.forget_others()  # they go down
        tiers = built.engine.connectors.tiers
        assert tiers is not None
        for _, row in tiers.host.newest():
            row[7] ^= 16
    assert run(built.engine, [Request(2, prompt, PARAMS)])[2] == want[1]
    assert settle(built, f"kv_{where}_errors", 1) >= 1
    assert built.engine.stats()["cached_tokens"] == 0
    if where == "file":  # what was computed again lies in the file again
        built.engine.close()
        built = make_engine(given)
        assert run(built.engine, [Request(3, prompt, PARAMS)])[3] == want[1]
        assert built.engine.stats()["cached_tokens"] >= len(prompt) - SIZE
        built.engine.close()


def flip_all(path: Path) -> None:
    """One bit in the bytes of each block, not in the directory."""
    with BlockFileBytes(path) as (data, slots):
        for start in slots:
            data[start + 7] ^= 16


class BlockFileBytes:
    """The bytes of a file, and where its slots begin."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> tuple[bytearray, list[int]]:
        self._data = bytearray(self._path.read_bytes())
        nbytes, slots = kv_block_file.HEAD.unpack(self._data[: kv_block_file.HEAD.size])[2:]
        start = PAGE + -(-slots * RECORD.itemsize // PAGE) * PAGE
        stride = -(-nbytes // PAGE) * PAGE
        return self._data, [
            at for at in range(start, len(self._data), stride) if at + nbytes <= len(self._data)
        ]

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._data)


# -- the file by itself --------------------------------------------------------------------------------------
def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def row(n: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(n).integers(0, 256, BYTES, np.uint8)


def room(slots: int) -> int:
    return 2 * PAGE + slots * (2 * PAGE + RECORD.itemsize)


def opened(path: Path, slots: int = 8) -> BlockFile:
    return BlockFile(str(path), room(slots), ID, BYTES)


def found(file: BlockFile, upto: int) -> set[int]:
    """What of keys 0 .. upto-1 is there; all of it is right."""
    out, there = np.zeros(BYTES, np.uint8), set()
    for n in range(upto):
        read = file.read(key(n), out, wait=True)
        assert read in (Read.HIT, Read.ABSENT)
        if read is Read.HIT:
            assert np.array_equal(out, row(n))
            there.add(n)
    return there


def test_the_least_recently_used_go_first_here_and_in_the_next_engine(tmp_path: Path) -> None:
    file = opened(tmp_path / "kv")
    for n in range(8):
        file.write(key(n), row(n))
    file.touch(key(0))
    file.write(key(8), row(8))
    assert found(file, 9) == {0, *range(2, 9)}
    file.touch(key(2))
    file.close()
    file = opened(tmp_path / "kv", slots=99)  # it keeps its size
    for n in (9, 10, 11):
        file.write(key(n), row(n))
    assert found(file, 12) >= {2, 8, 9, 10, 11}
    assert file.count == 8
    assert os.path.getsize(tmp_path / "kv") <= room(8)


def test_one_writes_and_others_read_until_it_goes(tmp_path: Path) -> None:
    first, second = opened(tmp_path / "kv"), opened(tmp_path / "kv")
    assert (first.writes, second.writes) == (True, False)
    first.write(key(1), row(1))
    second.write(key(2), row(2))
    assert found(second, 3) == set()
    second.refresh()
    assert found(second, 3) == {1}
    for n in range(3, 20):  # what the reader knows is overwritten under its eyes
        first.write(key(n), row(n))
    assert found(second, 3) == set()
    first.strike_out(key(19))
    first.close()
    second.refresh()
    assert second.writes
    assert found(second, 20) == set(range(12, 19))
    second.forget()
    assert found(opened(tmp_path / "kv"), 20) == set()


def test_a_writer_that_is_killed_leaves_a_readable_file(tmp_path: Path) -> None:
    """SIGKILL at any moment: whatever is found is right, and writing goes on."""
    code = (
        "import sys, numpy as np\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from engine.test_kv_tiers import *\n"
        "file = opened(Path(sys.argv[1])); rows = [row(n) for n in range(40)]\n"
        "print('ready', flush=True); n = 0\n"
        "while True:\n"
        "    file.write(key(n % 40), rows[n % 40]); n += 1\n"
        "    if n % 7 == 0: file.strike_out(key((n - 3) % 40))\n"
    )
    rng = random.Random(3)
    tests = str(Path(__file__).parents[1])
    for _ in range(1):
        args = [sys.executable, "-c", code, str(tmp_path / "kv"), tests]
        with subprocess.Popen(args, stdout=subprocess.PIPE, cwd=tests) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            for _ in range(4):
                time.sleep(rng.random() * 0.02)
                copy = tmp_path / "copy"
                writer.send_signal(signal.SIGSTOP)
                shutil.copy(tmp_path / "kv", copy)  # as a kill at this moment would leave it
                writer.send_signal(signal.SIGCONT)
                assert len(found(opened(copy), 40)) <= 8
            writer.send_signal(signal.SIGKILL)
        file = opened(tmp_path / "kv")
        assert file.writes
        there = found(file, 40)
        assert 1 <= len(there) <= 8
        file.write(key(41), row(41))
        assert 41 in found(file, 42)
        file.close()


def test_random_damage_is_never_taken_for_a_block(tmp_path: Path) -> None:
    rng, path = random.Random(5), tmp_path / "kv"
    file = opened(path)
    for n in range(8):
        file.write(key(n), row(n))
    whole = path.read_bytes()
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 3, 200))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        out = np.zeros(BYTES, np.uint8)
        with contextlib.suppress(EngineFault):  # its head was hit
            file = opened(path)
        for n in range(8):
            if file.read(key(n), out, wait=True) is Read.HIT:
                assert np.array_equal(out, row(n))
    file.close()


def test_a_file_that_cannot_be_used_is_left_as_it_is(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"somebody's letters")
    for path, code in (
        (foreign, "kv_file_other"),
        (tmp_path, "kv_file"),
        (tmp_path / "no" / "kv", "kv_file"),
    ):
        with pytest.raises(EngineFault) as error:
            opened(path)
        assert error.value.code == code
        assert "--kv-file" in error.value.message
    assert foreign.read_bytes() == b"somebody's letters"
    opened(tmp_path / "kv").close()
    with pytest.raises(EngineFault, match="not of this model"):
        BlockFile(str(tmp_path / "kv"), room(8), b"o" * 32, BYTES)
    with pytest.raises(EngineFault, match="ask for more"):
        BlockFile(str(tmp_path / "small"), 100, ID, BYTES)


def test_serving_goes_on_without_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.write_bytes(b"x" * 5000)
    given = config()
    with pytest.warns(RuntimeWarning, match="serving goes on without it"):
        built = make_engine(config(kv_file=str(path), kv_cache_memory=given.kv_cache_memory))
    assert conversations(built, 2, 2) == conversations(make_engine(given), 2, 2)


def test_a_full_disk_costs_blocks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    want = conversations(make_engine(config()), 4, 2)
    built = make_engine(config(kv_file=str(tmp_path / "kv")))

    def full(fd: int, data: object, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kv_block_file.os, "pwrite", full)
    assert conversations(built, 4, 2) == want
    assert settle(built, "kv_file_errors", 1) >= 1
    assert "No space left on device" in capfd.readouterr().err
    monkeypatch.undo()
    built.engine.close()
    assert opened_again_is_whole(tmp_path / "kv")


def opened_again_is_whole(path: Path) -> bool:
    with BlockFileBytes(path) as (data, _):
        return data.startswith(kv_block_file.MAGIC)


def test_a_file_that_may_only_be_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv"
    file = opened(path)
    file.write(key(1), row(1))
    file.close()
    before, real = path.read_bytes(), os.open

    def read_only(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise OSError(30, "Read-only file system")
        return real(path, flags, mode)

    monkeypatch.setattr(kv_block_file.os, "open", read_only)
    file = opened(path)
    assert not file.writes
    assert found(file, 2) == {1}
    file.write(key(2), row(2))
    file.refresh()
    file.strike_out(key(1))
    assert found(file, 3) == set()
    file.close()
    assert path.read_bytes() == before
    with pytest.raises(EngineFault, match="Read-only file system"):
        opened(tmp_path / "absent")


@pytest.mark.slow
def test_what_is_forgotten_is_found_nowhere(tmp_path: Path) -> None:
    given = config(kv_file=str(tmp_path / "kv"), kv_host_memory=1 << 20)
    built = make_engine(given)
    prompt = tuple(range(5, 60))
    run(built.engine, [Request(1, prompt, PARAMS)])
    built.engine.forget_prefixes()
    run(built.engine, [Request(2, prompt, PARAMS)])
    assert built.engine.stats()["cached_tokens"] == 0
    built.engine.forget_prefixes()
    built.engine.close()
    built = make_engine(given)
    run(built.engine, [Request(3, prompt, PARAMS)])
    assert built.engine.stats()["cached_tokens"] == 0
    built.engine.close()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"kv_file": "x", "enable_prefix_caching": False}, "bad_setting"),
        ({"kv_file": "x", "backend": "fake"}, "bad_setting"),
        ({"kv_host_memory": 1 << 50}, "kv_memory"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], code: str) -> None:
    with pytest.raises(EngineFault) as error:
        make_engine(EngineConfig(model=str(TINY), **settings))
    assert error.value.code == code
