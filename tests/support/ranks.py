"""Ranks of tensor or pipeline parallel as threads of one process: what they compute, without what starting
them takes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pageturner.kernels.comm import (
    Communicator,
    PipelineOps,
    RankOps,
    TensorParallelOps,
    shared_memory,
)
from pageturner.kernels.cpu import native_module
from pageturner.kernels.cpu.native import NativeOps
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model
from pageturner.parallel.tensor_parallel import slices_of


@contextmanager
def ranks(
    path: Path,
    size: int,
    *,
    threads: int = 1,
    dtype: str = "float32",
    stages: bool = False,
    backend: Callable[[Communicator], RankOps] | None = None,
    **load: str,
) -> Iterator[tuple[Decoder, RankOps]]:
    """Rank 0 of a model, whose others follow. stages: each has some of the layers; backend: of a rank, not
    that of the CPU; load: further settings of `load_model`."""
    if not native_module.available_isas():
        pytest.skip("the kernels are not compiled")
    memory, (alive, held) = shared_memory(size), os.pipe()

    def slice_of(rank: int) -> tuple[Decoder, RankOps]:
        mine = Communicator(memory, rank, size)
        native = PipelineOps if stages else TensorParallelOps
        ops = backend(mine) if backend else native(mine, NativeOps(threads))
        how = {"stages": size} if stages else {"ranks": size}
        decoder = load_model(path, ops, dtype=dtype, rank=rank, **how, **load)  # type: ignore[arg-type]
        ops.slices = slices_of(decoder)
        return decoder, ops

    def follow(rank: int) -> None:
        decoder, ops = slice_of(rank)
        ops.follow(decoder.head, [alive])

    others = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
    try:
        for one in others:
            one.start()
        decoder, ops = slice_of(0)
        ops.assemble([])
        yield decoder, ops
    finally:
        os.close(held)
        for one in others:
            one.join(30)
        os.close(alive)
        os.close(memory)
    assert not any(one.is_alive() for one in others)
