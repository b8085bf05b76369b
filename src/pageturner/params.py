"""What numbers a sampling parameter may have, for whoever takes one: requests, flags, model files.

Owns the table. Must not know where a value came from. Standard library only.
"""

from __future__ import annotations

import math

MOST_LOGPROBS = 20

# field of SamplingParams -> least, most, whether the least itself is too little
LIMITS: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, math.inf, False),
    "top_p": (0, 1, True),
    "top_k": (-1, 2**31 - 1, False),
    "min_p": (0, 1, False),
    "max_tokens": (1, math.inf, False),
    "min_tokens": (0, math.inf, False),
    "logprobs": (0, MOST_LOGPROBS, False),
    "prompt_logprobs": (0, MOST_LOGPROBS, False),
    "repetition_penalty": (0, math.inf, True),
    "presence_penalty": (-2, 2, False),
    "frequency_penalty": (-2, 2, False),
    "n": (1, math.inf, False),
    "best_of": (1, math.inf, False),
    "beam_width": (0, math.inf, False),
    "length_penalty": (-10, 10, False),
    "truncate_prompt_tokens": (-1, math.inf, False),
}


def out_of_range(name: str, value: float, shown: str = "") -> str | None:
    """None, or a sentence that says what the value of this field must be. `shown`: what to call the field."""
    least, most, open_ended = LIMITS[name]
    shown = shown or name
    if not math.isfinite(value):
        return f"{shown} must be finite"
    if least < value <= most or (value == least and not open_ended):
        return None
    above = f"above {least}" if open_ended else f"{least} or more"
    bounds = (
        above if most == math.inf else f"{above} and at most {most}" if open_ended else f"{least} to {most}"
    )
    return f"{shown} must be {bounds}, not {value}"
