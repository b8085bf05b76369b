"""KV blocks of a device that travel: the same bits behind a way through the host, whole engines whose blocks
go to host memory and to a file, and what another engine finds there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine import devices
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.kernels.base import KV_TYPES, AttentionShape, Batch, KVSpec
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.parallel import drivers
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.engines import GOLDENS

gpu_device = pytest.importorskip("support.gpu_device", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

SIZE, LAYERS = 16, 3
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def ops() -> GpuOps:
    return GpuOps(gpu_device.make_driver(), 64 << 20, graphs=False)


def spec_of(dtype: str, latent: bool) -> KVSpec:
    heads, dim = (1, 40) if latent else (2, 24)
    return KVSpec(LAYERS, 6, SIZE, heads, dim, dtype, latent, dtype == "fp8_e4m3")


KINDS = [
    (dtype, latent)
    for latent in (False, True)
    for dtype in KV_TYPES
    if (dtype, latent) != ("float32", True)
]


@pytest.mark.parametrize(
    ("dtype", "latent"),
    [one if one == ("int8", False) else pytest.param(*one, marks=slow) for one in KINDS],
)
def test_blocks_that_went_out_and_back_elsewhere_are_the_same(
    ops: GpuOps, dtype: str, latent: bool
) -> None:
    ops.begin()
    spec = spec_of(dtype, latent)
    kv = ops.alloc_kv(spec)
    width, slots = spec.kv_heads * spec.head_dim, grid.i32(np.arange(2 * SIZE))
    for layer in range(LAYERS):
        k, v = (ops.on_device(grid.normal(2 * SIZE, width, seed=2 * layer + i)) for i in range(2))
        ops.kv_write(kv, layer, k, None if latent else v, slots)
    shape = AttentionShape(4, spec.kv_heads, spec.head_dim, 0.2, latent=32 if latent else 0)
    q = grid.normal(1, 4 * spec.head_dim, seed=9)

    def mixed(layer: int, table: list[int]) -> np.ndarray:
        one = Batch(
            grid.i32([0]),
            grid.i32([2 * SIZE - 1]),
            grid.i32([0, 1]),
            grid.i32([2 * SIZE]),
            grid.i32([table]),
            grid.i32([-1]),
            grid.i32([0]),
        )
        return ops.to_numpy(ops.attention(ops.on_device(q), kv, layer, one, shape)).copy()

    before = [mixed(layer, [0, 1]) for layer in range(LAYERS)]
    bytes_of_block = ops.block_bytes(kv)
    assert bytes_of_block == kv.spec.bytes_per_token * SIZE
    kept = np.empty((2, bytes_of_block), np.uint8)
    ops.read_blocks(kv, grid.i32([1, 0]), kept)
    assert (kept[0] != kept[1]).any()
    ops.write_blocks(kv, grid.i32([5, 3]), kept)
    again = np.empty_like(kept)
    ops.read_blocks(kv, grid.i32([5, 3]), again)
    assert (again == kept).all()
    ops.write_blocks(kv, grid.i32([0, 1]), np.full_like(kept, 0xFF))
    for layer, expected in enumerate(before):
        assert (mixed(layer, [3, 5]) == expected).all()
    ops.free_kv(kv)


# -- whole engines -------------------------------------------------------------------------------------------
PARAMS = SamplingParams(temperature=1.0, max_tokens=4, stop_ids=(), ignore_eos=True)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(drivers.DRIVER, "support.fake_gpu:FakeDriver")


def engine(blocks: int, model: Path = GOLDENS / "tiny_llama.gguf", **settings: Any) -> LoadedEngine:
    """With room for so many blocks of 4 tokens."""
    given: dict[str, Any] = {
        "device": "cuda",
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "max_model_len": 48,
        "block_size": 4,
        "dtype": "float32",
        "kv_cache_dtype": "float16",
        "model": str(model),
    }
    needs = devices.needs_of(model, EngineConfig(**given))
    return make_engine(EngineConfig(kv_cache_memory=(blocks + 1) * needs.block, **given | settings))


def run(built: LoadedEngine, given: list[Request]) -> list[tuple[int, ...]]:
    got: dict[int, list[int]] = {request.id: [] for request in given}
    for request in given:
        assert built.engine.submit(request) == []
    while built.engine.has_work:
        for event in built.engine.step():
            assert event.failure is None
            got[event.id] += event.tokens
    return [tuple(got[request.id]) for request in given]


def talk(built: LoadedEngine) -> list[tuple[int, ...]]:
    """Three texts, and the first again, whose blocks were pushed out by then."""
    texts = [tuple(range(5 + 30 * n, 26 + 30 * n)) for n in (0, 1, 2, 0)]
    return [run(built, [Request(n, text, PARAMS)])[0] for n, text in enumerate(texts)]


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["tiny_llama.gguf", "families/deepseek_v2"])
def test_a_text_whose_blocks_went_to_the_host_is_not_computed_again(
    device: None, model: str
) -> None:
    want = talk(engine(64, GOLDENS / model))
    built = engine(12, GOLDENS / model, kv_host_memory=1 << 20)
    assert talk(built) == want
    stats = built.engine.stats()
    assert stats["kv_host_errors"] == 0
    assert stats["kv_host_hits"] >= 4
    built.engine.close()


@slow
@pytest.mark.timeout(900)
def test_an_engine_finds_the_blocks_that_the_last_one_wrote(device: None, tmp_path: Path) -> None:
    given: dict[str, Any] = {"kv_file": str(tmp_path / "kv"), "kv_file_size": 1 << 22}
    first = engine(12, **given)
    request = Request(1, tuple(range(5, 38)), PARAMS)
    want = run(first, [request])
    first.engine.close()
    second = engine(12, **given)
    assert run(second, [Request(2, request.prompt, PARAMS)]) == want
    assert second.engine.stats()["kv_file_hits"] == len(request.prompt) // 4
    second.engine.close()


@slow
@pytest.mark.timeout(900)
def test_preempted_sequences_come_back_from_the_host(device: None) -> None:
    long = SamplingParams(temperature=1.0, max_tokens=20, stop_ids=(), ignore_eos=True)
    requests = [Request(n, tuple(range(5 + n, 17 + n)), long) for n in range(2)]
    want = run(engine(64), requests)
    built = engine(12, admission="none", kv_host_memory=1 << 20)
    assert run(built, requests) == want
    stats = built.engine.stats()
    assert stats["preemptions"] > 0
    assert stats["kv_host_hits"] > 0
    built.engine.close()
