"""The channel between API process and engine, in both directions, with one thing wrong.

A case is a whole server with a few requests whose engine says something it should not, or the engine's end of
the channel with messages that it should not get. Whatever it is: every request is answered, the engine that
said it goes on or is replaced, and the engine that hears it goes on or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile import frames, whole_server
from hostile.binary import Dice
from hostile.whole_server import READY, StubEngine, ask, check, check_answer
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.engine.worker import ChannelLoop
from pageturner.ipc.channel import Abort, Aborted, Configure, Configured, Failed, Submit, Unpin
from pageturner.ipc.ledger import Ledger
from pageturner.params import SamplingParams
from pageturner.request import Event, Request, Resume
from support.engines import GOLDENS

SETTINGS = Configure(512, 8, "chunked", "fcfs", 8)
FROM_ENGINE: tuple[Any, ...] = (
    READY,
    Failed("kv_memory", "no"),
    Aborted(1, None),
    Configured(SETTINGS),
    Event(1, 0, 5, (1,)),
)
ASKED: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("channel_requests.json").read_bytes()
)
ADMIN = [(b"authorization", b"Bearer " + whole_server.ADMIN.encode())]
TIMEOUT = 0.04  # seconds until an engine that does not move is replaced
# what may become of requests whose engine was spoilt, and of everything where no engine ever was ready
BROKEN = (500, 503, 504)


def channel(dice: Dice) -> str:
    """What becomes of requests whose engine says something wrong."""
    notes = ["nothing said"]

    def script(engine: StubEngine, requests: list[Request]) -> None:
        said, notes[0] = frames.hostile(whole_server.honest(requests), FROM_ENGINE, dice)
        for piece in frames.pieces(b"".join(said), dice):
            engine.say(piece)
        if dice.random() < 0.3:
            _spoil(engine.ledger, dice)
        if dice.random() < 0.2:
            engine.answers.get_loop().call_later(0.005, engine.kill)

    async def case() -> str:
        async with whole_server.server(script, TIMEOUT) as (app, service):
            bodies = dice.sample(ASKED, dice.choice((1, 2, 4)))
            answers = await asyncio.gather(
                *(ask(app, "POST", "/v1/completions", json.dumps(body).encode()) for body in bodies)
            )
            came = {check_answer(answer, broken=BROKEN) for answer in answers}
            for path in ("/metrics", "/health", "/load", "/v1/admin/state"):
                check_answer(await ask(app, "GET", path, headers=ADMIN), broken=(503,))
            check(not service.streams.unfinished, "a stream without an end")
            last = await ask(app, "POST", "/v1/completions", b'{"prompt": "and now?"}')
            check(last.status == 200, f"no request is answered any more: {last.body[:200]!r}")
            return (
                "replaced"
                if service.supervisor.epoch > 1
                else min(came - {"answer"}, default="answer")
            )

    try:
        return whole_server.in_loop(case)
    except whole_server.Found as found:
        raise whole_server.Found(f"{notes[0]}: {found}") from found


def _spoil(ledger: Ledger, dice: Dice) -> None:
    now = dice.choice((*frames.FLOATS, 1e300, -1e300))
    if dice.random() < 0.5:
        ledger.begin(now, [dice.choice((0, 1, 2, 2**63))] * dice.choice((0, 1, 9000)))
    if dice.random() < 0.5:
        ledger.finish(now)


# -- what an engine hears ------------------------------------------------------------------------------------
TO_ENGINE: tuple[Any, ...] = (
    Submit(Request(1, (1, 2, 3), SamplingParams(max_tokens=3, logprobs=2, seed=1, stop_ids=(5,)))),
    Submit(
        Request(
            2, (1, 2), SamplingParams(temperature=0.0, max_tokens=4, logit_bias={1: 2.0}, seed=2)
        )
    ),
    Submit(
        Request(
            3, (5,) * 20, SamplingParams(max_tokens=2, seed=3, prompt_logprobs=1), logits_from=0
        )
    ),
    Submit(Request(4, (5, 6), SamplingParams(seed=1, max_tokens=9), resume=(Resume(0, (5, 7)),))),
    Submit(Request(5, (5, 6), SamplingParams(seed=1, beam_width=2, max_tokens=3), deadline=1e9)),
    Abort(1),
    Unpin(2),
    SETTINGS,
)
FAKE = EngineConfig(model="fake", backend="fake", max_num_seqs=8, kv_cache_memory=1 << 20)
TINY = EngineConfig(
    model=str(GOLDENS / "tiny_llama.gguf"), max_num_seqs=8, kv_cache_memory=1 << 20, threads=1
)
MAX_TALK = 0.02  # seconds for which an engine is left to work


def engine(dice: Dice) -> str:
    """What becomes of an engine that is told something wrong: it ends, in one way or the other, and soon."""
    ours, theirs = socket.socketpair()
    ledger, fd = Ledger.create()
    config = dice.choice((FAKE, FAKE, TINY))
    loop = ChannelLoop(make_engine(config).engine, theirs, ledger, config)
    ended: list[str] = []
    runner = threading.Thread(target=_run, args=(loop.run, theirs, ended), daemon=True)
    runner.start()
    reader = threading.Thread(target=_drain, args=(ours,), daemon=True)
    reader.start()
    told, note = frames.hostile(dice.sample(TO_ENGINE, dice.randint(1, 8)), FROM_ENGINE, dice)
    with contextlib.suppress(OSError):  # it has ended
        for piece in frames.pieces(b"".join(told), dice):
            ours.sendall(piece)
    runner.join(MAX_TALK)
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_WR)
    runner.join(whole_server.PATIENCE)
    alive = runner.is_alive()
    reader.join(1.0)
    ours.close()
    theirs.close()
    os.close(fd)
    check(not alive, f"{note}: the engine goes on without its server")
    return ended[0]


def _run(run: Callable[[], None], sock: socket.socket, ended: list[str]) -> None:
    try:
        run()
        ended.append("left")
    except Exception as error:
        ended.append(type(error).__name__)
    finally:
        sock.close()


def _drain(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while sock.recv(1 << 18):
            pass
