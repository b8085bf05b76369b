"""What is asked in the chaos, in every dialect and with every decoding method, and what of an answer must
never change. Calls, thoughts and the shapes that are not OpenAI's first are in dialect_jobs.py. Must not know
what goes wrong meanwhile.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dialect_jobs
from dialect_jobs import FORM, PLACES, Ask

PINNED = "A story about"  # the beginning of every completion, kept in memory by a prefix
TOKENS = 40
DATA = json.loads(Path(__file__).with_name("chaos_methods.json").read_text())
# What an answer may be asked for, beside its prompt; and what in completions only.
METHODS: dict[str, dict[str, Any]] = DATA["methods"] | {
    "long bias": {"temperature": 0.6, "logit_bias": {str(i): -1 - i % 3 for i in range(300, 900)}},
    "allowed": {"temperature": 0.8, "allowed_token_ids": list(range(300, 1500))},
    "schema": {"temperature": 0.7, "response_format": FORM},
}
PROMPTS: dict[str, dict[str, Any]] = DATA["prompts"]
NOT_STREAMED = ("beams", "more beams", "best_of")
RETRYABLE = (429, 502, 503)  # as clients do; 502: two replicas in a row were lost
ENDS = ("completed", "failed", "expired", "cancelled")
BATCH_SECONDS = 3600.0  # batches get what others leave: some end only behind the chaos
BATCHES, LINES = "/v1/batches", 12
KEPT = ("logprobs", "prompt_logprobs", "use_beam_search", "receipt", "best_of", "echo")
PAUSE = 0.25  # seconds between two tries of what was refused


@dataclass(slots=True)
class Job:
    """One request and what it answers when nothing is disturbed. exact: it is of dialect_jobs.py."""

    name: str
    path: str
    body: dict[str, Any]
    truth: str = ""
    exact: Ask | None = None

    @property
    def routed(self) -> bool:
        """Whether a router passes it on."""
        return self.path not in (dialect_jobs.RESPONSES, BATCHES)

    @property
    def stays(self) -> bool:
        """Tell whether no other replica can go on with its stream (docs/api.md, Router)."""
        several = self.body.get("n", 1) > 1 or isinstance(self.body.get("prompt"), list)
        return several or any(name in self.body for name in KEPT)

    def use(self, adapter: str) -> None:
        """Ask an adapter instead of the model itself."""
        self.name = f"{self.name}, {adapter}"
        for body in [line["body"] for line in self.body.get("lines", ())] or [self.body]:
            body["model"] = adapter


@dataclass(slots=True)
class Answered:
    """Return what must not change; how often it was refused before, in a way that may be tried again, and how often
    its replica was lost whose stream no other can go on with. late: it had not come when patience ended."""

    text: str
    refused: int = 0
    cut: int = 0
    late: bool = False


def jobs() -> list[Job]:
    """Every method in both dialects, one of them streamed and the other whole."""
    found = []
    for number, (name, fields) in enumerate((METHODS | PROMPTS).items()):
        place = PLACES[number % len(PLACES)]
        base = {"seed": number, "max_tokens": TOKENS} | fields
        streamed = bool(number % 2) and name not in NOT_STREAMED
        completion = {"prompt": f"{PINNED} {place}. Once"} | base | {"stream": streamed}
        found.append(Job(f"{name}, completion", "/v1/completions", _whole(completion)))
        if name in PROMPTS:
            continue
        talk = [{"role": "user", "content": f"Tell me of {place}."}]
        chat = base | {"messages": talk, "stream": not streamed and name not in NOT_STREAMED}
        if name == "logprobs":
            chat |= {"logprobs": True, "top_logprobs": 3}
        found.append(Job(f"{name}, chat", "/v1/chat/completions", _whole(chat)))
    text = "It was the best of times, it was the worst of times. " * 400
    found.append(Job("tokenize", "/tokenize", {"prompt": text}))
    found.append(Job("detokenize", "/detokenize", {"tokens": list(range(100, 3000))}))
    return found


def dialects(url: str) -> list[Job]:
    """Every method of the other shapes, and calls and thoughts in chats, some streamed and some whole."""
    found = []
    for number, one in enumerate(dialect_jobs.asks(dialect_jobs.marks(url), tokens=TOKENS)):
        plain = number % 3 == 2 or one.body.get("n", 1) > 1
        found.append(dialect_jobs.in_one_piece(one) if plain else dialect_jobs.as_stream(one))
        if one.path == dialect_jobs.RESPONSES:
            found.append(dialect_jobs.in_background(one))
    return [Job(one.name, one.path, one.body, exact=one) for one in (*found, *dialect_jobs.rows())]


def _whole(body: dict[str, Any]) -> dict[str, Any]:
    if not body["stream"]:
        body.pop("stream_options", None)
    return body


def ask(url: str, job: Job) -> Answered:
    """Everything of the answer that must never change, as one text. What is refused for the moment, before
    anything of it was said, is asked again, as every client should."""
    until, refused, cut = time.monotonic() + dialect_jobs.PATIENCE, 0, 0
    while True:
        try:
            status, data = _answer(url, job)
        except (OSError, http.client.HTTPException) as error:
            late = isinstance(error, TimeoutError)
            return Answered(f"broken: {error!r}", refused, cut, late)
        lost = status == 200 and job.stays and b"replica_lost" in data
        if (status not in RETRYABLE and not lost) or time.monotonic() > until:
            break
        refused += not lost
        cut += lost
        time.sleep(PAUSE)
    if status != 200:
        return Answered(f"status {status}: {data[:300]!r}", refused, cut, status in RETRYABLE)
    background = job.exact is not None and job.exact.background
    late = background and json.loads(data)["status"] in dialect_jobs.UNDER_WAY
    return Answered(_same(job, data), refused, cut, late)


def _answer(url: str, job: Job) -> tuple[int, bytes]:
    if job.path == BATCHES:
        return 200, _batch(url, job.body["lines"])
    if job.exact is not None:
        return dialect_jobs.whole_answer(url, job.exact)
    return post(url, job)


def _same(job: Job, data: bytes) -> str:
    if job.exact is not None:
        same = dialect_jobs.same_bytes(data, ids=False).decode()
        return f"error: {same}" if '"error":{' in same else json.dumps([same])
    return _streamed(data) if job.body.get("stream") else _in_one_piece(data)


# -- batches -------------------------------------------------------------------------------------------------
def batches(every: list[Job]) -> list[Job]:
    """Chats and completions that are not streamed, as lines of files."""
    paths = ("/v1/completions", dialect_jobs.CHAT)
    return [
        Job(
            f"a batch of {path}",
            BATCHES,
            {"lines": _lines([job for job in every if job.path == path])},
        )
        for path in paths
    ]


def _lines(jobs: list[Job]) -> list[dict[str, Any]]:
    whole = [job.body for job in jobs if not job.body.get("stream")]
    return [
        {"custom_id": str(number), "method": "POST", "url": jobs[0].path, "body": dict(body)}
        for number, body in enumerate(body for body in whole if "deadline_ms" not in body)
    ][:LINES]


def call(url: str, method: str = "GET", body: bytes = b"", kind: str = "application/json") -> bytes:
    request = urllib.request.Request(url, body or None, {"Content-Type": kind}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def _made(url: str, body: bytes, kind: str = "application/json") -> str:
    """The id of what a server makes of a body."""
    return str(json.loads(call(url, "POST", body, kind))["id"])


def _ended(url: str) -> dict[str, Any]:
    """A batch that will not go on any more."""
    until = time.monotonic() + BATCH_SECONDS
    while (told := json.loads(call(url)))["status"] not in ENDS:
        if time.monotonic() > until:
            raise TimeoutError(f"the batch is still {told['status']}: {told['request_counts']}")
        time.sleep(0.2)
    return dict(told)


def _batch(url: str, lines: list[dict[str, Any]]) -> bytes:
    """The answers of a batch in the order of its lines; files and batch are removed behind it."""
    files = f"{url}/v1/files"
    content = b"\n".join(json.dumps(line).encode() for line in lines)
    head = b"--x\r\nContent-Disposition: form-data; name="
    form = head + b'"purpose"\r\n\r\nbatch\r\n' + head + b'"file"; filename="in.jsonl"\r\n\r\n'
    file = _made(files, form + content + b"\r\n--x--\r\n", "multipart/form-data; boundary=x")
    wanted = {"input_file_id": file, "endpoint": lines[0]["url"], "completion_window": "24h"}
    told = _ended(f"{url}{BATCHES}/{_made(f'{url}{BATCHES}', json.dumps(wanted).encode())}")
    found: dict[str, Any] = {}
    for kind in ("output_file_id", "error_file_id"):
        if told.get(kind):
            for raw in call(f"{files}/{told[kind]}/content").splitlines():
                line = json.loads(raw)
                answer = line.get("response") or {}
                good = answer.get("status_code") == 200
                found[line["custom_id"]] = (
                    _in_one_piece(json.dumps(answer["body"]).encode()) if good else line
                )
            call(f"{files}/{told[kind]}", "DELETE")
    call(f"{files}/{file}", "DELETE")
    return json.dumps([found.get(line["custom_id"]) for line in lines]).encode()


def post(url: str, job: Job) -> tuple[int, bytes]:
    return dialect_jobs.send(url, Ask(job.name, job.path, job.body))


def _in_one_piece(data: bytes) -> str:
    answer = json.loads(data)
    if isinstance(answer, list) or "choices" not in answer:
        return json.dumps(answer)
    said = [_parts(choice) for choice in answer["choices"]]
    return json.dumps([said, answer.get("prompt_logprobs"), _counted(answer), _sealed(answer)])


def _streamed(data: bytes) -> str:
    """Every chunk of every choice, in order: so that nothing can be lost or repeated unseen."""
    said: dict[int, list[Any]] = {}
    rest: list[Any] = []
    events = data.split(b"\n\n")
    for line in events:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return f"error: {event['error']}"
        for choice in event["choices"]:
            said.setdefault(choice["index"], []).append(_parts(choice))
        rest.append((event.get("prompt_logprobs"), _counted(event), _sealed(event)))
    ends = sum(line == b"data: [DONE]" for line in events)
    return json.dumps([sorted(said.items()), [one for one in rest if any(one)], ends])


def _parts(choice: dict[str, Any]) -> list[Any]:
    message = choice.get("message") or choice.get("delta") or {}
    names = ("text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs")
    return [message.get("content"), *(choice.get(name) for name in names)]


def _counted(answer: dict[str, Any]) -> list[int] | None:
    """What was cached or computed twice may differ; how much was said may not."""
    usage = answer.get("usage")
    return usage and [usage["prompt_tokens"], usage["completion_tokens"]]


def _sealed(answer: dict[str, Any]) -> Any:
    """What a receipt says of an answer, without what is of this one time."""
    receipt = answer.get("receipt")
    return receipt and [receipt[name] for name in ("model_hash", "params", "prompts", "choices")]
