"""The journal of batches: which lines there are, which are answered, and with what. One SQLite
file.

Owns what is durable, and the transactions that keep it true. A line is either answered, with its
answer, or it waits: nothing says that it runs, so whatever was running when this process or the
machine ended is simply run again. A file is only ever replaced as a whole. Must not know what a
line asks, who answers it, nor HTTP.

Every call may wait for the disk: a server makes them in a thread of their own (batch_runner.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pageturner.private_files import open_private, write_private

VERSION = 1
WAITING, ANSWERED, FAILED = 0, 1, 2  # states of a line
MAX_PROBLEMS = 100  # bad lines that a batch names; all of them are in its file of errors
AT_ONCE = 1000  # lines in a transaction that touches many
MAX_ENDED = 10_000  # batches that are remembered when they have ended
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT, purpose TEXT, filename TEXT, bytes INTEGER, created INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE, tenant TEXT, key TEXT, endpoint TEXT, input TEXT,
    window TEXT, metadata TEXT, status TEXT, created INTEGER, expires INTEGER, times TEXT, why TEXT,
    position INTEGER, lines INTEGER, total INTEGER, answered INTEGER, failed INTEGER, problems TEXT,
    output TEXT, errors TEXT, input_tokens INTEGER, output_tokens INTEGER
);
CREATE TABLE IF NOT EXISTS lines (
    id INTEGER PRIMARY KEY, batch INTEGER, line INTEGER, custom_id TEXT, position INTEGER, size INTEGER,
    crc INTEGER, state INTEGER, answer BLOB
);
CREATE UNIQUE INDEX IF NOT EXISTS by_custom_id ON lines (batch, custom_id);
CREATE INDEX IF NOT EXISTS by_state ON lines (batch, state, id);
"""
# states of a batch, as OpenAI names them
VALIDATING, IN_PROGRESS, FINALIZING, COMPLETED = (
    "validating",
    "in_progress",
    "finalizing",
    "completed",
)
BATCH_FAILED, EXPIRED, CANCELLING, CANCELLED = "failed", "expired", "cancelling", "cancelled"
ENDED = (COMPLETED, BATCH_FAILED, EXPIRED, CANCELLED)
_ENDED = ", ".join(f"'{status}'" for status in ENDED)  # as SQL


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that is kept. bytes: its size; created: Unix time."""

    id: str
    tenant: str
    purpose: str
    filename: str
    bytes: int
    created: int


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch as it stands.

    key       SHA-256 of the API key that it runs with, in hexadecimal; "" where nobody needs one
    input     id of the file of its lines
    expires   Unix time after which it ends as it is; 0: never
    times     when it came into which status, Unix time
    why       the status in which it will end where that is not `completed`: "" for all others
    position  bytes of the input that were looked at; lines: how many lines these are, `total`
              without those that are empty
    answered, failed   lines with an answer, and with an error
    problems  the first bad lines, or what ended it: objects with code, message, param and line
    output, errors     ids of its files, "" where there are none
    """

    id: str
    tenant: str = ""
    key: str = ""
    endpoint: str = ""
    input: str = ""
    window: str = ""
    metadata: dict[str, str] | None = None
    expires: int = 0
    number: int = 0
    created: int = 0
    status: str = VALIDATING
    times: dict[str, int] = field(default_factory=dict)
    why: str = ""
    position: int = 0
    lines: int = 0
    total: int = 0
    answered: int = 0
    failed: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list)
    output: str = ""
    errors: str = ""
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def ended(self) -> bool:
        return self.status in ENDED


COLUMNS = ", ".join(one.name for one in fields(BatchRecord))
AS_JSON = frozenset({"metadata", "times", "problems"})


@dataclass(frozen=True, slots=True)
class NewLine:
    """A line that was looked at. custom_id: None where it has no good one; answer: the error of a
    bad one."""

    line: int
    custom_id: str | None
    position: int
    size: int
    crc: int
    answer: bytes | None = None


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """A line without an answer. id: ascending within a batch."""

    id: int
    line: int
    custom_id: str
    position: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of a line. answer: the line written to the output file, or to the error file if
    `ok` is false."""

    id: int
    ok: bool
    answer: bytes
    input_tokens: int = 0
    output_tokens: int = 0


class JournalError(Exception):
    """The journal cannot be read or written. code: `disk_full`, `journal_in_use` or
    `journal_broken`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Journal:
    """The journal in one file. Only one process has it at a time; its lock goes with the
    process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _as_journal_error(path):
            self._lock = open_private(_beside(path, ".lock"))
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise JournalError("journal_in_use", f"{path} is in use by another process") from None
        try:
            self.db = self._open(path)
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self, path: Path) -> sqlite3.Connection:
        with _as_journal_error(path):
            for file in (
                path,
                *filter(Path.exists, (_beside(path, "-wal"), _beside(path, "-shm"))),
            ):
                os.close(open_private(file))  # SQLite gives those beside it the mode of the first
            db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")  # a commit is on the disk when it returns
            db.execute(f"PRAGMA journal_size_limit = {64 << 20}")
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                db.close()
                raise JournalError("journal_broken", f"{path} is of another version ({version})")
            db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        return db

    def close(self) -> None:
        self.db.close()
        os.close(self._lock)

    def remove(self) -> None:
        """Close it, and take it away with all that it says."""
        self.close()
        for suffix in ("-wal", "-shm", "", ".lock"):
            _beside(self.path, suffix).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All of it is on the disk at the end, or nothing is. Behind an error either may be so:
        ask."""
        with _as_journal_error(self.path):
            self._settle()
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield self.db
                self.db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self.db.execute("ROLLBACK")
                raise

    def _read(self, question: str, *values: Any) -> list[Any]:
        with _as_journal_error(self.path):
            self._settle()
            return self.db.execute(question, values).fetchall()

    def _settle(self) -> None:
        """Roll back a transaction that an earlier failed rollback left open."""
        if self.db.in_transaction:
            self.db.execute("ROLLBACK")

    def probe(self) -> None:
        """JournalError while nothing can be written."""
        with self._transaction() as db:
            db.execute("CREATE TABLE IF NOT EXISTS probe (bytes BLOB)")
            db.execute("INSERT INTO probe VALUES (zeroblob(65536))")
            db.execute("DROP TABLE probe")

    # -- files -------------------------------------------------------------------------------------
    def add_file(self, record: FileRecord) -> None:
        with self._transaction() as db:
            _put_file(db, record)

    def file(self, id: str) -> FileRecord | None:
        found = self._read("SELECT * FROM files WHERE id = ?", id)
        return FileRecord(*found[0]) if found else None

    def files(self, tenant: str) -> list[FileRecord]:
        """Return the files of a tenant, newest first."""
        question = "SELECT * FROM files WHERE tenant = ? ORDER BY created DESC, id DESC"
        return [FileRecord(*row) for row in self._read(question, tenant)]

    def every_file(self) -> set[str]:
        """The ids of all."""
        return {id for (id,) in self._read("SELECT id FROM files")}

    def delete_file(self, id: str, content: Path) -> bool:
        """Delete a file. False if a batch that has not ended needs it. The content goes first: on a
        full disk the journal has no other room to note the deletion."""
        with self._transaction() as db:
            question = f"SELECT 1 FROM batches WHERE input = ? AND status NOT IN ({_ENDED})"
            if db.execute(question, (id,)).fetchone():
                return False
            content.unlink(missing_ok=True)
            db.execute("DELETE FROM files WHERE id = ?", (id,))
        return True

    # -- batches -----------------------------------------------------------------------------------
    def create(self, new: BatchRecord) -> BatchRecord:
        """Keep a new batch, none of whose lines was looked at, and give it its number and time. The
        oldest ended ones beyond MAX_ENDED are forgotten."""
        with self._transaction() as db:
            (last,) = db.execute("SELECT coalesce(max(number), 0) FROM batches").fetchone()
            record = replace(new, number=last + 1, created=int(time.time()))
            values = _columns({one.name: getattr(record, one.name) for one in fields(record)})
            marks = ", ".join("?" * len(values))
            db.execute(f"INSERT INTO batches ({COLUMNS}) VALUES ({marks})", values)
            old = (
                f"SELECT number FROM batches WHERE status IN ({_ENDED})"
                f" ORDER BY number DESC LIMIT -1 OFFSET {MAX_ENDED}"
            )
            db.execute(f"DELETE FROM batches WHERE number IN ({old})")
        return record

    def batch(self, id: str) -> BatchRecord | None:
        found = self._read(f"SELECT {COLUMNS} FROM batches WHERE id = ?", id)
        return _batch_of(found[0]) if found else None

    def batches(self, tenant: str, before: int = 1 << 62, most: int = 100) -> list[BatchRecord]:
        """Return up to `most` batches of a tenant, newest first, with numbers below `before`."""
        question = f"SELECT {COLUMNS} FROM batches WHERE tenant = ? AND number < ? ORDER BY number DESC LIMIT ?"
        return [_batch_of(row) for row in self._read(question, tenant, before, most)]

    def unfinished(self) -> list[BatchRecord]:
        """All that have not ended, the oldest first."""
        question = f"SELECT {COLUMNS} FROM batches WHERE status NOT IN ({_ENDED}) ORDER BY number"
        return [_batch_of(row) for row in self._read(question)]

    def move(
        self, id: str, status: str, why: str = "", problem: dict[str, Any] | None = None
    ) -> bool:
        """Change the status of a batch. why: the status in which it will end. False if it has
        ended, or if `why` was set before."""
        with self._transaction() as db:
            record = _one(db, id)
            if record is None or record.ended or (why and record.why):
                return False
            times = record.times | {status: record.times.get(status, int(time.time()))}
            problems = [*record.problems, problem] if problem else record.problems
            why = why or record.why
            _change(db, id, status=status, times=times, why=why, problems=problems)
        return True

    # -- lines -------------------------------------------------------------------------------------
    def looked_at(
        self,
        record: BatchRecord,
        lines: Iterable[NewLine],
        position: int,
        count: int,
        problems: list[dict[str, Any]],
        twice: Any,
    ) -> None:
        """The next lines of its input, up to this position, `count` lines from its beginning. Those
        of a custom_id that is there already are bad: twice(line) makes the error of one and what is
        told of it."""
        with self._transaction() as db:
            now = _one(db, record.id)
            assert now is not None
            bad, total, told = 0, 0, [*now.problems, *problems]
            for line in lines:
                total += 1
                if line.answer is None and not _put_line(db, now.number, line):
                    line, problem = twice(line)
                    told.append(problem)
                if line.answer is not None:
                    bad += 1
                    _put_line(db, now.number, line)
            told = sorted(told, key=lambda problem: problem["line"] or 0)[:MAX_PROBLEMS]
            _change(
                db,
                now.id,
                position=position,
                lines=count,
                total=now.total + total,
                failed=now.failed + bad,
                problems=told,
            )

    def error_bytes(self, number: int) -> int:
        """Return how many bytes the errors of the bad lines of a batch have."""
        question = (
            "SELECT coalesce(sum(length(answer)), 0) FROM lines WHERE batch = ? AND state = ?"
        )
        return int(self._read(question, number, FAILED)[0][0])

    def waiting(self, number: int, after: int = 0, most: int = 256) -> list[WaitingLine]:
        """The next lines of a batch without an answer, behind the line of an id."""
        question = (
            "SELECT id, line, custom_id, position, size, crc FROM lines"
            " WHERE batch = ? AND state = ? AND id > ? ORDER BY id LIMIT ?"
        )
        return [WaitingLine(*row) for row in self._read(question, number, WAITING, after, most)]

    def finish(self, results: Iterable[tuple[int, LineResult]]) -> None:
        """Lines, by the numbers of their batches, have their answers: all of these, or none. A line
        that had one keeps it."""
        with self._transaction() as db:
            for number, result in results:
                state = ANSWERED if result.ok else FAILED
                done = db.execute(
                    "UPDATE lines SET state = ?, answer = ? WHERE id = ? AND state = ?",
                    (state, result.answer, result.id, WAITING),
                )
                if done.rowcount:
                    db.execute(
                        "UPDATE batches SET answered = answered + ?, failed = failed + ?, input_tokens ="
                        " input_tokens + ?, output_tokens = output_tokens + ? WHERE number = ?",
                        (
                            result.ok,
                            not result.ok,
                            result.input_tokens,
                            result.output_tokens,
                            number,
                        ),
                    )

    def answers(self, number: int, state: int | None = None) -> Iterator[bytes]:
        """The answers of a batch in the order of its lines, those of one state or all."""
        after = 0
        question = "SELECT id, answer FROM lines WHERE batch = ? AND id > ? AND "
        question += (
            "state > ? ORDER BY id LIMIT ?" if state is None else "state = ? ORDER BY id LIMIT ?"
        )
        while rows := self._read(
            question, number, after, WAITING if state is None else state, AT_ONCE
        ):
            yield from (answer for _, answer in rows)
            after = rows[-1][0]

    def end(
        self, record: BatchRecord, status: str, output: FileRecord | None, errors: FileRecord | None
    ) -> None:
        """The batch has ended, and its answers are in these files: its lines are not kept any
        longer."""
        with self._transaction() as db:
            now = _one(db, record.id)
            if now is None or now.ended:
                return
            written = {"output": output, "errors": errors}
            for file in filter(None, written.values()):
                _put_file(db, file)
            ids = {name: file.id for name, file in written.items() if file is not None}
            times = now.times | {status: int(time.time())}
            _change(db, now.id, status=status, times=times, **ids)
            db.execute("DELETE FROM lines WHERE batch = ?", (now.number,))


def crc_of(raw: bytes) -> int:
    """Return a checksum that shows whether a line has changed since it was validated."""
    return zlib.crc32(raw)


def write_whole(path: Path, lines: Iterable[bytes]) -> int:
    """Write a file that is there whole or not at all, whatever happens meanwhile. Returns its size.
    JournalError, as on a full disk, leaves what was there before."""
    with _as_journal_error(path):
        return write_private(path, (line + b"\n" for line in lines), durable=True)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


@contextlib.contextmanager
def _as_journal_error(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        full = getattr(error, "sqlite_errorcode", 0) & 0xFF in (
            sqlite3.SQLITE_FULL,
            sqlite3.SQLITE_IOERR,
        )
        raise JournalError("disk_full" if full else "journal_broken", f"{path}: {error}") from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise JournalError(
            "disk_full" if full else "journal_broken", f"{path}: {error.strerror or error}"
        ) from error


def _put_file(db: sqlite3.Connection, record: FileRecord) -> None:
    values = [getattr(record, one.name) for one in fields(record)]
    db.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", values)


def _put_line(db: sqlite3.Connection, number: int, line: NewLine) -> bool:
    """Insert a line. False if there already is a valid line with its custom_id."""
    state, name = (WAITING, line.custom_id) if line.answer is None else (FAILED, None)
    values = (number, line.line, name, line.position, line.size, line.crc, state, line.answer)
    put = (
        "INSERT OR IGNORE INTO lines (batch, line, custom_id, position, size, crc, state, answer)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    )
    return db.execute(put, values).rowcount > 0


def _one(db: sqlite3.Connection, id: str) -> BatchRecord | None:
    row = db.execute(f"SELECT {COLUMNS} FROM batches WHERE id = ?", (id,)).fetchone()
    return None if row is None else _batch_of(row)


def _columns(values: dict[str, Any]) -> list[Any]:
    """The values of columns of a batch, as they are kept."""
    return [json.dumps(v) if name in AS_JSON else v for name, v in values.items()]


def _change(db: sqlite3.Connection, id: str, **values: Any) -> None:
    """Give columns of a batch other values."""
    setting = ", ".join(f"{name} = ?" for name in values)
    db.execute(f"UPDATE batches SET {setting} WHERE id = ?", (*_columns(values), id))


def _batch_of(row: tuple[Any, ...]) -> BatchRecord:
    named = zip(fields(BatchRecord), row, strict=True)
    return BatchRecord(*(json.loads(v) if one.name in AS_JSON else v for one, v in named))
