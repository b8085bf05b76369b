"""Prices of a row of logits beside the token that it belongs to, in tokens of the scheduler's
budget.

Owns the prices. Must not know the time, nor how any of it is computed: they are measured once
(bench/prices.py), and told by operations of the model, because the larger it is, the less they
weigh.
"""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.request import Request
from pageturner.telemetry.work import ModelCosts

OPERATIONS = (
    640.0  # of the layers, in a nanosecond of a step full of prompts (SmolLM2, 2 cores, AVX-512)
)
# nanoseconds beside the matrix products, measured on the same machine by bench/prices.py
TOLD = 1_500.0  # a likely token that is told with its logprob
BIASED, ALLOWED, FORBIDDEN, WORD = 26.0, 7.0, 13.0, 130.0  # an entry of logit_bias and its like
CANDIDATE = 500.0  # of the likeliest tokens of a beam
FREE = 1 / 8  # a row that costs less of a token than this costs nothing


@dataclass(frozen=True, slots=True)
class WorkPrices:
    """Prices in tokens of the budget: what a token costs in the layers is 1.

    scored      the logits of a prompt position whose logprob is wanted
    nanosecond  of work that is no matrix product
    """

    scored: float
    nanosecond: float

    def of_row(self, request: Request) -> float:
        """Return what each row of logits of this request costs beside its token."""
        p = request.params
        work = BIASED * len(p.logit_bias or ()) + ALLOWED * len(p.allowed_token_ids or ())
        work += FORBIDDEN * (len(p.stop_ids) if p.min_tokens else 0) + WORD * len(
            p.bad_words_token_ids
        )
        work += TOLD * (max(p.logprobs or 0, p.prompt_logprobs or 0))
        if p.beam_width:
            work += CANDIDATE * (1 + max(1, len(p.stop_ids))) * p.beam_width
        scored = request.logits_from is not None and not p.pooling
        price = work * self.nanosecond + (self.scored if scored else 0.0)
        return price if price >= FREE else 0.0


def context_price(costs: ModelCosts) -> float:
    """Return what a token costs more in the layers for each thousand positions that it looks back
    on."""
    return 1000 * costs.pair / (costs.int8 + costs.fp32)


def work_prices(costs: ModelCosts) -> WorkPrices:
    """The prices beside a model with these costs: the larger it is, the less they weigh."""
    layers = costs.int8 + costs.fp32
    return WorkPrices((costs.ending_int8 + costs.ending_fp32) / layers, OPERATIONS / layers)
