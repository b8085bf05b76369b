"""tokenizer.json, the format of the `tokenizers` library: the library encodes, the bytes of tokens are ours.

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
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from pageturner.errors import ClientError, EngineFault, refusing
from pageturner.files.bpe import byte_level_bytes
from pageturner.files.hf_config import read_bounded
from pageturner.files.sentencepiece import SPACE
from pageturner.files.tokenizer import MOST_TOKENS, Found, Marks
from pageturner.files.tokenizer_rules import check_rules

MOST_BYTES = 256 << 20  # of the file; those of vocabularies of 260,000 tokens have 35 MB
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class _Parts(msgspec.Struct, omit_defaults=True):
    """What the library reads of a file. Only what is checked is taken apart: vocabularies are large."""

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
    """EngineFault('tokenizer_corrupt') for a broken file, 'tokenizer_unsupported' for an unknown decoder."""
    codec = TokenizerJson(path)
    return Found(codec, codec.marks(), codec.token_id)


class TokenizerJson:
    """A tokenizer.json: a `Codec`. Decoders: byte-level, and SentencePiece's in either notation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._backend = _load(path)
        self._plain: Backend | None = None  # the same, blind to special tokens; made when first needed
        self._lock = threading.Lock()
        self._added = self._backend.get_added_tokens_decoder()
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size <= MOST_TOKENS:
            message = (
                f"{path} numbers its tokens up to {self.vocab_size - 1:,}; at most {MOST_TOKENS:,} can be"
            )
            raise EngineFault("tokenizer_corrupt", message)
        steps = _steps(self._backend.decoder)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        if not self._byte_level and not kinds & {"Metaspace", "Replace", "ByteFallback"}:
            named = ", ".join(sorted(kinds)) or "none"
            raise EngineFault("tokenizer_unsupported", f"{path} has the unsupported decoder {named}")
        self._space_prefix = any(
            (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )

    def encode(self, text: str, parse_special: bool) -> list[int]:
        backend = self._backend if parse_special else self._blind()
        with refusing(lambda why: ClientError(400, "tokenizer_failed", f"no tokens for this text: {why}")):
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

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
        """What the file itself says: the post-processor is asked what it puts around a text."""
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
        parts = msgspec.json.decode(read_bounded(path, MOST_BYTES), type=_Parts)
    try:
        check_rules([parts.normalizer, parts.pre_tokenizer])
    except ValueError as error:
        raise EngineFault("tokenizer_unsupported", f"{path}: {error}") from error
    # written anew, so that the library reads what was checked: of what a file says twice it takes both
    with _corrupt(path), _hushed() if _may_panic(parts) else contextlib.nullcontext():
        backend = Backend.from_buffer(msgspec.json.encode(parts))
        backend.no_truncation()
        backend.no_padding()
        backend.encode("a")
    return backend


def _may_panic(parts: _Parts) -> bool:
    """Whether a file has what few models have, and what the library trusts."""
    model = msgspec.json.decode(parts.model, type=_Model)
    return bool(model.continuing_subword_prefix) or "precompiled_charsmap" in str(parts.normalizer)


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Nothing goes to standard error: where the library panics, it says so there before we hear of it."""
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


def _as_in_file(part: Any) -> Any:
    """A part of a tokenizer as the file has it; None if it has none."""
    return None if part is None else json.loads(part.__getstate__())


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """A decoder taken apart, as in the file."""
    spec = _as_in_file(decoder)
    if spec is None:
        return []
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    return steps
