"""openai-agents: agents of its default class (responses) with a tool, with a form, streamed; then by chats.

python bench/clients/openai_agents_python.py URL MODEL
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from seen import CITY, Seen, expect, expect_equal

URL, MODEL = sys.argv[1:3]
CLIENT = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120, max_retries=0)
set_default_openai_client(CLIENT, use_for_tracing=False)
set_tracing_disabled(True)
CALLED: list[tuple[str, str]] = []
seen = Seen("openai-agents", "openai-agents")


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int
    job: Literal["doctor", "lawyer", "farmer"]


@function_tool(
    is_enabled=lambda *_: not CALLED
)  # so small a model calls it again and again otherwise
def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """The present weather of a city."""
    CALLED.append((city, unit))
    return "31 degrees and sunny"


def settings(**more: Any) -> ModelSettings:
    return ModelSettings(temperature=0, max_tokens=96, **more)


async def expect_agent(model: Any) -> None:
    """The agent calls its tool first, and then says what the tool told."""
    CALLED.clear()
    agent = Agent(name="a", model=model, tools=[get_weather], model_settings=settings())
    result = await Runner.run(agent, CITY, max_turns=4)
    expect_equal(CALLED[:1], [("Paris", "celsius")], "what the tool was called with")
    expect("31" in result.final_output, f"answer {result.final_output!r}")


@seen.check
async def text() -> None:
    agent = Agent(name="a", model=MODEL, instructions="You are polite.", model_settings=settings())
    whole = (await Runner.run(agent, "Say hello.")).final_output
    stream = Runner.run_streamed(agent, "Say hello.")
    deltas = [
        event.data.delta
        async for event in stream.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    expect(len(deltas) > 3, f"{len(deltas)} deltas")
    expect_equal("".join(deltas), whole, "streamed text")
    expect_equal(stream.final_output, whole, "final output")


@seen.check
async def form() -> None:
    agent = Agent(name="a", model=MODEL, output_type=Person, model_settings=settings())
    person = (await Runner.run(agent, "Ann Lee is 34 and a lawyer.")).final_output
    expect_equal((person.age, person.job), (34, "lawyer"), f"of {person}")


@seen.check
async def tool() -> None:
    await expect_agent(MODEL)


@seen.check
async def tool_by_chats() -> None:
    await expect_agent(OpenAIChatCompletionsModel(model=MODEL, openai_client=CLIENT))


seen.tell()
