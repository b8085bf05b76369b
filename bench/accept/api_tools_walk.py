"""Calls without a model: random tokens of SmolLM2's vocabulary that a grammar allows.

Owns the walks: whatever the logits are, a call that has begun is one that the parser reads, of a tool that is
there, with arguments that are JSON and fit. In half of the texts the marks of the format are control tokens.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from api_tools_cases import Draw, Family, Json, vocabulary_with

from pageturner.executor.grammar import Compiler, GrammarError, Matcher
from pageturner.formats.tokenizer import Tokenizer
from pageturner.text import tools
from pageturner.text.answer_format import AnswerFormat, control_token, control_tokens, read
from pageturner.text.detokenizer import Detokenizer
from pageturner.text.tool_formats import JSON, tool_format
from pageturner.text.tool_grammar import tool_grammar

MOST_TOKENS = 300
TEXTS_PER_TOOLS = 8
ALONE = 0.2  # of the texts: nothing begins a call for them


class Walks:
    """Texts in one format, and what is wrong with them.

    asked  "auto", "required" or "named"
    rows   what is to be judged: the schema of a tool and the arguments of a call
    begun, cut, plain   calls that have begun; texts that came to no end; texts without a call
    """

    def __init__(self, name: str, seed: int, asked: str = "auto") -> None:
        self.format, self.dice = tool_format(name), random.Random(f"{seed} {name} {asked}")
        self.asked = asked
        self.rows: list[Json] = []
        self.wrong: list[str] = []
        self.begun = self.cut = self.plain = 0
        self._family = Family(name, "", name, identifiers=self.format.arguments != JSON)
        self._seed = seed

    def run(self, texts: int) -> None:
        """Make so many texts."""
        with tempfile.TemporaryDirectory() as folder:
            vocabularies = [
                vocabulary_with(marks, Path(folder)) for marks in ((), self.format.marks)
            ]
        compilers = [Compiler(lambda one=one: one) for one in vocabularies]
        for i in range(0, texts, TEXTS_PER_TOOLS):
            which = i // TEXTS_PER_TOOLS % 2
            tokenizer, drawn = (
                vocabularies[which],
                Draw(f"{self._seed} walk {i}", self._family).tools(),
            )
            asked: Any = self.asked
            if asked == "named":
                drawn = drawn[:1]
                asked = {"type": "function", "function": {"name": drawn[0]["function"]["name"]}}
            choice = tools.read(drawn, asked, self.dice.choice([None, False]))
            grammar = tool_grammar(
                self.format, choice, lambda mark, t=tokenizer: control_token(mark, t)
            )
            start = compilers[which](grammar)
            for _ in range(min(TEXTS_PER_TOOLS, texts - i)):
                self._one(start.deep_copy(), tokenizer, drawn)

    def _one(self, matcher: Matcher, tokenizer: Tokenizer, drawn: list[Json]) -> None:
        alone, tokens = self.asked == "auto" and self.dice.random() < ALONE, list[int]()
        if not alone and (self.asked == "auto" or not self.format.calls):
            if not self.format.at_start and self.format.calls:
                tokens += self._free(matcher, tokenizer, self.dice.randrange(6))
            text = self._begin(self.dice.choice(drawn)["function"]["name"])
            begin = tokenizer.encode(text, add_special=False, parse_special=True)
            if matcher.try_consume_tokens(begin) != len(begin):
                self.wrong.append(
                    f"the mark cannot begin behind {tokenizer.decode(tokens)!r}: {text!r}"
                )
                return
            tokens += begin
        ended = self._walk(matcher, tokenizer, tokens, 40 if alone else MOST_TOKENS)
        self._look(tokens, tokenizer, drawn, ended, alone)

    def _begin(self, name: str) -> str:
        """What begins a call, up to the name of its tool, or with it where only that makes it a call."""
        if not self.format.calls:
            return "<|channel|>commentary to=functions."
        head, _, behind = (
            (self.format.opening + self.format.calls[0]).replace(" ", "").partition("$NAME")
        )
        return f"{head}{name}{behind[:1]}" if self.format.at_start else head

    def _free(self, matcher: Matcher, tokenizer: Tokenizer, count: int) -> list[int]:
        """So many tokens of content, up to the first one with half a character at its end."""
        tokens: list[int] = []
        for _ in range(count):
            token = self._draw(matcher.deep_copy(), tokenizer)
            if token is None or not _is_text(tokenizer.token_bytes(token)):
                break
            matcher.try_consume_tokens([token])
            tokens.append(token)
        return tokens

    def _draw(self, matcher: Matcher, tokenizer: Tokenizer) -> int | None:
        """One token more, at random; None: the answer ends."""
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: tokenizer.vocab_size])
        ends = [token for token in tokenizer.eos_ids if token < len(bits) and bits[token]]
        others = allowed[~np.isin(allowed, tokenizer.eos_ids)]
        if not len(others) or (ends and self.dice.random() < 0.02):
            return None
        token = int(others[self.dice.randrange(len(others))])
        if matcher.try_consume_tokens([token]) != 1:
            raise GrammarError(f"token {token} was allowed and is not taken")
        return token

    def _walk(self, matcher: Matcher, tokenizer: Tokenizer, tokens: list[int], most: int) -> bool:
        """More tokens behind these; whether the answer has come to its end."""
        while len(tokens) < most:
            token = self._draw(matcher, tokenizer)
            if token is None:
                return True
            tokens.append(token)
        return False

    def _look(
        self, tokens: list[int], tokenizer: Tokenizer, drawn: list[Json], ended: bool, alone: bool
    ) -> None:
        shown = control_tokens(self.format.marks, tokenizer)
        detokenizer = Detokenizer(tokenizer, shown=shown)
        text = "".join(map(detokenizer.push, tokens)) + detokenizer.finish()
        content, calls = "", list[list[str]]()
        for kind, said in read(AnswerFormat(tools=self.format.name, shown=shown), text):
            if kind == "call":
                calls.append([said, ""])
            elif kind == "arguments":
                calls[-1][1] += said
            else:
                content += said
        self.begun, self.cut = self.begun + len(calls), self.cut + (not ended)
        if self.asked != "auto" and self.format.calls and ended and content:
            self.wrong.append(f"not a call alone: {text!r}")
        if not calls and self.format.calls and self.asked == "auto":
            self.plain += 1
            if content != text:
                self.wrong.append(f"text lost: {text!r} {content!r}")
        if ended and not calls and not alone:
            self.wrong.append(f"no call: {text!r}")
        parameters = {
            tool["function"]["name"]: tool["function"].get("parameters") for tool in drawn
        }
        for i, (name, arguments) in enumerate(calls):
            whole: Any = _whole(arguments)
            if whole is None and (ended or i + 1 < len(calls)):
                self.wrong.append(f"malformed: {text!r}")
            elif whole is not None:
                schema = parameters.get(name, False) or {"type": "object", "maxProperties": 0}
                self.rows.append(
                    {"schema": schema if name in parameters else False, "value": whole}
                )


def _is_text(raw: bytes) -> bool:
    try:
        return bool(raw.decode())
    except UnicodeDecodeError:
        return False


def _whole(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None
