"""Whoever was taken out of the engine for others, however often, has the same answer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pageturner.request import BACKGROUND
from support.servers import serving

TINY = Path(__file__).parents[1] / "goldens" / "tiny_llama.gguf"
TEXT = "/v1/completions"
COMMON = {"max_tokens": 150, "ignore_eos": True, "seed": 5, "priority": BACKGROUND}
ASKED: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "temperature": 1.0},
    {"prompt": "The sea", "n": 2, "logprobs": 2, "temperature": 0.8},
    {
        "prompt": "A long way",
        "use_beam_search": True,
        "n": 2,
        "max_tokens": 40,
        "ignore_eos": False,
    },
    {"prompt": ["One", "Two"], "frequency_penalty": 0.5, "temperature": 1.0},
    {"prompt": "A list:", "structured_outputs": {"regex": "[a-z ]{60,80}"}, "ignore_eos": False},
]


def choices(client: httpx.Client, body: dict[str, Any]) -> tuple[Any, int]:
    """The choices, and the tokens that were computed once more."""
    answer = client.post(TEXT, json=COMMON | body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return answer.json()["choices"], usage.get("recomputed_tokens", 0)


@pytest.mark.slow
def test_the_answer_is_that_of_somebody_undisturbed() -> None:
    with serving(TINY, "--max-num-seqs", "4", "--no-enable-prefix-caching") as client:
        alone = [choices(client, body)[0] for body in ASKED]
        with ThreadPoolExecutor(len(ASKED)) as pool:
            beside = [pool.submit(choices, client, body) for body in ASKED]
            for _ in range(60):
                others = {
                    "prompt": ["a", "b", "c", "d"],
                    "max_tokens": 2,
                }  # all the places there are
                assert client.post(TEXT, json=others).status_code == 200
                time.sleep(0.01)
            found = [one.result() for one in beside]
    assert [answer for answer, _ in found] == alone
    assert sum(again for _, again in found) > 0, "nobody was ever taken out"
