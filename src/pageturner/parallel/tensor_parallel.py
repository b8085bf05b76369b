"""The processes that compute one model together, by tensor or pipeline parallel: how they are
started, what they get, and how their end is seen.

Rank 0 is the process of the engine. The others are its children; each has a slice of the model and
of the KV, or some of the layers with theirs, and ends when rank 0 does: a pipe that only rank 0
holds open ends with it, and the kernel kills them with the thread that started them where that is
the main one. When one of them ends rank 0 sees it in the midst of a step, ends the others, raises
with what that one said, and ends as an engine ends: whoever watches it starts all of them again.

Owns that, the division of threads and cores, and the refusal of what does not go with it. Must not
know what is computed, nor what ranks say to each other (kernels/comm.py).
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault, bad_setting
from pageturner.kernels.base import Ops
from pageturner.kernels.comm import (
    Communicator,
    PipelineOps,
    RankOps,
    Slices,
    TensorParallelOps,
    shared_memory,
)
from pageturner.kernels.cpu import native_module
from pageturner.kernels.cpu.native import NativeOps
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model
from pageturner.models.shard import MAX_RANKS
from pageturner.models.weights import PLACES, WeightSize
from pageturner.parallel import drivers, numa

if TYPE_CHECKING:
    from pageturner.kernels.gpu.ops import GpuOps

WORDS = 4096  # bytes that a rank may say of its end


def ranks_of(config: EngineConfig) -> int:
    """Return how many processes compute the model."""
    return config.tensor_parallel_size * config.pipeline_parallel_size


def check(config: EngineConfig) -> None:
    """EngineFault for settings that do not go with several ranks."""
    size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if size == stages == 1:
        return
    flag = f"--tensor-parallel-size {size}" if size > 1 else f"--pipeline-parallel-size {stages}"
    for name, count in (("tensor", size), ("pipeline", stages)):
        if count > MAX_RANKS:
            raise bad_setting(f"--{name}-parallel-size is at most {MAX_RANKS}, not {count}")
    refused = {
        f"--pipeline-parallel-size {stages}": size > 1 and stages > 1,
        f"--backend {config.backend}": config.backend not in ("auto", "native"),
        "--device cuda": stages > 1 and config.device == "cuda",
        f"--speculation {config.speculation}": config.speculation in ("draft", "mtp"),
        "--kv-host-memory": config.kv_host_memory > 0,
        "--kv-file": bool(config.kv_file),
        "--prefill-listen": bool(config.prefill_listen),
        "--prefill-from": bool(config.prefill_from),
    }
    for other, given in refused.items():
        if given:
            raise bad_setting(f"{other} does not go with {flag} yet: leave one of them out")
    if not native_module.available_isas():
        raise EngineFault(
            "no_native_backend", f"{flag} needs the native kernels: {native_module.supported()[1]}"
        )


def threads_of(config: EngineConfig, rank: int) -> int:
    """Its part of the engine's threads, at least one. Stages compute one after the other: each has
    all of them, but for those of a node's cores."""
    size, threads = ranks_of(config), config.threads or len(os.sched_getaffinity(0))
    if config.pipeline_parallel_size > 1 and not config.pin_threads:
        return threads
    return max(1, threads * (rank + 1) // size - threads * rank // size)


def cores_of(cores: Sequence[int], rank: int, size: int) -> list[int]:
    """Its part of the cores, neighbours; where there are fewer than ranks, one that others have
    too."""
    first = len(cores) * rank // size
    return list(cores[first : max(first + 1, len(cores) * (rank + 1) // size)])


def make_ops(
    config: EngineConfig,
    rank: int,
    memory: int,
    cores: Sequence[int] = (),
    gpu: GpuOps | None = None,
) -> RankOps:
    """The backend of a rank. memory: the file that all ranks share. cores: those of the rank with
    --pin-threads, else none; where they are of one NUMA node, so is the memory that this thread and
    those
    that it starts ask for from here on, as long as the node has some. gpu: rank 0's on its device,
    None: the
    CPU; ranks but 0 open theirs with `--device cuda`, which rank 0 tells them."""
    if cores:
        numa.prefer(numa.node_of(cores))
    if rank and config.device == "cuda":
        gpu = drivers.open_rank(rank)
    if gpu is not None:
        from pageturner.kernels.gpu.ranks import GpuTensorParallelOps

        return GpuTensorParallelOps(Communicator(memory, rank, ranks_of(config)), gpu)
    own = NativeOps(threads_of(config, rank))
    if cores:
        own.pin_threads(list(cores))
    kind = PipelineOps if config.pipeline_parallel_size > 1 else TensorParallelOps
    return kind(Communicator(memory, rank, ranks_of(config)), own)


def places_of(config: EngineConfig) -> list[list[int]]:
    """The cores of each rank: neighbours, those of a NUMA node next to each other however they are
    numbered. Empty ones without --pin-threads."""
    size = ranks_of(config)
    if not config.pin_threads:
        return [[]] * size
    cores = numa.by_node(os.sched_getaffinity(0))
    return [cores_of(cores, rank, size) for rank in range(size)]


def load_slice(path: Path, ops: Ops, config: EngineConfig, rank: int = 0) -> Decoder:
    """The model, or a rank's slice or stage of it."""
    return load_model(
        path,
        ops,
        dtype=config.dtype,
        max_positions=config.max_model_len,
        quantization=config.quantization,
        activation_bits=config.activation_bits,
        packed_cache=config.packed_cache,
        rank=rank,
        ranks=config.tensor_parallel_size,
        stages=config.pipeline_parallel_size,
        mtp=config.speculation == "mtp",
        load_format=config.load_format,
        load_seed=config.load_seed,
        available=lambda: drivers.free_memory(ops),
    )


def slices_of(decoder: Decoder) -> Slices:
    """Return what ranks say of the slices of this decoder, or of its stages."""
    shard = decoder.shard
    assert shard is not None
    about = hashlib.blake2b(repr((decoder.spec, shard.identity)).encode(), digest_size=8)
    numbers = np.frombuffer(about.digest(), np.int32).tolist()
    sizes = [number for size in decoder.sizes.values() for number in astuple(size)]
    return Slices(shard.starts, tuple(numbers), shard.adapter, decoder.spec.layers, sizes)


class OtherRanks:
    """The processes of rank 1, 2, ... as rank 0 has them.

    ended  a file for each, readable when it has ended
    """

    def __init__(
        self, processes: list[subprocess.Popen[bytes]], held: int, words: list[int]
    ) -> None:
        self._processes, self._held, self._words = processes, held, words
        self.ended = [os.pidfd_open(process.pid) for process in processes]
        self._said: str | None = None

    def end(self) -> str:
        """End them, and say how those have ended that had: what each said, else by what. Later
        calls do nothing and say the same."""
        if self._said is not None:
            return self._said
        size = len(self._processes) + 1
        found = [
            f"rank {rank} of {size}: {self._how(process, words)}"
            for rank, (process, words) in enumerate(
                zip(self._processes, self._words, strict=True), 1
            )
            if process.poll() is not None
        ]
        self._said = "; ".join(found)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for fd in (self._held, *self.ended, *self._words):
            os.close(fd)
        return self._said

    @staticmethod
    def _how(process: subprocess.Popen[bytes], words: int) -> str:
        said = os.read(words, WORDS).decode(errors="replace")
        if said:
            return said
        code = process.returncode
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


class RankProcesses:
    """Rank 0, and what it knows of the others.

    ops   its backend, with which `load` loads
    pids  of the others, once they are started
    gpu   its own backend where each rank has a device; None: they compute on the CPU
    """

    def __init__(self, config: EngineConfig, gpu: GpuOps | None = None) -> None:
        self._config = replace(config, device="cpu" if gpu is None else "cuda")
        self._places = places_of(config)
        self._memory = shared_memory(ranks_of(config))
        self._close = weakref.finalize(self, os.close, self._memory)
        self.ops = make_ops(self._config, 0, self._memory, self._places[0], gpu)
        self.pids: list[int] = []
        self._others: OtherRanks | None = None

    def start(self, path: Path) -> None:
        """Start the others, which load their slices of this model."""
        alive, held = os.pipe()
        config = msgspec.json.encode(replace(self._config, model=str(path))).decode()
        bound = threading.current_thread() is threading.main_thread()
        processes, words = [], []
        for rank in range(1, ranks_of(self._config)):
            said, say = os.pipe()
            command = [
                sys.executable,
                "-m",
                "pageturner.parallel.rank",
                "--rank",
                str(rank),
                "--config",
                config,
                "--memory-fd",
                str(self._memory),
                "--alive-fd",
                str(alive),
                "--words-fd",
                str(say),
                "--cores",
                ",".join(map(str, self._places[rank])),
                *(["--bound"] if bound else []),
            ]
            processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(self._memory, alive, say)
                )
            )
            os.close(say)
            words.append(said)
        os.close(alive)
        self._close()  # it is mapped
        self.pids = [process.pid for process in processes]
        self._others = OtherRanks(processes, held, words)
        self.ops.at_loss = self._others.end
        weakref.finalize(self.ops, self._others.end)

    def begin(self, decoder: Decoder) -> None:
        """Wait for the others. EngineFault('rank_lost') when one of them ended, with what it
        said."""
        assert self._others is not None
        self.ops.slices = slices_of(decoder)
        self.ops.assemble(self._others.ended)
        if self._config.pipeline_parallel_size > 1:
            whole = iter(self.ops.total(self.ops.slices.counts))
            decoder.sizes = {
                place: WeightSize(next(whole), next(whole), next(whole)) for place in PLACES
            }

    def end(self) -> None:
        """End the others."""
        if self._others is not None:
            self._others.end()


def processes_of(config: EngineConfig, gpu: GpuOps | None) -> RankProcesses | None:
    """Return the processes of several ranks, not yet started. gpu: as RankProcesses."""
    return RankProcesses(config, gpu) if ranks_of(config) > 1 else None


def load(path: Path, ops: Ops, config: EngineConfig, ranks: RankProcesses | None = None) -> Decoder:
    """The model; with ranks the slice or stage of rank 0, while the others load theirs. ops: of
    `ranks`, perhaps with something around them."""
    if ranks is None:
        return load_slice(path, ops, config)
    ranks.start(path)
    try:
        decoder = load_slice(path, ops, config)
        ranks.begin(decoder)
    except BaseException:  # of a start that failed nothing stays
        ranks.end()
        raise
    return decoder
