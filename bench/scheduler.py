"""What scheduling itself costs: plan + commit in microseconds, by the number of decoding sequences.

    python bench/scheduler.py [--policy chunked] [--json FILE]

No model, no arrays: the executor answers at once and is not timed. Targets: 300 us at 64, 1,300 us at 256.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

from pageturner.params import SamplingParams
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.policies.scheduler_factory import make_scheduler
from pageturner.request import Request
from pageturner.scheduler.types import Output, Result

PROMPT, ANSWER = 100, 300


def measure(policy: str, running: int) -> dict[str, float]:
    """Median plan and commit, and their sum's 99th percentile, over all steps in which everybody decodes."""
    config = SchedulerConfig(
        policy=policy, max_num_seqs=running, max_num_batched_tokens=4096, static_batch=running
    )
    scheduler = make_scheduler(config, num_blocks=running * 64).scheduler
    for id in range(running):
        prompt = tuple((id + 7 * i) % 1000 for i in range(PROMPT))
        scheduler.add(Request(id, prompt, SamplingParams(max_tokens=ANSWER, stop_ids=(2,))))
    plans, commits = [], []
    while scheduler.has_work:
        begin = time.perf_counter()
        plan = scheduler.plan(begin)
        planned = time.perf_counter()
        result = Result([Output([7] if item.wants_logits else []) for item in plan.items])
        ran = time.perf_counter()
        scheduler.commit(plan, result, ran)
        end = time.perf_counter()
        if len(plan.items) == running == plan.tokens:
            plans.append(1e6 * (planned - begin))
            commits.append(1e6 * (end - ran))
    both = sorted(p + c for p, c in zip(plans, commits, strict=True))
    return {
        "running": running,
        "plan_us": round(statistics.median(plans), 1),
        "commit_us": round(statistics.median(commits), 1),
        "both_us": round(statistics.median(both), 1),
        "both_p99_us": round(both[int(0.99 * len(both))], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="chunked")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    rows = [measure(args.policy, running) for running in (1, 16, 64, 256)]
    print("running   plan us   commit us   both us   p99 us")
    for row in rows:
        print(
            "{running:7d} {plan_us:9.1f} {commit_us:11.1f} {both_us:9.1f} {both_p99_us:8.1f}".format(
                **row
            )
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(
                {"policy": args.policy, "machine": platform.processor(), "rows": rows},
                file,
                indent=1,
            )


if __name__ == "__main__":
    main()
