"""What bench/gpu/run.py compares on a device, on the interpreted one: no row may differ."""

from __future__ import annotations

import pytest

from gpu import run

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_row_differs_in_crowds_chunks_and_recordings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run.bits(fake_gpu.FakeDriver(), run.TINY, (2, 20))
    assert '"differ": 0' in capsys.readouterr().out
