"""Greedy tokens of a tiny model by the installed package: `python tiny_tokens.py MODEL PROMPTS.json`.

Run by whatever Python has the wheel, an emulated one too; imports nothing of this checkout.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pageturner import LLM, SamplingParams
from pageturner.kernels.cpu import native_module

STEPS = 32

prompts = json.loads(Path(sys.argv[2]).read_text())
llm = LLM(sys.argv[1], backend="native", threads=1)
greedy = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, logprobs=0)
answers = [answer.outputs[0] for answer in llm.generate(prompts, greedy, progress=False)]
tokens = [list(answer.token_ids) for answer in answers]
logprobs = [[float(one[0]) for one in answer.logprobs] for answer in answers]
print(
    json.dumps(
        {
            "isas": native_module.available_isas(),
            "kernels": native_module.choose_isa(None),
            "tokens": tokens,
            "logprobs": logprobs,
        }
    )
)
