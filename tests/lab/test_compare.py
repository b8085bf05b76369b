"""Comparisons: who competes, what they are sent, figures against the step log, pictures, the page."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import msgspec
import pytest

from pageturner.config.settings import EngineConfig
from pageturner.lab.bench.engine_bench import EngineBench
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.compare import comparison, literature_claims, run_timeline, simulated_comparison
from pageturner.lab.compare.comparison import Contender
from pageturner.lab.compare.comparison_results import About, ComparisonResults, Disturbance, find
from pageturner.lab.compare.run_timeline import Moment, RunTimeline
from pageturner.lab.reporting import charts, comparison_page
from pageturner.lab.reporting import comparison_pictures as pictures
from pageturner.lab.simulation import log_replay, recorded_runs
from pageturner.lab.simulation.recorded_runs import RecordedRun
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import TrafficRequest
from pageturner.lab.traffic.traffic_generators import MIXES
from pageturner.request import Request
from pageturner.telemetry.step_log import Arrived
from pageturner.telemetry.work import ModelCosts
from support.refusals import engine_fault

CAP = 96
TINY = Path(__file__).parents[1] / "goldens" / "tiny_llama.gguf"


def calibration(**settings: object) -> CalibratedCost:
    """2 ms a step and 1 ms a row, of an engine that never was."""
    config = (
        msgspec.to_builtins(EngineConfig(model="no-such-model", max_num_seqs=8, static_batch=4))
        | settings
    )
    about = {"config": config, "blocks": 512, "window": 0, "recent": 0, "max_model_len": 2048}
    return CalibratedCost([0.002, 0, 0.001, 0, 0, 1e-6, 0], (0, 0), 1, 0.0005, about)


@pytest.fixture(scope="module")
def bench() -> EngineBench:
    return comparison.simulated_engine(calibration(static_patience=1.0), lambda known: known)[0]


def requests_of(bench: EngineBench, each: list[TrafficRequest]) -> list[Request]:
    return comparison.make_requests(
        each, CAP, bench.built.max_model_len, comparison.words_as_tokens
    )


def about(workload: str = "some requests") -> About:
    return About(
        workload,
        "an engine",
        "pageturner compare",
        "a machine",
        False,
        1,
        LatencyTargets(1.0, 0.05),
    )


def found_of(
    bench: EngineBench,
    each: list[Contender],
    asked: list[TrafficRequest],
    folder: Path,
    words: str = "x",
) -> ComparisonResults:
    requests = requests_of(bench, asked)
    runs = comparison.run_contenders(bench, each, requests, 1, folder, progress=False)
    return find(runs, requests, about(words))


# -- who competes, and for what ------------------------------------------------------------------------------


def test_every_policy_meets_every_order_once() -> None:
    found = comparison.contenders(["static", "chunked", "static"], ["fcfs", "sjf"])
    assert [c.name for c in found] == ["static", "static + sjf", "chunked", "chunked + sjf"]


@pytest.mark.parametrize(
    ("policies", "orders", "said"),
    [
        (["chunked", "fast"], ["fcfs"], "unknown policy 'fast'"),
        (["chunked"], ["lifo"], "unknown order 'lifo'"),
        ([], ["fcfs"], "at least one policy"),
        (["chunked"], [], "at least one order"),
    ],
)
def test_unknown_names_are_refused(policies: list[str], orders: list[str], said: str) -> None:
    with engine_fault(said, code="bad_setting"):
        comparison.contenders(policies, orders)


def test_nobody_is_told_a_length(bench: EngineBench) -> None:
    requests = requests_of(
        bench,
        [
            TrafficRequest("a b c", None, 7),
            TrafficRequest("a", 20, 50),
            TrafficRequest("a", None, 500),
        ],
    )
    assert {request.params.max_tokens for request in requests} == {CAP}
    assert [request.params.forced_end for request in requests] == [7, 20, CAP]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "no request"),
        (
            [TrafficRequest("a", None, 1, 2.0), TrafficRequest("a", None, 1, 1.0)],
            "request 2 arrives at 1 s, the one before it at 2 s",
        ),
        ([TrafficRequest("a", None, 1, -1.0)], "request 1 arrives at -1 s"),
        ([TrafficRequest("a", None, 1, float("nan"))], "request 1 arrives at nan s"),
        ([TrafficRequest("a " * 2000, None, 90)], "request 1 has 2000 [+] 90 tokens"),
        ([TrafficRequest("", None, 90)], "request 1 has 0 [+] 90 tokens"),
    ],
)
def test_impossible_workloads_are_refused(
    bench: EngineBench, asked: list[TrafficRequest], said: str
) -> None:
    with engine_fault(said):
        requests_of(bench, asked)


@pytest.mark.parametrize("name", MIXES)
def test_mixes_are_in_order_and_the_same_again(name: str) -> None:
    asked = MIXES[name].make(40, 3)
    assert len(asked) == 40
    assert asked == MIXES[name].make(40, 3)
    times = [job.arrival for job in asked]
    assert times == sorted(times)
    assert name == "uniform" or len({job.output for job in asked}) > 1


def test_the_loud_tenant_sends_ten_times_as_much() -> None:
    counts = Counter(job.tenant for job in MIXES["tenants"].make(95, 0))
    assert counts.pop("loud") == 50
    assert set(counts.values()) == {5}
    assert len(counts) == 9


# -- figures against the log ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(
    bench: EngineBench, tmp_path_factory: pytest.TempPathFactory
) -> dict[Contender, list[RecordedRun]]:
    each = comparison.contenders(["static", "prefill_first", "chunked", "unbatched"], ["fcfs"])
    asked = MIXES["mixed"].make(18, 1)
    folder = tmp_path_factory.mktemp("logs")
    return comparison.run_contenders(
        bench, each, requests_of(bench, asked), 1, folder, progress=False
    )


def test_answers_are_the_same_everywhere(runs: dict[Contender, list[RecordedRun]]) -> None:
    told = [comparison.answers_of(run) for mine in runs.values() for run in mine]
    assert len(told[0]) == 18
    assert all(one == told[0] for one in told)


def test_figures_are_what_the_log_says(runs: dict[Contender, list[RecordedRun]]) -> None:
    """Counted once more, by the plainest way there is."""
    for contender, (run,) in runs.items():
        steps = [step for step in run.steps if step.items]
        begin = min(r.arrival for r in run.records if isinstance(r, Arrived))
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        longest = tokens = 0.0
        for step in steps:
            for item in step.items:
                tokens += len(item.tokens)
                if item.tokens:
                    longest = max(longest, step.end - last.get(item.id, step.end))
                    last[item.id] = step.end
                    first.setdefault(item.id, step.end)
        mine = run_timeline.figures(run, run_timeline.timeline_of(run), LatencyTargets())
        assert mine["output_tokens"] == tokens
        assert mine["output_tokens_per_s"] == pytest.approx(tokens / (max(last.values()) - begin))
        assert mine["ttft_ms"]["max"] == pytest.approx(1e3 * (max(first.values()) - begin))
        assert mine["itl_ms"]["max"] == pytest.approx(1e3 * longest)
        assert mine["rows"] == sum(step.tokens for step in steps)
        padded = sum(rows for step in steps for rows, _ in step.ballast)
        assert mine["padding_share"] == pytest.approx(padded / mine["rows"])
        assert (padded > 0) == (contender.policy == "static")
        assert mine["kv"]["most_reserved"] == 16 * max(step.blocks for step in steps)


def test_each_step_is_drawn(runs: dict[Contender, list[RecordedRun]]) -> None:
    """In the middle of a step, whoever is in it has a place of its own, and padding takes the others."""
    for contender, (run,) in runs.items():
        told = run_timeline.timeline_of(run)
        zero = min(r.arrival for r in run.records if isinstance(r, Arrived))
        for step in [step for step in run.steps if step.items]:
            at = (step.start + step.end) / 2 - zero
            there = [span for span in told.spans if span.begin <= at < span.end]
            assert len({span.slot for span in there}) == len(there)
            computed = {span.id for span in there if span.kind in ("prefill", "decode")}
            assert computed == {item.id for item in step.items}
            decoding = all(rows == 1 for rows, _ in step.ballast)
            padding = sum(span.kind == "padding" for span in there)
            assert padding == (len(step.ballast) if decoding and step.tokens <= 4 else padding)
        assert told.slots == {"static": 4, "unbatched": 1}.get(contender.policy, 8)
        assert any(span.kind == "stalled" for span in told.spans) == (
            contender.policy == "prefill_first"
        )
        assert any(span.kind == "padding" for span in told.spans) == (contender.policy == "static")


def test_a_preempted_sequence_gives_its_place_up(tmp_path: Path) -> None:
    """Memory for 20 blocks: four answers of up to 90 tokens do not fit."""
    cost = calibration(max_num_seqs=4, max_model_len=160)
    cost.engine["blocks"] = 20
    bench = comparison.simulated_engine(cost, lambda known: known)[0]
    requests = requests_of(bench, [TrafficRequest(f"a{i} b c d " * 5, None, 90) for i in range(6)])
    runs = comparison.run_contenders(
        bench, [Contender("chunked")], requests, 1, tmp_path, progress=False
    )
    (run,) = runs[Contender("chunked")]
    told = run_timeline.timeline_of(run)
    assert told.preemptions == sum(len(step.preempted) for step in run.steps) > 0
    assert told.slots <= 4
    assert all(moment.used <= moment.reserved <= 20 * 16 for moment in told.moments)
    assert set(told.e2e) == {request.id for request in requests}


@pytest.mark.parametrize(
    ("lengths", "batch", "steps", "rows"),
    [
        ([(10, 1), (10, 9)], 2, 1.0, 38 / 30),
        ([(1, 8), (1, 2), (1, 8), (1, 2)], 2, 16 / 10, 36 / 24),
        ([(5, 5)] * 6, 3, 1.0, 1.0),
        ([(4, 10), (2, 10), (1, 1)], 2, 11 / 10.5, 30 / 28),
    ],
)
def test_what_lengths_allow(
    lengths: Sequence[tuple[int, int]], batch: int, steps: float, rows: float
) -> None:
    found = run_timeline.ideal(lengths, batch)
    assert (found["steps"], found["rows"]) == (pytest.approx(steps), pytest.approx(rows))


def test_bins_keep_the_area() -> None:
    moments = [
        Moment(a, b, n, 0, 0, 0, 0, 0, 0, 0, 0, 0) for a, b, n in ((0.0, 0.25, 4), (0.3, 1.0, 1))
    ]
    bins = run_timeline.binned(moments, lambda m: m.decoding, 2.0, 8)
    assert bins == pytest.approx([4.0, 0.8, 1.0, 1.0, 0, 0, 0, 0])
    assert sum(bins) * 0.25 == pytest.approx(4 * 0.25 + 0.7)


# -- the machine ---------------------------------------------------------------------------------------------


def test_shares_of_the_machine_are_those_of_the_steps(tmp_path: Path) -> None:
    needs = ModelCosts(
        int8=8e6,
        fp32=0.0,
        layers=3e6,
        ending_int8=2e6,
        ending_fp32=0.0,
        ending=1e6,
        pair=64.0,
        position=256.0,
    )
    cost = calibration(static_patience=1.0)
    told = {
        "needs": msgspec.to_builtins(needs),
        "limits": {"read_gb_s": 10, "int8_gop_s": 40, "fp32_gop_s": 5},
    }
    known = comparison.simulated_engine(
        msgspec.structs.replace(cost, engine=cost.engine | told), lambda known: known
    )[0]
    asked = MIXES["mixed"].make(12, 0)
    found = found_of(known, comparison.contenders(["static", "chunked"], ["fcfs"]), asked, tmp_path)
    run = recorded_runs.last_run(tmp_path / "chunked-fcfs-1.steps")
    steps = [step for step in run.steps if step.items]
    busy = sum(step.end - step.start for step in steps)
    rows = sum(item.n for step in steps for item in step.items)
    ends = sum(bool(item.tokens) for step in steps for item in step.items)
    static, chunked = (contest.figures["machine"] for contest in found.contests)
    assert chunked["int8_gop_s"] == pytest.approx((8e-3 * rows + 2e-3 * ends) / busy)
    read = sum(3e6 + 1e6 * any(item.tokens for item in s.items) + 256 * s.context for s in steps)
    assert chunked["read_share"] == pytest.approx(1e-9 * read / busy / 10)
    assert chunked["compute_share"] == pytest.approx(
        chunked["int8_gop_s"] / 40 + chunked["fp32_gop_s"] / 5
    )
    moments = found.contests[1].timeline.moments
    assert sum(m.compute * (m.end - m.begin) for m in moments) == pytest.approx(
        busy * chunked["compute_share"]
    )
    assert static["read_gb_s"] > 0
    assert not any(m.nobody for m in moments)
    full, *_, last = [
        m
        for m in found.contests[0].timeline.moments
        if not m.prefilling and m.padded + m.decoding > 1
    ]
    assert full.nobody < last.nobody < last.compute, "padding is computed, for nobody"
    page = comparison_page.page(found)
    assert "Utilisation over time" in page
    assert f"<td>{chunked['compute_share']:.0%}</td>" in page
    assert "pageturner doctor" not in page


def test_shares_that_are_not_known_are_left_out(bench: EngineBench, tmp_path: Path) -> None:
    found = found_of(
        bench,
        comparison.contenders(["chunked"], ["fcfs"]),
        [TrafficRequest("a b c", None, 7)],
        tmp_path,
    )
    assert found.contests[0].figures["machine"] == {}
    page = comparison_page.page(found)
    assert "Utilisation over time" not in page
    assert "run `pageturner doctor` once" in page


# -- turns ---------------------------------------------------------------------------------------------------


def run_in_turn(bench: EngineBench, rounds: int, folder: Path) -> tuple[list[str], int]:
    """In which order contenders ran, by when their logs were begun; and how many rounds there were."""
    requests = requests_of(bench, [TrafficRequest("a b", None, 3)] * 3)
    each = comparison.contenders(["orca", "chunked"], ["fcfs"])
    found = comparison.run_contenders(bench, each, requests, rounds, folder, progress=False)
    begun = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return [path.stem for path in begun], len(found[each[0]])


def test_rounds_are_interleaved(bench: EngineBench, tmp_path: Path) -> None:
    names, rounds = run_in_turn(bench, 2, tmp_path)
    assert names == ["orca-fcfs-1", "chunked-fcfs-1", "orca-fcfs-2", "chunked-fcfs-2"]
    assert rounds == 2


@pytest.mark.parametrize(
    ("seconds", "rounds"), [(100.0, 1), (20.0, 2), (14.0, 3), (1.0, comparison.MAX_ROUNDS)]
)
def test_rounds_are_as_many_as_there_is_time_for(
    bench: EngineBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    """A slow or busy machine measures less, not longer."""
    times = itertools.count(0.0, seconds)
    monkeypatch.setattr(comparison, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert run_in_turn(bench, 0, tmp_path)[1] == rounds


# -- orders --------------------------------------------------------------------------------------------------


def test_orders_compete_and_tenants_are_told_apart(bench: EngineBench, tmp_path: Path) -> None:
    asked = MIXES["tenants"].make(57, 0)
    found = found_of(bench, comparison.contenders(["chunked"], ["fcfs", "fair"]), asked, tmp_path)
    fcfs, fair = (contest.figures["tenants"] for contest in found.contests)
    assert fcfs["loudest"] == fair["loudest"] == "loud"
    assert fair["loudest_share"] < fcfs["loudest_share"]
    assert fair["difference"] < fcfs["difference"]
    assert "Tenants" in comparison_page.page(found)


# -- claims --------------------------------------------------------------------------------------------------


def evidence(
    chunked: dict[str, float], other: dict[str, float], name: str = "static"
) -> literature_claims.Evidence:
    def one(values: dict[str, float]) -> dict[str, object]:
        return {
            "output_tokens_per_s": values.get("speed", 1.0),
            "e2e_s": {"p99": values.get("e2e", 1.0)},
            "itl_ms": {"max": values.get("gap", 1.0)},
            "ttft_ms": {"mean": values.get("ttft", 1.0)},
            "kv": {"waste": values.get("waste", 0.0), "waste_if_whole": 0.5},
            "short_e2e_s": values.get("short", 1.0),
            "padding_share": values.get("padding", 0.0),
            "busy_s": values.get("busy", 1.0),
            "seconds": 1.0,
        }

    return literature_claims.Evidence(
        {"chunked": one(chunked), name: one(other)},
        {"steps": 3.0, "rows": 4.0},
        {name: (chunked.get("fair", 0), 10)},
    )


@pytest.mark.parametrize(
    ("begin", "name", "good", "bad", "other"),
    [
        ("continuous", "static", {"speed": 2.5}, {"speed": 2.4}, {}),
        ("batching:", "unbatched", {"speed": 2.8}, {"speed": 2.7}, {}),
        ("p99", "static", {"e2e": 0.5}, {"e2e": 0.6}, {}),
        ("under 4 %", "static", {"waste": 0.03}, {"waste": 0.04}, {}),
        ("stall-free", "prefill_first", {"gap": 0.25}, {"gap": 0.26}, {}),
        ("short answers", "static", {"short": 0.5}, {"short": 0.6}, {}),
        ("utilisation", "static", {"padding": 0.0}, {"padding": 0.1}, {}),
        ("sjf", "chunked + sjf", {"ttft": 2.0}, {"ttft": 1.0}, {"ttft": 1.4}),
        ("fair", "chunked + fair", {"fair": 10.0}, {"fair": 11.0}, {}),
    ],
)
def test_a_claim_is_judged_by_its_threshold(
    begin: str, name: str, good: dict[str, float], bad: dict[str, float], other: dict[str, float]
) -> None:
    for values, verdict in ((good, "reached"), (bad, "not reached")):
        (claim,) = (
            c
            for c in literature_claims.claims(evidence(values, other, name))
            if c.text.startswith(begin)
        )
        assert claim.verdict == verdict
        assert bool(claim.why) == (verdict == "not reached")


def test_sjf_is_judged_under_the_default_policy() -> None:
    """static comes first in a comparison, and waits for other reasons."""
    ttft = {"static": 9.0, "static + sjf": 1.0, "chunked": 2.0, "chunked + sjf": 1.9}
    figures = {name: {"ttft_ms": {"mean": mean}} for name, mean in ttft.items()}
    judged = literature_claims._sjf(literature_claims.Evidence(figures, {}, {}), "chunked")
    assert judged is not None
    assert not judged.good
    assert judged.measured.startswith("chunked + sjf 2 ms")


def test_an_engine_that_waited_for_requests_says_so() -> None:
    for busy, word in ((0.5, "stood idle for 50%"), (0.95, "between the two ideals")):
        first = literature_claims.claims(evidence({"speed": 2.0, "busy": busy}, {}))[0]
        assert word in first.why


def test_claims_without_contenders_are_not_measured() -> None:
    found = literature_claims.claims(
        literature_claims.Evidence({}, {"steps": 1.0, "rows": 1.0}, {})
    )
    assert len(found) == 12
    assert {claim.verdict for claim in found} == {"not measured"}
    assert all(claim.why for claim in found)


# -- how sure it is ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_rounds(bench: EngineBench, tmp_path_factory: pytest.TempPathFactory) -> ComparisonResults:
    each = comparison.contenders(["static", "chunked"], ["fcfs"])
    requests = requests_of(bench, MIXES["mixed"].make(8, 1))
    folder = tmp_path_factory.mktemp("logs")
    runs = comparison.run_contenders(bench, each, requests, 2, folder, progress=False)
    reckoned = simulated_comparison.reckon(bench, each, requests, calibration(), "measured today")
    return find(runs, requests, replace(about(), real=True), reckoned)


def measured(
    found: ComparisonResults, disturbance: Disturbance, speeds: tuple[float, float] = (1.0, 1.0)
) -> ComparisonResults:
    """As if two rounds had been measured on a machine that was disturbed so, at these speeds."""
    contests = [
        replace(
            c,
            each=[
                one | {"output_tokens_per_s": speed * one["output_tokens_per_s"]}
                for one, speed in zip(c.each, speeds, strict=True)
            ],
        )
        for c in found.contests
    ]
    return replace(found, about=replace(found.about, disturbance=disturbance), contests=contests)


@pytest.mark.parametrize(
    ("disturbance", "speeds", "said"),
    [
        (Disturbance(0.02, 0.01), (1.0, 1.05), []),
        (Disturbance(0.47, 0.01), (1.0, 1.0), ["other programs took 47% of its processors"]),
        (Disturbance(0.0, 0.12), (1.0, 1.0), ["other machines on the same hardware took 12%"]),
        (Disturbance(), (1.0, 1.5), ["rounds of the same policy differ by up to 50%"]),
    ],
)
def test_a_busy_machine_is_said_at_the_top(
    two_rounds: ComparisonResults,
    disturbance: Disturbance,
    speeds: tuple[float, float],
    said: list[str],
) -> None:
    found = measured(two_rounds, disturbance, speeds)
    assert found.disturbed == found.as_json()["disturbed"] == said
    page, text = comparison_page.page(found), comparison_page.terminal(found)
    assert page.count('<p class="busy">') == len(said)
    assert text.startswith("This machine was busy") == bool(said)
    for words in said:
        assert page.index(words) < page.index('<p class="verdict">')
        assert words in text


def test_a_busy_machine_gives_no_verdict_by_what_was_measured(
    bench: EngineBench, tmp_path: Path
) -> None:
    busy = replace(about(), real=True, disturbance=Disturbance(0.9, 0.0))
    each = comparison.contenders(["static", "chunked"], ["fcfs"])
    requests = requests_of(bench, MIXES["mixed"].make(8, 1))
    runs = comparison.run_contenders(bench, each, requests, 2, tmp_path, progress=False)
    for reckoned in (
        simulated_comparison.reckon(bench, each, requests, calibration(), "measured today"),
        None,
    ):
        found = find(runs, requests, busy, reckoned)
        page, text = comparison_page.page(found), comparison_page.terminal(found)
        judged = [claim for claim in found.claims if claim.verdict != "not measured"]
        assert page.index('class="busy"') < page.index('class="soft"')
        assert all(claim.measured.startswith("reckoned: ") for claim in judged)
        assert not any(one.measured for one in found.advice())
        if reckoned:
            assert text.index("\nreckoned:\n") < text.index("\nmeasured on the busy machine:\n")
            measured = page.partition("Measured on the busy machine:")[2].partition("</table>")[0]
            assert measured
            assert 'class="best"' not in measured
            assert "Reckoned: " in text
            assert judged
        else:
            assert "No policy is advised" in text
            assert 'class="best"' not in page
            assert not judged


def test_advice_is_the_same_however_noisy_the_machine(two_rounds: ComparisonResults) -> None:
    told = []
    for noise, speed in ((Disturbance(), 1.0), (Disturbance(0.6, 0.1), 0.6)):
        found = measured(two_rounds, noise, (1.0, speed))
        told.append([(one.want, one.choose, one.figure, one.behind) for one in found.advice()])
    assert told[0] == told[1]


def test_what_a_measurement_cannot_tell_apart_has_no_winner(
    bench: EngineBench, tmp_path: Path
) -> None:
    each = comparison.contenders(["orca", "chunked"], ["fcfs"])
    requests = requests_of(bench, MIXES["mixed"].make(8, 1))
    runs = comparison.run_contenders(bench, each, requests, 1, tmp_path, progress=False)
    found = find(runs, requests, replace(about(), real=True))
    assert next(iter(found.advice())).chosen == "tied: chunked, orca"
    page = comparison_page.page(found)
    assert "Tied: orca, chunked had everything answered after" in page
    head, *rows = page[page.index("<h2>Figures</h2>") :].partition("</table>")[0].split("<tr>")[1:]
    assert "output tokens/s" in head
    assert len(rows) == 2
    assert all(re.match("<td>(orca|chunked)</td><td>", row) for row in rows), "neither is marked"


@pytest.mark.slow
def test_a_simulation_never_says_that_answers_were_equal(found: ComparisonResults) -> None:
    assert not found.about.real
    page, text = comparison_page.page(found), comparison_page.terminal(found)
    assert found.as_json()["same_answers"] is None
    for said in (page, text):
        assert "No model ran" in said
        assert "token for token" not in said


# -- the page ------------------------------------------------------------------------------------------------

SECTIONS = (
    "Which one?",
    "Figures",
    "Who was in each step",
    "Batch size over time",
    "KV memory over time",
    "Latency",
    "Claims of the literature, and what this run shows",
    "How this was simulated",
)


@pytest.fixture(scope="module")
def found(bench: EngineBench, tmp_path_factory: pytest.TempPathFactory) -> ComparisonResults:
    each = comparison.contenders(["static", "prefill_first", "chunked"], ["fcfs", "sjf"])
    asked = [*MIXES["mixed"].make(14, 1), TrafficRequest("one", None, 1, tenant="<script>&\"'")]
    return found_of(
        bench, each, asked, tmp_path_factory.mktemp("logs"), 'a <b>bold</b> & "new" file.jsonl'
    )


def test_the_page_has_every_section_and_is_well_formed(found: ComparisonResults) -> None:
    page = ElementTree.fromstring(comparison_page.page(found))
    shown = [h.text for h in page.iter("h2")]
    folded = [h.text for h in page.iter("summary") if h.text in SECTIONS]
    assert [*shown, *folded] == list(SECTIONS)
    assert len(shown) == 3, "what fits three screens"
    svgs = list(page.iter("{http://www.w3.org/2000/svg}svg"))
    assert len(svgs) == 16, "each picture for a desk and for a phone"
    text = "".join(page.itertext())
    for contest in found.contests:
        assert contest.name in text
        assert f"{contest.figures['output_tokens_per_s']:,.1f}" in text
    assert 'a <b>bold</b> & "new" file.jsonl' in text


def test_the_page_needs_nothing_else(found: ComparisonResults) -> None:
    text = comparison_page.page(found)
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) == {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"url\([^)]*\)", text)) == {"url(#pt-hatch)"}
    assert not re.findall(r"<(script|link|img|iframe|object)|\b(src|href)=|@import", text)
    assert "prefers-color-scheme: dark" in text


def test_a_row_has_five_figures_and_the_rest_is_folded(found: ComparisonResults) -> None:
    page = ElementTree.fromstring(comparison_page.page(found))
    tables = {section.find("h2").text: section.find(".//table") for section in page.iter("section")}  # type: ignore[union-attr]
    (figures,) = (table for name, table in tables.items() if name == "Figures")
    assert figures is not None
    assert [len(row) for row in figures.iter("tr")] == [1 + 5] * (1 + len(found.contests))
    folded = ["".join(one.itertext()) for one in page.iter("details")]
    assert any("KV wasted" in text and "goodput" in text for text in folded)
    assert any(
        "that were not measured" in text and "speculative decoding" in text for text in folded
    )
    shown = (
        comparison_page.page(found)
        .partition("Claims of the literature")[2]
        .partition("<details>")[0]
    )
    assert "not measured" not in shown


def test_machine_load_and_day_stand_under_the_title(found: ComparisonResults) -> None:
    told = replace(
        found, about=replace(found.about, machine="some CPU, load 0.3", when="2031-02-03")
    )
    head = comparison_page.page(told).partition("</h1>")[2].partition("</p>")[0]
    assert "some CPU, load 0.3; 2031-02-03" in head


def test_a_hint_has_prompt_answer_and_time_to_first_token(found: ComparisonResults) -> None:
    told = replace(found, texts={1: ("Once <upon> a time", "there was")})
    page = ElementTree.fromstring(comparison_page.page(told))
    hints = [one.text or "" for one in page.iter("{http://www.w3.org/2000/svg}title")]
    mine = next(hint for hint in hints if hint.startswith("request 1:"))
    first = found.contests[0].timeline.requests[1]
    assert f"prompt of {first.prompt} tokens: Once <upon> a time" in mine
    assert f"answer of {first.answer} tokens: there was" in mine
    assert f"time to first token {first.first:.2f} s" in mine
    assert first.first == pytest.approx(found.contests[0].figures["ttft_ms"]["max"] / 1e3, rel=1.0)


def test_tenants_have_colours_and_fair_is_explained(bench: EngineBench, tmp_path: Path) -> None:
    asked = MIXES["tenants"].make(38, 0)
    each = comparison.contenders(["chunked"], ["fcfs", "fair"])
    page = comparison_page.page(found_of(bench, each, asked, tmp_path))
    assert all(f'class="tenant{number}"' in page for number in range(10))
    assert 'class="tenant0 paler"' in page
    assert ">loud</text>" in page
    assert page.count("the tenant that was served least goes first") == 2
    assert "a fair share for each tenant" in page
    others = comparison.contenders(["chunked", "orca"], ["fcfs"])
    assert "--orders fcfs,fair" in comparison_page.page(found_of(bench, others, asked, tmp_path))


def test_pictures_for_a_phone_fit_it(found: ComparisonResults) -> None:
    """Names stand above rows: nothing begins beyond the edge, and the axis has most of the width."""
    page = ElementTree.fromstring(comparison_page.page(found))
    narrow = [svg for div in page.iter("div") if div.get("class") == "narrow" for svg in div]
    assert len(narrow) >= 7
    for svg in narrow:
        width = float(svg.get("width") or 0)
        assert width <= 360
        for text in svg.iter("{http://www.w3.org/2000/svg}text"):
            at, length = float(text.get("x") or 0), 5.9 * len(text.text or "")
            ends = {"start": at + length, "middle": at + length / 2, "end": at}[
                text.get("text-anchor") or "start"
            ]
            assert ends <= width + 12, text.text


def test_a_picture_alone_is_well_formed(found: ComparisonResults) -> None:
    drawn = [pictures.over_time(name, found) for name in pictures.PANELS]
    for picture in (pictures.gantt(found), *drawn):
        svg = charts.standalone(picture)
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme: dark" in svg


def test_the_json_holds_the_figures(found: ComparisonResults) -> None:
    told = msgspec.json.decode(msgspec.json.encode(found.as_json()))
    assert list(told["contenders"]) == [contest.name for contest in found.contests]
    for contest in found.contests:
        mine = told["contenders"][contest.name]
        assert mine["output_tokens_per_s"] == pytest.approx(contest.figures["output_tokens_per_s"])
        area = sum(told["series"][contest.name]["kv_used"]) * told["series"]["bin_s"]
        steps = sum(m.used * (m.end - m.begin) for m in contest.timeline.moments)
        assert area == pytest.approx(steps)
    assert told["requests"] == 15
    assert told["same_answers"] is None, "no model ran"


def test_one_contender_and_one_token_make_a_page(bench: EngineBench, tmp_path: Path) -> None:
    """No TPOT, no gap: what is not there is left out, not drawn at random."""
    page = comparison_page.page(
        found_of(bench, [Contender("chunked")], [TrafficRequest("a", None, 1)], tmp_path)
    )
    assert not re.search(r"\bnan\b", page)
    assert ElementTree.fromstring(page) is not None


def test_nobody_is_chosen_for_what_nobody_does(bench: EngineBench, tmp_path: Path) -> None:
    each = comparison.contenders(["static", "chunked"], ["fcfs"])
    requests = comparison.make_requests(
        MIXES["mixed"].make(6, 1), 64, 1024, comparison.words_as_tokens
    )
    runs = comparison.run_contenders(bench, each, requests, 1, tmp_path, progress=False)
    for targets, names in ((LatencyTargets(1e-9, 1e-9), 1), (LatencyTargets(1e9, 1e9), 0)):
        about = About("", "", "", "", real=False, rounds=1, targets=targets)
        assert comparison_page.page(find(runs, requests, about)).count("none of these") == names


def test_ticks_are_round_and_within() -> None:
    for most in (0.003, 0.7, 1.0, 5.0, 42.5, 1234.0):
        ticks = charts.Axis(0.0, most, 0, 100).ticks()
        assert ticks[0] == 0
        assert 3 <= len(ticks) <= 8
        assert ticks[-1] <= most * 1.000001


def test_a_single_slow_run_does_not_shrink_the_others(found: ComparisonResults) -> None:
    first, *others = found.contests
    slow = replace(first, timeline=replace(first.timeline, seconds=100 * found.seconds))
    longest = max(one.timeline.seconds for one in others)
    drawn = replace(found, contests=[slow, *others])
    assert drawn.drawn_seconds == 1.25 * longest
    assert f"of which the first {1.25 * longest:.1f} s are drawn" in pictures.gantt(drawn)
    assert replace(found, contests=[slow]).drawn_seconds == slow.timeline.seconds, (
        "nothing is beside it"
    )


def test_an_account_of_nothing_is_drawn() -> None:
    runs = [("none", RunTimeline(1.0, slots=1))]
    assert "<svg" in pictures.slots(runs, charts.time_axis([1.0]), pictures.GanttHints())


# -- a real engine -------------------------------------------------------------------------------------------


def test_a_real_engine_gives_the_same_answers_and_logs_that_replay(tmp_path: Path) -> None:
    bench, encode = comparison.real_engine(
        EngineConfig(
            model=str(TINY),
            backend="reference",
            max_num_seqs=2,
            static_batch=2,
            static_patience=0.05,
        )
    )
    requests = comparison.make_requests(
        [
            TrafficRequest("ab", None, 3),
            TrafficRequest("a", None, 5, 0.05),
            TrafficRequest("abc", None, 2, 0.1),
        ],
        8,
        bench.built.max_model_len,
        encode,
    )
    each = comparison.contenders(["static", "chunked"], ["fcfs"])
    runs = comparison.run_contenders(bench, each, requests, 2, tmp_path, progress=False)
    told = [comparison.answers_of(run) for mine in runs.values() for run in mine]
    assert len(told) == 4
    assert all(one == told[0] for one in told)
    assert [len(told[0][id]) for id in (1, 2, 3)] == [3, 5, 2]
    for mine in runs.values():
        for run in mine:
            assert log_replay.replay_plans(run).differences == []
