"""Step sizes: the token budget that nobody set, and where adaptive_chunk begins.

Owns the seconds that a full step should take. Must not know schedulers, nor how limits are
measured. No answer depends on a budget, so neither does a receipt.

A step full of prompts takes as long as its products at the machine's limits, divided by the share
of them that such steps reach. While one is computed everybody who reads along waits, so its length
is the longest gap between two of their tokens. Shorter steps cost little: weights are read again,
which ten to thirty tokens already hide.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pageturner.config.settings import EngineConfig
from pageturner.policies.scheduler_config import MAX_TOKENS
from pageturner.telemetry.work import MachineLimits, ModelCosts

STEP = 0.08  # seconds of a full step
REACHED = 0.5  # of the limits, by products of steps full of prompts: SmolLM2, 512 tokens in 0.31 s
STEERED = 0.9  # of its target is where adaptive_chunk begins: what is over it is cut at once
MIXED = 4 * MAX_TOKENS  # at most, of a mixture, whose experts each see a few of the rows
PROMPTS = 64  # tokens of prompts beside as many decoding sequences as may run
BESIDE = 32  # tokens of prompts beside anybody who decodes, at least: reading weights once more is hidden
LEAST = 16  # beside them where a shorter wait than that of BESIDE is asked for
MULTIPLE = 32  # of tokens: a rounder number is easier to say
CONTEXT = 512  # positions of a usual sequence that decodes


def with_step_sizes(
    config: EngineConfig, needs: ModelCosts | None, limits: MachineLimits | None
) -> EngineConfig:
    """The settings, with what the machine says where they leave it to the machine. needs: of the
    model.

    The budget lets all sequences decode beside PROMPTS tokens of prompts; with a slow model a full
    step is longer than STEP then, so prompts take no more beside those who decode than fits it, or
    BESIDE. Where nothing is known of the machine the budget is MAX_TOKENS, and adaptive_chunk
    begins at its limits.
    """
    each = seconds_of_token(needs, limits) if needs and limits else 0.0
    if needs is None or limits is None or not each:
        return replace(config, max_num_batched_tokens=config.token_budget)
    budget, target = config.max_num_batched_tokens, STEERED * config.tpot_ms / 1000
    beside = config.max_prefill_beside_decode
    if config.decode_wait_ms and beside < 0:
        beside = max(int(config.decode_wait_ms / 1000 / each), LEAST)
    if budget < 0 and config.policy == "adaptive_chunk":  # it steers: the budget is its limit
        budget = MAX_TOKENS
    elif budget < 0:
        fits = int(STEP / each) // MULTIPLE * MULTIPLE
        most = MIXED if needs.experts else MAX_TOKENS
        budget = min(max(fits, min(config.max_num_seqs + PROMPTS, MAX_TOKENS)), most)
        beside = max(fits, BESIDE) if beside < 0 else beside
    return replace(
        config,
        max_num_batched_tokens=budget,
        max_prefill_beside_decode=beside,
        knee_tokens=config.knee_tokens or max(1, int(target / each)),
        knee_seqs=config.knee_seqs or sequences_in(target, needs, limits),
    )


def seconds_of_token(needs: ModelCosts, limits: MachineLimits) -> float:
    """Return the seconds that one more token of a prompt adds to a full step; 0 where a limit that
    it needs is not known."""
    return _computing(needs.int8, needs.fp32, limits) / REACHED


def sequences_in(seconds: float, needs: ModelCosts, limits: MachineLimits) -> int:
    """Return how many sequences of CONTEXT positions decode in a step of so many seconds; at least
    1."""
    pairs = CONTEXT * (needs.pair + needs.recent_pair)
    computing = _computing(
        needs.int8 + needs.ending_int8, needs.fp32 + needs.ending_fp32 + pairs, limits
    )
    reading = 1e-9 * CONTEXT * (needs.position + needs.recent_position) / limits.read_gb_s
    weights = 1e-9 * needs.weight_bytes(1, 1) / limits.read_gb_s
    return max(1, int((REACHED * seconds - weights) / max(computing, reading, 1e-12)))


def _computing(int8: float, fp32: float, limits: MachineLimits) -> float:
    seconds = 0.0
    for operations, limit in ((int8, limits.int8_gop_s), (fp32, limits.fp32_gop_s)):
        if operations and not limit:
            return 0.0
        seconds += 1e-9 * operations / (limit or math.inf)
    return seconds
