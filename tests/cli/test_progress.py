"""What is said while something takes long."""

from __future__ import annotations

import threading

import pytest

from pageturner import logs
from pageturner.progress import NEVER, Still

EVERY = 0.01  # seconds


class Heard:
    """The sentences that were said, for whoever waits for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self._changed = threading.Condition()
        monkeypatch.setattr(logs, "say", self._add)

    def _add(self, text: str) -> None:
        with self._changed:
            self.said.append(text.partition(" (")[0])
            self._changed.notify_all()

    def wait_for(self, text: str) -> None:
        with self._changed:
            self.said.clear()
            assert self._changed.wait_for(lambda: text in self.said, 60)


def voices() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if "_run" in one.name]


def test_of_works_within_works_the_innermost_is_heard_and_the_outer_is_heard_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, before = Heard(monkeypatch), len(voices())
    with Still(lambda: "the command", EVERY):
        heard.wait_for("the command")
        with Still(lambda: "its work", EVERY):
            heard.wait_for("its work")
            assert len(voices()) == before + 1
            heard.said.clear()
        heard.wait_for("the command")
    assert len(voices()) == before, "a process that forks has no thread of it left"


def test_work_that_says_nothing_silences_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = Heard(monkeypatch)
    with Still(lambda: "the command", EVERY):
        heard.wait_for("the command")
        with Still(lambda: "a bar", NEVER):
            voices()[-1].join(10 * EVERY)  # until it waits for the end of the bar
            with Still(lambda: "its work", EVERY):
                heard.wait_for("its work")
            voices()[-1].join(10 * EVERY)
        heard.wait_for("the command")


def test_works_may_end_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(monkeypatch)
    first, second = Still(lambda: "first", EVERY), Still(lambda: "second", EVERY)
    first.end()
    heard.wait_for("second")
    second.end()
    second.end()  # again, where an error passes
    with Still(lambda: "third", EVERY):
        heard.wait_for("third")
