"""The tokenizer that a GGUF file carries: text to token ids and back, exact.

Owns which pre-tokenizers are known and what counts as special. Must not know requests, templates or sampling.

Special tokens are found in text only where the caller asks for it (`parse_special`). Rendered templates need
it, and raw prompts of /v1/completions get it in vLLM and in llama-server, so callers should ask for both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence

from pageturner.errors import EngineFault
from pageturner.files.gguf import GGUFFile, open_gguf

# One text at a time needs no thread pool, and the library warns when a process that has one forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF: found only when asked for; found always
_KEY = "tokenizer.ggml."


def _smollm() -> PreTokenizer:
    """llama.cpp's `smollm`: every digit alone (any \\p{N}), then the GPT-2 split of what lies between."""
    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {"smollm": _smollm}


def _alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's alphabet: printable Latin-1 is itself, the rest moves to U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}


_BYTES = _alphabet()


class Tokenizer:
    """Byte-level BPE. Safe to use from several threads.

    vocab_size     number of token ids
    bos_id         beginning of sequence, if the file names one
    eos_ids        tokens that end an answer: end of sequence, of turn, of message, as the file names them
    special_ids    control tokens: left out of text
    add_bos        whether `add_special` puts bos_id in front; `add_eos` likewise at the end
    chat_template  Jinja source, or None
    """

    def __init__(self, file: GGUFFile) -> None:
        """EngineFault 'tokenizer_unsupported' for another kind, 'tokenizer_corrupt' for bad tables."""
        _check_kind(file)
        self._tokens = file.array(_KEY + "tokens").strings()
        self.vocab_size = len(self._tokens)
        types = file.array(_KEY + "token_type").tolist()
        if len(types) != self.vocab_size:
            raise EngineFault("tokenizer_corrupt", "the model file has not one type for each token")
        control = [i for i, kind in enumerate(types) if kind == _CONTROL]
        defined = [i for i, kind in enumerate(types) if kind == _USER_DEFINED]
        self.special_ids = frozenset(control)
        self._literal = frozenset(control) | frozenset(defined)  # these are text, not byte-level
        model = self._build_model(file.array(_KEY + "merges").strings())
        split = PRE_TOKENIZERS[file.get(_KEY + "pre", str)]()
        self._plain = self._build(model, split, defined)
        self._parsing = self._build(model, split, [*control, *defined])
        self.bos_id = self._id(file, "bos_token_id")
        ends = (self._id(file, name) for name in ("eos_token_id", "eot_token_id", "eom_token_id"))
        self.eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
        self.add_bos = file.get(_KEY + "add_bos_token", bool, False)
        self.add_eos = file.get(_KEY + "add_eos_token", bool, False)
        self.chat_template = file.get("tokenizer.chat_template", str, "") or None

    def _build_model(self, lines: list[str]) -> BPE:
        vocab = {token: i for i, token in enumerate(self._tokens)}
        # A byte without a token is dropped, but its neighbours must not merge across it (as in llama.cpp; the
        # library would drop it first): it gets an id behind the vocabulary, which `encode` takes out again.
        homeless = [character for character in _BYTES if character not in vocab]
        vocab |= {character: self.vocab_size + i for i, character in enumerate(homeless)}
        try:
            merges = [(left, right) for left, right in (line.split(" ") for line in lines)]
            return BPE(vocab, merges)
        except Exception as error:  # the library raises bare Exception
            raise EngineFault(
                "tokenizer_corrupt", f"the tokenizer in the model file is broken: {error}"
            ) from error

    def _build(self, model: BPE, split: PreTokenizer, added: list[int]) -> Backend:
        backend = Backend(model)
        backend.pre_tokenizer = split
        texts = [self._tokens[i] for i in added if self._tokens[i]]
        backend.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
        return backend

    def _id(self, file: GGUFFile, name: str) -> int | None:
        token = file.get(_KEY + name, int, -1)
        if token >= self.vocab_size:
            raise EngineFault("tokenizer_corrupt", f"{_KEY}{name} is {token}, beyond the vocabulary")
        return token if token >= 0 else None

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`. Lone surrogates, which no UTF-8 can hold, count as U+FFFD.

        add_special    add bos/eos where the file asks for them
        parse_special  find control tokens written in the text; otherwise they are ordinary characters
        """
        backend = self._parsing if parse_special else self._plain
        if not text.isascii():
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        # A batch of one: the "fast" call leaves out the offsets and lets other threads run meanwhile.
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if max(ids, default=0) >= self.vocab_size:
            ids = [i for i in ids if i < self.vocab_size]
        if add_special and self.add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if add_special and self.add_eos and self.eos_ids:
            ids.append(self.eos_ids[0])
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the tokens; bytes that are no UTF-8 become U+FFFD. IndexError beyond the vocabulary."""
        skipped = self.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, possibly part of a character. IndexError beyond the vocabulary."""
        if token < 0:
            raise IndexError(f"token id {token}")
        text = self._tokens[token]
        if token in self._literal:
            return text.encode()
        try:
            return bytes([_BYTES[character] for character in text])
        except KeyError:  # a stray token outside the byte-level alphabet
            return text.encode()

    @property
    def bos_token(self) -> str:
        """Text of bos_id for templates, or ''."""
        return "" if self.bos_id is None else self._tokens[self.bos_id]

    @property
    def eos_token(self) -> str:
        """Text of the first of eos_ids for templates, or ''."""
        return self._tokens[self.eos_ids[0]] if self.eos_ids else ""


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a GGUF file. EngineFault if the file or its tokenizer cannot be used."""
    return Tokenizer(open_gguf(path))


def _check_kind(file: GGUFFile) -> None:
    kind, pre = file.get(_KEY + "model", str), file.get(_KEY + "pre", str, "default")
    if kind != "gpt2":
        message = f"tokenizer model {kind!r} is not supported; only byte-level BPE ('gpt2') is"
        raise EngineFault("tokenizer_unsupported", message)
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise EngineFault("tokenizer_unsupported", f"pre-tokenizer {pre!r} is not supported; known: {known}")
