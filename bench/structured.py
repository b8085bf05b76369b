"""What a JSON schema costs: output tokens per second of a full batch, with and without one, in pairs.

    python bench/structured.py [--model smollm2] [--batch 32] [--output 96] [--rounds 5]

The schema is one that no answer can finish, so that both runs make the same number of tokens. Both are
greedy, then both drawn with temperature 0.7; the first request of each run is let in before the clock starts,
so the grammar is known. Exits with 1 if a median of the ratios is below 0.9.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from pageturner import SamplingParams, StructuredOutputsParams
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine import Engine
from pageturner.engine.engine_factory import make_engine
from pageturner.formats import hub
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.formats.tokenizer import Tokenizer
from pageturner.request import Request

PERSON = json.loads((Path(__file__).parent / "data" / "person_schema.json").read_bytes())
SCHEMA = {"type": "array", "items": PERSON, "minItems": 1000}
TOPICS = (
    "sailors",
    "painters",
    "bakers",
    "physicists",
    "gardeners",
    "drummers",
    "clerks",
    "dancers",
)
LIMIT = 0.9


def rate(engine: Engine, prompts: list[tuple[int, ...]], params: SamplingParams) -> float:
    """Output tokens per second of all prompts together, from the first step to the last token."""
    (first, *rest) = (
        Request(i, prompt, replace(params, seed=i)) for i, prompt in enumerate(prompts)
    )
    events = engine.submit(first)
    while not engine.scheduler.has_work:
        events += engine.step()
    for request in rest:
        events += engine.submit(request)
    begin = time.perf_counter()
    while engine.has_work:
        events += engine.step()
    seconds = time.perf_counter() - begin
    assert all(event.failure is None for event in events), events
    tokens = sum(len(event.tokens) for event in events)
    assert tokens == len(prompts) * (params.max_tokens or 0), "an answer ended early"
    return tokens / seconds


def pairs(
    engine: Engine, tokenizer: Tokenizer, temperature: float, batch: int, output: int, rounds: int
) -> list[tuple[float, float]]:
    """Tokens per second without the schema and with it, one behind the other, so many times."""
    texts = [f"A list of {i + 2} {TOPICS[i % len(TOPICS)]}, in JSON:\n" for i in range(batch)]
    prompts = [
        tuple(tokenizer.encode(text, add_special=True, parse_special=False)) for text in texts
    ]
    plain = SamplingParams(temperature=temperature, max_tokens=output, ignore_eos=True)
    grammar = StructuredOutputsParams(json=SCHEMA)
    held = replace(plain, ignore_eos=False, stop_ids=tokenizer.eos_ids, structured_outputs=grammar)
    rate(engine, prompts, replace(held, max_tokens=8))
    return [(rate(engine, prompts, plain), rate(engine, prompts, held)) for _ in range(rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--output", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    path = hub.resolve(options.model).path
    tokenizer = load_tokenizer(path)
    config = EngineConfig(model=str(path), max_model_len=1024, max_num_seqs=options.batch)
    engine = make_engine(config, tokenizer=lambda: tokenizer).engine
    worst = 1.0
    for temperature in (0.0, 0.7):
        found = pairs(engine, tokenizer, temperature, options.batch, options.output, options.rounds)
        ratio = statistics.median(with_schema / without for without, with_schema in found)
        without, with_schema = (statistics.median(side) for side in zip(*found, strict=True))
        print(
            f"temperature {temperature}: {without:.1f} tokens/s, with a schema {with_schema:.1f}: {ratio:.3f}"
        )
        worst = min(worst, ratio)
    return int(worst < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
