"""The price of a request, in tokens: one number for all that it makes others wait for.

Owns the rates. Must not know whose a request is, nor what anybody may spend (quota.py).

    price   = certain + answers
    certain = tokens of each prompt, once however many answers it has
            + (1 + prompt_logprobs) / LOGPROBS_PER_TOKEN  for each token of a prompt, for each
                                                          answer
            + entries that reshape logits / ENTRIES_PER_TOKEN  for each answer and each of its beams
            + bytes of its grammar / GRAMMAR_BYTES_PER_TOKEN   once
    answers = max_tokens * beams * (1 + (1 + logprobs) / LOGPROBS_PER_TOKEN)    for each answer

Reading costs a token for each READ_BYTES_PER_TOKEN bytes of a body on top, whatever comes of it. An
answer that has ended costs what it really has of tokens. What a session keeps costs a token for
each KEPT_SECONDS_PER_TOKEN seconds of a token: to keep it for a minute costs a tenth of computing
it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.text.output_stream import OutputStream
from pageturner.text.parameters import entries

LOGPROBS_PER_TOKEN = 8  # that are told
ENTRIES_PER_TOKEN = 64
GRAMMAR_BYTES_PER_TOKEN = 16
READ_BYTES_PER_TOKEN = 1024
KEPT_SECONDS_PER_TOKEN = 600


@dataclass(frozen=True, slots=True)
class Price:
    """A price in tokens. certain: of what is done in any case; answers: of the longest that may
    come."""

    certain: int = 0
    answers: int = 0

    @property
    def whole(self) -> int:
        return self.certain + self.answers


FREE = Price()


def price_of(requests: Iterable[Request]) -> Price:
    """Return the price of the choices of one HTTP request, before any of them has run."""
    requests = list(requests)
    certain = sum(map(_certain, requests))
    if requests:
        certain += len(requests[0].params.structured_outputs or "") / GRAMMAR_BYTES_PER_TOKEN
    answers = sum((one.params.max_tokens or 1) * _of_token(one.params) for one in requests)
    return Price(ceil(certain), ceil(answers))


def price_of_answers(streams: Iterable[OutputStream]) -> int:
    """Return what the answers of one HTTP request have cost so far."""
    return ceil(sum(len(stream.tokens) * _of_token(stream.request.params) for stream in streams))


def price_of_reading(size: int) -> int:
    """Return the price of a body of so many bytes."""
    return size // READ_BYTES_PER_TOKEN


def price_of_keeping(token_seconds: float) -> int:
    """Return the price of KV between the turns of a session: tokens times seconds."""
    return int(token_seconds / KEPT_SECONDS_PER_TOKEN)


def _certain(request: Request) -> float:
    params, tokens = request.params, len(request.prompt)
    price: float = tokens if request.parent is None else 0
    if params.prompt_logprobs is not None:
        price += tokens * (1 + params.prompt_logprobs) / LOGPROBS_PER_TOKEN
    return price + entries(params) * max(1, params.beam_width) / ENTRIES_PER_TOKEN


def _of_token(params: SamplingParams) -> float:
    """The price of one token of an answer."""
    row = 0.0 if params.logprobs is None else (1 + params.logprobs) / LOGPROBS_PER_TOKEN
    return max(1, params.beam_width) * (1 + row)
