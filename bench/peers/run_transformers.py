"""Hugging Face Transformers on a workload, fp32, in process: static `generate` in left-padded batches in the
order of arrival, or its continuous batching. Run in the `transformers` peer, on the folder of export_hf.py.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator

import offline
import torch
from offline import Job
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
)

BATCH = 16
# Continuous batching, which left alone takes most of the memory: 2 GiB of KV (46,592 tokens of SmolLM2)
# and 64 requests, as vLLM and OpenVINO have; 3.3 GB in all with 26,000 tokens of context.
PAGE, CACHE_BYTES, BATCH_TOKENS, BATCH_REQUESTS = 32, 2 << 30, 512, 64


class Stamps(StoppingCriteria):
    """Is asked after every token: notes the time, stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mode", choices=["static", "continuous"], required=True)
    parser.add_argument("--batch", type=int, default=BATCH, help="requests in a static batch")


@contextlib.contextmanager
def start(args: argparse.Namespace) -> Iterator[offline.Run]:
    """The model, and how it runs jobs."""
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    if args.mode == "static":
        yield lambda jobs: run_static(model, tokenizer, jobs, args.batch)
        return
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=tokenizer.pad_token_id)
    bytes_per_token = (
        8 * model.config.num_hidden_layers * model.config.num_key_value_heads * head_dim(model)
    )
    memory = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=CACHE_BYTES // (bytes_per_token * PAGE),
        max_batch_tokens=BATCH_TOKENS,
        max_requests_per_batch=BATCH_REQUESTS,
    )
    manager = model.init_continuous_batching(
        generation_config=config, continuous_batching_config=memory
    )
    manager.start()
    try:
        yield lambda jobs: run_continuous(manager, tokenizer, jobs)
    finally:
        # an interpreter that ends would wait for its thread before any atexit
        manager.stop(block=True)


def head_dim(model: object) -> int:
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def run_static(model: object, tokenizer: object, jobs: list[Job], batch: int) -> None:
    """A batch begins when it is full or nobody else is to come, and ends with its longest answer."""
    waiting, ready = list(jobs), []
    model.generation_config.eos_token_id = None
    begin = time.perf_counter()
    while waiting or ready:
        ready += offline.due(waiting, begin)
        if len(ready) < batch and waiting:
            offline.sleep_until_next(waiting, begin)
            continue
        chosen, ready = ready[:batch], ready[batch:]
        inputs = tokenizer([job.prompt for job in chosen], return_tensors="pt", padding=True)
        stamps = Stamps()
        longest = max(job.max_tokens for job in chosen)
        with torch.inference_mode():
            model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=tokenizer.pad_token_id,
                stopping_criteria=[stamps],
            )
        end = time.perf_counter()
        for job, mask in zip(chosen, inputs["attention_mask"], strict=True):
            job.prompt_tokens = int(mask.sum())
            job.times = stamps.times[
                : job.max_tokens
            ]  # as if it were streamed; it is given back at `end`
            job.end = end


def run_continuous(manager: object, tokenizer: object, jobs: list[Job]) -> None:
    """The manager works in a thread of its own, and notes the time of every token."""
    waiting, open_ = list(jobs), {}
    begin = time.perf_counter()
    while waiting or open_:
        for job in offline.due(waiting, begin):
            ids = tokenizer(job.prompt)["input_ids"]
            job.prompt_tokens = len(ids)
            name = manager.add_request(ids, max_new_tokens=job.max_tokens, record_timestamps=True)
            open_[name] = job
        if not open_:
            offline.sleep_until_next(waiting, begin)
            continue
        pause = min(1.0, begin + waiting[0].arrival_s - time.perf_counter()) if waiting else 1.0
        result = manager.get_result(timeout=max(pause, 0.001))
        if result is None and not manager.is_running():
            raise SystemExit("the generation thread of Transformers ended")
        if result is not None and result.is_finished():
            job = open_.pop(result.request_id)
            job.times = list(result.timestamps or ())
            job.end = time.perf_counter()


if __name__ == "__main__":
    offline.main(start, add_flags)
