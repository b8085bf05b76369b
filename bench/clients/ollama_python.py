"""ollama for Python: chats, generate, embeddings, tools, formats, what is there.

python bench/clients/ollama_python.py URL MODEL
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from ollama import AsyncClient, Client, ResponseError
from pydantic import BaseModel
from seen import CITY, WEATHER, Seen, expect, expect_equal, expect_weather

URL, MODEL = sys.argv[1:3]
CLIENT = Client(host=URL, timeout=120)
POEM = [{"role": "user", "content": "Write a short poem about the sea."}]
ASK = [{"role": "user", "content": CITY}]
SHORT = {"temperature": 0, "num_predict": 32}
seen = Seen("ollama", "ollama")


class Person(BaseModel):
    """What is parsed."""

    name: str
    age: int


def chat(**more: Any) -> Any:
    return CLIENT.chat(**{"model": MODEL, "messages": POEM, "options": SHORT} | more)


@seen.check
def chat_and_stream() -> None:
    whole = chat()
    expect_equal(
        (whole.done, whole.done_reason, whole.eval_count), (True, "length", 32), "how it ended"
    )
    parts = list(chat(stream=True))
    expect_equal(
        "".join(part.message.content for part in parts), whole.message.content, "streamed text"
    )
    expect_equal((parts[-1].done, parts[-1].eval_count), (True, 32), "last line")


@seen.check
async def async_chat() -> None:
    client = AsyncClient(host=URL, timeout=120)
    parts = [
        part
        async for part in await client.chat(model=MODEL, messages=POEM, options=SHORT, stream=True)
    ]
    expect_equal("".join(part.message.content for part in parts), chat().message.content, "text")


@seen.check
def generate() -> None:
    fields = {"model": MODEL, "prompt": "def add(a, b):", "raw": True, "options": SHORT}
    whole = CLIENT.generate(**fields)
    parts = list(CLIENT.generate(**fields, stream=True))
    expect(len(whole.response) > 10, f"text {whole.response!r}")
    expect_equal("".join(part.response for part in parts), whole.response, "streamed text")


@seen.check
def format_of_pydantic() -> None:
    ask = [{"role": "user", "content": "Ann Lee is 34 and a lawyer. Answer in JSON."}]
    answer = chat(
        messages=ask, format=Person.model_json_schema(), options=SHORT | {"num_predict": 80}
    )
    expect_equal(Person.model_validate_json(answer.message.content).age, 34, "age")


@seen.check
def what_is_there() -> None:
    names = [model.model.removesuffix(":latest") for model in CLIENT.list().models]
    expect(MODEL in names, f"{MODEL} is not among {names}")
    expect("completion" in CLIENT.show(MODEL).capabilities, "it cannot complete")
    expect(
        MODEL in [model.model.removesuffix(":latest") for model in CLIENT.ps().models],
        "it does not run",
    )


@seen.check
def errors() -> None:
    try:
        chat(model="no-such-model")
        expect(False, "a model that is not there was taken")
    except ResponseError as error:
        expect_equal(error.status_code, 404, "status")


@seen.check
def tools() -> None:
    answer = chat(messages=ASK, tools=[WEATHER], options=SHORT | {"num_predict": 64})
    expect(answer.message.tool_calls, f"no call, but {answer.message.content!r}")
    call = answer.message.tool_calls[0].function
    expect_equal(call.name, "get_weather", "name")
    expect_weather(json.dumps(dict(call.arguments)))


@seen.check
def embed() -> None:
    rows = CLIENT.embed(model=MODEL, input=["The cat sat.", "A kitten sat."]).embeddings
    expect_equal(len(rows), 2, "rows")
    for row in rows:
        expect(abs(math.hypot(*row) - 1) < 1e-3, f"norm {math.hypot(*row)}")


seen.tell()
