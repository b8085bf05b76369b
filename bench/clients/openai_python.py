"""openai for Python: sync, async, streams, tools, parse, responses, embeddings, files and batches.

python bench/clients/openai_python.py URL MODEL
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from typing import Any, Literal

import openai
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from seen import CITY, WEATHER, WEATHER_SCHEMA, Seen, expect, expect_equal, expect_weather

URL, MODEL = sys.argv[1:3]
CLIENT = OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120, max_retries=0)
ASYNC = {"base_url": f"{URL}/v1", "api_key": "none", "timeout": 120}
HAIKU = [{"role": "user", "content": "Write a short poem about the sea."}]
ASK = [{"role": "user", "content": CITY}]
RESPONSES_TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": WEATHER_SCHEMA,
    "strict": True,
}
seen = Seen("openai (Python)", "openai")


class Person(BaseModel):
    """What is parsed."""

    name: str
    age: int
    job: Literal["doctor", "lawyer", "farmer"]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]


def chat(**more: Any) -> Any:
    fields = {"model": MODEL, "messages": HAIKU, "temperature": 0, "max_tokens": 32} | more
    return CLIENT.chat.completions.create(**fields)


@seen.check
def models() -> None:
    listed = [model.id for model in CLIENT.models.list()]
    expect(MODEL in listed, f"{MODEL} is not among {listed}")
    expect_equal(CLIENT.models.retrieve(MODEL).id, MODEL, "the model")


@seen.check
def chat_and_stream() -> None:
    whole = chat()
    text, usage = whole.choices[0].message.content, whole.usage
    expect(text and usage.completion_tokens == 32, f"{usage.completion_tokens} tokens of {text!r}")
    expect_equal(whole.choices[0].finish_reason, "length", "finish_reason")
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect_equal(streamed, text, "streamed text")
    expect_equal(chunks[-1].usage.completion_tokens, 32, "usage of the stream")
    expect_equal({chunk.id for chunk in chunks}, {chunks[0].id}, "ids of chunks")


@seen.check
def stream_helper() -> None:
    fields = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 64}
    with CLIENT.chat.completions.stream(model=MODEL, temperature=0, **fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    expect("content.delta" in kinds and "content.done" in kinds, f"events {set(kinds)}")
    expect_equal(
        final.choices[0].message.content, chat(**fields).choices[0].message.content, "text"
    )


@seen.check
async def async_crowd() -> None:
    async with AsyncOpenAI(**ASYNC) as client:

        async def one() -> str:
            fields = {"model": MODEL, "messages": HAIKU, "temperature": 0, "max_tokens": 32}
            stream = await client.chat.completions.create(**fields, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        texts = await asyncio.gather(*[one() for _ in range(6)])
    expect_equal(set(texts), {chat().choices[0].message.content}, "six streams at once")


@seen.check
def completions() -> None:
    fields = {"model": MODEL, "prompt": "def add(a, b):", "max_tokens": 12, "seed": 5}
    answer = CLIENT.completions.create(**fields, n=2, logprobs=2)
    expect_equal([choice.index for choice in answer.choices], [0, 1], "choices")
    for choice in answer.choices:
        expect_equal("".join(choice.logprobs.tokens), choice.text, "tokens of logprobs")
        expect(all(x <= 0 for x in choice.logprobs.token_logprobs), "logprobs above 0")
    streamed = [chunk.choices[0].text for chunk in CLIENT.completions.create(**fields, stream=True)]
    again = CLIENT.completions.create(**fields).choices[0].text
    expect_equal("".join(streamed), again, "streamed text of a seed")


@seen.check
def logprobs() -> None:
    content = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    expect_equal(len(content), 32, "tokens with logprobs")
    for token in content:
        expect(
            len(token.top_logprobs) == 3 and bytes(token.bytes).decode(errors="ignore") is not None,
            "3 of each",
        )
        expect(
            token.logprob == max(top.logprob for top in token.top_logprobs),
            "greedy is the likeliest",
        )


@seen.check
def tools_required() -> None:
    choice = chat(messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=64).choices[0]
    expect_equal(choice.finish_reason, "tool_calls", "finish_reason")
    expect_equal(choice.message.tool_calls[0].function.name, "get_weather", "name")
    expect_weather(choice.message.tool_calls[0].function.arguments)


@seen.check
def tools_named_and_streamed() -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    fields = {"messages": ASK, "tools": [WEATHER], "tool_choice": named, "max_tokens": 64}
    whole = chat(**fields).choices[0].message.tool_calls[0].function.arguments
    expect_weather(whole)
    deltas = [chunk.choices[0].delta for chunk in chat(**fields, stream=True)]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    expect_equal((calls[0].index, calls[0].function.name), (0, "get_weather"), "first delta")
    expect_equal(
        "".join(call.function.arguments or "" for call in calls), whole, "streamed arguments"
    )


@seen.check
def tools_auto_round_trip() -> None:
    first = chat(messages=ASK, tools=[WEATHER], max_tokens=64).choices[0]
    expect(first.message.tool_calls, f"no call, but {first.message.content!r}")
    call = first.message.tool_calls[0]
    expect_weather(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "31 degrees and sunny"}
    second = chat(
        messages=[*ASK, first.message, result], tools=[WEATHER], tool_choice="none", max_tokens=64
    )
    expect(
        "31" in second.choices[0].message.content, f"answer {second.choices[0].message.content!r}"
    )


@seen.check
def parse_object() -> None:
    messages = [{"role": "user", "content": "Ann Lee is 34 and a lawyer."}]
    fields = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 80}
    parsed = (
        CLIENT.chat.completions.parse(**fields, response_format=Person).choices[0].message.parsed
    )
    expect_equal((parsed.age, parsed.job), (34, "lawyer"), f"of {parsed}")


@seen.check
def parse_tool() -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    fields = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 80}
    answer = CLIENT.chat.completions.parse(**fields, tools=[tool], tool_choice="required")
    parsed = answer.choices[0].message.tool_calls[0].function.parsed_arguments
    expect(isinstance(parsed, GetWeather), f"parsed {parsed!r}")


@seen.check
def responses_text() -> None:
    fields = {"model": MODEL, "input": "Write a short poem about the sea.", "temperature": 0}
    whole = CLIENT.responses.create(**fields, max_output_tokens=32)
    expect_equal(
        whole.output_text, chat().choices[0].message.content, "text of responses and chats"
    )
    events = list(CLIENT.responses.create(**fields, max_output_tokens=32, stream=True))
    expect_equal(
        [event.sequence_number for event in events], list(range(len(events))), "numbers of events"
    )
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect_equal(deltas, whole.output_text, "streamed text")
    expect_equal(events[-1].response.output_text, whole.output_text, "text of the last event")
    with CLIENT.responses.stream(
        **fields | {"input": "Say hello."}, max_output_tokens=64
    ) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        final = stream.get_final_response()
    expect_equal((final.status, final.output_text), ("completed", text), "text of the helper")


@seen.check
def responses_conversation() -> None:
    fields = {"model": MODEL, "temperature": 0, "max_output_tokens": 40}
    first = CLIENT.responses.create(**fields, input="My name is Hildegard.")
    second = CLIENT.responses.create(
        **fields, input="What is my name?", previous_response_id=first.id
    )
    expect("Hildegard" in second.output_text, f"answer {second.output_text!r}")
    expect_equal(
        CLIENT.responses.retrieve(first.id).output_text, first.output_text, "what was kept"
    )
    CLIENT.responses.delete(first.id)
    try:
        CLIENT.responses.retrieve(first.id)
        expect(False, "it was deleted and is there")
    except openai.NotFoundError as error:
        expect_equal(error.status_code, 404, "status")


@seen.check
def responses_parse() -> None:
    fields = {"model": MODEL, "temperature": 0, "max_output_tokens": 80}
    answer = CLIENT.responses.parse(
        **fields, input="Ann Lee is 34 and a lawyer.", text_format=Person
    )
    expect_equal(
        (answer.output_parsed.age, answer.output_parsed.job),
        (34, "lawyer"),
        f"of {answer.output_text}",
    )


@seen.check
def responses_tools() -> None:
    fields = {"model": MODEL, "temperature": 0, "tools": [RESPONSES_TOOL], "max_output_tokens": 80}
    whole = CLIENT.responses.create(**fields, input=CITY, tool_choice="required")
    call = next(item for item in whole.output if item.type == "function_call")
    expect_weather(call.arguments)
    events = list(
        CLIENT.responses.create(**fields, input=CITY, tool_choice="required", stream=True)
    )
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    expect_equal("".join(deltas), call.arguments, "streamed arguments")
    items = [
        {"role": "user", "content": CITY},
        {
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": call.arguments,
        },
        {"type": "function_call_output", "call_id": call.call_id, "output": "31 degrees and sunny"},
    ]
    answer = CLIENT.responses.create(**fields, input=items, tool_choice="none")
    expect("31" in answer.output_text, f"answer {answer.output_text!r}")


@seen.check
def embeddings() -> None:
    texts = ["The cat sat on the mat.", "A kitten sat on a rug.", "Interest rates rose."]
    rows = [row.embedding for row in CLIENT.embeddings.create(model=MODEL, input=texts).data]
    plain = CLIENT.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    for row, same in zip(rows, plain.data, strict=True):
        expect(abs(math.hypot(*row) - 1) < 1e-3, f"norm {math.hypot(*row)}")
        expect(
            max(abs(x - y) for x, y in zip(row, same.embedding, strict=True)) < 1e-6,
            "base64 is not float",
        )
    near, far = (sum(x * y for x, y in zip(rows[0], rows[k], strict=True)) for k in (1, 2))
    expect(near > far, f"alike {near:.3f}, unlike {far:.3f}")
    short = CLIENT.embeddings.create(model=MODEL, input=texts[0], dimensions=64).data[0].embedding
    expect(len(short) == 64 and abs(math.hypot(*short) - 1) < 1e-3, "64 dimensions of norm 1")


@seen.check
def errors() -> None:
    for kind, fields in (
        (openai.NotFoundError, {"model": "no-such-model"}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "word " * 40_000}]}),
    ):
        try:
            chat(**fields)
            expect(False, f"{str(fields)[:60]} was taken")
        except kind as error:
            expect(error.body["message"], "an error without a message")


@seen.check
def files_and_batches() -> None:
    body = {"model": MODEL, "messages": HAIKU, "temperature": 0, "max_tokens": 32}
    rows = [
        {"custom_id": f"row-{k}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for k in range(3)
    ]
    content = "\n".join(map(json.dumps, rows)).encode()
    file = CLIENT.files.create(file=("in.jsonl", content), purpose="batch")
    expect_equal(file.bytes, len(content), "bytes of the file")
    batch = CLIENT.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    until = time.monotonic() + 60
    while (
        batch.status not in ("completed", "failed", "expired", "cancelled")
        and time.monotonic() < until
    ):
        time.sleep(0.3)
        batch = CLIENT.batches.retrieve(batch.id)
    expect_equal(batch.status, "completed", "status")
    lines = [
        json.loads(line) for line in CLIENT.files.content(batch.output_file_id).text.splitlines()
    ]
    expect_equal(sorted(line["custom_id"] for line in lines), ["row-0", "row-1", "row-2"], "rows")
    texts = {line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    expect_equal(texts, {chat().choices[0].message.content}, "texts")


seen.tell()
