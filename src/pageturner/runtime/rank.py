"""A rank of tensor parallel: `python -m pageturner.runtime.rank --rank R --memory-fd M --alive-fd A --config
JSON`, started by rank 0 (see tensor_parallel.py).

Owns this process: it loads its slice and does what rank 0 says until that ends. Must not know requests.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from pathlib import Path

import msgspec

from pageturner import logs
from pageturner.config import EngineConfig
from pageturner.errors import EngineFault
from pageturner.runtime import tensor_parallel
from pageturner.runtime.worker import end_with_parent

PATIENCE = 2.0  # seconds in which rank 0 ends where it found the same wrong with the model, and says so


def main() -> int:
    parser = argparse.ArgumentParser(prog="pageturner.runtime.rank")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--memory-fd", type=int, required=True, help="what all ranks share")
    parser.add_argument("--alive-fd", type=int, required=True, help="a pipe that ends with rank 0")
    parser.add_argument("--bound", action="store_true", help="end with the thread that started this one")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    arguments = parser.parse_args()
    if arguments.bound:
        end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    logs.as_parent()
    config = msgspec.json.decode(arguments.config, type=EngineConfig)
    try:
        serve(config, arguments.rank, arguments.memory_fd, arguments.alive_fd)
    except EngineFault as fault:
        said = select.select([arguments.alive_fd], [], [], PATIENCE)[0]
        if not said:
            logs.say(f"rank {arguments.rank}: {fault.message}", "error")
        return 1
    return 0


def serve(config: EngineConfig, rank: int, memory: int, alive: int) -> None:
    """Load the slice of a rank, and make its calls until rank 0 has ended. EngineFault."""
    size = config.tensor_parallel_size
    ops = tensor_parallel.make_ops(config, rank, memory)
    if config.pin_threads:
        os.sched_setaffinity(0, tensor_parallel.cores_of(sorted(os.sched_getaffinity(0)), rank, size))
    decoder = tensor_parallel.load_slice(Path(config.model), ops, config, rank)
    assert decoder.shard is not None
    ops.starts = decoder.shard.starts
    ops.follow(decoder.head, [alive])


if __name__ == "__main__":
    sys.exit(main())
