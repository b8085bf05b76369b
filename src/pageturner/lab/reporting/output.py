"""The files that commands of the lab leave behind. Imports little."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pageturner.errors import EngineFault
from pageturner.private_files import write_json, write_private


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what goes wrong while this file or folder is written into EngineFault('output')."""
    try:
        yield
    except OSError as error:
        raise EngineFault("output", f"cannot write {path}: {error.strerror}") from error


def make_folder(folder: Path) -> None:
    """Make a folder for reports, where it is missing."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a report."""
    with writing(path):
        write_private(path, [text.encode()])


def write_figures(path: Path, figures: object) -> None:
    """Write figures as JSON."""
    with writing(path):
        write_json(path, figures)
