"""Sampling defaults of a model over HTTP: for what a request leaves open, and for nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import Server, _end
from .test_http import HI, events, post

SAID = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.5,
    "max_tokens": 11,
}
NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
PATHS = ["/v1/completions", "/v1/chat/completions"]


@pytest.fixture(scope="module")
def opinionated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a model with a generation_config.json."""
    folder = tmp_path_factory.mktemp("defaults")
    values = {name: value for name, value in SAID.items() if name != "max_tokens"}
    text = json.dumps({**values, "max_new_tokens": SAID["max_tokens"], "do_sample": True})
    (folder / "generation_config.json").write_text(text)
    server = Server(folder, ["--generation-config", str(folder)], {}, True)
    yield server
    _end(server)


def sampled(server: Server, path: str, stream: bool, **fields: Any) -> dict[str, Any]:
    """What reached the engine of the numbers that defaults may set."""
    fields |= {"messages": HI} if "chat" in path else {}
    if stream:
        events(server, path, **fields)
    else:
        assert post(server, path, **fields).status_code == 200
    params: dict[str, Any] = server.notes("submit")[-1]["params"]
    return {name: params[name] for name in SAID}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_defaults_fill_what_is_left_open(opinionated: Server, path: str, stream: bool) -> None:
    most = 11 if "chat" in path else 16  # completions keep OpenAI's own default, as in vLLM
    assert sampled(opinionated, path, stream) == {**SAID, "max_tokens": most}
    assert sampled(opinionated, path, stream, top_k=None, temperature=None) == {
        **SAID,
        "max_tokens": most,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_what_a_request_says_wins(opinionated: Server, path: str, stream: bool) -> None:
    """Neutral and zero values too."""
    assert sampled(opinionated, path, stream, **NEUTRAL, max_tokens=3) == {
        **NEUTRAL,
        "max_tokens": 3,
    }
    for name, value in (("temperature", 0), ("top_k", -1), ("min_p", 0), ("frequency_penalty", 0)):
        found = sampled(opinionated, path, stream, **{name: value}, max_tokens=2)
        assert found == {**SAID, "max_tokens": 2, name: max(value, 0)}


def test_they_are_logged_once(opinionated: Server) -> None:
    (line,) = [line for line in opinionated.log.splitlines() if "sampling defaults" in line]
    for part in ("temperature 0.6", "top_k 20", "max_tokens 11", "generation_config.json"):
        assert part in line


@pytest.mark.parametrize("path", PATHS)
def test_without_them_all_is_neutral(server: Server, path: str) -> None:
    found = sampled(server, path, False, max_tokens=5)
    assert found == {**NEUTRAL, "max_tokens": 5}
    assert "sampling defaults" not in server.log


@pytest.mark.slow
def test_a_file_that_is_not_there_is_one_line(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start("--generation-config", str(tmp_path / "nowhere"), wait=False)
    log = server.finished()
    assert server.process.returncode == 1
    assert "nowhere" in log
    assert "Traceback" not in log
