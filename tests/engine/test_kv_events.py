"""KV events: a subscriber written from the format's definition knows at every moment what the cache holds."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.kv import kv_events
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.engines import run
from support.refusals import engine_fault

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed (the extra kv-events)")
SIZE = 4
PARAMS = SamplingParams(temperature=1.0, max_tokens=9, stop_ids=())


class Indexer:
    """What a router keeps: blocks by hash, with the tokens and the block before each."""

    def __init__(self, address: str, replay: str = "", topic: bytes = b"") -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.socket.connect(address)
        self.replay = None
        if replay:
            self.replay = zmq.Context.instance().socket(zmq.DEALER)
            self.replay.connect(replay)
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.numbers: list[int] = []

    def take(self, number: bytes, data: bytes) -> None:
        self.numbers.append(int.from_bytes(number, "big"))
        ts, events, rank = msgspec.msgpack.decode(data)
        assert abs(ts - time.time()) < 1000
        assert rank == 0
        for event in events:
            match event:
                case ["BlockStored", hashes, parent, tokens, size, None, "GPU", _]:
                    assert len(tokens) == size * len(hashes)
                    for i, hash in enumerate(hashes):
                        self.blocks[hash] = (parent, tokens[i * size : (i + 1) * size])
                        parent = hash
                case ["BlockRemoved", hashes, "GPU"]:
                    for hash in hashes:
                        del self.blocks[hash]  # told of before
                case ["AllBlocksCleared"]:
                    self.blocks.clear()
                case _:
                    raise AssertionError(event)

    def follow(self, built: LoadedEngine) -> None:
        """Until it knows what the engine holds; what it missed it asks for."""
        while set(self.blocks) != held(built):
            assert self.socket.poll(30_000)
            _, number, data = self.socket.recv_multipart()
            first = self.numbers[-1] + 1 if self.numbers else 0
            if int.from_bytes(number, "big") > first:
                self.ask(first)
            elif int.from_bytes(number, "big") == first:
                self.take(number, data)

    def ask(self, first: int) -> None:
        """For all batches from a number on that are remembered."""
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            assert self.replay.poll(30_000)
            _, number, data = self.replay.recv_multipart()
            if number == (-1).to_bytes(8, "big", signed=True):
                assert data == b""
                return
            self.take(number, data)

    def chain(self, hash: int | None) -> list[int]:
        """The tokens up to the end of a block."""
        if hash is None:
            return []
        parent, tokens = self.blocks[hash]
        return self.chain(parent) + tokens

    def close(self) -> None:
        for socket in (self.socket, self.replay):
            if socket is not None:
                socket.close(0)


@pytest.fixture
def addresses(tmp_path: Any) -> tuple[str, str]:
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def indexers() -> Iterator[list[Indexer]]:
    made: list[Indexer] = []
    yield made
    for one in made:
        one.close()


def engine(address: str, replay: str = "", blocks: int = 24, **settings: Any) -> LoadedEngine:
    return make_engine(
        EngineConfig(
            backend="fake",
            block_size=SIZE,
            kv_cache_memory=blocks * SIZE,
            max_model_len=64,
            kv_events=address,
            kv_events_replay=replay,
            **settings,
        )
    )


def held(built: LoadedEngine) -> set[int]:
    return {kv_events.block_hash(key) for key in built.engine.stack.pool.full.index}


def prompts(count: int, seed: int = 0) -> list[Request]:
    """Some begin alike; together they are more than the cache holds."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(300) for _ in range(12)] for _ in range(3)]
    made = []
    for n in range(count):
        tail = [rng.randrange(300) for _ in range(rng.randrange(1, 20))]
        made.append(Request(1000 * seed + n, (*rng.choice(beginnings), *tail), PARAMS))
    return made


def test_a_subscriber_knows_what_the_cache_holds(
    addresses: tuple[str, str], indexers: list[Indexer]
) -> None:
    built = engine(*addresses, kv_events_topic="kv")
    indexer = Indexer(*addresses, topic=b"kv")
    indexers.append(indexer)
    for seed in range(5):
        for request in prompts(20, seed):
            run(built.engine, [request])
        while not indexer.socket.poll(50):  # it may not be subscribed yet
            run(built.engine, prompts(1, 100 + seed))
        indexer.follow(built)
        assert indexer.numbers == list(range(len(indexer.numbers)))
    assert built.engine.stats()["evictions"] > 50
    pool = built.engine.stack.pool
    request = Request(9, tuple(range(30)), PARAMS)
    run(built.engine, [request])
    indexer.follow(built)
    found = {tuple(indexer.chain(hash)) for hash in indexer.blocks}
    assert {request.prompt[: SIZE * n] for n in range(1, 8)} <= found
    assert all(len(chain) % SIZE == 0 for chain in found)
    built.engine.forget_prefixes()
    assert not pool.full.index
    run(built.engine, [Request(10, (1, 2, 3), PARAMS)])
    indexer.follow(built)


def test_who_comes_late_hears_everything(
    addresses: tuple[str, str], indexers: list[Indexer]
) -> None:
    built = engine(*addresses, blocks=2000)
    run(built.engine, prompts(20))
    indexer = Indexer(*addresses)
    indexers.append(indexer)
    while set(indexer.blocks) != held(built):  # batches may still wait to be sent
        indexer.blocks, indexer.numbers = {}, []
        indexer.ask(0)
    assert indexer.numbers == list(range(len(indexer.numbers)))
    indexer.replay.send_multipart((b"", b"not a number"))  # answered by nothing, and does no harm
    indexer.ask(10_000)


def test_a_full_queue_drops_batches_and_never_waits(
    addresses: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "WAITING", 0)
    built = engine(*addresses)
    run(built.engine, prompts(20))
    stats = built.engine.stats()
    assert stats["kv_event_batches"] == 0
    assert stats["kv_event_batches_dropped"] > 20


@pytest.mark.parametrize(
    "address", ["5557", "udp://*:1", "tcp://*:nowhere", "tcp://", "tcp://*:99999999"]
)
def test_addresses_that_cannot_be(address: str) -> None:
    with engine_fault(code="kv_events_address"):
        engine(address)


def test_an_address_in_use_is_said_to_be(addresses: tuple[str, str]) -> None:
    socket = zmq.Context.instance().socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with engine_fault("Address already in use"):
        engine(f"tcp://127.0.0.1:{port}")
    socket.close(0)


def test_without_zeromq_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with engine_fault("kv-events"):
        engine("tcp://127.0.0.1:0")
