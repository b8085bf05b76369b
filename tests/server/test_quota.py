"""The limits of a key, on pure data with a clock of the test's own; and that a server holds to them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPConnection
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.errors import ClientError
from pageturner.http.api_keys import ANYBODY, ApiKey
from pageturner.params import SamplingParams
from pageturner.request import Request
from pageturner.server.admission.limits import NO_LIMITS, RequestLimits
from pageturner.server.admission.price import Price, price_of
from pageturner.server.admission.quota import Quota
from pageturner.server.admission.service_level import service_level_of
from pageturner.server.api.base.body import RequestBody
from pageturner.text.detokenizer import Detokenizer
from pageturner.text.output_stream import OutputStream, StreamTimes
from support.refusals import client_error

from .bytes_tokenizer import BytesTokenizer
from .conftest import Server
from .test_streams import Kept


def streams(*prompts: int, tokens: int = 0, **params: Any) -> list[OutputStream]:
    """Choices with prompts of so many tokens, each with so many tokens of an answer."""
    made = []
    for length in prompts:
        request = Request(1, tuple(range(length)), SamplingParams(**params))
        made.append(
            OutputStream(request, 0, Detokenizer(BytesTokenizer()), Kept(), StreamTimes(0.0))
        )
        made[-1].tokens.extend(range(tokens))
    return made


@dataclass
class House:
    """A server with a queue of 8 and 2 slots. now: what its clock says."""

    now: float = 0.0
    quota: Quota = field(init=False)
    limits: RequestLimits = NO_LIMITS
    open: list[contextlib.ExitStack] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.quota = Quota(8, 2, lambda: self.now)

    def ask(
        self,
        key: ApiKey,
        *prompts: int,
        unfinished: int = 0,
        tokens: int = 0,
        size: int = 0,
        **params: Any,
    ) -> Callable[[], None]:
        """A request whose body has so many bytes. Ends it."""
        asked = streams(*prompts, tokens=tokens, **params)
        with contextlib.ExitStack() as stack:
            work = stack.enter_context(self.quota.work(key))
            self.quota.read(work, size)
            self.quota.admit(work, asked, unfinished, self.limits)
            self.open.append(stack.pop_all())
        return self.open[-1].close

    def refusal(self, key: ApiKey, *prompts: int, **asked: Any) -> ClientError:
        with client_error(status=429) as caught:
            self.ask(key, *prompts, **asked)
        return caught.value


def test_only_so_many_requests_are_under_way() -> None:
    house, key = House(), ApiKey("a", b"a", max_concurrent=2)
    first, _ = house.ask(key, 1, 1), house.ask(key, 1)
    assert house.refusal(key, 1).code == "concurrency_limit"
    house.ask(ApiKey("a", b"other", max_concurrent=2), 1)
    first()
    house.ask(key, 1)
    assert house.refusal(key, 1).code == "concurrency_limit"


def test_who_has_no_limits_meets_none() -> None:
    house = House()
    for _ in range(100):
        house.ask(ANYBODY, 10_000, unfinished=1000)


def test_prompts_and_answers_are_paid_and_a_debt_first() -> None:
    house, key = House(), ApiKey("a", b"a", tokens_per_minute=600)
    house.ask(key, 200, tokens=1000, max_tokens=5000)()  # 600 - 200 - 1000
    refused = house.refusal(key, 100, max_tokens=0)
    assert (refused.code, refused.retry_after) == ("token_rate_limit", pytest.approx(80.0)), (
        "before its body is read, by what is usual"
    )
    house.now = 69.9
    house.refusal(key, 100, max_tokens=0)
    house.now = 70.0
    house.ask(key, 100, max_tokens=0)


def test_a_prompt_larger_than_the_bucket_waits_for_a_full_one() -> None:
    house, key = House(), ApiKey("a", b"a", tokens_per_minute=60)
    house.ask(key, 500)
    assert house.refusal(key, 500).retry_after == pytest.approx(500.0)


@given(
    st.integers(1, 5000),
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400), st.floats(0, 30))),
)
def test_who_comes_back_when_told_is_let_in_and_the_rate_holds(
    rate: int, asks: list[tuple[int, int, float]]
) -> None:
    house, key, used = House(), ApiKey("a", b"a", tokens_per_minute=rate), 0
    for prompt, answer, pause in asks:
        house.now += pause
        for _ in range(
            2
        ):  # one that is refused before its body is read may be larger than is usual
            try:
                end = house.ask(key, prompt, tokens=answer, max_tokens=400)
                break
            except ClientError as refused:
                house.now += ceil(refused.retry_after)
        else:
            end = house.ask(key, prompt, tokens=answer, max_tokens=400)
        assert used <= rate * (1 + house.now / 60) + 1e-6
        end()
        used += prompt + answer


def test_a_key_takes_only_its_share_of_the_queue() -> None:
    house, key, other = (
        House(),
        ApiKey("a", b"a", queue_share=0.5),
        ApiKey("b", b"b", queue_share=0.5),
    )
    house.ask(key, *[1] * 2)  # nobody waits yet
    house.ask(key, 1, 1, unfinished=2)
    assert house.refusal(key, 1, unfinished=4).code == "queue_share"
    house.ask(other, *[1] * 4, unfinished=4)
    house.refusal(other, 1, unfinished=8)


def test_who_has_begun_to_answer_does_not_wait() -> None:
    house, key = House(), ApiKey("a", b"a", queue_share=0.25)
    house.ask(key, 1, 1, tokens=1)
    house.ask(key, 1, 1, unfinished=2)
    assert house.refusal(key, 1, unfinished=4).code == "queue_share"


def test_everything_that_makes_work_has_its_price() -> None:
    plain = Request(1, tuple(range(100)), SamplingParams(max_tokens=50))

    def priced(**params: Any) -> Price:
        return price_of([replace(plain, params=replace(plain.params, **params))])

    assert price_of([plain]) == Price(100, 50)
    assert price_of([plain, replace(plain, id=2, parent=1)]) == Price(100, 100), (
        "they share the prompt"
    )
    assert priced(logprobs=7) == Price(100, 100)
    assert priced(prompt_logprobs=7) == Price(200, 50)
    assert priced(beam_width=4) == Price(100, 200)
    assert priced(beam_width=4, stop_ids=tuple(range(160))) == Price(110, 200)
    assert priced(logit_bias=dict.fromkeys(range(640), 1.0)) == Price(110, 50)
    assert priced(structured_outputs="x" * 1600) == Price(200, 50)


def test_what_a_key_has_open_may_cost_so_much() -> None:
    house, key = House(), ApiKey("a", b"a", max_cost=400)
    end = house.ask(key, 100, max_tokens=200)
    account = house.quota.account(key)
    assert account is not None
    assert account.open_cost == 300
    assert house.refusal(key, 1, max_tokens=100).code == "cost_limit"
    house.ask(key, 1, max_tokens=99)
    house.ask(ApiKey("a", b"b", max_cost=400), 100, max_tokens=300)
    end()
    house.ask(key, 100, max_tokens=200)
    with client_error("may cost 401 tokens", status=400, code="request_too_costly"):
        house.ask(key, 1, max_tokens=400)


def test_who_waits_for_what_is_open_is_told_by_its_pace() -> None:
    house, key = House(), ApiKey("a", b"a", max_cost=1000)
    ends = [house.ask(key, 100, max_tokens=100) for _ in range(5)]
    assert not house.refusal(key, 100, max_tokens=100).retry_after, "nothing is known yet"
    for end in ends[:3]:
        house.now += 2.0
        end()
        ends.append(house.ask(key, 100, max_tokens=100))
    told = house.refusal(key, 200, max_tokens=200).retry_after
    assert 4.0 <= told <= 8.0, "200 tokens end every 2 s"


def test_without_a_share_only_dear_requests_meet_one() -> None:
    house = House(limits=RequestLimits(choices=10, context=1000))
    for _ in range(10):
        house.ask(ANYBODY, 600, max_tokens=400)
    assert house.refusal(ANYBODY, 1).code == "cost_limit"
    other = ApiKey("b", b"b")
    end = house.ask(other, 600, max_tokens=400, beam_width=30)  # alone it is let in
    assert house.refusal(other, 1).code == "cost_limit"
    end()
    house.ask(other, 1)


def test_answers_are_charged_at_the_door_by_what_they_took_of_late() -> None:
    house, key = House(), ApiKey("a", b"a", tokens_per_minute=10_000)
    for _ in range(100):
        house.ask(key, 1, tokens=50, max_tokens=100)()
        house.now += 60
    house.ask(key, 1, max_tokens=18_000)  # half of that is expected
    assert house.refusal(key, 1500, max_tokens=0).code == "token_rate_limit"


def test_what_is_read_is_charged_whatever_comes_of_it() -> None:
    house, key = House(), ApiKey("a", b"a", tokens_per_minute=60)
    with contextlib.suppress(ClientError), house.quota.work(key) as work:
        for _ in range(100):
            house.quota.read(work, 512)
        raise ClientError(400, "too_expensive", "refused")
    assert house.refusal(key, 11, max_tokens=0).retry_after == pytest.approx(1.0)
    house.ask(key, 10, max_tokens=0)


def table(key: str, **fields: object) -> str:
    lines = [
        f"{name} = {str(value).lower() if value is True else repr(value)}"
        for name, value in fields.items()
    ]
    return "\n".join(
        ["[[keys]]", f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"', *lines, ""]
    )


@pytest.mark.slow
def test_a_server_holds_to_the_limits_of_a_file(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        table("one", tenant="a", max_concurrent=1) + table("two", tenant="b", tokens_per_minute=60)
    )
    server = start("--api-key-file", str(file))

    def ask(key: str, **fields: object) -> tuple[int, str, int]:
        server_headers = {"authorization": f"Bearer {key}"}
        answer = server.http.post(
            "/v1/completions", json={"prompt": "hello", **fields}, headers=server_headers
        )
        reason = answer.json().get("error", {}).get("reason", "")
        return answer.status_code, reason, int(answer.headers.get("retry-after", 0))

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, "one", prompt="<|slow|>", max_tokens=40)
        server.until(lambda: server.notes("submit"))
        assert ask("one", max_tokens=1)[:2] == (429, "concurrency_limit")
        assert slow.result(30)[0] == ask("one", max_tokens=1)[0] == 200
    assert ask("two", max_tokens=66)[0] == 200
    status, reason, wait = ask("two", max_tokens=1)
    assert (status, reason) == (429, "token_rate_limit")
    # 5 and 66 of 60 tokens are used: 11 are missing, and 5 as before for the next prompt, at one a second
    assert 10 <= wait <= 21


GENERATING = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/infill",
)


def test_who_may_have_no_more_is_told_so_before_a_body_is_read(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(table("one", tenant="a", max_concurrent=1))
    server = start("--api-key-file", str(file))
    key = {"authorization": "Bearer one"}

    def ask(path: str) -> tuple[int, Any]:
        """Its answer, before anything of the body was sent."""
        host, port = server.url.removeprefix("http://").split(":")
        connection = HTTPConnection(host, int(port), timeout=10)
        connection.putrequest("POST", path)
        for name, value in {
            **key,
            "content-length": "100000",
            "content-type": "application/json",
        }.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        try:
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    asked = {"input": "<|stall|>", "background": True}
    told = server.http.post("/v1/responses", json=asked, headers=key).json()
    assert told["status"] == "in_progress"
    for path in GENERATING:
        status, body = ask(path)
        assert (status, "1 requests under way" in json.dumps(body)) == (429, True), path
    server.http.post(f"/v1/responses/{told['id']}/cancel", headers=key)
    assert server.http.post("/api/generate", json={}, headers=key).status_code == 200


PRICED: dict[str, tuple[dict[str, Any], int]] = {  # path: a body, and how many KB of it
    "/tokenize": ({"prompt": "hello"}, 61),
    "/detokenize": ({"tokens": [1]}, 61),
    "/v1/prefixes": ({"prompt": "x" * 38}, 20),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 2}, 38),
    "/api/generate": (
        {"prompt": "hi", "raw": True, "stream": False, "options": {"num_predict": 2}},
        56,
    ),
}


@pytest.mark.slow
def test_all_that_makes_work_is_charged(start: Callable[..., Server], tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(table(path, tenant="a", tokens_per_minute=60, max_cost=77) for path in PRICED)
    )
    server = start("--api-key-file", str(file), "--admin-key", "admin")
    for number, (path, (body, size)) in enumerate(PRICED.items(), 1):
        headers = {"authorization": f"Bearer {path}"}
        content = json.dumps(body) + " " * 1024 * size
        assert server.http.post(path, content=content, headers=headers).status_code == 200
        refused = server.http.post(path, json=body, headers=headers)
        assert (refused.status_code, '"reason":"token_rate_limit"' in refused.text) == (429, True)
        assert int(refused.headers["retry-after"]) >= 1
        state = server.http.get("/v1/admin/state", headers={"authorization": "Bearer admin"}).json()
        told = next(one for one in state["keys"] if one["key"] == number)
        assert (told["tenant"], told["requests"], told["open_cost"], told["max_cost"]) == (
            "",
            0,
            0,
            77,
        )
        assert told["used"] >= 58
        assert told["tokens_left"] <= 3
    assert server.metric("pageturner:key_cost") >= 3 * 58
    assert server.metric("pageturner:key_open_cost") == 0


def test_a_key_may_be_kept_from_going_first() -> None:
    low, anybody = ApiKey("a", b"a", most_urgent=5), RequestBody()
    assert service_level_of(anybody, [], low).priority == 5
    assert service_level_of(anybody, [(b"x-priority", b"6")], low).priority == 6
    for body, headers in ((RequestBody(priority=4), []), (anybody, [(b"x-priority", b"-9")])):
        with client_error("5 or more", status=403, code="priority_not_allowed"):
            service_level_of(body, headers, low)
