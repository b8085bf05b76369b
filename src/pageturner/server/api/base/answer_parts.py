"""An answer as parts one behind the other, for shapes that have them: thoughts, text, calls of
tools.

Owns where a part begins and ends, and the ids of calls. Must not know how parts
are found in the text (text/answer_format.py), nor how any shape writes them.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import msgspec

from pageturner.server.api.base.replies import Reply
from pageturner.server.api.base.whole_answer import WholeAnswer
from pageturner.text.answer_format import HARMONY, AnswerFormat, AnswerReader
from pageturner.text.output_stream import OutputPiece, OutputStream
from pageturner.text.tool_formats import tool_format

PartKind = Literal["content", "reasoning", "call"]
CONTENT: Final = "content"
REASONING: Final = "reasoning"
CALL: Final = "call"


@dataclass(slots=True)
class AnswerPart:
    """One part. `text` of a call: its arguments, as JSON.

    index  its place among all parts
    call   how many calls stand before it
    name   of the tool that is called
    """

    kind: PartKind
    index: int
    call: int = 0
    name: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class PartEvent(NamedTuple):
    """A change to one part of an answer: it begins, gets more text, or ends."""

    kind: Literal["begin", "more", "end"]
    part: AnswerPart
    text: str = ""


class AnswerParts:
    """The parts of one choice, as far as they are known."""

    def __init__(self) -> None:
        self.parts: list[AnswerPart] = []
        self._open = False

    @property
    def calls(self) -> int:
        return sum(part.kind == CALL for part in self.parts)

    def of_kind(self, kind: str) -> list[AnswerPart]:
        return [part for part in self.parts if part.kind == kind]

    def text(self, kind: str) -> str:
        """The text of all parts of this kind."""
        return "".join(part.text for part in self.of_kind(kind))

    def begin(self, kind: PartKind, name: str = "") -> PartEvent:
        """A part that begins, whatever its text will be."""
        self.parts.append(AnswerPart(kind, len(self.parts), self.calls, name))
        self._open = True
        return PartEvent("begin", self.parts[-1])

    def read(
        self, reader: AnswerReader, text: str, last: bool, finish: str | None
    ) -> list[PartEvent]:
        """Return the events that the next characters of the answer cause. An answer without any
        output is one empty text part. finish: why it ended."""
        found: list[PartEvent] = []
        for delta in reader.read(text, last, finish != "stop"):
            kind: PartKind = CALL if delta.kind == "arguments" else delta.kind
            if delta.kind == CALL or not self._open or self.parts[-1].kind != kind:
                found += self._end()
                found.append(self.begin(kind, delta.text if delta.kind == CALL else ""))
            if delta.kind != CALL and delta.text:
                self.parts[-1].texts.append(delta.text)
                found.append(PartEvent("more", self.parts[-1], delta.text))
        if last:
            found += [] if self.parts else [self.begin(CONTENT)]
            found += self._end()
        return found

    def _end(self) -> list[PartEvent]:
        if not self._open:
            return []
        self._open = False
        return [PartEvent("end", self.parts[-1])]


def parts_of(reply: Reply, stream: OutputStream, answer: WholeAnswer) -> AnswerParts:
    """The parts of one choice of a whole answer."""
    parts, reader = AnswerParts(), reader_of(reply, stream)
    reader.note(*answer.offsets[stream.choice])
    parts.read(reader, answer.texts[stream.choice], True, stream.finish)
    return parts


def read_piece(reply: Reply, parts: AnswerParts, piece: OutputPiece) -> list[PartEvent]:
    """Return the events that the next piece of a streamed answer causes."""
    reader = reader_of(reply, piece.stream)
    note_token(reader, piece)
    last = piece.last and piece.stream.failure is None
    return parts.read(reader, piece.text, last, piece.stream.finish)


def note_token(reader: AnswerReader, piece: OutputPiece) -> None:
    """Have the token of a piece counted."""
    if piece.token is not None:
        reader.note(piece.offset)


def reader_of(reply: Reply, stream: OutputStream) -> AnswerReader:
    """Return the reader that parses the text of this choice, creating it on first use."""
    reader = reply.readers.get(stream.choice)
    if reader is None:
        reader = reply.readers[stream.choice] = AnswerReader(reply.call.answer or AnswerFormat())
    return reader


def call_id(reply: Reply, choice: int, index: int, prefix: str = "call_") -> str:
    """The id of a call. It follows from its place, so that it is the same however often the answer
    is written."""
    place = f"{reply.id} {choice} {index}".encode()
    digest = hashlib.blake2b(place, digest_size=12).hexdigest()
    answer = reply.call.answer
    length = (
        tool_format(answer.tools).id_length if answer and answer.tools not in ("", HARMONY) else 0
    )
    return digest[:length] if length else f"{prefix}{digest}"


def json_object(text: str) -> msgspec.Raw | None:
    """The arguments of a call as they were written. None where they are no JSON object, because the
    answer was cut off within them."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return msgspec.Raw(text.encode("utf-8", "replace")) if isinstance(value, dict) else None
