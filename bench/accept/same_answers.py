"""Nothing lost over HTTP: recorded requests to two sides, whose answers are compared byte by byte.

Owns how a request is sent, what may differ between two answers, and how a difference is shown. The requests
are data: bench/data/recorded_requests.jsonl. Every request gives its seed or is greedy, and gives its id, so
that nothing is drawn.

The time of creation, the fingerprint of the build, `applied` of changed settings (whether the engine had them
when the page was written) and the values of `timings` are masked. Events of the choices of one stream come in
an order that depends on the time of day, so the order within each choice counts. When requests run together,
how much of a prompt was cached or computed again depends on the others, and is masked too.
"""

from __future__ import annotations

import http.client
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import same_steps
import sides
from harness import ROOT, Line
from sides import Address, Side

REQUESTS = ROOT / "bench" / "data" / "recorded_requests.jsonl"
# Two servers: SmolLM2; and the fake engine with keys, small limits and the fields of developers.
MODEL, FAKE = "model", "fake"
ADMIN = "admin-key"
FAKE_FLAGS = (
    "--backend fake --developer --max-model-len 500 --kv-cache-memory 128 --max-num-seqs 4"
    f" --max-body-size 20000 --admin-key {ADMIN} --api-key red:red-key,blue:blue-key"
)
FLAGS = {MODEL: [], FAKE: FAKE_FLAGS.split()}
ENVIRONMENT = {MODEL: {}, FAKE: {"PAGETURNER_FAKE_VOCAB": "40000"}}
HEADERS = [
    "content-type",
    "retry-after",
    "www-authenticate",
    "cache-control",
    "allow",
    "x-request-id",
]
MASKS = (
    (rb'"created":\d+', b'"created":0'),
    (rb'"system_fingerprint":"[^"]*"', b'"system_fingerprint":""'),
    (rb'"applied":(true|false)', b'"applied":null'),
)
TOGETHER = (
    (rb'"cached_tokens":\d+', b'"cached_tokens":0'),
    (rb',"recomputed_tokens":\d+', b""),
)
MAX_TOGETHER = 24  # requests under way when they are sent together
MAX_SHOWN = 12  # differences that are printed


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One HTTP request. timed: its answer holds times, of which only the names are compared. alone: its answer
    depends on what was asked before it, so it is never sent together with others."""

    number: int
    server: str
    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    timed: bool = False
    alone: bool = False

    @property
    def id(self) -> str:
        return f"house-{self.number:03}"

    @property
    def generates(self) -> bool:
        return self.path.endswith("completions")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. headers: those of HEADERS that were there."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def asks() -> list[Ask]:
    """The recorded requests, in the order in which they are sent."""
    rows = map(json.loads, REQUESTS.read_text().splitlines())
    return [Ask(number, body=_body(row), **row) for number, row in enumerate(rows, 1)]


def _body(row: dict[str, Any]) -> bytes | None:
    """Take the body out of a row: `json`, `latin1` for what is no JSON, or `repeat`: (text, times)."""
    if "json" in row:
        return json.dumps(row.pop("json")).encode()
    if "repeat" in row:
        text, times = row.pop("repeat")
        return bytes(text.encode() * times)
    raw = row.pop("latin1", None)
    return None if raw is None else raw.encode("latin-1")


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


def masked(ask: Ask, body: bytes, together: bool = False) -> bytes:
    """The body without what must differ. together: it was asked while others were under way."""
    body = body.replace(b": keep-alive\n\n", b"")
    if ask.timed:
        body = _without_times(body)
    for pattern, instead in MASKS + (TOGETHER if together else ()):
        body = re.sub(pattern, instead, body)
    return _by_choice(body) if body.startswith(b"data: ") else body


def _without_times(body: bytes) -> bytes:
    """The body with the names of `timings` in place of their values."""
    parts = body.split(b"\n\n") if body.startswith(b"data: ") else [body]
    for number, part in enumerate(parts):
        text = part.removeprefix(b"data: ")
        if b'"timings"' in text:
            page = json.loads(text)
            page["timings"] = [sorted(choice) for choice in page["timings"]]
            head = part[: len(part) - len(text)]
            parts[number] = head + json.dumps(page, separators=(",", ":")).encode()
    return b"\n\n".join(parts)


def _by_choice(stream: bytes) -> bytes:
    """The events of a stream, sorted by choice; what belongs to no choice keeps its place at the end."""

    def choice(event: bytes) -> int:
        try:
            return int(json.loads(event[6:])["choices"][0]["index"])
        except (ValueError, LookupError, TypeError):
            return 1 << 30

    return b"\n\n".join(sorted(stream.split(b"\n\n"), key=choice))


def difference(ask: Ask, base: Answer, ours: Answer, together: bool = False) -> str | None:
    """The difference in words; None where the answers are equal."""
    if base.status != ours.status:
        return f"status {ours.status}, was {base.status}: {ours.body[:160]!r}"
    if base.headers != ours.headers:
        return f"headers {dict(ours.headers)}, were {dict(base.headers)}"
    then, now = masked(ask, base.body, together), masked(ask, ours.body, together)
    if then == now:
        return None
    pairs = enumerate(zip(then, now, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(then), len(now)))
    begin = max(0, place - 40)
    return f"byte {place}: ...{now[begin : place + 60]!r}, was ...{then[begin : place + 60]!r}"


Answers = dict[int, Answer]


def compared(what: str, sent: Iterable[Ask], pair: tuple[Answers, Answers], **how: bool) -> Line:
    """How many answers of a pair (base, ours) are equal, and which are not."""
    sent = list(sent)
    found = {ask: difference(ask, *(side[ask.number] for side in pair), **how) for ask in sent}
    wrong = {ask: text for ask, text in found.items() if text is not None}
    for ask, text in list(wrong.items())[:MAX_SHOWN]:
        body = (ask.body or b"")[:100]
        print(f"          {ask.id} {ask.method} {ask.path} {body!r}\n            {text}")
    equal = len(sent) - len(wrong)
    return Line(what, f"{equal} of {len(sent)} equal", bool(sent) and not wrong)


def answers(side: Side, every: list[Ask], log: Path) -> tuple[Answers, Answers]:
    """The answers of a side: to one request after the other, then once more to those that can run together.
    log: where the server with the model writes its steps."""
    logged = {MODEL: ["--step-log", str(log), "--step-log-tokens"], FAKE: []}
    with ExitStack() as stack:
        at = {}
        for name, flags in FLAGS.items():
            server = sides.serving(side, *flags, *logged[name], **ENVIRONMENT[name])
            at[name] = stack.enter_context(server)
        alone = {ask.number: send(at[ask.server], ask) for ask in every}
        crowd = [ask for ask in every if ask.generates and not ask.alone and not ask.timed]
        with ThreadPoolExecutor(MAX_TOGETHER) as pool:
            sent = pool.map(lambda ask: send(at[ask.server], ask), crowd)
            together = {ask.number: answer for ask, answer in zip(crowd, sent, strict=True)}
    return alone, together


def lines(base: Side, ours: Side) -> Iterator[Line]:
    """Both sides get the same requests; what we answer in a crowd is compared with what the base answered
    alone."""
    every = asks()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{side.name}.steps" for side in (base, ours)]
        then, _ = answers(base, every, logs[0])
        now, crowd = answers(ours, every, logs[1])
        log = logs[0].read_bytes()
    refused = [ask for ask in every if then[ask.number].status >= 400]
    answered = [ask for ask in every if then[ask.number].status < 400]
    pair = (then, now)
    yield compared(f"HTTP, {len(every)} requests: answers byte-equal", answered, pair)
    yield compared(f"HTTP, {len(every)} requests: errors byte-equal", refused, pair)
    what = f"HTTP, {MAX_TOGETHER} at once: as they were alone"
    together = [ask for ask in every if ask.number in crowd]
    yield compared(what, together, (then, crowd), together=True)
    plans, tokens = same_steps.replayed("log", log, "--plans"), same_steps.answered("log", log)
    yield same_steps.judged("HTTP, the base's steps: plans replay", [plans])
    yield same_steps.judged("HTTP, the base's steps: tokens come again", [tokens])
