"""Sampling parameters: what a request may say about how its tokens are chosen, and within which
limits.

Owns the fields and the table of limits. Must not know where a value came from. Standard library
only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters by which the tokens of one request are chosen. Field names are vLLM's, except
    stop_ids: stop_token_ids there.

    temperature  0 is greedy: the largest logit, the smallest id among equals.
    top_k        keep the k most likely tokens; 0 or -1 keeps all.
    top_p        then keep the smallest set whose renormalised probability reaches top_p.
    min_p        keep tokens at least min_p times as likely as the most likely one (before top_k and
                 top_p).
    max_tokens   most tokens to generate; None: as many as the context has room for.
    min_tokens   the stop ids cannot be chosen before so many tokens were generated.
    stop         strings that end the text; decided by whoever owns the text, never by the engine.
    stop_ids     tokens that end the sequence, end-of-sequence included (resolved before the
                 engine).
    logprobs     None: no logprobs; k: of the chosen token and of the k most likely ones (raw
                 logits).
    seed         of the sampling noise; None is resolved to a drawn seed before the engine sees it.
    n            completions of one prompt; who owns the text makes one request of each
                 (Request.parent).
    best_of      None, or how many to make, of which the n likeliest are kept: by the mean logprob
                 of a token.

    repetition_penalty  over 1: logits of tokens in prompt or output become less likely, by x / p or
                        x * p.
    presence_penalty    taken once from the logit of every token in the output;
    frequency_penalty   and this as often as the token is in it.
    logit_bias          token -> what is added to its logit, -100 to 100.
    bad_words           words that are never written; the owner of the text makes tokens of them:
    bad_words_token_ids the last token of each is forbidden right behind the others of it.
    allowed_token_ids   None, or all that may be chosen.
    prompt_logprobs     None, or as logprobs for every prompt token but the first.
    truncate_prompt_tokens      keep the last k tokens of the prompt; -1: as many as there is room
                                for.
    include_stop_str_in_output  keep the stop string in the text.
    beam_width   0, or beam search over so many sequences: choice k is its k-th best answer, told at
                 the end;
    length_penalty      the sum of an answer's logprobs is divided by its length ** length_penalty;
    early_stopping      True: it ends with beam_width answers; False: when a better one is unlikely;
                        "never": when none can be better (all three as in Transformers).
    structured_outputs  None, or what the answer must match: a grammar made by
                        StructuredOutputsParams.
    speculation  whether an engine that drafts tokens may do so here; the answer is the same.
    max_thinking_tokens  None, or most tokens of thoughts: behind so many the tokens of thinking_end
                         follow,
    thinking_end         unless they came by themselves;
    thinking_begin       what the model begins its thoughts with; (): the prompt has begun them.
    force_ids    for measuring: the output begins with these tokens, whatever the model says. As
                 forced_end.
    inject_fault  for testing: "KIND@N", one of FAULTS when the N-th token of the output is
                  computed.
    pooling      "", or how the hidden rows of the prompt become one, in place of an answer: one of
                 POOLINGS.
    forced_end          for replaying a trace: the first of stop_ids is chosen as this token of the
                        output, no stop id before it. Only what chooses tokens may read it
                        (docs/adr/0006).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    best_of: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    include_stop_str_in_output: bool = False
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    structured_outputs: str | None = None
    forced_end: int | None = None
    force_ids: tuple[int, ...] = ()
    inject_fault: str | None = None
    speculation: bool = True
    max_thinking_tokens: int | None = None
    thinking_begin: tuple[int, ...] = ()
    thinking_end: tuple[int, ...] = ()
    pooling: str = ""


MAX_LOGPROBS = 20
POOLINGS = ("mean", "last", "cls")
FAULTS = ("segfault", "exception", "hang", "nan")
# of whole numbers: what goes between processes and into arrays must be able to hold them
LARGEST = 2**31 - 1

# field of SamplingParams -> least, most
LIMITS: dict[str, tuple[float, float]] = {
    "temperature": (0, 1000),
    "top_p": (0, 1),
    "top_k": (-1, LARGEST),
    "min_p": (0, 1),
    "max_tokens": (1, LARGEST),
    "min_tokens": (0, LARGEST),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "repetition_penalty": (0.001, 1000),  # beyond these a logit would leave the range of float32
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "n": (1, LARGEST),
    "best_of": (1, LARGEST),
    "beam_width": (0, LARGEST),
    "length_penalty": (-10, 10),
    "max_thinking_tokens": (0, LARGEST),
    "truncate_prompt_tokens": (-1, LARGEST),
}


def out_of_range(name: str, value: float, shown: str = "") -> str | None:
    """None, or a sentence that says what the value of this field must be. `shown`: what to call the
    field."""
    least, most = LIMITS[name]
    shown = shown or name
    if not -math.inf < value < math.inf:
        return f"{shown} must be finite"
    if least <= value <= most:
        return None
    given = value if abs(value) < 10**20 else "a number of that size"
    return f"{shown} must be {least} to {most}, not {given}"


def beyond_limits(params: SamplingParams) -> str | None:
    """None, or what `out_of_range` says of the first field that is."""
    given = ((name, getattr(params, name)) for name in LIMITS)
    return next(
        (wrong for name, v in given if v is not None and (wrong := out_of_range(name, v))), None
    )
