"""Records which files of the product call which, in every process started with this folder on its path.

    PYTHONPATH=tests/support/call_recorder PAGETURNER_RECORD=FOLDER pageturner serve ...

Between the moment a file FOLDER/on appears and the moment it goes, calls of Python functions of the product
are counted by (file that calls, file that is called); "" calls what was called by nobody of the product, as
an event loop does. Then they are written to FOLDER/PROCESS_ID.json. Python runs a module of this name when it
starts.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = f"{os.sep}pageturner{os.sep}"
INSIDE = f"src{PACKAGE}"
PARTS = (
    "<genexpr>",
    "<listcomp>",
    "<setcomp>",
    "<dictcomp>",
)  # of functions that are counted themselves


class Recorder:
    """Counts calls while it is on. One for each process; the profile hook of every thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._on = False
        self._calls: Counter[tuple[str, str]] = Counter()

    def watch(self) -> None:
        while True:
            time.sleep(0.005)
            on = (self._folder / "on").exists()
            if self._on and not on:
                self._write()
            self._on = on

    def _write(self) -> None:
        calls = [[*pair, n] for pair, n in self._calls.items()]
        part = self._folder / f"{os.getpid()}.part"
        part.write_text(json.dumps(calls))
        part.rename(part.with_suffix(".json"))

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            self._on
            and event == "call"
            and INSIDE in code.co_filename
            and code.co_name not in PARTS
        ):
            caller = frame.f_back
            while caller is not None and INSIDE not in caller.f_code.co_filename:
                caller = caller.f_back
            by = "" if caller is None else short(caller)
            self._calls[by, short(frame)] += 1


def short(frame: FrameType) -> str:
    """The file below the package, "server/app.py"."""
    return frame.f_code.co_filename.rpartition(PACKAGE)[2]


if "PAGETURNER_RECORD" in os.environ:
    recorder = Recorder(Path(os.environ["PAGETURNER_RECORD"]))
    threading.Thread(target=recorder.watch, daemon=True).start()
    threading.setprofile(recorder.profile)
    sys.setprofile(recorder.profile)
