"""Frames between processes made hostile: bytes, lengths, order, and what the messages in them say.

Owns what may be wrong with frames of any kind. Must not know what comes of reading them. Every change follows
from the dice.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hostile.binary import INTS, Dice, damaged
from hostile.json_files import places

Frame = Callable[[bytes], bytes]  # a body as a frame
NUMBERS = (*INTS, 2**63, 2**64 - 1, -(2**31), -(2**63))
FLOATS = (0.0, -0.0, -1.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"))
DEEP = b"\x91" * 30_000 + b"\xc0"  # lists in lists
HUGE = (
    b"\xdf\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
)
BODIES = (
    b"",
    b"\xc0",
    b"\xc1",
    b"\x80",
    b"\x90",
    b"\x05",
    b"\xa3abc",
    b"noise",
    b"\xd4\x01\x02",
    DEEP,
    *HUGE,
)
LENGTHS = (
    0,
    1,
    5,
    255,
    1 << 16,
    1 << 22,
    (1 << 26) - 1,
    1 << 26,
    (1 << 26) + 1,
    2**31 - 1,
    2**32 - 1,
)


def value(dice: Dice) -> Any:
    """Something that stands in a message where another thing was."""
    return dice.choice(
        (
            lambda: dice.choice(NUMBERS),
            lambda: dice.choice(NUMBERS),
            lambda: dice.choice(FLOATS),
            lambda: dice.choice(
                ("", "a", "\x00", "é" * 300, "x" * 70_000, "stop", "error", "\n# x\n")
            ),
            lambda: dice.choice(
                (None, True, False, b"", b"\xff", [], {}, [0], [[]], {"a": 1}, [None] * 300)
            ),
        )
    )()


def spoilt(message: Any, dice: Dice) -> bytes:
    """A message as msgpack, with one to three of its places changed, gone, or joined by others."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        found = places(plain)
        if not found:
            break
        container, key = dice.choice(found)
        kind = dice.choice(("value", "value", "value", "near", "gone", "more"))
        if kind == "gone":
            del container[key]
        elif kind == "near" and isinstance(container[key], int | float):
            moved = container[key] + dice.choice((-2, -1, 1, 2, 100))
            container[key] = moved if -(2**63) <= moved < 2**64 or moved != moved else 0
        elif kind == "more" and isinstance(container, dict):
            container[dice.choice(("a", key, "type", 5))] = dice.choice((value(dice), [[[[]]]]))
        elif kind == "more":
            container.extend([container[key]] * dice.choice((1, 2, 500)))
        else:
            container[key] = value(dice)
    packed = msgspec.msgpack.encode(plain)
    if (
        dice.random() < 0.05 and 0x80 <= packed[0] < 0x8F
    ):  # a field that nobody knows, deeper than any stack
        packed = bytes([packed[0] + 1]) + b"\xa1a" + DEEP + packed[1:]
    return packed


def framed(body: bytes) -> bytes:
    """A frame of channel.py."""
    return struct.pack("<I", len(body)) + body


def lie(body: bytes, dice: Dice) -> bytes:
    """A frame of channel.py with another length than it has."""
    size = dice.choice((*LENGTHS, max(len(body) - 1, 0), len(body) + 1))
    return struct.pack("<I", size) + body


def hostile(
    messages: Sequence[Any], others: Sequence[Any], dice: Dice, frame: Frame = framed
) -> tuple[list[bytes], str]:
    """The frames of these messages with one thing wrong, and what it is. others: from elsewhere."""
    frames = [frame(msgspec.msgpack.encode(one)) for one in messages]
    at = dice.randrange(len(frames))
    kind = dice.choice(
        (
            "spoilt",
            "spoilt",
            "spoilt",
            "bytes",
            "lie",
            "drop",
            "twice",
            "swap",
            "cut",
            "body",
            "other",
            "noise",
            "endless",
            "shuffle",
        )
    )
    if kind == "spoilt":
        frames[at] = frame(spoilt(messages[at], dice))
    elif kind == "bytes":
        frames[at] = damaged(frames[at], dice)[0]
    elif kind == "lie":
        frames[at] = lie(msgspec.msgpack.encode(messages[at]), dice)
    elif kind == "drop":
        del frames[at]
    elif kind == "twice":
        frames.insert(dice.randrange(len(frames) + 1), frames[at])
    elif kind == "swap":
        other = dice.randrange(len(frames))
        frames[at], frames[other] = frames[other], frames[at]
    elif kind == "shuffle":
        dice.shuffle(frames)
    elif kind == "cut":
        frames[at:] = [frames[at][: dice.randrange(len(frames[at]) + 1)]]
    elif kind == "body":
        frames[at] = frame(dice.choice(BODIES))
    elif kind == "other":
        frames.insert(at, frame(msgspec.msgpack.encode(dice.choice(others))))
    elif kind == "noise":
        frames.insert(at, dice.randbytes(dice.choice((1, 3, 4, 40, 4000))))
    else:
        frames[at:] = [lie(b"", dice) + b"\x00" * dice.choice((0, 10, 300_000))]
    return frames, f"{kind} at {at}"


def pieces(raw: bytes, dice: Dice) -> list[bytes]:
    """The same bytes, in parts as a socket may give them."""
    cuts = (
        sorted(dice.randrange(len(raw) + 1) for _ in range(dice.choice((0, 0, 1, 3))))
        if raw
        else []
    )
    return [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) if b > a]
