"""Plans and simulations of models with recurrent layers: states take their part of the memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pageturner import cli
from pageturner.config.settings import EngineConfig
from pageturner.executor.kv_memory import KVSizes
from pageturner.lab.bench.request_metrics import LatencyTargets
from pageturner.lab.bench.sweep_forecast import SimulatedServer
from pageturner.lab.simulation import calibration
from pageturner.lab.simulation.recorded_runs import RecordedRun
from pageturner.lab.simulation.scenario import Scenario
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.lab.traffic.traffic import Traffic
from pageturner.lab.traffic.traffic_generators import SyntheticTraffic
from pageturner.telemetry.step_log import Header
from support.hf_folder import GOLDENS

QWEN = json.loads((GOLDENS / "published_configs.json").read_text())["qwen3_5_4b"]
# by hand: 24 layers of 32 heads of 128 x 128 in fp32, 3 rows of 8,192 columns in fp16; 8 layers of 4 KV heads
STATE = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
TAIL = 24 * (32 * 32 * 4 + 16 * 128 * 32 * 2 + 32 * 128 * 32 * 2 + 32 * 8192 * 2)
TOKEN = 8 * 2 * 4 * 256 * 2
COST = CalibratedCost([5e-3, 0, 2e-4, 0, 0, 0, 0], (0, 0), 1, 0.0, {})


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    return str(path)


def test_a_plan_says_how_the_engine_divides_the_memory(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    words = ("--memory", "24GiB", "--max-num-seqs", "16", "--output", str(output))
    assert cli.main(["plan", model, *words]) == 0
    data = json.loads(output.read_text())
    assert data["kv"]["bytes_per_state"] == STATE
    assert data["kv"]["bytes_per_token"] == TOKEN
    rest = data["memory"]["kv_bytes"] - 33 * (STATE + TAIL)
    blocks = int(rest * 0.4) // (16 * TOKEN)
    states = 32 + (rest - blocks * 16 * TOKEN) // STATE
    assert data["engine"] == {
        **{"blocks": blocks, "states": states, "tails": 32},
        **{"window": 0, "sliding": 0},
    }
    said = capsys.readouterr().out
    assert f"32 of 16 sequences at once, {states - 32} kept; {blocks:,} blocks" in said


def test_a_plan_counts_the_head_that_drafts(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One more layer of attention: its KV, and its weights with the product of both inputs."""
    found = {}
    for kind in ("off", "mtp"):
        output = tmp_path / f"{kind}.json"
        words = ("--memory", "24GiB", "--speculation", kind, "--output", str(output))
        assert cli.main(["plan", model, *words]) == 0
        found[kind] = json.loads(output.read_text())
    off, mtp = (found[kind] for kind in ("off", "mtp"))
    assert mtp["kv"]["bytes_per_token"] == TOKEN * 9 // 8
    text = QWEN.get("text_config", QWEN)
    d, ffn, heads, kv = (
        text[f"{key}"]
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
        )
    )
    layer = d * 256 * (3 * heads + 2 * kv) + 3 * d * ffn + 2 * d + 2 * 256
    assert mtp["weights"]["bytes"] - off["weights"]["bytes"] == 2 * (layer + 2 * d * d)
    assert mtp["engine"]["blocks"] < off["engine"]["blocks"]
    assert cli.main(["plan", model, "--speculation", "draft"]) == 2
    assert "counts no draft model" in capsys.readouterr().err


def test_a_simulated_gpu_has_states(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = ["simulate", "--model", model, "--gpu", "L4", "--rate", "1", "--turns", "3"]
    assert cli.main([*words, "--num-prompts", "20", "--output", str(output)]) == 0
    engines = json.loads(output.read_text())["runs"][0]["engines"]
    assert engines["state_hits"] > 10
    assert 0 < engines["cached_tokens"] < engines["prompt_tokens"]
    said = capsys.readouterr().out
    assert f"states: {engines['state_hits']:,} prompts began at one" in said
    assert "states of recurrent layers:" in said
    for flags in (["--kv-file-gb", "9"], ["--roles", "prefill=1,decode=1"]):
        assert cli.main([*words, *flags]) == 2
        assert "are not simulated with recurrent layers yet" in capsys.readouterr().err


def sessions(rate: float) -> Traffic:
    return SyntheticTraffic(20, rate, 900, 60).sessions(4, 1.0)


def test_fewer_states_find_less() -> None:
    """The simulated scheduler is the engine's: what no state is kept for is computed again."""
    targets = LatencyTargets(None, None)
    few = Scenario(EngineConfig(), KVSizes(4000), 9000, COST, sessions, targets)
    found = {}
    for states in (0, 16, 400):
        sizes = KVSizes(4000, states=states, tails=min(states, 16))
        found[states] = replace(few, sizes=sizes).run(progress=False)["engines"]
    assert "state_hits" not in found[0]
    assert found[16]["cached_share"] < 0.8 * found[400]["cached_share"]
    assert found[400]["cached_share"] > 0.9 * found[0]["cached_share"]
    assert found[16]["state_missed_tokens"] > found[400]["state_missed_tokens"]


def test_what_was_calibrated_keeps_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        calibration, "fit", lambda steps, engine: msgspec.structs.replace(COST, engine=engine)
    )
    header = Header("m", "f", {}, 100, 0, 0, 500, 0.0, 0.0, "tokens", states=40, tails=8)
    cost = calibration.fit_runs(RecordedRun(header))
    known, sizes, _ = calibration.engine_of(cost)
    assert sizes == KVSizes(100, states=40, tails=8)
    server = SimulatedServer(known, sizes, 500, cost)
    assert server.fitting([(16, 0)]) == 4, "two tails for each"
