"""What a server says of itself: its names, and the pages that clients of other servers look at."""

from __future__ import annotations

from typing import Any

from support.refusals import refusal_of

from .bytes_tokenizer import TEMPLATE, VOCAB
from .conftest import Server


def test_one_model_by_its_name(server: Server) -> None:
    (listed,) = server.http.get("/v1/models").json()["data"]
    assert server.http.get("/v1/models/fake").json() == listed
    assert server.http.get("/v1/models/fake/").json() == listed
    wrong = server.http.get("/v1/models/org/other")
    assert refusal_of(wrong) == (404, "model_not_found")
    assert "'org/other'" in wrong.json()["error"]["message"]


def test_a_model_may_have_several_names(start: Any) -> None:
    server = start("--served-model-name", "org/first, second,org/first")
    listed = server.http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["org/first", "second"]
    assert server.http.get("/v1/models/org/first").json() == listed[0]
    for body in (
        {"prompt": "a"},
        {"prompt": "a" * 9000, "truncate_prompt_tokens": 5},
    ):  # in a worker, too
        for name in ("org/first", "second"):
            response = server.http.post(
                "/v1/completions", json={"model": name, "max_tokens": 1, **body}
            )
            assert (response.status_code, response.json()["model"]) == (200, "org/first")
        response = server.http.post("/v1/completions", json={"model": "fake", **body})
        assert response.status_code == 404
    assert server.http.get("/server_info").json()["served_model_names"] == ["org/first", "second"]


def test_an_empty_name_is_an_error_at_the_start(start: Any) -> None:
    server = start("--served-model-name", "a,,b", wait=False)
    assert "is empty" in server.finished()
    assert server.process.returncode == 1


def test_an_adapter_that_is_not_there_ends_the_start_before_anything_listens(start: Any) -> None:
    server = start("--lora", "a=/nowhere/at/all", wait=False)
    said = server.finished()
    assert "--lora a: /nowhere/at/all is no folder" in said
    assert "listening" not in said


def test_what_a_client_needs_to_render_chats_itself(server: Server) -> None:
    told = server.http.get("/tokenizer_info").json()
    assert (told["bos_token"], told["eos_token"], told["vocab_size"]) == (
        "<|bos|>",
        "<|end|>",
        VOCAB,
    )
    assert told["chat_template"] == TEMPLATE
    assert told["additional_special_tokens"] == ["<|bos|>", "<|end|>"]


def test_settings_without_paths_and_keys(start: Any) -> None:
    server = start("--api-key", "acme:sesame", "--max-num-seqs", "7")
    assert server.http.get("/server_info").status_code == 401
    response = server.http.get("/server_info", headers={"authorization": "Bearer sesame"})
    assert response.json()["engine"]["max_num_seqs"] == 7
    assert "sesame" not in response.text
    assert "model" not in response.json()["engine"]


def test_pages_of_llama_cpp(server: Server) -> None:
    props = server.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["default_generation_settings"]["params"]["repeat_penalty"] == 1.0
    assert props["chat_template"] == TEMPLATE
    slots = server.http.get("/slots").json()
    assert [slot["id"] for slot in slots] == list(range(props["total_slots"]))
    body = {"prompt": "<|slow|>", "stream": True, "max_tokens": 300, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # held: an iterator that is let go closes its stream
        next(lines)
        server.until(lambda: server.http.get("/slots").json()[0]["is_processing"])
    # the latest step is still that of the stream, and nothing runs any more
    server.until(
        lambda: not any(slot["is_processing"] for slot in server.http.get("/slots").json())
    )


def test_the_prefix_cache_is_reset_by_who_may(server: Server, start: Any) -> None:
    assert server.http.post("/reset_prefix_cache").status_code == 200
    server.until(lambda: server.notes("forget"))
    shared = start("--api-key", "a:one,b:two")
    refused = shared.http.post("/reset_prefix_cache", headers={"authorization": "Bearer one"})
    assert refusal_of(refused) == (403, "invalid_admin_key")
    assert shared.notes("forget") == []
