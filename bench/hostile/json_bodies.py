"""Bodies of requests made hostile: every field of every endpoint with what it should not have.

Owns the bodies and what is wrong with them. Every change follows from the dice.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hostile import whole_server
from hostile.binary import Dice, damaged
from hostile.hunter import Case, Hunter
from hostile.json_files import DEEP, PATTERNS, nasty, places, written
from hostile.whole_server import check
from pageturner.server.api.openapi.openapi import document

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1]}},
    "required": ["a"],
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


AT_ONCE = 20  # requests to one server


def cases(hunter: Hunter, dice: Dice) -> Iterator[Case]:
    """Cases of the hunter, others with damaged bytes, and hostile grammars."""
    for case in hunter.cases(dice.randrange(1 << 30), AT_ONCE):
        kind = dice.choice(("field", "field", "grammar", "place", "nasty"))
        if kind == "field" or not case.body:
            yield case
        elif kind == "grammar":
            asked = {"prompt": "a", "structured_outputs": dice.choice(GRAMMARS)}
            yield case._replace(path="/v1/completions", body=_as_bytes(asked, dice))
        else:
            honest = hunter.bodies[f"{case.method} {case.route}"]
            if kind == "nasty":
                honest = honest | {dice.choice([*honest]): nasty(dice)} if honest else nasty(dice)
            yield case._replace(body=changed(honest, dice))


def json_body(dice: Dice) -> str:
    """What a server answers to such requests: never a bare 500."""

    async def case() -> str:
        async with whole_server.server(keys=KEYS) as (app, service):
            for one in cases(hunter_of(service), dice):
                await judged(app, service, one)
        return "answered"

    return whole_server.in_loop(case)


# -- the judge ---------------------------------------------------------------------------------------------
KEYS = "a:key-of-a,b:key-of-b"
RESUMED = {
    "path": "/v1/completions",
    "body": json.dumps({"prompt": "hello", "stream": True, "max_tokens": 9}),
    "begun": {"fingerprint": "fake", "seed": 1, "created": 1},
}
HONEST = {"messages": [{"role": "user", "content": "hello"}], "documents": ["a"], **RESUMED}
LATER = (503, 504)  # from 500 on: it says that it cannot now, and why


def hunter_of(service: Any) -> Hunter:
    """The hunter of a whole server."""
    return Hunter(document(service.served(), True), HONEST)


async def judged(app: Any, service: Any, case: Case) -> None:
    """Found where the answer to a case is none that may be given."""
    key = whole_server.ADMIN if case.admin and case.path == "/v1/admin/config" else "key-of-a"
    headers = [(b"authorization", f"Bearer {key}".encode()), *case.headers]
    try:
        answer = await whole_server.ask(app, case.method, case.path, case.body, headers)
        said = bytes(answer.body)[:200]
        check(answer.ended, "an answer without an end")
        check(answer.status < 500 or answer.status in LATER, f"{answer.status}: {said!r}")
        check(answer.status < 400 or len(answer.body) < 4000, f"a long error: {said!r}")
        check(service.supervisor.epoch == 1, "another engine")
    except Exception as error:
        raise whole_server.Found(f"{case.name}: {error}") from error
