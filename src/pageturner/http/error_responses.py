"""The form of errors over HTTP: status, body and headers.

Owns the shapes of error bodies, which are told apart by the beginning of a path, and the status of
the engine's own failures. Must not know what can be wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from pageturner.errors import ClientError, lacks_memory
from pageturner.http.memory_reserve import OUT_OF_MEMORY, out_of_memory
from pageturner.http.responses import encode
from pageturner.request import Failure

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "PayloadTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# of the engine's failures; all others are a 500. A passed deadline is a 504, as gateways translate
# gRPC's DEADLINE_EXCEEDED: not the client's mistake (408 would say that it was slow to ask), nor to
# be tried elsewhere, as a 503 is
STATUS = {
    "queue_full": 429,
    "ttft_target_unreachable": 429,
    "deadline_unreachable": 429,
    "deadline_exceeded": 504,
    "empty_prompt": 400,
    "prompt_too_long": 400,
    "kv_too_small": 400,
    "nothing_to_generate": 400,
    "nothing_allowed": 400,
    "invalid_value": 400,
    "invalid_grammar": 400,
    "grammar_too_long": 400,
    "grammar_too_expensive": 400,
    "too_many_beams": 400,
    "structured_outputs_unsupported": 400,
    "adapter_not_found": 404,
    "adapter_missing": 404,
    "adapter_changed": 409,
    "adapter_memory": 503,
    "n_unsupported": 400,
    "engine_gave_up": 503,
    "engine_unavailable": 503,
    "device_unavailable": 503,
    "shutting_down": 503,
    OUT_OF_MEMORY: 503,
}

ErrorHandler = Callable[[HTTPRequest, Exception], Awaitable[Response]]


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
    return encode(
        {
            "error": {
                "message": message,
                "type": kind,
                "param": param,
                "code": status,
                "reason": reason,
            }
        }
    )


def ollama_error(status: int, reason: str, message: str, param: str | None = None) -> bytes:
    """Ollama's: nothing but the sentence."""
    return encode({"error": message, "reason": reason})


def anthropic_error(status: int, reason: str, message: str, param: str | None = None) -> bytes:
    """Anthropic's: their kinds of errors, and our own stable `reason`."""
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
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


def unforeseen(error: BaseException | None = None) -> ClientError:
    """Return what a client is told of an unexpected error: that it may ask again, if only memory
    was lacking."""
    if error is not None and lacks_memory(error):
        return out_of_memory()
    return ClientError(500, "internal_error", "something went wrong inside the server")


def error_handlers(
    not_found: str | Callable[[str], str],
    retry_after: Callable[[ClientError], int | None],
    rejected: Counter[str],
    refuse: Callable[[str], None] = lambda _: None,
) -> dict[Any, ErrorHandler]:
    """Return how an application answers errors: its own, and those of the web framework.

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
        wait = retry_after(client)
        if wait is not None:
            headers["retry-after"] = str(wait)
            rejected[client.code] += 1
        content = error_body_of(request.scope["path"], client)
        return Response(content, client.status, headers, "application/json")

    # Starlette raises what it has an `Exception` for once more, and the request log names it
    return dict.fromkeys((ClientError, HTTPException, MemoryError, Exception), answer)
