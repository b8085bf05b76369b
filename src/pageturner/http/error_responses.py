"""The form of errors over HTTP: status, body and headers.

Owns the shapes of error bodies, which are told apart by the beginning of a path, and the status of
the engine's own failures. Must not know what can be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import BaseRoute

from pageturner.errors import ClientError, lacks_memory
from pageturner.http.memory_reserve import out_of_memory
from pageturner.http.responses import encode
from pageturner.request import Failure


class _Tables(msgspec.Struct):
    """The names that vLLM and Anthropic have for the errors of a status, and the status of the
    engine's failures; all others are a 500. A passed deadline is a 504, as gateways translate
    gRPC's DEADLINE_EXCEEDED: not the client's mistake (408 would say that it was slow to ask), nor
    to be tried elsewhere, as a 503 is."""

    types: dict[int, str]
    anthropic_types: dict[int, str]
    status: dict[str, int]


_TABLES = msgspec.json.decode(Path(__file__).with_name("errors.json").read_bytes(), type=_Tables)
TYPES = _TABLES.types
STATUS = _TABLES.status


def error_of(failure: Failure) -> ClientError:
    """Return the HTTP error for a failure of the engine."""
    status = STATUS.get(failure.code, 500)
    return ClientError(status, failure.code, failure.message, retry_after=failure.retry_after)


def was_turned_away(failure: Failure) -> bool:
    """Return whether the request was not even begun, for want of room or time."""
    return STATUS.get(failure.code) == 429


def error_body(status: int, reason: str, message: str, param: str | None = None) -> bytes:
    """vLLM's error body (`code` is the status), and our own stable `reason`."""
    kind = TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    error = {"message": message, "type": kind, "param": param, "code": status, "reason": reason}
    return encode({"error": error})


def ollama_error(status: int, reason: str, message: str, param: str | None = None) -> bytes:
    """Ollama's: nothing but the sentence."""
    return encode({"error": message, "reason": reason})


def anthropic_error(status: int, reason: str, message: str, param: str | None = None) -> bytes:
    """Anthropic's: their kinds of errors, and our own stable `reason`."""
    kind = _TABLES.anthropic_types.get(
        status, "api_error" if status >= 500 else "invalid_request_error"
    )
    error = {"type": kind, "message": message, "param": param, "reason": reason}
    return encode({"type": "error", "error": error})


SHAPES = (
    ("/v1/messages", anthropic_error),
    ("/api/", ollama_error),
)  # beginning of a path -> its errors


def error_body_of(path: str, error: ClientError) -> bytes:
    """The body of an error in the shape of the API that is asked under this path."""
    shape = next((shape for begin, shape in SHAPES if path.startswith(begin)), error_body)
    return shape(error.status, error.code, error.message, error.param)


def error_response(
    path: str, error: ClientError, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error as the answer to what is asked under this path."""
    content = error_body_of(path, error)
    return Response(content, error.status, headers, "application/json")


def unforeseen(error: BaseException | None = None) -> ClientError:
    """Return what a client is told of an unexpected error: that it may ask again, if only memory
    was lacking."""
    if error is not None and lacks_memory(error):
        return out_of_memory()
    return ClientError(500, "internal_error", "something went wrong inside the server")


def application(
    routes: Sequence[BaseRoute],
    not_found: str | Callable[[str], str],
    retry_after: Callable[[ClientError], int | None],
    rejected: Counter[str],
    refuse: Callable[[str], None] = lambda _: None,
) -> Starlette:
    """Return the application of these routes, which answers errors in our form: its own, and those
    of the web framework.

    not_found    what is said of a path that is not there, or makes that from the path
    retry_after  whole seconds after which a refused request may be sent again; None: it is no such
                 refusal
    rejected     counts those that may, by code
    refuse       is told the code of every refusal
    """

    async def answer(request: HTTPRequest, error: Exception) -> Response:
        headers: dict[str, str] = {}
        if isinstance(error, HTTPException):
            message = str(error.detail)
            if error.status_code == 404:
                message = (
                    not_found if isinstance(not_found, str) else not_found(request.scope["path"])
                )
            code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
            client = ClientError(error.status_code, code, message)
            headers.update(error.headers or {})
        elif isinstance(error, ClientError):
            client = error
        else:
            client = unforeseen(error)
        refuse(client.code)
        if "pageturner" in request.scope:
            request.scope["pageturner"].about["error"] = client.code
        wait = retry_after(client)
        if wait is not None:
            headers["retry-after"] = str(wait)
            rejected[client.code] += 1
        return error_response(request.scope["path"], client, headers)

    # Starlette raises what it has an `Exception` for once more, and the request log names it
    handlers = dict.fromkeys((ClientError, HTTPException, MemoryError, Exception), answer)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to an address that a proxy in front need not have
    return app
