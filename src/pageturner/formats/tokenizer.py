"""The interface of every tokenizer, whatever file it came from.

Owns the marks around a text (bos, eos) and the way back from tokens to text. Must not know file
formats; how text becomes tokens is the codec's business (`bpe`, `spm`, `folder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

_ALONE = "\u263a"  # which no vocabulary with a space in front of texts joins with what follows
# ids of a vocabulary; real ones have up to 300,000, more only take memory and time
MAX_TOKENS = 1 << 20
TOOL_USE = "tool_use"  # the name of a chat template for conversations with tools


class Codec(Protocol):
    """One kind of vocabulary. Safe to use from several threads."""

    vocab_size: int

    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Token ids of `text`, in which there are no lone surrogates; nothing is added in front or
        behind."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token of the vocabulary, possibly part of a character."""

    def least_tokens(self, text: str) -> int:
        """`encode` makes at least so many of this text, told without tokenising it; 0 where nothing
        is known of it, because a normalisation may leave out some of it."""


def least(size: int, longest: int) -> int:
    """The least number of tokens for `size` characters, when none writes more than `longest`; 0
    where that is 0."""
    return -(-size // longest) if longest else 0


@dataclass(kw_only=True, eq=False)
class Marks:
    """The tokens around a text, and the templates, that a file names.

    bos_id         beginning of sequence, if the file names one
    eos_ids        tokens that end an answer: end of sequence, of turn, of message
    special_ids    control tokens: left out of text
    add_bos        whether `add_special` puts bos_id in front; `add_eos` likewise the first eos at
                   the end
    space_prefix   whether `encode` puts a space in front of a text (SentencePiece's "dummy prefix")
    chat_template  Jinja source, or None
    named_templates  further chat templates by their names, such as "tool_use"
    rerank_template  a prompt with {query} and {document}, by which a model judges documents; ""
    fim_ids        what a file calls its tokens for filling a gap in a text: "prefix", "suffix",
                   "middle", "pad", "repo", "file"
    architecture, name  of the model, as its files say it, or ""
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    add_bos: bool = False
    add_eos: bool = False
    space_prefix: bool = False
    chat_template: str | None = None
    named_templates: Mapping[str, str] = field(default_factory=dict)
    rerank_template: str = ""
    fim_ids: Mapping[str, int] = field(default_factory=dict)
    architecture: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """A codec, what its own file says about the marks, and how to look up a token by its text."""

    codec: Codec
    marks: Marks
    token_id: Callable[[str], int | None]


class Tokenizer(Marks):
    """Text to token ids and back. Safe to use from several threads. `vocab_size` ids; the rest is
    in `Marks`.

    Tokens continue whatever came before them: `decode`, and any incremental decoding of
    `token_bytes`, keeps the space that opens a word. Only a text that *begins* with these tokens
    has lost nothing when the space that `encode` put in front is taken away again: that is
    `decode_whole`.
    """

    def __init__(self, codec: Codec, marks: Marks) -> None:
        super().__init__(**{mark.name: getattr(marks, mark.name) for mark in fields(Marks)})
        self._codec = codec
        self.vocab_size = codec.vocab_size

    def template_for(self, tools: bool) -> str | None:
        """The source of the chat template for conversations with tools, or without."""
        named = self.named_templates.get(TOOL_USE)
        if tools and named is not None:
            return named
        return self.chat_template

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`. Lone surrogates, which no UTF-8 can hold, count as U+FFFD.

        add_special    add bos/eos where the file asks for them
        parse_special  find control tokens written in the text; otherwise they are ordinary
                       characters
        """
        if not text.isascii():
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        ids = self._codec.encode(text, parse_special)
        if add_special and self.add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_ids:
            ids.append(self.eos_ids[0])
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of a text that stands behind another token, with no special tokens in it:
        without the space that `encode` puts in front of a text."""
        if not self.space_prefix:
            return self.encode(text, add_special=False, parse_special=False)
        begin = self.encode(_ALONE, add_special=False, parse_special=False)
        ids = self.encode(_ALONE + text, add_special=False, parse_special=False)
        if ids[: len(begin)] != begin:  # a vocabulary that merges it with what follows
            return self.encode(text, add_special=False, parse_special=False)
        return ids[len(begin) :]

    def token_of(self, text: str) -> int | None:
        """The one token that is written so, special or not; None where the vocabulary has none."""
        ids = self.encode(text, add_special=False, parse_special=True)
        return ids[0] if len(ids) == 1 and self.token_bytes(ids[0]) == text.encode() else None

    def least_tokens(self, text: str) -> int:
        """`encode` makes at least so many tokens of this text: told by its length, so that a text
        that is far too long need not be tokenised. 0 where that cannot be told."""
        return self._codec.least_tokens(text)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the tokens; bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode(
            "utf-8", "replace"
        )

    def decode_whole(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """`decode` of a whole text, without the space that `encode` puts in front of one."""
        text = self.decode(ids, skip_special)
        return text[1:] if self.space_prefix and text.startswith(" ") else text

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, possibly part of a character. None beyond the vocabulary:
        the rows of a model's output are often padded, and what pads them can be chosen. IndexError
        for a negative id."""
        if token < 0:
            raise IndexError(f"token id {token}")
        return self._codec.token_bytes(token) if token < self.vocab_size else b""

    @property
    def bos_token(self) -> str:
        """Text of bos_id for templates, or ''."""
        return "" if self.bos_id is None else self.text_of(self.bos_id)

    @property
    def eos_token(self) -> str:
        """Text of the first of eos_ids for templates, or ''."""
        return self.text_of(self.eos_ids[0]) if self.eos_ids else ""

    def text_of(self, token: int) -> str:
        """The text of one token on its own, as logprobs show it."""
        return self.token_bytes(token).decode("utf-8", "replace")
