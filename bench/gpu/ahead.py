"""What one step ahead gains on an H200, by the simulator's roofline and the host time of this machine.

    python bench/gpu/ahead.py

The device: a step that decodes takes what `lab/simulation/roofline.py` says of an H200 (60 % of its
arithmetic, 80 % of
its bandwidth). The host: a real engine plans, packs, draws and commits such steps here, and what computes
them answers at once; LAUNCH beside that is assumed: the uploads, the replay of a recording, the download.

The plain loop takes both, one behind the other. One step ahead takes the longer of both: the device has its
next step before it is done with the last one. Not counted: what the API process takes of the same cores, gaps
between the kernels of a step, and steps in which somebody looks at tokens, which are the plain loop's.
No device was used: these are forecasts. Prints JSON, one line for each figure.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from pageturner.engine.engine import Engine, EngineParts  # noqa: E402
from pageturner.executor.async_runner import Crowd  # noqa: E402
from pageturner.executor.batch import NO_ROWS, BlockRows, pack  # noqa: E402
from pageturner.lab.planning.model_outline import Outline, read_outline  # noqa: E402
from pageturner.lab.simulation.roofline import Reach, gpu_named, roofline  # noqa: E402
from pageturner.params import SamplingParams  # noqa: E402
from pageturner.policies.scheduler_config import SchedulerConfig  # noqa: E402
from pageturner.policies.scheduler_factory import make_scheduler  # noqa: E402
from pageturner.request import Request  # noqa: E402
from pageturner.scheduler.types import Output, Plan, Result, Sequence  # noqa: E402
from pageturner.telemetry.work import StepWork  # noqa: E402

LAUNCH = 30e-6  # seconds of the host for each step, assumed
PROMPT, WARM, STEPS = 1000, 20, 120  # tokens; steps that are not timed, that are
CROWDS = (16, 64, 256)
ROUNDS = 3  # of which the shortest median counts
_COMMON = {
    "model_type": "llama",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _COMMON
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
        "architectures": ["LlamaForCausalLM"],
    },
    "Qwen3-0.6B": _COMMON
    | {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "architectures": ["Qwen3ForCausalLM"],
    },
}


Launched = tuple[int, dict[Sequence, int]]  # items, and the row of each sequence


class InstantDevice:
    """All that the host does for a step, and nothing that a device does. In one piece, and in two."""

    def __init__(self) -> None:
        self._rows, self._crowd = BlockRows(), Crowd([])

    def run(self, plan: Plan) -> Result:
        return self.collect(self.launch(plan, None))

    def can_run_async(self, request: Request) -> bool:
        return True

    def launch(self, plan: Plan, before: Launched | None) -> Launched:
        pack(plan, 16, 0, before[1] if before else NO_ROWS, self._rows)
        items = [item for item in plan.items if item.wants_logits]
        sequences = [item.sequence for item in items]
        if self._crowd.sequences != sequences:
            self._crowd = Crowd(sequences)
        self._crowd.draws([item.start + item.n for item in items])
        return len(plan.items), {item.sequence: row for row, item in enumerate(items)}

    def collect(self, launched: Launched) -> Result:
        return Result([Output([7]) for _ in range(launched[0])])


def host_seconds(sequences: int, ahead: bool) -> float:
    """Median seconds of the host for a step in which so many sequences decode, drawing at random."""
    config = SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=0)
    blocks = sequences * (PROMPT + WARM + STEPS + 64) // 16 + sequences
    device = InstantDevice()
    stack = make_scheduler(config, num_blocks=blocks, max_model_len=4096)
    engine = Engine(stack, device, parts=EngineParts(async_executor=device if ahead else None))
    for id in range(1, sequences + 1):
        params = SamplingParams(max_tokens=WARM + STEPS + 9, temperature=0.7, seed=id)
        engine.submit(Request(id, tuple((id + k) % 1000 for k in range(PROMPT)), params))
    times = []
    gc.collect()
    gc.disable()  # the engine process looks for garbage when it has time
    for step in range(WARM + STEPS):
        begin = time.perf_counter()
        engine.step()
        if step >= WARM:
            times.append(time.perf_counter() - begin)
    gc.enable()
    return statistics.median(times)


def step_seconds(
    model: Outline, sequences: int, host: float, ahead: bool, gpu: str = "H200"
) -> float:
    """Seconds of such a step, by the simulator's costs."""
    context = sequences * (PROMPT + WARM + STEPS // 2)
    work = StepWork(sequences, sequences, sequences, context, context)
    reach = Reach(overhead=0.0, host=host, ahead=ahead)
    return roofline(model, gpu_named(gpu), reach, dtype="bfloat16").seconds(work)


def outline(name: str) -> Outline:
    """One of MODELS with weights in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        return read_outline(folder)


def gains(gpu: str = "H200") -> list[dict[str, Any]]:
    """For each model and crowd: milliseconds of host and device, of a step in the plain loop and one step
    ahead, the share of the plain loop in which the device idles, and by how much more tokens a second there
    are (gain: 1.1 is 10 % more). Takes some seconds."""
    cases = [(n, ahead) for n in CROWDS for ahead in (False, True)]
    rounds = [{case: host_seconds(*case) + LAUNCH for case in cases} for _ in range(ROUNDS)]
    hosts = {case: min(one[case] for one in rounds) for case in cases}  # others use these cores too
    found = []
    for name in MODELS:
        model = outline(name)
        for n in CROWDS:
            plain, ahead = hosts[n, False], hosts[n, True]
            device = step_seconds(model, n, 0.0, False, gpu)
            both = (
                step_seconds(model, n, plain, False, gpu),
                step_seconds(model, n, ahead, True, gpu),
            )
            names = ("host_ms", "host_ahead_ms", "device_ms", "plain_ms", "ahead_ms")
            figures = dict(zip(names, (plain, ahead, device, *both), strict=True))
            told = {key: round(1e3 * value, 3) for key, value in figures.items()}
            shares = {"idle": round(plain / both[0], 3), "gain": round(both[0] / both[1], 3)}
            found.append({"model": name, "gpu": gpu, "sequences": n} | told | shares)
    return found


if __name__ == "__main__":
    for line in gains():
        print(json.dumps(line), flush=True)
