"""Every dialect: a stream says what the whole answer says, for requests drawn at random.

    python bench/accept/api_streams.py [--shapes 1400] [--real 40] [--seed 14]

Owns the requests of each dialect and where text, end and usage stand in its answers. Most requests go to the
fake engine, whose tokens are a hash of what came before, so that every byte and control token comes up; some
go to SmolLM2. The fields that are drawn are those that change what is told, and when.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import harness
from api_tools_http import post
from harness import Line, Server

Json = dict[str, Any]
AT_ONCE = 16
PIECES = (
    "a",
    "é",
    " ",
    "東",
    "the old house",
    "\n",
    '"',
    "😀",
    "<|im_end|>",
    "</s>",
    "\\",
    "0",
    "\u2028",
    "{}",
)
STOPS = ("o", "the", "é", "\n", "e ", "Ω", "in the", "\ufffd")


@dataclass(frozen=True)
class Shape:
    """One dialect.

    ask      the body of a message with so many tokens
    names    of the fields that it has under names of its own: the stop strings
    whole    of an answer: (text, why it ended, tokens of the answer)
    piece    of an event or a line: what it adds to them; None: it has nothing of that
    """

    path: str
    ask: Callable[[str, int], Json]
    stop: str
    whole: Callable[[Json], tuple[Any, Any, Any]]
    piece: Callable[[Json], tuple[str | None, Any, Any]]
    options: bool = False


def _chat(body: str, n: int) -> Json:
    return {"messages": [{"role": "user", "content": body}], "max_tokens": n}


def _openai_piece(
    field: Callable[[Json], str | None],
) -> Callable[[Json], tuple[str | None, Any, Any]]:
    def piece(event: Json) -> tuple[str | None, Any, Any]:
        tokens = (event.get("usage") or {}).get("completion_tokens")
        if not event["choices"]:
            return None, None, tokens
        (choice,) = event["choices"]
        return field(choice), choice["finish_reason"], tokens

    return piece


def _responses_piece(event: Json) -> tuple[str | None, Any, Any]:
    response = event.get("response") or {}
    ended = response.get("status") in ("completed", "incomplete", "failed")
    text = event["delta"] if event.get("type") == "response.output_text.delta" else None
    return (
        text,
        response["status"] if ended else None,
        response["usage"]["output_tokens"] if ended else None,
    )


def _messages_piece(event: Json) -> tuple[str | None, Any, Any]:
    delta = event.get("delta") or {}
    tokens = (
        (event.get("usage") or {}).get("output_tokens")
        if event["type"] == "message_delta"
        else None
    )
    return delta.get("text"), delta.get("stop_reason"), tokens


def _output_text(told: Json) -> str:
    return "".join(part["text"] for item in told["output"] for part in item.get("content", ()))


SHAPES = {
    "chat": Shape(
        "/v1/chat/completions",
        _chat,
        "stop",
        lambda told: (
            told["choices"][0]["message"]["content"],
            told["choices"][0]["finish_reason"],
            told["usage"]["completion_tokens"],
        ),
        _openai_piece(lambda choice: choice["delta"].get("content")),
    ),
    "completions": Shape(
        "/v1/completions",
        lambda text, n: {"prompt": text, "max_tokens": n},
        "stop",
        lambda told: (
            told["choices"][0]["text"],
            told["choices"][0]["finish_reason"],
            told["usage"]["completion_tokens"],
        ),
        _openai_piece(lambda choice: choice["text"]),
    ),
    "responses": Shape(
        "/v1/responses",
        lambda text, n: {"input": text, "max_output_tokens": n},
        "stop",
        lambda told: (_output_text(told), told["status"], told["usage"]["output_tokens"]),
        _responses_piece,
    ),
    "messages": Shape(
        "/v1/messages",
        _chat,
        "stop_sequences",
        lambda told: (
            "".join(part["text"] for part in told["content"]),
            told["stop_reason"],
            told["usage"]["output_tokens"],
        ),
        _messages_piece,
    ),
    "Ollama chat": Shape(
        "/api/chat",
        _chat,
        "stop",
        lambda told: (told["message"]["content"], told["done_reason"], told["eval_count"]),
        lambda line: (line["message"]["content"], line.get("done_reason"), line.get("eval_count")),
        options=True,
    ),
    "Ollama generate": Shape(
        "/api/generate",
        lambda text, n: {"prompt": text, "max_tokens": n},
        "stop",
        lambda told: (told["response"], told["done_reason"], told["eval_count"]),
        lambda line: (line["response"], line.get("done_reason"), line.get("eval_count")),
        options=True,
    ),
}


def drawn(shape: Shape, dice: random.Random, real: bool) -> Json:
    """A request at random. real: the model is one, so its answers are worth a few tokens more."""
    said = "".join(dice.choices(PIECES, k=dice.randint(1, 9)))
    body = shape.ask(said, dice.randint(1, 24 if real else 60))
    fields: Json = {"seed": dice.randrange(1 << 30), "temperature": dice.choice([0, 0.5, 1, 2])}
    if dice.random() < 0.5:
        fields[shape.stop] = dice.sample(STOPS, dice.randint(1, 3))
    if dice.random() < 0.3:
        fields["top_k"] = dice.choice([1, 5, 40])
    if dice.random() < 0.3 and real:
        fields |= {"top_p": dice.choice([0.3, 0.9]), "repetition_penalty": 1.2}
    if shape.options:
        fields["num_predict"] = body.pop("max_tokens")
        if "repetition_penalty" in fields:
            fields["repeat_penalty"] = fields.pop("repetition_penalty")
        return {**body, "options": fields}
    if shape.stop != "stop":
        fields["temperature"] = min(1, fields["temperature"])
    if dice.random() < 0.2 and real:
        schema = {
            "type": "object",
            "properties": {"a": {"type": "string", "maxLength": 9}},
            "required": ["a"],
        }
        fields["structured_outputs"] = {"json": schema}
    return body | fields


def streamed(server: Server, shape: Shape, body: Json) -> tuple[Any, Any, Any]:
    """Text, end and tokens, put together of a stream."""
    more = {"stream_options": {"include_usage": True}} if shape.path in OPENAI else {}
    status, raw = post(server.url + shape.path, {**body, "stream": True, **more})
    if status != 200:
        return None, status, raw.decode()
    text, end, tokens = "", None, None
    for line in raw.decode().split("\n"):
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            new, ended, counted = shape.piece(json.loads(data))
            text += new or ""
            end = end if ended is None else ended
            tokens = tokens if counted is None else counted
    return text, end, tokens


OPENAI = ("/v1/chat/completions", "/v1/completions")


def differing(
    server: Server, shape: Shape, count: int, seed: str, real: bool
) -> tuple[list[str], Counter[str]]:
    """What differs between both answers to so many requests, and how they ended."""

    def one(i: int) -> tuple[str, str]:
        body = drawn(shape, random.Random(f"{seed} {i}"), real)
        status, raw = post(server.url + shape.path, {**body, "stream": False})
        whole = shape.whole(json.loads(raw)) if status == 200 else (None, status, raw.decode())
        stream = streamed(server, shape, body)
        if status != 200:
            return f"{status}", f"{raw[:300]!r} of {body}"
        return str(whole[1]), "" if whole == stream else f"{body}: {whole} {stream}"

    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = [*pool.map(one, range(count))]
    return [wrong for _, wrong in ended if wrong], Counter(end for end, _ in ended)


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """A line for each dialect and engine."""
    fake = ("--backend", "fake", "--log-level", "error")
    tiny = str(harness.ROOT / "tests" / "goldens" / "tiny_llama.gguf")
    trials = ((arguments.shapes, fake, tiny, False), (arguments.real, fake[2:], "smollm2", True))
    for count, flags, model, real in trials:
        if not count:
            continue
        with harness.server(*flags, model=model) as server:
            for name, shape in SHAPES.items():
                wrong, ends = differing(
                    server, shape, count, f"{arguments.seed} {name} {real}", real
                )
                for one in wrong[:3]:
                    print("   ", one[:900], file=sys.stderr)
                what = f"{name}: {count:,} random requests of {'SmolLM2' if real else 'the fake engine'}"
                figure = ", ".join(f"{number:,} {end}" for end, number in ends.most_common())
                yield Line(
                    f"{what}, streamed = not streamed", f"{len(wrong)} differ; {figure}", not wrong
                )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part takes on the command line."""
    parser.add_argument(
        "--shapes", type=int, default=1400, help="requests to the fake engine in each dialect"
    )
    parser.add_argument("--real", type=int, default=40, help="to SmolLM2, in each dialect")
    parser.add_argument("--seed", type=int, default=14)


if __name__ == "__main__":
    sys.exit(harness.alone(lines, add_arguments, __doc__))
