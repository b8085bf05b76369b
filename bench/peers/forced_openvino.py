"""Logprobs that OpenVINO GenAI gives to tokens that are put to it. Run in the `openvino` peer.

    python forced_openvino.py MODEL.gguf < REQUESTS.json > LOGPROBS.json

A request is a list of token ids; the answer has, for each request, the logprob of every token but its first,
each from one prefill of the whole.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import openvino as ov
import openvino_genai as genai

CACHE_GIB = 1


def main(model: str) -> None:
    settings = genai.SchedulerConfig()
    settings.max_num_seqs = 1
    settings.cache_size = CACHE_GIB
    settings.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(model, settings, "CPU")
    wanted = genai.GenerationConfig()
    wanted.max_new_tokens = 1
    wanted.ignore_eos, wanted.do_sample = True, False
    wanted.logprobs, wanted.echo = 1, True
    answers = []
    for number, tokens in enumerate(json.load(sys.stdin)):
        handle = pipeline.add_request(number, ov.Tensor(np.array([tokens], np.int64)), wanted)
        while pipeline.has_non_finished_requests():
            pipeline.step()
        (output,) = handle.read().values()
        if output.generated_ids[: len(tokens)] != tokens:
            sys.exit("the tokens that came back are not those that were put")
        answers.append(output.generated_log_probs[1 : len(tokens)])
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
