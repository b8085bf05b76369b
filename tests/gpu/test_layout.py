"""How weights in groups lie on a device: by the definition, element for element, and in slices as at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.kernels import grid

from pageturner.files import ggml
from pageturner.kernels.gpu import weights

KINDS = {"Q4_0": 4, "Q4_1": 4, "Q5_1": 5, "Q8_0": 8, "Q6_K": 8}


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
    scales = np.frombuffer(memory.held[lie.scale], np.float32).reshape(2, -1, 16)
    lows = np.frombuffer(memory.held[lie.low], np.float32).reshape(2, -1, 16) if lie.low else 0 * scales
    values = np.empty((21, 512), np.float32)
    for n in range(21):
        for k in range(512):
            at = n // 16, k // unit, n % 8, k % 8 // 2, k % unit // (unit // 2), n % 16 // 8
            i, p = k % (unit // 2) // 8, k % 2
            if lie.bits == 8:
                q = (int(words[at]) >> 8 * (2 * i + p) & 255) - 128
            else:
                q = int(words[at]) >> 4 * i + 16 * p & 15
                if lie.bits == 5:
                    above = np.frombuffer(memory.held[lie.high], np.uint8).reshape(words.shape)[at]
                    q |= (int(above) >> i + 4 * p & 1) << 4
                q -= lie.zero
            group = n // 16, k // lie.group, n % 16
            values[n, k] = np.float32(q) * scales[group] + lows[group]
    expected = ggml.dequantise(tensor.kind, tensor.shape, tensor.data)
    assert np.allclose(values, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_laid_out_as_all_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, whole, _ = packed(kind, 100, 768)
    monkeypatch.setattr(weights, "SLICE", 1)
    _, sliced, _ = packed(kind, 100, 768)
    assert sliced.held == whole.held
