"""The frames between the server and its text workers, with one thing wrong, in both directions.

A worker that says something it should not costs the job that it had: the server refuses that one, in a way
that can be told, and no answer to one job ever goes to another. A worker that hears something it should not
ends, or refuses, and the next one is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from typing import Any

import msgspec

from hostile import frames, whole_server
from hostile.binary import Dice, damaged
from hostile.whole_server import check
from pageturner.errors import ClientError
from pageturner.server.api.base.replies import at_once
from pageturner.server.api.openai.completions import COMPLETIONS
from pageturner.server.text_workers import text_jobs, text_pool
from pageturner.server.text_workers.fork_server import ForkServer
from pageturner.server.text_workers.text_pool import TextPool
from pageturner.server.text_workers.text_worker import (
    DOING,
    DONE,
    GREETING,
    HEAD,
    HELLO,
    LAST,
    REFUSED,
    Job,
    JobRefusal,
    facts_of,
    frame,
    worker_of,
)
from server.test_openai import SERVED

KINDS = (DOING, DONE, REFUSED, DONE | LAST, REFUSED | LAST, HELLO, 0x7F, 0xFF)
SECONDS = 0.1  # that a job may take
START_SECONDS = 0.1  # that a worker may take to say hello
MOST = 1 << 20  # bytes that an outcome may have


def outcome_of(raw: bytes) -> bytes:
    return hashlib.blake2b(raw).digest()


class StubForks:
    """Stands for a ForkServer. The first `wrong` workers say something wrong; the others never do."""

    def __init__(self, dice: Dice) -> None:
        self.closed, self._dice, self.wrong = False, dice, dice.choice((1, 1, 2))
        self._tasks: list[asyncio.Task[None]] = []
        self.honest: set[bytes] = set()  # what was answered by who never says anything wrong

    def fork(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        self.wrong -= 1
        work = self._work(theirs, self._dice if self.wrong >= 0 else None)
        self._tasks.append(asyncio.get_running_loop().create_task(work))
        return ours

    def kill(self, pid: int) -> None: ...

    def close(self) -> None:
        self.closed = True
        for task in self._tasks:
            task.cancel()

    async def _work(self, sock: socket.socket, dice: Dice | None) -> None:
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        try:
            said = [frame(HELLO, GREETING.pack(12345, False))]
            at = dice.choice((0, 1, 1, 1, 2)) if dice else -1  # when it says something wrong
            number = 0
            while True:
                raw = b"".join(said if dice is None or number != at else _wrong(said, dice))
                for piece in frames.pieces(raw, dice) if dice else [raw]:
                    writer.write(piece)
                    await asyncio.sleep(0)
                await writer.drain()
                contents = []
                for _ in range(2):
                    head = await reader.readexactly(HEAD.size)
                    contents.append(await reader.readexactly(HEAD.unpack(head)[-1]))
                if dice is None:
                    self.honest.add(contents[1])
                number += 1
                said = self._said(contents[1], number, head)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                sock.close()
            del loop

    def _said(self, raw: bytes, number: int, head: bytes) -> list[bytes]:
        if raw.endswith(b"!"):
            told = msgspec.msgpack.encode(JobRefusal(400, "refused_by_job", "no", None))
            return [_reply(DOING, b"text", head), _reply(REFUSED, told, head)]
        return [
            _reply(DOING, b"grammar", head),
            _reply(DOING, b"text", head),
            _reply(DONE, outcome_of(raw), head),
        ]


def _reply(kind: int, content: bytes, head: bytes) -> bytes:
    """With the number of the job that the head names."""
    return frame(kind, content, HEAD.unpack(head)[1])


def _wrong(said: list[bytes], dice: Dice) -> list[bytes]:
    said = list(said)
    at = dice.randrange(len(said))
    kind = dice.choice(
        ("bytes", "bytes", "kind", "length", "twice", "drop", "body", "noise", "end", "foreign")
    )
    if kind == "bytes":
        said[at] = damaged(said[at], dice)[0]
    elif kind == "kind":
        said[at] = bytes([dice.choice(KINDS)]) + said[at][1:]
    elif kind == "length":
        size = dice.choice((*frames.LENGTHS, len(said[at]) - HEAD.size + dice.choice((-1, 1))))
        said[at] = (
            said[at][: HEAD.size - 4] + (size % 2**32).to_bytes(4, "little") + said[at][HEAD.size :]
        )
    elif kind == "twice":
        said.insert(dice.randrange(len(said) + 1), said[at])
    elif kind == "drop":
        del said[at]
    elif kind == "body":
        said[at] = frame(dice.choice(KINDS), dice.choice(frames.BODIES), dice.choice((0, 1, 2)))
    elif kind == "foreign":
        said.append(
            frame(dice.choice(KINDS), outcome_of(b"foreign"), dice.choice((0, 99, 2**32 - 1)))
        )
    elif kind == "noise":
        said.insert(at, dice.randbytes(dice.choice((1, 5, 9, 5000))))
    else:
        said[at:] = []
    return said


def server(dice: Dice) -> str:
    """What becomes of jobs whose worker says something wrong."""

    async def case() -> str:
        forks: Any = StubForks(dice)
        text_pool.START_SECONDS = START_SECONDS
        pool = TextPool(lambda: forks, seconds=SECONDS, most=1 << 20)
        try:
            raws = [f"{i}{dice.choice(('', '!'))}".encode() for i in range(dice.choice((2, 3, 5)))]
            jobs = [
                pool.run(Job("x", facts_of(SERVED), MOST), raw, f"key {i % 2}")
                for i, raw in enumerate(raws)
            ]
            async with asyncio.timeout(whole_server.PATIENCE):
                came = await asyncio.gather(*jobs, return_exceptions=True)
                last = b""
                while last != outcome_of(b"last"):  # until a worker is asked that is right
                    with contextlib.suppress(ClientError):
                        last = await pool.run(Job("x", facts_of(SERVED), MOST), b"last", "key")
                    check(
                        last not in map(outcome_of, raws),
                        "another answer than one's own, in the end",
                    )
        finally:
            await pool.close()
        others = {outcome_of(raw) for raw in (*raws, b"foreign")}
        for raw, outcome in zip(raws, came, strict=True):
            if isinstance(outcome, ClientError):
                check(outcome.code.isidentifier(), f"the code {outcome.code!a}")
                check(400 <= outcome.status < 600, f"the status {outcome.status}")
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                check(
                    outcome == outcome_of(raw) or outcome not in others,
                    "another answer than one's own",
                )
        return "refused" if any(isinstance(one, ClientError) for one in came) else "answered"

    return whole_server.in_loop(case)


# -- what a worker hears -------------------------------------------------------------------------------------
MEMORY = 64 << 20


def worker(dice: Dice) -> str:
    """What becomes of a worker that is told something wrong, in a process of its own."""
    forks = ForkServer(worker_of(SERVED, MEMORY))
    try:
        for honest in (False, True):
            sock = forks.fork()
            sock.settimeout(whole_server.PATIENCE)
            job = msgspec.msgpack.encode(Job("tokenize", facts_of(SERVED), MOST))
            told = [frame(0, job, 1), frame(0, b'{"prompt": "hello"}', 1)]
            if not honest:
                told = _told_wrong(told, dice)
            with contextlib.suppress(OSError):
                for piece in told:
                    sock.sendall(piece)
                sock.shutdown(socket.SHUT_WR)
            said = b""
            while data := _received(sock):
                said += data
            sock.close()
            check(
                not honest or b'"count":5' in said,
                f"a worker that was told nothing wrong says {said!r:.100}",
            )
        return "on" if b'"count":5' in said else "ended"
    finally:
        forks.close()


def _told_wrong(told: list[bytes], dice: Dice) -> list[bytes]:
    if dice.random() < 0.5:
        spoilt = frames.spoilt(Job("tokenize", facts_of(SERVED), MOST), dice)
        return [frame(0, spoilt, 1), told[1]]
    return _wrong(told, dice)


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except TimeoutError:
        raise whole_server.Found("a worker that does not end") from None
    except OSError:
        return b""


# -- what an outcome says ------------------------------------------------------------------------------------
BODY = b'{"prompt": ["ab", "cde"], "n": 2, "best_of": 3, "echo": true, "logprobs": 1, "seed": 3}'


def outcome(dice: Dice) -> str:
    """A call, or a prefix, as a worker understood it, with something wrong: refused, or taken as some."""
    packed = text_jobs.read_call(COMPLETIONS, BODY, SERVED, lambda _: None)
    prefix = text_jobs.read_prefix(b'{"prompt": "hello", "id": "x"}', SERVED, lambda _: None)
    unpack: Any = text_jobs.unpack_call
    if dice.random() < 0.3:
        packed, unpack = prefix, text_jobs.unpack_prefix
    wrong = (
        damaged(packed, dice)[0]
        if dice.random() < 0.4
        else frames.spoilt(msgspec.Raw(packed), dice)
    )
    try:
        whole = unpack(wrong)
        if unpack is text_jobs.unpack_call:
            at_once(whole)
    except ClientError as error:
        check((error.status, error.code) == (503, "busy"), f"{error.status} {error.code}")
        return "refused"
    return "taken"
