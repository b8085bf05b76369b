"""The choices of one request reach the engine with one copy of what they share, and in slices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from hostile import whole_server
from pageturner.ipc.channel import MessageDecoder, Submit, ToEngine, encode
from pageturner.ipc.submit_repeats import LISTS, NOTHING, restored, shortened
from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.server.engine_client.supervisor import SUBMITTED_AT_ONCE

LONG: dict[str, Any] = {
    "structured_outputs": "x" * 5000,
    "logit_bias": dict.fromkeys(range(5000), 0.5),
    "allowed_token_ids": tuple(range(5000)),
    "bad_words": ("word",) * 5000,
    "bad_words_token_ids": ((1, 2),) * 5000,
    "stop": ("stop",) * 5000,
    "stop_ids": tuple(range(5000)),
    "force_ids": tuple(range(5000)),
}


def test_every_list_is_known() -> None:
    """A new parameter without a bound is shared, too."""
    fixed = {"thinking_begin", "thinking_end", "inject_fault", "pooling", "early_stopping"}
    unbounded = ("tuple", "dict", "str")
    kinds = SamplingParams.__annotations__
    assert {
        name for name, kind in kinds.items() if any(k in kind for k in unbounded)
    } - fixed == set(LISTS)


@pytest.mark.parametrize("field", [*LONG, "prompt"])
def test_a_field_is_sent_once_for_all_choices(field: str) -> None:
    prompt = tuple(range(5000)) if field == "prompt" else (1, 2)
    params = SamplingParams(**({} if field == "prompt" else {field: LONG[field]}))
    others = SamplingParams(**({} if field == "prompt" else {field: LONG[field]}), max_tokens=3)
    requests = [Request(i, prompt, params, index=i) for i in range(500)]
    requests += [Request(i, prompt, others) for i in range(500, 1000)]  # of another prompt
    requests += [Request(1000, (1, 2)), Request(1001, prompt, params)]
    sent = zip(requests, [NOTHING, *requests], strict=False)
    raw = b"".join(encode(shortened(request, before)) for request, before in sent)
    once = len(encode(Submit(requests[0])))
    assert len(raw) < 2 * once + 1002 * len(encode(Submit(Request(1000, (1, 2)), (field,))))
    messages = list(MessageDecoder(ToEngine).feed(raw))
    found = [NOTHING]
    for message in messages:
        assert isinstance(message, Submit)
        found.append(restored(message, found[-1]))
    assert found[1:] == requests
    kept = {id(r.prompt if field == "prompt" else getattr(r.params, field)) for r in found[1:1001]}
    assert len(kept) == 1


def test_many_choices_are_submitted_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [0]
    send = whole_server.StubEngine.send

    def counted(self: Any, frame: bytes, loop: asyncio.AbstractEventLoop) -> None:
        rounds[-1] += 1
        send(self, frame, loop)

    async def turns() -> None:
        while True:
            rounds.append(0)
            await asyncio.sleep(0)

    async def asked() -> tuple[int, int]:
        async with whole_server.server() as (app, _):
            body = {"prompt": ["a"] * 300, "max_tokens": 1}
            counting = asyncio.ensure_future(turns())
            answer = await whole_server.ask(
                app, "POST", "/v1/completions", json.dumps(body).encode()
            )
            counting.cancel()
            return answer.status, len(json.loads(bytes(answer.body))["choices"])

    monkeypatch.setattr(whole_server.StubEngine, "send", counted)
    assert asyncio.run(asked()) == (200, 300)
    assert sum(rounds) >= 300
    assert max(rounds) <= SUBMITTED_AT_ONCE
