"""Flags that say how tokens are chosen, for the commands that ask a model something.

Owns their names and defaults. Must not know who answers.
"""

from __future__ import annotations

import argparse
import math

from pageturner.core.types import SamplingParams
from pageturner.errors import EngineFault

TEMPERATURE = 0.7  # small models wander at 1.0; the API keeps OpenAI's default


def add_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """One flag for each parameter. `max_tokens` None: as many as the context has room for."""
    room = "the rest of the context" if max_tokens is None else str(max_tokens)
    parser.add_argument("-n", "--max-tokens", "--n-predict", type=int, default=max_tokens, metavar="N",
                        help=f"most tokens of an answer (default: {room})")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, help="0 is greedy (default: 0.7)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this mass")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="keep tokens so likely next to the likeliest"
    )
    parser.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X",
                        help="over 1: tokens in prompt or answer become less likely")  # fmt: skip
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X",
                        help="taken once from every token in the answer")  # fmt: skip
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X",
                        help="taken as often as the token is in the answer")  # fmt: skip
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer (default: drawn)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT",
                        help="text that ends the answer; may be given again")  # fmt: skip
    parser.add_argument("--ignore-eos", action="store_true", help="go on behind the end of sequence")


def from_flags(arguments: argparse.Namespace) -> SamplingParams:
    """The parameters. EngineFault('bad_setting') names a flag that is out of range."""
    ranges: tuple[tuple[str, float, float], ...] = (
        ("max_tokens", 1, math.inf),
        ("temperature", 0, math.inf),
        ("top_k", 0, 2**31 - 1),
        ("top_p", 1e-9, 1),
        ("min_p", 0, 1),
        ("repetition_penalty", 1e-9, math.inf),
        ("presence_penalty", -2, 2),
        ("frequency_penalty", -2, 2),
    )
    for name, least, most in ranges:
        value = getattr(arguments, name)
        if value is not None and not least <= value <= most:
            flag = "--" + name.replace("_", "-")
            bounds = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
            raise EngineFault("bad_setting", f"{flag} is {bounds}, not {value}")
    if not all(arguments.stop):
        raise EngineFault("bad_setting", "--stop may not be empty")
    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
        seed=arguments.seed,
    )
