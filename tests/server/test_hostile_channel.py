"""An engine that says what it should not, and one that hears it: a few of the cases of bench/fuzz_frames.py,
and by name what was once found by them."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hostile import channel_cases, frames, whole_server
from hostile.whole_server import StubEngine, ask
from pageturner.engine.engine_factory import make_engine
from pageturner.ipc.channel import BadFrame, Events, MessageDecoder, Stats, Submit, ToEngine, encode
from pageturner.ipc.ledger import Ledger
from pageturner.params import SamplingParams
from pageturner.request import Event, Request


@pytest.mark.parametrize("seed", range(10))
def test_whatever_an_engine_says_everybody_is_answered(seed: int) -> None:
    for number in range(2):
        channel_cases.channel(random.Random(f"test {seed} {number}"))


def test_whatever_an_engine_hears_it_ends_with_its_server() -> None:
    for number in range(12):
        channel_cases.engine(random.Random(f"test {number}"))


def of_first(**wrong: Any) -> Callable[[Request], bytes]:
    """An event of the first token, with this wrong."""
    return lambda request: encode(
        Events([Event(**{"id": request.id, "index": 0, "position": len(request.prompt), **wrong})])
    )


NESTED = frames.framed(b"\x83\xa4type\xa5Stats\xa6values\x80\xa1a" + frames.DEEP)
LIKELY = (-0.5, ((1 << 40, -1.0),))
SAID: dict[str, Callable[[Request], bytes]] = {
    "a frame deeper than any stack": lambda _: NESTED,
    "a frame that never ends": lambda _: struct.pack("<I", 60 << 20) + b"x",
    "half a length": lambda _: b"\x05\x00",
    "no message": lambda _: frames.framed(b"noise"),
    "an infinite figure": lambda _: encode(Stats({"prompt_tokens": float("inf")})),
    "a gauge that is no number": lambda _: encode(Stats({"running": float("nan")})),
    "a token below all": of_first(tokens=(-5,), logprobs=((-0.5, ()),)),
    "a token beyond all": of_first(tokens=(1 << 40,), logprobs=((-0.5, ()),)),
    "a likely token beyond all": of_first(tokens=(1,), logprobs=(LIKELY,)),
    "a likely token below all": of_first(tokens=(1,), logprobs=((-0.5, ((-1, -1.0),)),)),
    "tokens without logprobs": of_first(tokens=(1,), finish="length"),
    "an end for no reason": of_first(finish="\n# x"),
    "an end without the prompt's logprobs": of_first(finish="length"),
}


@pytest.mark.parametrize("what", SAID)
def test_an_engine_that_makes_no_sense_is_replaced(what: str) -> None:
    def script(engine: StubEngine, requests: list[Request]) -> None:
        engine.say(SAID[what](requests[0]))

    async def case() -> str:
        async with whole_server.server(script, timeout=0.04) as (app, service):
            body = {"prompt": "hello", "logprobs": 1, "prompt_logprobs": 1}
            answer = await ask(app, "POST", "/v1/completions", json.dumps(body).encode())
            assert answer.status == 200
            assert service.supervisor.epoch == 2
            for path in ("/metrics", "/v1/admin/state"):
                assert (await ask(app, "GET", path, headers=channel_cases.ADMIN)).status == 200
        return ""

    whole_server.in_loop(case)


@pytest.mark.parametrize("at", [float("nan"), float("inf"), 1e300, -1.0])
def test_times_that_cannot_be_are_no_times(at: float) -> None:
    """Else an engine that hangs would look as if it moved."""
    ledger, _ = Ledger.create()
    ledger.begin(at, [1])
    assert ledger.read() == (1, 0, 0.0, 0.0, [1])
    now = time.monotonic()
    ledger.begin(now, [2])
    assert ledger.read() == (2, 0, now, 0.0, [2])


def test_what_holds_no_message_is_one_kind_of_error() -> None:
    submit = msgspec.msgpack.encode(Submit(Request(1, (1,))))
    for body in (*frames.BODIES, submit.replace(b"\xa4salt\xa0", b"\xa4salt\xa1\xff"), submit[:-1]):
        with pytest.raises(BadFrame):
            list(MessageDecoder(ToEngine).feed(frames.framed(body)))


def test_an_engine_refuses_parameters_that_no_door_lets_in() -> None:
    built = make_engine(channel_cases.FAKE)
    params = SamplingParams(prompt_logprobs=2**31, max_tokens=1)
    (event,) = built.engine.submit(Request(1, (1, 2), params, logits_from=0))
    assert event.failure is not None
    assert event.failure.code == "invalid_value"


def test_what_nobody_foresaw_has_the_shape_of_all_errors() -> None:
    async def case() -> str:
        async with whole_server.server() as (app, service):
            service.history.find = None  # type: ignore[method-assign,assignment]
            answer = await ask(app, "GET", "/v1/requests/x/timeline")
            assert answer.status == 500
            assert json.loads(bytes(answer.body))["error"]["reason"] == "internal_error"
        return ""

    with pytest.raises(whole_server.Found, match="'NoneType' object is not callable"):
        whole_server.in_loop(case)
