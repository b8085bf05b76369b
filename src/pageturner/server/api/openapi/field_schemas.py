"""JSON Schemas of all request fields, for the served model.

Owns what is said of every field of a RequestBody: its type is the one by which it is decoded
(body.py), its bounds are those by which it is checked (params.LIMITS, text/parameters.py,
limits.py), and the tables say the rest (fields.json, NARROWED).
tests/server/test_openapi_fields.py draws values from it, and others, and holds them against the
check. Must not know which API takes which field (request_schemas.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

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
from pageturner.server.api.base.body import MAX_SEED, RequestBody, SessionFields
from pageturner.server.api.base.call import NUMBERS
from pageturner.server.api.base.foreign_fields import UNSUPPORTED
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.openai.chat_fields import RESERVED
from pageturner.server.sessions import LONGEST
from pageturner.text import parameters, tools
from pageturner.text.conversation import EFFORTS
from pageturner.text.fim import fim_tokens
from pageturner.text.structured_outputs import MAX_CHOICES

Narrowing = Mapping[str, Any] | Callable[[ServedModel], Mapping[str, Any]]


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
# field -> what is said of it, and what is known of it beyond its type and its entry in LIMITS
FIELDS: dict[str, dict[str, Any]] = msgspec.json.decode(
    Path(__file__).with_name("fields.json").read_bytes()
)
DEVELOPER = tuple(name for name, about in FIELDS.items() if about.get("for") == "developers")
# field -> what is known of it that the table cannot say
NARROWED: dict[str, Narrowing] = {
    "model": lambda s: one_of(s.model, *s.names, "", None),
    "prompt": prompt_schema,
    "suffix": _suffix,
    "max_tokens": _max_tokens,
    "max_completion_tokens": _max_tokens,
    "min_tokens": _max_tokens,
    "seed": {"minimum": -MAX_SEED, "maximum": MAX_SEED},
    "stop": {
        "minLength": 1,
        "maxLength": parameters.LONGEST_STOP,
        "maxItems": parameters.MAX_STOPS,
        "items": {**STRING, "minLength": 1, "maxLength": parameters.LONGEST_STOP},
    },
    "stop_token_ids": lambda s: {
        "items": token_id(s),
        "description": f"Tokens that end the answer: at most {parameters.MAX_STOP_IDS} different ones.",
    },
    "truncate_prompt_tokens": lambda s: {"maximum": s.context, "not": {"const": 0}},
    "logit_bias": _biased,
    "bad_words": {
        "maxItems": parameters.MAX_BAD_WORDS,
        "items": {**STRING, "maxLength": parameters.LONGEST_BAD_WORD, "pattern": r"\S"},
    },
    "allowed_token_ids": lambda s: {"items": token_id(s), "minItems": 1},
    "guided_choice": {"items": {**STRING, "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES},
    "tools": _tools,
    "tool_choice": _tool_choice,
    "reasoning_effort": one_of(*EFFORTS, None),
    "chat_template": _template,
    "chat_template_kwargs": {"propertyNames": {"not": one_of(*sorted(RESERVED))}},
    "priority": {"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY - 1},
    "deadline_ms": _MS,
    "ttft_target_ms": _MS,
    "tpot_target_ms": _MS,
    "n": lambda s: {"maximum": s.slots, "default": 1},
    "best_of": lambda s: {"maximum": s.slots},
    "user": _NAME,
    "cache_salt": _NAME,
    "request_id": {"pattern": f"^{SAFE_ID.pattern}$"},
    "forced_end": {"minimum": 1, "maximum": LARGEST},
    "force_ids": lambda s: {"items": token_id(s)},
    "inject_fault": {"pattern": f"^(?:{'|'.join(FAULTS)})@[1-9][0-9]{{0,8}}$"},
    "session": _session(),
}


def field_schemas(served: ServedModel) -> dict[str, Schema]:
    """The schema of every field, by its name."""
    found = {}
    for name, typed in of_struct(RequestBody).items():
        if name not in FIELDS:
            continue  # a field of a dialect's own
        about = FIELDS[name]
        more = NARROWED.get(name, about.get("schema", {}))
        if callable(more):
            more = more(served)
        described = {"description": about["description"]}
        found[name] = described | narrowed({**typed, **_bounds(name)}, more)
        usual = default_of(name, served)
        if usual is not None:
            found[name]["default"] = usual
        if name in DEVELOPER and not served.developer:
            told = f"{about['description']} Start the server with --developer."
            found[name] = {"description": told, "type": "null"}
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
    limited = FIELDS[name].get("limit", name)
    if limited not in LIMITS:
        return {}
    least, most = LIMITS[limited]
    return {"minimum": least, "maximum": most}


def numbers_up_to(most: int) -> str:
    """A regular expression of the whole numbers from 0 to `most`, without leading zeros."""
    digits = str(most)
    ways = ["0"] + [rf"[1-9][0-9]{{{n}}}" for n in range(len(digits) - 1)]
    for i, digit in enumerate(digits):
        least = 1 if i == 0 else 0
        if int(digit) > least:
            ways.append(f"{digits[:i]}[{least}-{int(digit) - 1}][0-9]{{{len(digits) - i - 1}}}")
    return "|".join([*ways, digits])


def _all_but(other: str, served: ServedModel) -> dict[str, Schema]:
    """The fields of one of OpenAI's two older APIs: without those that mean something in the other
    one only."""
    ours = field_schemas(served)
    return {name: one for name, one in ours.items() if FIELDS[name].get("for") != other}


def of_completions(served: ServedModel) -> dict[str, Schema]:
    """The fields of /v1/completions."""
    ours = _all_but("chats", served)
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
    ours = _all_but("completions", served)
    said = ours["logprobs"]["description"]
    return {
        **ours,
        "logprobs": {"description": said, **nullable(BOOLEAN), "default": False},
        **neutral_schemas({"echo": (False,)}),
        **neutral_schemas(),
    }
