"""outlines on a vLLM server: choices, regular expressions, objects, grammars, streams.

python bench/clients/outlines_python.py URL MODEL
"""

from __future__ import annotations

import re
import sys
from enum import Enum

import outlines
from openai import OpenAI
from outlines.types import CFG, Regex
from pydantic import BaseModel
from seen import Seen, expect, expect_equal

URL, MODEL = sys.argv[1:3]
CLIENT = OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120, max_retries=0)
VLLM = outlines.from_vllm(CLIENT, MODEL)
SHORT = {"temperature": 0, "max_tokens": 80}
seen = Seen("outlines", "outlines")


class Mood(Enum):
    """What a text may be."""

    GOOD = "positive"
    BAD = "negative"


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@seen.check
def text_and_stream() -> None:
    whole = VLLM("Say hello.", **SHORT)
    streamed = "".join(VLLM.stream("Say hello.", **SHORT))
    expect(len(whole) > 3, f"text {whole!r}")
    expect_equal(streamed, whole, "streamed text")


@seen.check
def choice() -> None:
    answer = VLLM("Is this review positive or negative? 'I love this film.'", Mood, **SHORT)
    expect_equal(answer, "positive", "the mood")


@seen.check
def regex() -> None:
    answer = VLLM(
        "On which day did Apollo 11 land? Answer as YYYY-MM-DD.",
        Regex(r"[0-9]{4}-[01][0-9]-[0-3][0-9]"),
        **SHORT,
    )
    expect(re.fullmatch(r"\d{4}-\d\d-\d\d", answer), f"answer {answer!r}")


@seen.check
def whole_number() -> None:
    answer = VLLM("What is 20 + 22?", int, **SHORT)
    expect(re.fullmatch(r"[+-]?\d+", answer), f"answer {answer!r}")


@seen.check
def pydantic_object() -> None:
    person = Person.model_validate_json(VLLM("Ann Lee is 34 and a lawyer.", Person, **SHORT))
    expect_equal(person.age, 34, "age")


@seen.check
def grammar() -> None:
    sums = 'start: NUMBER ("+" NUMBER)+\nNUMBER: /[0-9]{1,3}/\n'
    answer = VLLM("Write a sum of two numbers, as 3+4.", CFG(sums), **SHORT)
    expect(re.fullmatch(r"\d{1,3}(\+\d{1,3})+", answer), f"answer {answer!r}")


@seen.check
def class_for_openai() -> None:
    model = outlines.from_openai(CLIENT, MODEL)
    person = Person.model_validate_json(model("Ann Lee is 34 and a lawyer.", Person, **SHORT))
    expect_equal(person.age, 34, "age")


seen.tell()
