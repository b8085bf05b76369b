"""What bench/gpu/run.py compares on a device, on the interpreted one: no row may differ."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

RUN = Path(__file__).parents[2] / "bench" / "gpu" / "run.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_row_differs_in_crowds_chunks_and_recordings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = importlib.util.spec_from_file_location("gpu_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run)
    assert run.bits(fake_gpu.FakeDriver(), run.TINY, (2, 20))
    assert '"differ": 0' in capsys.readouterr().out
