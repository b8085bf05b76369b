"""tokenizer.json, the format of the `tokenizers` library: the library encodes, the bytes of tokens
are ours.

Owns what a decoder of that format means for the bytes of one token. Must not know what else the
folder holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from pageturner.errors import ClientError, EngineFault, refusing
from pageturner.formats.bpe import BYTES, byte_level_bytes
from pageturner.formats.hf_config import read_bounded
from pageturner.formats.sentencepiece import SPACE
from pageturner.formats.tokenizer import MAX_TOKENS, Found, Marks, least
from pageturner.formats.tokenizer_rules import check_rules

MAX_BYTES = 256 << 20  # of the file; those of vocabularies of 260,000 tokens have 35 MB
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_COMPOSING = ("NFC", "NFKC")
_KEEPING = ("NFD", "NFKD", "Prepend", "Lowercase")  # normalisations that leave no character out
_SPLITTING = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
MAX_COMPOSED = 4  # characters that Unicode composes into one: no canonical decomposition is longer


class _Parts(msgspec.Struct, omit_defaults=True):
    """The parts of a file that the library reads. Only what is checked is taken apart: vocabularies
    are large."""

    model: msgspec.Raw
    version: str = "1.0"
    added_tokens: msgspec.Raw = msgspec.Raw(b"[]")
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


class _Model(msgspec.Struct):
    continuing_subword_prefix: str | None = None


def read_tokenizer_json(path: Path) -> Found:
    """EngineFault('tokenizer_corrupt') for a broken file, 'tokenizer_unsupported' for an unknown
    decoder."""
    codec = TokenizerJson(path)
    return Found(codec, codec.marks(), codec.token_id)


class TokenizerJson:
    """A tokenizer.json: a `Codec`. Decoders: byte-level, and SentencePiece's in either notation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._backend = _load(path)
        self._plain: Backend | None = (
            None  # the same, blind to special tokens; made when first needed
        )
        self._lock = threading.Lock()
        self._added = self._backend.get_added_tokens_decoder()
        self.vocab_size = (
            max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        if not 0 < self.vocab_size <= MAX_TOKENS:
            message = f"{path} numbers its tokens up to {self.vocab_size - 1:,}; at most {MAX_TOKENS:,} can be"
            raise EngineFault("tokenizer_corrupt", message)
        steps = _steps(self._backend.decoder)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        if not self._byte_level and not kinds & {"Metaspace", "Replace", "ByteFallback"}:
            named = ", ".join(sorted(kinds)) or "none"
            raise EngineFault(
                "tokenizer_unsupported", f"{path} has the unsupported decoder {named}"
            )
        self._space_prefix = any(
            (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )

    def encode(self, text: str, parse_special: bool) -> list[int]:
        backend = self._backend if parse_special else self._blind()
        with refusing(
            lambda why: ClientError(400, "tokenizer_failed", f"no tokens for this text: {why}")
        ):
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def least_tokens(self, text: str) -> int:
        """0 unless every part of the pipeline is known to keep each character, or to join only so
        many."""
        kept = (
            "".join(text.split())
            if any(t.lstrip or t.rstrip for t in self._added.values())
            else text
        )
        return least(len(kept), self._longest)

    @cached_property
    def _longest(self) -> int:
        """Most characters of a text that one token stands for; 0: not known."""
        joined = _joined(self._backend)
        if not joined or not self._writes_everything():
            return 0
        return joined * max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def _writes_everything(self) -> bool:
        """Return whether the model itself has tokens for all that it may be given."""
        if type(self._backend.model).__name__ != "BPE":
            return False
        splits = {step["type"] for step in _steps(self._backend.pre_tokenizer, "pretokenizers")}
        if self._byte_level and "ByteLevel" not in splits:
            return False
        letters = BYTES if self._byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
        return all(self._backend.token_to_id(letter) is not None for letter in letters)

    def token_bytes(self, token: int) -> bytes:
        text = self._backend.id_to_token(token)
        if text is None:
            return b""  # a hole in the numbering
        if token in self._added:
            return str(text).encode()
        if self._byte_level:
            return byte_level_bytes(text)
        if self._byte_fallback and _BYTE.fullmatch(text):
            return bytes([int(text[3:5], 16)])
        return str(text).replace(SPACE, " ").encode()

    def token_id(self, text: str) -> int | None:
        """The id of the token written so."""
        token: int | None = self._backend.token_to_id(text)
        return token

    def marks(self) -> Marks:
        """The marks of the file itself: the post-processor is asked what it puts around a text."""
        with _corrupt(self._path):
            inner = self._backend.encode("a", add_special_tokens=False).ids
            outer = self._backend.encode("a").ids
        at = next((i for i in range(len(outer)) if outer[i : i + len(inner)] == inner), 0)
        before, after = outer[:at], outer[at + len(inner) :]
        if max(outer, default=0) >= self.vocab_size:
            message = f"{self._path} puts the token {max(outer)} around a text, which the vocabulary lacks"
            raise EngineFault("tokenizer_corrupt", message)
        return Marks(
            bos_id=before[0] if before else None,
            eos_ids=tuple(after[:1]),
            special_ids=frozenset(i for i, token in self._added.items() if token.special),
            add_bos=bool(before),
            add_eos=bool(after),
            space_prefix=self._space_prefix,
        )

    def _blind(self) -> Backend:
        with self._lock:
            if self._plain is None:
                self._plain = _load(self._path)
                self._plain.encode_special_tokens = True
            return self._plain


def _load(path: Path) -> Backend:
    with _corrupt(path):
        parts = msgspec.json.decode(read_bounded(path, MAX_BYTES), type=_Parts)
    try:
        check_rules([parts.normalizer, parts.pre_tokenizer])
    except ValueError as error:
        raise EngineFault("tokenizer_unsupported", f"{path}: {error}") from error
    # written anew, so that the library reads what was checked: of what a file says twice it takes
    # both
    with _corrupt(path), _hushed() if _may_panic(parts) else contextlib.nullcontext():
        backend = Backend.from_buffer(msgspec.json.encode(parts))
        backend.no_truncation()
        backend.no_padding()
        backend.encode("a")
    return backend


def _may_panic(parts: _Parts) -> bool:
    """Return whether a file has what few models have, and what the library trusts."""
    model = msgspec.json.decode(parts.model, type=_Model)
    return bool(model.continuing_subword_prefix) or "precompiled_charsmap" in str(parts.normalizer)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Nothing goes to standard error: where the library panics, it says so there before we hear of
    it."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _corrupt(path: Path) -> contextlib.AbstractContextManager[None]:
    return refusing(lambda why: EngineFault("tokenizer_corrupt", f"cannot read {path}: {why}"))


def _steps(part: Any, several: str = "decoders") -> list[dict[str, Any]]:
    """A decoder or another part of a pipeline taken apart, as in the file. several: what it calls
    its steps."""
    if part is None:
        return []
    spec = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = spec[several] if spec["type"] == "Sequence" else [spec]
    return steps


def _joined(backend: Backend) -> int:
    """The number of characters that may become one before a model sees them; 0 where some may be
    left out."""
    joined = 1
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] in _COMPOSING:
            joined *= MAX_COMPOSED
        elif step["type"] not in _KEEPING and not _writes_spaces(step):
            return 0
    for step in _steps(backend.pre_tokenizer, "pretokenizers"):
        if step["type"] not in _SPLITTING or step.get("behavior") == "Removed":
            return 0
    return joined


def _writes_spaces(step: dict[str, Any]) -> bool:
    """A normalisation that writes each space as something else."""
    return (
        step["type"] == "Replace" and step["pattern"] == {"String": " "} and bool(step["content"])
    )
