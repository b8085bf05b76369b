"""The lines of a batch: what each asks, what is wrong with one, and the lines of answers and
errors.

Owns their shape, which is OpenAI's. Must not know how a line is answered, nor where anything is
kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from pageturner.http.receiving import BOM
from pageturner.http.responses import encode
from pageturner.server.api.base.body import NOT_JSON, json_or_none
from pageturner.server.api.batches.batch_journal import NewLine, WaitingLine, crc_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, RESPONSES = "/v1/embeddings", "/v1/responses"
ENDPOINTS = (CHAT, TEXT, EMBEDDINGS, RESPONSES)
LONGEST_ID = 512  # characters of a custom_id
ENVELOPE = 4096  # bytes of a line beside its body
SEED_BITS = 31
PREFIX = "batch_req_"
_LATER = frozenset({"priority"})  # fields that mean nothing here: every line goes last


class BatchLine(msgspec.Struct):
    """One line of an input file."""

    custom_id: str
    url: str
    body: dict[str, msgspec.Raw]
    method: str = "POST"


class _OnlyId(msgspec.Struct):
    custom_id: str


class BadLine(Exception):
    """Why a line cannot be run. custom_id: None where it has no good one."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.custom_id: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """The request that a line makes: a POST of this body."""

    url: str
    body: bytes
    request_id: str


@dataclass(frozen=True, slots=True)
class Answered:
    """The response to a request. retry_after: seconds, 0 if the server gave none."""

    status: int
    body: bytes
    retry_after: float = 0.0


_LINE = msgspec.json.Decoder(BatchLine)


# -- what comes in ---------------------------------------------------------------------------------
def parse_line(raw: bytes, endpoint: str, most: int) -> BatchLine:
    """A line of a batch for this endpoint, or for any where it is "". most: bytes of its body.
    Raises BadLine."""
    if len(raw) > most + ENVELOPE:
        raise BadLine(
            "line_too_long", f"a line may have {most + ENVELOPE} bytes, and this one has more"
        )
    try:
        line = _LINE.decode(raw)
    except NOT_JSON as error:
        bad = BadLine(*_why(raw, error))
        bad.custom_id = custom_id_of(raw)
        raise bad from None
    try:
        _check(line, endpoint)
    except BadLine as bad:
        if bad.param != "custom_id":
            bad.custom_id = line.custom_id
        raise
    return line


def _check(line: BatchLine, endpoint: str) -> None:
    if not 0 < len(line.custom_id) <= LONGEST_ID:
        raise BadLine(
            "invalid_custom_id", f"custom_id has 1 to {LONGEST_ID} characters", "custom_id"
        )
    if line.method != "POST":
        raise BadLine("invalid_method", "method is POST", "method")
    if line.url not in ENDPOINTS or (endpoint and line.url != endpoint):
        allowed = endpoint or ", ".join(ENDPOINTS)
        raise BadLine("invalid_url", f"url is {allowed}, not {line.url[:80]!r}", "url")
    for name in ("stream", "background"):
        if bytes(line.body.get(name, b"false")) not in (b"false", b"null"):
            raise BadLine(
                "unsupported_parameter", f"a line of a batch takes no {name}: leave it out", "body"
            )


def _why(raw: bytes, error: Exception) -> tuple[str, str, str | None]:
    if isinstance(error, msgspec.ValidationError):
        return (
            "invalid_line",
            str(error)[:400],
            str(error).partition(" - at `$.")[2].rstrip("`") or None,
        )
    return "invalid_json_line", f"this line is not valid JSON: {error}"[:400], None


def custom_id_of(raw: bytes) -> str | None:
    """The custom_id of a line that need not be good; None where it has none."""
    line = json_or_none(raw, _OnlyId)
    if line is None:
        return None
    return line.custom_id[:LONGEST_ID]


def question_of(raw: bytes, line: int) -> Question:
    """Return the request of a valid line. A line without a seed gets a seed derived from its text
    and its line number, so that running it again gives the same answer."""
    asked = _LINE.decode(raw)
    digest = hashlib.sha256(b"%d:%s:" % (line, asked.custom_id.encode()) + raw).digest()
    body: dict[str, Any] = {name: value for name, value in asked.body.items() if name not in _LATER}
    if asked.url != EMBEDDINGS and bytes(body.get("seed", b"null")) == b"null":
        body["seed"] = int.from_bytes(digest[:8]) >> (64 - SEED_BITS)
    if asked.url == RESPONSES:
        body.setdefault("store", False)  # nobody comes back for it, and it would push out others
    return Question(asked.url, msgspec.json.encode(body), PREFIX + digest[8:20].hex())


def lines_of(
    file: BinaryIO, position: int, count: int, most: int
) -> Iterator[tuple[int, int, int, bytes]]:
    """The lines of a file from a position on: number, position, size and bytes of each that is not
    empty, without a byte order mark. Of one that is too long to be good, only the beginning is
    held."""
    file.seek(position)
    while raw := file.readline(most + ENVELOPE + 2):
        begin, size = position, len(raw)
        while not raw.endswith(b"\n") and (rest := file.readline(1 << 16)):
            size += len(rest)
            if rest.endswith(b"\n"):
                break
        position, count = position + size, count + 1
        line = raw.removeprefix(BOM)
        mark = len(raw) - len(line)
        if line.strip():
            yield count, begin + mark, size - mark, line


def looked_at(
    found: tuple[int, int, int, bytes], endpoint: str, most: int
) -> tuple[NewLine, dict[str, Any] | None]:
    """Validate a line of `lines_of`. Returns its journal entry, and the error if it is invalid."""
    number, position, size, raw = found
    try:
        line = parse_line(raw, endpoint, most)
    except BadLine as bad:
        return _bad(NewLine(number, bad.custom_id, position, size, 0), bad)
    return NewLine(number, line.custom_id, position, size, crc_of(raw)), None


def twice(line: NewLine) -> tuple[NewLine, dict[str, Any]]:
    """Return the line as invalid: an earlier line has the same custom_id."""
    message = (
        f"custom_id {(line.custom_id or '')[:80]!r} is that of another line: it must be there once"
    )
    bad, problem = _bad(line, BadLine("duplicate_custom_id", message, "custom_id"))
    assert problem is not None
    return bad, problem


def _bad(line: NewLine, bad: BadLine) -> tuple[NewLine, dict[str, Any] | None]:
    problem = {"code": bad.code, "message": bad.message, "param": bad.param, "line": line.line}
    text = b"bad %d" % line.line
    answer = _error_line(text, line.custom_id, bad.code, f"line {line.line}: {bad.message}")
    return NewLine(line.line, None, line.position, line.size, 0, answer), problem


# -- what goes out ---------------------------------------------------------------------------------
def answer_line(custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """The line of an answer, or of a refusal with the body that its client would have got."""
    response = {"status_code": status, "request_id": request_id, "body": _json_of(body)}
    return encode({"id": request_id, "custom_id": custom_id, "response": response, "error": None})


def _error_line(text: bytes, custom_id: str | None, code: str, message: str) -> bytes:
    """The line of an error. text: its id follows from it."""
    id = PREFIX + hashlib.sha256(text).hexdigest()[:24]
    error = {"code": code, "message": message}
    return encode({"id": id, "custom_id": custom_id, "response": None, "error": error})


def unanswered_line(waiting: WaitingLine, code: str, message: str) -> bytes:
    """The line of one that was not run."""
    text = b"%d:%s" % (waiting.line, waiting.custom_id.encode())
    return _error_line(text, waiting.custom_id, code, message)


def retry_after_of(headers: Iterable[tuple[bytes, bytes]]) -> float:
    """The seconds that the headers of a response say; 0 where they say none."""
    told = dict(headers).get(b"retry-after", b"")
    return float(told) if told.isdigit() else 0.0


def tokens_of(body: bytes) -> tuple[int, int]:
    """Input and output tokens that an answer says it took."""
    usage = (json_or_none(body, _WithUsage) or _WithUsage()).usage
    return usage.prompt_tokens or usage.input_tokens, usage.completion_tokens or usage.output_tokens


class _Tokens(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _WithUsage(msgspec.Struct):
    usage: _Tokens = msgspec.field(default_factory=_Tokens)


def _json_of(body: bytes) -> Any:
    """A body as part of another one: as it is where it is JSON in one line, else as text."""
    try:
        decoded = msgspec.json.decode(body)
    except NOT_JSON:
        return body.decode("utf-8", "replace")
    return msgspec.Raw(body) if b"\n" not in body else decoded
