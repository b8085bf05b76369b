"""A rank of tensor or pipeline parallel: `python -m pageturner.parallel.rank --rank R --memory-fd M
--alive-fd A --config JSON`, started by rank 0 (see tensor_parallel.py).

Owns this process: it loads its slice or stage and does what rank 0 says until that ends. Must not
know requests.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import msgspec

from pageturner import logs
from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault
from pageturner.interrupt import end_with_parent
from pageturner.kernels.comm import RankOps
from pageturner.models.decoder import Decoder
from pageturner.parallel import tensor_parallel


def main() -> int:
    parser = argparse.ArgumentParser(prog="pageturner.parallel.rank")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, required=True, help="what all ranks share")
    parser.add_argument("--alive-fd", type=int, required=True, help="a pipe that ends with rank 0")
    parser.add_argument(
        "--words-fd", type=int, required=True, help="a pipe that takes why this process ends"
    )
    parser.add_argument("--cores", default="", help="that it computes on, with commas; none: any")
    parser.add_argument(
        "--bound", action="store_true", help="end with the thread that started this one"
    )
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args()
    if arguments.bound:
        end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    logs.as_parent()
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    cores = [int(core) for core in arguments.cores.split(",") if core]
    try:
        decoder, ops = load(config, arguments.rank, arguments.memory_fd, cores)
    except (EngineFault, MemoryError) as error:  # rank 0 says it, unless it found the same
        _say(arguments.words_fd, error)
        return 1
    try:
        ops.follow(decoder.head, [arguments.alive_fd])
    except EngineFault as fault:
        logs.say(f"rank {arguments.rank} ends: {fault.message}", "error")
        _say(arguments.words_fd, fault)
        return 1
    return 0


def load(config: EngineConfig, rank: int, memory: int, cores: list[int]) -> tuple[Decoder, RankOps]:
    """The slice or stage of a rank. EngineFault, MemoryError."""
    if cores:
        os.sched_setaffinity(0, cores)
    ops = tensor_parallel.make_ops(config, rank, memory, cores)
    decoder = tensor_parallel.load_slice(Path(config.model), ops, config, rank)
    ops.slices = tensor_parallel.slices_of(decoder)
    return decoder, ops


def _say(words: int, error: Exception) -> None:
    text = error.message if isinstance(error, EngineFault) else "memory ran out"
    try:
        os.write(words, text.encode()[: tensor_parallel.WORDS])
    except OSError:  # rank 0 has ended too
        return


if __name__ == "__main__":
    sys.exit(main())
