"""Ranks that get out of step, fail to start or die: one end for all, a reason, and streams that go on."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from test_tensor_parallel import children, streamed

from pageturner import LLM, SamplingParams
from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault
from pageturner.kernels import comm
from pageturner.kernels.comm import Communicator, shared_memory
from pageturner.kernels.cpu import native_module
from pageturner.parallel import tensor_parallel
from pageturner.parallel.tensor_parallel import RankProcesses
from support.decoding import Decoding
from support.ranks import ranks
from support.refusals import engine_fault
from support.servers import serving

GOLDENS = Path(__file__).parent.parent / "goldens"
TINY = GOLDENS / "tiny_llama.gguf"
pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)


# -- calls ---------------------------------------------------------------------------------------------------
def test_what_fails_before_others_are_told_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(TINY, 2) as (decoder, ops):
        runs = Decoding(decoder, ops)
        expected = runs.step([("a", [1, 2, 3])])[0].tobytes()

        def fails(*arrays: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(comm, "packed", fails)
            with pytest.raises(MemoryError):
                runs.step([("b", [4, 5])])
        assert Decoding(decoder, ops).step([("a", [1, 2, 3])])[0].tobytes() == expected


def test_what_fails_after_others_were_told_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks(TINY, 2) as (decoder, ops):
        runs = Decoding(decoder, ops)
        lost: list[str] = []

        def at_loss() -> str:
            lost.append("asked")
            return "rank 1 of 2: ended by SIGKILL"

        def fails(*arrays: object) -> None:
            raise AssertionError("in the midst")

        ops.at_loss = at_loss
        monkeypatch.setattr(ops.own, "hidden", fails)
        for _ in range(2):  # and for good
            with engine_fault(r"in the midst \(rank 1 of 2: ended by SIGKILL\)", code="rank_lost"):
                runs.step([("a", [1, 2, 3])])
        assert lost == ["asked"]


def two() -> list[Communicator]:
    memory = shared_memory(2)
    try:
        return [Communicator(memory, rank, 2) for rank in range(2)]
    finally:
        os.close(memory)


def both(first: Callable[[], object], second: Callable[[], object]) -> list[str]:
    """What two ranks raise, one after the other in time where it matters."""

    def said(work: Callable[[], object]) -> str:
        try:
            work()
        except RuntimeError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(said, (first, second)))


def test_a_rank_that_finds_another_call_raises_and_takes_nothing_of_it() -> None:
    """Rank 0 tells of a call, does not make it, and tells of another: what rank 1 took for a sum would be the
    message."""
    zero, one = two()
    x = np.ones((1, 8), np.float32)

    def told() -> None:
        zero.send(1)
        zero.send(2, np.arange(8, dtype=np.int32))
        zero.send(3)

    def making() -> None:
        one.receive()
        one.native.sum(x)

    says = both(told, making)
    assert (
        says[1]
        == "rank 0 of 2 is at call 2 (a message) and rank 1 at call 1 (a sum): they are out of step"
    )
    assert (
        says[0]
        == "rank 1 of 2 is at call 1 (a sum) and rank 0 at call 2 (a message): they are out of step"
    )
    assert x.tolist() == [[1.0] * 8]


@pytest.mark.parametrize("other", [(1, 9), (2, 8)])
def test_ranks_that_sum_other_sizes_are_out_of_step(other: tuple[int, int]) -> None:
    zero, one = two()
    says = both(
        lambda: zero.native.sum(np.zeros((1, 8), np.float32)),
        lambda: one.native.sum(np.zeros(other, np.float32)),
    )
    assert any("out of step" in said for said in says)


@pytest.mark.parametrize("lives", [True, False])
def test_a_rank_says_why_it_ends(lives: bool) -> None:
    """`follow` returns where rank 0 has ended, and raises for everything else."""
    zero, one = two()
    alive, held = os.pipe()
    ops = tensor_parallel.TensorParallelOps.__new__(tensor_parallel.TensorParallelOps)
    ops.comm = one
    with ThreadPoolExecutor(1) as pool:
        follows = pool.submit(ops.follow, None, [alive])  # type: ignore[arg-type]
        if lives:
            with suppress(RuntimeError):  # whoever looks first
                zero.native.sum(np.zeros((1, 1), np.float32))  # of no call
            with engine_fault(r"in call 1: rank 0 of 2 is at call 0 \(a sum\)", code="rank_lost"):
                follows.result(30)
        os.close(held)
        if not lives:
            follows.result(30)
    os.close(alive)


# -- starts --------------------------------------------------------------------------------------------------
def started(other: Path) -> None:
    """A start in which rank 1 has another file than rank 0."""
    config = EngineConfig(model=str(TINY), tensor_parallel_size=2, threads=2)
    processes = RankProcesses(config)
    start = processes.start
    processes.start = lambda path: start(other)  # type: ignore[method-assign]
    tensor_parallel.load(TINY, processes.ops, config, processes)  # type: ignore[arg-type]


def shared_files() -> int:
    """How many files this process has, mapped or open, that ranks share."""
    maps = Path("/proc/self/maps").read_text().count("pageturner-ranks")
    return maps + sum("pageturner-ranks" in os.readlink(fd) for fd in descriptors())


def descriptors() -> list[Path]:
    return [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["none", "cut", "other"])
def test_a_start_that_fails_names_the_rank_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    gc.collect()
    before, files = children(), shared_files()
    path = {
        "none": tmp_path / "none.gguf",
        "cut": tmp_path / "cut.gguf",
        "other": GOLDENS / "tiny_qwen3.gguf",
    }[case]
    (tmp_path / "cut.gguf").write_bytes(TINY.read_bytes()[:200_000])
    says = {
        "none": r"rank 1 of 2: .*none\.gguf",
        "cut": r"rank 1 of 2: .*cut\.gguf",
        "other": "rank 1 of 2: it has another model than rank 0",
    }[case]
    with engine_fault(says, code="rank_lost") as caught:
        started(path)
    assert children() == before
    del caught
    gc.collect()
    assert shared_files() == files


def test_a_start_that_fails_at_rank_0_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise EngineFault("model_memory", "there is no memory")

    before = children()
    monkeypatch.setattr(tensor_parallel, "load_slice", fails)
    with engine_fault("there is no memory"):
        LLM(str(TINY), tensor_parallel_size=3, threads=3)
    assert children() == before


def test_a_model_that_is_not_there_leaves_no_file(tmp_path: Path) -> None:
    gc.collect()
    files = shared_files()
    with engine_fault():
        LLM(str(tmp_path / "none.gguf"), tensor_parallel_size=2, threads=2)
    gc.collect()
    assert shared_files() == files


def test_a_rank_that_died_is_named_with_what_ended_it() -> None:
    before = children()
    llm = LLM(str(TINY), tensor_parallel_size=3, threads=3, kv_cache_memory=1 << 20)
    mine = sorted(children() - before)
    os.kill(mine[1], signal.SIGKILL)
    with engine_fault(r"rank 2 of 3 has ended \(rank 2 of 3: ended by SIGKILL\)"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert not children() - before  # the other one too
    del llm


# -- deaths --------------------------------------------------------------------------------------------------
def family(client: httpx.Client) -> list[int]:
    """The processes of rank 0, 1, ... of a server."""
    (server,) = children(what=b"pageturner\0serve")
    for _ in range(600):
        engines = children(server, b"engine.worker")
        others = sorted(children(*engines)) if engines else []
        if len(others) == 2:
            return [*engines, *others]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_each_rank_is_killed_in_turn_and_streams_go_on(when: str) -> None:
    flags = (
        "--tensor-parallel-size",
        "3",
        "--threads",
        "3",
        "--kv-cache-memory",
        "4M",
        "--dtype",
        "float32",
    )
    budget = ("--max-num-batched-tokens", "16") if when == "prefill" else ()
    with (
        serving(GOLDENS / "tiny_llama_untied.gguf", *flags, *budget) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        whole = list(pool.map(lambda n: streamed(client, n), range(4)))
        for restarts, rank in enumerate((0, 1, 2, 1, 0, 2), 1):

            def kill(rank: int = rank) -> None:
                os.kill(family(client)[rank], signal.SIGKILL)

            others = [pool.submit(streamed, client, n) for n in range(1, 4)]
            if (
                when == "prefill"
            ):  # in the midst of their prompts, of which a step has room for 16 tokens
                others.append(pool.submit(streamed, client, 0))
                kill()
                assert others.pop().result(240) == whole[0]
            else:
                assert streamed(client, 0, kill) == whole[0]
            assert [other.result(240) for other in others] == whole[1:]
            told = client.get("/metrics").text
            found = re.search(r"^pageturner:engine_restarts_total\{.*\} (\d+)", told, re.M)
            assert found is not None
            assert int(found[1]) == restarts
        last = family(client)
    for pid in last:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
