"""The step log: what a running engine was asked and what each of its steps did, in a file.

Owns the format, the writer and the reader. Must not know what anybody reads out of it.

A log is MAGIC, then frames: a 4-byte little-endian length and one msgpack record. Each start of an
engine adds a Header and what follows from it, so that a log survives restarts. Times are seconds of
the engine's clock. In a log of digests each token is a keyed, chained digest of its sequence up to
there: equal beginnings have equal digests, which is all that scheduling depends on, and nobody can
read what was said.

The engine only appends to a buffer; a thread writes it, ten times a second. What a slow disk leaves
in the buffer beyond MAX_BUFFERED records is dropped, and a Gap says how much: the engine never
waits.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import struct
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from pageturner import logs
from pageturner.errors import EngineFault
from pageturner.params import SamplingParams
from pageturner.private_files import open_private
from pageturner.request import Event, Request
from pageturner.scheduler.types import Plan, Result, Sequence
from pageturner.telemetry.work import MachineLimits, ModelCosts, StepWork

MAGIC = b"pageturner-steps"
VERSION = 1
BEGIN = MAGIC + bytes([VERSION])
MAX_BUFFERED = 20_000  # records, some 20 MB
WRITE_EVERY = 0.1  # seconds
MAX_FRAME = 64 * 1024 * 1024
SAID = (
    "stop",
    "logit_bias",
    "bad_words",
    "bad_words_token_ids",
    "allowed_token_ids",
    "structured_outputs",
    "force_ids",
)  # parameters in which a client may have written something
DIGEST = 0x8000_0000  # the bit that tells a digest from a token, which a stop id stays


class Header(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """One start of an engine.

    config       its EngineConfig
    model        size and digest of the beginning of the model's file
    clock, wall  the engine's clock and the time of day (seconds since 1970) at the same moment
    content      "tokens" or "digests"
    needs        what its steps cost; limits: of the machine. Where they are known
    states, tails  of recurrent layers, as KVSizes has them
    taken_back   KV blocks of the engine process before, which the log says nothing about
    """

    model: str
    fingerprint: str
    config: dict[str, Any]
    num_blocks: int
    sliding: int
    window: int
    max_model_len: int
    clock: float
    wall: float
    content: str
    needs: ModelCosts | None = None
    limits: MachineLimits | None = None
    taken_back: int = 0
    states: int = 0
    tails: int = 0


class Arrived(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The scheduler was handed a request. prompt: uint32 each; params, more: what is not the
    default."""

    at: float
    id: int
    arrival: float
    prompt: bytes
    params: dict[str, Any]
    more: dict[str, Any]

    def request(self) -> Request:
        """A request as the scheduler got it."""
        params = msgspec.convert(self.params, SamplingParams)
        rest = {
            "id": self.id,
            "arrival": self.arrival,
            "prompt": _unpacked(self.prompt),
            **self.more,
        }
        return msgspec.convert(rest | {"params": params}, Request)


class Left(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """A request was aborted."""

    at: float
    id: int


class Unpinned(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The blocks that an ended request kept may go."""

    at: float
    id: int


class ItemRecord(msgspec.Struct, array_like=True, frozen=True):
    """n tokens of a sequence behind `computed`, and what came of them. candidates: of a sequence of
    a search, with their logprobs."""

    id: int
    index: int
    n: int
    computed: int
    tokens: list[int]
    draft: list[int]
    failed: bool
    candidates: list[tuple[int, float]] = []


class StepRecord(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """One plan and its commit; without items: asked, and there was nothing to run.

    start, end  the times the scheduler was told
    ended       (id, index, why) of sequences that it was the last step of
    tokens      computed, ballast included; context: positions whose KV they read, each once for a
                sequence
    work        all that was counted from the plan; None where nothing ran, and in older logs
    """

    start: float
    end: float
    items: list[ItemRecord]
    tokens: int
    context: int
    ballast: list[tuple[int, int]]
    preempted: list[int]
    ended: list[tuple[int, int, str]]
    waiting: int
    running: int
    blocks: int
    work: StepWork | None = None


class LostRecords(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """So many records were dropped here."""

    lost: int


class Changed(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """A change of settings: from here on the scheduler has these, named as in EngineConfig."""

    at: float
    settings: dict[str, Any]
    widest: int


class Forgot(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """A record that what was cached, and neither pinned nor in use, is not found from here on."""

    at: float


class Released(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """Nobody goes on with the conversation of this name."""

    at: float
    name: str


Record = Header | Arrived | Left | Unpinned | StepRecord | LostRecords | Changed | Forgot | Released


@dataclass(frozen=True, slots=True)
class Done:
    """A step that was committed. computed: of each item when it was planned; load: as
    Scheduler.load; work: of its plan, None where nothing ran."""

    start: float
    end: float
    plan: Plan
    computed: list[int]
    result: Result
    events: list[Event]
    load: tuple[int, int, int]
    work: StepWork | None = None


class StepLog:
    """The file in which an engine notes what it does. Costs the engine an append; see
    `MAX_BUFFERED`."""

    def __init__(self, path: str | os.PathLike[str], header: Header) -> None:
        file, new = _open(Path(path))
        self._lost = 0
        self._buffer: deque[Callable[[_Digests | None], Record]] = deque()
        self._end = threading.Event()
        digests = _Digests() if header.content == "digests" else None
        begin = BEGIN if new else b""
        work = (file, begin, self._buffer, self._end, digests)
        self._thread = threading.Thread(target=_write, args=work, name="step-log", daemon=True)
        self._buffer.append(lambda _: header)
        self._thread.start()
        # at the end of the process too
        self.close = weakref.finalize(self, _close, self._thread, self._end)

    def arrived(self, at: float, request: Request) -> None:
        self._put(lambda digests: _arrived(at, request, digests))

    def left(self, at: float, id: int) -> None:
        self._put(lambda digests: _left(at, id, digests))

    def unpinned(self, at: float, id: int) -> None:
        self._put(lambda _: Unpinned(at, id))

    def forgot(self, at: float) -> None:
        self._put(lambda _: Forgot(at))

    def released(self, at: float, name: str) -> None:
        self._put(lambda digests: Released(at, digests.name(name) if digests else name))

    def changed(self, at: float, settings: dict[str, Any], widest: int) -> None:
        self._put(lambda _: Changed(at, settings, widest))

    def stepped(self, done: Done) -> None:
        self._put(lambda digests: _step(done, digests))

    def _put(self, record: Callable[[_Digests | None], Record]) -> None:
        if len(self._buffer) >= MAX_BUFFERED:
            self._lost += 1
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self._buffer.append(lambda _: LostRecords(lost))
        self._buffer.append(record)


class _Digests:
    """Tokens to digests, by sequence. The key is forgotten with the process."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._last: dict[int, dict[int, bytes]] = {}  # of the open sequences of each request

    def begin(self, request: Request) -> tuple[list[int], list[list[int]]]:
        """Digests of the prompt, and of the tokens of each resumed choice."""
        prompt, state = self._chain(
            f"{request.adapter}/{request.salt}".encode(), request.prompt, ()
        )
        self._last[request.id] = {request.index: state}
        resumed = []
        for choice in request.resume:
            tokens, last = self._chain(state, choice.tokens, request.params.stop_ids)
            self._last[request.id][choice.index] = last
            resumed.append(tokens)
        return prompt, resumed

    def extend(self, seq: Sequence, tokens: list[int]) -> list[int]:
        """Digests of what a sequence gained; a stop id stays what it is."""
        each = self._last.setdefault(seq.request.id, {})
        state = each.get(seq.index, b"")
        found, each[seq.index] = self._chain(state, tokens, seq.request.params.stop_ids)
        return found

    def one(self, seq: Sequence, token: int) -> int:
        """The digest of a token that may come: the same wherever in the request."""
        return self._chain(b"%d" % seq.request.id, [token], seq.request.params.stop_ids)[0][0]

    def end(self, id: int, index: int) -> None:
        each = self._last.get(id, {})
        each.pop(index, None)
        if not each:
            self.forget(id)

    def forget(self, id: int) -> None:
        self._last.pop(id, None)

    def name(self, text: str) -> str:
        return (
            hashlib.blake2b(text.encode(), key=self._key, digest_size=6).hexdigest() if text else ""
        )

    def _chain(
        self, state: bytes, tokens: Iterable[int], keep: tuple[int, ...]
    ) -> tuple[list[int], bytes]:
        found = []
        for token in tokens:
            mixed = state + token.to_bytes(4, "little")
            state = hashlib.blake2b(mixed, key=self._key, digest_size=8).digest()
            found.append(token if token in keep else int.from_bytes(state[:4], "little") | DIGEST)
        return found, state


def _changed(value: Any, leave_out: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    found = {}
    for field in fields(value):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in leave_out and getattr(value, field.name) != default:
            found[field.name] = msgspec.to_builtins(getattr(value, field.name))
    return found


def _arrived(at: float, request: Request, digests: _Digests | None) -> Arrived:
    prompt: Iterable[int] = request.prompt
    params = _changed(request.params, SAID if digests else ())
    more = _changed(request, ("id", "arrival", "prompt", "params"))
    if digests is not None:
        prompt, resumed = digests.begin(request)
        for choice, tokens in zip(more.get("resume", ()), resumed, strict=True):
            choice["tokens"] = tokens
        more |= {
            name: digests.name(more[name]) for name in ("tenant", "salt", "adapter") if name in more
        }
        if hint := more.get("session"):
            hint |= {name: digests.name(hint[name]) for name in ("name", "owner", "fork_of")}
    return Arrived(at, request.id, request.arrival, array("I", prompt).tobytes(), params, more)


def _left(at: float, id: int, digests: _Digests | None) -> Left:
    if digests is not None:
        digests.forget(id)
    return Left(at, id)


def _step(done: Done, digests: _Digests | None) -> StepRecord:
    plan, items = done.plan, []
    for item, before, output in zip(plan.items, done.computed, done.result.outputs, strict=True):
        seq, tokens, draft = item.sequence, output.tokens, output.draft
        candidates = output.candidates
        if digests is not None:
            tokens, draft = digests.extend(seq, tokens) if tokens else [], [DIGEST] * len(draft)
            candidates = [(digests.one(seq, token), value) for token, value in candidates]
        failed = output.failure is not None
        items.append(
            ItemRecord(seq.request.id, seq.index, item.n, before, tokens, draft, failed, candidates)
        )
    ended = [
        (event.id, event.index, event.finish) for event in done.events if event.finish is not None
    ]
    if digests is not None:
        for id, index, _ in ended:
            digests.end(id, index)
    return StepRecord(
        done.start,
        done.end,
        items,
        done.work.tokens if done.work else 0,
        done.work.context if done.work else 0,
        plan.ballast,
        list(plan.preempted),
        ended,
        *done.load,
        done.work,
    )


# -- files -----------------------------------------------------------------------------------------


def _open(path: Path) -> tuple[FileIO, bool]:
    """The file, to be appended to behind its last whole record; whether it is new, which it is too
    where a full disk took not even its beginning. EngineFault('step_log') for one that is something
    else."""
    try:
        new = not path.is_file() or (
            path.stat().st_size < len(BEGIN) and BEGIN.startswith(path.read_bytes())
        )
        if path.is_file():
            os.truncate(path, 0 if new else _whole(path))
        fd = open_private(path, os.O_WRONLY | os.O_APPEND)
        file = open(fd, "ab", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise EngineFault(
            "step_log", f"cannot write the step log {path}: {error.strerror}"
        ) from error
    return file, new


def _whole(path: Path) -> int:
    """Return where the last whole record ends."""
    with open(path, "rb") as file:
        _check_version(path, file)
        end = file.tell()
        for size in _sizes(file):
            if file.seek(size, os.SEEK_CUR) > path.stat().st_size:
                break
            end = file.tell()
    return end


def _sizes(file: BinaryIO) -> Iterator[int]:
    """Yield the size of each frame; its record is read or passed over before the next is asked
    for."""
    while len(head := file.read(4)) == 4:
        yield struct.unpack("<I", head)[0]


def _check_version(path: Path, file: BinaryIO) -> None:
    begin = file.read(len(MAGIC) + 1)
    if begin[:-1] != MAGIC:
        raise EngineFault("step_log", f"{path} is not a step log")
    if begin[-1] != VERSION:
        raise EngineFault(
            "step_log",
            f"{path} is a step log of version {begin[-1]}, and this program reads version {VERSION}"
            ": read it with the program that wrote it",
        )


def _write(
    file: FileIO,
    begin: bytes,
    buffer: deque[Callable[[_Digests | None], Record]],
    end: threading.Event,
    digests: _Digests | None,
) -> None:
    """The thread: what is in the buffer, until the end. A disk that fails ends the log, not the
    engine."""
    encoder = msgspec.msgpack.Encoder()
    try:
        with file:
            _write_all(file, begin)
            last = False
            while not last:
                last = end.wait(WRITE_EVERY)
                frames = []
                while buffer:
                    body = encoder.encode(buffer.popleft()(digests))
                    frames += [struct.pack("<I", len(body)), body]
                _write_all(file, b"".join(frames))
    except OSError as error:
        with contextlib.suppress(OSError):  # what this process says may go to the same disk
            logs.say(f"the step log ends here: {error.strerror}", "error")
        while not end.wait(WRITE_EVERY):
            buffer.clear()


def _write_all(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _close(thread: threading.Thread, end: threading.Event) -> None:
    end.set()
    thread.join()


def read(path: Path) -> Iterator[Record]:
    """The records of a log. A frame that was not finished, as a killed engine leaves it, is the
    end.

    EngineFault('step_log') for a file that is none, of another version, or damaged.
    """
    decoder = msgspec.msgpack.Decoder(Record)
    try:
        with open(path, "rb") as file:
            _check_version(path, file)
            for size in _sizes(file):
                if size > MAX_FRAME:
                    raise EngineFault("step_log", f"{path} is damaged: a record of {size} bytes")
                if len(body := file.read(size)) < size:
                    return
                yield decoder.decode(body)
    except OSError as error:
        raise EngineFault(
            "step_log", f"cannot read the step log {path}: {error.strerror}"
        ) from error
    except msgspec.DecodeError as error:
        raise EngineFault("step_log", f"{path} is damaged: {error}") from error


def _unpacked(prompt: bytes) -> tuple[int, ...]:
    return tuple(array("I", prompt))
