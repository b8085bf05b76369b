"""instructor in its default mode, and others: objects, nested ones, lists, partial streams, its retries.

python bench/clients/instructor_python.py URL MODEL
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import instructor
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from seen import Seen, expect, expect_equal

URL, MODEL = sys.argv[1:3]
BASE = {"base_url": f"{URL}/v1", "api_key": "none", "timeout": 120, "max_retries": 0}
CLIENT = instructor.from_openai(OpenAI(**BASE))
FIELDS: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 160, "max_retries": 0}
ANN = [
    {"role": "user", "content": "Ann Lee is 34 years old. She is a lawyer in Basel, Switzerland."}
]
seen = Seen("instructor", "instructor")


class Place(BaseModel):
    """Where somebody lives."""

    city: str
    country: str


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int = Field(ge=0, le=130)
    job: Literal["doctor", "lawyer", "farmer"]
    place: Place


class Named(BaseModel):
    """One of a list."""

    name: str
    age: int


def expect_ann(person: Person) -> None:
    expect_equal(
        (person.age, person.job, person.place.city), (34, "lawyer", "Basel"), f"of {person}"
    )


@seen.check
def default_mode() -> None:
    expect_equal(CLIENT.mode, instructor.Mode.TOOLS, "the default")
    person, answer = CLIENT.create_with_completion(**FIELDS, messages=ANN, response_model=Person)
    expect_ann(person)
    expect_equal(
        answer.choices[0].message.tool_calls[0].function.name, "Person", "name of the call"
    )


@seen.check
async def default_mode_async() -> None:
    client = instructor.from_openai(AsyncOpenAI(**BASE))
    expect_ann(await client.create(**FIELDS, messages=ANN, response_model=Person))


@seen.check
def default_mode_partial() -> None:
    parts = list(CLIENT.create_partial(**FIELDS, messages=ANN, response_model=Person))
    expect(len(parts) > 3, f"{len(parts)} parts")
    expect(parts[0].name is None or parts[0].place is None, f"the first part is whole: {parts[0]}")
    expect_ann(parts[-1])


@seen.check
def json_schema_mode() -> None:
    client = instructor.from_openai(OpenAI(**BASE), mode=instructor.Mode.JSON_SCHEMA)
    expect_ann(client.create(**FIELDS, messages=ANN, response_model=Person))


@seen.check
def strict_tools_mode() -> None:
    client = instructor.from_openai(OpenAI(**BASE), mode=instructor.Mode.TOOLS_STRICT)
    expect_ann(client.create(**FIELDS, messages=ANN, response_model=Person))


@seen.check
def a_list() -> None:
    ask = [{"role": "user", "content": "Ann is 34, Bob is 51. List both."}]
    people = list(CLIENT.create_iterable(**FIELDS, messages=ask, response_model=Named))
    expect(people and all(isinstance(person, Named) for person in people), f"{people}")
    expect({person.age for person in people} <= {34, 51}, f"{people}")


seen.tell()
