"""The HTTP surface with the fake engine: shapes to the byte, streaming equal to not streaming, errors."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.refusals import refusal_of

from .bytes_tokenizer import TEXT, BytesTokenizer, answer
from .conftest import Server

HI = [{"role": "user", "content": "hi"}]
CHAT_PROMPT = "<|bos|>user\nhi<|end|>\n<|bos|>assistant\n"


def post(server: Server, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return server.http.post(path, json={"prompt": "hello", **fields}, timeout=30)


def events(server: Server, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed answer; checks the framing on the way."""
    response = post(server, path, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    parts = response.text.removesuffix("data: [DONE]\n\n").split("\n\n")
    assert parts.pop() == ""
    parts = [part for part in parts if part != ": keep-alive"]
    assert all(part.startswith("data: {") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def text_of(chunks: list[dict[str, Any]], choice: int = 0) -> str:
    mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in mine)


# -- shapes --------------------------------------------------------------------------------------------------
def test_completion_to_the_byte(server: Server) -> None:
    response = post(server, max_tokens=8, model="fake")
    body = re.sub(r'"cmpl-\w+"', '"ID"', response.text)
    body = re.sub(r'"created":\d+', '"created":0', body)
    assert body == (
        '{"id":"ID","object":"text_completion","created":0,"model":"fake","choices":[{"index":0,'
        '"text":"oes on. ","logprobs":null,"finish_reason":"length","stop_reason":null,'
        '"prompt_logprobs":null,"prompt_token_ids":null,"token_ids":null}],'
        '"usage":{"prompt_tokens":5,"completion_tokens":8,"total_tokens":13,'
        '"prompt_tokens_details":{"cached_tokens":4}},"system_fingerprint":"fake"}'
    )
    assert response.headers["content-type"] == "application/json"


def test_streamed_chat_to_the_byte(server: Server) -> None:
    response = post(
        server,
        "/v1/chat/completions",
        messages=HI,
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    body = re.sub(r'"chatcmpl-\w+"', '"ID"', response.text)
    body = re.sub(r'"created":\d+', '"created":0', body)
    head = (
        'data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"fake",'
        '"system_fingerprint":"fake","choices":['
    )
    first, second = answer(CHAT_PROMPT, 2)
    role = '{"role":"assistant","content":""}'
    assert body == (
        head
        + f'{{"index":0,"delta":{role},"logprobs":null,"finish_reason":null}}]}}\n\n'
        + head
        + f'{{"index":0,"delta":{{"content":"{first}"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        + head
        + f'{{"index":0,"delta":{{"content":"{second}"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        + head
        + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"length","stop_reason":null}]}\n\n'
        + head
        + '],"usage":{"prompt_tokens":21,"completion_tokens":2,"total_tokens":23,'
        '"prompt_tokens_details":{"cached_tokens":16}}}\n\ndata: [DONE]\n\n'
    )
    assert response.headers["content-type"].startswith("text/event-stream")


def test_without_include_usage_no_chunk_is_without_choices(server: Server) -> None:
    chunks = events(server, "/v1/chat/completions", messages=HI, max_tokens=3)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


def test_one_chunk_for_each_token(server: Server) -> None:
    assert len(events(server, max_tokens=50)) == 50
    assert len(events(server, "/v1/chat/completions", messages=HI, max_tokens=50)) == 52
    assert len(events(server, prompt="hello<|leap|>", max_tokens=50)) == 50


def test_continuous_usage_counts_up(server: Server) -> None:
    options = {"continuous_usage_stats": True}
    assert not any(
        "usage" in chunk for chunk in events(server, max_tokens=4, stream_options=options)
    )
    options["include_usage"] = True
    chunks = events(server, max_tokens=4, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]


# -- text ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("prompt", ["hello", "x", "hello<|leap|>", "a<|leap|>"])
@pytest.mark.parametrize(
    "stop",
    [None, "fox", "東京", "é, ", ["lazy", "dog"], ["zzz"], "😀", 'e"y', "\t& g", ["o", "fo"]],
)
def test_streaming_equals_not_streaming_and_stop_strings_cut_exactly(
    server: Server, prompt: str, stop: Any
) -> None:
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 150, "stop": stop, "logprobs": 1}
    whole = post(server, **fields).json()
    chunks = events(server, stream_options={"include_usage": True}, **fields)
    choice = whole["choices"][0]
    assert text_of(chunks) == choice["text"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-2]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert chunks[-2]["choices"][0]["stop_reason"] == choice["stop_reason"]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for part in logprobs for x in part[key]] == choice["logprobs"][key]
    # and against the specification
    stops = [stop] if isinstance(stop, str) else stop or []
    n = next(
        (n for n in range(1, 151) if any(answer(prompt, n).rstrip("�").endswith(s) for s in stops)),
        150,
    )
    full = answer(prompt, n)
    cut = max((s for s in stops if full.endswith(s)), key=len, default="")
    assert choice["text"] == full[: len(full) - len(cut)]
    assert whole["usage"]["completion_tokens"] == n == len(choice["logprobs"]["tokens"])
    assert choice["finish_reason"] == ("stop" if cut else "length")
    assert choice["stop_reason"] == (cut or None)


def test_no_chunk_ends_inside_a_character(server: Server) -> None:
    chunks = events(server, max_tokens=300)
    assert "�" not in text_of(chunks)[1:-1]
    assert TEXT.decode() in text_of(chunks)


def test_the_end_of_sequence_is_counted_and_not_shown(server: Server) -> None:
    body = post(server, prompt="<|short|>", max_tokens=50).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] is None
    assert body["usage"]["completion_tokens"] == 6
    assert body["choices"][0]["text"] == answer("<|short|>", 6)
    assert (
        "<|end|>"
        in post(
            server, prompt="<|short|>", max_tokens=9, ignore_eos=True, skip_special_tokens=False
        ).json()["choices"][0]["text"]
    )


def test_stop_token_ids_are_the_reason(server: Server) -> None:
    stop = ord(answer("hello", 3)[2])
    choice = post(server, max_tokens=9, stop_token_ids=[stop]).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == answer("hello", 2)


def test_several_prompts_give_several_choices(server: Server) -> None:
    prompts = ["one", "two", "three"]
    body = post(server, prompt=prompts, max_tokens=20).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in body["choices"]] == [answer(p, 20) for p in prompts]
    assert body["usage"]["completion_tokens"] == 60
    chunks = events(server, prompt=[[111, 110, 101], list(b"two"), list(b"three")], max_tokens=20)
    assert [text_of(chunks, i) for i in range(3)] == [answer(p, 20) for p in prompts]


def test_token_ids_on_demand(server: Server) -> None:
    choice = post(server, max_tokens=3, return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == list(b"hello")
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    chunks = events(server, max_tokens=3, return_token_ids=True)
    assert [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]] == choice["token_ids"]
    assert ["prompt_token_ids" in chunk["choices"][0] for chunk in chunks] == [True, False, False]


# -- logprobs ------------------------------------------------------------------------------------------------
def test_completion_logprobs(server: Server) -> None:
    logprobs = post(server, max_tokens=3, logprobs=2).json()["choices"][0]["logprobs"]
    a, b, c = answer("hello", 3)
    assert logprobs["tokens"] == [a, b, c]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"][0] == {a: -0.5, chr(ord(a) + 1): -1.5}


def test_chat_logprobs_streamed_and_not(server: Server) -> None:
    fields: dict[str, Any] = {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    path = "/v1/chat/completions"
    content = post(server, path, **fields).json()["choices"][0]["logprobs"]["content"]
    first = answer(CHAT_PROMPT, 1)
    assert content[0]["token"] == first
    assert content[0]["bytes"] == list(first.encode())
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    parts = [c["choices"][0]["logprobs"] for c in events(server, path, **fields)]
    assert [entry for part in parts if part for entry in part["content"]] == content


# -- official client -----------------------------------------------------------------------------------------
@pytest.fixture
def client(server: Server) -> Any:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_client_completions_and_chats(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    done = client.completions.create(model="fake", prompt="hello", max_tokens=30)
    assert done.choices[0].text == answer("hello", 30)
    parts = client.completions.create(model="fake", prompt="hello", max_tokens=30, stream=True)
    assert "".join(part.choices[0].text for part in parts) == answer("hello", 30)
    chat = client.chat.completions.create(model="fake", messages=HI, max_tokens=30)  # type: ignore[arg-type]
    assert chat.choices[0].message.content == answer(CHAT_PROMPT, 30)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 16
    assert chat.system_fingerprint == "fake"
    stream = client.chat.completions.create(model="fake", messages=HI, max_tokens=30, stream=True)  # type: ignore[call-overload]
    assert "".join(part.choices[0].delta.content or "" for part in stream) == answer(
        CHAT_PROMPT, 30
    )


def test_openai_client_sees_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="fake", prompt="x", temperature=-1)
    with pytest.raises(openai.InternalServerError, match="told to fail"):
        client.completions.create(model="fake", prompt="<|fail|>", max_tokens=9)
    with pytest.raises(
        openai.APIError, match="told to fail"
    ):  # at once, where no token was sent before it
        list(client.completions.create(model="fake", prompt="<|fail|>", max_tokens=9, stream=True))


# -- errors --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("POST", "/v1/completions", b"{", 400, "invalid_json"),
        ("POST", "/v1/completions", b"", 400, "invalid_json"),
        ("POST", "/v1/completions", b'{"prompt": ""}', 400, "empty_prompt"),
        ("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 0}', 400, "invalid_value"),
        ("POST", "/v1/completions", b'{"prompt": "a", "n": 0}', 400, "invalid_value"),
        ("POST", "/v1/completions", b'{"prompt": "a", "n": 65}', 400, "invalid_value"),
        ("POST", "/v1/completions", b'{"prompt": "a", "n": true}', 400, "invalid_type"),
        ("POST", "/v1/completions", b'{"prompt": "a", "n": 2, "best_of": 1}', 400, "invalid_value"),
        (
            "POST",
            "/v1/completions",
            b'{"prompt": "a", "best_of": 2, "stream": true}',
            400,
            "invalid_value",
        ),
        ("POST", "/v1/completions", b'{"prompt": "a", "model": "b"}', 404, "model_not_found"),
        (
            "POST",
            "/v1/completions",
            b'{"prompt": "' + b"x" * 3000 + b'"}',
            400,
            "context_length_exceeded",
        ),
        (
            "POST",
            "/v1/completions",
            b'{"prompt": "' + b"x" * 90000 + b'"}',
            400,
            "context_length_exceeded",
        ),
        ("POST", "/v1/chat/completions", b'{"messages": 5}', 400, "invalid_type"),
        ("POST", "/tokenize", b"{}", 400, "missing_field"),
        ("POST", "/tokenize", b'{"prompt": 5}', 400, "invalid_json"),
        (
            "POST",
            "/tokenize",
            b'{"prompt": "a", "reasoning_effort": "none at all"}',
            400,
            "invalid_value",
        ),
        ("POST", "/tokenize", b'{"prompt": "a", "model": "other"}', 404, "model_not_found"),
        ("POST", "/detokenize", b'{"tokens": [1], "model": "other"}', 404, "model_not_found"),
        ("POST", "/detokenize", b'{"tokens": [9999]}', 400, "invalid_value"),
        ("POST", "/detokenize", b"{}", 400, "invalid_json"),
        ("GET", "/v1/completions", b"", 405, "method_not_allowed"),
        ("DELETE", "/health", b"", 405, "method_not_allowed"),
        ("GET", "/v1/nothing", b"", 404, "not_found"),
    ],
)
def test_errors(
    server: Server, method: str, path: str, body: bytes, status: int, reason: str
) -> None:
    response = server.http.request(method, path, content=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "reason"}
    assert (error["code"], error["reason"]) == (status, reason)
    assert error["message"]
    kinds = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowedError"}
    assert error["type"] == kinds[status]
    assert post(server, max_tokens=1).status_code == 200  # nobody else is affected


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/batches", "no such path: did you mean /v1/batches? (/docs"),
        ("POST", "/v1/chat/completion", "no such path: did you mean /v1/chat/completions? (/docs"),
        ("POST", "/completion", "no such path: did you mean /v1/completions? (/docs"),
        ("GET", "/nothing/like/it", "no such path: there are /, "),
        ("DELETE", "/v1/nothing", "no such path: there are /v1/batches, "),
        ("GET", "/v1/chat/completions", "/v1/chat/completions takes OPTIONS, POST, not GET"),
    ],
)
def test_a_wrong_path_or_method_is_told_the_right_one(
    server: Server, method: str, path: str, said: str
) -> None:
    assert server.http.request(method, path).json()["error"]["message"].startswith(said)


def test_a_failure_after_the_first_chunk_is_an_event(server: Server) -> None:
    response = post(server, prompt="<|fail|>", stream=True, max_tokens=9)
    assert response.status_code == 200
    *_, error, done, end = response.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
    assert (done, end) == ("data: [DONE]", "")


def test_ten_megabytes_are_refused_before_they_are_read(server: Server) -> None:
    body = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    response = server.http.post("/v1/completions", content=body, timeout=30)
    assert refusal_of(response) == (413, "body_too_large")
    parts = (
        body[i : i + 65536] for i in range(0, len(body), 65536)
    )  # chunked: no length is announced
    response = server.http.post("/v1/completions", content=parts, timeout=30)
    assert refusal_of(response) == (413, "body_too_large")


def test_an_oversized_body_is_answered_while_it_is_still_being_sent(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10000000\r\n\r\n"
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


def test_broken_http_hurts_nobody(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for junk in (
        b"\x00\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ):
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            sock.sendall(junk)
            sock.settimeout(30)
            assert b"200 OK" not in sock.recv(100)
    assert post(server, max_tokens=1).status_code == 200


# -- other endpoints -----------------------------------------------------------------------------------------
def test_models_health_version_ping_load(server: Server) -> None:
    model = server.http.get("/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"], model["object"]) == ("fake", 2048, "model")
    assert server.http.get("/health").json() == {"status": "ok"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", server.http.get("/version").json()["version"])
    assert server.http.get("/ping").status_code == 200
    assert "server_load" in server.http.get("/load").json()


def test_tokenize_and_detokenize(server: Server) -> None:
    def ask(path: str, **fields: Any) -> Any:
        return server.http.post(path, json=fields).json()

    found = ask("/tokenize", prompt="hi<|end|>é", return_token_strs=True)
    assert found["tokens"] == [104, 105, 257, 0xC3, 0xA9]
    assert found["token_strs"] == ["h", "i", "<|end|>", "�", "�"]
    assert (found["count"], found["max_model_len"]) == (5, 2048)
    chat = ask("/tokenize", messages=HI)["tokens"]
    assert chat == BytesTokenizer().encode(CHAT_PROMPT, add_special=True, parse_special=True)
    assert ask("/detokenize", tokens=found["tokens"]) == dict.fromkeys(
        ("prompt", "content"), "hi<|end|>é"
    )
    assert ask("/detokenize", tokens=[])["prompt"] == ""


def test_metrics_have_vllms_names_and_count(server: Server) -> None:
    before = server.metric("vllm:request_success_total")
    tokens = server.metric("vllm:request_generation_tokens_sum")
    post(server, max_tokens=7)
    assert server.metric("vllm:request_success_total") == before + 1
    assert server.metric("vllm:request_generation_tokens_sum") == tokens + 7
    text = server.http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens",
        "vllm:generation_tokens",
        "vllm:prefix_cache_queries",
        "vllm:prefix_cache_hits",
        "vllm:num_preemptions",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_prompt_tokens",
        "pageturner:engine_restarts",
        "vllm:prompt_tokens_by_source",
    ):
        assert name in families, name
    buckets = [
        float(sample.value)
        for sample in families["vllm:inter_token_latency_seconds"].samples
        if sample.name.endswith("_bucket")
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] > 0


def test_metrics_say_what_of_the_machine_is_used(server: Server) -> None:
    post(server, max_tokens=7)
    assert server.metric("pageturner:machine_limit") == 20 + 100 + 50
    assert server.metric("pageturner:achieved") == pytest.approx(10)  # 1 GB in a tenth of a second
    # kernels, reading, products
    assert server.metric("pageturner:utilisation") == pytest.approx(0.5 + 0.5 + 0.0)


def test_request_ids_are_echoed_and_logged_and_prompts_are_not(server: Server) -> None:
    response = server.http.post(
        "/v1/completions",
        json={"prompt": "my secret", "max_tokens": 2},
        headers={"x-request-id": "trace-me.1"},
    )
    assert response.headers["x-request-id"] == "trace-me.1"
    assert response.json()["id"] == "cmpl-trace-me.1"
    line = server.until(lambda: re.search(r".*trace-me\.1.*\n", server.log))[0]
    assert "200" in line
    assert "prompt=9" in line
    assert "output=2" in line
    assert "secret" not in server.log
    evil = server.http.get("/v1/models", headers={"x-request-id": "a b\tc" * 50})
    assert re.fullmatch(r"[0-9a-f]{32}", evil.headers["x-request-id"])


def test_api_key(start: Any) -> None:
    by_environment = start(PAGETURNER_API_KEY="open-up")
    assert by_environment.http.get("/v1/models").status_code == 401
    headers = {"authorization": "Bearer open-up"}
    assert by_environment.http.get("/v1/models", headers=headers).status_code == 200
    guarded = start("--api-key", "sesame-123")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sesame-123"}):
        response = guarded.http.get("/v1/models", headers=headers)
        assert refusal_of(response) == (
            401,
            "invalid_api_key",
        )
    response = guarded.http.get("/v1/models", headers={"authorization": "bearer sesame-123"})
    assert response.status_code == 200
    for path in ("/health", "/metrics", "/ping", "/version"):
        assert guarded.http.get(path).status_code == 200
    assert "sesame" not in guarded.log
