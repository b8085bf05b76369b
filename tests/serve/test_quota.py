"""The limits of a key, on pure data with a clock of the test's own; and that a server holds to them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.errors import ClientError
from pageturner.request import Request
from pageturner.serve.api_keys import ANYBODY, ApiKey
from pageturner.serve.body import RequestBody
from pageturner.serve.quota import Quota
from pageturner.serve.service_level import service_level_of
from pageturner.text.detokenizer import Detokenizer
from pageturner.text.output_stream import OutputStream, StreamTimes

from .bytes_tokenizer import BytesTokenizer
from .conftest import Server
from .test_streams import Kept


def streams(*prompts: int, tokens: int = 0) -> list[OutputStream]:
    """Choices with prompts of so many tokens, each with so many tokens of an answer."""
    made = []
    for length in prompts:
        request = Request(1, tuple(range(length)))
        made.append(OutputStream(request, 0, Detokenizer(BytesTokenizer()), Kept(), StreamTimes(0.0)))
        made[-1].tokens.extend(range(tokens))
    return made


@dataclass
class House:
    """A server with a queue of 8 and 2 slots. now: what its clock says."""

    now: float = 0.0
    quota: Quota = field(init=False)

    def __post_init__(self) -> None:
        self.quota = Quota(8, 2, lambda: self.now)

    def ask(self, key: ApiKey, *prompts: int, unfinished: int = 0, tokens: int = 0) -> list[OutputStream]:
        asked = streams(*prompts, tokens=tokens)
        self.quota.admit(key, asked, unfinished)
        self.quota.enter(key, asked)
        return asked

    def refusal(self, key: ApiKey, *prompts: int, unfinished: int = 0) -> ClientError:
        with pytest.raises(ClientError) as caught:
            self.ask(key, *prompts, unfinished=unfinished)
        assert caught.value.status == 429
        return caught.value


def test_only_so_many_requests_are_under_way() -> None:
    house, key = House(), ApiKey("a", b"a", max_concurrent=2)
    first, _ = house.ask(key, 1, 1), house.ask(key, 1)
    assert house.refusal(key, 1).code == "concurrency_limit"
    house.ask(ApiKey("a", b"other", max_concurrent=2), 1)
    house.quota.leave(key, first)
    house.quota.leave(key, first)  # once is enough
    house.ask(key, 1)
    assert house.refusal(key, 1).code == "concurrency_limit"


def test_who_has_no_limits_has_no_account() -> None:
    house = House()
    for _ in range(100):
        house.quota.leave(ANYBODY, house.ask(ANYBODY, 10_000, unfinished=1000))


def test_prompts_and_answers_are_paid_and_a_debt_first() -> None:
    house, key = House(), ApiKey("a", b"a", tokens_per_minute=600)
    asked = house.ask(key, 200, tokens=1000)
    house.quota.leave(key, asked)  # 600 - 200 - 1000
    refused = house.refusal(key, 100)
    assert (refused.code, refused.retry_after) == ("token_rate_limit", pytest.approx(70.0))
    house.now = 69.9
    house.refusal(key, 100)
    house.now = 70.0
    house.ask(key, 100)


def test_a_prompt_larger_than_the_bucket_waits_for_a_full_one() -> None:
    house, key = House(), ApiKey("a", b"a", tokens_per_minute=60)
    house.ask(key, 500)
    assert house.refusal(key, 500).retry_after == pytest.approx(500.0)


@given(st.integers(1, 5000), st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400), st.floats(0, 30))))
def test_who_comes_back_when_told_is_let_in_and_the_rate_holds(
    rate: int, asks: list[tuple[int, int, float]]
) -> None:
    house, key, used = House(), ApiKey("a", b"a", tokens_per_minute=rate), 0
    for prompt, answer, pause in asks:
        house.now += pause
        try:
            asked = house.ask(key, prompt, tokens=answer)
        except ClientError as refused:
            house.now += ceil(refused.retry_after)
            asked = house.ask(key, prompt, tokens=answer)
        assert used <= rate * (1 + house.now / 60) + 1e-6
        house.quota.leave(key, asked)
        used += prompt + answer


def test_a_key_takes_only_its_share_of_the_queue() -> None:
    house, key, other = House(), ApiKey("a", b"a", queue_share=0.5), ApiKey("b", b"b", queue_share=0.5)
    assert len(house.ask(key, *[1] * 2)) == 2, "nobody waits yet"
    house.ask(key, 1, 1, unfinished=2)
    assert house.refusal(key, 1, unfinished=4).code == "queue_share"
    house.ask(other, *[1] * 4, unfinished=4)
    house.refusal(other, 1, unfinished=8)


def test_who_has_begun_to_answer_does_not_wait() -> None:
    house, key = House(), ApiKey("a", b"a", queue_share=0.25)
    house.ask(key, 1, 1, tokens=1)
    house.ask(key, 1, 1, unfinished=2)
    assert house.refusal(key, 1, unfinished=4).code == "queue_share"


def table(key: str, **fields: object) -> str:
    lines = [
        f"{name} = {str(value).lower() if value is True else repr(value)}" for name, value in fields.items()
    ]
    return "\n".join(["[[keys]]", f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"', *lines, ""])


def test_a_server_holds_to_the_limits_of_a_file(start: Callable[..., Server], tmp_path: Path) -> None:
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
    assert 10 <= wait <= 17  # 5 and 66 of 60 tokens are used: 16 are missing, at one a second


def test_a_key_may_be_kept_from_going_first() -> None:
    low, anybody = ApiKey("a", b"a", most_urgent=5), RequestBody()
    assert service_level_of(anybody, [], low).priority == 5
    assert service_level_of(anybody, [(b"x-priority", b"6")], low).priority == 6
    for body, headers in ((RequestBody(priority=4), []), (anybody, [(b"x-priority", b"-9")])):
        with pytest.raises(ClientError, match="5 or more") as caught:
            service_level_of(body, headers, low)
        assert (caught.value.status, caught.value.code) == (403, "priority_not_allowed")
