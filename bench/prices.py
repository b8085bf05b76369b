"""What a row of logits costs beside its token: the figures of telemetry/work_price.py, measured.

    python bench/prices.py [--model smollm2] [--rounds 3]

Steps with and without each kind of work take turns; told are the median of what a row of it takes longer, in
microseconds and in tokens of a step full of prompts, and what the price list says.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from typing import Any

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, engine_again
from pageturner.llm import LLM
from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.telemetry.work_price import work_prices

PROMPT, SHORT, STEPS, WIDE = 1024, 64, 16, 32
IDS = itertools.count(1)
DICE = random.Random(1)


def kinds(vocabulary: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """Name -> sequences that decode at once, and what each asks for."""
    every = range(vocabulary - 100)
    return {
        "logprobs 20": (8, {"logprobs": 20}),
        "bias on 300 tokens": (8, {"logit_bias": dict.fromkeys(range(300), 0.5)}),
        "bias on the vocabulary": (8, {"logit_bias": dict.fromkeys(every, 0.5)}),
        "the vocabulary allowed": (8, {"allowed_token_ids": tuple(every)}),
        "9,000 stop ids and min_tokens": (
            8,
            {"stop_ids": tuple(every)[-9000:], "min_tokens": 1000},
        ),
        "1,024 bad words": (8, {"bad_words_token_ids": tuple((i, i + 1) for i in range(1024))}),
        "repetition penalty": (8, {"repetition_penalty": 1.1}),
        "32 beams": (1, {"beam_width": WIDE}),
        "32 beams, 64 stop ids": (1, {"beam_width": WIDE, "stop_ids": tuple(every)[-64:]}),
    }


def request(tokens: int, params: SamplingParams) -> Request:
    prompt = tuple(DICE.randrange(100, 10_000) for _ in range(tokens))
    start = None if params.prompt_logprobs is None else 0
    return Request(next(IDS), prompt, params, time.monotonic(), logits_from=start)


def steps(built: LoadedEngine, requests: list[Request]) -> list[float]:
    """Seconds of each step until all have ended."""
    engine = engine_again(built, EngineConfig(enable_prefix_caching=False))
    for one in requests:
        engine.submit(one)
    taken = []
    while engine.has_work:
        begin = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - begin)
    return taken


def decode(built: LoadedEngine, rows: int, fields: dict[str, Any]) -> float:
    """Median seconds of a step of so many rows."""
    base = {
        "temperature": 0.0 if "beam_width" in fields else 0.8,
        "max_tokens": STEPS + 8,
        "seed": 1,
    }
    made = [request(SHORT, SamplingParams(**base | fields)) for _ in range(rows)]
    return statistics.median(steps(built, made)[6:-2])


def prefill(built: LoadedEngine, count: int | None) -> float:
    return sum(steps(built, [request(PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=count))]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    llm = LLM(options.model, enable_prefix_caching=False, speculation="off")
    built = llm.built
    assert built.needs is not None
    prices = work_prices(built.needs)
    extra: dict[str, list[float]] = {}
    token = []
    for _ in range(options.rounds):
        token.append(prefill(built, None) / PROMPT)
        for count in (0, 20):
            longer = prefill(built, count) / PROMPT - token[-1]
            extra.setdefault(f"prompt logprobs, {count} told", []).append(longer)
        for name, (rows, fields) in kinds(built.vocab_size).items():
            wide = WIDE if "beam_width" in fields else rows
            longer = decode(built, rows, fields) - decode(built, wide, {})
            extra.setdefault(name, []).append(longer / wide)
    each = statistics.median(token)
    print(f"a token of a prompt: {each * 1e6:.0f} us")
    print(f"{'a row with':32}{'us':>8}{'tokens':>9}{'price':>8}")
    for name, values in extra.items():
        longer = statistics.median(values)
        if name.startswith("prompt"):
            asked = request(8, SamplingParams(prompt_logprobs=int(name.split()[2])))
        else:
            asked = request(8, SamplingParams(**kinds(built.vocab_size)[name][1]))
        print(f"{name:32}{longer * 1e6:8.0f}{longer / each:9.2f}{prices.of_row(asked):8.2f}")


if __name__ == "__main__":
    main()
