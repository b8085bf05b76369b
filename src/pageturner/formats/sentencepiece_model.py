"""tokenizer.model: a SentencePiece model, read without the library.

Owns the few fields of `sentencepiece_model.proto` that matter, and the protobuf wire format as far
as they need it (https://protobuf.dev/programming-guides/encoding). Must not know what else lies in
the folder.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pageturner.errors import EngineFault
from pageturner.formats.sentencepiece import (
    CONTROL,
    HIDDEN,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    SentencePiece,
)
from pageturner.formats.tokenizer import Found, Marks

_BPE = 2
_MODELS = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}


class Added(NamedTuple):
    """A token that a folder adds to its vocabulary. `special` ones are control tokens."""

    text: str
    special: bool
    rstrip: bool


@dataclass(slots=True)
class _ModelProto:
    """The parts of a ModelProto. trainer, normalizer: number of a field -> its value."""

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    trainer: dict[int, bytes | int] = field(default_factory=dict)
    normalizer: dict[int, bytes | int] = field(default_factory=dict)


def read_sentencepiece(raw: bytes, added: Mapping[int, Added]) -> Found:
    """A serialised ModelProto with the tokens of the folder laid over it.

    EngineFault('tokenizer_corrupt') if it is none, 'tokenizer_unsupported' for what is not BPE or
    normalises.
    """
    try:
        model = _parse(raw)
        name = _bytes(model.normalizer.get(1, b"")).decode("utf-8", "replace")
    except (ValueError, IndexError, struct.error) as error:
        raise EngineFault(
            "tokenizer_corrupt", f"tokenizer.model is no SentencePiece model: {error}"
        ) from error
    if not model.tokens:
        raise EngineFault("tokenizer_corrupt", "tokenizer.model holds no pieces")
    kind = _int(model.trainer.get(3), 1)
    if kind != _BPE:
        message = f"SentencePiece model type {_MODELS.get(kind, str(kind))!r}"
        raise EngineFault("tokenizer_unsupported", f"{message} is not supported; 'bpe' is")
    if model.normalizer.get(2) or _int(model.normalizer.get(4), 1):
        message = f"SentencePiece normalisation {name!r} is not supported; 'identity' is"
        raise EngineFault("tokenizer_unsupported", message)
    return _found(model, added)


def _parse(raw: bytes) -> _ModelProto:
    model = _ModelProto()
    for number, value in _fields(raw):
        if number == 1 and isinstance(value, bytes):
            piece = dict(_fields(value))
            model.tokens.append(_bytes(piece.get(1)).decode())
            model.scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
            model.kinds.append(_int(piece.get(3), NORMAL))
        elif number == 2:
            model.trainer = dict(_fields(_bytes(value)))
        elif number == 3:
            model.normalizer = dict(_fields(_bytes(value)))
    return model


def _found(model: _ModelProto, added: Mapping[int, Added]) -> Found:
    tokens, scores, kinds = model.tokens, model.scores, model.kinds
    for i, token in added.items():
        missing = i + 1 - len(tokens)
        tokens += [""] * missing
        scores += [0.0] * missing
        kinds += [UNUSED] * missing
        tokens[i] = token.text
        kinds[i] = CONTROL if token.special else USER_DEFINED
    whole = {
        tokens[i]: i for i, kind in enumerate(kinds) if kind == USER_DEFINED and i not in added
    }
    kinds = [NORMAL if tokens[i] in whole else kind for i, kind in enumerate(kinds)]
    rstrip = [i for i, token in added.items() if token.rstrip]
    space_prefix = bool(_int(model.normalizer.get(3), 1))
    pieces = (tokens, scores, kinds)
    codec = SentencePiece(pieces, space_prefix=space_prefix, rstrip=rstrip, whole=whole)
    bos, eos = _int(model.trainer.get(41), 1), _int(model.trainer.get(42), 2)
    marks = Marks(
        bos_id=bos if 0 <= bos < len(tokens) else None,
        eos_ids=(eos,) if 0 <= eos < len(tokens) else (),
        special_ids=frozenset(i for i, kind in enumerate(kinds) if kind in HIDDEN),
        add_bos=True,
        space_prefix=space_prefix,
    )
    return Found(codec, marks, {text: i for i, text in enumerate(tokens)}.get)


def _fields(raw: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(field number, value) of a message: int for a varint, bytes for everything else."""
    position, size = 0, len(raw)
    while position < size:
        key, position = _varint(raw, position)
        wire = key & 7
        if wire == 0:
            value, position = _varint(raw, position)
            yield key >> 3, value
            continue
        if wire == 2:
            length, position = _varint(raw, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        end = position + length
        if end > size:
            raise ValueError("it ends too early")
        yield key >> 3, raw[position:end]
        position = end


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a number is too long")


def _bytes(value: bytes | int | None) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has the wrong type")
    return value


def _int(value: bytes | int | None, default: int) -> int:
    """A varint; negative int32 values (an id of -1) are sign-extended to 64 bits."""
    if value is None:
        return default
    if not isinstance(value, int):
        raise EngineFault("tokenizer_corrupt", "tokenizer.model has a field of the wrong type")
    return value - (1 << 64) if value >= 1 << 63 else value
