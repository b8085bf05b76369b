"""The 300 requests whose answers must be what commit 8cc2ebe answered: those that are answered.

Owns what is asked, the same in every run. What is refused is in house_refusals.py; how answers are compared
is in house_http.py. Every request says its seed or is greedy, and says its id, so that nothing is drawn.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

# The servers: one with SmolLM2; one with the fake engine, keys, small limits and the fields of developers.
MODEL, FAKE = "model", "fake"
JSON_TYPE = {"Content-Type": "application/json"}
KEYS = {"red": "red-key", "blue": "blue-key"}  # of the tenants of the fake server
ADMIN = "admin-key"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
UNICODE = "Grüße, 東京 🗼 naïve café — “quoted” ﷽ \u200d e\u0301"
STORY = "Once upon a time there was a small house by the sea, and in the house there lived "


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One HTTP request. timed: its answer holds times, of which only the names are compared."""

    number: int
    server: str
    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    timed: bool = False
    alone: bool = False  # its answer depends on what was asked before it: never sent among others

    @property
    def id(self) -> str:
        return f"house-{self.number:03}"

    @property
    def generates(self) -> bool:
        return self.path.endswith("completions")


@dataclass(slots=True)
class Sheet:
    """Requests, numbered as they are added."""

    asks: list[Ask] = field(default_factory=list)

    def add(
        self,
        server: str,
        path: str,
        body: Any = None,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        **more: bool,
    ) -> None:
        """body: bytes as they are, anything else as JSON. The fake server gets the key of tenant red, unless
        the headers say who asks ("" as Authorization: nobody)."""
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        own = dict(JSON_TYPE if raw is not None else {})
        if server == FAKE:
            own["Authorization"] = f"Bearer {KEYS['red']}"
        own |= headers or {}
        own = {name: value for name, value in own.items() if value}
        self.asks.append(Ask(len(self.asks) + 1, server, method, path, raw, own, **more))

    def complete(self, server: str, **fields: Any) -> None:
        self.add(server, "/v1/completions", fields)

    def chat(self, server: str, **fields: Any) -> None:
        self.add(server, "/v1/chat/completions", fields)


# Fields beside prompt, temperature, seed and max_tokens. Each is asked for whole and as a stream.
COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"prompt": STORY},
    {"prompt": UNICODE},
    {"prompt": " "},
    {"prompt": "<|im_start|>user\nhi<|im_end|>\n", "max_tokens": 6},
    {"prompt": ["The capital of France is", "Two and two are"]},
    {"prompt": [[100, 200, 300], [400, 500]], "max_tokens": 5},
    {"prompt": STORY, "echo": True},
    {"prompt": STORY, "echo": True, "max_tokens": 0},
    {"prompt": STORY, "echo": True, "logprobs": 2, "max_tokens": 4},
    {"prompt": UNICODE, "logprobs": 0},
    {"prompt": UNICODE, "logprobs": 5},
    {"prompt": STORY, "prompt_logprobs": 1, "max_tokens": 3},
    {"prompt": STORY, "return_token_ids": True},
    {"prompt": STORY, "truncate_prompt_tokens": 6, "add_special_tokens": False},
    {"prompt": STORY, "temperature": 0.8, "seed": -5, "user": "somebody"},
    {"prompt": STORY, "temperature": 1.2, "top_p": 0.8, "seed": 2},
    {"prompt": STORY, "temperature": 1.0, "top_k": 5, "seed": 3},
    {"prompt": STORY, "temperature": 1.0, "min_p": 0.1, "seed": 4},
    {"prompt": "one two one two one two one", "repetition_penalty": 1.5},
    {"prompt": "one two one two one two one", "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {
        "prompt": STORY,
        "temperature": 0.9,
        "seed": 6,
        "frequency_penalty": 2.0,
        "repetition_penalty": 0.8,
    },
    {"prompt": STORY, "logit_bias": {"260": 4.5, "28": -100}},
    {"prompt": STORY, "logit_bias": {"100": 100}, "max_tokens": 3, "logprobs": 1},
    {"prompt": STORY, "bad_words": ["a", "the", "little girl"]},
    {"prompt": STORY, "allowed_token_ids": [260, 253, 28, 30, 378]},
    {"prompt": STORY, "min_tokens": 8, "stop": ["a", "e"]},
    {"prompt": STORY, "stop": " the", "max_tokens": 24},
    {"prompt": STORY, "stop": [".", ","], "include_stop_str_in_output": True, "max_tokens": 24},
    {"prompt": STORY, "stop_token_ids": [260, 30], "max_tokens": 24},
    {"prompt": "2, 4, 6, 8,", "ignore_eos": True, "max_tokens": 30},
    {"prompt": STORY, "n": 3, "temperature": 0.9, "seed": 7},
    {"prompt": ["One,", "Two,"], "n": 2, "temperature": 0.9, "seed": 8, "max_tokens": 5},
    {"prompt": STORY, "n": 1, "best_of": 3, "temperature": 0.9, "seed": 9},
    {"prompt": STORY, "n": 2, "temperature": 0.9, "seed": 10, "logprobs": 1, "stop": ["a"]},
    {"prompt": STORY, "use_beam_search": True, "n": 3, "max_tokens": 6},
    {
        "prompt": STORY,
        "use_beam_search": True,
        "best_of": 4,
        "n": 2,
        "length_penalty": 2.0,
        "max_tokens": 6,
    },
    {
        "prompt": STORY,
        "use_beam_search": True,
        "n": 2,
        "early_stopping": "never",
        "logprobs": 1,
        "max_tokens": 5,
    },
    {"prompt": "A person: ", "structured_outputs": {"json": SCHEMA}, "max_tokens": 40},
    {
        "prompt": "A code: ",
        "structured_outputs": {"regex": "[a-f]{2,6}-[0-9]{3}"},
        "max_tokens": 20,
    },
    {"prompt": "Yes or no? ", "structured_outputs": {"choice": ["yes", "no", "naïve 東京"]}},
    {
        "prompt": "Say: ",
        "structured_outputs": {"grammar": 'root ::= "<" [a-c]{1,4} ">"'},
        "max_tokens": 12,
    },
    {"prompt": STORY, "skip_special_tokens": False, "ignore_eos": True},
    {
        "prompt": STORY,
        "priority": -3,
        "deadline_ms": 60000,
        "ttft_target_ms": 50000,
        "tpot_target_ms": 5000,
    },
    {"prompt": STORY, "cache_salt": "salt", "speculation": False, "max_tokens": 4},
    {"prompt": STORY, "frobnicate": [1], "tools": [], "suffix": None, "max_tokens": 4},
)

HI = [{"role": "user", "content": "hi"}]
ASKED = [
    {"role": "system", "content": "You answer in one short sentence."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Name a city."}, {"type": "text", "text": UNICODE}],
    },
    {"role": "assistant", "content": "東京"},
    {"role": "user", "content": "Another one, please."},
]
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": HI, "response_format": {"type": "text"}},
    {"messages": ASKED, "max_tokens": 16},
    {"messages": ASKED, "max_completion_tokens": 5, "max_tokens": 9},
    {"messages": HI, "temperature": 0.9, "seed": 11},
    {"messages": HI, "temperature": 0.9, "seed": 12, "n": 3},
    {"messages": HI, "logprobs": True},
    {"messages": HI, "logprobs": True, "top_logprobs": 3, "max_tokens": 4},
    {"messages": HI, "prompt_logprobs": 0, "max_tokens": 3},
    {"messages": HI, "return_token_ids": True, "max_tokens": 4},
    {"messages": ASKED, "stop": ["!", "."], "max_tokens": 24},
    {"messages": ASKED, "stop": ".", "include_stop_str_in_output": True, "max_tokens": 24},
    {
        "messages": ASKED,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "temperature": 0.5,
        "seed": 14,
    },
    {"messages": HI, "add_generation_prompt": False, "max_tokens": 4},
    {"messages": [*HI, {"role": "assistant", "content": None}], "max_tokens": 4},
    {"messages": HI, "use_beam_search": True, "n": 2, "max_tokens": 5},
    {"messages": HI, "response_format": {"type": "json_object"}, "max_tokens": 24},
    {
        "messages": HI,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "max_tokens": 40,
    },
    {"messages": HI, "structured_outputs": {"choice": ["hello", "good bye"]}},
    {
        "messages": HI,
        "logit_bias": {"19556": -100},
        "bad_words": ["Hello"],
        "min_tokens": 4,
        "max_tokens": 5,
    },
    {"messages": ASKED, "truncate_prompt_tokens": 20, "max_tokens": 4},
    {
        "messages": HI,
        "repetition_penalty": 1.3,
        "temperature": 0.6,
        "top_k": 40,
        "top_p": 0.9,
        "seed": 15,
    },
)
STREAM_OPTIONS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"include_usage": True},
    {"include_usage": True, "continuous_usage_stats": True},
)


def answered(sheet: Sheet) -> None:
    """Everything that SmolLM2 answers, whole and streamed."""
    common = {"model": "smollm2", "temperature": 0.0, "max_tokens": 10}
    for number, fields in enumerate(COMPLETIONS):
        _both(sheet, "/v1/completions", common | fields, number)
    for number, fields in enumerate(CHATS):
        _both(sheet, "/v1/chat/completions", common | fields, number)
    sheet.add(MODEL, "/v1/completions", common | {"prompt": STORY, "timings": True}, timed=True)
    stream = {"prompt": STORY, "timings": True, "stream": True, "stop": ["never said"]}
    sheet.add(MODEL, "/v1/completions", common | stream, timed=True)


def _both(sheet: Sheet, path: str, fields: dict[str, Any], number: int) -> None:
    sheet.add(MODEL, path, fields)
    options = STREAM_OPTIONS[number % len(STREAM_OPTIONS)]
    sheet.add(
        MODEL, path, fields | {"stream": True} | ({"stream_options": options} if options else {})
    )


def small_pages(sheet: Sheet) -> None:
    """The endpoints that do not generate."""
    for server in (MODEL, FAKE):
        for path in ("/health", "/ping", "/version", "/load", "/v1/models"):
            sheet.add(server, path, method="GET")
    sheet.add(MODEL, "/ping", b"")
    for fields in (
        {"prompt": UNICODE},
        {"prompt": UNICODE, "return_token_strs": True},
        {"prompt": "<|im_start|> a", "add_special_tokens": False, "return_token_strs": True},
        {"prompt": "", "model": "smollm2"},
        {"messages": ASKED},
        {"messages": HI, "add_generation_prompt": False, "return_token_strs": True},
    ):
        sheet.add(MODEL, "/tokenize", fields)
    for tokens in ([], [1, 2, 3], list(range(1000, 1100)), [0, 49151], [229, 145, 151]):
        sheet.add(MODEL, "/detokenize", {"tokens": tokens})


def prefixes(sheet: Sheet) -> None:
    """Prefixes that are kept, used, listed and let go, in this order."""

    def ask(server: str, method: str, path: str = "", body: Any = None, who: str = "red") -> None:
        headers = {"Authorization": f"Bearer {KEYS[who]}"} if server == FAKE else None
        sheet.add(server, f"/v1/prefixes{path}", body, method, headers, alone=True)

    long = {"id": "story", "prompt": STORY * 3}
    ask(MODEL, "GET")
    ask(MODEL, "POST", body=long)
    ask(MODEL, "POST", body=long)
    ask(MODEL, "POST", body={"messages": ASKED})
    ask(MODEL, "POST", body={"prompt": list(range(100, 140)), "cache_salt": "s"})
    ask(MODEL, "GET")
    again = {"prompt": STORY * 3 + "a cat", "temperature": 0.0, "max_tokens": 4}
    sheet.add(MODEL, "/v1/completions", again, alone=True)
    for id in ("story", "story", "prefix-1", "prefix-2", "unknown"):
        ask(MODEL, "DELETE", f"/{id}")
    ask(MODEL, "GET")
    ask(FAKE, "POST", body={"id": "mine", "prompt": "what is mine"})
    ask(FAKE, "GET", who="blue")
    ask(FAKE, "DELETE", "/mine", who="blue")
    ask(FAKE, "DELETE", "/mine")


def tenants(sheet: Sheet) -> None:
    """The fake engine: keys, tenants, targets, the fields of developers."""
    common = {"temperature": 0.0, "seed": 0, "max_tokens": 6, "prompt": "a fake engine says"}
    for fields in (
        {},
        {"stream": True},
        {"n": 3},
        {"logprobs": 2},
        {"prompt_logprobs": 2},
        {"echo": True},
        {"use_beam_search": True, "n": 2},
        {"forced_end": 3, "max_tokens": 20},
        {"forced_end": 3, "max_tokens": 20, "stream": True, "ignore_eos": False},
    ):
        sheet.complete(FAKE, **common | fields)
    blue = {"Authorization": f"Bearer {KEYS['blue']}"}
    sheet.add(FAKE, "/v1/completions", common, headers=blue)
    named = {
        "X-Tenant": "t",
        "X-Priority": "-2",
        "X-Deadline-Ms": "60000",
        "X-TTFT-Target-Ms": "50000",
    }
    sheet.add(FAKE, "/v1/completions", common, headers=blue | named)
    sheet.chat(FAKE, messages=HI, temperature=0.0, max_tokens=5, priority=3)


def admin(sheet: Sheet) -> None:
    """Settings told and changed; the last ones are those the server was started with."""
    key = {"Authorization": f"Bearer {ADMIN}"}
    sheet.add(FAKE, "/v1/admin/config", method="GET", headers=key, alone=True)
    for fields in (
        {"max_num_seqs": 3, "order": "fair"},
        {"policy": "prefill_first", "max_num_batched_tokens": 32},
        {"policy": "chunked", "order": "fcfs", "max_num_seqs": 4, "max_num_batched_tokens": 512},
    ):
        sheet.add(FAKE, "/v1/admin/config", fields, headers=key, alone=True)
