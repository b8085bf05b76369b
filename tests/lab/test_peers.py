"""Benches beside other engines: figures of the in-process runners, pairs, table, picture. No peer runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pageturner.lab.bench import bench_serve
from pageturner.lab.bench.client import ResponseTimes

BENCH = Path(__file__).parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "accept")]

from peers import offline, picture, run, table  # noqa: E402
from peers.table import Pair  # noqa: E402


def figures(rate: float, latency: float = 100.0) -> dict[str, Any]:
    spread = {"p50": latency, "p99": 2 * latency}
    return {"output_tokens_per_s": rate, "ttft_ms": spread, "tpot_ms": spread, "started_s": 1.0}


def test_runners_make_the_same_figures_as_the_client() -> None:
    times = [[1.0, 1.5, 3.0], [2.0], [1.2, 1.3]]
    jobs = [offline.Job("x", len(t), begin=0.5, end=t[-1], prompt_tokens=7, times=t) for t in times]
    traces = [
        ResponseTimes(begin=0.5, end=t[-1], chunks=t, prompt_tokens=7, tokens=len(t)) for t in times
    ]
    mine, theirs = offline.summarise(jobs, 4.0), bench_serve.summarise(traces, 4.0)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert mine[name] == (pytest.approx(value) if value else value), name


def test_an_answer_of_the_wrong_length_has_failed() -> None:
    jobs = [offline.Job("x", 2, times=[1.0, 2.0]), offline.Job("x", 3, times=[1.0])]
    found = offline.summarise(jobs, 1.0)
    assert (found["failed"], found["output_tokens"]) == (1, 2)


@pytest.mark.parametrize("wanted", [2, 3])
def test_a_runner_warms_up_measures_and_lets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    """An engine of one answer length: whoever wants more has failed, and so has the runner."""
    log: list[str] = []

    @contextlib.contextmanager
    def start(args: argparse.Namespace) -> Iterator[offline.Run]:
        log.append("start")

        def run(jobs: list[offline.Job]) -> None:
            log.append(f"{len(jobs)} x {jobs[0].max_tokens}")
            for job in jobs:
                job.times = [1.0, 2.0]

        yield run
        log.append("let go")

    (tmp_path / "w.jsonl").write_text(json.dumps({"prompt": "x", "max_tokens": wanted}))
    flags = [
        "--model",
        "m",
        "--workload",
        str(tmp_path / "w.jsonl"),
        "--output",
        str(tmp_path / "out.json"),
    ]
    monkeypatch.setattr(sys, "argv", ["runner", *flags])
    with (
        contextlib.nullcontext() if wanted == 2 else pytest.raises(SystemExit, match="wrong length")
    ):
        offline.main(start, lambda _: None)
    assert log == ["start", f"4 x {offline.WARM_UP_TOKENS}", f"1 x {wanted}", "let go"]
    assert json.loads((tmp_path / "out.json").read_text())["failed"] == (wanted != 2)


def test_a_measurement_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LIMIT_S", 0.05)
    with pytest.raises(RuntimeError, match="took more than"):
        run._run(["sleep", "5"])


def test_jobs_come_in_order_of_arrival_and_when_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.jsonl"
    rows = [
        {"prompt": p, "max_tokens": 1, "arrival_s": at}
        for p, at in (("b", 4.0), ("a", 2.0), ("c", 9.0))
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [job.arrival_s for job in offline.load(path, 0, 0.0)] == [0.0] * 3
    jobs = offline.load(path, 2, 2.0)
    assert [(job.prompt, job.arrival_s) for job in jobs] == [("a", 1.0), ("b", 2.0)]
    monkeypatch.setattr(offline.time, "perf_counter", lambda: 101.5)
    assert [job.prompt for job in offline.due(jobs, 100.0)] == ["a"]
    assert [job.prompt for job in jobs] == ["b"]
    assert not offline.due(jobs, 100.0)


def test_ratios_are_above_one_where_ours_is_better() -> None:
    pairs = [
        Pair("mixed64", "p", figures(rate, latency), figures(100.0, 100.0))
        for rate, latency in ((200.0, 50.0), (150.0, 200.0), (400.0, 25.0))
    ]
    output, ttft = table.cell(pairs, "output"), table.cell(pairs, "TTFT p99")
    assert (output.ours, output.theirs, output.ratio, output.spread) == (
        200.0,
        100.0,
        2.0,
        (1.5, 4.0),
    )
    assert (ttft.ours, ttft.ratio, ttft.spread) == (100.0, 2.0, (0.5, 4.0))


def test_table_and_picture_hold_every_pair() -> None:
    pairs = [
        Pair("poisson", "a<b", figures(50.0, 200.0), figures(100.0)),
        Pair("single", "llama", figures(300.0), figures(100.0)),
        Pair("single", "llama", figures(100.0), figures(100.0)),
    ]
    for shown in (table.text(pairs), table.markdown(pairs)):
        assert "200 / 100 = 2.00x" in shown
        assert "50.0 / 100 = 0.50x" in shown
    widths = {line.count("|") for line in table.markdown(pairs).splitlines()}
    assert len(widths) == 1
    root = ElementTree.fromstring(picture.draw(pairs, "ours & theirs"))
    texts = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert "ours & theirs" in texts
    assert sum("one by one" in str(text) for text in texts) == 3
    assert "2.00x" in texts
    bars = [node for node in root.iter() if node.tag.endswith("rect")]
    assert [bar.get("class") for bar in bars] == ["page", *["worse"] * 3, *["better"] * 2]


def test_the_picture_holds_everything_within_its_borders() -> None:
    rates = {"llama": 1.0, "transformers-cb": 3.0, "openvino-prefix": 900.0}
    pairs = [
        Pair(workload, peer, figures(100.0, 100.0), figures(rate, 1e4 / rate))
        for workload in table.JUDGED
        for peer, rate in rates.items()
    ]
    root = ElementTree.fromstring(picture.draw(pairs, "t"))
    panels = [node for node in root.iter() if node.tag.endswith("}g")]
    assert len(panels) == sum(map(len, table.JUDGED.values()))
    width, height = map(float, str(root.get("viewBox")).split()[2:])
    corners = [tuple(map(float, re.findall(r"[\d.]+", str(p.get("transform"))))) for p in panels]
    assert len(set(corners)) == len(panels)
    for (left, top), panel in zip(corners, panels, strict=True):
        for bar in (node for node in panel if node.tag.endswith("rect")):
            x, y, w = (float(str(bar.get(name))) for name in ("x", "y", "width"))
            assert x >= picture.LABELS - 1
            assert x + w <= picture.LABELS + picture.PLOT + 1
            assert top + y < height
        assert 0 < left <= width - picture.COLUMN


def test_every_peer_has_a_model_and_is_found_only_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETURNER_PEERS", str(tmp_path))
    monkeypatch.setenv("PAGETURNER_CACHE", str(tmp_path))
    assert not any(run.installed(name) for name in run.PEERS)
    for path in ("openvino/bin/python", "smollm2-q8_0.gguf"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert [name for name in run.PEERS if run.installed(name)] == ["openvino-q8_0"]


class Stub:
    """Engines that only note that they were measured."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def engine(self, name: str, rate: float) -> Any:
        @contextlib.contextmanager
        def start() -> Iterator[run.Measure]:
            self.log.append(f"start {name}")

            def measure(workload: Path, flags: list[str]) -> dict[str, Any]:
                self.log.append(f"{name} {workload.stem} {' '.join(flags)}")
                return figures(rate)

            yield measure
            self.log.append(f"stop {name}")

        return start


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    monkeypatch.setattr(run, "ours", stub.engine("ours", 200.0))
    monkeypatch.setitem(run.PEERS, "llama", stub.engine("llama", 100.0))
    monkeypatch.setitem(run.PEERS, "vllm", stub.engine("vllm", 50.0))
    monkeypatch.setattr(run, "installed", lambda name: name in ("llama", "vllm"))
    return stub


def test_measurements_are_interleaved_and_fresh(stub: Stub) -> None:
    pairs = list(run.compare("llama", {"single": Path("single.jsonl")}, 2, ["--rate-scale", "2"]))
    once = ["start ours", "ours single ", "stop ours", "start llama", "llama single ", "stop llama"]
    assert stub.log == once * 2
    assert len(pairs) == 2


def test_who_starts_slowly_stays(stub: Stub) -> None:
    flags = ["--limit", "3", "--rate-scale", "2"]
    list(run.compare("vllm", {"poisson": Path("poisson.jsonl")}, 2, flags))
    assert stub.log.count("start vllm") == 1
    assert stub.log.count("start ours") == 2
    assert "ours poisson --limit 3 --rate-scale 2 --arrivals" in stub.log


def test_results_are_written_and_the_absent_are_named(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--peers", "llama", "openvino", "--workloads", "single", "mixed64", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words, "--output", str(tmp_path)])
    assert run.main() == 0
    out = capsys.readouterr().out
    assert "openvino: not installed" in out
    assert "200 / 100 = 2.00x" in out
    raw = json.loads((tmp_path / "peers.json").read_text())
    assert [pair["workload"] for pair in raw["pairs"]] == ["single", "mixed64"]
    assert "| single | llama | 1 |" in (tmp_path / "peers.md").read_text()
    ElementTree.fromstring((tmp_path / "peers.svg").read_text())


def test_the_real_servers_flags_are_those_of_bench_serve() -> None:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    parsed = parser.parse_args(run._translated(["--limit", "3", "--rate-scale", "2", "--arrivals"]))
    assert (parsed.num_prompts, parsed.rate_scale, parsed.arrivals) == (3, 2.0, True)
