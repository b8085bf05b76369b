"""Bodies of requests made hostile: every field of every endpoint with what it should not have.

Owns the bodies and what is wrong with them. Every change follows from the dice.
"""

from __future__ import annotations

import copy
from typing import Any

from hostile import whole_server
from hostile.binary import Dice, damaged
from hostile.json_files import DEEP, PATTERNS, nasty, places, written
from hostile.whole_server import ask, check_answer
from pageturner.server.api.base.body import UNSUPPORTED, RequestBody
from pageturner.server.observability.admin import CHANGEABLE
from pageturner.server.text_workers.text_jobs import DetokenizeBody, PrefixBody, TokenizeBody

HI = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
]
FIELDS = (*RequestBody.__struct_fields__, *UNSUPPORTED)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1]}},
    "required": ["a"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
# path -> bodies that are right, fields that there are
ENDPOINTS: dict[str, tuple[tuple[dict[str, Any], ...], tuple[str, ...]]] = {
    "/v1/completions": (
        (
            {"prompt": "hello", "max_tokens": 2},
            {"prompt": [1, 2], "logit_bias": {"5": 1}, "n": 2},
            {
                "prompt": ["a", "b"],
                "stream": True,
                "stream_options": {"include_usage": True},
                "logprobs": 2,
            },
            {
                "prompt": "a",
                "structured_outputs": {"regex": "[ab]+"},
                "bad_words": ["x"],
                "seed": 1,
            },
        ),
        FIELDS,
    ),
    "/v1/chat/completions": (
        (
            {"messages": HI, "max_tokens": 2},
            {"messages": HI, "response_format": FORMAT},
            {"messages": HI, "logprobs": True, "top_logprobs": 2, "stream": True, "timings": True},
        ),
        FIELDS,
    ),
    "/tokenize": (({"prompt": "hello"}, {"messages": HI}), TokenizeBody.__struct_fields__),
    "/detokenize": (({"tokens": [1, 2, 300]},), DetokenizeBody.__struct_fields__),
    "/v1/prefixes": (
        ({"prompt": "hello", "id": "a"}, {"messages": HI}),
        PrefixBody.__struct_fields__,
    ),
    "/v1/admin/config": (({"max_num_seqs": 4},), CHANGEABLE),
}
GRAMMARS: tuple[Any, ...] = (
    *({"regex": pattern} for pattern in PATTERNS),
    {"json": SCHEMA},
    {"choice": []},
    {"choice": ["a", 5]},
    {"grammar": "root ::= root"},
    {"json": {"$ref": "#"}},
    {"json": {"patternProperties": {"(": {}}}},
    {"json_object": True, "regex": "a"},
    {"regex": 5},
    {"json": "{"},
    {"structural_tag": {}},
)


def changed(value: Any, dice: Dice) -> bytes:
    """JSON with one to three of its places changed, doubled, gone, or its bytes damaged."""
    value = copy.deepcopy(value)
    for _ in range(dice.choice((0, 1, 1, 1, 2, 3))):
        found = places(value)
        container, key = dice.choice(found) if found else (None, None)
        kind = dice.choice(("value", "value", "value", "gone", "wrap"))
        if container is None or kind == "whole":
            value = nasty(dice)
        elif kind == "gone":
            container.pop(key)
        elif kind == "wrap":
            container[key] = dice.choice(
                ([container[key]], {"a": container[key]}, [container[key]] * 40)
            )
        else:
            container[key] = nasty(dice)
    return _as_bytes(value, dice)


def _as_bytes(value: Any, dice: Dice) -> bytes:
    raw = written(value)
    kind = dice.choice(
        (*["none"] * 12, "bytes", "bytes", "twice", "surrogate", "coding", "space", "deep", "whole")
    )
    if kind == "bytes":
        raw = damaged(raw, dice)[0]
    elif kind == "twice" and raw[:1] == b"{":
        raw = raw[:-1] + b"," + raw[1:]
    elif kind == "surrogate":
        raw = raw.replace(b'"', b'"\\ud800', dice.randint(1, 9))
    elif kind == "coding":
        raw = dice.choice(
            (b"\xef\xbb\xbf" + raw, raw.decode().encode("utf-16"), raw + b"\xff", raw + b"]")
        )
    elif kind == "space":
        raw = b" \n\t" * 2000 + raw
    elif kind == "deep":
        raw = dice.choice(DEEP).encode()
    elif kind == "whole":
        raw = written(nasty(dice))
    return raw


def body(path: str, dice: Dice) -> bytes:
    """A body of one of the ENDPOINTS."""
    bodies, fields = ENDPOINTS[path]
    value = copy.deepcopy(dice.choice(bodies))
    kind = dice.choice(("field", "field", "field", "field", "grammar", "place"))
    if kind == "field":
        value[dice.choice(fields)] = nasty(dice)
    elif kind == "grammar" and "max_tokens" in fields:
        value["structured_outputs"] = dice.choice(GRAMMARS)
    else:
        return changed(value, dice)
    return _as_bytes(value, dice)


HEADERS = (
    b"x-tenant",
    b"x-priority",
    b"x-deadline-ms",
    b"x-ttft-target-ms",
    b"x-tpot-target-ms",
    b"x-request-id",
)
VALUES = (
    b"",
    b"1",
    b"-1",
    b"1e400",
    b"9" * 400,
    b"nan",
    b"\xff",
    b"x" * 5000,
    b"0x1",
    b"true",
    b"1_0",
)
AT_ONCE = 20  # requests to one server


def json_body(dice: Dice) -> str:
    """What a server answers to such requests: never a bare 500."""

    async def case() -> str:
        async with whole_server.server() as (app, service):
            reason = ""
            for _ in range(AT_ONCE):
                path = dice.choice((*ENDPOINTS, "/v1/completions", "/v1/chat/completions"))
                raw = body(path, dice)
                headers = [(b"authorization", b"Bearer " + whole_server.ADMIN.encode())]
                if dice.random() < 0.2:
                    headers.append((dice.choice(HEADERS), dice.choice(VALUES)))
                try:
                    reason = check_answer(
                        await ask(app, "POST", path, raw, headers), broken=(503, 504)
                    )
                except Exception as error:
                    raise whole_server.Found(f"{path} {raw[:150]!r}: {error}") from error
                whole_server.check(
                    service.supervisor.epoch == 1, f"{path} {raw[:150]!r}: another engine"
                )
            return reason

    return whole_server.in_loop(case)
