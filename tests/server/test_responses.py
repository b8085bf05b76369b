"""OpenAI's API of items: its events in order, what is kept of answers and for whom, what goes on alone."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import openai
import pytest

from pageturner.errors import ClientError
from pageturner.server.admission.limits import NO_LIMITS
from pageturner.server.api.responses.response_store import (
    COMPLETED,
    OVERHEAD,
    ResponseRecord,
    ResponseStore,
)
from pageturner.server.api.responses.responses import RESPONSES
from support.refusals import client_error, refusal_of

from .bytes_tokenizer import answer
from .conftest import Server, named_events
from .test_openai import SERVED

PATH = "/v1/responses"
PROMPT = "<|bos|>user\nhi<|end|>\n<|bos|>assistant\n"
STALL = "<|stall|>"  # never gets a token


def turn(role: str, text: str) -> str:
    return f"<|bos|>{role}\n{text}<|end|>\n"


def ask(server: Server, **fields: Any) -> Any:
    return server.http.post(PATH, json={"input": "hi", "max_output_tokens": 9, **fields})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events; each says its kind twice, and they are numbered."""
    found = named_events(response)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def call(**fields: Any) -> Any:
    raw = json.dumps({"input": "hi", **fields}).encode()
    return RESPONSES.read(RESPONSES.decode(raw, NO_LIMITS), SERVED)


def said(**fields: Any) -> str:
    return bytes(token for token in call(**fields).prompts[0] if token < 256).decode()


# -- one answer ----------------------------------------------------------------------------------------------
def test_a_response(server: Server) -> None:
    fields = {"model": "fake", "input": "hi", "max_output_tokens": 9, "metadata": {"a": "b"}}
    told = server.http.post(PATH, json=fields, headers={"x-request-id": "one-2"}).json()
    assert (told["id"], told["object"], told["model"]) == ("resp_one-2", "response", "fake")
    assert (told["status"], told["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    part = {"type": "output_text", "text": answer(PROMPT, 9), "annotations": [], "logprobs": []}
    item = {"id": "msg_one-2", "type": "message", "status": "incomplete", "role": "assistant"}
    assert told["output"] == [{**item, "content": [part]}]
    assert (told["metadata"], told["max_output_tokens"], told["store"]) == ({"a": "b"}, 9, True)
    assert told["usage"]["input_tokens"] + 9 == told["usage"]["total_tokens"] == 30
    ended = ask(server, input="<|short|>", max_output_tokens=99).json()
    assert (ended["status"], ended["incomplete_details"]) == ("completed", None)


def test_events_come_in_order(server: Server) -> None:
    told = events(ask(server, stream=True))
    kinds = [event["type"].removeprefix("response.") for event in told]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    text = answer(PROMPT, 9)
    assert "".join(event["delta"] for event in told if "delta" in event) == text
    assert told[-4]["text"] == told[-3]["part"]["text"] == text
    last = told[-1]["response"]
    assert last["output"] == [told[-2]["item"]]
    assert (told[0]["response"]["status"], told[0]["response"]["output"]) == ("in_progress", [])
    assert len({event["item_id"] for event in told if "item_id" in event}) == 1
    assert server.http.get(f"{PATH}/{last['id']}").json() == last
    short = events(ask(server, input="<|short|>", stream=True))
    assert short[-1]["type"] == "response.completed"


def test_a_failure_in_the_middle_is_the_last_event(server: Server) -> None:
    last = events(ask(server, input="<|fail|>", stream=True))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "sequence_failed"
    assert ask(server, input="<|fail|>").status_code == 500


def test_items_of_all_kinds() -> None:
    items = [
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]
    whole = "system\nbe\nuser\na\nassistant\nb\nuser\nc\nassistant\n"
    assert said(input=items) == whole
    assert said(input=items, instructions="x") == "system\nx\n" + whole


def test_fields_reach_the_parameters() -> None:
    params = call(
        temperature=0.5, top_p=0.5, max_output_tokens=7, tools=[], tool_choice="auto"
    ).params[0]
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.5, 7)
    form = {"type": "json_schema", "name": "it", "strict": True, "schema": {"type": "object"}}
    assert call(text={"format": form}).params[0].structured_outputs
    assert call(text={"format": {"type": "json_object"}}).params[0].structured_outputs
    assert (
        call(text={"format": {"type": "text"}, "verbosity": "low"}).params[0].structured_outputs
        is None
    )


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"input": None}, "missing_field", "input"),
        ({"input": []}, "missing_field", "input is missing or empty"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "invalid_value", "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "unsupported_parameter",
            "",
        ),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"max_output_tokens": 500}, "context_length_exceeded", "max_output_tokens is 500"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"conversation": "c"}, "unsupported_parameter", "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "unsupported_parameter", "include"),
        ({"text": {"format": {"type": "xml"}}}, "unsupported_parameter", "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "invalid_schema", "text.format"),
        ({"model": "gpt"}, "model_not_found", "gpt"),
    ],
)
def test_refusals(fields: dict[str, Any], code: str, says: str) -> None:
    with client_error() as caught:
        call(**fields)
    assert (caught.value.code, says in caught.value.message) == (code, True), caught.value.message


# -- what went before ----------------------------------------------------------------------------------------
def test_a_conversation_goes_on_from_an_answer(server: Server) -> None:
    first = ask(server, instructions="be", max_output_tokens=7).json()
    second = ask(server, input="more", previous_response_id=first["id"], stream=True)
    last = events(second)[-1]["response"]
    history = turn("user", "hi") + turn("assistant", first["output"][0]["content"][0]["text"])
    prompt = history + turn("user", "more") + "<|bos|>assistant\n"  # instructions are not handed on
    assert last["output"][0]["content"][0]["text"] == answer(prompt, 9)
    assert last["previous_response_id"] == first["id"]
    third = ask(
        server, input=[{"role": "user", "content": "on"}], previous_response_id=last["id"]
    ).json()
    items = server.http.get(f"{PATH}/{third['id']}/input_items").json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant", "user", "assistant", "user"]
    text = last["output"][0]["content"][0]["text"]
    prompt = history + turn("user", "more") + turn("assistant", text) + turn("user", "on")
    assert third["output"][0]["content"][0]["text"] == answer(prompt + "<|bos|>assistant\n", 9)


def test_an_answer_is_gone_back_to_and_deleted(server: Server) -> None:
    told = ask(server).json()
    path = f"{PATH}/{told['id']}"
    assert server.http.get(path).json() == told
    assert server.http.delete(path).json() == {
        "id": told["id"],
        "object": "response.deleted",
        "deleted": True,
    }
    for response in (
        server.http.get(path),
        server.http.delete(path),
        server.http.post(f"{path}/cancel"),
    ):
        assert refusal_of(response) == (
            404,
            "response_not_found",
        )
    gone = ask(server, previous_response_id=told["id"])
    assert refusal_of(gone) == (404, "response_not_found")
    unstored = ask(server, store=False).json()
    assert unstored["store"] is False
    assert server.http.get(f"{PATH}/{unstored['id']}").status_code == 404


def test_a_tenant_finds_its_own(start: Callable[..., Server]) -> None:
    server = start("--api-key", "a:one,b:two")
    mine, other = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
    told = server.http.post(PATH, json={"input": "hi", "max_output_tokens": 2}, headers=mine).json()
    path = f"{PATH}/{told['id']}"
    assert server.http.get(path, headers=other).status_code == 404
    assert server.http.delete(path, headers=other).status_code == 404
    body = {"input": "hi", "previous_response_id": told["id"]}
    assert server.http.post(PATH, json=body, headers=other).status_code == 404
    assert server.http.get(path, headers=mine).status_code == 200


def test_a_conversation_may_not_outgrow_a_body(start: Callable[..., Server]) -> None:
    server = start("--max-body-size", "2K")
    told = ask(server, input="x" * 900).json()
    longer = ask(server, input="x" * 900, previous_response_id=told["id"])
    assert (longer.status_code, longer.json()["error"]["param"]) == (400, "previous_response_id")


def record(id: str, size: int, tenant: str = "") -> ResponseRecord:
    asked = {"user": msgspec.Raw(b'"me"')}
    made = ResponseRecord(id, tenant, 0, asked, b"[]", background=False, store=True)
    made.status, made.body = COMPLETED, b"x" * (size - OVERHEAD - 8)
    return made


def test_the_store_is_bounded_and_keeps_what_was_used_last() -> None:
    store = ResponseStore(3 * 5000)
    for i in range(3):
        one = record(f"r{i}", 5000)
        assert one.size == 5000
        store.open(one)
        store.close(one)
    store.find("r0", "")
    store.close(record("r3", 5000))
    assert [name for name in ("r0", "r1", "r2", "r3") if kept(store, name)] == ["r0", "r2", "r3"]
    store.close(record("big", 15_001))  # alone over the bound: it costs the others nothing
    store.close(record("r2", 5000, "b"))  # of another tenant: the oldest of the largest gives way
    assert [name for name in ("r0", "r2", "r3", "big") if kept(store, name)] == ["r2", "r3"]
    store.delete("r2", "b")
    assert kept(store, "r2")


def kept(store: ResponseStore, id: str) -> bool:
    try:
        return store.find(id, "").id == id
    except ClientError:
        return False


def test_two_answers_under_way_have_two_ids() -> None:
    store = ResponseStore(9999)
    store.open(record("r", 5000))
    with client_error("under way", status=409):
        store.open(record("r", 5000))
    store.open(record("r", 5000, "b"))  # who is not even told that there is another one
    assert store.opened("r", "b").tenant == "b"


# -- in the background ---------------------------------------------------------------------------------------
def test_an_answer_in_the_background(server: Server) -> None:
    told = ask(server, background=True)
    assert (told.status_code, told.json()["background"]) == (200, True)
    assert told.json()["status"] in ("in_progress", "incomplete")
    path = f"{PATH}/{told.json()['id']}"
    ended = server.until(
        lambda: (r := server.http.get(path).json())["status"] == "incomplete" and r
    )
    assert ended["output"][0]["content"][0]["text"] == answer(PROMPT, 9)
    failed = ask(server, input="<|fail|>", background=True).json()
    path = f"{PATH}/{failed['id']}"
    ended = server.until(lambda: (r := server.http.get(path).json())["status"] == "failed" and r)
    assert ended["error"]["code"] == "sequence_failed"


def test_it_is_cancelled(server: Server) -> None:
    told = ask(server, input=STALL, background=True).json()
    path = f"{PATH}/{told['id']}"
    assert server.http.get(path).json()["status"] == "in_progress"
    going_on = ask(server, previous_response_id=told["id"])
    assert (going_on.status_code, going_on.json()["error"]["param"]) == (
        400,
        "previous_response_id",
    )
    aborts = len(server.notes("abort"))
    assert server.http.post(f"{path}/cancel").json()["status"] == "cancelled"
    assert server.http.get(path).json()["status"] == "cancelled"
    server.until(lambda: len(server.notes("abort")) > aborts)
    waited = ask(server).json()
    refused = server.http.post(f"{PATH}/{waited['id']}/cancel")
    assert refusal_of(refused) == (400, "invalid_value")


def test_it_is_deleted_while_it_goes_on(server: Server) -> None:
    told = ask(server, input=STALL, background=True).json()
    aborts = len(server.notes("abort"))
    assert server.http.delete(f"{PATH}/{told['id']}").json()["deleted"] is True
    server.until(lambda: len(server.notes("abort")) > aborts)
    server.until(lambda: server.http.get(f"{PATH}/{told['id']}").status_code == 404)


@pytest.mark.slow
def test_answers_outlive_the_engine(start: Callable[..., Server]) -> None:
    server = start()
    kept = ask(server).json()
    server.hold(10)
    told = ask(server, background=True, max_output_tokens=90).json()
    server.kill_when_held(1)
    path = f"{PATH}/{told['id']}"
    ended = server.until(
        lambda: (r := server.http.get(path).json())["status"] == "incomplete" and r
    )
    assert ended["output"][0]["content"][0]["text"] == answer(PROMPT, 90)
    assert server.notes("submit")[-1]["resume"] > 0
    assert server.http.get(f"{PATH}/{kept['id']}").json() == kept
    assert ask(server, input="more", previous_response_id=kept["id"]).status_code == 200


@pytest.mark.slow
def test_it_is_cancelled_while_there_is_no_engine(start: Callable[..., Server]) -> None:
    server = start(FAKE_HANGING_STARTS="2")
    told = [ask(server, input=STALL, background=True).json() for _ in range(2)]
    server.until(lambda: len(server.notes("submit")) == 2)
    os.kill(server.engine_pid(), signal.SIGKILL)
    server.until(lambda: server.http.get("/health").status_code == 503)
    told.append(ask(server, background=True).json())  # taken all the same
    for one in told:
        path = f"{PATH}/{one['id']}"
        assert server.http.get(path).json()["status"] == "in_progress"
        assert server.http.post(f"{path}/cancel").json()["status"] == "cancelled"
        assert server.http.get(path).json()["status"] == "cancelled"
    assert server.http.get("/load").json()["server_load"] == 0
    server.until(lambda: len(server.notes("start")) == 2)
    os.kill(server.engine_pid(), signal.SIGKILL)  # the one that hangs
    server.until(lambda: server.http.get("/health").status_code == 200)
    assert len(server.notes("submit")) == 2, "the next one has nothing to do"


def test_what_cannot_be_done_is_refused_at_once(server: Server) -> None:
    for fields, param in (
        ({"background": True, "max_output_tokens": 9999}, "max_output_tokens"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "tools": [{}]}, "tools"),
    ):
        response = ask(server, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# -- official client -----------------------------------------------------------------------------------------
def test_openai_client(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(model="fake", input="hi", max_output_tokens=9)
        assert whole.output_text == answer(PROMPT, 9)
        assert whole.usage is not None
        assert whole.usage.output_tokens == 9
        with client.responses.stream(model="fake", input="hi", max_output_tokens=9) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == answer(PROMPT, 9)
        assert client.responses.retrieve(whole.id).output_text == answer(PROMPT, 9)
        client.responses.delete(whole.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(whole.id)
