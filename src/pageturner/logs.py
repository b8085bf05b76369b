"""The log of a program on standard error: lines of text, or JSON objects, one a line.

Ground floor: the API process, the engine process and the commands write the same form. Owns the
form. Must not know what is logged. What is logged beside the sentence is `extra={"fields": {...}}`;
text leaves it out. Imports little: commands that never log import this too.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import logging

VARIABLE = "PAGETURNER_LOG_FORMAT"  # by which a process tells its children
TEXT = "%(asctime)s %(levelname)s %(message)s"
# of every line: no field has these names
OWN = frozenset(["time", "level", "logger", "message", "exception"])


def to_stderr(level: str, form: str = "text") -> None:
    """Our log; those of uvicorn and asyncio only where everything is wanted.

    level  debug, info, warning or error
    form   text or json: child processes that are started from here on write the same
    """
    import logging

    level = level.upper()
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        os.environ[VARIABLE] = form
        handler.setFormatter(_json_formatter())
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
    else:
        os.environ.pop(VARIABLE, None)
        handler.setFormatter(logging.Formatter(TEXT))
    # of libraries no line for each request that they make
    logging.basicConfig(handlers=[handler], level="WARNING" if level == "INFO" else level)
    logging.getLogger("pageturner").setLevel(level)
    for noisy in ("uvicorn", "asyncio"):
        logging.getLogger(noisy).setLevel(level if level == "DEBUG" else "CRITICAL")


def as_parent() -> None:
    """The log of a child process: as JSON where its parent's is, else as Python has it."""
    if is_json():
        to_stderr("warning", "json")


def is_json() -> bool:
    """Return whether this process and its children log JSON."""
    return os.environ.get(VARIABLE) == "json"


def say(message: str, level: str = "info") -> None:
    """A sentence for whoever started the program, whatever its level of logging: `pageturner: ...`,
    or a line of the JSON log."""
    print(line(message, level), file=sys.stderr, flush=True)


def line(message: str, level: str = "info") -> str:
    """Return what `say` prints."""
    if not is_json():
        return f"pageturner: {message}"
    import logging

    number = logging.getLevelNamesMapping()[level.upper()]
    record = logging.LogRecord("pageturner", number, "", 0, message, None, None)
    return _json_formatter().format(record)


def _json_formatter() -> logging.Formatter:
    import json
    import logging
    from datetime import UTC, datetime

    class JSONFormatter(logging.Formatter):
        """One object a line, in ASCII: nothing that is logged can end a line or look like another
        one."""

        def format(self, record: logging.LogRecord) -> str:
            at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
            line: dict[str, Any] = {
                "time": at.removesuffix("+00:00") + "Z",
                "level": record.levelname.lower(),
                "logger": record.name,
                "message": record.getMessage(),
            }
            fields: dict[str, Any] = record.__dict__.get("fields", {})
            line |= {name: value for name, value in fields.items() if name not in OWN}
            if record.exc_info and record.exc_info[0] is not None:
                line["exception"] = self.formatException(record.exc_info)
            return json.dumps(line, default=str)

    return JSONFormatter()


def _log_uncaught(kind: Any, error: Any, trace: Any) -> None:
    import logging

    if issubclass(kind, KeyboardInterrupt):
        return
    logging.getLogger("pageturner").critical("it ends by an error", exc_info=(kind, error, trace))
