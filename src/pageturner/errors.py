"""The two kinds of error a user can meet. Standard library only, imported by every room."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator

LONGEST = 2000  # characters of a fault's message: it may quote a file that anyone may have written


class ClientError(Exception):
    """Something the caller can mend. `status` is for HTTP, `code` is stable, the message says what
    to do. retry_after: seconds after which it may be asked again, if that is known."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after = retry_after


class EngineFault(Exception):
    """The engine cannot start or go on: no model, no memory, a broken file. The message says what
    to do."""

    def __init__(self, code: str, message: str) -> None:
        message = one_line(message)
        super().__init__(message)
        self.code = code
        self.message = message


def lacks_memory(error: BaseException) -> bool:
    """True of what is raised where there is no memory: a thread without a stack is a RuntimeError,
    a refused mapping or process an OSError."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "can't start new thread" in str(error)


def bad_setting(message: str) -> EngineFault:
    """Return the fault for a setting that cannot be meant: in a flag, a configuration file or
    another file that the user wrote."""
    return EngineFault("bad_setting", message)


def pip_install(extra: str) -> str:
    """The command that brings an optional part into this very installation."""
    return f"{sys.executable} -m pip install 'pageturner[{extra}]'"


def one_line(text: str) -> str:
    """Return the text in a form that a terminal, a log and the channel between the processes can
    take: no control characters, no lone surrogates, and of a long text only its beginning and its
    end."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 500]} ... {text[-490:]}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Faults raised within say which model they are about, if they do not already."""
    try:
        yield
    except EngineFault as fault:
        if os.fspath(path) in fault.message:
            raise
        raise EngineFault(fault.code, f"{os.fspath(path)}: {fault.message}") from fault


@contextlib.contextmanager
def refusing(as_error: Callable[[str], Exception]) -> Iterator[None]:
    """Turn whatever a library raises inside this context into an error of ours: bare Exceptions,
    and the panics of libraries written in Rust, which are not Exceptions and whose class is not
    exported. A lack of memory stays what it is."""
    try:
        yield
    except BaseException as error:
        if lacks_memory(error):
            raise
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise as_error(str(error)) from error
        raise
