"""Requests for the text in a gap: `suffix` of /v1/completions and of Ollama's /api/generate, and
/infill.

Owns what the three have in common: the refusal of a model without tokens for it, and where such an
answer ends. Must not know their fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pageturner.params import SamplingParams
from pageturner.server.api.base.answer_grammar import refuse_tools
from pageturner.server.api.base.body import RequestBody, bad_request
from pageturner.server.api.base.call import (
    Call,
    check_model,
    check_prompt,
    check_text,
    finished,
    sampling_params,
)
from pageturner.server.api.base.served_model import ServedModel
from pageturner.text import parameters
from pageturner.text.fim import FimTokens, fim_prompt, fim_tokens


def gap_tokens(served: ServedModel, name: str = "suffix") -> FimTokens:
    """The tokens by which the model fills gaps. ClientError where it has none."""
    tokens = fim_tokens(served.tokenizer)
    if tokens is None:
        message = f"{name}: this model has no tokens for filling a gap (FIM): send a prompt alone"
        raise bad_request("unsupported_parameter", message, name)
    return tokens


def check_gap(body: RequestBody) -> None:
    """ClientError for what cannot be had with a suffix."""
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(body, name):
            raise bad_request(
                "unsupported_parameter", f"{name} cannot be had with a suffix: leave it out", name
            )


def gap_prompt(prefix: str | Sequence[int], body: RequestBody, served: ServedModel) -> list[int]:
    """The prompt of the gap between this prefix and the suffix of the body."""
    tokens, extra = gap_tokens(served), [(one.filename, one.text) for one in body.extra or ()]
    for text in (body.suffix or "", *(text for _, text in extra)):
        check_text(text, "suffix", body, served)
    return fim_prompt(tokens, served.tokenizer, prefix, body.suffix or "", extra)


def with_ends(params: SamplingParams, body: RequestBody, served: ServedModel) -> SamplingParams:
    """The parameters of an answer that ends where the gap is filled."""
    if body.ignore_eos:
        return params
    ends = gap_tokens(served).ends
    return replace(params, stop_ids=tuple(dict.fromkeys((*params.stop_ids, *ends))))


def read_gap(body: RequestBody, served: ServedModel) -> Call:
    """A call for one gap, behind body.prompt and before its suffix; as long as there is room for,
    unless max_tokens says otherwise."""
    check_model(body, served)
    refuse_tools(body)
    check_gap(body)
    assert isinstance(body.prompt, str)
    nothing = body.max_tokens == 0  # has the prompt computed, so that it is known later
    asked = 1 if nothing else body.max_tokens
    parameters.check_number("max_tokens", asked)
    params = with_ends(sampling_params(body, served, None), body, served)
    text = check_text(body.prompt, "prompt", body, served)
    prompt = tuple(check_prompt(gap_prompt(text, body, served), "prompt", served))
    call = Call(body=body, prompts=(prompt,), params=(params,), only_echoes=nothing)
    return finished(call, asked, served)
