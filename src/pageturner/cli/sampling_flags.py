"""Flags that say how tokens are chosen, for the commands that ask a model something.

Owns their names and defaults. Must not know who answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pageturner.config import flag_table
from pageturner.errors import bad_setting
from pageturner.params import SamplingParams, out_of_range

TEMPERATURE = 0.7  # small models wander at 1.0; the API keeps OpenAI's default
LIMITED = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Fields of SamplingParams that flags set. `max_tokens`: what is taken if neither a flag nor
    the model says it; None: as many as there is room for."""

    given: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The flags, over the model's own defaults, over those of the commands."""
        own = {"temperature": TEMPERATURE, "max_tokens": self.max_tokens}
        return SamplingParams(**{**own, **defaults, **self.given})

    def fields(self) -> dict[str, Any]:
        """Return the options as fields of a request: the server has defaults of its own for the
        rest."""
        cap = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {**cap, **self.given}


def add_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """One flag for each parameter. `max_tokens` None: as many as the context has room for."""
    room = "the rest of the context" if max_tokens is None else str(max_tokens)
    parser.set_defaults(fallback_max_tokens=max_tokens)
    most = f"most tokens of an answer (default: {room})"
    parser.add_argument("-n", "--max-tokens", "--n-predict", type=int, metavar="N", help=most)
    greedy = f"0: greedy, the same answer every time (default: the model's, else {TEMPERATURE})"
    parser.add_argument("--temperature", type=float, help=greedy)
    flag_table.add_flags(parser, "sampling")


def from_flags(arguments: argparse.Namespace) -> SamplingOptions:
    """Return the sampling options that the flags ask for. EngineFault('bad_setting') names a flag
    that is out of range."""
    values = {name: getattr(arguments, name) for name in (*LIMITED, "seed")}
    given = {name: value for name, value in values.items() if value is not None}
    for name in LIMITED:
        flag = "--" + name.replace("_", "-")
        if name in given and (wrong := out_of_range(name, given[name], flag)) is not None:
            raise bad_setting(wrong)
    if not all(arguments.stop):
        raise bad_setting("--stop may not be empty")
    if arguments.stop:
        given["stop"] = tuple(arguments.stop)
    if arguments.ignore_eos:
        given["ignore_eos"] = True
    return SamplingOptions(given, arguments.fallback_max_tokens)
