"""Binary files made hostile: bytes of any file; GGUF, safetensors and SentencePiece by their parts.

Owns what may be wrong with metadata, tables, lengths and single bytes. Must not know what comes of loading
them. Every change follows from the dice.
"""

from __future__ import annotations

import json
import operator
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from support import gguf_writer as gguf

Dice = random.Random
Mutate = Callable[[Path, Dice], str]
INTS = (0, 1, -1, 2, 3, 255, 4096, 1_000_000, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1)
FLOATS = (0.0, -1.0, 1e-320, 1e-30, 1e30, 1.0000001, float("nan"), float("inf"), float("-inf"))

_TABLES = json.loads(Path(__file__).with_name("words.json").read_text())


def words(name: str) -> tuple[str, ...]:
    """A table of words.json. A list in it is texts, each with how often it is repeated."""
    return tuple(
        one if isinstance(one, str) else "".join(map(operator.mul, one[::2], one[1::2]))
        for one in _TABLES[name]
    )


def put(path: Path, raw: bytes) -> None:
    """A file of its own, in place of the link to the sound one."""
    path.unlink(missing_ok=True)
    path.write_bytes(raw)


# -- bytes of any file ---------------------------------------------------------------------------------------
def damaged(raw: bytes, dice: Dice, most: int = 1 << 30) -> tuple[bytes, str]:
    """Bytes flipped, cut, doubled, moved; in the first `most` where that can be chosen."""
    if not raw:
        raise ValueError
    data, at = bytearray(raw), dice.randrange(min(len(raw), most))
    kind = dice.choice(
        ("flip", "flip", "byte", "cut", "extend", "u64", "u32", "swap", "splice", "empty")
    )
    if kind == "flip":
        for _ in range(dice.randint(1, 8)):
            data[dice.randrange(min(len(data), most))] ^= 1 << dice.randrange(8)
    elif kind == "byte":
        data[at] = dice.choice((0, 1, 0x22, 0x5B, 0x7B, 0x7F, 0x80, 0xC3, 0xED, 0xFF))
    elif kind == "cut":
        del data[at:]
    elif kind == "extend":
        data += dice.randbytes(dice.choice((1, 7, 64, 5000)))
    elif kind in ("u64", "u32"):
        size = 8 if kind == "u64" else 4
        value = dice.choice((*INTS, 2**63, 2**64 - 1)) % (1 << 8 * size)
        data[at : at + size] = value.to_bytes(size, "little")
    elif kind == "swap":
        other = dice.randrange(min(len(data), most))
        data[at : at + 8], data[other : other + 8] = data[other : other + 8], data[at : at + 8]
    elif kind == "splice":
        data[at:at] = data[: dice.randrange(200)]
    else:
        data.clear()
    return bytes(data), f"{kind} at {at}"


def bytes_of(name: str, most: int = 1 << 30) -> Mutate:
    def damage(folder: Path, dice: Dice) -> str:
        path = dice.choice(sorted(folder.glob(name)) or [folder / name])
        raw, note = damaged(path.read_bytes(), dice, most)
        put(path, raw)
        return f"{path.name} {note}"

    return damage


# -- GGUF ----------------------------------------------------------------------------------------------------
_TYPES = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}
_LIKELY = words("gguf keys")
_OF_ARCH = words("gguf keys of an architecture")
_WORDS = words("gguf words")


def _typed(dice: Dice) -> bytes:
    """A value of any type with its type in front."""
    kind = dice.choice(("int", "int", "float", "text", "bool", "array", "nested", "unknown"))
    if kind == "int":
        code, value = dice.choice("BHIQq"), dice.choice((*INTS, 2**63, 2**64 - 1))
        return struct.pack("<I", _TYPES[code]) + (value % 256 ** struct.calcsize(code)).to_bytes(
            struct.calcsize(code), "little"
        )
    if kind == "float":
        code, number = dice.choice("fd"), dice.choice(FLOATS)
        return struct.pack("<I", _TYPES[code]) + struct.pack("<" + code, number)
    if kind == "text":
        return struct.pack("<I", 8) + gguf.string(dice.choice(_WORDS))
    if kind == "bool":
        return struct.pack("<IB", 7, dice.choice((0, 1, 7)))
    if kind == "array":
        code, count = dice.choice("BIfQ"), dice.choice((0, 1, 300, 320, 5000))
        raw = dice.randbytes(struct.calcsize(code) * count)
        return struct.pack("<IIQ", 9, _TYPES[code], dice.choice((count, count, 2**40, 2**63))) + raw
    if kind == "nested":
        return struct.pack("<IIQ", 9, 9, 1) * dice.choice((1, 5000)) + struct.pack("<IQ", 4, 0)
    return struct.pack("<I", dice.choice((13, 99, 2**31))) + bytes(8)


def _array(value: list[Any], dice: Dice) -> list[Any]:
    """A list with elements changed, taken away, doubled, or added."""
    value, at = list(value), dice.randrange(max(len(value), 1))
    kind = dice.choice(("change", "change", "cut", "double", "more", "none", "same"))
    if kind == "none" or not value:
        return []
    if kind == "cut":
        return value[:at]
    if kind == "double":
        return value + value[at : at + 50]
    if kind == "same":
        return [value[at]] * len(value)
    texts, floats = (
        ("", "▁", "<0x0A>", "<0xZZ>", "a b", " ", "nope nope", "x" * 9000, "\x00"),
        FLOATS,
    )
    choices: Any = (
        texts
        if type(value[0]) is str
        else floats
        if type(value[0]) is float
        else (0, 1, 2, 3, 6, 9, -1)
    )
    if kind == "more":
        return value + [dice.choice(choices)] * 500
    for _ in range(dice.choice((1, 1, 40))):
        value[dice.randrange(len(value))] = dice.choice(choices)
    return value


def gguf_metadata(folder: Path, dice: Dice) -> str:
    """One or two keys with values of any type, or without."""
    path = folder / "model.gguf"
    metadata, tensors = gguf.taken_apart(path)
    arch = str(metadata.get("general.architecture", "llama"))
    keys = [*metadata, *_LIKELY, *(f"{arch}.{key}" for key in _OF_ARCH)]
    key = dice.choice(keys)
    raw = {name: gguf.pair(name, value) for name, value in metadata.items()}
    kind = dice.choice(("typed", "typed", "size", "size", "delete", "array"))
    if kind == "delete":
        raw.pop(key, None)
    elif kind == "array":
        key = dice.choice([name for name, value in metadata.items() if isinstance(value, list)])
        raw[key] = gguf.pair(key, _array(metadata[key], dice))  # type: ignore[arg-type]
    elif kind == "size":
        key = f"{arch}.{dice.choice(_OF_ARCH)}"
        raw[key] = gguf.string(key) + struct.pack("<IQ", 10, dice.choice(INTS) % 2**64)
    else:
        raw[key] = gguf.string(key) + _typed(dice)
    _write_gguf(path, list(raw.values()), tensors, dice)
    return f"{kind} {key} {raw.get(key, b'')[len(key) + 8 :][:60]!r}"


def gguf_tensors(folder: Path, dice: Dice) -> str:
    """The tensor table: shapes, types, names, rows twice or missing, values that are no numbers."""
    path = folder / "model.gguf"
    metadata, tensors = gguf.taken_apart(path)
    name = dice.choice(list(tensors))
    number, shape, raw = tensors[name]
    kind = dice.choice(("shape", "type", "drop", "rename", "add", "values", "dims", "deep"))
    if kind == "shape":
        at, size = dice.randrange(len(shape)), dice.choice((0, 1, 31, 2**31, 2**62, 2**63))
        shape = (*shape[:at], size, *shape[at + 1 :])
    elif kind == "type":
        number = dice.choice((0, 1, 2, 8, 12, 14, 16, 24, 28, 30, 99, 2**31))
    elif kind == "drop":
        del tensors[name]
    elif kind == "rename":
        name = dice.choice(
            (name + "x", "rope_freqs.weight", "x" * 9000, "blk.99999.attn_q.weight", "")
        )
    elif kind == "add":
        name = dice.choice(
            ("rope_freqs.weight", "output.weight", "blk.0.ffn_gate_exps.weight", "a\nb")
        )
    elif kind == "values":
        raw = (
            struct.pack("<f", dice.choice((float("nan"), float("inf"), 3e38))) * (len(raw) // 4)
            + raw[: len(raw) % 4]
        )
    else:
        shape = (1,) * (4 if kind == "dims" else 5000) + shape
    if kind != "drop":
        tensors[name] = (number, shape, raw)
    _write_gguf(path, [gguf.pair(key, value) for key, value in metadata.items()], tensors, dice)
    return f"{kind} {name[:60]} {number} {shape[:5]}"


def _write_gguf(
    path: Path, pairs: list[bytes], tensors: dict[str, gguf.Tensor], dice: Dice
) -> None:
    """As `gguf_bytes`, but of pairs as bytes, and sometimes with rows twice or offsets elsewhere."""
    table, data = [], b""
    for name, (number, shape, raw) in tensors.items():
        offset = len(data) if dice.random() > 0.002 else dice.choice((0, 32, 1, 2**40, 2**63))
        table.append(gguf.tensor_row(name, number, shape, offset))
        data += gguf.padded(raw)
    if dice.random() < 0.05:
        (table if dice.random() < 0.5 else pairs).append(dice.choice(table))
    head = gguf.header(dice.choice((3, 3, 3, 2)), len(table), len(pairs))
    put(path, gguf.padded(head + b"".join(pairs) + b"".join(table)) + data)


# -- safetensors ---------------------------------------------------------------------------------------------
def safetensors_table(folder: Path, dice: Dice) -> str:
    """The header of one file: types, shapes, offsets, names, its own length, rows twice."""
    path = dice.choice(sorted(folder.glob("*.safetensors")))
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    name = dice.choice([key for key in header if key != "__metadata__"])
    row = dict(header[name])
    kind = dice.choice(
        ("dtype", "shape", "offsets", "rename", "drop", "twice", "row", "metadata", "length", "add")
    )
    if kind == "dtype":
        row["dtype"] = dice.choice(("F16", "I64", "F8_E4M3", "F4", "", 5, [], "x" * 9000))
    elif kind == "shape":
        more = (
            [],
            [0],
            [-1],
            [2**63],
            [10**30],
            [1.5],
            [True],
            "ab",
            None,
            [1] * 9,
            [9_999_999_999] * 20_000,
        )
        row["shape"] = dice.choice((*more, row["shape"][::-1], [*row["shape"], 1]))
    elif kind == "offsets":
        begin, end = row["data_offsets"]
        row["data_offsets"] = dice.choice(
            (
                [end, begin],
                [0, end - begin],
                [begin],
                [begin, 2**63],
                [-1, end],
                None,
                [begin + 4, end + 4],
                [begin, end + 4],
                [10**30] * 2,
            )
        )
    elif kind == "row":
        row = dice.choice(([], None, "x", {}, 5))  # type: ignore[assignment]
    elif kind == "rename":
        del header[name]
        name = dice.choice((name + "x", "\ud800", "", "rope_freqs.weight", "x" * 9000, "a\nb"))
    if kind == "drop":
        del header[name]
    elif kind == "metadata":
        header["__metadata__"] = dice.choice(([], {"a": 1}, "x", {"a": "b" * 9000}))
    else:
        header[name + (".more" if kind == "add" else "")] = row
    text = json.dumps(header)
    if kind == "twice":
        text = text[:-1] + "," + json.dumps({name: row})[1:]
    length = (
        len(text.encode())
        if kind != "length"
        else dice.choice((0, 1, 2**63, len(raw), 7, 100_000_001))
    )
    put(path, struct.pack("<Q", length) + text.encode() + data)
    return f"{kind} {path.name} {name[:60]} {str(row)[:80]}"


def shard_index(folder: Path, dice: Dice) -> str:
    """Where the index says that tensors lie."""
    path = folder / "model.safetensors.index.json"
    value = json.loads(path.read_bytes())
    names = value["weight_map"]
    name = dice.choice(list(names))
    where = (
        "../../../../etc/passwd",
        "/etc/passwd",
        "",
        ".",
        "..",
        "x" * 300,
        "a\0b",
        "\ud800",
        5,
        None,
        [],
        "config.json",
        "nope.safetensors",
        dice.choice(list(names.values())),
    )
    kind = dice.choice(("one", "one", "all", "many", "map", "drop", "twice"))
    if kind == "one":
        names[name] = dice.choice(where)
    elif kind == "all":
        value["weight_map"] = dict.fromkeys(names, dice.choice(where))
    elif kind == "many":
        names |= {f"t{i}": f"f{i}" for i in range(dice.choice((10, 3000)))}
    elif kind == "map":
        value["weight_map"] = dice.choice(([], None, 5, {}, "x"))
    elif kind == "drop":
        del names[name]
    text = json.dumps(value)
    text = (
        text.replace('"weight_map": {', '"weight_map": {"a": "b", "a": "c", ')
        if kind == "twice"
        else text
    )
    put(path, text.encode())
    return f"{kind} {name} {str(names.get(name))[:60]!r}"


# -- SentencePiece -------------------------------------------------------------------------------------------
def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def sentencepiece_fields(folder: Path, dice: Dice) -> str:
    """Fields added to the model, to its trainer's settings or its normalisation: the last one counts."""
    path = folder / "tokenizer.model"
    number = dice.choice((1, 2, 3, 4, 9, 40, 41, 42, 43, 44, 2**28))
    payload = dice.choice(
        (
            _varint(number << 3) + _varint(dice.choice(INTS) % 2**64),
            _varint(number << 3 | 2) + _varint(dice.choice((0, 3, 2**40))) + b"abc",
            _varint(number << 3 | 5) + dice.randbytes(4),
            _varint(number << 3 | dice.choice((3, 4, 6, 7))),
            b"\xff" * 11,
        )
    )
    outer = dice.choice((0, 1, 2, 3))
    piece = payload if not outer else _varint(outer << 3 | 2) + _varint(len(payload)) + payload
    if outer == 1 and dice.random() < 0.7:  # a piece: its text, score and type
        text = dice.choice((b"", b"\xff", b"<0xZZ>", b"a" * 9000, "▁".encode(), b"ab"))
        score = struct.pack("<f", dice.choice((0.0, float("nan"), float("inf"), -1e30)))
        inner = (
            b"\x0a"
            + _varint(len(text))
            + text
            + b"\x15"
            + score
            + b"\x18"
            + _varint(dice.choice((1, 2, 3, 6, 9)))
        )
        piece = (b"\x0a" + _varint(len(inner)) + inner) * dice.choice((1, 300))
    put(path, path.read_bytes() + piece)
    return f"field {outer}.{number} {piece[:40]!r}"
