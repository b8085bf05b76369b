"""Prompts that another engine computes: equal tokens whatever happens to the link or to that engine."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.kernels.cpu import native_module
from pageturner.kv.kv_connectors import prefill_key
from pageturner.kv.kv_link import PREFILL, LinkEnd, LinkError, LinkIdentity
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.engines import GOLDENS
from support.engines import run as answered
from support.refusals import engine_fault
from support.schedulers import check

pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
KEY = "a key of sixteen bytes or more"
PARAMS = SamplingParams(temperature=1.0, max_tokens=8, stop_ids=())
TINY = GOLDENS / "tiny_llama.gguf"
PROMPT = tuple(range(3, 103))


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETURNER_PREFILL_KEY", KEY)


def engine(**settings: Any) -> LoadedEngine:
    given = {
        "model": str(TINY),
        "block_size": 4,
        "threads": 1,
        "backend": "native",
        "kv_cache_memory": 1 << 19,
        "max_num_batched_tokens": 16,
        "prefill_tokens": 16,
        "prefill_timeout": 10.0,
    }
    return make_engine(EngineConfig(**given | settings))


@contextmanager
def helper(**settings: Any) -> Iterator[LoadedEngine]:
    """An engine that computes for others, in a thread that steps it."""
    built, stop = (
        engine(role="prefill", prefill_listen="127.0.0.1:0", **settings),
        threading.Event(),
    )

    def steps() -> None:
        while not stop.is_set():
            built.engine.step() if built.engine.has_work else time.sleep(0.0005)

    thread = threading.Thread(target=steps)
    thread.start()
    try:
        yield built
    finally:
        stop.set()
        thread.join()
        built.engine.close()


def port_of(built: LoadedEngine) -> int:
    assert built.engine.connectors.prefill_server is not None
    return built.engine.connectors.prefill_server.port


def asking(port: int, **settings: Any) -> LoadedEngine:
    return engine(role="decode", prefill_from=f"127.0.0.1:{port}", **settings)


def run(built: LoadedEngine, prompt: tuple[int, ...] = PROMPT, **of: Any) -> list[int]:
    tokens = answered(built.engine, [Request(1, prompt, PARAMS, **of)])[1]
    check(built.engine.stack)
    return tokens


def fallbacks(built: LoadedEngine) -> dict[str, int]:
    stats = built.engine.stats()
    return {
        name[17:]: int(n) for name, n in stats.items() if name.startswith("prefill_fallback_") and n
    }


@pytest.mark.parametrize("of", [{}, {"salt": "tenant"}, {"logits_from": 70}])
@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_the_prompt_comes_from_elsewhere_and_no_token_changes(of: dict[str, Any], kv: str) -> None:
    want = run(engine(kv_cache_dtype=kv), **of)
    with helper(kv_cache_dtype=kv) as other:
        here = asking(port_of(other), kv_cache_dtype=kv)
        assert run(here, **of) == want
        stats = here.engine.stats()
        blocks = of.get("logits_from", 99) // 4
        assert stats["kv_received_blocks"] == stats["cached_tokens"] / 4 == blocks
        assert fallbacks(here) == {}
        run(here, (*PROMPT[:60], 1, 2, 3), **of)  # it is cached here
        assert here.engine.stats()["prefill_asked"] == 1
        sent = other.engine.stats()
        assert sent["kv_sent_bytes"] == stats["kv_received_bytes"] > 0


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "granite_h"])
def test_a_recurrent_state_comes_behind_the_blocks(name: str) -> None:
    """The last one that the other engine kept; the few tokens behind it are computed here."""
    prompt = tuple(3 + n % 290 for n in range(300))
    given = {"model": str(GOLDENS / "families" / name), "kv_cache_memory": 4 << 20}
    want = run(engine(**given), prompt)
    with helper(**given) as other:
        here = asking(port_of(other), **given)
        assert run(here, prompt) == want
        stats = here.engine.stats()
        assert stats["kv_received_blocks"] == 299 // 4 + 1
        assert stats["cached_tokens"] == 288
        assert fallbacks(here) == {}


def test_blocks_come_while_the_prompt_is_computed() -> None:
    other = engine(role="prefill", prefill_listen="127.0.0.1:0")
    here = asking(port_of(other))
    here.engine.submit(Request(1, PROMPT, PARAMS))
    until, seen = time.monotonic() + 10, set[float]()
    while here.engine.connectors.remote_prefill and here.engine.stats()["cached_tokens"] == 0:
        assert time.monotonic() < until
        if other.engine.has_work:
            other.engine.step()
            time.sleep(0.005)
        here.engine.step()
        seen.add(here.engine.stats()["kv_received_blocks"])
    assert len(seen) > 3  # some with each step
    other.engine.close()


@contextmanager
def proxy(port: int, after: int) -> Iterator[int]:
    """A link that is cut behind so many bytes of the answer, and stays so."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket, most: int) -> None:
        with suppress(OSError):
            while most > 0 and (data := source.recv(min(most, 4096))):
                sink.sendall(data)
                most -= len(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", port))
            ends.extend((near, far))
            threading.Thread(target=pump, args=(near, far, 1 << 30), daemon=True).start()
            threading.Thread(target=pump, args=(far, near, after), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()
        for end in ends:
            end.close()


def test_a_link_that_is_cut_anywhere_changes_nothing() -> None:
    want, dice = run(engine()), random.Random(5)
    with helper() as other:
        for after in (0, 3, 60, *(dice.randrange(100, 12_000) for _ in range(5))):
            with proxy(port_of(other), after) as port:
                here = asking(port)
                assert run(here) == want
                assert sum(fallbacks(here).values()) == 1


def test_an_engine_that_is_not_there_or_says_nothing() -> None:
    want = run(engine())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        here = asking(port, prefill_timeout=0.05)
        assert run(here) == want
        assert fallbacks(here) == {"late": 1}
    gone = asking(port)
    assert run(gone) == want
    assert fallbacks(gone) == {"unreachable": 1}


def test_a_request_that_is_aborted_ends_elsewhere_too() -> None:
    with helper() as other:
        here = asking(port_of(other))
        here.engine.submit(Request(1, PROMPT, PARAMS))
        until = time.monotonic() + 10
        while not other.engine.stats()["prefill_guests"]:
            assert time.monotonic() < until
            time.sleep(0.002)
        here.engine.abort(1)
        while other.engine.has_work:
            assert time.monotonic() < until
            time.sleep(0.002)
        assert other.engine.stats()["blocks_used"] == 0
        assert not here.engine.has_work


@pytest.mark.parametrize("wrong", ["key", "kv_cache_dtype", "block_size"])
def test_peers_that_do_not_fit_are_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": "int8"} if wrong == "kv_cache_dtype" else {}
    settings |= {"block_size": 8} if wrong == "block_size" else {}
    want = run(engine(**settings))
    with helper() as other:
        if wrong == "key":
            monkeypatch.setenv("PAGETURNER_PREFILL_KEY", KEY[::-1])
        here = asking(port_of(other), **settings)
        assert run(here) == want
        assert sum(fallbacks(here).values()) == 1
        assert set(fallbacks(here)) <= {"refused", "broken"}
        assert other.engine.stats()["prefill_guests"] == 0


NAMES = LinkIdentity("w", "b", "kv", 4)


@pytest.mark.parametrize(
    ("its", "said"),
    [
        (LinkIdentity("x", "b", "kv", 4), "another model"),
        (LinkIdentity("w", "x", "kv", 4), "another build or KV type"),
        (LinkIdentity("w", "b", "x", 4), "another form of KV"),
        (LinkIdentity("w", "b", "kv", 8), "another block size"),
    ],
)
def test_what_differs_is_named(its: LinkIdentity, said: str) -> None:
    mine, other = socket.socketpair()
    until = time.monotonic() + 5
    failed: list[LinkError] = []

    def answers() -> None:
        try:
            LinkEnd(KEY.encode(), its).answer(other, until)
        except LinkError as error:
            failed.append(error)

    thread = threading.Thread(target=answers)
    thread.start()
    with mine, other, pytest.raises(LinkError, match=said):
        LinkEnd(KEY.encode(), NAMES).ask(mine, until)
    thread.join()
    assert said in str(failed[0])


def test_hostile_bytes_hurt_nobody() -> None:
    dice, want = random.Random(7), run(engine())
    with helper() as other:
        for _ in range(30):
            with socket.create_connection(("127.0.0.1", port_of(other))) as peer:
                data = dice.randbytes(dice.randrange(200))
                peer.sendall(
                    b"H" + dice.choice([b"\x2e\0\0\0pageturner-kv\x01", b"\xff\xff\xff\xff"]) + data
                )
        for content in (
            b"",
            b"\0" * 8,
            b"\xff" * 40,
            b"\0" * 8 + b"\xff\xff\xff\x7f",
            b"\0" * 4 + b"\x09" * 7,
        ):
            with socket.create_connection(("127.0.0.1", port_of(other))) as peer:
                guests = other.engine.connectors.prefill_server
                assert guests is not None
                link = guests._end.ask(peer, time.monotonic() + 5)
                link.send(PREFILL, content, 5)
                with pytest.raises(LinkError):
                    link.receive(100, time.monotonic() + 5)
        here = asking(port_of(other))
        assert run(here) == want
        assert fallbacks(here) == {}


def test_a_changed_byte_is_found() -> None:
    """Also one on the way: the code of its frame is wrong."""
    mine, other = socket.socketpair()
    with mine, other:
        until, links = time.monotonic() + 5, []
        thread = threading.Thread(
            target=lambda: links.append(LinkEnd(KEY.encode(), NAMES).answer(other, until))
        )
        thread.start()
        link = LinkEnd(KEY.encode(), NAMES).ask(mine, until)
        thread.join()
        links[0].send(b"B", b"bytes", 1)
        data = bytearray(mine.recv(4096))
        data[6] ^= 1
        between, near = socket.socketpair()
        with between, near:
            between.sendall(data)
            link._sock = near
            with pytest.raises(LinkError, match="another key"):
                link.receive(100, until)


@pytest.mark.parametrize(
    "settings",
    [
        {"role": "prefill"},
        {"role": "decode"},
        {"prefill_from": "nowhere"},
        {"prefill_listen": "a:b"},
        {"role": "prefill", "prefill_from": "a:1"},
        {"prefill_from": "a:1", "prefill_key_file": "/no/such"},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any]) -> None:
    with engine_fault():
        prefill_key(EngineConfig(**settings))


def test_no_key_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETURNER_PREFILL_KEY", "short")
    with engine_fault("16 bytes"):
        prefill_key(EngineConfig(prefill_from="a:1"))
