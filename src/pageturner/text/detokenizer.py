"""Text and tokens: chat templates, and turning a stream of tokens back into text, stop strings included.

Owns every decision about characters: which bytes are ready to be shown, where a stop string cuts. Must not
know HTTP, requests or processes; llm.py uses it just as the server does.
"""

from __future__ import annotations

import codecs
import datetime
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

from pageturner.errors import ClientError


class Tokenizer(Protocol):
    """What the server needs of a tokenizer (`pageturner.files.load_tokenizer` has the real one)."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    chat_template: str | None

    @property
    def special_ids(self) -> Collection[int]:
        """Ids of control tokens, which `skip_special_tokens` leaves out of the text."""

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids; `add_special` adds what the model wants in front, `parse_special` reads controls."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for."""

    def decode_whole(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of tokens that are a whole text, without the space that SentencePiece begins one with."""

    @property
    def bos_token(self) -> str:
        """BOS as text, "" without one."""

    @property
    def eos_token(self) -> str:
        """EOS as text, "" without one."""


class Detokenizer:
    """Tokens in, text out, one token at a time.

    What `push` and `finish` return, joined, is the decoding of all tokens at once, cut at the first stop
    string. No half character is ever shown, and nothing that a stop string could still take back. The stop
    string that ends first wins; of those that end together the longest. Text within the first `min_tokens`
    tokens cannot stop anything.

    stopped   the stop string that ended the text, or None
    decoded   characters decoded so far, those that are still held back included
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        skip_special: bool = True,
        include_stop: bool = False,
    ) -> None:
        self.stopped: str | None = None
        self.decoded = 0
        self._token_bytes = tokenizer.token_bytes
        self._skip: Collection[int] = tokenizer.special_ids if skip_special else ()
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._exempt = min_tokens if self._stop else 0
        self._include_stop = include_stop
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, token: int) -> str:
        """The text that is certain now that `token` is known. Empty once `stopped`."""
        if self.stopped is not None:
            return ""
        text = "" if token in self._skip else self._utf8.decode(self._token_bytes(token))
        self.decoded += len(text)
        if not self._stop:
            return text
        if self._exempt > 0:
            self._exempt -= 1
            return text
        return self._decide(text)

    def finish(self) -> str:
        """What was held back, when no more tokens come. A broken last character becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._utf8.decode(b"", True)
        self.decoded += len(text)
        text = self._decide(text) if self._stop and text else text
        text, self._held = (text, "") if self.stopped is not None else (text + self._held, "")
        return text

    def _decide(self, new: str) -> str:
        """Cut at a stop string, or hold back the longest end that may become one."""
        text = self._held + new
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.stopped = min(found)
            self._held = ""
            return text[: end if self._include_stop else start]
        size = next(
            (n for n in range(min(len(text), self._longest - 1), 0, -1) if self._may_begin(text[-n:])), 0
        )
        self._held = text[len(text) - size :]
        return text[: len(text) - size]

    def _may_begin(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stop)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token on its own, as logprobs show it."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def decode_tokens(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """The text of tokens, control tokens included."""
    return b"".join(map(tokenizer.token_bytes, tokens)).decode("utf-8", "replace")


def prompt_offsets(tokenizer: Tokenizer, tokens: Iterable[int], text: str) -> list[int]:
    """Where in the text of a prompt each of its tokens begins. A token that the tokenizer put in front, such
    as BOS, is not in the text and begins at 0."""
    utf8, offsets, end = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for token in tokens:
        offsets.append(end)
        end += len(utf8.decode(tokenizer.token_bytes(token)))
    end += len(utf8.decode(b"", True))
    return [max(offset - (end - len(text)), 0) for offset in offsets]


class ChatTemplate:
    """A model's own chat template, in a sandbox: it comes out of a file that anyone may have written.

    broken  "" or what is wrong with its source; such a template refuses every conversation
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        import jinja2
        from jinja2 import ext, nodes, sandbox

        class Generation(ext.Extension):
            """`{% generation %}` marks what an assistant said, for training; here it changes nothing."""

            tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body).set_lineno(line)

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._errors = (
            jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
            RecursionError,
        )  # fmt: skip
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._template, self.broken = None, ""
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            self.broken = f"the model's chat template cannot be read{line}: {error}"

    def render(self, messages: Sequence[dict[str, Any]], *, generate: bool = True, **variables: Any) -> str:
        """The prompt of a conversation. ClientError when the template will not take it."""
        if self._template is None:
            raise ClientError(400, "template_error", self.broken, "messages")
        given = {"tools": None, "documents": None, **self._tokens, **variables}
        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=generate, **given)
        except self._errors as error:
            reason = f"the model's chat template refuses these messages: {error}"
            raise ClientError(400, "template_error", reason, "messages") from error
        return text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escaping, as templates expect it (jinja2's own filter escapes)."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
