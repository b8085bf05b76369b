"""`make accept NAME=weights`: everybody's weights.

    python bench/accept/weights.py [--only lora quality ...] [options of parts]

lora         adapters: many in one batch, their price, bits, a bound with an LRU, PEFT's logits, bad folders
quality      error of logprobs against fp32 on chat prompts, as served; what it costs
floor        shares of the machine's limits, by step
peers        beside llama.cpp, ik_llama.cpp, OpenVINO GenAI and vLLM, in pairs

A part is `weights_NAME.py` beside this file, with `lines` and `add_arguments`.
"""

from __future__ import annotations

import sys

from harness import main_of_parts

PARTS = ("lora", "quality", "floor", "peers")

if __name__ == "__main__":
    sys.exit(main_of_parts("weights", __doc__, PARTS))
