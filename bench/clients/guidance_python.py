"""guidance: its class for vLLM servers with select, gen, JSON and captures; its class for OpenAI.

python bench/clients/guidance_python.py URL MODEL
"""

from __future__ import annotations

import json
import re
import sys

import guidance
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel
from seen import Seen, expect, expect_equal

URL, MODEL = sys.argv[1:3]
BASE = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "echo": False}
seen = Seen("guidance", "guidance")


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int


@seen.check
def select() -> None:
    model = VLLMModel(**BASE)
    with guidance.user():
        model += "Is this review positive or negative? 'I love this film.'"
    with guidance.assistant():
        model += guidance.select(["positive", "negative"], name="mood")
    expect_equal(model["mood"], "positive", "the mood")


@seen.check
def gen_of_a_regex() -> None:
    model = VLLMModel(**BASE)
    with guidance.user():
        model += "On which day did Apollo 11 land? Answer as YYYY-MM-DD."
    with guidance.assistant():
        model += guidance.gen("day", regex=r"[0-9]{4}-[01][0-9]-[0-3][0-9]", temperature=0)
    expect(re.fullmatch(r"\d{4}-\d\d-\d\d", model["day"]), f"answer {model['day']!r}")


@seen.check
def parts_around_a_capture() -> None:
    model = VLLMModel(**BASE)
    with guidance.user():
        model += "How old is Ann Lee, who is 34?"
    with guidance.assistant():
        model += "Ann Lee is " + guidance.gen("age", regex=r"[0-9]{2}") + " years old."
    expect_equal(model["age"], "34", "the capture")
    expect(
        str(model).rstrip().endswith("years old.") or "years old." in str(model), str(model)[-80:]
    )


@seen.check
def json_of_pydantic() -> None:
    model = VLLMModel(**BASE)
    with guidance.user():
        model += "Ann Lee is 34 and a lawyer."
    with guidance.assistant():
        model += guidance.json("person", schema=Person)
    expect_equal(json.loads(model["person"])["age"], 34, "age")


@seen.check
def class_for_openai() -> None:
    model = guidance.models.OpenAI(**BASE)
    with guidance.user():
        model += "Ann Lee is 34 and a lawyer."
    with guidance.assistant():
        model += guidance.json("person", schema=Person)
    expect_equal(json.loads(model["person"])["age"], 34, "age")


seen.tell()
