"""What giving back leading blocks saves on a model with sliding windows, and that it changes no bit.

    python bench/windows.py [--model FILE] [--lengths 1500,2500] [--output 60] [--text FILE]

Runs the same requests with one store for all layers and with recent blocks apart, and prints the most KV
memory in use before any step. Exits with 1 if a token or a logprob differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from pageturner.engine.engine import Engine
from pageturner.executor.kv_memory import KVLayout, KVSizes
from pageturner.executor.runner import Runner
from pageturner.formats.hub import cache_folder
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.kernels.cpu.native import NativeOps
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model
from pageturner.params import SamplingParams
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.policies.scheduler_factory import make_scheduler
from pageturner.request import Event, Request
from pageturner.scheduler.scheduler import Scheduler
from pageturner.scheduler.types import Plan, Result

SIZE, DTYPE = 16, "float16"


class Watched:
    """The runner, which notes the most blocks of each kind that were in use before a step."""

    def __init__(self, runner: Runner, plans: Scheduler) -> None:
        self._runner = runner
        self._plans = plans
        self.whole = self.recent = 0

    def run(self, plan: Plan) -> Result:
        stats = self._plans.stats()
        self.whole = max(self.whole, int(stats["blocks_used"]))
        self.recent = max(self.recent, int(stats.get("recent_blocks_used", 0)))
        return self._runner.run(plan)


def run(
    decoder: Decoder, ops: NativeOps, sizes: KVSizes, requests: list[Request]
) -> tuple[object, Watched]:
    """Tokens and logprobs of each request, and the executor with its notes."""
    stack = make_scheduler(
        SchedulerConfig(block_size=SIZE),
        num_blocks=sizes.blocks,
        window=sizes.window,
        sliding=sizes.sliding,
        max_model_len=sizes.blocks * SIZE,
    )
    plans = stack.scheduler
    watched = Watched(Runner(decoder, ops, KVLayout(sizes, SIZE, DTYPE)), plans)
    engine = Engine(stack, watched)
    events: list[Event] = [event for request in requests for event in engine.submit(request)]
    while plans.has_work:
        events += engine.step()
    assert all(event.failure is None for event in events), events
    given = {
        r.id: [(e.tokens, e.logprobs) for e in events if e.id == r.id and e.tokens]
        for r in requests
    }
    return given, watched


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=cache_folder() / "gemma3-270m-q4_k_m.gguf")
    parser.add_argument("--lengths", default="1500,2500", help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=60, help="tokens of each answer")
    parser.add_argument("--text", type=Path, required=True, help="what the prompts are cut from")
    options = parser.parse_args()
    ops = NativeOps()
    decoder = load_model(options.model, ops)
    ids = load_tokenizer(options.model).encode(
        options.text.read_text(), add_special=True, parse_special=False
    )
    requests = []
    for i, length in enumerate(int(length) for length in options.lengths.split(",")):
        params = SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=options.output, logprobs=1
        )
        requests.append(Request(i, tuple(ids[:1] + ids[1 + 500 * i : length + 500 * i]), params))
    blocks = sum(-(-(len(request.prompt) + options.output) // SIZE) + 1 for request in requests)
    one, each = (
        decoder.kv_spec(1, SIZE, DTYPE).nbytes,
        [spec.nbytes for spec in decoder.kv_specs(1, 1, SIZE, DTYPE)],
    )
    print(f"{decoder.windowed} of {decoder.spec.layers} layers see {decoder.window} tokens")
    begin = time.perf_counter()
    truth, kept = run(decoder, ops, KVSizes(blocks), requests)
    print(f"all kept    {kept.whole * one / 2**20:6.1f} MiB  {time.perf_counter() - begin:5.1f} s")
    begin = time.perf_counter()
    given, apart = run(decoder, ops, KVSizes(blocks, decoder.window, blocks), requests)
    used = apart.whole * each[0] + apart.recent * each[1]
    print(f"given back  {used / 2**20:6.1f} MiB  {time.perf_counter() - begin:5.1f} s", end="  ")
    print(f"({apart.whole} whole blocks, {apart.recent} recent ones)")
    print("bit-equal" if given == truth else "DIFFERENT")
    return int(given != truth)


if __name__ == "__main__":
    sys.exit(main())
