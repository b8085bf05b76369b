"""Requests that clients of other servers send, each against a started server: the cases of `cases/api.jsonl` and
`cases/suites.jsonl` (`--api-cases`, or PAGETURNER_CASES: the folder), judged by a table of checks, in counts by kind.

A case without an entry in CHECKS must be answered with 200.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE)]

import harness  # noqa: E402
from harness import Line, NotRun  # noqa: E402

COMMON = "smollm2 --tool-call-parser hermes --developer"
THINKS = f"{COMMON} --reasoning-parser think"
LIVES = 5.0  # seconds until the head of a stream is there
BOM = b"\xef\xbb\xbf"
# what Java's client sends with its first request
H2C = {
    "Connection": "Upgrade, HTTP2-Settings",
    "Upgrade": "h2c",
    "HTTP2-Settings": "AAEAAEAAAAIAAAAA",
}


@dataclass(slots=True)
class Answer:
    """seconds: until its head was there. head: names in small letters."""

    status: int
    head: dict[str, str]
    text: str
    seconds: float = 0.0
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def choice(self) -> Any:
        return self.json["choices"][0]

    @property
    def said(self) -> str:
        """The content of a chat, or the text of a completion."""
        return (
            self.choice.get("message", {}).get("content") or self.choice.get("text") or ""
        ).strip()


def ask(port: int, request: dict[str, Any]) -> Answer:
    """Send a case's request."""
    body, headers = request.get("body"), dict(request.get("headers") or {})
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    version = headers.pop("(version)", "HTTP/1.1")
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    link._http_vsn_str = version  # type: ignore[attr-defined]
    begin = time.monotonic()
    link.request(
        request["method"],
        request["path"],
        raw or None,
        {"Content-Type": "application/json", **headers},
    )
    got = link.getresponse()
    seconds = time.monotonic() - begin
    text = got.read().decode("utf-8", "replace")
    link.close()
    return Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, text, seconds, request)


# -- checks ------------------------------------------------------------------------------------------------------
def _lines(answer: Answer) -> bool:
    return answer.status == 200 and all(json.loads(line) for line in answer.text.splitlines())


def _whole_calls(answer: Answer) -> bool:
    calls = answer.choice["message"].get("tool_calls") or ()
    whole = all(json.loads(call["function"]["arguments"]) for call in calls)
    return bool(calls) and whole and answer.choice["finish_reason"] == "tool_calls"


def _distinct(answer: Answer) -> bool:
    told = answer.choice["logprobs"]
    entries = zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
    return all(top[token] == value for token, value, top in entries)


def _held_to(text: str) -> Callable[[Answer], bool]:
    return lambda a: a.status == 200 and text.startswith(re.sub(r"\s", "", a.said)) and bool(a.said)


def _details(answer: Answer) -> bool:
    one = answer.json.get("models", [answer.json])[0]
    return all(
        one["details"][name]
        for name in ("family", "format", "families", "parameter_size", "quantization_level")
    )


def _refused(*words: str) -> Callable[[Answer], bool]:
    return lambda a: a.status == 400 and all(word in a.text for word in words)


def _blocks(answer: Answer) -> bool:
    blocks = answer.json["content"]
    kinds = [one["type"] for one in blocks]
    return kinds == ["thinking", "text"] and blocks[1]["text"].strip() == "The answer is 4."


def _alive(answer: Answer) -> bool:
    return answer.status == 200 and answer.seconds < LIVES


CHECKS: dict[str, Callable[[Answer], bool]] = {
    "http10-stream": lambda a: a.status == 200 and "transfer-encoding" not in a.head,
    "stop-reasoning-chat": lambda a: (
        a.said == "The answer is 4." and "4." in a.choice["message"]["reasoning"]
    ),
    "stop-reasoning-messages": _blocks,
    "stop-reasoning-token-id": lambda a: a.said.startswith("The answer is 4."),
    "linesep-ollama-2028": _lines,
    "linesep-ollama-2029": _lines,
    "linesep-ollama-0085": _lines,
    "sse-keepalive-chat": lambda a: _alive(a) and "\n:" in f"\n{a.text}",
    "sse-keepalive-ollama": _alive,
    "x-accel-buffering": lambda a: a.head.get("x-accel-buffering") == "no",
    "json_object-schema": _held_to('{"zz":"qq"}'),
    "json_object-schema-chat": _held_to('{"zz":"qq"}'),
    "resp-format-hint": lambda a: (
        a.status == 400 and '\\"name\\": ...' in a.text and '{\\"name' not in a.text
    ),
    "rf-oneOf-overlap": lambda a: a.status == 200 or "coerce_one_of" not in a.text,
    "oneof-message": lambda a: a.status == 200 or "coerce_one_of" not in a.text,
    "stop-in-args": _whole_calls,
    "cut-before-args": lambda a: a.choice["message"]["content"] is None,
    "cut-call-mark-leaks": lambda a: not a.choice["message"]["content"],
    "stop-token-include": lambda a: a.said == "a b",
    "special-in-user": lambda a: a.json["tokens"].count(1) == 3 and a.json["tokens"].count(2) == 2,
    "completions-logprob-collision": _distinct,
    "ollama-version": lambda a: tuple(map(int, a.json["version"].split("."))) >= (0, 6, 4),
    "ollama-show-keys": lambda a: (
        _details(a) and a.json["model_info"]["general.architecture"] == "llama"
    ),
    "ollama-details-empty": lambda a: _details(a) and len(a.json["models"][0]["digest"]) == 64,
    "cors-pna": lambda a: (
        a.status in (200, 204) and a.head.get("access-control-allow-private-network") == "true"
    ),
    "json-object-schema-dropped": lambda a: a.said == '"blue"',
    "chat-prompt-token-ids-place": lambda a: (
        a.json["prompt_token_ids"] == a.choice["prompt_token_ids"]
    ),
    "truncation-side-ignored": lambda a: a.choice["prompt_token_ids"] == [10, 11],
    "gbnf-u-escapes": lambda a: a.said == "A",
    "date-feb-29": lambda a: a.status == 400 or "2021-02-29" not in a.said,
    "valid-schemas-called-invalid": lambda a: a.status == 200 or "unsupported_schema" in a.text,
    "return-tokens-as-token-ids-ignored": lambda a: a.choice["logprobs"]["tokens"][0].startswith(
        "token_id:"
    ),
    "include-reasoning-ignored": lambda a: (
        a.status == 200 and not {"reasoning", "reasoning_content"} & {*a.choice["message"]}
    ),
    "stream-options-without-stream": _refused("stream"),
    "message-without-content": _refused("messages[0].content"),
    "embed-dtype-ignored": lambda a: (
        len(base64.b64decode(a.json["data"][0]["embedding"])) == 2 * 576
    ),
    "llamacpp-native-missing": lambda a: (
        a.status == 404
    ),  # the documents say so; /tokenize, /models ... are there
    "grammar-field-refused": lambda a: a.said == "aaa",
    "tei-rerank": lambda a: {*a.json[0]} == {"index", "score"},
    "ollama-logprobs": lambda a: len(a.json["logprobs"]) == 2,
    "ollama-context-missing": lambda a: bool(a.json["context"]) and a.json["load_duration"] > 0,
    "logit-bias-key-not-named": _refused("abc"),
    "metric-num-preemptions": lambda a: "vllm:request_num_preemptions_bucket" in a.text,
}


# -- cases -------------------------------------------------------------------------------------------------------
def prepared(case: dict[str, Any], port: int) -> dict[str, Any]:
    """The request as it is sent: what the cases only describe is put in."""
    request, id = dict(case["request"]), case["id"]
    if id == "h2c-jdk":
        request["headers"] = H2C
    elif id == "body-bom":
        request["body"] = BOM + b'{"prompt":"a","max_tokens":1}'
    elif id == "include-reasoning-ignored":
        text = {"prompt": "<think>hm</think>yes", "add_special_tokens": False}
        tokens = ask(port, {"method": "POST", "path": "/tokenize", "body": text}).json["tokens"]
        request["body"] = {**request["body"], "force_ids": tokens, "max_tokens": len(tokens)}
    elif found := re.search(r'"\((\d+) tokens\)"', json.dumps(request)):
        text = json.dumps(request).replace(found[0], json.dumps("word " * int(found[1])))
        request = json.loads(text)
    return request


def batch_with_mark(port: int) -> bool:
    """A batch whose file begins with a byte order mark: each line is answered."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    form = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\nContent-Disposition:'
    form += (
        b' form-data; name="file"; filename="f"\r\n\r\n'
        + BOM
        + json.dumps(line).encode()
        + b"\n\r\n--x--\r\n"
    )
    head = {"Content-Type": "multipart/form-data; boundary=x"}
    file = ask(port, {"method": "POST", "path": "/v1/files", "body": form, "headers": head}).json[
        "id"
    ]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = ask(port, {"method": "POST", "path": "/v1/batches", "body": asked}).json
    until = time.monotonic() + 120
    while batch["status"] not in ("completed", "failed", "expired") and time.monotonic() < until:
        time.sleep(0.5)
        batch = ask(port, {"method": "GET", "path": f"/v1/batches/{batch['id']}"}).json
    return bool(batch["request_counts"]["completed"] == 1)


def holds(case: dict[str, Any], port: int) -> bool:
    """Whether a case is answered as it should be."""
    if case["id"] == "batch-bom":
        return batch_with_mark(port)
    answer = ask(port, prepared(case, port))
    try:
        return CHECKS.get(case["id"], lambda a: a.status == 200)(answer)
    except (KeyError, TypeError, ValueError, IndexError):
        return False


def server_of(case: dict[str, Any]) -> str:
    """The flags of the server that a case is for."""
    # these are histories, which any model reads alike
    flags = case["server_flags"].removeprefix("serve ").replace("qwen2.5-coder-0.5b", "smollm2")
    if "--reasoning-parser" in flags:
        return THINKS
    return COMMON if flags in ("smollm2", "smollm2 --tool-call-parser hermes") else str(flags)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usual = os.environ.get("PAGETURNER_CASES")
    parser.add_argument("--api-cases", type=Path, default=usual, help="the folder cases/")


def lines(options: argparse.Namespace) -> Iterator[Line]:
    if options.api_cases is None:
        raise NotRun("no cases: name their folder with --api-cases")
    cases, by_server = [], defaultdict(list)
    for name in ("api", "suites"):
        for text in (options.api_cases / f"{name}.jsonl").read_text().strip().split("\n"):
            cases.append({"kind": name, **json.loads(text)})
    for case in cases:
        by_server[server_of(case)].append(case)
    kinds: dict[str, list[str]] = defaultdict(list)
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for flags, those in by_server.items():
            model, *words = flags.replace("DIR", folder).split()
            with harness.server(*words, model=model, wait=180) as one:
                port = int(one.url.rsplit(":", 1)[1])
                for case in those:
                    try:
                        good = holds(case, port)
                    except (OSError, http.client.HTTPException):
                        good = False
                    kinds[case["kind"].split("/")[0]].append("" if good else case["id"])
                    wrong += [] if good else [case["id"]]
    for kind, found in sorted(kinds.items()):
        bad = [id for id in found if id]
        figure = f"{len(found) - len(bad)} of {len(found)} {' '.join(bad)}"
        yield Line(f"cases of {kind}", figure.strip(), not bad)
    total = sum(map(len, kinds.values()))
    yield Line("all cases", f"{total - len(wrong)} of {total}", not wrong)


if __name__ == "__main__":
    sys.exit(harness.main("bring_api", __doc__, {"api": harness.Part(lines, add_arguments)}))
