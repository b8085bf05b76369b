"""What a JSON schema costs: output tokens per second of a full batch, with and without one, in pairs.

    python bench/structured.py [--model smollm2] [--batch 32] [--output 96] [--rounds 5]

The schema is one that no answer can finish, so that both runs make the same number of tokens. Both are
greedy, then both drawn with temperature 0.7, without drafts; the grammar is known before. Exits with 1 if a median
of the ratios is below 0.9.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from pageturner import LLM, SamplingParams, StructuredOutputsParams

PERSON = json.loads((Path(__file__).parent / "data" / "person_schema.json").read_bytes())
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}
TOPICS = ("sailors", "painters", "bakers")


def rate(llm: LLM, prompts: list[str], params: SamplingParams) -> float:
    """Output tokens per second of all prompts together."""
    begin = time.perf_counter()
    outputs = llm.generate(prompts, [replace(params, seed=i) for i in range(len(prompts))])
    seconds = time.perf_counter() - begin
    tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
    assert tokens == len(prompts) * (params.max_tokens or 0), "an answer ended early"
    return tokens / seconds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--output", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    llm = LLM(options.model, max_model_len=1024, max_num_seqs=options.batch, speculation="off")
    prompts = [f"A list of {i + 2} {TOPICS[i % 3]}, in JSON:\n" for i in range(options.batch)]
    worst = 1.0
    for temperature in (0.0, 0.7):
        plain = SamplingParams(temperature=temperature, max_tokens=options.output, ignore_eos=True)
        grammar = StructuredOutputsParams(json=SCHEMA)
        held = replace(plain, ignore_eos=False, structured_outputs=grammar)
        rate(llm, prompts, replace(held, max_tokens=8))
        found = [
            (rate(llm, prompts, plain), rate(llm, prompts, held)) for _ in range(options.rounds)
        ]
        ratio = statistics.median(with_schema / without for without, with_schema in found)
        without, with_schema = (statistics.median(side) for side in zip(*found, strict=True))
        print(
            f"temperature {temperature}: {without:.1f} tokens/s, with a schema {with_schema:.1f}: {ratio:.3f}"
        )
        worst = min(worst, ratio)
    return int(worst < 0.9)


if __name__ == "__main__":
    sys.exit(main())
