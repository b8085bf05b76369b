"""Faults that are asked for, over HTTP and in the engine of the product: whoever asks fails, nobody else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pageturner.server.api.base.body import RequestBody
from pageturner.server.api.openai import completions
from support.refusals import client_error

from .conftest import Server
from .test_http import events, post, text_of
from .test_openai import SERVED


def beside_another(
    start: Callable[..., Server], faults: tuple[str, ...], *flags: str
) -> dict[str, str]:
    """The reason that each fault is told, at the third token of one stream, beside another one, which must go
    on as if it were alone."""
    environment = {"PAGETURNER_FAKE_VOCAB": "255", "PAGETURNER_FAKE_STEP_SECONDS": "0.01"}
    server = start("--developer", *flags, FAKE_ENGINE="own", **environment)
    alone = post(server, prompt="tale", max_tokens=150).json()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: text_of(events(server, prompt="tale", max_tokens=150)))
        found = {
            kind: post(server, prompt="x", max_tokens=9, inject_fault=f"{kind}@3")
            for kind in faults
        }
        assert other.result(60) == alone
    assert {response.status_code for response in found.values()} == {500}
    assert server.http.get("/health").status_code == 200
    return {kind: response.json()["error"]["reason"] for kind, response in found.items()}


@pytest.mark.slow
def test_whose_fault_it_is(start: Callable[..., Server]) -> None:
    assert beside_another(start, ("exception", "nan")) == {
        "exception": "step_failed",
        "nan": "numerical_error",
    }


@pytest.mark.slow
def test_whose_end_of_the_engine_it_is(start: Callable[..., Server]) -> None:
    found = beside_another(start, ("segfault", "hang"), "--engine-timeout", "1.5")
    assert found == {"segfault": "poisoned_request", "hang": "poisoned_request"}


@pytest.mark.parametrize(
    "wrong", ["nan", "nan@", "nan@0", "nan@-1", "nan@1.5", "leak@1", "@1", "", "nan@\u0663"]
)
def test_what_is_no_fault_is_refused(wrong: str) -> None:
    with client_error("inject_fault is KIND@N", status=400, param="inject_fault"):
        completions.read(
            RequestBody(prompt="hello", inject_fault=wrong), replace(SERVED, developer=True)
        )


def test_faults_are_for_developers() -> None:
    with client_error("--developer"):
        completions.read(RequestBody(prompt="hello", inject_fault="nan@1"), SERVED)
