"""The LoRA adapters that a model has, as its doors and replicas tell each other.

Owns the table of changes that were made while an application runs: the latest change of a name
wins, so that tables that were told apart become one whatever comes first. It lives as long as one
replica or door of the model does. Must not know Ray, nor what is in a folder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

MAX_CHANGES = (
    1000  # names that were loaded or unloaded; those that were unloaded long ago are forgotten
)

Told = Mapping[str, tuple[int, str]]  # name -> version and path, as it passes between processes


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """An adapter by name. path: its folder at every replica, "": it was unloaded; version: of two
    changes of a name the greater one holds, 0: it stands in the settings of the application."""

    name: str
    path: str
    version: int = 0


class AdapterTable:
    """The adapters of one model by name. Several threads may use it: a change replaces the whole
    table, so that a reader sees it before or after the change."""

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        """given: name -> folder, as in the settings of the application."""
        self._latest = {name: AdapterChange(name, path) for name, path in (given or {}).items()}
        self._changing = threading.Lock()

    def find(self, name: str | None) -> AdapterChange | None:
        """Return the adapter of this name, if it is loaded."""
        latest = self._latest.get(name or "")
        return latest if latest is not None and latest.path else None

    def unloaded(self, name: str) -> bool:
        """Return whether an adapter of this name was loaded before and is unloaded now."""
        latest = self._latest.get(name)
        return latest is not None and not latest.path

    def next(self, name: str, path: str) -> AdapterChange:
        """A change that holds against what is known of the name."""
        before = self._latest.get(name)
        return AdapterChange(
            name, path, max(time.time_ns(), 0 if before is None else before.version + 1)
        )

    @property
    def full(self) -> bool:
        """Return whether no more may be loaded."""
        return sum(bool(one.path and one.version) for one in self._latest.values()) >= MAX_CHANGES

    def behind(self, change: AdapterChange) -> bool:
        """Return whether this change is not known here."""
        latest = self._latest.get(change.name)
        return latest is None or latest.version < change.version

    def note(self, change: AdapterChange) -> None:
        """Take over a change, if it is later than what is known of its name."""
        with self._changing:
            if not self.behind(change):
                return
            latest = {**self._latest, change.name: change}
            gone = sorted((one.version, name) for name, one in latest.items() if not one.path)
            for _, name in gone[: max(0, len(gone) - MAX_CHANGES)]:
                del latest[name]
            self._latest = latest

    def told(self) -> dict[str, tuple[int, str]]:
        """Return what `merge` of another table takes: all that does not stand in the settings."""
        return {name: (one.version, one.path) for name, one in self._latest.items() if one.version}

    def merge(self, told: Told) -> None:
        """Take over what another table said."""
        for name, (version, path) in told.items():
            self.note(AdapterChange(name, path, version))

    def loaded(self) -> list[AdapterChange]:
        """Return the adapters that were loaded at run time."""
        return [one for one in self._latest.values() if one.path and one.version]
