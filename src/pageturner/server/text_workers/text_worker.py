"""A process that reads requests for the server: one job at a time, within limits.

Owns its memory limit, its end when it has grown, and the frames that it exchanges with the server:
a byte that says what it is, the number of the job that it belongs to and a length, of four bytes
each, and the content. Must not know which jobs there are (text_jobs.py) nor who asks for one.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import resource
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from pageturner.errors import ClientError, lacks_memory
from pageturner.http.error_responses import unforeseen
from pageturner.http.memory_reserve import out_of_memory
from pageturner.server.admission.limits import RequestLimits
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.text_workers import text_jobs
from pageturner.text.chat_template import TemplateLimits

log = logging.getLogger("pageturner")

HELLO, DOING, DONE, REFUSED = range(4)
LAST = 0x80  # added to DONE or REFUSED: the worker ends behind it
HEAD = struct.Struct("<BII")
GREETING = struct.Struct("<I?")  # of HELLO: the process id, and `_starved`
GROWN = 64 << 20  # bytes by which a worker may have grown at most when it takes another job
NICENESS = 5  # below the server and the engine: whoever waits for a token goes first


class Facts(msgspec.Struct, frozen=True):
    """The facts that the engine has said of itself: see ServedModel."""

    context: int
    capacity: int
    vocab_size: int
    slots: int
    block_size: int
    developer: bool
    limits: RequestLimits
    pinned: int
    names: tuple[str, ...]
    adapters: frozenset[str]


class Job(msgspec.Struct, frozen=True):
    """The head of a job; the body that it is about follows in a frame of its own.

    name  which one (text_jobs.do)
    most  bytes that its outcome may have
    """

    name: str
    facts: Facts
    most: int


class JobRefusal(msgspec.Struct, frozen=True):
    """A ClientError on its way."""

    status: int
    code: str
    message: str
    param: str | None
    retry_after: float = 0.0

    def error(self) -> ClientError:
        return ClientError(self.status, self.code, self.message, self.param, self.retry_after)


def frame(kind: int, content: bytes, number: int = 0) -> bytes:
    return HEAD.pack(kind, number, len(content)) + content


def facts_of(served: ServedModel) -> Facts:
    return Facts(**{name: getattr(served, name) for name in Facts.__struct_fields__})


def worker_of(served: ServedModel, memory: int) -> Callable[[socket.socket], None]:
    """Return what a worker does with its socket. served: all but what the engine says; memory:
    bytes that it may take beyond those that it starts with."""
    template = served.template and served.template.within(TemplateLimits())

    def work(sock: socket.socket) -> None:
        own = _limit(memory)
        sock.sendall(frame(HELLO, GREETING.pack(os.getpid(), _starved(own))))
        begun = _peak()
        while (received := _received_job(sock)) is not None:
            number, job, raw = received
            facts = msgspec.structs.asdict(job.facts)
            known = replace(served, template=template, in_worker=True, **facts)
            doing = partial(_say_doing, sock, number)
            kind, outcome = _outcome(job, raw, known, doing, own)
            last = _peak() - begun > GROWN
            sock.sendall(frame(kind | (LAST if last else 0), outcome, number))
            if last:
                return
            del raw, received, outcome

    return work


def _say_doing(sock: socket.socket, number: int, what: str) -> None:
    sock.sendall(frame(DOING, what.encode(), number))


def _outcome(
    job: Job, raw: bytearray, served: ServedModel, doing: text_jobs.Doing, own: int
) -> tuple[int, bytes]:
    """own: see `_limit`."""
    refusal: ClientError | None = None
    try:
        outcome = text_jobs.do(job.name, bytes(raw), served, doing)
        if len(outcome) > job.most:
            message = f"the answer would have {len(outcome)} bytes, at most {job.most} are sent: ask for less"
            raise ClientError(400, "answer_too_large", message)
        return DONE, outcome
    except ClientError as error:
        refusal = error
    except Exception as error:
        if not lacks_memory(error):
            log.exception("a text worker failed at a job of %d bytes", len(raw))
            refusal = unforeseen(error)
    refusal = refusal or too_much_memory(_starved(own))  # now that what it took is free again
    told = JobRefusal(
        refusal.status, refusal.code, refusal.message, refusal.param, refusal.retry_after
    )
    return REFUSED, msgspec.msgpack.encode(told)


def too_much_memory(starved: bool) -> ClientError:
    """The refusal of a job that found no memory. It is its own fault where its worker could have
    had all that a job may have."""
    if starved:
        return out_of_memory()
    message = "reading this request took more memory than one request may have: make it smaller"
    return ClientError(400, "too_expensive", message)


def _limit(memory: int) -> int:
    """Bound this process, and return the bytes of data that it may have by this bound."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own = most = _data() + memory
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most = min(own, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with contextlib.suppress(OSError):  # where memory ends, the kernel shall choose this process
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("800")
        os.nice(NICENESS)
    return own


def _starved(own: int) -> bool:
    """Return whether this process cannot have as much as its own bound lets it, for a limit of the
    server or for what the machine has. A shared mapping does not count against its own bound."""
    if resource.getrlimit(resource.RLIMIT_DATA)[0] < own:
        return True
    try:
        mmap.mmap(-1, max(own - _data(), mmap.PAGESIZE)).close()
    except (OSError, MemoryError):
        return True
    return False


def _data() -> int:
    """Return the bytes that this process can write to."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * mmap.PAGESIZE


def _peak() -> int:
    """Most bytes that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _received_job(sock: socket.socket) -> tuple[int, Job, bytearray] | None:
    """Number, job and body; None when the server has closed, or cannot be understood any more."""
    try:
        told = _received(sock)
        body = None if told is None else _received(sock)
        if told is None or body is None:
            return None
        return told[0], msgspec.msgpack.decode(told[1], type=Job), body[1]
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
        log.error("a text worker ends, for it was told no job: %r", error)
        return None


def _received(sock: socket.socket) -> tuple[int, bytearray] | None:
    """Number and content of the next frame; None when the server has closed."""
    head = _exactly(sock, HEAD.size)
    if head is None:
        return None
    _, number, size = HEAD.unpack(head)
    content = _exactly(sock, size)
    return None if content is None else (number, content)


def _exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = sock.recv_into(view[got:])
        if not count:
            return None
        got += count
    return data
