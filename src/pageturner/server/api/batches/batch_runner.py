"""Runs batches: looks at their lines, has them answered, writes their files.

Owns the order of it, how many lines are under way, and what happens when a line cannot be answered
now, when a batch is told to end, and when the disk is full. Must not know who answers (`Ask`), nor
how anything is kept (batch_journal.py).

A line is under way only here, in memory. Its answer counts when the journal has it; until then it
is as if it had never been asked, and it will be asked again with the same seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

from pageturner.http.error_responses import error_body_of, unforeseen
from pageturner.server.api.batches.batch_journal import (
    ANSWERED,
    AT_ONCE,
    BATCH_FAILED,
    CANCELLED,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    BatchRecord,
    FileRecord,
    Journal,
    JournalError,
    LineResult,
    WaitingLine,
    crc_of,
    write_whole,
)
from pageturner.server.api.batches.batch_lines import (
    Answered,
    Question,
    answer_line,
    lines_of,
    looked_at,
    question_of,
    tokens_of,
    twice,
    unanswered_line,
)
from pageturner.server.api.batches.disk_thread import DiskThread

log = logging.getLogger("pageturner")
P = ParamSpec("P")
T = TypeVar("T")

POLL = 0.05  # seconds between two looks at whether another line may begin
GATHER = 0.02  # seconds in which answers are gathered for one transaction
MAX_READ = 16 << 20  # bytes of lines that are held before they begin
ERRORS_PER_BYTE = 4  # bytes of errors that each byte of a file of bad lines may become,
LEAST_ERRORS = 1 << 20  # and bytes that all of them may be anyway
MAX_UNSAVED = 256  # answers that the journal does not have yet; with more no line begins
PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds until a refused line is asked again
DISK_PAUSE = 5.0  # seconds until a full disk is tried again
AGAIN = (429, 502, 503, 504)  # answers that say: not now
NEVER = (
    "ttft_target_unreachable",
    "deadline_unreachable",
    "deadline_exceeded",
)  # but these are answers
UNANSWERED = {
    EXPIRED: ("batch_expired", "the completion window ended before this request was executed"),
    CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was executed"),
    BATCH_FAILED: ("batch_failed", "the batch failed before this request was executed"),
}

NOWHERE = {"param": None, "line": None}  # the place of a problem with a whole file

Ask = Callable[[Question, BatchRecord], Awaitable[Answered]]


@dataclass(frozen=True, slots=True)
class BatchPaths:
    """The paths of the files of a batch.

    input    path of its input file
    written  path of its output file, or of its error file if `ok` is false, with the record to
             publish once the file is there. None: the batch has no such file
    apart    errors have a file of their own
    """

    input: Callable[[BatchRecord], Path]
    written: Callable[[BatchRecord, bool], tuple[Path, FileRecord] | None]
    apart: bool = True


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A batch that is being run. ending: set when it shall end as it is; not_before: when a line of
    it may begin, as the server said when it refused one."""

    record: BatchRecord
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    not_before: float = 0.0


class BatchRunner:
    """All batches of one journal.

    ask     answers a question; an answer of AGAIN is no answer, and the question is asked again
    room    how many more lines may begin, given how many are under way
    most    bytes of a body
    trouble what is wrong with the disk, while it is; "" otherwise. Nothing new begins meanwhile
    broken  why a batch stands still until this process is started again; "" where none does
    """

    def __init__(
        self, journal: Journal, paths: BatchPaths, ask: Ask, room: Callable[[int], int], most: int
    ) -> None:
        self.trouble = self.broken = ""
        self._held: set[int] = set()  # ids of lines that are under way
        self._journal = journal
        self._paths = paths
        self._ask = ask
        self._room = room
        self._most = most
        self._thread = DiskThread("batches")
        self._batches: dict[str, RunningBatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unsaved: list[tuple[int, LineResult]] = []
        self._came, self._saved, self._freed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._saver: asyncio.Task[None] | None = None
        self._closing = False

    @property
    def under_way(self) -> int:
        """Lines that are being asked now."""
        return len(self._held)

    async def do(self, work: Callable[P, T], *what: P.args, **more: P.kwargs) -> T:
        """Have it done by the thread that may wait for the disk."""
        return await self._thread.do(work, *what, **more)

    # -- life --------------------------------------------------------------------------------------
    async def resume(self) -> None:
        """Go on with all that had not ended."""
        for record in await self.do(self._journal.unfinished):
            self.begin(record)

    def begin(self, record: BatchRecord) -> None:
        """Run a batch, from wherever it was."""
        if self._closing or record.id in self._tasks:
            return
        if self._saver is None:
            self._saver = asyncio.create_task(self._save())
        running = self._batches[record.id] = RunningBatch(record)
        task = self._tasks[record.id] = asyncio.create_task(self._run(running))

        def over(_: asyncio.Task[None]) -> None:
            del self._batches[record.id], self._tasks[record.id]

        task.add_done_callback(over)

    def end(self, id: str) -> None:
        """End a batch early, after the journal has recorded how it ends."""
        if id in self._batches:
            self._batches[id].ending.set()

    async def wait(self, id: str) -> None:
        """Wait until this batch is no longer running."""
        while (task := self._tasks.get(id)) is not None:
            await asyncio.wait({task})

    async def close(self) -> None:
        """Stop: what is answered is saved, what is under way is asked again some day."""
        self._closing = True
        for task in [*self._tasks.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._saver is not None:
            self._saver.cancel()
            await asyncio.gather(self._saver, return_exceptions=True)
        with contextlib.suppress(JournalError):
            await self._save_now()
        self._thread.close()

    # -- one batch ---------------------------------------------------------------------------------
    async def _run(self, batch: RunningBatch) -> None:
        while True:
            try:
                await self._phases(batch)
                return
            except JournalError as error:
                if error.code != "disk_full":
                    log.error("batch %s stands still: %s", batch.record.id, error.message)
                    self.broken = error.message
                    return
                await self._until_there_is_room(error)
            except Exception as error:
                log.exception("batch %s stands still", batch.record.id)
                self.broken = f"{type(error).__name__}: {error}"
                return
            finally:
                await self._stop_lines(batch)

    async def _phases(self, batch: RunningBatch) -> None:
        await self._reload(batch)
        timer: asyncio.TimerHandle | None = None
        if batch.record.expires and not batch.record.why:
            left = max(0.0, batch.record.expires - time.time())
            timer = asyncio.get_running_loop().call_later(left, batch.ending.set)
        try:
            if batch.record.status == VALIDATING:
                await self._look_at_lines(batch)
            number = batch.record.number
            while not batch.record.why and not batch.ending.is_set():
                if not await self.do(self._journal.waiting, number, 0, 1):
                    break
                await self._answer_lines(batch)
                await self._reload(batch)
            if await self._due_to_end(batch):
                await self._give_up_lines(batch)
            if not batch.record.ended:
                await self._write_files(batch)
        finally:
            if timer is not None:
                timer.cancel()

    async def _reload(self, batch: RunningBatch) -> None:
        found = await self.do(self._journal.batch, batch.record.id)
        batch.record = found or batch.record

    async def _due_to_end(self, batch: RunningBatch) -> bool:
        """Return whether the batch ends (expired or cancelled) before all of its lines are
        answered."""
        await self._reload(batch)
        record = batch.record
        if (
            batch.ending.is_set()
            and not record.why
            and record.expires
            and record.expires <= time.time()
        ):
            await self.do(self._journal.move, record.id, FINALIZING, EXPIRED)
            await self._reload(batch)
        return bool(batch.record.why)

    async def _look_at_lines(self, batch: RunningBatch) -> None:
        """Every line at its door, AT_ONCE in a transaction."""
        while not batch.ending.is_set():
            if not await self.do(self._look_at_some, batch.record):
                break
            await self._reload(batch)
        await self._reload(batch)
        record = batch.record
        if record.why or batch.ending.is_set():
            return
        if not record.total:
            await self.do(
                self._fail, record, "empty_file", "the input file has no lines", **NOWHERE
            )
        else:
            await self.do(self._journal.move, record.id, IN_PROGRESS)
        await self._reload(batch)

    def _look_at_some(self, record: BatchRecord) -> bool:
        """The next lines. False when there are none. In the thread."""
        path = self._paths.input(record)
        try:
            with path.open("rb") as file:
                found = _some(lines_of(file, record.position, record.lines, self._most))
        except OSError as error:
            message = f"the input file cannot be read: {error.strerror}"
            self._fail(record, "invalid_file", message)
            return False
        if not found:
            return False
        looked = [looked_at(one, record.endpoint, self._most) for one in found]
        problems = [problem for _, problem in looked if problem is not None]
        count, begin, size, _ = found[-1]
        lines = [line for line, _ in looked]
        self._journal.looked_at(record, lines, begin + size, count, problems, twice)
        if self._journal.error_bytes(record.number) > max(
            LEAST_ERRORS, ERRORS_PER_BYTE * (begin + size)
        ):
            message = "nearly every line is bad: mend those that are named and send the file again"
            self._fail(record, "too_many_errors", message)
            return False
        return True

    def _fail(self, record: BatchRecord, code: str, message: str, **place: None) -> None:
        """Have the batch end as failed. In the thread."""
        problem = {"code": code, "message": message, **place}
        self._journal.move(record.id, FINALIZING, BATCH_FAILED, problem)

    async def _answer_lines(self, batch: RunningBatch) -> None:
        """Every line that waits, in their order."""
        record, after = batch.record, 0
        ending = asyncio.ensure_future(batch.ending.wait())
        try:
            while page := await self.do(self._journal.waiting, record.number, after):
                raws = await self.do(self._raw, record, page)
                after = page[len(raws) - 1].id
                for line, raw in zip(page, raws, strict=False):
                    if not await self._place(batch):
                        return
                    if crc_of(raw) != line.crc:
                        await self._changed(batch)
                        return
                    self._begin_line(batch, line, raw)
            while batch.tasks and not ending.done():
                await asyncio.wait({*batch.tasks, ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            await self._stop_lines(batch)
            await self._until_saved()

    def _raw(self, record: BatchRecord, page: list[WaitingLine]) -> list[bytes]:
        """The bytes of the first of these lines, about MAX_READ of them. In the thread."""
        raws, left = list[bytes](), MAX_READ
        with self._paths.input(record).open("rb") as file:
            for line in page:
                if (left := left - line.size) < 0 and raws:
                    break
                file.seek(line.position)
                raws.append(file.read(line.size))
        return raws

    async def _changed(self, batch: RunningBatch) -> None:
        message = "the input file is not the one that was looked at: it was changed meanwhile"
        await self.do(self._fail, batch.record, "input_changed", message, **NOWHERE)

    async def _stop_lines(self, batch: RunningBatch) -> None:
        tasks = [*batch.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_up_lines(self, batch: RunningBatch) -> None:
        """Say of all lines that wait why they were not run."""
        code, message = UNANSWERED[batch.record.why]
        number = batch.record.number
        while page := await self.do(self._journal.waiting, number, 0, AT_ONCE):
            told = [
                (number, LineResult(one.id, False, unanswered_line(one, code, message)))
                for one in page
            ]
            await self.do(self._journal.finish, told)

    async def _write_files(self, batch: RunningBatch) -> None:
        record = batch.record
        if not record.why:
            await self.do(self._journal.move, record.id, FINALIZING)
        await self._reload(batch)
        await self.do(self._write, batch.record)

    def _write(self, record: BatchRecord) -> None:
        """The files of a batch whose lines all have ended. In the thread."""
        written: list[FileRecord | None] = []
        for ok in (True, False):
            if (place := self._paths.written(record, ok)) is None:
                written.append(None)
                continue
            path, told = place
            state = (ANSWERED if ok else FAILED) if self._paths.apart else None
            size = write_whole(path, self._journal.answers(record.number, state))
            written.append(replace(told, bytes=size))
        self._journal.end(record, record.why or COMPLETED, *written)

    # -- one line ----------------------------------------------------------------------------------
    async def _place(self, batch: RunningBatch) -> bool:
        """Wait until another line may start; batches take turns. False: this batch is to end."""
        while not batch.ending.is_set():
            full = self.trouble or len(self._unsaved) >= MAX_UNSAVED
            if not full and time.monotonic() >= batch.not_before and self._room(self.under_way) > 0:
                return True
            self._freed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._freed.wait(), POLL)
        return False

    def _begin_line(self, batch: RunningBatch, line: WaitingLine, raw: bytes) -> None:
        task = asyncio.create_task(self._line(batch, line, raw))
        self._held.add(line.id)
        batch.tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            batch.tasks.discard(task)
            self._let_go(line)

        task.add_done_callback(over)

    def _let_go(self, line: WaitingLine) -> None:
        """Release the place of a line, so that another line may start."""
        self._held.discard(line.id)
        self._freed.set()

    async def _line(self, batch: RunningBatch, line: WaitingLine, raw: bytes) -> None:
        """Ask until there is an answer."""
        question, pause = question_of(raw, line.line), PAUSE
        while True:
            answer = await self._answer(question, batch.record)
            if answer.status not in AGAIN or any(one.encode() in answer.body for one in NEVER):
                break
            wait = min(max(answer.retry_after, pause), LONGEST_PAUSE)
            batch.not_before = time.monotonic() + wait  # so that few wait here
            self._let_go(line)  # and other batches go on
            await asyncio.sleep(wait)
            if not await self._place(batch):
                return
            self._held.add(line.id)
            pause = min(2 * pause, LONGEST_PAUSE)
        ok = answer.status == 200
        told = answer_line(line.custom_id, question.request_id, answer.status, answer.body)
        used = tokens_of(answer.body) if ok else (0, 0)
        self._unsaved.append((batch.record.number, LineResult(line.id, ok, told, *used)))
        self._came.set()

    async def _answer(self, question: Question, record: BatchRecord) -> Answered:
        try:
            return await self._ask(question, record)
        except Exception as error:
            log.exception("%s failed", question.request_id)
            told = unforeseen(error)
            return Answered(told.status, error_body_of(question.url, told))

    # -- answers into the journal ------------------------------------------------------------------
    async def _save(self) -> None:
        """Save what came, for ever."""
        while True:
            await self._came.wait()
            await asyncio.sleep(GATHER)
            self._came.clear()
            try:
                await self._save_now()
            except JournalError as error:
                await self._until_there_is_room(error)
                self._came.set()

    async def _save_now(self) -> None:
        some = self._unsaved[:]
        if some:
            await self.do(self._journal.finish, some)
            del self._unsaved[: len(some)]
        self._saved.set()

    async def _until_saved(self) -> None:
        while self._unsaved and not self._closing:
            self._saved.clear()
            await self._saved.wait()

    async def _until_there_is_room(self, error: JournalError) -> None:
        """Stand still until the disk takes something."""
        log.error("batches stand still: %s", error.message)
        while True:
            self.trouble = error.message
            await asyncio.sleep(DISK_PAUSE)
            try:
                await self.do(self._journal.probe)
            except JournalError as again:
                error = again
            else:
                self.trouble = ""
                return


def _some(found: Iterable[tuple[int, int, int, bytes]]) -> list[tuple[int, int, int, bytes]]:
    """The first of these lines: AT_ONCE of them, and about MAX_READ bytes."""
    some, left = [], MAX_READ
    for one in islice(found, AT_ONCE):
        some.append(one)
        if (left := left - len(one[3])) < 0:
            break
    return some
