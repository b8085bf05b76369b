"""langchain: ChatOpenAI, an agent with a tool, structured output, embeddings; ChatAnthropic.

python bench/clients/langchain_python.py URL MODEL
"""

from __future__ import annotations

import math
import sys
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from seen import CITY, Seen, expect, expect_equal, expect_weather

URL, MODEL = sys.argv[1:3]
BASE: dict[str, Any] = {
    "model": MODEL,
    "base_url": f"{URL}/v1",
    "api_key": "none",
    "max_retries": 0,
}
CHAT = ChatOpenAI(**BASE, temperature=0, max_tokens=96)
POEM = "Write a short poem about the sea."
seen = Seen("langchain", "langchain")


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int
    job: Literal["doctor", "lawyer", "farmer"]


@tool
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """The present weather of a city."""
    return f"31 degrees {unit} and sunny in {city}"


@wrap_model_call
def until_used(request: ModelRequest, handler: Any) -> Any:
    """The tool is there until it was used: so small a model calls it again and again otherwise."""
    used = any(message.type == "tool" for message in request.messages)
    return handler(request.override(tools=[]) if used else request)


def expect_agent(model: Any) -> None:
    """An agent of this model calls the tool, is given its result and says it."""
    agent = create_agent(model=model, tools=[get_weather], middleware=[until_used])
    messages = agent.invoke({"messages": [{"role": "user", "content": CITY}]})["messages"]
    kinds = [message.type for message in messages]
    expect_equal(kinds[:3], ["human", "ai", "tool"], "the turns")
    expect_weather(messages[1].tool_calls[0]["args"])
    expect(
        "31 degrees celsius and sunny in Paris" in messages[2].text, f"result {messages[2].text!r}"
    )
    expect_equal(kinds[-1], "ai", "who spoke last")
    expect("31" in messages[-1].text, f"answer {messages[-1].text!r}")


@seen.check
def invoke_and_stream() -> None:
    whole = CHAT.invoke(POEM)
    chunks = list(CHAT.stream(POEM))
    expect(len(chunks) > 20 and whole.usage_metadata["output_tokens"] > 20, f"{len(chunks)} chunks")
    expect_equal("".join(chunk.text for chunk in chunks), whole.text, "streamed text")


@seen.check
async def batch_async() -> None:
    texts = [message.text for message in await CHAT.abatch([POEM] * 4)]
    expect_equal(set(texts), {CHAT.invoke(POEM).text}, "four at once")


@seen.check
def completion_class() -> None:
    text = OpenAI(**BASE, temperature=0, max_tokens=16).invoke("def add(a, b):")
    expect("return" in text, f"text {text!r}")


@seen.check
def structured_output_default() -> None:
    person = CHAT.with_structured_output(Person).invoke("Ann Lee is 34 and a lawyer.")
    expect_equal((person.age, person.job), (34, "lawyer"), f"of {person}")


@seen.check
def structured_output_by_call() -> None:
    structured = CHAT.with_structured_output(Person, method="function_calling")
    person = structured.invoke("Ann Lee is 34 and a lawyer.")
    expect_equal((person.age, person.job), (34, "lawyer"), f"of {person}")


@seen.check
def bound_tools() -> None:
    bound = CHAT.bind_tools([get_weather], tool_choice="any")
    whole = bound.invoke(CITY).tool_calls
    expect_weather(whole[0]["args"])
    streamed = None
    for chunk in bound.stream(CITY):
        streamed = chunk if streamed is None else streamed + chunk
    expect_equal(streamed.tool_calls[0]["args"], whole[0]["args"], "streamed arguments")


@seen.check
def agent() -> None:
    expect_agent(CHAT)


@seen.check
def agent_on_responses() -> None:
    expect_agent(ChatOpenAI(**BASE, temperature=0, max_tokens=96, use_responses_api=True))


@seen.check
def embeddings() -> None:
    rows = OpenAIEmbeddings(**BASE, check_embedding_ctx_length=False).embed_documents(
        ["The cat sat.", "Rates rose."]
    )
    expect_equal(len(rows), 2, "rows")
    for row in rows:
        expect(abs(math.hypot(*row) - 1) < 1e-3, f"norm {math.hypot(*row)}")


@seen.check
def anthropic_class() -> None:
    model = ChatAnthropic(
        model=MODEL, base_url=URL, api_key="none", temperature=0, max_tokens=96, max_retries=0
    )
    expect_equal(model.invoke(POEM).text, CHAT.invoke(POEM).text, "text of /v1/messages")


@seen.check
def anthropic_agent() -> None:
    expect_agent(
        ChatAnthropic(
            model=MODEL, base_url=URL, api_key="none", temperature=0, max_tokens=96, max_retries=0
        )
    )


seen.tell()
