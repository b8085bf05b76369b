"""The 300 requests whose answers must be what commit 8cc2ebe answered: those that are refused.

Owns each thing that a client can do wrong, once or twice. Must not know what the refusals say: that is what
is compared.
"""

from __future__ import annotations

from typing import Any

from house_requests import (
    ADMIN,
    FAKE,
    HI,
    KEYS,
    MODEL,
    STORY,
    Ask,
    Sheet,
    answered,
    prefixes,
    small_pages,
    tenants,
)
from house_requests import admin as admin_asks

COUNT = 300
LONGEST_BODY = 20_000  # bytes that the fake server takes
SCHEMA_WITHOUT_END = {"type": "object", "properties": {"a": {"uniqueItems": True}}}

WRONG_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"prompt": None},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": 5},
    {"prompt": [1.5]},
    {"prompt": [-1]},
    {"prompt": [2**70]},
    {"prompt": [10**6]},
    {"max_tokens": 0},
    {"max_tokens": "5"},
    {"max_tokens": 10**6},
    {"min_tokens": -1},
    {"min_tokens": 17},
    {"temperature": -0.1},
    {"temperature": "hot"},
    {"top_p": 0},
    {"min_p": -0.1},
    {"top_k": -2},
    {"stop": ""},
    {"stop": ["a"] * 65},
    {"logprobs": 21},
    {"logprobs": True},
    {"seed": 1.5},
    {"stream": "yes"},
    {"stream_options": {"include_usage": 3}},
    {"repetition_penalty": 0},
    {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"5": "a"}},
    {"bad_words": [""]},
    {"bad_words": "a"},
    {"allowed_token_ids": []},
    {"prompt_logprobs": 21},
    {"echo": 1},
    {"truncate_prompt_tokens": 0},
    {"n": 0},
    {"n": 1000},
    {"best_of": 1, "n": 2},
    {"best_of": 3, "n": 1, "stream": True},
    {"length_penalty": 2.0},
    {"use_beam_search": True, "n": 2, "stop": "a"},
    {"use_beam_search": True, "top_k": 3},
    {"priority": 2**40},
    {"deadline_ms": 0},
    {"ttft_target_ms": -1},
    {"tpot_target_ms": 1e12},
    {"forced_end": 3},
    {"force_ids": [1]},
    {"tools": [{}]},
    {"suffix": "x"},
    {"grammar": "root"},
    {"model": "gpt-5"},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"json": SCHEMA_WITHOUT_END}},
    {"structured_outputs": {"grammar": "hello"}},
    {"structured_outputs": {"colour": 1}},
    {"structured_outputs": {"regex": "a"}, "min_tokens": 2},
    {"structured_outputs": {"choice": ["a much longer answer than that"]}, "max_tokens": 2},
)
WRONG_CHATS: tuple[dict[str, Any], ...] = (
    {"messages": []},
    {"messages": "hi"},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    {"logprobs": 2},
    {"top_logprobs": 2},
    {"logprobs": True, "top_logprobs": 21},
    {"echo": True},
    {"chat_template_kwargs": {"messages": []}},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
)
NO_JSON = (b"", b"{", b"[]", b'"x"', b'{"temperature": 1e999}', b"\xff\xfe", b"[" * 10_000)


def refused(sheet: Sheet) -> None:
    """Fields, bodies, paths and methods that are wrong."""
    for fields in WRONG_COMPLETIONS:
        sheet.complete(MODEL, **{"prompt": STORY, "temperature": 0.0, "max_tokens": 16, **fields})
    for fields in WRONG_CHATS:
        sheet.chat(MODEL, **{"messages": HI, "temperature": 0.0, "max_tokens": 4, **fields})
    for raw in NO_JSON:
        sheet.add(MODEL, "/v1/completions", raw)
    for path in ("/tokenize", "/detokenize", "/v1/prefixes"):
        sheet.add(MODEL, path, {"tokens": ["a"], "messages": 3})
    sheet.add(MODEL, "/detokenize", {"tokens": [10**7]})
    for method, path in (
        ("GET", "/"),
        ("GET", "/v1/nothing"),
        ("GET", "/v1/completions"),
        ("PUT", "/health"),
        ("DELETE", "/v1/models"),
        ("GET", "/v1/requests/nobody/timeline"),
        ("GET", "/v1/admin/config"),
        ("POST", "/v1/admin/config"),
    ):
        sheet.add(MODEL, path, b"{}" if method == "POST" else None, method)


def limited(sheet: Sheet) -> None:
    """What the fake server refuses: keys, sizes, lengths, and forms, which need a vocabulary."""
    common = {"temperature": 0.0, "max_tokens": 4, "prompt": "a fake engine says"}
    for value in ("", "Bearer wrong", KEYS["red"], f"Basic {KEYS['red']}"):
        sheet.add(FAKE, "/v1/completions", common, headers={"Authorization": value})
    sheet.add(FAKE, "/v1/models", method="GET", headers={"Authorization": ""})
    words = "word " * 200  # more than the KV memory, less than the context
    for fields in (
        {"prompt": words},
        {"prompt": words * 3},
        {"max_tokens": 200},
        {"max_tokens": 2000},
        {"n": 5},
        {"structured_outputs": {"regex": "a+"}},
    ):
        sheet.complete(FAKE, **common | fields)
    sheet.add(FAKE, "/v1/completions", b" " * (LONGEST_BODY + 1))
    sheet.add(FAKE, "/v1/completions", common, headers={"X-Priority": "soon"})
    sheet.add(FAKE, "/v1/completions", common, headers={"X-Deadline-Ms": "never"})
    key = {"Authorization": f"Bearer {ADMIN}"}
    for fields, headers in (
        ({"policy": "orca"}, {}),
        ({"policy": "lottery"}, key),
        ({"colour": 1}, key),
        ({"max_num_seqs": "3"}, key),
        ({"max_num_seqs": 0}, key),
    ):
        sheet.add(FAKE, "/v1/admin/config", fields, headers=headers)


def asks() -> list[Ask]:
    """All of them, in the order in which they are sent."""
    sheet = Sheet()
    for part in (small_pages, answered, prefixes, refused, tenants, limited, admin_asks):
        part(sheet)
    return sheet.asks
