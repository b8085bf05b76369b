"""The processes of tensor parallel: how they are started, what they get, and how their end is seen.

Rank 0 is the process of the engine. The others are its children; each has a slice of the model and of the KV,
and ends when rank 0 does: a pipe that only rank 0 holds open ends with it, and the kernel kills them with the
thread that started them where that is the main one. When one of them ends rank 0 sees it in the midst of a
step, raises, and ends as an engine ends: whoever watches it starts all of them again.

Owns that, the division of threads and cores, and the refusal of what does not go with it. Must not know what
is computed, nor what ranks say to each other (kernels/comm.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from pageturner.config import EngineConfig
from pageturner.errors import EngineFault
from pageturner.kernels import native_module
from pageturner.kernels.base import Ops
from pageturner.kernels.comm import Communicator, TensorParallelOps, shared_memory
from pageturner.kernels.native import NativeOps
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model
from pageturner.models.shard import MOST_RANKS


def check(config: EngineConfig) -> None:
    """EngineFault for settings that do not go with several ranks."""
    size = config.tensor_parallel_size
    if size == 1:
        return
    if size > MOST_RANKS:
        raise EngineFault("bad_setting", f"--tensor-parallel-size is at most {MOST_RANKS}, not {size}")
    refused = {
        f"--backend {config.backend}": config.backend not in ("auto", "native"),
        f"--device {config.device}": config.device != "cpu",
        "--speculation draft": config.speculation == "draft",
        "--kv-host-memory": config.kv_host_memory > 0,
        "--kv-file": bool(config.kv_file),
        "--prefill-listen": bool(config.prefill_listen),
        "--prefill-from": bool(config.prefill_from),
    }
    for flag, given in refused.items():
        if given:
            message = f"{flag} does not go with --tensor-parallel-size {size} yet: leave one of them out"
            raise EngineFault("bad_setting", message)
    if not native_module.available_isas():
        message = f"--tensor-parallel-size {size} needs the native kernels: {native_module.supported()[1]}"
        raise EngineFault("no_native_backend", message)


def threads_of(config: EngineConfig, rank: int) -> int:
    """Its part of the engine's threads, at least one."""
    size, threads = config.tensor_parallel_size, config.threads or len(os.sched_getaffinity(0))
    return max(1, threads * (rank + 1) // size - threads * rank // size)


def cores_of(cores: Sequence[int], rank: int, size: int) -> list[int]:
    """Its part of the cores, neighbours; where there are fewer than ranks, one that others have too."""
    first = len(cores) * rank // size
    return list(cores[first : max(first + 1, len(cores) * (rank + 1) // size)])


def make_ops(config: EngineConfig, rank: int, memory: int) -> TensorParallelOps:
    """The backend of a rank. memory: the file that all ranks share."""
    own = NativeOps(threads_of(config, rank))
    if config.pin_threads:
        own.pin_threads(cores_of(sorted(os.sched_getaffinity(0)), rank, config.tensor_parallel_size))
    return TensorParallelOps(Communicator(memory, rank, config.tensor_parallel_size), own)


def load_slice(path: Path, ops: Ops, config: EngineConfig, rank: int = 0) -> Decoder:
    """The model, or a rank's slice of it."""
    return load_model(
        path, ops, dtype=config.dtype, max_positions=config.max_model_len,
        quantization=config.quantization, activation_bits=config.activation_bits,
        packed_cache=config.packed_cache, rank=rank, ranks=config.tensor_parallel_size,
    )  # fmt: skip


class RankProcesses:
    """Rank 0, and what it knows of the others.

    ops   its backend, with which `load` loads
    pids  of the others, once they are started
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._memory = shared_memory(config.tensor_parallel_size)
        self.ops = make_ops(config, 0, self._memory)
        self.pids: list[int] = []
        self._ended: list[int] = []

    def start(self, path: Path) -> None:
        """Start the others, which load their slices of this model."""
        alive, held = os.pipe()
        config = msgspec.json.encode(replace(self._config, model=str(path))).decode()
        bound = threading.current_thread() is threading.main_thread()
        processes = []
        for rank in range(1, self._config.tensor_parallel_size):
            command = [
                sys.executable, "-m", "pageturner.runtime.rank", "--rank", str(rank), "--config", config,
                "--memory-fd", str(self._memory), "--alive-fd", str(alive), *(["--bound"] if bound else []),
            ]  # fmt: skip
            processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(self._memory, alive))
            )
        os.close(alive)
        os.close(self._memory)  # it is mapped
        self.pids = [process.pid for process in processes]
        self._ended = [os.pidfd_open(pid) for pid in self.pids]
        weakref.finalize(self.ops, _end, held, self._ended, processes)

    def begin(self, decoder: Decoder) -> None:
        """Wait for the others. EngineFault('rank_lost') when one of them ended; it has said why."""
        assert decoder.shard is not None
        self.ops.starts = decoder.shard.starts
        self.ops.begin(self._ended)


def load(path: Path, ops: Ops, config: EngineConfig, ranks: RankProcesses | None = None) -> Decoder:
    """The model; with ranks the slice of rank 0, while the others load theirs. ops: those of `ranks`, perhaps
    with something around them."""
    if ranks is None:
        return load_slice(path, ops, config)
    ranks.start(path)
    decoder = load_slice(path, ops, config)
    ranks.begin(decoder)
    return decoder


def _end(held: int, ended: list[int], processes: list[subprocess.Popen[bytes]]) -> None:
    """End the others with the backend of rank 0."""
    for fd in (held, *ended):
        os.close(fd)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
