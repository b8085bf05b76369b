"""What scheduling costs, for whichever commit is installed for the Python that runs this: JSON on stdout.

    python bench/scheduler.py

Both sides of a comparison run it, so it knows few names of the product, all of them below, and none of the
other scripts. Microseconds of `plan` and `commit` together, and of a whole step of the engine without a
model: the median over all steps in which every sequence decodes, with 64 and 256 running, and with 256 and
one more that waits and finds no room, since each sequence was promised the KV of its whole answer, which is
all there is. Processor time counts, as one thread does all of it; and the best of three runs, as a
disturbance only ever adds.

The stall by statistics: 256 sequences of 2,000 tokens decode, and after every tenth step the statistics are
read as the engine process reads them four times a second; the 99th percentile of the time from the end of a
step to the end of the next one, the model not counted.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from typing import Any

from pageturner import LLM, SamplingParams

try:
    from pageturner.request import Request
except ImportError:  # the commits before the house
    from pageturner.core.types import Request  # type: ignore[import-not-found, no-redef]

BLOCK = 16  # tokens
RUNS = 3
SHORT, LONG = (100, 300), (2000, 320)  # tokens of prompts and answers
LOADS = {"64": (64, 0), "256": (256, 0), "256 and a waiter": (256, 1)}
STATS_EVERY = 10  # steps
STATISTICS = "with statistics, 256 x 2,000 tokens"


def engine(running: int, waiting: int, prompt: int, answer: int) -> Any:
    """An engine without a model that has taken the requests, as `LLM.built` has it."""
    built = LLM(
        "smollm2",
        backend="null",
        max_num_seqs=running + waiting,
        max_num_batched_tokens=4096,
        block_size=BLOCK,
        max_model_len=prompt + answer,
        kv_cache_memory=running * -(-(prompt + answer) // BLOCK) * BLOCK,
        admission="full",
    ).built
    for id in range(1, running + waiting + 1):
        tokens = tuple((id + 7 * i) % 1000 for i in range(prompt))
        params = SamplingParams(max_tokens=answer, stop_ids=(2,))
        refused = built.engine.submit(Request(id, tokens, params))
        assert not refused, refused
    return built


def plan_and_commit(running: int, waiting: int) -> float:
    """Microseconds of both, the executor not counted."""
    built = engine(running, waiting, *SHORT)
    scheduler, taken = built.engine.scheduler, []
    while scheduler.has_work:
        begin = time.thread_time()
        plan = scheduler.plan(begin)
        planned = time.thread_time()
        result = built.executor.run(plan)
        ran = time.thread_time()
        scheduler.commit(plan, result, ran)
        end = time.thread_time()
        if len(plan.items) == running == plan.tokens:
            taken.append(1e6 * (planned - begin + end - ran))
    return statistics.median(taken)


def step_times(built: Any, running: int, stats_every: int = 0) -> list[float]:
    """Microseconds of each step in which every sequence decodes, with everything that the engine does in it."""
    engine, taken = built.engine, []
    begin = time.thread_time()
    while engine.has_work:
        events = engine.step()
        if stats_every and len(taken) % stats_every == stats_every - 1:
            engine.stats()
        end = time.thread_time()
        if len(events) == running:
            taken.append(1e6 * (end - begin))
        begin = end
    return taken


def whole_step(running: int, waiting: int) -> float:
    return statistics.median(step_times(engine(running, waiting, *SHORT), running))


def gaps() -> dict[str, float]:
    """Microseconds from step to step while the statistics are read, the model not counted."""
    taken = sorted(step_times(engine(256, 0, *LONG), 256, STATS_EVERY))
    names = {"gap p50": 0.5, "gap p99": 0.99}
    return {f"{name} {STATISTICS}": taken[int(q * len(taken))] for name, q in names.items()}


def main() -> None:
    gc.disable()
    figures = {
        f"{what}, {load}": min(measure(*sizes) for _ in range(RUNS))
        for what, measure in (("plan + commit", plan_and_commit), ("engine step", whole_step))
        for load, sizes in LOADS.items()
    }
    figures |= gaps()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
