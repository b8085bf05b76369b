"""The journal of batches: whatever ends the process, and wherever, each line has one answer or waits."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pageturner.server.api.batches.batch_journal import (
    ANSWERED,
    CANCELLED,
    COMPLETED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    BatchRecord,
    FileRecord,
    Journal,
    JournalError,
    LineResult,
    NewLine,
    write_whole,
)
from pageturner.server.api.batches.batch_lines import twice


def begun(journal: Journal, id: str = "batch_1") -> BatchRecord:
    return journal.create(BatchRecord(id, input="file-1", window="24h"))


def lines(first: int, n: int) -> list[NewLine]:
    return [NewLine(i, f"c{i}", 10 * i, 10, i) for i in range(first, first + n)]


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal")
    yield journal
    journal.close()


def test_a_line_and_its_answer_change_together(journal: Journal) -> None:
    record = begun(journal)
    journal.looked_at(record, lines(1, 3), 30, 3, [], twice)
    waiting = journal.waiting(record.number)
    assert [one.custom_id for one in waiting] == ["c1", "c2", "c3"]
    journal.finish([(record.number, LineResult(waiting[1].id, True, b"two", 5, 7))])
    # it has its answer
    journal.finish([(record.number, LineResult(waiting[1].id, False, b"again"))])
    journal.finish([(record.number, LineResult(waiting[0].id, False, b"one"))])
    now = journal.batch(record.id)
    assert now is not None
    assert (now.answered, now.failed, now.input_tokens, now.output_tokens) == (1, 1, 5, 7)
    assert [one.custom_id for one in journal.waiting(record.number)] == ["c3"]
    assert list(journal.answers(record.number, ANSWERED)) == [b"two"]
    assert list(journal.answers(record.number, FAILED)) == [b"one"]
    assert list(journal.answers(record.number)) == [b"one", b"two"]


def test_a_custom_id_is_there_once_and_a_bad_line_costs_only_itself(journal: Journal) -> None:
    record = begun(journal)
    bad = NewLine(2, "c1", 10, 10, 0, b"bad")
    problem = {"code": "x", "message": "", "param": None, "line": 2}
    journal.looked_at(
        record, [bad, *lines(1, 1), NewLine(3, "c1", 20, 10, 0)], 30, 3, [problem], twice
    )
    now = journal.batch(record.id)
    assert now is not None
    assert (now.total, now.failed, [one["line"] for one in now.problems]) == (3, 2, [2, 3])
    assert [one.line for one in journal.waiting(record.number)] == [1]
    told = [json.loads(one) for one in list(journal.answers(record.number))[1:]]
    assert [(one["custom_id"], one["error"]["code"]) for one in told] == [
        ("c1", "duplicate_custom_id")
    ]


def test_only_one_process_has_it(journal: Journal) -> None:
    with pytest.raises(JournalError) as caught:
        Journal(journal.path)
    assert caught.value.code == "journal_in_use"


def test_a_full_disk_is_said_and_changes_nothing(journal: Journal) -> None:
    record = begun(journal)
    journal.looked_at(record, lines(1, 3), 30, 3, [], twice)
    waiting = journal.waiting(record.number)
    (pages,) = journal.db.execute("PRAGMA page_count").fetchone()
    journal.db.execute(f"PRAGMA max_page_count = {pages}")
    results = [(record.number, LineResult(one.id, True, bytes(100_000))) for one in waiting]
    with pytest.raises(JournalError) as caught:
        journal.finish(results)
    assert caught.value.code == "disk_full"
    with pytest.raises(JournalError):
        journal.probe()
    assert journal.waiting(record.number) == waiting
    journal.db.execute("PRAGMA max_page_count = 100000")
    journal.probe()
    journal.finish(results)
    assert journal.waiting(record.number) == []


def test_another_version_is_refused(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "journal")
    db.execute("PRAGMA user_version = 7")
    db.close()
    with pytest.raises(JournalError, match="version"):
        Journal(tmp_path / "journal")
    (tmp_path / "other").write_bytes(b"no database at all, and longer than its head" * 100)
    with pytest.raises(JournalError):
        Journal(tmp_path / "other")


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert write_whole(path, [b"a", b"bc"]) == 5

    def breaks() -> Iterator[bytes]:
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(JournalError) as caught:
        write_whole(path, breaks())
    assert caught.value.code == "disk_full"
    assert path.read_bytes() == b"a\nbc\n"
    assert list(tmp_path.iterdir()) == [path]


class Crashes(RuleBasedStateMachine):
    """Every call, ended anywhere: before it, in the middle of its transaction, or behind it. What another
    process then finds on the disk is what was there before the call or behind it, and nothing else."""

    folder: Path
    copies = 0

    @initialize()
    def begin(self) -> None:
        Crashes.copies += 1
        self.path = self.folder / f"journal{Crashes.copies}"
        self.journal = self.opened(self.path)
        self.record = begun(self.journal)
        self.next = 1
        self.answers: dict[str, bytes] = {}  # by custom_id: those of which somebody was told
        self.known: set[str] = set()
        self.ended = False

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()

    def opened(self, path: Path) -> Journal:
        journal = Journal(path)
        # it is the process that ends, not the machine
        journal.db.execute("PRAGMA synchronous = OFF")
        return journal

    def found(self) -> BatchRecord:
        record = self.journal.batch("batch_1")
        assert record is not None
        return record

    def crash(self) -> None:
        """The process ends as it is: what lies on the disk is all that the next one has."""
        Crashes.copies += 1
        copy = self.folder / f"journal{Crashes.copies}"
        for suffix in ("", "-wal"):
            source = self.path.with_name(self.path.name + suffix)
            if source.exists():
                shutil.copyfile(source, copy.with_name(copy.name + suffix))
        self.journal.close()
        self.path, self.journal = copy, self.opened(copy)

    def torn(self, after: int, call: str, *what: object) -> bool:
        """Do it, ended after so many instructions of SQLite; False where it was not ended."""
        left = [after]

        def tick() -> int:
            left[0] -= 1
            return left[0] == -1

        self.journal.db.set_progress_handler(tick, 1)
        try:
            getattr(self.journal, call)(*what)
        except JournalError:
            return True
        finally:
            self.journal.db.set_progress_handler(None, 0)
        return False

    @precondition(lambda self: not self.ended)
    @rule(n=st.integers(1, 5), after=st.integers(0, 4000), crash=st.booleans())
    def look(self, n: int, after: int, crash: bool) -> None:
        new = lines(self.next, n)
        torn = self.torn(after, "looked_at", self.record, new, 10 * n, self.next + n - 1, [], twice)
        if crash:
            self.crash()
        if not torn or self.found().total > len(self.known):
            self.next += n
            self.known |= {line.custom_id or "" for line in new}

    @precondition(lambda self: not self.ended)
    @rule(n=st.integers(1, 4), after=st.integers(0, 4000), crash=st.booleans(), again=st.booleans())
    def answer(self, n: int, after: int, crash: bool, again: bool) -> None:
        some = self.journal.waiting(self.record.number, most=n)
        results = [
            LineResult(one.id, True, f"{one.custom_id} {self.next}".encode(), 1, 2) for one in some
        ]
        what = [(self.record.number, result) for result in results]
        done = not self.torn(after, "finish", what)
        if crash:
            self.crash()
        if again:  # as somebody does who was not told whether it was taken
            self.journal.finish(what)
        if done or again or self.found().answered > len(self.answers):
            self.answers |= {one.custom_id: r.answer for one, r in zip(some, results, strict=True)}

    @precondition(lambda self: not self.ended and self.known and self.known == set(self.answers))
    @rule(after=st.integers(0, 4000), crash=st.booleans())
    def end(self, after: int, crash: bool) -> None:
        output = FileRecord("file-out", "", "batch_output", "out", 1, 1)
        whole = list(self.journal.answers(self.record.number, ANSWERED))
        done = not self.torn(after, "end", self.record, COMPLETED, output, None)
        if crash:
            self.crash()
        self.ended = done or self.found().ended
        assert (self.journal.file("file-out") is not None) == self.ended
        assert (self.found().status == COMPLETED) == self.ended
        assert list(self.journal.answers(self.record.number)) == ([] if self.ended else whole)

    @rule()
    def crash_between(self) -> None:
        self.crash()

    @invariant()
    def nothing_lost_nothing_twice(self) -> None:
        if not hasattr(self, "journal") or self.ended:
            return
        found = self.found()
        waiting = [one.custom_id for one in self.journal.waiting(self.record.number, most=10_000)]
        assert sorted([*waiting, *self.answers]) == sorted(self.known)
        assert sorted(self.journal.answers(self.record.number)) == sorted(self.answers.values())
        assert (found.total, found.lines) == (len(self.known), self.next - 1)
        assert (found.answered, found.output_tokens) == (len(self.answers), 2 * len(self.answers))


def run_crashes(folder: Path, examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    Crashes.folder = folder
    run_state_machine_as_test(
        Crashes,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_ended_anywhere_each_line_has_one_answer_or_waits(tmp_path: Path) -> None:
    run_crashes(tmp_path, 5, 10)


@pytest.mark.slow
def test_ended_anywhere_many_times(tmp_path: Path) -> None:
    run_crashes(tmp_path, 100, 30)


def test_what_is_deleted_makes_room_before_the_journal_needs_it(
    journal: Journal, tmp_path: Path
) -> None:
    content = tmp_path / "content"
    content.write_bytes(b"x")
    begun(journal)
    assert not journal.delete_file("file-1", content)  # a batch reads it
    assert content.exists()
    journal.add_file(FileRecord("file-2", "", "batch", "name", 1, 0))
    full = "BEGIN SELECT RAISE(ABORT, 'full'); END"
    journal.db.execute(f"CREATE TEMP TRIGGER full BEFORE DELETE ON files {full}")
    with pytest.raises(JournalError):
        journal.delete_file("file-2", content)
    assert not content.exists()
    journal.db.execute("DROP TRIGGER full")
    assert journal.delete_file("file-2", content)
    assert journal.file("file-2") is None


def test_how_a_batch_ends_is_said_once(journal: Journal) -> None:
    record = begun(journal)
    assert journal.move(record.id, IN_PROGRESS)
    assert journal.move(record.id, "cancelling", CANCELLED)
    assert not journal.move(record.id, FINALIZING, "expired")
    now = journal.batch(record.id)
    assert now is not None
    assert (now.status, now.why, sorted(now.times)) == (
        "cancelling",
        CANCELLED,
        ["cancelling", "in_progress"],
    )
    assert [one.id for one in journal.unfinished()] == [record.id]
    assert not journal.delete_file("file-1", journal.path.with_name("file-1"))
    journal.end(now, CANCELLED, None, None)
    assert journal.unfinished() == []
    assert not journal.move(record.id, IN_PROGRESS)
    assert journal.delete_file("file-1", journal.path.with_name("file-1"))
