"""The doctor's report: facts, plan, warnings, and when nothing can run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pageturner import LLM, cli, memory
from pageturner.cli import doctor
from pageturner.config.settings import EngineConfig
from pageturner.engine import machine, machine_limits
from pageturner.kernels import peak
from pageturner.kernels.cpu import native_module
from support.hf_folder import make_folder


@pytest.fixture(autouse=True)
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where limits are kept meanwhile."""
    path = tmp_path / "cache" / "limits.json"
    monkeypatch.setattr(machine_limits, "limits_file", lambda: path)
    return path


@pytest.fixture
def config(tiny: list[str]) -> EngineConfig:
    return EngineConfig(model=tiny[0])


def test_the_plan_is_what_the_engine_would_take(
    tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"max_num_seqs": 4, "block_size": 8, "max_model_len": 100}
    flags = [
        word for name, n in settings.items() for word in ("--" + name.replace("_", "-"), str(n))
    ]
    assert cli.main(["doctor", tiny[0], "--no-measure", "--json", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    built = LLM(tiny[0], backend="reference", **settings).built
    assert report["kv"]["blocks"] == built.num_blocks
    assert report["kv"]["bytes_per_token"] * 8 * (built.num_blocks + 1) == built.kv_bytes
    assert report["model"]["bytes"] == Path(tiny[0]).stat().st_size
    assert sum(report["model"]["kinds"].values()) == report["model"]["parameters"] > 1000
    assert report["problems"] == []


def test_the_plan_with_a_draft_model(tiny: list[str]) -> None:
    config = EngineConfig(model=tiny[0], kv_cache_memory=1 << 20)
    alone = doctor.examine(config, measure=False)
    both = doctor.examine(replace(config, speculation="draft", draft_model=tiny[0]), measure=False)
    assert both.data["kv"]["blocks"] == alone.data["kv"]["blocks"] // 2
    assert both.data["kv"]["bytes"] <= alone.data["kv"]["bytes"]
    assert "a step 100% of the model's" in both.sections["model"]["draft model"]
    missing = doctor.examine(replace(config, speculation="draft"), measure=False)
    assert missing.problems == ["--speculation draft and --draft-model MODEL go together"]


def test_numpy_is_measured_where_there_are_no_kernels(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, product = machine.measure_numpy(1 << 20, 0.0)
    assert read > 0
    assert product > 0
    monkeypatch.setattr(machine, "measure_numpy", lambda: (12.0, 34.0))
    monkeypatch.setattr(native_module, "supported", lambda: (False, "they are not built"))
    monkeypatch.setattr(native_module, "available_isas", lambda: [])
    report = doctor.examine(config)
    assert report.data["measured"]["read_gb_s"] == 12.0
    assert "34 GFLOP/s" in report.sections["measured"]["fp32 products"]


@pytest.mark.skipif(not native_module.supported()[0], reason="the native kernels are not built")
def test_limits_are_measured_with_native_kernels(
    config: EngineConfig, limits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def measure(isa: str, threads: int) -> peak.Peak:
        measured.append((isa, threads))
        return peak.Peak(
            isa,
            threads,
            900.0,
            None,
            dict(zip(peak.READ, (200.0, 150.0, 40.0, 29.0), strict=True)),
            11.0,
        )

    monkeypatch.setattr(peak, "measure", measure)
    report = doctor.examine(replace(config, threads=3))
    assert measured == [(report.data["kernels"]["isa"], 3)]
    rows = report.sections["measured"]
    assert "29 of 256M" in rows["read"]
    assert "900 GOP/s" in rows["integer products"]
    assert rows["fp32 products"] == "not known"
    assert report.data["measured"]["copy_gb_s"] == 11.0
    assert str(limits) in rows["kept"]
    kept = machine_limits.stored_peak(report.data["kernels"]["isa"], 3)
    assert kept is not None
    assert kept.integer_gop_s == 900.0
    assert machine_limits.stored_peak(report.data["kernels"]["isa"], 2) is None


def test_text_has_every_section(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", tiny[0], "--no-measure"]) == 0
    out = capsys.readouterr().out
    for section in ("machine", "kernels", "model", "KV cache", "would be used"):
        assert f"\n{section}\n" in "\n" + out
    assert out.endswith("ready to serve\n")


def test_sampling_defaults_are_shown(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", temperature=0.6, top_k=20)
    config = EngineConfig(model=str(folder))
    report = doctor.examine(config, measure=False)
    assert "temperature 0.6, top_k 20" in report.sections["model"]["sampling"]
    assert report.data["model"]["sampling"] == {"temperature": 0.6, "top_k": 20}
    neutral = doctor.examine(replace(config, generation_config="none"), measure=False)
    assert neutral.data["model"]["sampling"] == {}
    wrong = doctor.examine(replace(config, generation_config=str(tmp_path)), measure=False)
    assert "--generation-config" in " ".join(wrong.problems)


def test_no_native_kernels_is_a_warning(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_module, "supported", lambda: (False, "they are not built"))
    monkeypatch.setattr(native_module, "available_isas", lambda: [])
    report = doctor.examine(config, measure=False)
    assert any("no native kernels: they are not built" in text for text in report.warnings)
    assert report.problems == []
    assert report.sections["kernels"]["chosen"] == "reference"
    asked = doctor.examine(replace(config, backend="native"), measure=False)
    assert asked.problems


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": "/nowhere/model.gguf"}, "/nowhere/model.gguf"),
        ({"model": __file__}, "test_doctor.py"),
        ({"kv_cache_memory": 100}, "no room for the KV cache"),
        ({"max_model_len": 1 << 30}, "context"),
    ],
)
def test_problems_are_1(config: EngineConfig, settings: dict[str, object], problem: str) -> None:
    report = doctor.examine(replace(config, **settings), measure=False)
    assert problem in " ".join(report.problems)
    assert report.render().endswith("nothing can run")


def test_a_model_too_large_is_a_problem(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1000)
    report = doctor.examine(config, measure=False)
    assert any(
        "GB are free: use a smaller or a more quantised model" in text for text in report.problems
    )


def test_a_model_that_can_be_fetched_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    assert cli.main(["doctor", "--no-measure"]) == 0
    assert "warning: smollm2 is not here yet" in capsys.readouterr().out


def test_scarce_resources_are_warned_about(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    poor = replace(machine.inspect(), usable=(0, 1, 2, 5), quota=1.5, load=99.0, huge_pages="never")
    monkeypatch.setattr(machine, "inspect", lambda: poor)
    report = doctor.examine(replace(config, kv_cache_memory=1 << 16), measure=False)
    text = " ".join(report.warnings)
    for part in ("busy", "huge pages are off", "--threads 1", "less than one sequence"):
        assert part in text
    assert "usable 0-2,5" in report.sections["machine"]["cores"]


def test_limits_are_read_from_the_system(tmp_path: Path) -> None:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (sys / "fs/cgroup").mkdir(parents=True)
    (sys / "kernel/mm/transparent_hugepage").mkdir(parents=True)
    proc.mkdir()
    (proc / "cpuinfo").write_text("model name\t: Abacus 9\nflags\t\t: fpu avx2 fma sse\n")
    (proc / "meminfo").write_text("MemTotal:       1024 kB\n")
    (sys / "fs/cgroup/cpu.max").write_text("150000 100000\n")
    (proc / "self").mkdir()
    (proc / "self/cgroup").write_text("0::/\n")
    (sys / "fs/cgroup/memory.max").write_text("4096\n")
    (sys / "fs/cgroup/memory.current").write_text("0\n")
    (sys / "kernel/mm/transparent_hugepage/enabled").write_text("always [never] madvise\n")
    here = machine.inspect(proc, sys)
    assert (here.cpu, here.flags, here.memory) == ("Abacus 9", ("avx2", "fma"), 1 << 20)
    assert (here.quota, here.memory_limit, here.huge_pages) == (1.5, 4096, "never")
    (sys / "fs/cgroup/cpu.max").write_text("max 100000\n")
    (sys / "fs/cgroup/memory.max").write_text("max\n")
    here = machine.inspect(proc, sys)
    assert (here.quota, here.memory_limit) == (None, None)


def test_what_others_took_is_told_from_what_we_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two processors that this program may use; a third one is nobody's business here."""
    tick = 1 / os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0\n"
    )
    clock, own = [100.0], [7.0]
    monkeypatch.setattr(machine, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "times", lambda: (own[0], 0.0, 0.0, 0.0, 0.0))
    meter = machine.LoadMeter(tmp_path)
    half = round(5 / tick)
    stat.write_text(
        f"cpu 0 0 0 0 0 0 0 0\ncpu0 {half} 0 0 0 0 0 0 0\ncpu1 {half} 0 0 0 0 0 0 {half // 5}\n"
        f"cpu2 {9 * half} 0 0 0 0 0 0 0\n"
    )
    clock[0], own[0] = 110.0, 13.0
    others, stolen = meter.read()
    assert others == pytest.approx((10 - 6) / 20)
    assert stolen == pytest.approx(1 / 20)


def test_a_machine_that_tells_nothing_took_nothing(tmp_path: Path) -> None:
    assert machine.LoadMeter(tmp_path).read() == (0.0, 0.0)
