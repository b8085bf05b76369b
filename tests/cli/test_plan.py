"""`pageturner plan`: what it prints, what it writes, what it refuses, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pageturner import cli, memory
from pageturner.lab.commands import plan

TINY = Path(__file__).parents[1] / "goldens" / "tiny_llama.gguf"
# 2 x 32 layers x 32 heads x 128 values x 2 bytes = 512 KiB a token; 12.55 GiB of weights
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "llama-2-7b.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def planned(tmp_path: Path, *words: str) -> dict[str, Any]:
    output = tmp_path / "plans" / "plan.json"
    assert cli.main(["plan", *words, "--output", str(output)]) == 0
    data: dict[str, Any] = json.loads(output.read_text())
    return data


def test_table_and_picture(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", llama, "--memory", "24GiB", "--lengths", "500,4K"]) == 0
    out = capsys.readouterr().out
    assert "MHA: 32 layers, 32 heads, 32 with KV, of 128 values" in out
    assert "12.55 GiB: 6,738,415,616 parameters in float16" in out
    lines = {line[:14].strip(): line[15:] for line in out.splitlines()}
    assert lines["KV, one token"] == "512.00 KiB (float16)"
    assert lines["one block"] == "8.00 MiB: 16 tokens"
    assert lines["one sequence"] == "2.00 GiB: 4,096 tokens"
    assert lines["memory"] == "24.00 GiB (--memory), 11.45 GiB of it for KV"
    # 11.45 GiB hold 5 x 2 GiB, 45 x 512 tokens, and 45 x 32 blocks of 16: 500 tokens, and 12 empty
    row = next(line for line in out.splitlines() if line.startswith("500 tokens"))
    assert row.split()[2:] == [
        "256.00",
        "MiB",
        "5",
        "87.8",
        "%",
        "45",
        "2.3",
        "%",
        "45",
        "2.3",
        "%",
    ]
    bars = [line for line in out.splitlines() if "|" in line]
    assert len(bars) == 6
    bar = bars[0].split("|")[1]
    assert len(bar) == plan.BAR
    # 5 reservations take 10 / 11.45 of the memory, an eighth of which holds tokens
    assert (bar.count("#"), bar.count("-"), bar.count(".")) == (4, 31, 5)
    assert bars[0].endswith(" 5")


def test_the_same_as_data(llama: str, tmp_path: Path) -> None:
    data = planned(
        tmp_path, llama, "--memory", "24GiB", "--block-size", "32", "--kv-cache-dtype", "int8"
    )
    per_token = 2 * 32 * 32 * (128 + 4)
    assert data["kv"] == {
        "dtype": "int8",
        "block_size": 32,
        "max_model_len": 4096,
        "bytes_per_token": per_token,
        "bytes_per_block": 32 * per_token,
        "bytes_per_sequence": 4096 * per_token,
        "bytes_per_state": 0,
    }
    assert data["weights"]["bytes"] == 2 * 6_738_415_616
    assert data["memory"]["kv_bytes"] == 24 * 1024**3 - data["weights"]["bytes"]
    assert [row["tokens"] for row in data["rows"]] == [400, 1500, 4096]
    for row in data["rows"]:
        for fit in row["fits"].values():
            assert fit["sequences"] == int(data["memory"]["kv_bytes"] / fit["each"])
    assert data["notes"] == []


def test_the_memory_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 10_000_000)
    data = planned(tmp_path, str(TINY))
    assert data["memory"]["bytes"] == 10_000_000
    assert data["memory"]["from"] == "free on this machine"


def test_too_large_for_the_machine(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", llama, "--memory", "8G"]) == 1, "for scripts"
    out = capsys.readouterr().out
    assert "512.00 KiB" in out
    assert "nothing fits: the weights alone take 12.55 GiB and there are 8.00 GiB" in out
    assert "|" not in out


def test_weights_that_are_elsewhere_or_unknown(llama: str, tmp_path: Path) -> None:
    assert (
        planned(tmp_path, llama, "--memory", "8G", "--weights-bytes", "0")["memory"]["kv_bytes"]
        == 8 << 30
    )
    silent = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    Path(llama).write_text(json.dumps(silent | {"model_type": "unheard_of"}))
    data = planned(
        tmp_path, llama, "--memory", "8G", "--weights-bytes", "4G", "--quantization", "int4"
    )
    assert "'unheard_of' is not supported" in data["notes"][0]
    assert "no key says how many heads have KV" in data["notes"][1]
    assert data["memory"]["kv_bytes"] == 4 << 30


def test_weights_that_cannot_be_counted_are_not_planned_around(
    llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(llama).write_text(json.dumps(LLAMA | {"model_type": "unheard_of"}))
    assert cli.main(["plan", llama, "--memory", "8G"]) == 2
    said = capsys.readouterr()
    assert "cannot be counted" in said.err
    assert "--weights-bytes" in said.err
    assert said.out == ""


def test_a_gpu_by_what_its_driver_reports(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = planned(tmp_path, llama, "--gpu", "h100")
    assert data["memory"]["bytes"] == int(0.9 * 81_559 * 2**20)
    out = capsys.readouterr().out
    assert "71.68 GiB (90% of 1 x H100 with 81,559 MiB)" in out
    assert "all weights once: 4.02 ms at 3.35 TB/s (NVIDIA H100 datasheet" in out  # 13.48 GB
    two = planned(tmp_path, llama, "--gpu", "H100", "--gpus", "2")
    assert two["memory"]["bytes"] == int(0.9 * 2 * 81_559 * 2**20)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "A100"], "did you mean A100-80G or A100-40G?"),
        (["--gpu", "abacus"], "known are A100-80G, "),
        (["--gpu", "H100", "--memory", "8G"], "--gpu or --memory"),
        (["--gpu", "H100", "--gpus", "0"], "--gpus is 1 or more"),
        (["--gpus", "2"], "give both"),
    ],
)
def test_gpus_that_are_refused(
    llama: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", llama, *words]) == 2
    assert said in capsys.readouterr().err


def test_tables_fit_100_columns(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", llama, "--gpu", "MI300X"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        max(len(line) for line in lines if "/" not in line) <= 100
    )  # all but the path and the source


def test_a_trace(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "chats_of_one_afternoon.jsonl"
    rows = [{"prompt_tokens": n, "output_tokens": 10, "session_id": "s00"} for n in (90, 990, 5000)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    data = planned(tmp_path, llama, "--memory", "24G", "--trace", str(trace))
    row = data["rows"][-1]
    assert (row["name"], row["requests"], row["tokens"]) == ("chats_of_one_afternoon", 2, 550)
    assert row["fits"]["paged"]["each"] == (112 + 1008) / 2 * 524_288  # 7 and 63 blocks
    assert data["notes"] == [
        "left out as over 4,096 tokens: 1 of 3 requests of chats_of_one_afternoon.jsonl"
    ]
    out = capsys.readouterr().out
    assert "chats_of_one_afternoon (mean 550)" in out
    assert (
        len({line.index("|") for line in out.splitlines() if "|" in line}) == 1
    )  # bars stand in line


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ["--memory", "40PB"],
            2,
            "--memory is a whole number, or a size such as 8G, 8GiB or 8GB, not '40PB'",
        ),
        (["--memory", "0"], 2, "--memory is 1 or more"),
        (["--weights-bytes=-1"], 2, "--weights-bytes is 0 or more"),
        (["--lengths", "512,x"], 2, "each of --lengths is a whole number"),
        (["--lengths", "0"], 2, "each of --lengths is 1 or more"),
        (
            ["--lengths", "512,4097"],
            2,
            "--lengths 4,097 is over the longest sequence of 4,096 tokens",
        ),
        (["--max-model-len", "5000"], 2, "over the model's context of 4,096"),
        (["--block-size", "0"], 2, "block_size is 1 or more"),
        (["--kv-cache-dtype", "fp4"], 2, "kv_cache_dtype is one of"),
        (["--trace", "nowhere.jsonl"], 1, "cannot read the trace nowhere.jsonl"),
        (["--output", "/dev/null/plan.json"], 1, "cannot write /dev/null/plan.json"),
    ],
)
def test_bad_settings_are_one_line(
    words: list[str], code: int, said: str, llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", llama, "--memory", "24G", *words]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["nowhere.json", "nowhere.gguf", "/"])
def test_no_model_is_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", name]) == 1
    error = capsys.readouterr().err
    assert name in error
    assert error.count("\n") == 1


def test_a_context_that_is_not_said(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    silent = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    Path(llama).write_text(json.dumps(silent))
    assert cli.main(["plan", llama, "--weights-bytes", "4G"]) == 2
    assert "give --max-model-len" in capsys.readouterr().err
    assert (
        cli.main(
            ["plan", llama, "--max-model-len", "1000", "--memory", "8G", "--weights-bytes", "4G"]
        )
        == 0
    )


def test_only_long_requests(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "long.jsonl"
    trace.write_text('{"prompt_tokens": 9000, "output_tokens": 1}\n')
    assert cli.main(["plan", llama, "--memory", "24G", "--trace", str(trace)]) == 2
    assert "every request" in capsys.readouterr().err


HELP = """
import argparse, sys
from pageturner.lab.commands import plan
plan.add_arguments(argparse.ArgumentParser())
print(*sys.modules)
"""
PLAN = """
import sys
from pageturner import cli
assert cli.main(sys.argv[1:]) == 0
print(*sys.modules)
"""


def modules(code: str, *words: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_nothing_heavy_is_imported(llama: str) -> None:
    assert not {"numpy", "msgspec", "pageturner.models.spec"} & modules(HELP)
    loaded = modules(PLAN, "plan", llama, "--memory", "24G")
    assert "numpy" in loaded
    assert not {"pageturner.kernels.cpu.native", "tokenizers", "safetensors", "starlette"} & loaded


def test_adapters_take_memory_too(llama: str, tmp_path: Path) -> None:
    """Of those that are named as many as are in memory at once, the largest."""
    folders = []
    for size in (1 << 20, 3 << 20, 2 << 20):
        folders.append(tmp_path / str(size))
        folders[-1].mkdir()
        (folders[-1] / "adapter_model.safetensors").write_bytes(bytes(size))
    named = [flag for folder in folders for flag in ("--lora", str(folder))]
    plain, adapted = (
        planned(tmp_path, llama, "--memory", "40G", *flags)
        for flags in ((), (*named, "--max-loras", "2"))
    )
    assert adapted["adapters"] == {"bytes": 5 << 20}
    assert plain["memory"]["kv_bytes"] - adapted["memory"]["kv_bytes"] == 5 << 20
