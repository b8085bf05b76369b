"""OpenVINO GenAI on a workload: its continuous batching pipeline, in process. Run in the `openvino` peer."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator

import offline
import openvino_genai as genai
from offline import Job

MAX_NUM_SEQS, CACHE_GIB = 64, 2


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefix-caching", action="store_true", help="enable_prefix_caching")


@contextlib.contextmanager
def start(args: argparse.Namespace) -> Iterator[offline.Run]:
    """The pipeline, and how it runs jobs."""
    config = genai.SchedulerConfig()
    config.max_num_seqs = MAX_NUM_SEQS
    config.cache_size = CACHE_GIB
    config.dynamic_split_fuse = True
    config.enable_prefix_caching = args.prefix_caching
    pipeline = genai.ContinuousBatchingPipeline(args.model, config, "CPU")
    tokenizer = pipeline.get_tokenizer()
    numbers = iter(range(1 << 30))

    def submit(job: Job) -> object:
        ids = tokenizer.encode(job.prompt).input_ids
        job.prompt_tokens = ids.shape[1]
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens = job.max_tokens
        wanted.ignore_eos = True
        wanted.do_sample = False
        return pipeline.add_request(next(numbers), ids, wanted)

    def run(jobs: list[Job]) -> None:
        waiting, open_ = list(jobs), []
        begin = time.perf_counter()
        while waiting or open_:
            open_ += [(job, submit(job)) for job in offline.due(waiting, begin)]
            if not open_:
                offline.sleep_until_next(waiting, begin)
                continue
            pipeline.step()
            now = time.perf_counter()
            for job, handle in open_:
                while handle.can_read():
                    for output in handle.read().values():
                        job.times += [now] * len(output.generated_ids)
                job.end = now
            open_ = [(job, handle) for job, handle in open_ if len(job.times) < job.max_tokens]

    yield run


if __name__ == "__main__":
    offline.main(start, add_flags)
