"""Requests made hostile field by field (bench/hostile/hunter.py): a slice of what the acceptance sends."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Any

import pytest

from hostile import whole_server
from hostile.hunter import Case, Hunter
from hostile.json_bodies import HONEST, KEYS, hunter_of, judged
from hostile.whole_server import Found
from pageturner.server.api.base.body import RequestBody
from pageturner.server.api.openapi.openapi import document
from pageturner.server.stream_migration import MovedStream
from pageturner.server.text_workers.text_jobs import PrefixBody

MEMORY = 4 << 30  # bytes of addresses


def found(choose: Any) -> list[str]:
    """What is found by the cases that are chosen of all."""
    wrong: list[str] = []

    async def hunt() -> str:
        async with whole_server.server(keys=KEYS) as (app, service):
            cases: Iterable[Case] = choose(hunter_of(service))
            for case in cases:
                try:
                    await judged(app, service, case)
                except Found as error:
                    wrong.append(str(error))
        return ""

    before = resource.getrlimit(resource.RLIMIT_AS)  # what is found may take all there is
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, before[1]))
    try:
        whole_server.in_loop(hunt)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return wrong


def test_a_field_is_attacked_on_the_day_it_is_added() -> None:
    async def look() -> str:
        async with whole_server.server(keys=KEYS) as (_, service):
            made = document(service.served(), True)
            schema = made["components"]["schemas"]["TokenizeRequest"]
            schema["properties"]["tomorrow"] = {"type": "object", "properties": {"deep": {}}}
            places = {(place.path, *place.field) for place in Hunter(made, HONEST).places}
        assert {path for path, *_ in places} > {"/v1/streams/resume", "/v1/files/{id}", "/api/chat"}
        assert {("/tokenize", "tomorrow"), ("/tokenize", "tomorrow", "deep")} <= places
        for path, struct in {
            "/v1/completions": RequestBody,
            "/v1/chat/completions": RequestBody,
            "/v1/streams/resume": MovedStream,
            "/v1/prefixes": PrefixBody,
        }.items():
            assert {(path, name) for name in struct.__struct_fields__} <= places
        return ""

    whole_server.in_loop(look)


@pytest.mark.slow
def test_numbers_that_no_machine_word_holds() -> None:
    assert found(lambda hunter: hunter.numbers()) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_slice_of_the_hunt(seed: int) -> None:
    assert found(lambda hunter: hunter.cases(seed, 2000)) == []
