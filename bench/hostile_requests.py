"""A catalogue of hostile requests, by kinds: what a stranger may send to a server on purpose, and what no single
field does (hostile/hunter.py makes those that one field does).

Owns what is sent, and how it is sent. Each kind draws its sizes and its shape from a seed, so that limits are
not tuned to a list. Must not know how the harm is measured (accept/trust_hostile.py). Standard library only.
Everything goes to the given loopback address, and no single request has more than MAX_BYTES.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 4 * 1024 * 1024
VOCABULARY = 49152  # of the model that is attacked
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """status of the answer, 0 where none came before the attacker left; size: bytes that were sent."""

    status: int
    size: int
    start: bytes = b""


@dataclass(frozen=True, slots=True)
class Attack:
    """One hostile request. act(host, port, patience) sends it, and leaves after so many seconds."""

    kind: str
    name: str
    act: Callable[[str, int, float], Outcome]


# -- how something is sent -----------------------------------------------------------------------------------


def raw(parts: list[bytes], pause: float = 0.0) -> Callable[[str, int, float], Outcome]:
    """Bytes as they are, with a pause between the parts."""

    def act(host: str, port: int, patience: float) -> Outcome:
        until, sent, answer = time.monotonic() + patience, 0, b""
        with socket.create_connection((host, port), timeout=patience) as sock:
            try:
                for part in parts:
                    sock.sendall(part)
                    sent += len(part)
                    time.sleep(pause)
                while (
                    time.monotonic() < until and b"\r\n\r\n" not in answer and len(answer) < 65536
                ):
                    sock.settimeout(max(0.01, until - time.monotonic()))
                    more = sock.recv(65536)
                    if not more:
                        break
                    answer += more
                if b"\r\n\r\n" in answer:  # a little of the body, to be shown
                    sock.settimeout(0.2)
                    answer += sock.recv(4096)
            except OSError:
                pass
        status = answer[9:12]
        return Outcome(int(status) if status.isdigit() else 0, sent, answer[:2000])

    return act


def post(path: str, content: bytes, more: bytes = b"") -> Callable[[str, int, float], Outcome]:
    """A request with a body."""
    head = (
        b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" % path.encode()
    )
    return raw([head + more + b"Content-Length: %d\r\n\r\n" % len(content), content])


def as_json(path: str, fields: Body) -> Callable[[str, int, float], Outcome]:
    return post(path, json.dumps(fields).encode())


def completion(**fields: Any) -> Callable[[str, int, float], Outcome]:
    return as_json("/v1/completions", {"prompt": "Once", "max_tokens": 4} | fields)


def chat(**fields: Any) -> Callable[[str, int, float], Outcome]:
    given = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    return as_json("/v1/chat/completions", given | fields)


# -- kinds ---------------------------------------------------------------------------------------------------


def _size(dice: random.Random, least: float, most: float) -> int:
    """Small ones as likely as large ones: the logarithm is even."""
    return int(least * (most / least) ** dice.random())


def schemas(dice: random.Random) -> Iterator[tuple[str, Any]]:
    """Grammars that take long to check, or much memory."""

    def answer(schema: Body) -> Any:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        return chat(response_format=form, max_tokens=dice.choice((4, 64)))

    for _ in range(8):
        n = _size(dice, 50, 1200)
        patterns = {f"^[a-z]*{i}[a-z]*$": {"type": "string"} for i in range(n)}
        yield f"{n} patternProperties", answer({"type": "object", "patternProperties": patterns})
    for _ in range(4):
        n = _size(dice, 100, 4000)
        deep: Body = {"type": "string"}
        for _ in range(min(n, 400)):  # Python writes no JSON that is much deeper
            deep = {"type": "array", "items": deep} if dice.random() < 0.5 else {"anyOf": [deep]}
        yield "nested arrays", answer(deep)
        links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)} | {
            f"d{n}": {"type": "null"}
        }
        yield f"a chain of {n} $refs", answer({"$defs": links, "$ref": "#/$defs/d0"})
        yield (
            f"an enum of {n}",
            answer({"enum": ["x" * dice.randrange(1, 50) + str(i) for i in range(n)]}),
        )
        names = {f"p{i}": {"type": "integer", "multipleOf": i + 1} for i in range(n // 4)}
        yield f"{n // 4} properties", answer({"type": "object", "properties": names})
    for _ in range(8):
        n = _size(dice, 2, 2000)
        regex = dice.choice(
            ("(a|aa)+" * min(n, 50), f"(.{{1,{n}}}){{1,{n}}}", f"[a-z]{{{n},}}x[0-9]{{{n}}}")
        )
        yield f"regex {regex[:20]}", completion(structured_outputs={"regex": regex})
    yield "one long choice", completion(structured_outputs={"choice": ["w" * 200_000]})
    for _ in range(4):
        n = _size(dice, 10, 3000)
        rules = (
            "start: a0\n"
            + "\n".join(f'a{i}: a{i + 1} a{i + 1} | "x"' for i in range(n))
            + f'\na{n}: "y"'
        )
        yield f"{n} rules that double", completion(structured_outputs={"grammar": rules})
        words = ["w" * dice.randrange(1, 200) + str(i) for i in range(min(n, 2000))]
        yield f"{len(words)} choices", completion(structured_outputs={"choice": words})


def texts(dice: random.Random) -> Iterator[tuple[str, Any]]:
    """Prompts that are bound to be refused, and long texts of every sort."""
    alphabets = (
        " ",
        "a",
        "ab ",
        "0123456789",
        "<|im_start|>",
        "Ünïcödé ",
        "日本語",
        "\u200d👩‍👩‍👧",
        "\n",
        "\x00",
        "'s",
    )
    for _ in range(36):
        size, unit = _size(dice, 20_000, MAX_BYTES * 0.9), dice.choice(alphabets)
        text = unit * (size // max(len(json.dumps(unit)) - 2, len(unit.encode())))
        name = f"{size // 1000} kB of {unit!r}"
        which = dice.randrange(5)
        if which == 0:
            yield f"completion, {name}", completion(prompt=text)
        elif which == 1:
            yield f"chat, {name}", chat(messages=[{"role": "user", "content": text}])
        elif which == 2:
            yield (
                f"tokenize, {name}",
                as_json("/tokenize", {"prompt": text, "return_token_strs": True}),
            )
        elif which == 3:
            yield f"prefix, {name}", as_json("/v1/prefixes", {"prompt": text})
        else:
            yield f"truncated, {name}", completion(prompt=text, truncate_prompt_tokens=100)


def prompts(dice: random.Random) -> Iterator[tuple[str, Any]]:
    """Many prompts in one request."""
    for _ in range(14):
        n = _size(dice, 70, 900_000)
        one = dice.choice(([1], "", "a", [], [1, 2, 3], None, {}))
        yield f"{n} prompts {one!r}", completion(prompt=[one] * n)
    for _ in range(10):
        n, k = _size(dice, 70, 4000), dice.choice((2, 16, 64, 1000))
        yield f"{n} prompts, n {k}", completion(prompt=["hello"] * n, n=k)


def parameters(dice: random.Random) -> Iterator[tuple[str, Any]]:
    """Sampling parameters that cost something for each token, or for each choice."""

    def ids(n: int) -> list[int]:
        return [dice.randrange(VOCABULARY) for _ in range(n)]

    for _ in range(5):
        n = _size(dice, 1000, 400_000)
        yield f"{n} stop ids", completion(stop_token_ids=ids(n))
        yield (
            f"{n} allowed ids, 100 prompts",
            completion(allowed_token_ids=ids(n), prompt=["a"] * 100),
        )
        entries = min(n, VOCABULARY)
        biases = {str(i): dice.uniform(-100, 100) for i in range(entries)}
        yield f"{entries} biases, 50 prompts", completion(logit_bias=biases, prompt=["a"] * 50)
        words = [f"word{i}" for i in range(min(n, 20_000))]
        yield (
            f"{len(words)} bad words, n 64",
            completion(bad_words=words[: dice.choice((1024, len(words)))], n=64),
        )
        width = dice.choice((8, 32, 64))
        search = {"use_beam_search": True, "n": width, "max_tokens": 64}
        yield (
            f"{width} beams, {n} stop ids",
            completion(stop_token_ids=ids(min(n, 49_000)), **search),
        )
        yield f"{width} answers with logprobs", completion(n=width, logprobs=20, max_tokens=64)
        length = dice.choice((500, 2000, 4000, 8000))
        yield (
            f"prompt logprobs of {length}",
            completion(prompt=ids(length), prompt_logprobs=20, max_tokens=1),
        )
        stops = ["s" * dice.randrange(1, 60_000) for _ in range(dice.choice((4, 64, 1000)))]
        yield f"{len(stops)} long stop strings", completion(stop=stops[:60], max_tokens=64)


def sockets(dice: random.Random) -> Iterator[tuple[str, Any]]:
    """Less, or more, than a request."""
    begin = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    )
    body = b'{"prompt": "a", "max_tokens": 2}'
    for _ in range(5):
        n = _size(dice, 1000, 2_000_000)
        yield (
            f"half a body of {n}",
            raw([begin + b"Content-Length: %d\r\n\r\n" % (2 * n), b" " * n]),
        )
        yield f"a header of {n}", raw([begin + b"X-A: " + b"a" * n + b"\r\n\r\n"])
        yield f"{n // 10} headers", raw([begin, b"X-A: 1\r\n" * (n // 10), b"\r\n"])
        yield "slow headers", raw([begin, *[b"X-%d: 1\r\n" % i for i in range(20)]], pause=0.1)
        chunked = (
            begin
            + b"Transfer-Encoding: chunked\r\n\r\n"
            + b"%x\r\n" % len(body)
            + body
            + b"\r\n0\r\n"
        )
        yield (
            f"{n // 10} trailers",
            raw([chunked, b"X-Priority: 0\r\nX-Tenant: vip\r\n" * (n // 20), b"\r\n"]),
        )
        yield (
            "a chunk's endless size",
            raw([begin + b"Transfer-Encoding: chunked\r\n\r\n", b"0" * n]),
        )
        yield f"a path of {n}", raw([b"GET /" + b"a" * n + b" HTTP/1.1\r\nHost: x\r\n\r\n"])
        yield (
            "pipelined",
            raw([b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * min(n // 50, 5000)]),
        )
        yield "no HTTP", raw([bytes(dice.randrange(256) for _ in range(500))])
        stream = b'{"prompt": "a", "max_tokens": 2000, "stream": true, "ignore_eos": true}'
        yield (
            "a stream that is left",
            _left(begin + b"Content-Length: %d\r\n\r\n" % len(stream) + stream),
        )


def _left(request: bytes) -> Callable[[str, int, float], Outcome]:
    def act(host: str, port: int, patience: float) -> Outcome:
        for _ in range(20):
            with socket.create_connection((host, port), timeout=patience) as sock:
                sock.sendall(request)
                time.sleep(0.02)
        return Outcome(0, 20 * len(request))

    return act


KINDS = (schemas, texts, prompts, parameters, sockets)


def catalogue(seed: int) -> list[Attack]:
    """All kinds, in an order that mixes them."""
    dice = random.Random(seed)
    attacks = [Attack(kind.__name__, name, act) for kind in KINDS for name, act in kind(dice)]
    dice.shuffle(attacks)
    return attacks
