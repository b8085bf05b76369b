"""KV that outlives its engine: what the next one takes back, what it does not, and that no token changes.

An engine that is dropped between two steps leaves the file as a killed one does; one is killed for real.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hostile import kv_cases
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.executor.kv_memory import KVSizes
from pageturner.ipc.channel import Events, FromEngine, MessageDecoder, Ready, Submit, encode
from pageturner.kernels.cpu import native_module
from pageturner.kv.kv_file import KVBytes
from pageturner.kv.kv_survival import HEAD, RECORD, RECORDS_AT, Directory, SurvivingKV, adopt
from pageturner.lab.simulation import log_replay, recorded_runs
from pageturner.params import SamplingParams
from pageturner.request import Request, Resume
from pageturner.scheduler.blocks import CHUNK, BlockPool
from pageturner.scheduler.store import Store
from pageturner.scheduler.types import Sequence
from pageturner.server.engine_client.process import EngineProcess, KVMemory, engine_command
from pageturner.telemetry.kv_usage import pool_stats, store_stats
from support.engines import GOLDENS, run
from support.refusals import engine_fault
from support.schedulers import check

pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
TINY = GOLDENS / "tiny_llama.gguf"
SIZE = 4
PARAMS = SamplingParams(temperature=1.0, max_tokens=40, stop_ids=())
PROMPTS = [tuple(range(5 + n, 42 + n)) for n in range(3)]
KINDS: list[tuple[Path, dict[str, Any]]] = [
    (TINY, {}),
    (TINY, {"kv_cache_dtype": "int8"}),
    (TINY, {"kv_cache_dtype": "float32", "block_size": 1}),
    (GOLDENS / "families" / "mistral", {}),  # windows in all layers: whole blocks have no bytes
    (GOLDENS / "families" / "gemma3", {"kv_cache_dtype": "int8"}),  # in one of two
    (GOLDENS / "families" / "gemma4_e2b", {}),  # in three of four, whose heads have another size
    (GOLDENS / "families" / "deepseek_v2", {"kv_cache_dtype": "int8"}),  # a latent KV
    (GOLDENS / "families" / "qwen3_5", {}),  # states at every 32nd token
    (GOLDENS / "families" / "qwen3_next", {"block_size": 1}),
]


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def engine(fd: int | None, model: Path = TINY, **settings: Any) -> LoadedEngine:
    config = {"block_size": SIZE, "threads": 1, "max_num_seqs": 4, "backend": "native"} | settings
    return make_engine(EngineConfig(model=str(model), **config), kv_fd=fd)


def requests(done: dict[int, list[int]] | None = None) -> list[Request]:
    """Of all prompts, with the tokens that they have."""
    resumes = [(Resume(0, tuple(done[id])),) if done else () for id in range(len(PROMPTS))]
    each = enumerate(zip(PROMPTS, resumes, strict=True))
    return [Request(id, prompt, PARAMS, resume=resume) for id, (prompt, resume) in each]


def die(fd: int, **settings: Any) -> dict[int, list[int]]:
    """Tokens of an engine that ends in the middle of its answers."""
    return run(engine(fd, **settings).engine, requests(), steps=20)


def go_on(fd: int, done: dict[int, list[int]], **settings: Any) -> tuple[LoadedEngine, int]:
    """The engine that went on to the end, rightly, and the tokens that it computed again."""
    whole = run(engine(None, **settings).engine, requests())
    built = engine(fd, **settings)
    rest = run(built.engine, requests(done))
    assert {id: done[id] + rest[id] for id in done} == whole
    check(built.engine.stack)
    return built, int(built.engine.stats()["recomputed_tokens"])


@pytest.mark.parametrize(("model", "settings"), KINDS)
def test_the_next_engine_takes_back_all_but_the_last_blocks(
    fd: int, model: Path, settings: dict[str, Any]
) -> None:
    done = die(fd, model=model, **settings)
    built, recomputed = go_on(fd, done, model=model, **settings)
    blocks = sum(
        (len(prompt) + len(done[id]) - 1) // built.block_size for id, prompt in enumerate(PROMPTS)
    )
    assert built.taken_back >= blocks
    least = built.block_size
    if built.sizes.states:
        least = CHUNK
    assert recomputed <= len(PROMPTS) * (least - 1)
    assert built.engine.stats()["kv_blocks_taken_back"] == built.taken_back


def test_one_engine_after_the_other(fd: int) -> None:
    """Each takes back what the one before took back or computed."""
    done: dict[int, list[int]] = {id: [] for id in range(len(PROMPTS))}
    for _ in range(6):
        rest = run(engine(fd).engine, requests(done) if done[0] else requests(), steps=5)
        done = {id: done[id] + rest[id] for id in done}
    assert go_on(fd, done)[1] <= len(PROMPTS) * (SIZE - 1)


def test_a_flipped_bit_is_found_and_its_block_computed_again(fd: int) -> None:
    first = engine(fd)
    done = run(first.engine, requests(), steps=20)
    block = first.engine.scheduler.running[0].blocks[3]
    first.executor.storage[0].memory[block, 100] ^= 1  # type: ignore[attr-defined]
    taken_back = int(np.count_nonzero(SurvivingRecords(fd).sums)) - 1
    built, recomputed = go_on(fd, done)
    assert built.taken_back == taken_back
    length = len(PROMPTS[0]) + len(done[0])
    # of the first sequence all behind the block is found by its keys no more
    behind = length - 1 - 3 * SIZE
    assert behind <= recomputed <= behind + 2 * (SIZE - 1)


class SurvivingRecords:
    """A look into the file from outside."""

    def __init__(self, fd: int) -> None:
        _, _, blocks, _, sliding, *_ = HEAD.unpack(os.pread(fd, HEAD.size, 0))
        data = os.pread(fd, (blocks + sliding) * RECORD.itemsize, RECORDS_AT)
        self.sums = np.frombuffer(data, RECORD)["sum"]


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_cache_dtype": "int8"},
        {"block_size": 8},
        {"dtype": "float32"},
        {"model": GOLDENS / "tiny_llama_untied.gguf"},
    ],
)
def test_nothing_is_taken_from_another_model_or_layout(fd: int, settings: dict[str, Any]) -> None:
    done = die(fd)
    built = engine(fd, **settings)
    assert built.taken_back == 0
    assert run(built.engine, requests()) == run(engine(None, **settings).engine, requests())
    assert done != {}


@pytest.mark.parametrize("settings", [{"kv_survival": False}, {"enable_prefix_caching": False}])
def test_it_can_be_switched_off(fd: int, settings: dict[str, Any]) -> None:
    done = die(fd, **settings)
    assert os.fstat(fd).st_size == 0
    built, recomputed = go_on(fd, done, **settings)
    assert (built.taken_back, recomputed > 100) == (0, True)


def test_a_file_that_is_no_such_file_is_laid_out_anew(fd: int) -> None:
    os.write(fd, b"something else" * 1000)
    assert engine(fd).taken_back == 0


def test_evicted_blocks_are_not_taken_back(fd: int) -> None:
    """A file in which every block was written more than once: each record is of what its block holds now."""
    plenty = engine(None)
    small = {
        "kv_cache_memory": 40 * (plenty.kv_bytes // (plenty.num_blocks + 1)),
        "max_model_len": 128,
    }
    first = engine(fd, **small)
    for n in range(4):
        run(first.engine, [Request(9, tuple(range(n, 60 + n)), PARAMS)])
    assert first.engine.stats()["evictions"] > 0
    keys = {block: key for key, block in first.engine.stack.pool.full.index.items()}
    second = engine(fd, **small)
    found = second.engine.stack.pool.full
    assert {block: key for key, block in found.index.items()} == keys
    assert second.taken_back == len(keys)


def test_a_run_that_took_blocks_back_is_not_replayed(fd: int, tmp_path: Path) -> None:
    """The log of such a run does not say what its plans depend on, and a replay says so."""
    path = tmp_path / "steps"
    for _ in range(2):
        built = engine(fd, step_log=str(path))
        run(built.engine, requests())
        built.engine.close()
    first, second = recorded_runs.read_runs(path)
    assert log_replay.replay_plans(first).differences == []
    with engine_fault(f"{second.header.taken_back} blocks of KV"):
        log_replay.replay_plans(second)


# -- processes -----------------------------------------------------------------------------------------------
class Killable:
    """An engine process as the supervisor starts it, and its end of the channel."""

    def __init__(self, kv: KVMemory | None = None, model: Path = TINY) -> None:
        config = EngineConfig(model=str(model), block_size=SIZE, threads=1)
        self.recomputed: dict[int, int] = {}
        self.process = EngineProcess(engine_command(config), kv)
        self.process.sock.setblocking(True)
        self.messages = self._messages(MessageDecoder(FromEngine))
        self.ready = next(message for message in self.messages if isinstance(message, Ready))

    def _messages(self, decoder: MessageDecoder) -> Iterator[object]:
        while data := self.process.sock.recv(1 << 16):
            yield from decoder.feed(data)

    def collect(self, given: list[Request], enough: int) -> dict[int, list[int]]:
        """Submit, and read until there are so many tokens. Then it is killed, wherever it may be."""
        got: dict[int, list[int]] = {request.id: [] for request in given}
        self.process.sock.sendall(b"".join(encode(Submit(request)) for request in given))
        for message in self.messages:
            for event in message.events if isinstance(message, Events) else ():
                got[event.id] += event.tokens
                self.recomputed[event.id] = event.recomputed
            if sum(map(len, got.values())) >= enough:
                break
        self.process.kill()
        assert self.process.wait(30) == -signal.SIGKILL
        self.process.sock.close()
        return got


@pytest.mark.slow
@pytest.mark.parametrize("model", [TINY, GOLDENS / "families" / "qwen3_5"])
def test_kill_9_in_the_middle_of_decoding(model: Path) -> None:
    whole = run(engine(None, model).engine, requests())
    first = Killable(model=model)
    done = first.collect(requests(), 50)
    second = Killable(first.process.kv, model)
    rest = second.collect(requests(done), 120 - sum(map(len, done.values())))
    assert {id: done[id] + rest[id] for id in done} == whole
    assert max(second.recomputed.values()) < CHUNK
    least = sum((len(prompt) + len(done[id]) - 1) // SIZE for id, prompt in enumerate(PROMPTS))
    assert (first.ready.kv_blocks_taken_back, second.ready.kv_blocks_taken_back >= least) == (
        0,
        True,
    )
    first.process.kv.discard()
    assert Killable(first.process.kv, model).collect(requests(), 1) != {}


# -- the directory alone -------------------------------------------------------------------------------------
def directory(store: Store, records: NDArray[np.void]) -> Directory:
    return Directory(store, KVBytes(None, 1), records)


def sealed(pool: BlockPool, tokens: range) -> Sequence:
    """A sequence that has computed its tokens."""
    seq = Sequence(Request(1, tuple(tokens)), tokens=list(tokens))
    assert pool.extend(seq, len(tokens))
    seq.computed = len(tokens)
    pool.cache_full_blocks(seq)
    return seq


def test_a_record_is_written_behind_the_step_and_struck_out_before_its_block_is_given_out() -> None:
    pool, records = BlockPool(4, 2), np.zeros(4, RECORD)
    written = directory(pool.full, records)
    assert written.take_back() == 0
    seq = sealed(pool, range(6))
    assert not records["sum"].any(), "the step is not committed"
    written.note()
    assert records["sum"].tolist() == [1, 1, 1, 0]
    assert [key.tobytes() for key in records["key"][:3]] == seq.block_keys
    pool.release(seq)
    assert records["sum"].tolist() == [1, 1, 1, 0], "they are found still"
    other = Sequence(Request(2, (9,) * 4), tokens=[9] * 4)
    assert pool.extend(other, 4)
    assert records["sum"].tolist() == [1, 1, 0, 0], "the last block of the chain went first"


def test_a_block_that_was_sealed_and_lost_in_one_step_is_not_written_down() -> None:
    pool, records = BlockPool(1, 2), np.zeros(1, RECORD)
    written = directory(pool.full, records)
    written.take_back()
    pool.release(sealed(pool, range(2)))
    sealed(pool, range(7, 8))
    written.note()
    assert records["sum"].tolist() == [0]


def test_what_was_sealed_last_is_overwritten_first() -> None:
    before, records = BlockPool(5, 1), np.zeros(5, RECORD)
    written = directory(before.full, records)
    written.take_back()
    for tokens in (range(2), range(10, 12)):
        sealed(before, tokens)
        written.note()
    after = BlockPool(5, 1)
    assert directory(after.full, records).take_back() == 4
    assert pool_stats(after)["blocks_cached"] == 4
    taken: list[int] = []
    after.full.write(taken, 0, 5)
    assert taken == [4, 3, 2, 1, 0]
    assert not records["sum"].any(), "each was struck out"


def test_of_two_records_with_one_key_only_one_is_taken_back() -> None:
    records = np.zeros(3, RECORD)
    records["sum"], records["stamp"] = 1, (1, 2, 3)
    records["key"] = np.frombuffer(b"a" * 16 + b"b" * 16 + b"a" * 16, RECORD["key"])
    pool = BlockPool(3, 1)
    assert directory(pool.full, records).take_back() == 2
    assert records["sum"].sum() == pool_stats(pool)["blocks_cached"] == 2
    assert {block for block in range(3) if records["sum"][block]} == set(pool.full.index.values())


def test_blocks_are_adopted_as_if_they_had_been_released() -> None:
    store = Store(5)
    adopt(store, {3: b"three", 1: b"one"})
    assert store_stats(store) | {
        "blocks_used": 0,
        "blocks_cached": 2,
        "evictions": 0,
    } == store_stats(store)
    table: list[int] = []
    store.write(table, 0, 5)
    assert table == [0, 2, 4, 3, 1]


def test_another_identity_or_size_gives_everything_up(fd: int) -> None:
    one, other = SurvivingKV(fd, b"a" * 32), b"b" * 32
    assert one.sizes is None
    one.begin(KVSizes(5, 8, 3))
    assert SurvivingKV(fd, b"a" * 32).sizes == KVSizes(5, 8, 3)
    assert SurvivingKV(fd, other).sizes is None
    again = SurvivingKV(fd, b"a" * 32)
    again.begin(KVSizes(7))
    assert SurvivingKV(fd, b"a" * 32).sizes == KVSizes(7)


@pytest.mark.parametrize("at", [8, 40, 47, 48, 63])
def test_a_damaged_head_is_no_head(fd: int, at: int) -> None:
    """Its sizes would else be those of the next engine, whatever they are."""
    die(fd)
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 0x40]), at)
    built = engine(fd)
    assert built.taken_back == 0
    assert run(built.engine, requests()) == run(engine(None).engine, requests())


def test_stamps_without_room_above_them_begin_anew(fd: int) -> None:
    done = die(fd)
    for block in range(0, 40, 3):
        os.pwrite(fd, b"\xff" * 8, RECORDS_AT + block * RECORD.itemsize + 24)
    assert go_on(fd, done)[1] <= len(PROMPTS) * (SIZE - 1)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_file_holds_the_tokens_are_the_same(seed: int) -> None:
    for number in range(3):
        kv_cases.kv(random.Random(f"test {seed} {number}"))
