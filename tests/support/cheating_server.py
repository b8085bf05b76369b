"""A small server of completions that keeps what bench/prove.py asks for, or breaks it as it is told.

    python cheating_server.py PORT [batch] [stalls] [forgets] [silent] [--weights NAME --noise N]

batch: answers depend on how many are asked at once; stalls: a long prompt holds up everybody; forgets: no prefix
is found again; silent: no logprobs. Its model draws the next word from the last one.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = [f" w{number}" for number in range(12)]
STATE: dict[str, Any] = {"asked": 0, "prompts": []}
LOCK = threading.Lock()


def draw(*what: Any) -> float:
    """A number between 0 and 1 that depends on nothing else."""
    return int.from_bytes(hashlib.md5(repr(what).encode()).digest()[:6], "little") / 2**48


def logprobs(last: str, options: argparse.Namespace) -> dict[str, float]:
    crowd = "batch" in options.cheats and STATE["asked"]
    scores = {
        word: 4 * draw(last, word) + options.noise * draw(options.weights, crowd, last, word)
        for word in WORDS
    }
    total = math.log(sum(map(math.exp, scores.values())))
    return {word: score - total for word, score in scores.items()}


class Handler(BaseHTTPRequestHandler):
    options: argparse.Namespace

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(json.dumps({"data": [{"id": "fake"}]}))

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = re.findall(r" ?\S+", body["prompt"])
        if body.get("echo"):
            self.reply(json.dumps({"choices": [{"logprobs": self.echo(prompt)}]}))
            return
        with LOCK:
            STATE["asked"] += 1
            if "stalls" in self.options.cheats and len(prompt) > 1000:
                time.sleep(1.5)
        try:
            self.send_response(200)
            self.end_headers()
            for event in self.events(prompt, body):
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                time.sleep(0.002)
            self.wfile.write(b"data: [DONE]\n\n")
        finally:
            with LOCK:
                STATE["asked"] -= 1

    def echo(self, words: list[str]) -> dict[str, Any]:
        tops = [logprobs(last, self.options) for last in words[:-1]]
        return {
            "tokens": words,
            "text_offset": [0, *itertools.accumulate(map(len, words[:-1]))],
            "token_logprobs": [
                None,
                *(top.get(word, -9.0) for top, word in zip(tops, words[1:], strict=True)),
            ],
            "top_logprobs": [None, *tops],
        }

    def events(self, words: list[str], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        cached = 0
        for other in STATE["prompts"] if "forgets" not in self.options.cheats else ():
            same = itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(words, other, strict=False)
            )
            cached = max(cached, sum(1 for _ in same))
        STATE["prompts"].append(words)
        last = words[-1]
        for place in range(body["max_tokens"]):
            with LOCK:
                scores = logprobs(last, self.options)
            drawn = {word: draw(body.get("seed"), place, word) for word in WORDS}
            noise = {word: -math.log(-math.log(one)) for word, one in drawn.items()}
            heated = {word: scores[word] + body["temperature"] * noise[word] for word in WORDS}
            last = max(heated, key=heated.__getitem__)
            told = {"tokens": [last], "token_logprobs": [scores[last]]}
            if "silent" in self.options.cheats:
                told = {}
            yield {"choices": [{"text": last, "logprobs": told, "finish_reason": None}]}
        details = {"cached_tokens": cached}
        yield {"usage": {"prompt_tokens": len(words), "prompt_tokens_details": details}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("cheats", nargs="*")
    parser.add_argument("--weights", default="honest")
    parser.add_argument("--noise", type=float, default=1.0)
    Handler.options = parser.parse_args()
    ThreadingHTTPServer(("127.0.0.1", Handler.options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
