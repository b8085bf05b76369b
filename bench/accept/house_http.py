"""Nothing lost, part two: 300 requests to this tree and to commit 8cc2ebe, compared byte by byte.

Owns what may differ between two answers to one request, and how a difference is told. Must not know what is
asked: house_requests.py and house_refusals.py.

Masked are the time of creation, the fingerprint of the build, `applied` of changed settings (whether the
engine had them when the page was written) and the values of `timings`. Events of several choices of one
stream come in an order that depends on the time of day: each choice's own order counts. Among others, how
much of a prompt was cached or computed again depends on the others, and is masked too.
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import house_base
from harness import Line
from house_base import Address, Side
from house_refusals import LONGEST_BODY, asks
from house_requests import ADMIN, FAKE, KEYS, MODEL, Ask

HEADERS = (
    "content-type",
    "retry-after",
    "www-authenticate",
    "cache-control",
    "allow",
    "x-request-id",
)
MASKS = (
    (rb'"created":\d+', b'"created":0'),
    (rb'"system_fingerprint":"[^"]*"', b'"system_fingerprint":""'),
    (rb'"applied":(true|false)', b'"applied":null'),
)
AMONG_OTHERS = (
    (rb'"cached_tokens":\d+', b'"cached_tokens":0'),
    (rb',"recomputed_tokens":\d+', b""),
)
AT_ONCE = 24  # requests under way when they are sent together
TOLD = 12  # differences that are shown
FLAGS = {
    MODEL: (),
    FAKE: (
        "--backend",
        "fake",
        "--developer",
        "--max-model-len",
        "500",
        "--kv-cache-memory",
        "128",
        "--max-num-seqs",
        "4",
        "--max-body-size",
        str(LONGEST_BODY),
        "--admin-key",
        ADMIN,
        "--api-key",
        ",".join(f"{name}:{key}" for name, key in KEYS.items()),
    ),
}
ENVIRONMENT = {MODEL: {}, FAKE: {"PAGETURNER_FAKE_VOCAB": "40000"}}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. headers: those of HEADERS that were there."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def send(address: Address, ask: Ask) -> Answer:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=300)
    try:
        connection.request(ask.method, ask.path, ask.body, {**ask.headers, "X-Request-Id": ask.id})
        answer = connection.getresponse()
        body = answer.read()
        given = {name: answer.getheader(name) for name in HEADERS}
        if (methods := given["allow"]) is not None:  # the server writes a set
            given["allow"] = ", ".join(sorted(methods.split(", ")))
        kept = tuple((name, value) for name, value in given.items() if value is not None)
        return Answer(answer.status, kept, body)
    finally:
        connection.close()


def masked(ask: Ask, body: bytes, among: bool = False) -> bytes:
    """The body without what must differ. among: it was asked while others were under way."""
    if ask.timed:
        body = _timeless(body)
    for pattern, instead in MASKS + (AMONG_OTHERS if among else ()):
        body = re.sub(pattern, instead, body)
    return _by_choice(body) if body.startswith(b"data: ") else body


def _timeless(body: bytes) -> bytes:
    """`timings` as the names of what they tell."""
    parts = body.split(b"\n\n") if body.startswith(b"data: ") else [body]
    for number, part in enumerate(parts):
        head, text = (b"data: ", part[6:]) if part.startswith(b"data: ") else (b"", part)
        if b'"timings"' in text:
            page = json.loads(text)
            page["timings"] = [sorted(choice) for choice in page["timings"]]
            parts[number] = head + json.dumps(page, separators=(",", ":")).encode()
    return b"\n\n".join(parts)


def _by_choice(stream: bytes) -> bytes:
    """The events of a stream, those of each choice together; what is of none keeps its place at the end."""

    def choice(event: bytes) -> int:
        try:
            return int(json.loads(event[6:])["choices"][0]["index"])
        except (ValueError, LookupError, TypeError):
            return 1 << 30

    return b"\n\n".join(sorted(stream.split(b"\n\n"), key=choice))


def difference(ask: Ask, base: Answer, ours: Answer, among: bool = False) -> str | None:
    """In words; None where the answers are equal."""
    if base.status != ours.status:
        return f"status {ours.status}, was {base.status}: {ours.body[:160]!r}"
    if base.headers != ours.headers:
        return f"headers {dict(ours.headers)}, were {dict(base.headers)}"
    then, now = masked(ask, base.body, among), masked(ask, ours.body, among)
    if then == now:
        return None
    place = next(
        (i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b),
        min(len(then), len(now)),
    )
    begin = max(0, place - 40)
    return f"byte {place}: ...{now[begin : place + 60]!r}, was ...{then[begin : place + 60]!r}"


def compared(
    what: str,
    these: Iterable[Ask],
    base: dict[int, Answer],
    ours: dict[int, Answer],
    among: bool = False,
) -> Line:
    """How many answers are equal, and which are not."""
    these = list(these)
    found = {ask: difference(ask, base[ask.number], ours[ask.number], among) for ask in these}
    wrong = {ask: text for ask, text in found.items() if text is not None}
    for ask, text in list(wrong.items())[:TOLD]:
        print(
            f"          {ask.id} {ask.method} {ask.path} {(ask.body or b'')[:100]!r}\n            {text}"
        )
    equal = len(these) - len(wrong)
    return Line(what, f"{equal} of {len(these)} equal", bool(these) and not wrong)


def answers(side: Side, every: list[Ask]) -> tuple[dict[int, Answer], dict[int, Answer]]:
    """What a side answers: one after the other, then again what can be asked among others, all at once."""
    alone: dict[int, Answer] = {}
    together: dict[int, Answer] = {}
    with ExitStack() as stack:
        at = {
            name: stack.enter_context(house_base.serving(side, *FLAGS[name], **ENVIRONMENT[name]))
            for name in (MODEL, FAKE)
        }
        for ask in every:
            alone[ask.number] = send(at[ask.server], ask)
        crowd = [ask for ask in every if ask.generates and not ask.alone and not ask.timed]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for ask, answer in zip(
                crowd, pool.map(lambda a: send(at[a.server], a), crowd), strict=True
            ):
                together[ask.number] = answer
    return alone, together


def lines(base: Side, ours: Side) -> Iterator[Line]:
    """Both sides asked the same; the crowd of ours beside what the other answered when it was alone."""
    every = asks()
    then, _ = answers(base, every)
    now, crowd = answers(ours, every)
    by_number = {ask.number: ask for ask in every}
    refused = [ask for ask in every if then[ask.number].status >= 400]
    answered = [ask for ask in every if then[ask.number].status < 400]
    yield compared(f"HTTP, {len(every)} requests: answers", answered, then, now)
    yield compared(f"HTTP, {len(every)} requests: errors", refused, then, now)
    what = f"HTTP, {AT_ONCE} at once: as when they were alone on the other side"
    yield compared(what, [by_number[number] for number in crowd], then, crowd, among=True)
