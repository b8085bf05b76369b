"""The document of the API and the checks of requests say the same of every field: what the document allows is
taken, and what it does not is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from pageturner.errors import ClientError
from pageturner.http.request_info import RequestInfo
from pageturner.server.admission.service_level import service_level_of
from pageturner.server.api.anthropic.messages import MESSAGES
from pageturner.server.api.base.body import DIALECTS_OWN, RequestBody
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.foreign_fields import FOREIGN
from pageturner.server.api.ollama.ollama import OLLAMA_CHAT, OLLAMA_GENERATE
from pageturner.server.api.ollama.ollama_embed import OLLAMA_EMBED, OLLAMA_EMBEDDINGS
from pageturner.server.api.openai.chat import CHAT_COMPLETIONS
from pageturner.server.api.openai.completions import COMPLETIONS
from pageturner.server.api.openai.embeddings import EMBEDDINGS
from pageturner.server.api.openai.rerank import RERANK, SCORE
from pageturner.server.api.openapi.field_schemas import (
    DEVELOPER,
    FIELDS,
    field_schemas,
    numbers_up_to,
)
from pageturner.server.api.openapi.openapi import document
from pageturner.server.api.openapi.request_schemas import request_schemas
from pageturner.server.api.responses.responses import RESPONSES
from pageturner.server.sessions import session_hint
from pageturner.server.text_workers import text_jobs
from pageturner.text.conversation import NAMES_OF_ROLES, ROLES
from pageturner.text.tools import NAME
from support.json_schemas import Validator

from .test_openai import HI, SERVED

SOME = replace(
    SERVED,
    context=800,
    capacity=640,
    developer=True,
    tool_call_parser="hermes",
    reasoning_parser="think",
)
DOCUMENT = Validator(document(SOME, keyed=False))
LONGEST = 640
TOOL = {"type": "function", "function": {"name": "f"}}
ASK = {"messages": HI, "max_tokens": 3}
BODIES: dict[str, tuple[Dialect, str, dict[str, Any]]] = {
    "completions": (COMPLETIONS, "CompletionRequest", {"prompt": "hi"}),
    "chat": (CHAT_COMPLETIONS, "ChatRequest", {"messages": HI}),
    "responses": (RESPONSES, "ResponseRequest", {"input": "hi"}),
    "messages": (MESSAGES, "AnthropicRequest", ASK),
    "embeddings": (EMBEDDINGS, "EmbeddingRequest", {"input": "hi"}),
    "ollama chat": (OLLAMA_CHAT, "OllamaChatRequest", {"messages": HI}),
    "ollama generate": (OLLAMA_GENERATE, "OllamaGenerateRequest", {"prompt": "hi"}),
    "ollama rows": (OLLAMA_EMBED, "OllamaRowsRequest", {"input": "hi"}),
    "ollama row": (OLLAMA_EMBEDDINGS, "OllamaRowRequest", {"prompt": "hi"}),
    "reranked": (RERANK, "RerankedRequest", {"query": "hi", "documents": ["a"]}),
    "scored": (SCORE, "ScoredRequest", {"text_1": "hi", "text_2": "a"}),
}
PAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize": ("TokenizeRequest", {"prompt": "hi"}),
    "detokenize": ("DetokenizeRequest", {"tokens": [1, 2]}),
    "prefix": ("PrefixRequest", {"prompt": "hi"}),
    "count_tokens": ("CountedRequest", {"messages": HI}),
}
# shape -> field -> what it needs beside it
_OURS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "min_tokens": {"max_tokens": LONGEST - 20},
    "early_stopping": {"use_beam_search": True},
    "length_penalty": {"use_beam_search": True},
    "tool_choice": {"tools": [TOOL]},
}
BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    "chat": {
        **_OURS,
        "continue_final_message": {"messages": [*HI, {"role": "assistant", "content": "so"}]},
    },
    "reranked": {"instruction": {"rerank_by": "yes_no"}},
    "scored": {
        "instruction": {"rerank_by": "yes_no"},
        "documents": {"queries": "hi"},
        "queries": {"documents": "a"},
    },
    "completions": {name: beside for name, beside in _OURS.items() if name != "tool_choice"},
    "responses": {"min_tokens": {"max_output_tokens": LONGEST - 20}},
    "messages": {"min_tokens": {"max_tokens": LONGEST - 20}},
    "ollama chat": {
        "min_tokens": {"options": {"num_predict": LONGEST - 20}},
        "top_logprobs": {"logprobs": True},
    },
    "ollama generate": {
        "min_tokens": {"options": {"num_predict": LONGEST - 20}},
        "top_logprobs": {"logprobs": True},
    },
    "tokenize": {
        name: {"prompt": None, "messages": HI, "tools": [TOOL]}
        for name in ("tools", "tool_choice", "reasoning_effort", "messages", "chat_template_kwargs")
    },
}
# text in another language, which is read by whoever knows it: the document says where it stands
LANGUAGES = frozenset(
    {
        "structured_outputs",
        "response_format",
        "text",
        "output_config",
        "output_format",
        "format",
        "tools",
        "tool_choice",
        "guided_json",
        "guided_regex",
        "guided_grammar",
        "grammar",
        "json_schema",
    }
)
# what goes on between requests, which no request alone tells
BETWEEN = frozenset({"previous_response_id", "store", "background"})
MEND = "mend its schema in schemas.json or field_schemas.py, or its check"


def read(dialect: Dialect, body: dict[str, Any]) -> str:
    """ "" or why it is refused."""
    try:
        fields = dialect.decode(json.dumps(body).encode(), SOME.limits)
        call = dialect.read(fields, SOME)
        session_hint(call, [], RequestInfo("id"), service_level_of(fields, []))
    except ClientError as error:
        return f"{error.status} {error.message}"
    return ""


def done(page: str, body: dict[str, Any]) -> str:
    try:
        text_jobs.do(page, json.dumps(body).encode(), SOME)
    except ClientError as error:
        return f"{error.status} {error.message}"
    return ""


GOOD = {name: one[-1] for name, one in (*BODIES.items(), *PAGES.items())}
_BODIES = request_schemas(SOME)
SCHEMAS = {
    # where there is another form of a body, the first one is what asks for an answer
    name: _BODIES[one[-2]] if "properties" in _BODIES[one[-2]] else _BODIES[one[-2]]["anyOf"][0]
    for name, one in (*BODIES.items(), *PAGES.items())
}
REFUSALS: dict[str, Callable[[dict[str, Any]], str]] = {
    **{name: partial(read, one[0]) for name, one in BODIES.items()},
    **{name: partial(done, name) for name in PAGES},
}


def cannot_tell(name: str, value: Any, schema: Any) -> bool:
    """What no schema says: whose turn it is, how much room a prompt leaves, which of two fields is there."""
    if name == "messages" and isinstance(value, list):
        return not value or "assistant" in str(value[-1])
    if name in ("text_1", "queries") and isinstance(value, list):
        return len(value) != 1  # and one other text
    if name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
        return isinstance(value, int) and value > LONGEST - 80
    return not value and name in (*schema.get("required", ()), "prompt", "messages")


def hold(shape: str, name: str, examples: int) -> None:
    """Values of this field that the document allows are taken, others are refused."""
    schema, refusal, good = SCHEMAS[shape], REFUSALS[shape], GOOD[shape]
    body = {**good, **BESIDE.get(shape, {}).get(name, {})}
    field = schema["properties"][name]
    few = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    def taken(value: Any) -> None:
        if not cannot_tell(name, value, schema):
            why = refusal({**body, name: value})
            assert not why, (
                f"the document allows {name}: {value!r}, and the server says {why!r}: {MEND}"
            )

    def refused(value: Any) -> None:
        said = f"the document does not allow {name}: {value!r}, and the server takes it: {MEND}"
        assert refusal({**body, name: value}), said

    others = DOCUMENT.others(field)
    if field.get("x-neutral"):
        for value in field["enum"]:
            taken(value)
        for value in ("x", 7, [1], {"x": 1}):
            refused(value)
        return
    if name not in LANGUAGES:
        few(given(DOCUMENT.values(field))(taken))()
    if not others.is_empty:
        few(given(others)(refused))()


def every_field() -> list[tuple[str, str]]:
    return [
        (shape, name)
        for shape in SCHEMAS
        for name in SCHEMAS[shape]["properties"]
        if name not in BETWEEN
    ]


def is_neutral(shape: str, name: str) -> bool:
    return bool(SCHEMAS[shape]["properties"][name].get("x-neutral"))


def distinct_fields() -> list[tuple[str, str]]:
    """Each field once for each schema that it has."""
    found = {
        (name, json.dumps(SCHEMAS[shape]["properties"][name])): (shape, name)
        for shape, name in reversed(every_field())
        if not is_neutral(shape, name)
    }
    return sorted(found.values())


@pytest.mark.parametrize("shape", SCHEMAS)
def test_fields_are_what_the_document_says(shape: str) -> None:
    for name in [name for where, name in distinct_fields() if where == shape]:
        hold(shape, name, 2)


@pytest.mark.parametrize("shape", SCHEMAS)
def test_what_is_not_there_is_refused_in_every_shape(shape: str) -> None:
    names = [name for where, name in every_field() if where == shape and is_neutral(shape, name)]
    assert (shape in PAGES and shape != "count_tokens") or {*FOREIGN} - {"store", "background"} - {
        "stop_sequences"
    } <= {*names}
    for name in names:
        hold(shape, name, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "name"), [one for one in every_field() if not is_neutral(*one)])
def test_a_field_of_each_shape_is_what_the_document_says(shape: str, name: str) -> None:
    hold(shape, name, 25)


def test_every_field_has_its_line() -> None:
    known = {name for name in RequestBody.__struct_fields__ if name not in DIALECTS_OWN}
    assert known - FIELDS.keys() == set(), "add them to fields.json"
    assert FIELDS.keys() - known == set()


def test_fields_for_developers_are_not_for_others() -> None:
    assert [field_schemas(SERVED)[name]["type"] for name in DEVELOPER] == ["null"] * 3


@pytest.mark.parametrize("most", [0, 7, 9, 10, 265, 999, 1000, 49151])
def test_numbers_as_a_pattern(most: int) -> None:
    pattern = re.compile(numbers_up_to(most))
    for number in (0, most - 1, most, most // 2):
        assert number < 0 or pattern.fullmatch(str(number))
    for number in (most + 1, most + 10, 10 * most + 10, 7 * 10 ** len(str(most))):
        assert not pattern.fullmatch(str(number))
    assert not pattern.fullmatch("00")
    assert not pattern.fullmatch("")


@pytest.mark.parametrize(
    ("part", "written"),
    [
        (("Tool", "function", "name", "pattern"), f"^{NAME.pattern}$"),
        (("ChatMessage", "role", "enum"), [*ROLES, *NAMES_OF_ROLES]),
    ],
)
def test_schemas_say_what_the_checks_of_languages_say(part: tuple[str, ...], written: Any) -> None:
    found = document(SOME, keyed=False)["components"]["schemas"][part[0]]
    for name in part[1:]:
        found = found["properties"][name] if "properties" in found else found[name]
    assert found == written
