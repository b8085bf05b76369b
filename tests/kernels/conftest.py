from __future__ import annotations

import pytest
from grid import ISAS

from pageturner.kernels.cpu.native import NativeOps


@pytest.fixture(scope="module", params=ISAS)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    """The native backend with two threads, by each instruction set."""
    return NativeOps(2, request.param)
