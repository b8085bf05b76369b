"""The answers of gpt-oss: messages on channels, one behind the other, with control tokens between
them.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>the
    answer <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"of": "the
    call"}<|call|>

Owns which text is thoughts, answer or call in this format. Must not know tokens or the shape of an
answer.
"""

from __future__ import annotations

import re
from typing import Literal

from pageturner.text.call_arguments import beginning
from pageturner.text.call_parser import Delta

ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")  # of a message
_RECIPIENT = re.compile(r"\bto=functions\.([A-Za-z0-9_.\-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """`analysis` is thoughts, what goes to a function is a call, everything else is content. Text
    without a mark in front is content."""

    def __init__(self) -> None:
        self._held = ""
        self._head = ""  # of a message; it is read when it is complete
        self._in_head = False
        self._kind: Literal["content", "reasoning", "arguments"] = "content"
        self._pushed = self._ended = 0  # characters; those up to the end of the last thoughts

    @property
    def thoughts_end(self) -> int:
        thinks = self._kind == "reasoning" and not self._in_head
        return self._pushed if thinks else self._ended

    @property
    def held(self) -> int:
        return len(self._held)

    def push(self, text: str) -> list[Delta]:
        found: list[Delta] = []
        self._held += text
        self._pushed += len(text)
        while self._held:
            if not (self._read_head(found) if self._in_head else self._read_body(found)):
                break
        return found

    def finish(self) -> list[Delta]:
        found: list[Delta] = []
        if self._held and not self._in_head:
            found.append(Delta(self._kind, self._held))
        self._held = ""
        return found

    def _read_head(self, found: list[Delta]) -> bool:
        text, mark = self._held, "<|message|>"
        at = text.find(mark)
        if at < 0:
            certain = beginning(text, (mark,))
            self._head, self._held = self._head + text[:certain], text[certain:]
            return False
        head, self._held = self._head + text[:at], text[at + len(mark) :]
        self._head, self._in_head = "", False
        called, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        if called is not None:
            found.append(Delta("call", called[1]))
            self._kind = "arguments"
        elif channel is not None and channel[1] == "analysis":
            self._kind = "reasoning"
        else:
            self._kind = "content"
        return True

    def _read_body(self, found: list[Delta]) -> bool:
        text = self._held
        ends = [(at, mark) for mark in ENDS if (at := text.find(mark)) >= 0]
        at, mark = min(ends, default=(beginning(text, ENDS), ""))
        if at:
            found.append(Delta(self._kind, text[:at]))
        if not mark:
            self._held = text[at:]
            return False
        self._in_head = mark in ("<|start|>", "<|channel|>")
        self._head = mark if self._in_head else ""
        self._held = text[at + len(mark) :]
        if self._kind == "reasoning":
            self._ended = self._pushed - len(self._held)
        self._kind = "content"
        return True
