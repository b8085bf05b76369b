"""Replicas that come and go: files, names, registrations, several models, slow starts, slow replicas."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from pageturner.config.settings import RouterConfig
from pageturner.http.http_client import parse_address
from pageturner.router.app import create_app
from pageturner.router.fleet import Fleet
from pageturner.router.members import MAX_FILE, MAX_MEMBERS, Listed, Members, listed, read_file
from pageturner.router.replica import FIRST_BYTES, Member
from pageturner.router.request_hints import RequestHints, hints_of
from pageturner.server.api.openapi.openapi import document
from server.test_openai import SERVED
from support.json_schemas import Validator
from support.refusals import client_error, engine_fault, refusal_of

from .replica import Replica, routed, write
from .test_route import fleet, streams


def members(
    *words: str, clock: Any = None, resolve: Any = None, **settings: Any
) -> tuple[Members, list[Any]]:
    """Sources, and what they told."""
    told: list[Any] = []
    more = {"clock": clock} if clock else {}
    more |= {"resolve": resolve} if resolve else {}
    config = RouterConfig(**settings)
    return Members(
        config, listed(words), lambda all: told.append([str(one.address) for one in all]), **more
    ), told


# -- where they come from ------------------------------------------------------------------------------------


def test_how_replicas_are_written() -> None:
    found = listed(["host:1", "story,pirate=http://b:2/v1", "c=dns+http://d:3"])
    assert [(str(one.address), one.models) for one in found.members] == [
        ("http://host:1", ()),
        ("http://b:2", ("story", "pirate")),
    ]
    assert [(str(one.address), one.models) for one in found.names] == [("http://d:3", ("c",))]
    for words, message in (
        (["a,=http://b:2"], "NAME,NAME=http://HOST:PORT"),
        (["dns+https://b:2"], "dns+http://NAME:PORT"),
        (["m=ftp://b:2"], "http://HOST:PORT"),
        (["b:2", "m=http://b:2"], "http://b:2 is there twice"),
        ([f"h{i}:1" for i in range(MAX_MEMBERS + 1)], "a router takes 1024"),
    ):
        with engine_fault() as error:
            listed(words)
        assert message in str(error.value)


async def test_a_file_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "replicas"
    path.write_text("# ours\nhttp://a:1\n\nm=http://b:2  # another\n")
    found, told = members("http://c:3", replicas_file=str(path))
    await found.begin()
    assert told == [["http://c:3", "http://a:1", "http://b:2"]]
    found.look_at_file()
    found.settle()
    assert len(told) == 1, "nothing has changed"
    with caplog.at_level(logging.WARNING):
        for text in (
            "http://a:1\nnon sense\n",
            "http://a:1\na:1\n",
            "x" * (MAX_FILE + 1),
            "\udcff",
        ):
            path.write_bytes(text.encode("utf-8", "surrogateescape"))
            found.look_at_file()
            found.look_at_file()
            found.settle()
    assert len(told) == 1
    assert sum("stay as they are" in record.message for record in caplog.records) == 4, (
        "each is told once"
    )
    path.write_text("http://b:2")
    found.look_at_file()
    found.settle()
    assert told[-1] == ["http://c:3", "http://b:2"]
    path.unlink()
    found.look_at_file()
    found.settle()
    assert len(told) == 2
    with engine_fault("cannot read replicas"):
        read_file(str(path))


async def test_a_name_is_resolved_again_and_keeps_what_it_had() -> None:
    answers: list[Any] = [["10.0.0.1"], ["10.0.0.1", "::1"], OSError("no name"), []]

    async def resolve(name: str, port: int) -> list[str]:
        assert (name, port) == ("pool", 8000)
        if isinstance(answers[0], OSError):
            raise answers[0]
        return list(answers[0])

    found, told = members("m=dns+http://pool:8000", resolve=resolve)
    await found.begin()
    for _ in range(3):
        answers.pop(0)
        await found.look_up()
        found.settle()
    assert told == [["http://10.0.0.1:8000"], ["http://10.0.0.1:8000", "http://[::1]:8000"], []]


def test_registrations_expire_without_heartbeats() -> None:
    now = [0.0]
    found, told = members(clock=lambda: now[0], register_key="k", register_ttl=10.0)
    found.register("http://a:1", ["m"])
    found.register("b:2", [])
    now[0] = 9.0
    found.register("http://a:1", ["m", "n"])
    now[0] = 11.0
    found.settle()
    assert told == [
        ["http://a:1"],
        ["http://a:1", "http://b:2"],
        ["http://b:2", "http://a:1"],
        ["http://a:1"],
    ]
    found.unregister("http://a:1/v1")
    assert told[-1] == []
    with client_error("did not register"):
        found.unregister("http://a:1")


def test_registrations_are_bounded_and_checked() -> None:
    found, _ = members(register_key="k")
    for i in range(MAX_MEMBERS):
        found._registered[Member(parse_address(f"h{i}:1", ""))] = float("inf")
    found.register("h5:1", [])
    with client_error("1024 replicas already"):
        found.register("one:1", [])
    for url, models in (
        ("ftp://a", []),
        ("x" * 600, []),
        ("a:1", [""]),
        ("a:1", ["m"] * 65),
        ("a\n:1", []),
    ):
        with client_error(status=400):
            found.register(url, models)


async def test_a_replica_registers_and_leaves() -> None:
    replicas = fleet(2)
    await replicas[1].start()
    key = {"authorization": "Bearer k"}
    url = "/v1/router/replicas"
    async with routed(replicas[:1], register_key="k", register_ttl=60.0) as there:
        assert {await there.by() for _ in range(4)} == {"a"}
        for headers, body, status, reason in (
            ({}, {"url": replicas[1].url}, 403, "invalid_register_key"),
            (key, {"url": replicas[1].url, "more": 1}, 400, "invalid_json"),
            (key, {"url": "ftp://x"}, 400, "invalid_value"),
        ):
            refused = await there.http.post(url, json=body, headers=headers)
            assert refusal_of(refused) == (status, reason)
        taken = await there.http.post(url, json={"url": replicas[1].url}, headers=key)
        assert taken.json() == {"url": replicas[1].url, "expires_in": 60.0}
        await there.until(lambda: all(one.healthy for one in there.router.fleet.replicas))
        told = (await there.http.get(url, headers=key)).json()["data"]
        assert [one["url"] for one in told] == [replica.url for replica in replicas]
        assert [one["expires_in"] is None for one in told] == [True, False]
        gone = await there.http.request("DELETE", url, json={"url": replicas[1].url}, headers=key)
        assert gone.json()["deleted"]
        assert {await there.by() for _ in range(4)} == {"a"}
    await replicas[1].stop()
    async with routed(fleet(1)) as there:
        assert (await there.http.get(url, headers=key)).status_code == 404, "no key is set"


async def documented(replica: Replica, writer: asyncio.StreamWriter) -> None:
    write(writer, 200, document(SERVED, keyed=True))


async def test_registration_is_in_the_document_and_answers_are_what_it_says() -> None:
    url, key = "/v1/router/replicas", {"authorization": "Bearer k"}
    async with routed(fleet(1, answer=documented), register_key="k") as there:
        made = (await there.http.get("/openapi.json")).json()
        validator = Validator(made)
        for name in set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(made))):
            assert validator.resolved({"$ref": name})
        app = create_app(there.router, Members(there.router.config, Listed(), lambda _: None))
        (route,) = (one for one in app.routes if isinstance(one, Route) and one.path == url)
        assert {method.upper() for method in made["paths"][url]} == (route.methods or set()) - {
            "HEAD"
        }
        ids = [one["operationId"] for methods in made["paths"].values() for one in methods.values()]
        assert len(ids) == len(set(ids))
        for method, headers, body, status in (
            ("post", key, {"url": "http://127.0.0.1:9", "models": ["m"]}, 200),
            ("get", key, None, 200),
            ("delete", key, {"url": "http://127.0.0.1:9"}, 200),
            ("delete", key, {"url": "http://127.0.0.1:9"}, 404),
            ("post", key, {"url": "ftp://x"}, 400),
            ("get", {}, None, 403),
        ):
            operation = made["paths"][url][method]
            assert operation["security"] == [{"RegisterKey": []}]
            answer = await there.http.request(method, url, json=body, headers=headers)
            assert answer.status_code == status, answer.text
            schema = operation["responses"][str(status)]["content"]["application/json"]["schema"]
            assert validator.wrong(schema, answer.json()) == ""
        assert {"404", "429"} <= set(made["paths"][url]["post"]["responses"])
        body = made["components"]["schemas"]["RegistrationRequest"]
        assert (body["required"], set(body["properties"])) == (["url"], {"url", "models"})
    async with routed(fleet(1, answer=documented)) as there:
        assert url not in (await there.http.get("/openapi.json")).json()["paths"], "no key is set"


async def test_what_a_replica_has_it_may_finish_when_it_is_taken_out() -> None:
    replicas = [Replica("a", streams), Replica("b")]
    async with (
        routed(replicas) as there,
        there.http.stream("POST", "/v1/completions", json={}) as answer,
    ):
        pieces = answer.aiter_bytes()
        text = await anext(pieces)
        there.router.fleet.set_members([Member(parse_address(replicas[1].url, ""))])
        assert {await there.by() for _ in range(3)} == {"b"}
        text += b"".join([piece async for piece in pieces])
        assert text.endswith(b"data: [DONE]\n\n")


# -- several models ------------------------------------------------------------------------------------------


async def lists(replica: Replica, writer: asyncio.StreamWriter) -> None:
    names = {"a": ["story"], "b": ["story"], "c": ["code", "pirate"]}[replica.name]
    if replica.asked[-1].line.startswith("GET /v1/models "):
        write(writer, 200, {"object": "list", "data": [{"id": name} for name in names]})
    elif replica.asked[-1].headers.get("authorization") == "bearer no":
        write(writer, 401, {"error": {"message": "no such key"}})
    else:
        write(writer, 200, {"by": replica.name})


async def test_the_model_chooses_the_fleet() -> None:
    replicas = fleet(3, answer=lists)
    async with routed(replicas) as there:
        urls = [parse_address(replica.url, "") for replica in replicas]
        names = (("story",), ("story",), ("code", "pirate"))
        there.router.fleet.set_members([Member(*one) for one in zip(urls, names, strict=True)])
        assert {await there.by(model="story") for _ in range(6)} == {"a", "b"}
        assert {await there.by(model=name) for name in ("code", "pirate") for _ in range(3)} == {
            "c"
        }
        told = (await there.http.get("/v1/models")).json()
        assert [one["id"] for one in told["data"]] == ["story", "code", "pirate"]
        assert (await there.http.get("/v1/models/pirate")).json()["by"] == "c"
        unknown = await there.ask(model="nobody")
        assert refusal_of(unknown) == (404, "model_not_found")
        assert "'story', 'code', 'pirate'" in unknown.json()["error"]["message"]
        unnamed = await there.ask()
        assert (unnamed.status_code, unnamed.json()["error"]["param"]) == (400, "model")
        replicas[2].health = 503
        await there.until(lambda: not there.router.fleet.replicas[2].healthy)
        gone = await there.ask(model="code")
        assert refusal_of(gone) == (503, "no_replica")
        assert len((await there.http.get("/v1/models")).json()["data"]) == 1
        there.router.fleet.set_members([Member(urls[0], ("story",)), Member(urls[1])])
        assert {await there.by(model="other") for _ in range(3)} == {"b"}, "it answers for anything"
        assert await there.by(model="story") == "a"
        there.router.fleet.set_members([Member(urls[0], ("story",))])
        assert await there.by() == "a", "there is only one that could be meant"


def test_what_is_read_of_a_request() -> None:
    assert hints_of(b'{"model":"m","max_tokens":5,"max_completion_tokens":7}', ()) == RequestHints(
        (), "m", 13, 7
    )
    for body in (
        b"",
        b"[",
        b"[1]",
        b"\xff",
        b'{"model": 5, "max_tokens": -1}',
        b'{"model":"' + b"x" * 300 + b'"}',
    ):
        found = hints_of(body, (b"x",))
        assert (found.model, found.max_tokens, found.prefix) == ("", 0, (b"x",))
    assert hints_of(b'{"max_tokens": 1e9, "n_predict": 99999999999}', ()).max_tokens == 0


# -- those that come late, and those that are slow -----------------------------------------------------------


def a_fleet(count: int, now: list[float], **settings: Any) -> Fleet:
    there = Fleet(
        [parse_address(f"h{i}:1", "") for i in range(count)],
        RouterConfig(**settings),
        lambda: now[0],
    )
    for one in there.replicas:
        one.healthy = True
    return there


def test_one_that_comes_late_starts_slowly() -> None:
    now = [100.0]
    there = a_fleet(2, now, slow_start=10.0, placement="least_loaded")
    late = there.replicas[1]
    late.came = 100.0

    def given(requests: int) -> int:
        """Of so many that stay open, how many go to the late one."""
        chosen = []
        for _ in range(requests):
            one = there.choose(RequestHints(), ())
            assert one is not None
            one.others += 1
            chosen.append(one)
        for one in chosen:
            one.others -= 1
        return sum(one is late for one in chosen)

    shares = []
    for now[0] in (100.0, 103.0, 106.0, 110.0):
        shares.append(given(40))
    assert shares[-1] == 20
    assert shares == sorted(shares)
    assert 0 < shares[0] <= 5
    there.replicas[0].healthy = False
    now[0] = 100.0
    assert there.choose(RequestHints(), ()) is late, "it is the only one"


def test_one_whose_streams_begin_late_is_put_aside_and_comes_back() -> None:
    now = [0.0]
    there = a_fleet(3, now, outlier_latency=4.0)
    slow = there.replicas[1]
    for one in there.replicas:
        one.first_bytes.extend([0.1] * FIRST_BYTES)
        there._eject_slow(one)
    assert there.ejected == 0
    slow.first_bytes.extend([0.29] * FIRST_BYTES)
    there._eject_slow(slow)
    assert there.ejected == 0, "it is slow by too little"
    slow.first_bytes.extend([2.0] * FIRST_BYTES)
    for one in there.replicas:
        there._eject_slow(one)
    assert (there.ejected, slow.breaker.aside, slow.breaker.admits()) == (1, True, False)
    now[0] = slow.breaker.patience + 0.1
    assert slow.breaker.admits(), "one request tries it"
    slow.breaker.begin().answered()
    assert not slow.breaker.aside
    there._eject_slow(slow)
    assert there.ejected == 1, "nothing is known of it any more"
    off = a_fleet(2, now)
    off.replicas[0].first_bytes.extend([9.0] * FIRST_BYTES)
    off.replicas[1].first_bytes.extend([0.1] * FIRST_BYTES)
    off._eject_slow(off.replicas[0])
    assert off.ejected == 0


def test_nothing_listed_is_nothing() -> None:
    assert listed([]) == Listed()
