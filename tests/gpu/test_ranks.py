"""Several devices that compute one model: sums in the order of ranks, whatever way they take."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.kernels.comm import Communicator, RankOps
from pageturner.kernels.gpu.arrays import Arena, GpuArray
from pageturner.kernels.gpu.catalogue import exchange_words

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from pageturner.engine import device_trust  # noqa: E402
from pageturner.kernels.gpu.exchange import DeviceExchange  # noqa: E402
from pageturner.kernels.gpu.ops import GpuOps  # noqa: E402
from pageturner.kernels.gpu.ranks import GpuTensorParallelOps  # noqa: E402
from pageturner.models.load import load_model  # noqa: E402
from support import decoding as by_hand  # noqa: E402
from support.engines import GOLDENS  # noqa: E402
from support.ranks import ranks as ranks_of  # noqa: E402

pytestmark = pytest.mark.timeout(300)
NEVER = 1 << 30  # looks at flags


class Rank:
    """A device with its exchange."""

    def __init__(self, rank: int, size: int, **how: Any) -> None:
        self.driver = fake_gpu.FakeDriver()
        self.arena = Arena(self.driver, 8 << 20)
        self.exchange = DeviceExchange(
            self.driver, self.arena, rank, size, **{"patience": NEVER, **how}
        )

    def put(self, values: np.ndarray) -> GpuArray:
        array = self.arena.take(values.shape)
        self.driver.upload(array.address, np.ascontiguousarray(values, np.float32))
        return array

    def got(self, array: GpuArray) -> np.ndarray:
        out = np.empty(array.shape, np.float32)
        self.driver.download(out, array.address)
        return out


def made(size: int, **how: Any) -> list[Rank]:
    """Ranks of one process, that have opened each other's memory."""
    found = [Rank(rank, size, **{"area": 1 << 14, **how}) for rank in range(size)]
    for one in found:
        one.exchange.open([other.exchange.handle for other in found])
    return found


def each(ranks: list[Rank], work: Callable[[Rank], Any]) -> list[Any]:
    """At all ranks at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, ranks))


def values(size: int, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Whose sum depends on its order."""
    random = np.random.default_rng(seed)
    found = random.standard_normal((size, rows, columns)) * 10.0 ** random.integers(
        -3, 4, (size, rows, 1)
    )
    return found.astype(np.float32)


def in_order(parts: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total if residual is None else residual + total


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (5, 1040), (70, 256)])
def test_sums_are_those_in_the_order_of_ranks(size: int, rows: int, columns: int) -> None:
    parts, residual = values(size, rows, columns), values(1, rows, columns, 1)[0]
    bits = set()
    for one_exchange in (0, 1 << 40):
        ranks = made(size, one_exchange=one_exchange)

        def work(rank: Rank) -> list[np.ndarray]:
            x, y = rank.put(parts[rank.exchange.rank]), rank.put(residual)
            return [rank.got(rank.exchange.sum(x, beside)) for beside in (None, y, y)]

        for found in each(ranks, work):
            assert (found[0] == in_order(parts)).all()
            assert (found[1] == in_order(parts, residual)).all()
            bits |= {found[1].tobytes(), found[2].tobytes()}
        launched = set(ranks[0].driver.launched)
        assert launched == {"all_reduce" if one_exchange else "all_reduce_twice"}
    assert len(bits) == 1


def test_a_rank_that_recorded_more_rows_than_there_are_meets_one_that_did_not() -> None:
    parts = values(3, 24, 1040)
    for one_exchange in (0, 1 << 40):

        def work(rank: Rank) -> np.ndarray:
            rows = (17, 24, 20)[rank.exchange.rank]
            return rank.got(rank.exchange.sum(rank.put(parts[rank.exchange.rank][:rows])))

        for found in each(made(3, one_exchange=one_exchange), work):
            assert (found[:17] == in_order(parts[:, :17])).all()


@pytest.mark.parametrize("size", [2, 3])
def test_integers_of_rank_0_come_to_all_as_they_are(size: int) -> None:
    tokens = np.array([0, 1, 151935, 7, (1 << 22) - 1], np.int32)

    def work(rank: Rank) -> np.ndarray:
        place = rank.driver.alloc(64)
        rank.driver.upload(place, np.resize(tokens if rank.exchange.rank == 0 else -tokens, 16))
        rank.exchange.share(place, len(tokens))
        got = np.empty(len(tokens), np.int32)
        rank.driver.download(got, place)
        return got

    for found in each(made(size), work):
        assert found.tolist() == tokens.tolist()


def test_columns_are_gathered_at_rank_0_in_pieces() -> None:
    starts, rows = (0, 700, 1900), 250
    whole = values(1, rows, starts[-1])[0]
    ranks = made(2, area=1 << 12)
    told = []

    @contextmanager
    def telling(x: GpuArray) -> Iterator[None]:
        told.append(x)
        yield

    def work(rank: Rank) -> np.ndarray:
        exchange = rank.exchange
        exchange.starts, exchange.tell = starts, telling
        first, end = starts[exchange.rank : exchange.rank + 2]
        mine, x = rank.put(whole[:, first:end]), rank.put(whole[:, :1])
        return rank.got(exchange.gather(mine, x))

    found = each(ranks, work)
    assert (found[0] == whole).all()
    assert len(told) == 1
    assert ranks[1].driver.launched == ["gather"] * 2  # of which the first has 216 rows


def test_a_rank_that_does_not_come_is_given_up_and_nothing_waits_any_more() -> None:
    ranks = made(2, patience=2000)
    x = [rank.put(values(1, 1, 64)[0]) for rank in ranks]
    ranks[0].exchange.sum(x[0])
    assert ranks[0].exchange.lost
    assert not ranks[1].exchange.lost
    ranks[0].exchange.sum(x[0])  # at once, and the other one hears nothing of it
    ranks[1].exchange.sum(x[1])  # the flag of the first is there
    assert not ranks[1].exchange.lost
    ranks[1].exchange.sum(x[1])
    assert ranks[1].exchange.lost


def test_the_host_stops_a_kernel_that_waits() -> None:
    ranks = made(2)
    x = ranks[0].put(values(1, 1, 64)[0])
    waits = threading.Thread(target=lambda: ranks[0].exchange.sum(x), daemon=True)
    waits.start()
    ranks[0].exchange.stop()
    waits.join(120)
    assert not waits.is_alive()


def test_counters_wrap() -> None:
    ranks = made(2)
    for rank in ranks:  # the counters behind the flags, and the flags of both
        words = np.full(exchange_words() - 64, 0x7FFFFFFE, np.int32)
        rank.driver.upload(rank.exchange.region, words)
    parts = values(2, 1, 64)

    def work(rank: Rank) -> list[np.ndarray]:
        x = rank.put(parts[rank.exchange.rank])
        return [rank.got(rank.exchange.sum(x)) for _ in range(4)]

    for found in each(ranks, work):
        assert all((one == in_order(parts)).all() for one in found)
    assert not any(rank.exchange.lost for rank in ranks)


# -- models --------------------------------------------------------------------------------------------------
def gpu(one_exchange: int | None = None, graphs: bool = True) -> Callable[[Communicator], RankOps]:
    def backend(communicator: Communicator) -> RankOps:
        own = GpuOps(fake_gpu.FakeDriver(ordinal=communicator.rank), 64 << 20, graphs)
        return GpuTensorParallelOps(
            communicator, own, area=1 << 13, patience=NEVER, one_exchange=one_exchange
        )

    return backend


def logits(
    model: str, monkeypatch: pytest.MonkeyPatch, size: int = 2, **how: Any
) -> list[np.ndarray]:
    """Of a prompt and of four tokens behind it, one at a time beside another sequence."""
    monkeypatch.setattr(by_hand, "poison_blocks", lambda kv, blocks: None)
    with ranks_of(GOLDENS / f"{model}.gguf", size, backend=gpu(**how)) as (decoder, ops):
        runs = by_hand.Decoding(decoder, ops, dtype="float32")
        found = [runs.step([("a", [5, 9, 33, 7, 1, 60, 2])])[0], runs.step([("b", [8, 8])])[0]]
        for token in (11, 40, 3, 8):
            found += runs.step([("a", [token]), ("b", [token + 1])])
        assert ops.own.driver.replayed == (3 if how.get("graphs", True) else 0)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_qwen3", "experts_mixtral"])
def test_models_on_two_devices_are_near_the_cpu_and_their_bits_hold(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = logits(model, monkeypatch, graphs=False)
    for how in ({}, {"one_exchange": 0}):
        for one, other in zip(plain, logits(model, monkeypatch, **how), strict=True):
            assert (one == other).all()
    cpu = by_hand.backend("reference")
    runs = by_hand.Decoding(load_model(GOLDENS / f"{model}.gguf", cpu, dtype="float32"), cpu)
    expected = runs.step([("a", [5, 9, 33, 7, 1, 60, 2])])[0]
    assert np.abs(plain[0] - expected).max() < 1e-4 * np.abs(expected).max()
    runs.step([("b", [8, 8])])
    expected = runs.step([("a", [11]), ("b", [12])])[0]
    assert np.abs(plain[2] - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "tiny_llama_quant.gguf",
        "experts_mixtral_quant.gguf",
        "families/gemma2",
        "families/gpt2",
        "families/granite",
        "families/gpt_oss",
        "families/granitemoehybrid",
    ],
)
def test_layers_of_many_kinds_are_divided(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms behind attention, biases, factors of residuals, windows, experts with an MLP beside them."""
    monkeypatch.setattr(by_hand, "poison_blocks", lambda kv, blocks: None)
    steps, cpu = ([5, 9, 33, 7, 1, 60, 2], [3]), by_hand.backend("reference")
    truth = by_hand.Decoding(load_model(GOLDENS / model, cpu, dtype="float32"), cpu)
    with ranks_of(GOLDENS / model, 2, backend=gpu()) as (decoder, ops):
        runs = by_hand.Decoding(decoder, ops, dtype="float32")
        for tokens in steps:
            expected, got = truth.step([("a", tokens)])[0], runs.step([("a", tokens)])[0]
            assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()
        with pytest.raises(EngineFault) as caught:
            ops.pack_adapter(None, decoder.stack)  # type: ignore[arg-type]
        assert caught.value.code == "model_unsupported"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_slice_of_rank_0_shows_that_its_device_is_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without the other ranks, and with adapters of its own part of the vocabulary."""
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    monkeypatch.setattr(fake_gpu.FakeDriver, "version", "1")  # else nothing is tested
    with ranks_of(GOLDENS / "tiny_llama.gguf", 2, backend=gpu()) as (decoder, ops):
        with ops.alone():  # type: ignore[attr-defined]
            spec = decoder.kv_spec(1, 16, "float32")
            device_trust.self_test(decoder, ops, spec, "model", 32)
        forms = device_trust.record_of(ops.own.driver).forms
    assert {one.text for one in forms.values()} == {device_trust.RIGHT}
