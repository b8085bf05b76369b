"""litellm: its providers openai, hosted_vllm, text-completion-openai and anthropic; tools; embeddings; the
fallback of its router when the context of one model is too short.

    python bench/clients/litellm_python.py URL MODEL SHORT_URL SHORT_MODEL      (the second: a short context)
"""

from __future__ import annotations

import asyncio
import math
import sys
from typing import Any

import litellm
from seen import CITY, WEATHER, Seen, expect, expect_equal, expect_weather

URL, MODEL, SHORT_URL, SHORT_MODEL = sys.argv[1:5]
BASE = {"api_base": f"{URL}/v1", "api_key": "none", "timeout": 120, "num_retries": 0}
POEM = [{"role": "user", "content": "Write a short poem about the sea."}]
LONG = [{"role": "user", "content": "Say yes. " + "word " * 3000}]
litellm.telemetry = False
seen = Seen("litellm", "litellm")


def chat(provider: str = "openai", **more: Any) -> Any:
    fields = {"messages": POEM, "temperature": 0, "max_tokens": 32, **BASE} | more
    return litellm.completion(model=f"{provider}/{MODEL}", **fields)


@seen.check
def chat_and_stream() -> None:
    text = chat().choices[0].message.content
    chunks = list(chat(stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    expect(len(text) > 20, f"text {text!r}")
    expect_equal(streamed, text, "streamed text")
    expect_equal(
        litellm.stream_chunk_builder(chunks).choices[0].message.content, text, "built from chunks"
    )


@seen.check
async def async_crowd() -> None:
    fields = {"messages": POEM, "temperature": 0, "max_tokens": 32, **BASE}
    all = await asyncio.gather(
        *[litellm.acompletion(model=f"openai/{MODEL}", **fields) for _ in range(4)]
    )
    expect_equal(
        {one.choices[0].message.content for one in all},
        {chat().choices[0].message.content},
        "four at once",
    )


@seen.check
def hosted_vllm() -> None:
    expect_equal(
        chat("hosted_vllm").choices[0].message.content,
        chat().choices[0].message.content,
        "text of hosted_vllm",
    )


@seen.check
def text_completion() -> None:
    fields = {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 16, **BASE}
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", **fields)
    expect("return" in answer.choices[0].text, f"text {answer.choices[0].text!r}")


@seen.check
def tools() -> None:
    fields = {"messages": [{"role": "user", "content": CITY}], "tools": [WEATHER], "max_tokens": 64}
    call = chat(**fields, tool_choice="required").choices[0].message.tool_calls[0]
    expect_equal(call.function.name, "get_weather", "name")
    expect_weather(call.function.arguments)


@seen.check
def embedding() -> None:
    answer = litellm.embedding(
        model=f"openai/{MODEL}", input=["The cat sat.", "A kitten sat."], **BASE
    )
    for row in answer.data:
        norm = math.hypot(*row["embedding"])
        expect(abs(norm - 1) < 1e-3, f"norm {norm}")


@seen.check
def anthropic_provider() -> None:
    answer = chat("anthropic", api_base=URL)
    expect_equal(
        answer.choices[0].message.content, chat().choices[0].message.content, "text of /v1/messages"
    )


@seen.check
def responses() -> None:
    fields = {
        "input": "Write a short poem about the sea.",
        "temperature": 0,
        "max_output_tokens": 32,
        **BASE,
    }
    answer = litellm.responses(model=f"openai/{MODEL}", **fields)
    text = "".join(part.text for item in answer.output for part in item.content)
    expect_equal(text, chat().choices[0].message.content, "text of /v1/responses")


@seen.check
def overflow_has_its_name() -> None:
    try:
        litellm.completion(
            model=f"openai/{SHORT_MODEL}", messages=LONG, **BASE | {"api_base": f"{SHORT_URL}/v1"}
        )
        expect(False, "it was taken")
    except litellm.ContextWindowExceededError as error:
        expect("maximum context length" in str(error), str(error))


@seen.check
def overflow_falls_back() -> None:
    def deployment(name: str, url: str, model: str) -> dict[str, Any]:
        return {
            "model_name": name,
            "litellm_params": {
                "model": f"openai/{model}",
                "api_base": f"{url}/v1",
                "api_key": "none",
            },
        }

    router = litellm.Router(
        model_list=[deployment("short", SHORT_URL, SHORT_MODEL), deployment("long", URL, MODEL)],
        context_window_fallbacks=[{"short": ["long"]}],
        num_retries=0,
    )
    near = router.completion(model="short", messages=POEM, max_tokens=4, temperature=0)
    far = router.completion(model="short", messages=LONG, max_tokens=4, temperature=0)
    expect_equal(near.model.removeprefix("openai/"), SHORT_MODEL, "who answers what is short")
    expect_equal(far.model.removeprefix("openai/"), MODEL, "who answers what is too long")
    expect(far.usage.prompt_tokens > 3000, f"{far.usage.prompt_tokens} tokens")


seen.tell()
