"""What scheduling costs, of whichever commit is installed for the Python that runs this: JSON on stdout.

    python bench/accept/house_plan.py

Run by either side of a comparison, so it knows few names of the product, all of them below, and none of the
other scripts. Microseconds of `plan` and `commit` together, and of a whole step of the engine without a
model: the median over all steps in which everybody decodes, with 64 and 256 running, and with 256 and one
more that waits and finds no room: each was promised the KV of its whole answer, which is all there is.
By processor time, as one thread does all of it; and the best of three runs, as a disturbance only ever adds.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from typing import Any

from pageturner import LLM, SamplingParams

try:
    from pageturner.request import Request
except ImportError:  # the commit before the house
    from pageturner.scheduler.types import Request  # type: ignore[attr-defined, no-redef]

PROMPT, ANSWER, BLOCK = 100, 300, 16  # tokens
EACH = -(-(PROMPT + ANSWER) // BLOCK)  # blocks of one whole sequence
RUNS = 3
LOADS = {"64": (64, 0), "256": (256, 0), "256 and a waiter": (256, 1)}


def engine(running: int, waiting: int) -> Any:
    """An engine without a model that has taken the requests, as `LLM.built` has it."""
    built = LLM(
        "smollm2",
        backend="null",
        max_num_seqs=running + waiting,
        max_num_batched_tokens=4096,
        block_size=BLOCK,
        max_model_len=PROMPT + ANSWER,
        kv_cache_memory=running * EACH * BLOCK,
        admission="full",
    ).built
    for id in range(1, running + waiting + 1):
        prompt = tuple((id + 7 * i) % 1000 for i in range(PROMPT))
        refused = built.engine.submit(
            Request(id, prompt, SamplingParams(max_tokens=ANSWER, stop_ids=(2,)))
        )
        assert not refused, refused
    return built


def plan_and_commit(running: int, waiting: int) -> float:
    """Microseconds of both, the executor not counted."""
    built = engine(running, waiting)
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


def whole_step(running: int, waiting: int) -> float:
    """Microseconds of a step of the engine, with everything that it does beside."""
    engine_, taken = engine(running, waiting).engine, []
    while engine_.has_work:
        begin = time.thread_time()
        events = engine_.step()
        taken.append((1e6 * (time.thread_time() - begin), len(events)))
    full = [us for us, events in taken if events == running]
    return statistics.median(full)


def main() -> int:
    gc.disable()
    figures = {
        f"{what}, {load}": min(measure(*sizes) for _ in range(RUNS))
        for what, measure in (("plan + commit", plan_and_commit), ("engine step", whole_step))
        for load, sizes in LOADS.items()
    }
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
