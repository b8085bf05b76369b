"""Fields and histories as clients of other servers send them: cases after public reports, and variants of each kind."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import httpx
import pytest

from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.api.base.body import decode
from pageturner.server.api.responses.responses import RESPONSES
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.conversation import prompt_text, read_messages
from support.engines import GOLDENS
from support.refusals import client_error

HI = {"role": "user", "content": "hi"}


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    answer = client.post(path, json={**body, "stream": True})
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


# -- histories -------------------------------------------------------------------------------------
def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}


@pytest.mark.parametrize("text", ['{"city":', '{"s": "He said "x""}', "[1]", "plain", '"{}"'])
def test_malformed_arguments_are_shown_as_they_are(text: str) -> None:
    (message,) = read_messages([called(text)])
    assert message["tool_calls"][0]["function"]["arguments"] == {"raw_arguments": text}


@pytest.mark.parametrize("nothing", ["", " ", None, {}, "{}", "null"])
def test_no_arguments_are_an_empty_object(nothing: Any) -> None:
    (message,) = read_messages([called(nothing)])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_parts_of_text_go_by_several_names() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "output_text", "text": "b"},
        {"type": "refusal", "refusal": "c"},
    ]
    (message,) = read_messages([{"role": "assistant", "content": parts}])
    assert [part["text"] for part in message["content"]] == ["a", "b", "c"]
    assert {part["type"] for part in message["content"]} == {"text"}


def test_the_older_form_of_calls_is_a_call_and_its_result() -> None:
    legacy = {"name": "f", "arguments": '{"a": 1}'}
    told = [
        {"role": "assistant", "content": None, "function_call": legacy},
        {"role": "function", "name": "f", "content": None},
    ]
    call, result = read_messages(told)
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert "function_call" not in call
    assert (result["role"], result["content"]) == ("tool", None)
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    assert "function_call" not in read_messages([{**told[0], "function_call": None}])[0]


def test_a_cut_call_of_our_own_is_taken_back(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
    said = '<tool_call>\n{"name": "get", "arguments": {"city": "B'
    ids = post(client, "/tokenize", prompt=said, add_special_tokens=False)["tokens"]
    asked = {"messages": [HI], "tools": [tool], "force_ids": ids, "max_tokens": len(ids)}
    message = post(client, "/v1/chat/completions", **asked)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "B'
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "cut off"}
    post(client, "/v1/chat/completions", messages=[HI, message, result], max_tokens=1)


def test_an_answer_of_messages_goes_on_where_its_beginning_is_given(client: httpx.Client) -> None:
    asked = {
        "model": "tiny_llama",
        "max_tokens": 3,
        "messages": [HI, {"role": "assistant", "content": "so"}],
    }
    told = post(client, "/v1/messages", **asked)
    chat = {"messages": asked["messages"], "continue_final_message": True, "max_tokens": 1}
    used = post(client, "/v1/chat/completions", **chat)["usage"]["prompt_tokens"]
    assert told["usage"]["input_tokens"] + told["usage"]["cache_read_input_tokens"] == used


# -- fields ----------------------------------------------------------------------------------------
def test_the_form_of_responses_is_named() -> None:
    nested = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    with client_error(r"send .*schema", param="text.format"):
        RESPONSES.decode(
            json.dumps({"input": "hi", "text": {"format": nested}}).encode(), NO_LIMITS
        )


def test_grammars_stand_under_the_names_of_llamacpp_too() -> None:
    body = decode(b'{"grammar": "root ::= \\"a\\"{3}"}')
    assert body.structured_outputs == {"grammar": 'root ::= "a"{3}'}
    assert decode(b'{"json_schema": {"type": "object"}}').structured_outputs == {
        "json": {"type": "object"}
    }
    assert decode(b'{"grammar": "", "json_schema": null}').structured_outputs is None
    with client_error("send one"):
        decode(b'{"grammar": "x", "structured_outputs": {"grammar": "y"}}')


@pytest.mark.parametrize("side", ["left", "right"])
def test_either_end_of_a_prompt_goes(client: httpx.Client, side: str) -> None:
    more = {"truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True}
    prompts = [[10, 11, 12, 13], list(range(10, 220))]
    for prompt in prompts:
        told = post(client, "/v1/completions", prompt=prompt, max_tokens=1, **more)["choices"][0]
        kept = prompt[:2] if side == "right" else prompt[-2:]
        assert told["prompt_token_ids"] == kept


def test_tokens_by_their_ids(client: httpx.Client) -> None:
    asked = {"max_tokens": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    told = post(client, "/v1/completions", prompt="One", logprobs=2, **asked)["choices"][0]
    names = [f"token_id:{token}" for token in told["token_ids"]]
    assert told["logprobs"]["tokens"] == names
    assert all(
        name in top for name, top in zip(names, told["logprobs"]["top_logprobs"], strict=True)
    )
    body = {"messages": [HI], "logprobs": True, "top_logprobs": 1, **asked}
    streamed = events(client, "/v1/chat/completions", **body)
    entries = [
        entry
        for one in streamed
        for entry in (one["choices"][0]["logprobs"] or {}).get("content", ())
    ]
    choice = post(client, "/v1/chat/completions", **body)
    assert [entry["token"] for entry in choice["choices"][0]["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["choices"][0]["token_ids"]
    ]
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in entries)


def test_tokens_of_one_text_are_two_entries(client: httpx.Client) -> None:
    asked = {"prompt": "One", "max_tokens": 8, "logprobs": 20, "temperature": 2, "seed": 1}
    told = post(client, "/v1/completions", **asked, return_token_ids=True)["choices"][0]["logprobs"]
    for text, value, top in zip(
        told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert len(top) in (20, 21)
        assert top[text] == value


def test_prompt_token_ids_stand_at_the_top_too(client: httpx.Client) -> None:
    asked = {"messages": [HI], "max_tokens": 2, "return_token_ids": True}
    told = post(client, "/v1/chat/completions", **asked)
    assert told["prompt_token_ids"] == told["choices"][0]["prompt_token_ids"]
    first, *others = events(client, "/v1/chat/completions", **asked)
    assert first["prompt_token_ids"] == told["prompt_token_ids"]
    assert not any("prompt_token_ids" in one for one in others)


def test_thoughts_are_left_out_where_nobody_wants_them(client: httpx.Client) -> None:
    ids = post(client, "/tokenize", prompt="<think>hm</think>yes", add_special_tokens=False)[
        "tokens"
    ]
    asked = {"messages": [HI], "force_ids": ids, "max_tokens": len(ids), "include_reasoning": False}
    told = post(client, "/v1/chat/completions", **asked)
    assert told["choices"][0]["message"] == {"role": "assistant", "content": "yes"}
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert not any(
        "reasoning" in one["choices"][0]["delta"]
        for one in events(client, "/v1/chat/completions", **asked)
    )


def test_rows_of_another_type_and_order(client: httpx.Client) -> None:
    row = post(client, "/v1/embeddings", input="x")["data"][0]["embedding"]
    for dtype, code in (("float16", "e"), ("float32", "f")):
        for endianness, order in (("big", ">"), ("little", "<")):
            asked = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": endianness}
            told = post(client, "/v1/embeddings", input="x", **asked)["data"][0]["embedding"]
            found = struct.unpack(f"{order}{len(row)}{code}", base64.b64decode(told))
            assert found == pytest.approx(row, abs=1e-3)
    assert (
        client.post("/v1/embeddings", json={"input": "x", "embed_dtype": "fp8_e4m3"}).status_code
        == 400
    )


def test_reranking_as_tei_asks_for_it(client: httpx.Client) -> None:
    ours = post(client, "/rerank", query="a", documents=["b", "c a"])["results"]
    plain = post(client, "/rerank", query="a", texts=["b", "c a"])
    assert plain == [{"index": one["index"], "score": one["relevance_score"]} for one in ours]
    told = post(client, "/rerank", query="a", texts=["b"], return_text=True, raw_scores=True)
    assert told[0]["text"] == "b"


# -- suites of vLLM and llama.cpp ------------------------------------------------------------------
def test_fields_that_vllms_answers_always_have(client: httpx.Client) -> None:
    said = post(client, "/v1/completions", prompt="a", max_tokens=1)["choices"][0]
    for name in ("prompt_logprobs", "prompt_token_ids", "token_ids"):
        assert said[name] is None
    said = post(client, "/v1/chat/completions", messages=[HI], max_tokens=1)
    assert (said["prompt_logprobs"], said["prompt_token_ids"]) == (None, None)
    assert said["choices"][0]["token_ids"] is None
    assert said["choices"][0]["message"]["reasoning"] is None


def test_roles_that_a_template_writes_are_taken(client: httpx.Client) -> None:
    content = [{"type": "text", "text": "what is "}, {"type": "text", "text": "1+1?"}]
    asked = {"temperature": 0, "max_tokens": 4}
    said = [
        post(
            client, "/v1/chat/completions", messages=[{"role": "my-role", "content": one}], **asked
        )
        for one in ("what is 1+1?", content)
    ]
    assert said[0]["choices"] == said[1]["choices"]
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with client_error("has no role 'my-role'"):
        prompt_text(ChatTemplate(template), [HI, {"role": "my-role", "content": "x"}], {})


@pytest.mark.parametrize("echo", [True, False])
def test_a_chat_begins_with_the_message_that_it_goes_on_with(
    client: httpx.Client, echo: bool
) -> None:
    messages = [HI, {"role": "assistant", "content": "An apple a day"}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    asked |= {"echo": echo, "max_tokens": 4, "temperature": 0}
    whole = post(client, "/v1/chat/completions", **asked)["choices"][0]["message"]["content"]
    assert whole.startswith("An apple a day") == echo
    chunks = events(client, "/v1/chat/completions", **asked)
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == whole
    messages.pop()
    asked |= {"continue_final_message": False, "add_generation_prompt": True}
    assert post(client, "/v1/chat/completions", **asked)["choices"], "there is nothing to echo"


def test_every_wrong_key_of_a_bias_is_named(client: httpx.Client) -> None:
    asked = {"prompt": "a", "logit_bias": {"bad1": 5, "7": 1, "bad2": 2}}
    answer = client.post("/v1/completions", json=asked)
    assert (answer.status_code, "'bad1'" in answer.text, "'bad2'" in answer.text) == (
        400,
        True,
        True,
    )


def test_pieces_of_tokens(client: httpx.Client) -> None:
    told = post(client, "/tokenize", content="the 🤗", with_pieces=True)["tokens"]
    pieces = [
        bytes(one["piece"]) if isinstance(one["piece"], list) else one["piece"].encode()
        for one in told
    ]
    assert b"".join(pieces).decode().strip() == "the 🤗"
    assert [one["id"] for one in told] == post(client, "/tokenize", content="the 🤗")["tokens"]


# -- Ollama and llama.cpp --------------------------------------------------------------------------
def test_ollamas_pages_say_what_the_file_says(client: httpx.Client) -> None:
    version = client.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    (model,) = client.get("/api/tags").json()["models"]
    details = model["details"]
    assert (details["format"], details["family"], details["families"]) == (
        "gguf",
        "llama",
        ["llama"],
    )
    assert details["parameter_size"]
    assert details["quantization_level"]
    assert len(bytes.fromhex(model["digest"])) == 32
    assert model["size"] == (GOLDENS / "tiny_llama.gguf").stat().st_size
    shown = post(client, "/api/show", model=model["name"])
    assert shown["details"] == details
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"]
    assert shown["model_info"]["general.parameter_count"] > 0
    assert shown["modelfile"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_ollama_says_logprobs_and_nothing_where_nothing_is_asked(
    client: httpx.Client, path: str
) -> None:
    asked = {"messages": [HI]} if path == "/api/chat" else {"prompt": "hi"}
    asked |= {"model": "tiny_llama", "logprobs": True, "top_logprobs": 2, "think": False}
    more = {"options": {"num_predict": 3, "temperature": 0}}
    told = post(client, path, **asked, **more, stream=False)
    assert [len(entry["top_logprobs"]) for entry in told["logprobs"]] == [2] * told["eval_count"]
    lines = client.post(path, json={**asked, **more}).text.splitlines()
    entries = [entry for line in lines for entry in json.loads(line).get("logprobs", ())]
    assert entries == told["logprobs"]
    assert told["load_duration"] > 0
    nothing = post(client, path, **asked, options={"num_predict": 0}, stream=False)
    assert (nothing["eval_count"], nothing["done_reason"]) == (0, "length")


def test_a_context_of_ollama_is_gone_on_from(client: httpx.Client) -> None:
    asked = {"model": "tiny_llama", "stream": False, "options": {"num_predict": 2}}
    for raw in (True, False):
        first = post(client, "/api/generate", **asked, prompt="the old", raw=raw)
        assert len(first["context"]) == first["prompt_eval_count"] + first["eval_count"]
        second = post(
            client, "/api/generate", **asked, prompt="house", raw=raw, context=first["context"]
        )
        assert second["context"][: len(first["context"])] == first["context"]


def test_paths_of_llamacpp_without_a_version(client: httpx.Client) -> None:
    assert client.get("/models").json()["data"]
    assert post(client, "/completions", prompt="a", max_tokens=1)["choices"]
    assert post(client, "/chat/completions", messages=[HI], max_tokens=1)["choices"]
    assert post(client, "/embeddings", input="a")["data"]
    assert post(client, "/responses/", input="a", max_output_tokens=1)["output"]
    asked = {"model": "tiny_llama", "messages": [HI], "max_tokens": 1}
    assert post(client, "/messages", **asked)["content"]
    assert client.post("/messages", json={}).json()["type"] == "error", "in Anthropic's shape"
    tokens = post(client, "/tokenize", content="the old")["tokens"]
    assert post(client, "/detokenize", tokens=tokens)["content"] == "the old"
    assert tokens == post(client, "/tokenize", prompt="the old", add_special_tokens=False)["tokens"]
    rendered = post(client, "/apply-template", messages=[HI])["prompt"]
    asked = {"prompt": rendered, "add_special_tokens": False}
    assert (
        post(client, "/tokenize", **asked)["tokens"]
        == post(client, "/tokenize", messages=[HI])["tokens"]
    )


def test_preemptions_of_requests_are_counted(client: httpx.Client) -> None:
    assert "vllm:request_num_preemptions_bucket" in client.get("/metrics").text
