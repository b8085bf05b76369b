"""KV memory that outlives its engine, damaged in between: what does not verify is computed again.

A case is the memory file of an engine that ended, with something wrong in head, records or blocks.
The next engine starts, whatever it is, and says what it would have said without the file.
"""

from __future__ import annotations

import functools
import os
from dataclasses import replace

from hostile.binary import Dice, damaged
from hostile.whole_server import check
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.kv.kv_survival import HEAD, RECORD, RECORDS_AT
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.engines import GOLDENS

TINY = EngineConfig(
    model=str(GOLDENS / "tiny_llama.gguf"),
    block_size=4,
    threads=1,
    max_num_seqs=4,
    kv_cache_memory=1 << 19,
    backend="native",
)
CONFIGS = (TINY, replace(TINY, kv_cache_dtype="int8"))
PROMPTS = [tuple(range(5 + n, 42 + n)) for n in range(3)]
PARAMS = SamplingParams(temperature=1.0, max_tokens=6, stop_ids=(), seed=3)


def _answers(built: LoadedEngine) -> dict[int, list[int]]:
    got: dict[int, list[int]] = {id: [] for id in range(len(PROMPTS))}
    for id, prompt in enumerate(PROMPTS):
        built.engine.submit(Request(id, prompt, PARAMS))
    while built.engine.has_work:
        for event in built.engine.step():
            got[event.id] += event.tokens
    return got


@functools.cache
def _ended(number: int) -> tuple[bytes, dict[int, list[int]]]:
    """The file of an engine that has ended, and what it answered."""
    fd = os.memfd_create("fuzz")
    try:
        told = _answers(make_engine(CONFIGS[number], kv_fd=fd))
        return os.pread(fd, os.fstat(fd).st_size, 0), told
    finally:
        os.close(fd)


def kv(dice: Dice) -> str:
    """What becomes of the file."""
    number = dice.randrange(len(CONFIGS))
    raw, told = _ended(number)
    spoilt = _spoilt(raw, dice)
    fd = os.memfd_create("fuzz")
    try:
        os.pwrite(fd, spoilt, 0)
        built = make_engine(CONFIGS[number], kv_fd=fd)
        check(_answers(built) == told, "other tokens than without the file")
        taken = built.taken_back
        again = make_engine(CONFIGS[number], kv_fd=fd)
        check(_answers(again) == told, "other tokens with the next engine")
        return "all lost" if not taken else "taken back"
    finally:
        os.close(fd)


def _spoilt(raw: bytes, dice: Dice) -> bytes:
    _, _, blocks, _, sliding, *_ = HEAD.unpack(raw[: HEAD.size])
    records = RECORDS_AT, RECORDS_AT + (blocks + sliding) * RECORD.itemsize
    for _ in range(dice.choice((1, 1, 2, 20))):
        start, end = dice.choice(
            (
                (0, HEAD.size),
                records,
                (RECORDS_AT, RECORDS_AT + 40 * RECORD.itemsize),
                (2 << 20, (2 << 20) + (1 << 18)),
            )
        )
        part = damaged(raw[start:end], dice)[0][: end - start]
        raw = raw[:start] + part.ljust(end - start, b"\0") + raw[end:]
    return raw[: dice.randrange(len(raw))] if dice.random() < 0.05 else raw
