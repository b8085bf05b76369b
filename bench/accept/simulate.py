"""`pageturner simulate` for Llama 3.1 8B on H100, as the parts that simulate run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # by its published config.json


@dataclass(frozen=True, slots=True)
class Simulated:
    """The last run of the command, its seconds, those of processors, and MB at its peak."""

    run: dict[str, Any]
    wall: float
    processors: float
    peak_mb: float


def simulate(flags: str) -> Simulated:
    """Run the command with these flags. RuntimeError with its last words where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        model, output, said = (Path(folder) / name for name in ("config.json", "run.json", "said"))
        model.write_text(json.dumps(MODEL))
        words = f"-m pageturner simulate --model {model} --gpu H100 --output {output} {flags}"
        begin = time.monotonic()
        with said.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *words.split()], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=file
            )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"pageturner simulate {flags}: {said.read_text()[-300:]}")
        run = json.loads(output.read_text())["runs"][-1]
    processors = used.ru_utime + used.ru_stime
    return Simulated(run, time.monotonic() - begin, processors, used.ru_maxrss / 1024)
