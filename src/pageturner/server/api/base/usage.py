"""Token usage of an answer, in the form of OpenAI's APIs.

Owns what is counted and under which names. Must not know how anything else of an answer is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pageturner.text.answer_format import AnswerReader
from pageturner.text.output_stream import OutputStream


def usage(
    streams: Iterable[OutputStream], readers: Mapping[int, AnswerReader] = MappingProxyType({})
) -> dict[str, Any]:
    """Tokens of all choices together. Each prompt counts once, for the first of its choices.
    readers: of the choices whose text is more than content; where a model thinks, its thoughts are
    told apart."""
    streams = list(streams)
    first = [stream for stream in streams if stream.request.index == 0]
    prompt = sum(len(stream.request.prompt) for stream in first)
    output = sum(len(stream.tokens) for stream in streams)
    used = usage_of(prompt, output, sum(stream.cached for stream in first))
    if any(reader.thinks for reader in readers.values()):
        used["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens(streams, readers)}
    again = sum(stream.recomputed for stream in streams)
    return used | {"recomputed_tokens": again} if again else used


def reasoning_tokens(streams: Iterable[OutputStream], readers: Mapping[int, AnswerReader]) -> int:
    """Tokens of thoughts in these answers."""
    found = (readers.get(stream.choice) for stream in streams)
    return sum(reader.reasoning_tokens for reader in found if reader is not None)


def usage_of(prompt: int, output: int, cached: int) -> dict[str, Any]:
    """The fields that every answer has."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
