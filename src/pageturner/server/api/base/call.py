"""The call that a request makes, whatever the shape of its API: prompts and sampling parameters.

Owns the way from the fields of a body to the parameters of an engine, with their defaults and
limits; whatever is wrong with them is a ClientError that names the field. Must not know how prompts
are written in one API or another (completions.py, chat.py), nor how an answer is computed or
written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pageturner.errors import ClientError
from pageturner.params import FAULTS, LARGEST, SamplingParams
from pageturner.server.admission import limits
from pageturner.server.admission.limits import maximum
from pageturner.server.api.base import answer_grammar
from pageturner.server.api.base.body import RequestBody, StreamOptions, bad_request, without_bulk
from pageturner.server.api.base.served_model import ServedModel
from pageturner.text import parameters
from pageturner.text.answer_format import AnswerFormat

LONG_TOKEN = 16  # characters: twice as many as tokens of hardly any text have on average
MAX_TOLD = 32  # names in an error
_ID = re.compile("0|[1-9][0-9]{0,9}")
# fields of a request that are those of SamplingParams as they stand; one that is not given has its
# default
NUMBERS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

# field -> values that are taken where there is no beam search, and where there is
NEUTRAL_WITHOUT_BEAMS: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1.0,),
    "early_stopping": (False,),
}
NEUTRAL_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One request, understood: a sequence for each choice, those of one prompt side by side.

    prompts, params   of each choice
    made, kept   choices of each prompt, and how many of them the client gets: the likeliest ones
    logprobs     how many the client wants to see
    echoes       the text of each prompt, which stands in front of its answer; () where it does not
    only_echoes  max_tokens is 0: the one token that the engine makes is not shown
    answer       what stands in the text of an answer beside content; None: nothing
    """

    body: RequestBody
    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    made: int = 1
    kept: int = 1
    logprobs: int | None = None
    echoes: tuple[str, ...] = ()
    only_echoes: bool = False
    answer: AnswerFormat | None = None

    @property
    def options(self) -> StreamOptions:
        return self.body.stream_options or StreamOptions()

    def positions(self, block_size: int) -> int:
        """Return the most KV that a choice can ever need, in tokens. The last token of an answer
        needs none."""
        needs = zip(self.prompts, self.params, strict=True)
        most = max(
            max(1, params.beam_width)
            * -(-(len(prompt) + (params.max_tokens or 1) - 1) // block_size)
            for prompt, params in needs
        )
        return most * block_size


Reader = Callable[[RequestBody, ServedModel], Call]  # makes the call of a dialect


def check_model(body: RequestBody, served: ServedModel) -> None:
    names = (served.model, *served.names)
    if body.model and body.model not in names:  # some clients send "" where none was chosen
        here = ", ".join(map(repr, names[:MAX_TOLD])) + (
            " and others" if len(names) > MAX_TOLD else ""
        )
        message = f"the model {body.model[:128]!r} does not exist here: this server has {here}"
        raise ClientError(404, "model_not_found", message, "model")


def finished(
    call: Call, asked: int | None, served: ServedModel, default: int | None = None
) -> Call:
    """The call with max_tokens of each prompt resolved, and with the n, or best_of, choices of each
    prompt that its body asks for. call: has the parameters of all prompts; asked, default: see
    `with_max_tokens`."""
    [wanted] = call.params
    fitted = {
        length: with_max_tokens(wanted, length, asked, served, default)
        for length in set(map(len, call.prompts))
    }
    made, kept = parameters.answer_counts(
        call.body.n, call.body.best_of, wanted.beam_width, served.slots
    )
    limits.check_choices(len(call.prompts), made, served.limits)
    if made > kept and call.body.stream:
        raise bad_request(
            "invalid_value",
            "best_of above n is known at the end only: leave stream away",
            "best_of",
        )
    params = [fitted[len(prompt)] for prompt in call.prompts]
    if made > kept:  # what they are ranked by
        params = [replace(one, logprobs=one.logprobs or 0) for one in params]
    longest, lengths = max(params, key=_max_tokens), [len(prompt) for prompt in call.prompts]
    limits.check_price(longest, lengths, max(made, wanted.beam_width), served.limits)
    return replace(
        call,
        body=without_bulk(call.body),
        prompts=tuple(prompt for prompt in call.prompts for _ in range(made)),
        params=tuple(one for one in params for _ in range(made)),
        echoes=tuple(echo for echo in call.echoes for _ in range(made)),
        made=made,
        kept=kept,
        logprobs=wanted.logprobs,
    )


def _max_tokens(params: SamplingParams) -> int:
    return params.max_tokens or 0


def truncate_prompt(
    tokens: list[int], body: RequestBody, served: ServedModel, answer: int
) -> list[int]:
    """The tokens that truncate_prompt_tokens leaves, beside an answer of so many."""
    room = min(served.context, served.capacity + 1) - answer
    kept = parameters.truncate(tokens, body.truncate_prompt_tokens, room, served.context)
    if body.truncation_side == "right":
        return tokens[: len(kept)]
    return list(kept)


def check_prompt(tokens: list[int], name: str, served: ServedModel) -> list[int]:
    """Refuse what no engine could begin with."""
    if not tokens:
        raise bad_request("empty_prompt", f"{name} has no tokens: send at least one", name)
    _check_length(len(tokens), str(len(tokens)), name, served)
    if min(tokens) < 0 or max(tokens) >= served.vocab_size:
        raise bad_request(
            "invalid_value", f"{name}: token ids are 0 to {served.vocab_size - 1}", name
        )
    return tokens


def check_text(text: str, name: str, body: RequestBody, served: ServedModel) -> str:
    """Refuse a text that is far too long without tokenising it: by its length alone, or by its
    beginning. The tokens of a beginning are those of the whole text, but for some at the cut; so
    only half of them count."""
    room = min(served.context, served.capacity)
    if len(text) < room or body.truncate_prompt_tokens is not None:
        return text
    least = served.tokenizer.least_tokens(text)
    _check_length(least, f"at least {least}", name, served)
    if len(text) > LONG_TOKEN * room:
        beginning, _, _ = text[: LONG_TOKEN * room].rpartition(" ")
        tokens = served.tokenizer.encode(
            beginning or text[: LONG_TOKEN * room], add_special=False, parse_special=True
        )
        least = len(tokens) // 2
        _check_length(least, f"at least {least}", name, served)
    return text


def _check_length(tokens: int, told: str, name: str, served: ServedModel) -> None:
    if tokens >= served.context:
        most = maximum(served.context)
        message = f"{most}, answer included, and the prompt has {told} tokens: shorten the prompt"
        raise bad_request("context_length_exceeded", message, name)
    if tokens > served.capacity:
        raise bad_request(
            "kv_capacity_exceeded",
            f"{maximum(served.capacity)}, for which this server has KV memory, and the prompt has {told}"
            " tokens: shorten the prompt or raise --kv-cache-memory",
            name,
        )


def with_max_tokens(
    params: SamplingParams,
    length: int,
    asked: int | None,
    served: ServedModel,
    default: int | None = None,
) -> SamplingParams:
    """The parameters with max_tokens resolved. default: where a request names none; None: that of
    the model. The last token needs no KV. An answer that may use
    the rest of the memory leaves to pinned prefixes what they have, unless that would cost it more
    than half of it."""
    parameters.check_beams(params)
    ways = max(1, params.beam_width) * served.block_size
    capacity = served.capacity // ways * served.block_size
    room = min(served.context, capacity + 1) - length
    beside = (served.capacity - served.pinned) // ways * served.block_size + 1 - length
    rest = beside if room // 2 <= beside < room else room
    if served.fits and asked is not None:
        asked = min(asked, max(room, 1))
    wanted = 1 if asked is None else asked
    if wanted > room:
        raise bad_request(
            "context_length_exceeded"
            if length + wanted > served.context
            else "kv_capacity_exceeded",
            f"{maximum(min(served.context, capacity + 1))}: max_tokens is {wanted}, and after a prompt of"
            f" {length} tokens there is room for {max(room, 0)} (context {served.context}, KV memory"
            f" {capacity} tokens)",
            "max_tokens",
        )
    usual = default or served.defaults.get("max_tokens")
    most = asked if asked is not None else min(usual or rest, room)
    if params.min_tokens > most:
        raise bad_request(
            "invalid_value",
            f"min_tokens ({params.min_tokens}) is over max_tokens ({most})",
            "min_tokens",
        )
    return replace(params, max_tokens=most)


def sampling_params(body: RequestBody, served: ServedModel, logprobs: int | None) -> SamplingParams:
    """Sampling parameters as an engine takes them; only max_tokens is not resolved yet."""
    stop = body.stop
    numbers = {name: getattr(body, name) for name in NUMBERS}
    given = {name: value for name, value in numbers.items() if value is not None}
    own = {name: value for name, value in served.defaults.items() if name != "max_tokens"}
    asked = replace(
        SamplingParams(**own),
        **given,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        seed=None if body.seed is None else body.seed % (1 << parameters.SEED_BITS),
        logit_bias=_bias(body.logit_bias),
        bad_words=tuple(body.bad_words or ()),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        prompt_logprobs=body.prompt_logprobs,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        structured_outputs=served.grammar or answer_grammar.grammar_of(body, served),
        speculation=body.speculation is not False,
        **_beams(body),
    )
    params = parameters.resolve(asked, served.tokenizer, served.vocab_size)
    return _forced(params, body, served)


def _beams(body: RequestBody) -> dict[str, Any]:
    """Beam search by the fields of vLLM: best_of beams, or n, of which the client gets the best
    n."""
    neutral = NEUTRAL_WITHOUT_BEAMS
    why = "{} needs use_beam_search: true"
    if body.use_beam_search:
        neutral = NEUTRAL_WITH_BEAMS
        why = "beam search draws nothing: leave {} away"
    for name, values in neutral.items():
        if getattr(body, name) not in (None, *values):
            raise bad_request("invalid_value", why.format(name), name)
    if not body.use_beam_search:
        return {}
    width = {"beam_width": body.best_of or body.n or 1}
    given = {name: getattr(body, name) for name in NEUTRAL_WITHOUT_BEAMS}
    return width | {name: value for name, value in given.items() if value is not None}


def _forced(params: SamplingParams, body: RequestBody, served: ServedModel) -> SamplingParams:
    """Apply the developer fields that replay traces (docs/adr/0006), measure drafts and inject
    faults. They make answers wrong on purpose, so only a server started with --developer accepts
    them."""
    for name in ("forced_end", "force_ids", "inject_fault"):
        if getattr(body, name) is not None and not served.developer:
            message = f"{name} is for developers: a server started with --developer takes it"
            raise bad_request("unsupported_parameter", message, name)
    if body.force_ids is not None:
        if any(not 0 <= token < served.vocab_size for token in body.force_ids):
            raise bad_request(
                "invalid_value",
                f"force_ids: token ids are 0 to {served.vocab_size - 1}",
                "force_ids",
            )
        params = replace(params, force_ids=tuple(body.force_ids))
    if body.inject_fault is not None:
        params = replace(params, inject_fault=_fault(body.inject_fault))
    if body.forced_end is not None and params.structured_outputs is not None:
        raise bad_request(
            "invalid_value", "forced_end and a grammar would both end the answer", "forced_end"
        )
    return params if body.forced_end is None else _end_at(params, body.forced_end)


def _fault(text: str) -> str:
    kind, _, place = text.partition("@")
    if kind not in FAULTS or not re.fullmatch("[1-9][0-9]{0,8}", place):
        message = f"inject_fault is KIND@N: one of {', '.join(FAULTS)}, and the token of the answer, from 1"
        raise bad_request("invalid_value", message, "inject_fault")
    return text


def _end_at(params: SamplingParams, position: int) -> SamplingParams:
    if not 1 <= position <= LARGEST or not params.stop_ids:
        message = "forced_end is 1 or more, and needs an end of sequence: leave ignore_eos away"
        raise bad_request("invalid_value", message, "forced_end")
    return replace(params, forced_end=position)


def _bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's keys are strings."""
    wrong = [key[:40] for key in bias or () if not _ID.fullmatch(key)]
    if wrong:
        message = f"logit_bias: the keys are token ids, not {', '.join(map(repr, wrong[:9]))}"
        raise bad_request("invalid_value", message, "logit_bias")
    return None if bias is None else {int(token): value for token, value in bias.items()}
