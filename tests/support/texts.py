"""Random texts that want to break a tokenizer: the same ones in recorders and tests."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from pathlib import Path

PARTS = [
    *(
        "Hello",
        " world",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "'s",
        "'LL",
        "don't",
        "123",
        "4567",
        "½",
        "Ⅷ",
        "é",
        "e\u0301",
    ),
    *(
        "第一章",
        "。",
        "，",
        "한국어",
        "日本",
        "ば",
        "カ",
        "🦙",
        "👩‍👩‍👧",
        "<|im_end|>",
        "▁",
        "\u00a0",
        "\u3000",
        "\u2028",
    ),
    *(
        "\u0085",
        "\x1c",
        "\x00",
        "ſ",
        "'ſ",
        "K",
        "İ",
        "ǅ",
        "ß",
        "ЖД",
        "عرب",
        "١٢",
        "हिन्दी",
        "๑",
        "!!",
        "...",
        "=>",
        "`",
    ),
    *(
        "$",
        "^",
        "|",
        "_",
        "//",
        "\\",
        "aaa",
        "ab",
        "aba",
        "(\n",
        "/\n",
        "\u200b",
        "\ufeff",
        "\u00ad",
        "<0x0A>",
    ),
    *("\n\n\n", " \n ", "    x", "\u1680", "\u180e", "A", "Bc", "mixedCase", "HTTPServer", "x=1;"),
]

# What Unicode 16 assigned (2024). llama.cpp's tables are of Unicode 15, the tokenizers library's of 16: they
# cannot agree on whether these are letters.
_NEW = [
    *(
        (0x897, 0x897),
        (0x1B4E, 0x1B7F),
        (0x1C89, 0x1C8A),
        (0x2427, 0x2429),
        (0x31E4, 0x31E5),
        (0xA7CB, 0xA7DC),
    ),
    *(
        (0x105C0, 0x105F3),
        (0x10D40, 0x10D8F),
        (0x10EC2, 0x10EFC),
        (0x11380, 0x113E2),
        (0x116D0, 0x116E3),
    ),
    *(
        (0x11BC0, 0x11BF9),
        (0x11F5A, 0x11F5A),
        (0x13460, 0x143FA),
        (0x16100, 0x16139),
        (0x16D40, 0x16D79),
    ),
    *(
        (0x18CFF, 0x18CFF),
        (0x1CC00, 0x1CEB3),
        (0x1E5D0, 0x1E5FF),
        (0x1F8B2, 0x1F8C1),
        (0x1FA89, 0x1FAE9),
    ),
    (0x1FBCB, 0x1FBEF),
]


def random_texts(count: int, seed: int = 1) -> list[str]:
    """Texts of 1 to 23 parts: words, ASCII, any code points but surrogates. The same for the same seed."""
    chance = random.Random(seed)
    return ["".join(_part(chance) for _ in range(chance.randrange(1, 24))) for _ in range(count)]


def _part(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.35:
        return chance.choice(PARTS)
    if kind < 0.55:
        return chr(chance.randrange(32, 127))
    if kind < 0.65:
        return chr(chance.randrange(0x300))
    end = 0x110000 if kind > 0.95 else 0x3100 if kind < 0.8 else 0x20000
    code = chance.randrange(end)
    surrogate = 0xD800 <= code < 0xE000
    return "\ufffd" if surrogate or any(low <= code <= high for low, high in _NEW) else chr(code)


def pieces(path: Path) -> list[str]:
    """The texts of a file: lines of a .txt without their ends; of a .jsonl the strings of its text fields."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if path.suffix == ".txt":
        return lines
    rows = [json.loads(line) for line in lines if line]
    values = [row.get(key, []) for row in rows for key in ("turns", "prompt", "reference")]
    return [text for value in values for text in ([value] if isinstance(value, str) else value)]


def digest(rows: Iterable[list[int]]) -> str:
    """sha256 over int32 little-endian ids, each row closed by -1."""
    out = hashlib.sha256()
    for row in rows:
        out.update(b"".join(i.to_bytes(4, "little", signed=True) for i in [*row, -1]))
    return out.hexdigest()
