"""`pageturner plan` for several GPUs and replicas: ranks, links, tiers and roles, against figures by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pageturner import cli
from pageturner.kernels.gpu.catalogue import exchange_bytes
from pageturner.lab.simulation.roofline import GPUS

# 2 x 32 layers x 8 heads x 128 values x 2 bytes = 128 KiB a token
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "hidden_act": "silu",
    "rope_theta": 5e5,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "llama-8b.json"
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


def planned(tmp_path: Path, *words: str) -> dict[str, Any]:
    output = tmp_path / "plan.json"
    assert cli.main(["plan", *words, "--gpu", "H100", "--output", str(output)]) == 0
    data: dict[str, Any] = json.loads(output.read_text())
    return data


def test_what_each_rank_holds(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = planned(tmp_path, model, "--gpus", "8")
    assert "16.00 KiB a token\n" in capsys.readouterr().out
    more = planned(tmp_path, model, "--gpus", "16")
    said = capsys.readouterr().out
    assert "16.00 KiB a token; 50% of the KV is what another rank holds too" in said
    assert "B for sums over ranks, " in said
    weights, sums = whole["weights"]["bytes"], exchange_bytes()
    assert whole["memory"]["kv_bytes"] == int(8 * 0.9 * GPUS["H100"].memory) - 8 * sums - weights
    assert (
        more["memory"]["kv_bytes"]
        == (int(16 * 0.9 * GPUS["H100"].memory) - 16 * sums - weights) // 2
    ), "each of 8 heads is on two ranks"


def test_hand_over_tiers_and_roles(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = (
        "--kv-host-memory",
        "2GiB",
        "--kv-file-gb",
        "1",
        "--kv-host-gb-s",
        "20",
        "--kv-file-gb-s",
        "2",
    )
    roles = ("--roles", "prefill=2,decode=3", "--kv-link-gb-s", "10", "--kv-link-ms", "5")
    data = planned(tmp_path, model, *tiers, *roles)
    found, token = data["cluster"], 128 * 1024
    assert (found["prefill"], found["decode"], found["gpus"]) == (2, 3, 1)
    assert found["host_tokens"] == 2**31 // token
    assert found["file_tokens"] == 10**9 // token
    assert found["sequences"] == 3 * (data["memory"]["kv_bytes"] // (16384 * token))
    by_length = {row["tokens"]: row for row in found["rows"]}
    row = by_length[8192]
    assert row["sent"] == pytest.approx(8192 * token / 10e9 + 0.005)
    assert row["host"] == pytest.approx(8192 * token / 20e9)
    assert row["file"] is None, "a file of 1 GB does not hold 8,192 tokens"
    assert by_length[2048]["file"] == pytest.approx(2048 * token / 2e9)
    assert row["per_second"] == pytest.approx(2 / row["computed"])
    # what is computed last is one step of 2,048 tokens, or what is late because the link is slow
    least = 2048 * token / 10e9
    assert row["late"] == pytest.approx(max(least, 8192 * token / 10e9 - row["computed"]) + 0.005)
    said = capsys.readouterr().out
    assert "2 replicas compute prompts, 3 answer" in said
    assert max(len(line) for line in said.splitlines() if "/" not in line) <= 100


def test_without_any_of_it_nothing_is_said(model: str, tmp_path: Path) -> None:
    assert planned(tmp_path, model)["cluster"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--roles", "search"], "--roles is prefill=N,decode=M"),
        (["--roles", "prefill=1,decode=1", "--kv-link-gb-s", "0"], "--kv-link-gb-s is more than 0"),
        (["--kv-file-gb", "-1"], "--kv-file-gb is 0 or more"),
    ],
)
def test_what_makes_no_sense(
    model: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", model, "--gpu", "H100", *words]) == 2
    assert said in capsys.readouterr().err
