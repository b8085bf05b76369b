"""The kernel cases: all parts are timed on small shapes, shares follow from limits, runs are compared."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner import cli
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.peak import READ, Peak
from pageturner.kernels.reference import ReferenceOps
from pageturner.lab.bench import bench_kernels, kernel_cases
from pageturner.lab.bench.kernel_cases import CaseSelection, KernelCase, ModelShape

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import kernels_against
from support.refusals import engine_fault

native = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")

TINY = ModelShape("tiny", 64, 96, 2, 1, 32, 128, 2)
SMALL = CaseSelection(
    (TINY,), ("Q4_1", "Q4_K", "F32"), (1, 3), ("float16", "int5"), ((2, 20, 1), (1, 24, 8))
)
LIMITS = Peak("x", 1, 100.0, 10.0, dict.fromkeys(READ, 20.0), 5.0)


def case(integer: float = 0.0, floats: float = 0.0, nbytes: float = 0.0) -> KernelCase:
    return KernelCase("gemm", "w", "Q4_1", 1, integer, floats, nbytes, lambda: None)


@native
@pytest.mark.parametrize("part", kernel_cases.PARTS)
def test_every_part_is_timed(part: str) -> None:
    made = list(kernel_cases.kernel_cases(NativeOps(1), SMALL, part))
    assert made
    assert len({(r.name, r.kind, r.rows) for r in made}) == len(made), "two cases of one name"
    for each in made:
        each.call()
        assert each.part == part
        assert each.nbytes > 0
        assert (each.integer + each.floats > 0) == (part in ("gemm", "attention", "layer"))


def test_the_flag_takes_every_part() -> None:
    parser = argparse.ArgumentParser()
    bench_kernels.add_arguments(parser)
    parts = list(kernel_cases.PARTS)
    assert parser.parse_args(["--only", *parts]).only == parts


@native
def test_what_a_backend_lacks_is_left_out() -> None:
    ops = NativeOps(1)
    kinds = {r.kind for r in kernel_cases.kernel_cases(ops, SMALL, "gemm")}
    assert kinds == {"Q4_1", "Q4_1 x1.5", "Q4_1 x2", "F32"}  # rows of 64 hold no block of 256
    assert {r.kind for r in kernel_cases.kernel_cases(ops, SMALL, "attention")} == {"float16"}


@native
def test_operations_of_a_product_are_counted() -> None:
    found = {
        r.name.split()[1]: r
        for r in kernel_cases.kernel_cases(NativeOps(1), SMALL, "gemm")
        if r.kind == "Q4_1"
    }
    assert found["k,v"].integer == 2 * 3 * 2 * 32 * 64  # the last of 1 and 3 rows
    assert found["gate,up"].integer == 2 * 3 * 2 * 96 * 64
    assert found["head"].floats == 0


def test_attention_counts_what_is_seen() -> None:
    batch, blocks = kernel_cases.decode_batch(2, 20, 4)
    assert blocks == 4
    assert sorted(np.unique(batch.block_table)) == [0, 1, 2, 3]
    assert batch.positions.tolist() == [16, 17, 18, 19] * 2
    at = batch.block_table[:, 1].repeat(4) * 16 + np.tile(np.arange(4), 2)
    assert batch.slots.tolist() == at.tolist()
    seen = 2 * (17 + 18 + 19 + 20)
    assert kernel_cases._seen(TINY, batch) == 4 * seen * 64


@pytest.mark.parametrize(
    ("what", "bound", "share"),
    [
        (case(integer=2e9, nbytes=2e8), "integer", 0.02 / 0.05),
        (case(floats=3e8, nbytes=2e8), "float", 0.03 / 0.05),
        (case(integer=2e9, floats=3e8, nbytes=2e8), "float", 0.05 / 0.05),
        (case(integer=1e8, nbytes=4e8), "bytes", 0.02 / 0.05),
    ],
)
def test_a_share_is_the_floor_over_the_time(what: KernelCase, bound: str, share: float) -> None:
    row = bench_kernels.row_of(what, 0.05, LIMITS)
    assert (row["bound"], row["share"]) == (bound, pytest.approx(share))
    assert row["us"] == pytest.approx(5e4)
    assert row["gb_s"] == pytest.approx(1e-9 * what.nbytes / 0.05)


def test_without_a_limit_there_is_no_share() -> None:
    unknown = Peak("portable", 1, None, None, LIMITS.read_gb_s, 5.0)
    row = bench_kernels.row_of(case(integer=1e9, nbytes=1), 0.05, unknown)
    assert row["share"] is None
    assert row["gop_s"] == pytest.approx(20)


def test_the_best_round_counts() -> None:
    now = 0.0
    lengths = iter([9.0, 9.0, 5.0, 3.0, 4.0])

    def call() -> None:
        nonlocal now
        now += next(lengths)

    with pytest.raises(StopIteration):  # a budget without end: until the calls run out
        bench_kernels.best(call, lambda: now, 1e9)
    lengths = iter([9.0, 9.0, 5.0])
    assert bench_kernels.best(call, lambda: now, 0.0) == 5.0


@native
def test_figures_are_written_read_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_cases, "SHORT", SMALL)
    monkeypatch.setattr(bench_kernels, "measure", lambda isa, threads, seconds: LIMITS)
    file = tmp_path / "kernel_cases.json"
    command = ["bench", "kernels", "--threads", "1", "--budget", "0", "--only", "gemm"]
    assert cli.main([*command, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    for row in figures["rungs"]:
        row["us"] = 1e9
    file.write_text(json.dumps(figures))
    monkeypatch.setattr(bench_kernels, "measure", None)
    assert cli.main([*command, "--against", str(file), "--limits", str(file)]) == 0
    out = capsys.readouterr().out
    assert "geometric means: gemm" in out
    assert len([line for line in out.splitlines() if line.endswith("x")]) > len(figures["rungs"])
    file.write_text("{}")
    assert cli.main([*command, "--against", str(file)]) == 2
    assert "holds no figures" in capsys.readouterr().err


def test_of_two_commits_the_best_times_are_compared() -> None:
    def run(*times: float) -> dict[str, Any]:
        names = [
            {"part": "gemm", "name": str(i), "kind": "F32", "rows": 1, "us": t}
            for i, t in enumerate(times)
        ]
        return {"rungs": names, "fingerprint": "x"}

    found = kernels_against.best_of([run(5.0, 2.0), run(3.0, 4.0)])
    assert [row["us"] for row in found["rungs"]] == [3.0, 2.0]
    assert list(bench_kernels.compare(run(2.0)["rungs"], run(3.0, 9.0)["rungs"]).values()) == [1.5]


def test_a_weight_of_broken_blocks_is_refused() -> None:
    with engine_fault("whole blocks of 256"):
        kernel_cases.weight(ReferenceOps(), "Q4_K", 16, 64)
