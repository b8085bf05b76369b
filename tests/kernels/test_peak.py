"""The limits of the machine: present for every instruction set, and no kernel passes them."""

from __future__ import annotations

import pytest

from pageturner.kernels import peak
from pageturner.kernels.cpu import native_module
from pageturner.kernels.cpu.native_module import available_isas
from support.refusals import engine_fault

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("threads", [1, 3])
def test_every_limit_of_every_instruction_set(
    isa: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak, "_READ_BYTES", (1 << 16, 1 << 18, 1 << 19, 1 << 20))
    found = peak.measure(isa, threads, seconds=0.0)
    assert set(found.read_gb_s) == set(peak.READ)
    assert min(*found.read_gb_s.values(), found.copy_gb_s) > 0
    for value in (found.integer_gop_s, found.fp32_gop_s):
        assert value is None if isa == "portable" else value is not None and value > 1


def test_bandwidth_goes_by_the_bytes_in_use() -> None:
    limits = peak.Peak("x", 2, None, None, {"256K": 8.0, "8M": 4.0, "32M": 2.0, "256M": 1.0}, 1.0)
    assert [limits.read_of(n) for n in (0, 512 << 10, 8 << 20, 32 << 20, 1 << 40)] == [
        8,
        8,
        4,
        2,
        1,
    ]
    assert limits.read_of(16 << 20) == pytest.approx(3.0)  # halfway on a logarithmic scale


def test_wrong_questions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for what, threads in ((-1, 1), (4, 1), (0, 0)):
        with pytest.raises(ValueError, match="no such limit"):
            native_module.module().measure_limit(available_isas()[0], what, threads, 0, 0.0)
    monkeypatch.setattr(native_module, "_native", None)
    with engine_fault("compiler"):
        peak.measure("avx2", 1)


def test_fewer_bytes_come_at_least_as_fast_as_more() -> None:
    assert peak.no_slower([108.0, 20.0, 27.0, 26.0]) == [108.0, 27.0, 27.0, 26.0]


def test_the_higher_one_of_two_measurements_is_the_limit() -> None:
    first = peak.Peak("x", 2, 5.0, None, {"256K": 8.0, "256M": 1.0}, 1.0)
    second = peak.Peak("x", 2, 4.0, None, {"256K": 7.0, "256M": 3.0}, 2.0)
    assert peak.best_of(first, second) == peak.Peak(
        "x", 2, 5.0, None, {"256K": 8.0, "256M": 3.0}, 2.0
    )
