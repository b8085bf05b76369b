"""smolagents: its ToolCallingAgent with one tool.

    python bench/clients/smolagents_python.py URL MODEL

A small model may not solve the task. What counts is that every step was a call that the agent could read and
carry out, with arguments of the tool's schema.
"""

from __future__ import annotations

import sys

from seen import Seen, expect, expect_equal
from smolagents import ActionStep, AgentMaxStepsError, OpenAIServerModel, ToolCallingAgent, tool

URL, MODEL = sys.argv[1:3]
SERVER = OpenAIServerModel(
    model_id=MODEL, api_base=f"{URL}/v1", api_key="none", temperature=0, max_tokens=128
)
CALLED: list[str] = []
seen = Seen("smolagents", "smolagents")


@tool
def population(city: str) -> int:
    """How many people live in a city.

    Args:
        city: the name of the city
    """
    CALLED.append(city)
    return 4217


def expect_steps(agent: ToolCallingAgent) -> list[str]:
    """Each step is a call that was read and carried out. Returns the names of the calls."""
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    expect(steps, "no step")
    for step in steps:
        ended = isinstance(step.error, AgentMaxStepsError)
        expect(ended or step.error is None, f"step {step.step_number}: {step.error}")
        for call in step.tool_calls or []:
            expect(isinstance(call.arguments, dict), f"arguments {call.arguments!r}")
    return [call.name for step in steps for call in step.tool_calls or []]


@seen.check
def tool_calling_agent() -> None:
    agent = ToolCallingAgent(tools=[population], model=SERVER, max_steps=3, verbosity_level=0)
    agent.run(
        "How many people live in Basel? Call population with the city, then final_answer with the number."
    )
    names = expect_steps(agent)
    expect(set(names) <= {"population", "final_answer"}, f"calls {names}")
    seen.figure = f"{len(names)} calls: {', '.join(names)}"
    expect_equal(CALLED[:1], ["Basel"], "what the tool was called with")


@seen.check
def streamed_agent() -> None:
    CALLED.clear()
    agent = ToolCallingAgent(
        tools=[population], model=SERVER, max_steps=2, verbosity_level=0, stream_outputs=True
    )
    agent.run(
        "How many people live in Basel? Call population with the city, then final_answer with the number."
    )
    expect_steps(agent)
    expect_equal(CALLED[:1], ["Basel"], "what the tool was called with")


seen.tell()
