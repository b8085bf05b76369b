"""pydantic-ai: its default output mode (a tool), text, tools, streams, and its class for responses.

python bench/clients/pydantic_ai_python.py URL MODEL
"""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition
from seen import Seen, expect, expect_equal

URL, MODEL = sys.argv[1:3]
PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
CHAT = OpenAIChatModel(MODEL, provider=PROVIDER)
SETTINGS = {"temperature": 0, "max_tokens": 160}
ANN = "Ann Lee is 34 years old. She is a lawyer."
seen = Seen("pydantic-ai", "pydantic-ai-slim")


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int
    job: Literal["doctor", "lawyer", "farmer"]


def expect_ann(person: Person) -> None:
    expect_equal((person.age, person.job), (34, "lawyer"), f"of {person}")


@seen.check
def default_output() -> None:
    result = Agent(CHAT, output_type=Person, model_settings=SETTINGS, retries=0).run_sync(ANN)
    expect_ann(result.output)
    expect(
        any(part.part_kind == "tool-call" for part in result.all_messages()[1].parts),
        "it was no call",
    )


@seen.check
def native_output() -> None:
    expect_ann(
        Agent(CHAT, output_type=NativeOutput(Person), model_settings=SETTINGS).run_sync(ANN).output
    )


@seen.check
async def text_stream() -> None:
    agent = Agent(CHAT, model_settings={"temperature": 0, "max_tokens": 32})
    whole = (await agent.run("Write a short poem about the sea.")).output
    async with agent.run_stream("Write a short poem about the sea.") as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    expect(len(pieces) > 10, f"{len(pieces)} pieces")
    expect_equal("".join(pieces), whole, "streamed text")


def agent_with_tool(
    model: OpenAIChatModel | OpenAIResponsesModel,
) -> tuple[Agent, list[tuple[str, str]]]:
    """And where it keeps what its tool was called with."""
    called: list[tuple[str, str]] = []
    agent = Agent(model, model_settings=SETTINGS)

    async def until_used(_: RunContext, definition: ToolDefinition) -> ToolDefinition | None:
        """So small a model calls it again and again otherwise."""
        return None if called else definition

    @agent.tool_plain(prepare=until_used)
    def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
        """The present weather of a city."""
        called.append((city, unit))
        return "31 degrees and sunny"

    return agent, called


@seen.check
def tool() -> None:
    agent, called = agent_with_tool(CHAT)
    result = agent.run_sync("What is the weather in Paris, in celsius? Use the tool.")
    expect_equal(called[:1], [("Paris", "celsius")], "what the tool was called with")
    expect("31" in result.output, f"answer {result.output!r}")


@seen.check
def responses_default_output() -> None:
    model = OpenAIResponsesModel(MODEL, provider=PROVIDER)
    expect_ann(
        Agent(model, output_type=Person, model_settings=SETTINGS, retries=0).run_sync(ANN).output
    )


@seen.check
def responses_tool() -> None:
    agent, called = agent_with_tool(OpenAIResponsesModel(MODEL, provider=PROVIDER))
    result = agent.run_sync("What is the weather in Paris, in celsius? Use the tool.")
    expect_equal(called[:1], [("Paris", "celsius")], "what the tool was called with")
    expect("31" in result.output, f"answer {result.output!r}")


seen.tell()
