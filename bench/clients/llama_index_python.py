"""llama-index: OpenAILike as text, chat and caller of functions; structured objects; an agent; embeddings.

python bench/clients/llama_index_python.py URL MODEL
"""

import math
import sys
from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from seen import CITY, Seen, expect, expect_equal

URL, MODEL = sys.argv[1:3]
BASE = {
    "model": MODEL,
    "api_base": f"{URL}/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 96,
}
CHAT = OpenAILike(
    **BASE, is_chat_model=True, is_function_calling_model=True, context_window=8192, max_retries=0
)
POEM = [ChatMessage(role="user", content="Write a short poem about the sea.")]
CALLED: list[tuple[str, str]] = []
seen = Seen("llama-index", "llama-index-core")


class Person(BaseModel):
    """Somebody."""

    name: str
    age: int
    job: Literal["doctor", "lawyer", "farmer"]


def get_weather(city: str, unit: Literal["celsius", "fahrenheit"]) -> str:
    """The present weather of a city."""
    CALLED.append((city, unit))
    return "31 degrees and sunny"


TOOL = FunctionTool.from_defaults(get_weather)


@seen.check
def chat_and_stream() -> None:
    whole = CHAT.chat(POEM).message.content
    pieces = list(CHAT.stream_chat(POEM))
    expect(len(whole) > 20, f"text {whole!r}")
    expect_equal(pieces[-1].message.content, whole, "streamed text")


@seen.check
def complete() -> None:
    text = OpenAILike(**BASE, is_chat_model=False, max_retries=0)
    whole = text.complete("def add(a, b):").text
    expect("return" in whole, f"text {whole!r}")
    expect_equal(list(text.stream_complete("def add(a, b):"))[-1].text, whole, "streamed text")


@seen.check
def call_of_a_function() -> None:
    CALLED.clear()
    answer = CHAT.predict_and_call([TOOL], CITY, tool_required=True)
    expect_equal(CALLED, [("Paris", "celsius")], "what the tool was called with")
    expect("31" in str(answer), f"answer {answer}")


@seen.check
def structured() -> None:
    ann = [ChatMessage(role="user", content="Ann Lee is 34 and a lawyer.")]
    person = CHAT.as_structured_llm(Person).chat(ann).raw
    expect_equal((person.age, person.job), (34, "lawyer"), f"of {person}")


@seen.check
async def agent() -> None:
    """Two turns: so small a model calls the tool again and again. What it says at last is no matter."""
    CALLED.clear()
    agent = FunctionAgent(tools=[TOOL], llm=CHAT, streaming=True, early_stopping_method="generate")
    handler = agent.run(user_msg=CITY, max_iterations=2)
    results = [
        e.tool_output.content
        async for e in handler.stream_events()
        if isinstance(e, ToolCallResult)
    ]
    answer = str(await handler)
    expect_equal(CALLED[:1], [("Paris", "celsius")], "what the tool was called with")
    expect_equal(results[:1], ["31 degrees and sunny"], "results that went back")
    expect("Paris" in answer, f"answer {answer!r}")


@seen.check
def embeddings() -> None:
    model = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="none")
    for row in model.get_text_embedding_batch(["The cat sat.", "Rates rose."]):
        expect(abs(math.hypot(*row) - 1) < 1e-3, f"norm {math.hypot(*row)}")


seen.tell()
