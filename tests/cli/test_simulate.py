"""`simulate`, `calibrate` and `replay` as people type them: what they print, what they refuse."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from pageturner import cli
from pageturner.config.settings import EngineConfig
from pageturner.lab.commands import simulate as simulate_command
from pageturner.lab.simulation.recorded_runs import SCHEDULER_OPTIONS
from pageturner.lab.simulation.scenario import MAX_REPLICAS
from pageturner.lab.simulation.step_cost import CalibratedCost

LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_1B))
    return str(path)


def simulate(*words: str, output: Path) -> list[dict[str, Any]]:
    assert cli.main(["simulate", *words, "--output", str(output)]) == 0
    runs: list[dict[str, Any]] = json.loads(output.read_bytes())["runs"]
    return runs


GPU = ("--gpu", "L4", "--rate", "20", "--num-prompts", "80")


def test_more_load_is_less_goodput(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--model",
        model,
        *GPU,
        "--rate-scale",
        "0.5,1,8",
        "--ttft-ms",
        "300",
        "--tpot-ms",
        "25",
    )
    runs = simulate(*words, output=tmp_path / "out")
    shares = [run["goodput_share"] for run in runs]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.95 > 0.5 > shares[-1]
    text = capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.startswith("chunked")]) == 3
    assert "assumed: 60% of the FLOP/s" in text


def test_what_is_sent_cut_and_refused_is_told(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", model, *GPU, "--output-len", "5000", "--cap", "300")
    (run,) = simulate(*words, output=tmp_path / "out")
    text = capsys.readouterr().out
    assert run["refused"] == 0
    assert (
        "prompts of 512 and answers of 5,000 tokens on average, answers cut at 300 (--cap)" in text
    )
    assert "refused:" not in text
    (run,) = simulate(*words, "--max-model-len", "64", output=tmp_path / "out")
    assert run["refused"] > 0
    told = f"up to {run['refused']} requests were refused: prompt and answer longer than 64 tokens"
    assert told in capsys.readouterr().out


def test_the_search_finds_the_fewest_replicas(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--model",
        model,
        *GPU,
        "--rate-scale",
        "8",
        "--ttft-ms",
        "300",
        "--tpot-ms",
        "25",
        "--cap",
        "200",
    )
    (best,) = simulate(*words, "--search", output=tmp_path / "a")
    assert best["replicas"] > 1
    assert best["goodput_share"] >= 0.99
    low, high = best["goodput_range"]
    assert f"cheapest: {best['replicas']} replicas" in (text := capsys.readouterr().out)
    assert f"{low:.1%} to {high:.1%} are within the targets" in text
    (less,) = simulate(*words, "--replicas", str(best["replicas"] - 1), output=tmp_path / "b")
    assert less["goodput_share"] < 0.99


def test_the_search_answers_in_gpus_and_money(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = "--rate 20 --num-prompts 40 --output-len 20 --search --ttft-ms 300"
    engines = "--gpu L4,H100 --gpus 1,2 --price-per-gpu-hour L4=0.5,H100=2"
    words = ("--model", model, *load.split(), *engines.split())
    runs = simulate(*words, output=tmp_path / "out")
    assert {run["gpu"] for run in runs} == {"L4", "H100"}
    for run in runs:
        assert run["gpus"] == run["replicas"] * run["gpus_per_replica"]
        hourly = run["gpus"] * {"L4": 0.5, "H100": 2.0}[run["gpu"]]
        assert run["price_per_hour"] == hourly
        millions = run["output_tokens"] / 1e6
        assert run["price_per_million"] == pytest.approx(hourly * run["seconds"] / 3600 / millions)
    assert runs[0]["price_per_hour"] <= runs[1]["price_per_hour"]
    said = capsys.readouterr()
    first = runs[0]
    assert f"of {first['gpus_per_replica']} x {first['gpu']}, {first['gpus']} GPU" in said.out
    assert f"{first['price_per_hour']:,.2f} an hour" in said.out
    tried = [line for line in said.err.splitlines() if "enough" in line or "too few" in line]
    assert tried, "each count that is tried is a line, without a terminal too"


def test_the_defaults_that_decide_are_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["simulate", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for flag, value in (
        ("--mfu MFU", 0.6),
        ("--mbu MBU", 0.8),
        ("--overhead-ms OVERHEAD_MS", 2.0),
        ("--host-ms HOST_MS", 0.0),
        ("--goodput GOODPUT", 0.99),
        ("--cap CAP", 4096),
        ("--replicas REPLICAS", 1),
        ("--placement PLACEMENT", "prefix_aware"),
    ):
        about = text.rsplit(flag, 1)[1].split(" --")[0]
        assert f"default: {value}" in about


@pytest.mark.slow
def test_policies_that_cannot_meet_the_targets_are_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = ("--ttft-ms", "500", "--search", "--policies", "static,chunked")
    words = ("--model", model, "--gpu", "L4", "--rate", "20", "--num-prompts", "12", *targets)
    (best,) = simulate(*words, output=tmp_path / "out")
    assert best["policy"] == "chunked"
    assert "note: static: no number of replicas meets the targets" in capsys.readouterr().out


def test_last_nights_log_under_another_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, calibration = tmp_path / "steps", tmp_path / "c.json"
    from tests.lab.test_history import record

    for seed in range(3):
        record(log, seed, step_log_tokens=True, max_num_batched_tokens=64)
    assert cli.main(["calibrate", "--log", str(log), "--output", str(calibration)]) == 0
    assert "of these steps half are within" in capsys.readouterr().out
    policies = ("chunked", "prefill_first", "static")
    runs = simulate("--log", str(log), "--policies", ",".join(policies), output=tmp_path / "a")
    assert [run["policy"] for run in runs] == list(policies)
    assert len({run["output_tokens"] for run in runs}) == 1
    assert len({run["requests"] for run in runs}) == 1
    assert runs[2]["e2e_s"]["max"] > 5, "static waits ten seconds for a batch that stays short"
    words = (
        "--calibration",
        str(calibration),
        "--rate",
        "50",
        "--num-prompts",
        "20",
        "--output-len",
        "9",
    )
    assert simulate(*words, output=tmp_path / "b")[0]["requests"] == 20
    assert cli.main(["replay", str(log)]) == 0
    assert cli.main(["replay", str(log), "--plans", "--run", "1"]) == 0
    text = capsys.readouterr().out
    assert text.count("all the same") == 3
    assert cli.main(["replay", str(log), "--run", "4"]) == 2


OTHER = {
    "policy": "adaptive_chunk",
    "order": "sjf",
    "admission": "full",
    "enable_prefix_caching": False,
    "max_session_share": 0.25,
}


@pytest.mark.parametrize("name", SCHEDULER_OPTIONS)
def test_the_simulated_engine_has_the_settings_of_the_calibrated_one(
    tmp_path: Path, name: str
) -> None:
    """Every option that a scheduler reads, tpot_ms of adaptive_chunk among them."""
    value = OTHER[name] if name in OTHER else getattr(EngineConfig(), name) + 7
    about = {
        "config": {"model": "none", name: value},
        "blocks": 512,
        "window": 0,
        "recent": 0,
        "max_model_len": 1024,
    }
    path = tmp_path / "c.json"
    CalibratedCost([1.0] * 7, (0, 0), 1, 0.0, about).save(path)
    parser = argparse.ArgumentParser()
    simulate_command.add_arguments(parser)
    arguments = parser.parse_args(["--rate", "5", "--calibration", str(path)])
    assert getattr(simulate_command.make_scenario(arguments)[0].config, name) == value


@pytest.mark.parametrize(("words", "wanted"), [((), 20.0), (("--tpot-ms", "35"), 35.0)])
def test_a_log_of_adaptive_chunk_is_simulated_with_its_step_time(
    tmp_path: Path, words: tuple[str, ...], wanted: float
) -> None:
    from tests.lab.test_history import record

    log = tmp_path / "steps"
    for seed in range(3):
        record(log, seed, policy="adaptive_chunk", tpot_ms=20.0, max_num_batched_tokens=64)
    parser = argparse.ArgumentParser()
    simulate_command.add_arguments(parser)
    scenario, _ = simulate_command.make_scenario(parser.parse_args(["--log", str(log), *words]))
    assert (scenario.config.policy, scenario.config.tpot_ms) == ("adaptive_chunk", wanted)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpu H100 --model M", "which traffic? give --trace FILE"),
        ("--rate 5", "how long does a step take?"),
        ("--rate 5 --gpu H100", "--gpu and --model go together"),
        ("--rate 5 --calibration C --lora L", "--lora is for --gpu"),
        ("--rate 5 --model M --gpu L4 --lora nowhere", "it holds no adapter_model.safetensors"),
        ("--rate 5 --model M --gpu H1000", "unknown GPU 'H1000': known are A100-80G"),
        (
            "--rate 5 --model M --gpu rtx4090",
            "unknown GPU 'rtx4090': did you mean RTX-4090? known are A100-80G",
        ),
        ("--rate 5 --model M --gpu L4 --policy best", "policy is one of chunked"),
        ("--rate 5 --model M --gpu L4 --policies best", "unknown policy 'best': one of chunked"),
        (
            "--rate 5 --model M --gpu L4 --placement best",
            "unknown placement 'best': one of round_robin",
        ),
        ("--rate 5 --model M --gpu L4 --replicas 0", f"replicas are 1 to {MAX_REPLICAS:,}, not 0"),
        ("--rate 5 --model M --gpu L4 --search", "--search needs targets"),
        ("--rate 5 --model M --gpu L4 --ttft-ms 0", "--ttft-ms is more than 0"),
        ("--rate 5 --model M --gpu L4 --goodput 1.5", "--goodput is a share"),
        ("--rate -5 --model M --gpu L4", "--rate is 0 or more"),
        ("--rate 5 --rate-scale 1,x --model M --gpu L4", "--rate-scale is a number"),
        ("--rate 5 --model M --gpu L4 --mfu 2", "at most 1"),
        ("--rate 5 --model M --gpu L4 --max-model-len 600 --cap 200 --trace T", "left out"),
        ("--trace T --log T --gpu L4 --model M", "two kinds of traffic"),
        ("--log T", "is not a step log"),
        ("--rate 5 --calibration T", "is not a calibration"),
        ("--rate 5 --model M --gpu L4 --gpus x", "--gpus is a whole number"),
        ("--rate 5 --model M --gpu L4 --gpus 0,1", "--gpus is 1 or more"),
        ("--rate 5 --model M --gpu L4 --gpus 1,2", "compared with --search"),
        ("--rate 5 --model M --gpu L4 --roles search", "goes with --search"),
        (
            "--rate 5 --model M --gpu L4 --roles prefill=1,decode=1 --search --ttft-ms 9",
            "--roles search",
        ),
        (
            "--rate 5 --model M --gpu L4 --roles prefill=1,decode=1 --replicas 2",
            "leave --replicas out",
        ),
        ("--rate 5 --model M --gpu L4 --autoscale 3,2", "LEAST,MOST"),
        ("--rate 5 --model M --gpu L4 --autoscale 1,2 --replicas 2", "leave --search"),
        ("--rate 5 --model M --gpu L4 --autoscale 1,2 --failures-per-hour 1", "leave one out"),
        ("--rate 5 --model M --gpu L4 --failures-per-hour -1", "--failures-per-hour is 0 or more"),
        ("--rate 5 --model M --gpu L4 --events nowhere.jsonl", "cannot read nowhere.jsonl"),
        ("--rate 5 --model M --gpu L4 --failures-per-hour 1 --search --ttft-ms 9", "do not fail"),
        ("--rate 5 --model M --gpu L4,H100", "compared with --search"),
        ("--rate 5 --model M --gpu L4 --price-per-gpu-hour x", "--price-per-gpu-hour is a number"),
        ("--rate 5 --model M --gpu L4 --price-per-gpu-hour H100=2", "says nothing of L4"),
        (
            "--rate 5 --model M --gpu L4 --price-per-gpu-hour -1",
            "--price-per-gpu-hour is 0 or more",
        ),
        ("--rate 5 --model M --gpu L4 --workers -1", "--workers is 0 or more"),
        ("--rate 5 --model M --gpu L4 --roles prefill=0,decode=1", "--roles is prefill=N,decode=M"),
        ("--rate 5 --model M --gpu L4 --kv-host-gb-s 0", "--kv-host-gb-s is more than 0"),
        ("--rate 5 --model M --gpu L4 --kv-link-gb-s 0", "--kv-link-gb-s is more than 0"),
        ("--rate 5 --model M --gpu L4 --link-us -1", "--link-gb-s and --link-us"),
        (
            "--rate 5 --model M --gpu L4 --ttft-ms 0.001 --search --num-prompts 20",
            "no number of replicas",
        ),
        ("--trace H --model M --gpu L4", "request 2 has no arrival time"),
        ("--trace N --model M --gpu L4", "request 2 arrives at 1 s, the one before it at 2 s"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    row = '{"prompt_tokens": 500, "output_tokens": 4, "arrival_s": %s}\n'
    for name, times in (("T", ("0", "1")), ("H", ("0", "null")), ("N", ("2", "1"))):
        (tmp_path / name).write_text("".join(row % at for at in times))
    files = {"M": model} | {name: str(tmp_path / name) for name in "THN"}
    code = cli.main(["simulate", *(files.get(word, word) for word in words.split())])
    captured = capsys.readouterr()
    if said == "left out":
        assert code == 1
        assert "no request of T fits 600 tokens beside a cap of 200" in captured.err
        return
    assert code in (1, 2)
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_a_calibration_needs_an_engine_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.json"
    CalibratedCost([1.0] * 7, (0, 0), 1, 0.0, {}).save(path)
    assert cli.main(["simulate", "--rate", "5", "--calibration", str(path)]) == 1
    assert "does not say what engine it is of" in capsys.readouterr().err
    assert cli.main(["calibrate", "--num-prompts", "2"]) == 2
    assert cli.main(["calibrate", "--check", "--log", str(path)]) == 2


def test_a_calibrated_engine_takes_roles_and_slower_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long prompts apart leave short answers alone; what KV takes is what the calibration says."""
    path = tmp_path / "c.json"
    about = {
        "config": {"model": "none"},
        "blocks": 512,
        "window": 0,
        "recent": 0,
        "max_model_len": 8192,
    }
    words = (
        "--calibration",
        str(path),
        "--rate",
        "6",
        "--num-prompts",
        "120",
        "--input-len",
        "600",
        "--cv",
        "1",
        "--output-len",
        "60",
        "--tpot-ms",
        "30",
    )
    cost = CalibratedCost([1e-3, 0, 2e-4, 0, 0, 0, 0], (0, 0), 1, 0.0, about)
    cost.save(path)
    apart = ("--roles", "prefill=1,decode=1", "--prefill-tokens", "16")
    for flags in (apart, ("--kv-file-gb", "1")):
        assert cli.main(["simulate", *words, *flags]) == 2
        assert "calibrate again" in capsys.readouterr().err
    about["needs"] = {"position": 1e5}
    cost.save(path)
    (together,) = simulate(*words, "--replicas", "2", output=tmp_path / "a")
    (elsewhere,) = simulate(*words, *apart, output=tmp_path / "b")
    assert elsewhere["longest_gap_ms"]["p99"] < 0.5 * together["longest_gap_ms"]["p99"]
    slow = (*apart, "--kv-link-gb-s", "0.01")
    (late,) = simulate(*words, *slow, output=tmp_path / "c")
    assert late["ttft_ms"]["p50"] > elsewhere["ttft_ms"]["p50"] + 1000
    simulate(*words, "--kv-host-memory", "1G", output=tmp_path / "d")
    assert "10,737 tokens in host memory" in capsys.readouterr().out


@pytest.mark.slow
def test_calibrate_checks_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    words = [
        "calibrate",
        "--backend",
        "fake",
        "--num-prompts",
        "30",
        "--input-len",
        "12",
        "--output-len",
        "24",
    ]
    assert cli.main([*words, "--check", "--output", str(path)]) == 0
    text = capsys.readouterr().out
    for load in (
        "all at once",
        "Poisson 40 %",
        "Poisson 70 %",
        "Poisson 95 %",
        "bursts",
        "median of sizes",
    ):
        assert load in text
    assert json.loads(path.read_bytes())["engine"]["config"]["backend"] == "fake"


def test_a_kind_on_which_nothing_fits_is_said_and_the_others_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_1B | {"num_hidden_layers": 160, "hidden_size": 4096}))
    load = "--rate 2 --num-prompts 8 --output-len 4 --search --ttft-ms 9000 --gpus 1"
    words = ("--model", str(path), *load.split(), "--gpu", "T4,H100")
    (run,) = simulate(*words, output=tmp_path / "out")
    assert run["gpu"] == "H100"
    assert "left out: " in (said := " ".join(capsys.readouterr().out.split()))
    assert "1 x T4" in said
    assert cli.main(["simulate", *words[:-1], "T4,L4"]) == 2
    assert "1 x T4" in capsys.readouterr().err


def test_what_failures_cost_with_and_without_moving(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--model",
        model,
        *GPU,
        "--replicas",
        "4",
        "--failures-per-hour",
        "900",
        "--restart-seconds",
        "1",
    )
    (moved,) = simulate(*words, output=tmp_path / "a")
    assert moved["turnover"]["streams_moved"] > 0 == moved["turnover"]["streams_restarted"]
    assert f"{moved['turnover']['streams_moved']} streams moved" in capsys.readouterr().out
    (again,) = simulate(*words, "--streams", "restart", output=tmp_path / "b")
    assert again["turnover"]["tokens_lost"] > 0 == again["turnover"]["streams_moved"]
    assert "streams began again" in capsys.readouterr().out
    assert moved["output_tokens"] == again["output_tokens"]


def test_events_of_a_file(model: str, tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text(
        '{"at": 1, "replica": 0, "event": "end"}\n{"at": 2, "replica": 1, "event": "drain"}\n'
    )
    words = ("--model", model, *GPU, "--replicas", "3", "--events", str(path))
    (run,) = simulate(*words, output=tmp_path / "out")
    assert (run["turnover"]["replicas_failed"], run["turnover"]["replicas_drained"]) == (1, 1)
    assert cli.main(["simulate", *words[:-3], "1", *words[-2:]]) == 2, "there is no replica 1"


def test_replicas_that_follow_the_load_are_paid_while_they_are_there(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ("--rate", "20", "--num-prompts", "400", "--input-len", "4000", "--output-len", "5")
    scaled = (
        "--autoscale",
        "1,4",
        "--start-seconds",
        "2",
        "--upscale-delay",
        "2",
        "--ttft-ms",
        "300",
    )
    money = ("--price-per-gpu-hour", "1", "--max-num-seqs", "16")
    words = ("--model", model, "--gpu", "L4", *load, *scaled, *money)
    (run,) = simulate(*words, output=tmp_path / "out")
    found = run["turnover"]
    assert 1 < found["replicas_mean"] < found["replicas_most"] <= 4
    assert run["price_per_hour"] == found["replicas_mean"]
    said = capsys.readouterr().out
    assert f"autoscaled: {found['replicas_mean']:.1f} replicas on average" in said
    assert "a million tokens of answers" in said


@pytest.mark.slow
def test_roles_are_searched_too(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = "--rate 100 --num-prompts 200 --output-len 20 --ttft-ms 500 --tpot-ms 20 --gpus 1"
    words = ("--model", model, "--gpu", "L4", *load.split(), "--search")
    (run,) = simulate(*words, "--roles", "search", output=tmp_path / "a")
    (together,) = simulate(*words, output=tmp_path / "b")
    assert run["gpus"] <= together["gpus"]
    assert "of them for prompts" in capsys.readouterr().err
