"""Tensor maps: how a kernel finds the boxes of a plane that it copies by TMA, as CUDA's driver
encodes them.

Owns the call that encodes them, and how long they are kept. Must not know kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from pageturner.errors import EngineFault
from pageturner.kernels.gpu.driver import Plane
from pageturner.kernels.gpu.manifest import Box

NBYTES, ALIGNED = 128, 64  # of a tensor map
MAX_KEPT = 4096
_PROMOTED = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B


class TensorMap:
    """Bytes of a map where the driver wants them, which the struct of cuda-bindings is not
    always."""

    def __init__(self) -> None:
        self._raw = ctypes.create_string_buffer(NBYTES + ALIGNED)
        self._address = -(-ctypes.addressof(self._raw) // ALIGNED) * ALIGNED

    def getPtr(self) -> int:
        """Return where it is; cuda-bindings asks for it by this name."""
        return self._address


class TensorMaps:
    """Maps by plane and box. A launch copies what it is given, so a map may be dropped at any time.

    TYPES  of the parameters that a plane becomes: the map, and sizes and strides, which no kernel
           reads
    """

    TYPES = (None, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_int64)

    def __init__(self) -> None:
        self._kept: dict[tuple[Plane, Box], TensorMap] = {}
        self._encode: Any = None

    def flat(self, arguments: Sequence[Any], boxes: Sequence[Box]) -> list[Any]:
        """Arguments of a launch with the parameters of each plane in its place."""
        found: list[Any] = []
        left = iter(boxes)
        for value in arguments:
            if isinstance(value, Plane):
                found += (self.of(value, next(left)), 0, 0, 0, 0)
            else:
                found.append(value)
        return found

    def of(self, plane: Plane, box: Box) -> TensorMap:
        """The map of a plane; EngineFault('gpu_fault') where there can be none."""
        found = self._kept.get((plane, box))
        if found is None:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            found = self._kept[plane, box] = self._encoded(plane, box)
        return found

    def _encoded(self, plane: Plane, box: Box) -> TensorMap:
        if self._encode is None:  # a driver of before CUDA 12 has none
            self._encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
        made = TensorMap()
        sizes = (ctypes.c_uint64 * 2)(plane.columns, plane.rows)
        stride = (ctypes.c_uint64 * 1)(plane.columns * box.nbytes)
        sides, steps = (ctypes.c_uint32 * 2)(box.columns, box.rows), (ctypes.c_uint32 * 2)(1, 1)
        code = self._encode(
            ctypes.c_void_p(made.getPtr()),
            box.kind,
            2,
            ctypes.c_void_p(plane.address),
            sizes,
            stride,
            sides,
            steps,
            0,
            box.swizzle,
            _PROMOTED,
            0,
        )
        if code:
            raise EngineFault(
                "gpu_fault", f"cuTensorMapEncodeTiled failed: {code} for {plane} in {box}"
            )
        return made
