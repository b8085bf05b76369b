"""How weights in groups lie on a device: by the definition, element for element, and in slices as at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.kernels import grid

from pageturner.formats import ggml
from pageturner.kernels.gpu import weights

KINDS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_1": 5, "Q8_0": 8, "Q6_K": 8}


class Memory:
    """What was uploaded, by the address of what was allocated: pieces behind each other."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}

    def alloc(self, nbytes: int) -> int:
        self.held[address := (1 + len(self.held)) << 32] = b""
        return address

    def upload(self, address: int, data: np.ndarray) -> None:
        assert data.flags.c_contiguous
        begin = address >> 32 << 32
        assert address - begin == len(self.held[begin])
        self.held[begin] += data.tobytes()


def packed(kind: str, rows: int, columns: int) -> tuple[Any, Memory, weights.Groups]:
    memory: Any = Memory()
    tensor = grid.weight(kind, rows, columns, seed=5)
    found = weights.pack(memory, tensor)
    assert isinstance(found, weights.Groups)
    return tensor, memory, found


@pytest.mark.parametrize("kind", KINDS)
def test_each_element_is_where_the_definition_says(kind: str) -> None:
    tensor, memory, lie = packed(kind, 21, 512)
    assert lie.bits == KINDS[kind]
    unit = 32 if lie.bits == 8 else 64
    words = np.frombuffer(memory.held[lie.q], np.uint32).reshape(2, -1, 8, 4, 2, 2)
    dtype = np.float16 if lie.scales == "fp16" else np.float32
    shape = (2, -1, 8, 128 // lie.group, 2)
    scales = np.frombuffer(memory.held[lie.scale], dtype).reshape(shape)
    lows = np.frombuffer(memory.held[lie.low], dtype).reshape(shape) if lie.low else 0 * scales
    values = np.empty((21, 512), np.float32)
    for n in range(21):
        for k in range(512):
            at = n // 16, k // unit, n % 8, k % 8 // 2, k % unit // (unit // 2), n % 16 // 8
            i, p = k % (unit // 2) // 8, k % 2
            if lie.bits == 8:
                q = ((int(words[at]) >> 8 * i + 16 * p & 255) ^ 128) - 128
            else:
                q = int(words[at]) >> 4 * i + 16 * p & 15
                if lie.bits == 5:
                    above = np.frombuffer(memory.held[lie.high], np.uint8).reshape(words.shape)[at]
                    q |= (int(above) >> i + 4 * p & 1) << 4
                q -= lie.zero
            group = n // 16, k // 128, n % 8, k % 128 // lie.group, n % 16 // 8
            values[n, k] = np.float32(q) * np.float32(scales[group]) + np.float32(lows[group])
    expected = ggml.dequantise(tensor.kind, tensor.shape, tensor.data)
    assert np.allclose(values, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Q4_0", "4.32.fp16"),
        ("Q4_1", "4.32.fp16"),
        ("Q4_K", "4.32"),
        ("Q5_0", "5.32"),
        ("Q8_0", "8.32"),
        ("Q6_K", "8.16"),
        ("MXFP4", "5.32"),
    ],
)
def test_scales_are_short_where_fp16_holds_them_exactly(kind: str, name: str) -> None:
    assert packed(kind, 16, 512)[2].sort == name


def test_each_fp8_code_is_where_the_definition_says_and_nan_is_widened() -> None:
    memory: Any = Memory()
    codes = np.random.default_rng(0).integers(0, 127, (20, 96), dtype=np.uint8)
    codes |= np.random.default_rng(1).integers(0, 2, codes.shape, dtype=np.uint8) << 7
    found = weights.pack(memory, grid.fp8(codes, np.arange(20)))
    assert isinstance(found, weights.Groups)
    assert (found.sort, found.nbytes) == ("fp8", 32 * (256 + 4))
    held = np.frombuffer(memory.held[found.q], np.uint8).reshape(2, -1, 8, 4, 2, 2, 4)
    for n in range(20):
        for k in range(96):
            at = (
                n // 16,
                k // 32,
                n % 8,
                k % 8 // 2,
                k % 32 // 16,
                n % 16 // 8,
                k % 16 // 8 + k % 2 * 2,
            )
            assert held[at] == codes[n, k]
    assert np.frombuffer(memory.held[found.scale], np.float32)[:20].tolist() == list(range(20))
    codes[3, 5] = 0x7F
    wide = weights.pack(memory, grid.fp8(codes, np.arange(20)))
    assert isinstance(wide, weights.FloatMatrix)
    assert wide.kind == "bf16"


@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_laid_out_as_all_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole, _ = packed(kind, 100, 768)
    monkeypatch.setattr(weights, "SLICE", 1)
    _, sliced, _ = packed(kind, 100, 768)
    assert sliced.held == whole.held
