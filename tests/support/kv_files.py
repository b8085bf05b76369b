"""Files of KV blocks or of recurrent states, damaged as a disk would."""

from __future__ import annotations

from pathlib import Path

from pageturner.kv.kv_block_file import HEAD, PAGE, RECORD


class BlockFileBytes:
    """The bytes of a file, and where its slots begin."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> tuple[bytearray, list[int]]:
        self._data = bytearray(self._path.read_bytes())
        nbytes, slots = HEAD.unpack(self._data[: HEAD.size])[2:]
        start = PAGE + -(-slots * RECORD.itemsize // PAGE) * PAGE
        stride = -(-nbytes // PAGE) * PAGE
        return self._data, [
            at for at in range(start, len(self._data), stride) if at + nbytes <= len(self._data)
        ]

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._data)


def flip_all(path: Path) -> None:
    """One bit in the bytes of each block, not in the directory."""
    with BlockFileBytes(path) as (data, slots):
        for start in slots:
            data[start + 7] ^= 16
