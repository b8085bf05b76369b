"""The same promise on the real model, fp32 and as shipped: a covering set of settings, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_invariance import KV_TOKENS, PRODUCT, pairwise

from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.kernels.cpu import native, native_module
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.engines import Model, Setup, answers
from support.smollm2 import model_path

usable, why = native_module.supported()
pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not usable, reason=f"native kernels: {why}"),
]
COVERING = pairwise([row for row in PRODUCT if row[1] == "fcfs"])
DATA = Path(os.environ.get("PAGETURNER_DATA") or Path(__file__).parents[3] / "shared" / "data")


def requests(path: Path, count: int) -> list[Request]:
    """Prompts of the shipped collection (or words of our own where it is absent), greedy and sampled."""
    file = DATA / "text" / "prompts.jsonl"
    if file.exists():
        texts = [json.loads(line)["turns"][0] for line in file.read_text().splitlines()[::3]]
    else:
        texts = [f"Tell me {n} things about the number {n * n}." for n in range(100)]
    tokenizer = load_tokenizer(path)
    result = []
    for number, text in enumerate(texts[:count], 1):
        ids = tokenizer.encode(text[:160], add_special=True, parse_special=False)[:40]
        params = SamplingParams(
            temperature=0.0 if number % 2 else 0.9,
            top_p=0.95,
            max_tokens=45
            if number % 4 == 1
            else 5 + number % 5,  # some outlive what was free at admission
            stop_ids=() if number % 4 == 1 else tokenizer.eos_ids,
            logprobs=2 if number % 3 else None,
            seed=number,
        )
        result.append(Request(number, tuple(ids), params))
    return result


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float32"), ("auto", "float16"), ("auto", "int8")]
)
def test_alone_and_among_64_others(dtype: str, kv_dtype: str) -> None:
    path = model_path()
    models = {
        n: Model(path, native.NativeOps(threads=n), dtype=dtype, kv_dtype=kv_dtype) for n in (1, 2)
    }
    crowd = requests(path, 65)
    assert len(crowd) == 65
    truth = {}
    for request in crowd:
        truth |= answers(models[2].engine(Setup(kv_tokens=512)), [request])
    preemptions = 0.0
    one_of = 2 if (dtype, kv_dtype) == ("auto", "float16") else 3  # all of them take half an hour
    settings = COVERING[1::one_of]
    for policy, order, budget, block, cache, memory, threads in settings:
        tokens = min(KV_TOKENS[memory][block], 4096)
        engine = models[threads].engine(Setup(policy, budget, block, cache, tokens, order=order))
        assert answers(engine, crowd) == truth, (policy, budget, block, cache, memory, threads)
        preemptions += engine.scheduler.stats()["preemptions"]
    assert preemptions > 0, "scarce memory was meant to preempt somebody"
