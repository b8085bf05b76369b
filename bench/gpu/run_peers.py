"""Beside other engines, with the same random weights and the same requests in the same run.

`peers`: Transformers, continuous batching and static `generate`. `torch`: the plain PyTorch engine of
torch_engine.py on the loads of run_load.py, whose own parts tell what ours makes of them. Each peer runs in a
process of its own, behind ours, whose memory is given back by then. The folder is that of run_models.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEVICE = "cuda"
MOST = 25  # seconds of each of them
STATIC_BATCH = 16  # requests of one `generate`, padded to the longest on the left


def peers(room: Any) -> None:
    """Output tokens per second of the three, and what ours is a multiple of."""
    from run_common import tell, torch_here
    from run_load import load
    from run_models import roomy_engine, run_all, tokens_of, write_folder

    shape = room.qwen3_06b
    model = write_folder(room, shape)
    requests = (
        load(shape.vocabulary, 2, (4, 6), (2, 3))
        if room.tiny
        else load(shape.vocabulary, 64, (100, 1024), (100, 400))
    )
    with roomy_engine(room, model, 8192, 64) as here:
        for _ in range(
            1 if room.tiny else 2
        ):  # the first records the graphs, as theirs are warm too
            begin = time.perf_counter()
            tokens = tokens_of(run_all(here.engine, requests))
            ours = tokens / (time.perf_counter() - begin)
            here.engine.forget_prefixes()
    tell("peers", mode="ours", tok_s=ours, output_tokens=tokens)
    for mode in ("static", "continuous"):  # each is told at once: the time may end
        if torch_here(room) is None:
            tell("peers", mode=mode, run=False, why="torch has no device here")
            continue
        found = _theirs(room.folder, model, mode, requests)
        tell(
            "peers", mode=mode, times=ours / found["tok_s"] if found.get("tok_s") else None, **found
        )


def torch(room: Any) -> None:
    """The plain PyTorch engine on nano-vllm's load and on the burst."""
    from run_common import tell, torch_here
    from run_load import BURST, load
    from run_models import write_folder

    shape = room.qwen3_06b
    model = write_folder(room, shape)
    if torch_here(room) is None:
        tell("torch", run=False, why="torch has no device here")
        return
    for name, requests in (
        ("burst", load(shape.vocabulary, *BURST)),
        ("nano", load(shape.vocabulary)),
    ):
        tell("torch", load=name, **_theirs(room.folder, model, "torch", requests))


def _theirs(folder: Path, model: Path, mode: str, requests: list[Any]) -> dict[str, Any]:
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps([[list(one.prompt), one.params.max_tokens] for one in requests]))
    command = [sys.executable, __file__, str(model), str(jobs), mode]
    if mode == "torch":
        command = [
            sys.executable,
            str(Path(__file__).with_name("torch_engine.py")),
            str(model),
            str(jobs),
        ]
    try:
        done = subprocess.run(command, capture_output=True, timeout=MOST)
        said, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:  # the pace until then is told
        said, errors = late.stdout or b"", b"not done in time"
    lines = [line for line in said.decode().splitlines() if line.startswith('{"tok_s"')]
    return json.loads(lines[-1]) if lines else {"run": False, "why": errors.decode()[-800:]}


# -- in a process of its own ---------------------------------------------------------------------------------
def static(model: Any, torch: Any, jobs: list[Any]) -> Iterator[int]:
    """Output tokens that were wanted, after each batch."""
    for at in range(0, len(jobs), STATIC_BATCH):
        batch = jobs[at : at + STATIC_BATCH]
        widest = max(len(prompt) for prompt, _ in batch)
        ids = [[0] * (widest - len(prompt)) + prompt for prompt, _ in batch]
        mask = [[0] * (widest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch]
        count = max(output for _, output in batch)
        with torch.inference_mode():
            model.generate(
                input_ids=torch.tensor(ids, device=DEVICE),
                attention_mask=torch.tensor(mask, device=DEVICE),
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                pad_token_id=0,
            )
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        yield sum(output for _, output in batch)


def continuous(manager: Any, jobs: list[Any]) -> Iterator[int]:
    """Output tokens, as requests are finished."""
    open_ = {manager.add_request(prompt, max_new_tokens=output): output for prompt, output in jobs}
    while open_:
        result = manager.get_result(timeout=1.0)
        if result is None and not manager.is_running():
            raise SystemExit("the generation thread ended")
        if result is not None and result.is_finished():
            yield open_.pop(result.request_id)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("jobs", type=Path)
    parser.add_argument("mode", choices=["continuous", "static"])
    options = parser.parse_args()
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig

    jobs = json.loads(options.jobs.read_text())
    attention = "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.bfloat16, attn_implementation=attention
    )
    model = model.to(DEVICE).eval()
    model.generation_config.eos_token_id = None
    manager = None
    if options.mode == "static":
        sum(static(model, torch, [(prompt[:64], 8) for prompt, _ in jobs[:STATIC_BATCH]]))  # warm
        work = static(model, torch, jobs)
    else:
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()
        sum(continuous(manager, [(prompt, 16) for prompt, _ in jobs]))  # warm
        work = continuous(manager, jobs)
    tokens, begin = 0, time.perf_counter()
    for more in work:
        tokens, took = tokens + more, time.perf_counter() - begin
        told = {
            "tok_s": tokens / took,
            "output_tokens": tokens,
            "seconds": took,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "attention": attention,
        }
        print(json.dumps(told), flush=True)
    if manager is not None:
        manager.stop(block=True)


if __name__ == "__main__":
    main()
