"""JSON Schemas of all request fields, for the served model.

Owns what is said of every field of a RequestBody: its type is the one by which it is decoded
(body.py), its bounds are those by which it is checked (params.LIMITS, text/parameters.py,
limits.py), and the table says the rest. tests/server/test_openapi_fields.py draws values from it,
and others, and holds them against the check. Must not know which API takes which field
(request_schemas.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pageturner.http.json_schemas import (
    BOOLEAN,
    STRING,
    Schema,
    array,
    narrowed,
    nullable,
    of_struct,
    one_of,
    record,
    ref,
)
from pageturner.http.request_info import SAFE_ID
from pageturner.params import FAULTS, LARGEST, LIMITS, SamplingParams
from pageturner.server.admission.limits import LONGEST_NAME
from pageturner.server.admission.service_level import MAX_MS, MAX_PRIORITY
from pageturner.server.api.base.answer_grammar import formats_of
from pageturner.server.api.base.body import MAX_SEED, UNSUPPORTED, RequestBody, SessionFields
from pageturner.server.api.base.call import NUMBERS
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.openai.chat_fields import RESERVED
from pageturner.server.sessions import LONGEST
from pageturner.text import parameters, tools
from pageturner.text.conversation import EFFORTS
from pageturner.text.fim import fim_tokens
from pageturner.text.structured_outputs import MAX_CHOICES

Narrowing = Mapping[str, Any] | Callable[[ServedModel], Mapping[str, Any]]
DEVELOPER = ("forced_end", "force_ids", "inject_fault")
# field -> whose entry in LIMITS bounds it, where that has another name
_LIMITED_AS = {
    "max_completion_tokens": "max_tokens",
    "max_reasoning_tokens": "max_thinking_tokens",
    "thinking_token_budget": "max_thinking_tokens",
    "top_logprobs": "logprobs",
}


class Field(NamedTuple):
    """help: one line for people. narrows: what is known of it beyond its type and its entry in
    LIMITS."""

    help: str
    narrows: Narrowing = {}  # noqa: RUF012  # nobody changes it


def longest_prompt(served: ServedModel) -> int:
    """Tokens of a prompt, beside an answer of one."""
    return max(1, min(served.context - 1, served.capacity))


def token_id(served: ServedModel) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": served.vocab_size - 1}


def prompt_schema(served: ServedModel) -> Schema:
    """A prompt or several, as text or as tokens."""
    text = STRING if served.tokenizer.add_bos else {**STRING, "minLength": 1}
    ids = array(token_id(served), minItems=1, maxItems=longest_prompt(served))
    most = min(served.limits.prompts, served.limits.choices)
    return {"anyOf": [text, ids, array({"anyOf": [text, ids]}, minItems=1, maxItems=most)]}


def _tools(served: ServedModel) -> Schema:
    if formats_of(served.for_tools).tools is None:
        return {
            "maxItems": 0,
            "description": "Functions that the model may call. This model has no format for that.",
        }
    return {"items": ref("Tool"), "maxItems": tools.MAX_TOOLS}


def _tool_choice(served: ServedModel) -> Schema:
    if formats_of(served.for_tools).tools is None:
        return one_of("none", "auto", None)
    return {"anyOf": [one_of("none", "auto", "required", "any", None), ref("NamedTool")]}


def _biased(served: ServedModel) -> Schema:
    return {"propertyNames": {"pattern": f"^(?:{numbers_up_to(served.vocab_size - 1)})$"}}


def _max_tokens(served: ServedModel) -> Schema:
    return {"maximum": longest_prompt(served)}


def _template(served: ServedModel) -> Schema:
    """A template of a request, where the server lets requests have one."""
    return {} if served.request_templates else {"type": "null"}


def _suffix(served: ServedModel) -> Schema:
    return {} if fim_tokens(served.tokenizer) else one_of("", None)


def _session() -> Schema:
    """An id, or what is said of the KV of a session."""
    id = {**STRING, "pattern": f"^{SAFE_ID.pattern}$"}
    seconds = {"type": ["number", "null"], "minimum": 0, "maximum": LONGEST}
    said = of_struct(SessionFields) | {"id": id, "fork_of": {**id, "type": ["string", "null"]}}
    said |= {"next_in": seconds, "keep": {"anyOf": [BOOLEAN, seconds]}}
    return {"anyOf": [id, record(said, "id", additionalProperties=False), {"type": "null"}]}


_MS = {"exclusiveMinimum": 0, "maximum": MAX_MS}
_NAME = {"maxLength": LONGEST_NAME}
_OFF: Schema = {"default": False}
# field -> what is said of it
FIELDS: dict[str, Field] = {
    "model": Field(
        "The model that is served; empty: it.", lambda s: one_of(s.model, *s.names, "", None)
    ),
    "prompt": Field("A prompt or several, as text or as token ids.", prompt_schema),
    "suffix": Field("The text behind a gap, which the answer fills.", _suffix),
    "messages": Field(
        "The conversation.", {"type": "array", "minItems": 1, "items": ref("ChatMessage")}
    ),
    "max_tokens": Field("Most tokens of the answer.", _max_tokens),
    "max_completion_tokens": Field("The same as max_tokens.", _max_tokens),
    "min_tokens": Field("No end of the answer before so many tokens.", _max_tokens),
    "temperature": Field("0 is greedy."),
    "top_p": Field("Choose among the likeliest tokens that have this probability together."),
    "top_k": Field("Choose among so many tokens; 0 and -1: all."),
    "min_p": Field(
        "Choose among tokens at least so likely, as a share of the likeliest one's probability."
    ),
    "seed": Field(
        "The same seed gives the same answer.", {"minimum": -MAX_SEED, "maximum": MAX_SEED}
    ),
    "stop": Field(
        "Strings that end the answer.",
        {
            "minLength": 1,
            "maxLength": parameters.LONGEST_STOP,
            "maxItems": parameters.MAX_STOPS,
            "items": {**STRING, "minLength": 1, "maxLength": parameters.LONGEST_STOP},
        },
    ),
    "stop_token_ids": Field(
        f"Tokens that end the answer: at most {parameters.MAX_STOP_IDS} different ones.",
        lambda s: {"items": token_id(s)},
    ),
    "include_stop_str_in_output": Field("Keep the stop string in the text.", _OFF),
    "ignore_eos": Field("Go on behind the end of sequence.", _OFF),
    "logprobs": Field("Log-probabilities of the tokens of the answer."),
    "top_logprobs": Field("Log-probabilities of so many other tokens too; needs logprobs: true."),
    "prompt_logprobs": Field("Log-probabilities of the prompt's tokens, and of so many others."),
    "echo": Field("The prompt stands in front of the text.", _OFF),
    "truncate_prompt_tokens": Field(
        "Keep the last so many tokens of the prompt; -1: as many as there is room for.",
        lambda s: {"maximum": s.context, "not": {"const": 0}},
    ),
    "truncation_side": Field("The end of the prompt that goes.", one_of("left", "right", None)),
    "repetition_penalty": Field(
        "Logits of tokens in prompt or output: x / p if x > 0, else x * p."
    ),
    "presence_penalty": Field("Taken once from the logits of tokens in the output."),
    "frequency_penalty": Field(
        "Taken from the logits of tokens in the output, as often as they are there."
    ),
    "logit_bias": Field("Token id: what is added to its logit.", _biased),
    "bad_words": Field(
        "Words that are not written.",
        {
            "maxItems": parameters.MAX_BAD_WORDS,
            "items": {**STRING, "maxLength": parameters.LONGEST_BAD_WORD, "pattern": r"\S"},
        },
    ),
    "allowed_token_ids": Field(
        "Nothing else is chosen.", lambda s: {"items": token_id(s), "minItems": 1}
    ),
    "response_format": Field("The form of the answer, as OpenAI says it.", ref("ResponseFormat")),
    "structured_outputs": Field(
        "The form of the answer, as vLLM says it.", ref("StructuredOutputs")
    ),
    "guided_json": Field(
        "As structured_outputs.json.", {"anyOf": [STRING, ref("JsonSchema"), one_of(None)]}
    ),
    "guided_regex": Field("As structured_outputs.regex.", {"minLength": 1}),
    "guided_choice": Field(
        "As structured_outputs.choice.",
        {"items": {**STRING, "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES},
    ),
    "guided_grammar": Field("As structured_outputs.grammar."),
    "grammar": Field("As structured_outputs.grammar."),
    "json_schema": Field(
        "As structured_outputs.json.", {"anyOf": [STRING, BOOLEAN, ref("JsonSchema"), one_of(None)]}
    ),
    "tools": Field("Functions that the model may call.", _tools),
    "tool_choice": Field("Whether it may, must or must not.", _tool_choice),
    "parallel_tool_calls": Field("More than one call in an answer.", {"default": True}),
    "reasoning_effort": Field("For the chat template.", one_of(*EFFORTS, None)),
    "max_reasoning_tokens": Field("Most tokens of thoughts."),
    "thinking_token_budget": Field("The same as max_reasoning_tokens."),
    "stream": Field("Server-sent events in place of one answer.", _OFF),
    "stream_options": Field("What a stream tells beside its text."),
    "skip_special_tokens": Field("Leave control tokens out of the text.", {"default": True}),
    "add_special_tokens": Field("Put a BOS in front of the prompt, where the model has one."),
    "parse_special": Field("Control tokens in contents are no text.", _OFF),
    "add_generation_prompt": Field("For the chat template.", {"default": True}),
    "continue_final_message": Field("The last message, the assistant's, goes on.", _OFF),
    "chat_template": Field("A chat template in place of the model's.", _template),
    "chat_template_kwargs": Field(
        "For the chat template.", {"propertyNames": {"not": one_of(*sorted(RESERVED))}}
    ),
    "include_reasoning": Field("Thoughts stand in the answer.", {"default": True}),
    "return_token_ids": Field("Token ids beside the text.", _OFF),
    "return_tokens_as_token_ids": Field("Logprobs name tokens as token_id:N.", _OFF),
    "priority": Field(
        "Smaller goes first.", {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY - 1}
    ),
    "deadline_ms": Field("Milliseconds after which the answer is worth nothing and ends.", _MS),
    "ttft_target_ms": Field("Milliseconds in which the first token should be there.", _MS),
    "tpot_target_ms": Field("Milliseconds that a later token should take.", _MS),
    "n": Field("Answers to each prompt.", lambda s: {"maximum": s.slots, "default": 1}),
    "best_of": Field("Make so many, keep the n likeliest.", lambda s: {"maximum": s.slots}),
    "use_beam_search": Field("Beam search over best_of beams.", _OFF),
    "length_penalty": Field("Beam search: sums of logprobs are divided by length to this power."),
    "early_stopping": Field("Beam search: when it ends.", one_of(False, True, "never", None)),
    "user": Field("The tenant, where nothing else tells it.", _NAME),
    "cache_salt": Field("Requests share cached prefixes only with those of the same salt.", _NAME),
    "request_id": Field("What the answer's id ends with.", {"pattern": f"^{SAFE_ID.pattern}$"}),
    "forced_end": Field(
        "For developers: the answer ends as its k-th token.", {"minimum": 1, "maximum": LARGEST}
    ),
    "force_ids": Field("For developers: the answer begins so.", lambda s: {"items": token_id(s)}),
    "inject_fault": Field(
        "For developers: KIND@N.", {"pattern": f"^(?:{'|'.join(FAULTS)})@[1-9][0-9]{{0,8}}$"}
    ),
    "speculation": Field("Whether tokens of this answer may be guessed.", {"default": True}),
    "session": Field("The session that this is a turn of.", _session()),
    "timings": Field("Say where the time went.", _OFF),
    "receipt": Field("A receipt beside the answer, with which it can be made again.", _OFF),
}


def field_schemas(served: ServedModel) -> dict[str, Schema]:
    """The schema of every field, by its name."""
    found = {}
    for name, typed in of_struct(RequestBody).items():
        if name not in FIELDS:
            continue  # a field of a dialect's own
        field = FIELDS[name]
        more = field.narrows(served) if callable(field.narrows) else field.narrows
        made = narrowed({**typed, **_bounds(name)}, more)
        usual = default_of(name, served)
        found[name] = {
            "description": field.help,
            **made,
            **({} if usual is None else {"default": usual}),
        }
        if name in DEVELOPER and not served.developer:
            found[name] = {
                "description": f"{field.help} Start the server with --developer.",
                "type": "null",
            }
    return found


def neutral_schemas(fields: Mapping[str, tuple[Any, ...]] = UNSUPPORTED) -> dict[str, Schema]:
    """The schema of each field that is known and not there: nothing but the values that change
    nothing."""
    return {
        name: {**one_of(None, *neutrals), "x-neutral": True} for name, neutrals in fields.items()
    }


def default_of(name: str, served: ServedModel) -> Any:
    """Return the default of a sampling parameter; None unless it is a plain number."""
    return served.defaults.get(name, getattr(SamplingParams(), name)) if name in NUMBERS else None


def _bounds(name: str) -> Schema:
    limited = _LIMITED_AS.get(name, name)
    if limited not in LIMITS:
        return {}
    least, most, open_ended = LIMITS[limited]
    return {"exclusiveMinimum" if open_ended else "minimum": least, "maximum": most}


def numbers_up_to(most: int) -> str:
    """A regular expression of the whole numbers from 0 to `most`, without leading zeros."""
    digits = str(most)
    ways = ["0"] + [rf"[1-9][0-9]{{{n}}}" for n in range(len(digits) - 1)]
    for i, digit in enumerate(digits):
        least = 1 if i == 0 else 0
        if int(digit) > least:
            ways.append(f"{digits[:i]}[{least}-{int(digit) - 1}][0-9]{{{len(digits) - i - 1}}}")
    return "|".join([*ways, digits])


# fields that mean something in one of OpenAI's two older APIs only
COMPLETIONS_ONLY = frozenset({"prompt", "echo", "suffix"})
CHATS_ONLY = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
        "max_reasoning_tokens",
        "thinking_token_budget",
        "top_logprobs",
        "parse_special",
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "chat_template",
    }
)


def of_completions(served: ServedModel) -> dict[str, Schema]:
    """The fields of /v1/completions."""
    ours = {name: one for name, one in field_schemas(served).items() if name not in CHATS_ONLY}
    refused: dict[str, tuple[Any, ...]] = {
        "max_reasoning_tokens": (),
        "thinking_token_budget": (),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
    }
    return {
        **ours,
        "logprobs": {**ours["logprobs"], "type": ["integer", "null"]},
        **neutral_schemas(refused),
        **neutral_schemas(),
    }


def of_chats(served: ServedModel) -> dict[str, Schema]:
    """The fields of /v1/chat/completions."""
    ours = {
        name: one for name, one in field_schemas(served).items() if name not in COMPLETIONS_ONLY
    }
    said = ours["logprobs"]["description"]
    return {
        **ours,
        "logprobs": {"description": said, **nullable(BOOLEAN), "default": False},
        **neutral_schemas({"echo": (False,)}),
        **neutral_schemas(),
    }
