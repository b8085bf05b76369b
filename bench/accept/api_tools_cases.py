"""What is asked in the trials of tools: families with their templates and vocabularies, tools drawn at random
over the features of JSON Schema, prompts, choices. The same seed gives the same request.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import harness

sys.path.append(str(harness.ROOT / "tests"))

from pageturner.formats import hub
from pageturner.formats.load_tokenizer import Tokenizer, load_tokenizer
from pageturner.text import reasoning
from pageturner.text.answer_format import marks_of
from pageturner.text.tool_formats import recognised, tool_format
from support import gguf_writer

Json = dict[str, Any]
TEMPLATES = Path(os.environ.get("PAGETURNER_TEMPLATES") or hub.cache_folder().parent / "templates")
SMOLLM2 = hub.cache_folder() / "smollm2-135m-instruct-q4_1.gguf"
SPARE = range(3, 17)  # control tokens of SmolLM2 that its chats do not use


@dataclass(frozen=True, slots=True)
class Family:
    """name      of the family of models
    template  a file of TEMPLATES
    format    in which its calls are written
    identifiers  names of arguments must be such
    """

    name: str
    template: str
    format: str
    identifiers: bool = False

    def thinks(self) -> str:
        """The name of the format of its thoughts, or ""."""
        found = reasoning.recognised(self.source())
        return found.name if found else ""

    def source(self) -> str:
        path = TEMPLATES / self.template
        if not path.is_file():
            raise harness.NotRun(f"{path} is absent: see --templates")
        source = path.read_text()
        found = recognised(source)
        assert found is not None, f"{self.template} is not recognised"
        assert found.name == self.format, f"{self.template} is taken for {found.name}"
        return source


FAMILIES = (
    Family("Hermes/ChatML", "Qwen-Qwen2.5-7B-Instruct.jinja", "hermes"),
    Family("Llama 3.x", "meta-llama-Llama-3.1-8B-Instruct.jinja", "llama3"),
    Family("Mistral", "unsloth-mistral-Devstral-Small-2507.jinja", "mistral"),
    Family("Gemma", "google-gemma-4-31B-it.jinja", "gemma", identifiers=True),
    Family("Granite", "ibm-granite-granite-3.3-2B-Instruct.jinja", "granite"),
    Family("DeepSeek", "llama-cpp-deepseek-r1.jinja", "deepseek_v3"),
    Family("gpt-oss", "openai-gpt-oss-120b.jinja", "harmony"),
    Family("Pythonic", "LFM2.5-8B-A1B.jinja", "pythonic_tokens", identifiers=True),
)


@lru_cache(maxsize=1)
def _smollm2() -> tuple[Json, bytes, bytes, int]:
    """Its metadata, its table of tensors and their data, and how many they are."""
    if not SMOLLM2.is_file():
        raise harness.NotRun(f"{SMOLLM2.name} is absent: make model")
    metadata, tensors = gguf_writer.taken_apart(SMOLLM2)
    table, data, offset = b"", [], 0
    for name, (number, shape, raw) in tensors.items():
        table += gguf_writer.tensor_row(name, number, shape, offset)
        data.append(gguf_writer.padded(raw))
        offset += len(data[-1])
    return metadata, table, b"".join(data), len(tensors)


def _with_marks(marks: tuple[str, ...]) -> Json:
    """SmolLM2's metadata with these texts as control tokens of its vocabulary."""
    metadata, *_ = _smollm2()
    tokens = list(metadata["tokenizer.ggml.tokens"])
    assert len(marks) <= len(SPARE)
    for token, mark in zip(SPARE, marks, strict=False):
        tokens[token] = mark
    return {**metadata, "tokenizer.ggml.tokens": tokens}


def model_with(family: Family, folder: Path, *, control: bool) -> Path:
    """SmolLM2 with this family's template. control: the marks of its calls and thoughts are control tokens
    of the vocabulary, else plain text."""
    metadata = _with_marks(marks_of(family.format, family.thinks()) if control else ())
    metadata["tokenizer.chat_template"] = family.source()
    path = folder / f"{family.format}-{'control' if control else 'text'}.gguf"
    _, table, data, count = _smollm2()
    pairs = b"".join(gguf_writer.pair(key, value) for key, value in metadata.items())
    head = gguf_writer.header(3, count, len(metadata)) + pairs + table
    with path.open("wb") as file:
        file.write(gguf_writer.padded(head))
        file.write(data)
    return path


def vocabulary_with(marks: tuple[str, ...], folder: Path) -> Tokenizer:
    """SmolLM2's vocabulary in which these marks are control tokens."""
    path = folder / "vocabulary.gguf"
    path.write_bytes(gguf_writer.gguf_bytes(_with_marks(marks), {}))
    return load_tokenizer(path)


WORDS = (
    "weather",
    "in",
    "the",
    "old",
    "house",
    "river",
    "blue",
    "seven",
    "read",
    "a",
    "file",
    "find",
    "all",
    "users",
    "send",
    "mail",
    "to",
    "nobody",
    "book",
    "flight",
)
NAMES = (
    "city",
    "count",
    "größe",
    "名前",
    "tag",
    "is_open",
    "depth",
    "note",
    "ratio",
    "first-name",
    "a b",
)


class Draw:
    """Tools and requests by a seed."""

    def __init__(self, seed: str, family: Family, *, thinks: bool = False) -> None:
        self._dice, self._family, self._thinks = random.Random(seed), family, thinks

    def schema(self, depth: int = 0) -> Json:
        """The schema of a value."""
        dice = self._dice
        kinds = [
            "text",
            "enum",
            "integer",
            "number",
            "boolean",
            "const",
            "union",
            "array",
            "object",
            "free",
        ]
        kind = dice.choice(kinds if depth < 2 else kinds[:6])
        if kind == "text":
            return {
                "type": "string",
                **({"maxLength": dice.randint(3, 12)} if dice.random() < 0.9 else {}),
            }
        if kind == "enum":
            return {
                "enum": dice.sample(
                    ["red", "grün", "", 7, 1.5, None, True, 'a "b"\\'], dice.randint(1, 4)
                )
            }
        if kind == "integer":
            return {"type": "integer", **self._bounds("minimum", "maximum", 0)}
        if kind == "number":
            return {"type": "number", "minimum": -5, "maximum": 9.5}
        if kind == "boolean":
            return {"type": "boolean"}
        if kind == "const":
            return {"const": dice.choice(["x", 3, False])}
        if kind == "union":
            return {"anyOf": [{"type": "null"}, self.schema(depth + 1)]}
        if kind == "array":
            return {
                "type": "array",
                "items": self.schema(depth + 1),
                **self._bounds("minItems", "maxItems", 1),
            }
        if kind == "object":
            return self.object(depth + 1)
        return {"type": ["string", "integer"], "maxLength": 5, "minimum": 0, "maximum": 99}

    def _bounds(self, least: str, most: str, floor: int) -> Json:
        low = floor + self._dice.randint(0, 1)
        return {least: low, most: low + self._dice.randint(0, 2)}

    def object(self, depth: int = 0) -> Json:
        """The schema of an object with some properties, a few of them optional."""
        dice = self._dice
        names = [one for one in NAMES if one.isidentifier() or not self._family.identifiers]
        chosen = dice.sample(names, dice.randint(0 if depth else 1, 3))
        made: Json = {"type": "object", "properties": {name: self.schema(depth) for name in chosen}}
        made["required"] = [name for name in chosen if dice.random() < 0.6]
        if dice.random() < 0.7:
            made["additionalProperties"] = False
        else:
            made["description"] = "Whatever it is."
        return made

    def tools(self) -> list[Json]:
        """One to four tools; some strict, some without parameters."""
        dice, made = self._dice, []
        for i in range(dice.randint(1, 4)):
            function: Json = {
                "name": dice.choice(["get_weather", "find", "send.mail", "book-flight"]) + f"_{i}"
            }
            function["description"] = " ".join(dice.choices(WORDS, k=5))
            if self._family.identifiers:
                function["name"] = function["name"].replace(".", "_").replace("-", "_")
            if dice.random() < 0.9:
                function["parameters"] = (
                    closed(self.object()) if dice.random() < 0.9 else self.referring()
                )
            if dice.random() < 0.4:
                function["strict"] = True
            made.append({"type": "function", "function": function})
        return made

    def referring(self) -> Json:
        """A schema with definitions, one of which refers to itself."""
        node = {
            "type": "object",
            "properties": {
                "v": self.schema(2),
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
        top = {"list": {"$ref": "#/$defs/node"}}
        return closed(
            {"type": "object", "properties": top, "required": ["list"], "$defs": {"node": node}}
        )

    def request(self, choices: tuple[str, ...] = ("required", "named", "auto")) -> Json:
        """A chat with tools. A named choice has the name of one of them."""
        dice, tools = self._dice, self.tools()
        choice: Any = dice.choice(choices)
        if choice == "named":
            name = dice.choice(tools)["function"]["name"]
            choice = {"type": "function", "function": {"name": name}}
        body: Json = {
            "messages": [
                {"role": "user", "content": " ".join(dice.choices(WORDS, k=dice.randint(3, 12)))}
            ],
            "tools": tools,
            "tool_choice": choice,
            "temperature": dice.choice([0, 0.7, 1, 2]),
            "seed": dice.randrange(1 << 30),
        }
        if self._thinks:
            body["max_reasoning_tokens"] = dice.choice([0, 8])
        if dice.random() < 0.3:
            body["messages"].insert(0, {"role": "developer", "content": "Be kind."})
        if (parallel := dice.choice([None, True, False])) is not None:
            body["parallel_tool_calls"] = parallel
        if tool_format(self._family.format).several and parallel is not False:
            body["parallel_tool_calls"] = (
                dice.random() < 0.3
            )  # else many an answer is cut in its next call
        return body


def closed(schema: Json) -> Json:
    """Nothing but the properties that are named, at the top of it."""
    return {**schema, "additionalProperties": False}
