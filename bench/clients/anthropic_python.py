"""anthropic for Python: messages, streams, tools, system blocks, counting, errors.

python bench/clients/anthropic_python.py URL MODEL
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic
from seen import CITY, WEATHER_SCHEMA, Seen, expect, expect_equal, expect_weather

URL, MODEL = sys.argv[1:3]
CLIENT = Anthropic(base_url=URL, api_key="none", timeout=120, max_retries=0)
POEM = [{"role": "user", "content": "Write a short poem about the sea."}]
ASK = [{"role": "user", "content": CITY}]
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": WEATHER_SCHEMA,
}
GREEDY = {"extra_body": {"temperature": 0}}  # which its newest version has no argument for
seen = Seen("anthropic", "anthropic")


def message(**more: Any) -> Any:
    fields = {"model": MODEL, "messages": POEM, "max_tokens": 32, **GREEDY} | more
    if fields.pop("streams", False):
        return CLIENT.messages.stream(**fields)
    return CLIENT.messages.create(**fields)


@seen.check
def messages_and_stream() -> None:
    whole = message()
    expect_equal((whole.stop_reason, whole.usage.output_tokens), ("max_tokens", 32), "how it ended")
    with message(streams=True) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect_equal(streamed, whole.content[0].text, "streamed text")
    expect_equal(final.content[0].text, streamed, "text of the final message")
    expect_equal(
        (final.stop_reason, final.usage.output_tokens), ("max_tokens", 32), "end of the stream"
    )


@seen.check
async def async_crowd() -> None:
    async with AsyncAnthropic(base_url=URL, api_key="none", timeout=120) as client:
        fields = {"model": MODEL, "messages": POEM, "max_tokens": 32, **GREEDY}
        all = await asyncio.gather(*[client.messages.create(**fields) for _ in range(6)])
    expect_equal({one.content[0].text for one in all}, {message().content[0].text}, "six at once")


@seen.check
def stop_sequence() -> None:
    whole = message(max_tokens=60).content[0].text
    word = whole.split()[4]
    cut = message(max_tokens=60, stop_sequences=[word])
    expect_equal((cut.stop_reason, cut.stop_sequence), ("stop_sequence", word), "how it ended")
    expect_equal(cut.content[0].text, whole[: whole.index(word)], "text in front of it")


@seen.check
def counting_and_cache() -> None:
    system = [
        {
            "type": "text",
            "text": "You are a poet of the sea. " * 40,
            "cache_control": {"type": "ephemeral"},
        }
    ]
    counted = CLIENT.messages.count_tokens(model=MODEL, messages=POEM, system=system).input_tokens
    message(system=system)
    usage = message(system=system).usage
    expect_equal(
        usage.input_tokens + usage.cache_read_input_tokens, counted, "tokens of the prompt"
    )
    expect(
        usage.cache_read_input_tokens > 200,
        f"{usage.cache_read_input_tokens} tokens from the cache",
    )


@seen.check
def structured() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    ask = [{"role": "user", "content": "Ann Lee is 34 and a lawyer."}]
    format = {"format": {"type": "json_schema", "schema": schema}}
    text = message(messages=ask, max_tokens=80, output_config=format).content[0].text
    expect('"age"' in text and "34" in text, text)


@seen.check
def tools_whole_and_streamed() -> None:
    fields = {"messages": ASK, "tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 80}
    whole = message(**fields)
    call = next(block for block in whole.content if block.type == "tool_use")
    expect_equal((whole.stop_reason, call.name), ("tool_use", "get_weather"), "how it ended")
    expect_weather(call.input)
    with message(**fields, streams=True) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    streamed = next(block for block in final.content if block.type == "tool_use")
    expect_equal(streamed.input, call.input, "streamed input")
    expect(pieces, "no piece of it was streamed")


@seen.check
def tools_round_trip() -> None:
    first = message(messages=ASK, tools=[TOOL], max_tokens=80)
    call = next((block for block in first.content if block.type == "tool_use"), None)
    expect(call, f"no call, but {first.content}")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "31 degrees and sunny"}
    turns = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = message(messages=turns, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=60)
    expect("31" in second.content[0].text, f"answer {second.content}")


@seen.check
def models() -> None:
    listed = [model.id for model in CLIENT.models.list()]
    expect(MODEL in listed, f"{MODEL} is not among {listed}")


@seen.check
def errors() -> None:
    for kind, fields in (
        (anthropic.NotFoundError, {"model": "no-such-model"}),
        (anthropic.BadRequestError, {"messages": [{"role": "user", "content": "word " * 40_000}]}),
    ):
        try:
            message(**fields)
            expect(False, f"{str(fields)[:60]} was taken")
        except kind as error:
            expect_equal(error.body["type"], "error", "shape of the error")


seen.tell()
