"""Calls in a vocabulary whose marks are control tokens, as in Mistral's, gpt-oss' or Gemma's: from the
grammar to what a client gets, through the engine's own compiler and the detokenizer."""

from __future__ import annotations

import json
import random
import re
from functools import partial

import numpy as np
import pytest

from pageturner.formats.tokenizer import Marks, Tokenizer
from pageturner.text import tools
from pageturner.text.answer_format import (
    AnswerFormat,
    control_token,
    control_tokens,
    limits_of,
    marks_of,
    read,
)
from pageturner.text.detokenizer import Detokenizer
from pageturner.text.grammar.compiler import Compiler, Matcher
from pageturner.text.reasoning import reasoning_format
from pageturner.text.tool_formats import FORMATS, tool_format
from pageturner.text.tool_grammar import tool_grammar, with_thoughts

from .test_calls import said

END = 256
PLACE = {
    "properties": {"city": {"type": "string", "maxLength": 4}, "n": {"enum": [1, 22]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": PLACE}},
    {"type": "function", "function": {"name": "wait"}},
]
THINKS = {"harmony": "harmony", "gemma": "gemma", "mistral": "mistral"}


class MarkedCodec:
    """Bytes, an end, and each of these marks as one token."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.marks = ("</s>", *marks)
        self.vocab_size = END + len(self.marks)
        self._split = re.compile("(" + "|".join(map(re.escape, self.marks)) + ")")

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for part in self._split.split(text) if parse_special else [text]:
            ids += [END + self.marks.index(part)] if part in self.marks else list(part.encode())
        return ids

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < END else self.marks[token - END].encode()

    def least_tokens(self, text: str) -> int:
        return 0


def vocabulary(name: str) -> Tokenizer:
    """One in which all marks of a format, and those of its thoughts, are control tokens."""
    codec = MarkedCodec(marks_of(name, THINKS.get(name, "think")))
    special = frozenset(range(END, codec.vocab_size))
    return Tokenizer(codec, Marks(eos_ids=(END,), special_ids=special))


def grammar_of(name: str, asked: str, tokenizer: Tokenizer) -> str:
    choice = tools.read(TOOLS, asked, None)
    grammar = tool_grammar(tool_format(name), choice, lambda mark: control_token(mark, tokenizer))
    thoughts = reasoning_format(THINKS.get(name, "think"))
    if name == "harmony":
        return grammar
    return with_thoughts(grammar, thoughts, False, lambda mark: control_token(mark, tokenizer))


def walk(matcher: Matcher, size: int, draw: random.Random) -> list[int]:
    """Random tokens up to the end. Control tokens are liked: text alone would hardly end."""
    tokens: list[int] = []
    while len(tokens) < 3000:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:size]).tolist()
        assert allowed, bytes(token for token in tokens if token < END)
        marks = [token for token in allowed if token >= END] + [t for t in b'"}])' if t in allowed]
        plain = [token for token in allowed if 32 < token < 127] or allowed
        token = draw.choice(marks if marks and draw.random() < 0.3 else plain)
        if token == END:
            return tokens
        assert matcher.try_consume_tokens([token]) == 1
        tokens.append(token)
    raise AssertionError("no end")


def text_of(tokens: list[int], tokenizer: Tokenizer, shown: tuple[int, ...]) -> str:
    detokenizer = Detokenizer(tokenizer, answer=AnswerFormat(shown=shown))
    return "".join(map(detokenizer.push, tokens)) + detokenizer.finish()


@pytest.mark.parametrize("name", [one.name for one in FORMATS])
def test_marks_that_are_control_tokens(name: str) -> None:
    tokenizer = vocabulary(name)
    thoughts = THINKS.get(name, "think")
    shown = control_tokens(marks_of(name, thoughts), tokenizer)
    assert len(shown) == tokenizer.vocab_size - END - 1
    format = AnswerFormat(tools=name, reasoning=thoughts, shown=shown)
    compile, called = Compiler(lambda: tokenizer), 0
    for asked in ("required", "auto"):
        start = compile(grammar_of(name, asked, tokenizer))
        for seed in range(4):
            tokens = walk(start.deep_copy(), tokenizer.vocab_size, random.Random(seed))
            thought, content, calls = said(read(format, text_of(tokens, tokenizer, shown)))
            called += len(calls)
            assert calls or asked == "auto"
            assert (
                not content or asked == "auto" or name == "harmony"
            )  # which may say something before it
            for tool, arguments in calls:
                given = json.loads(arguments)
                assert (
                    given == {}
                    if tool == "wait"
                    else set(given) <= {"city", "n"} and "city" in given
                )
            whole = text_of(tokens, tokenizer, ())
            assert len(thought) + len(content) <= len(whole), "a mark is in the text"
    assert called >= 4


def test_control_tokens_that_are_no_marks_stay_hidden() -> None:
    tokenizer = Tokenizer(
        MarkedCodec(("<x>", "<y>")), Marks(eos_ids=(END,), special_ids=frozenset((257, 258)))
    )
    assert text_of([97, 257, 258, 98], tokenizer, (258,)) == "a<y>b"
    everything = Detokenizer(tokenizer, skip_special=False, answer=AnswerFormat(shown=(258,)))
    assert "".join(map(everything.push, [97, 257, 258])) == "a<x><y>"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "look'),
        ("mistral", "[TOOL_CALLS]look[ARGS]"),
        ("gemma", "<|tool_call>call:look"),
        ("llama3", ' <|python_tag|>{"name": "look"'),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look"),
    ],
)
def test_a_mark_that_is_a_token_cannot_be_spelled(name: str, text: str) -> None:
    """The parser could not tell it from the token, and behind it there would be no grammar."""
    tokenizer = vocabulary(name)
    start = Compiler(lambda: tokenizer)(grammar_of(name, "auto", tokenizer))
    for free in ("a < b [x", "Hm.</s"):
        assert start.deep_copy().try_consume_tokens(list(free.encode())) == len(free)
    assert start.deep_copy().try_consume_tokens(list(text.encode())) < len(text.encode())


def test_the_end_of_thoughts_cannot_be_spelled() -> None:
    tokenizer = vocabulary("hermes")
    matcher = Compiler(lambda: tokenizer)(grammar_of("hermes", "required", tokenizer))
    begin, text = tokenizer.encode("<think>", add_special=False, parse_special=True), b"Hm </think>"
    assert matcher.try_consume_tokens([*begin, *text]) == len(text)  # all but the last character


def test_thoughts_of_harmony_are_one_message_which_a_budget_ends() -> None:
    tokenizer = vocabulary("harmony")
    begin, end = limits_of(reasoning_format("harmony"), calls=True)
    encode = partial(tokenizer.encode, add_special=False, parse_special=True)
    for asked in ("required", "auto"):
        matcher = Compiler(lambda: tokenizer)(grammar_of("harmony", asked, tokenizer))
        thoughts = encode(begin + "Hm" + end)
        assert matcher.try_consume_tokens(thoughts) == len(thoughts)
        again = encode(begin)
        assert matcher.deep_copy().try_consume_tokens(again) < len(again)
        call = encode("<|channel|>commentary to=functions.wait<|message|>{}")
        assert matcher.try_consume_tokens(call) == len(call)
