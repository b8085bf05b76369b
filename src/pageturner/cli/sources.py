"""The sources of answers: an engine in this process, or a server with the OpenAI API.

Owns the difference between the two, interruption included. Must not know how answers are shown.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from pageturner.cli.sampling_flags import SamplingOptions
from pageturner.cli.stream_events import Usage, stream_events
from pageturner.config import flag_table
from pageturner.config import settings as configuration
from pageturner.config.settings import EngineConfig
from pageturner.errors import ClientError, bad_setting
from pageturner.progress import Still

TIMEOUT = 600.0  # seconds without a byte from a server
MAX_PAGE = 1 << 20  # bytes of its list of models
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class AnswerSummary:
    """The tokens that an answer took. `finish`: "stop", "length", or "abort" for one that was
    interrupted."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish: str = "abort"


Answer = Generator[str, None, AnswerSummary]


class AnswerSource(Protocol):
    """Answers as pieces of text; the generator returns the summary. ClientError for what cannot
    run.

    Ctrl-C during an answer either ends it with finish "abort" or is a KeyboardInterrupt; both leave
    the source usable, provided that the generator is closed.
    """

    name: str

    def complete(self, prompt: str, sampling: SamplingOptions) -> Answer: ...

    def chat(self, messages: list[Message], sampling: SamplingOptions) -> Answer: ...

    def check_chat(self) -> None:
        """ClientError where it is known beforehand that chats are refused."""


class LocalEngine:
    """An engine in this process. Its prefix cache keeps the history of a conversation."""

    def __init__(self, config: EngineConfig, chat_template: str = "") -> None:
        from pageturner.llm import LLM

        settings = dataclasses.asdict(config)
        self.name = settings.pop("model")
        with Still(lambda: f"loading {self.name}"):
            self.llm = LLM(self.name, chat_template=chat_template, **settings)

    def complete(self, prompt: str, sampling: SamplingOptions) -> Answer:
        return self._answer(prompt, sampling)

    def chat(self, messages: list[Message], sampling: SamplingOptions) -> Answer:
        return self._answer(self.llm.chat_tokens(messages), sampling)

    def check_chat(self) -> None:
        self.llm.chat_tokens([{"role": "user", "content": "hello"}])

    def _answer(self, prompt: str | list[int], sampling: SamplingOptions) -> Answer:
        params = sampling.params(self.llm.generation.sampling)
        with _interrupts() as interrupted:
            output = yield from self.llm.stream(prompt, params, cancelled=interrupted)
        answer = output.outputs[0]
        return AnswerSummary(
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.cached_tokens,
            output_tokens=len(answer.token_ids),
            finish=answer.finish_reason or "abort",
        )


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Ctrl-C as a question instead of an exception, which could strike in the middle of a step."""
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGINT, before)


class RemoteServer:
    """A server. `model` "": the first one that it lists.

    Over http.client of the standard library: a command waits for one answer at a time, over https
    too, which the asynchronous client of router and workshop (http_client.py) does not speak.
    """

    def __init__(self, base_url: str, model: str = "", api_key: str = "") -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise bad_setting(f"--base-url looks like http://HOST:PORT, not {base_url!r}")
        self._url = base_url
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.name = model or self._first_model()

    def complete(self, prompt: str, sampling: SamplingOptions) -> Answer:
        return self._answer("/v1/completions", {"prompt": prompt} | sampling.fields())

    def chat(self, messages: list[Message], sampling: SamplingOptions) -> Answer:
        return self._answer("/v1/chat/completions", {"messages": messages} | sampling.fields())

    def check_chat(self) -> None:
        """A server says it when it is asked."""

    def _answer(self, path: str, more: dict[str, Any]) -> Answer:
        fields = {"model": self.name, "stream": True, "stream_options": {"include_usage": True}}
        with self._request("POST", path, fields | more) as response:
            usage = Usage()
            finish = ""
            for event in stream_events(response):
                usage = event.usage or usage
                for choice in event.choices or ():
                    finish = choice.finish_reason or finish
                    if text := choice.text or (choice.delta.content if choice.delta else None):
                        yield text
            if not finish:
                raise ClientError(502, "cut", f"{self._url} broke off in the middle of its answer")
        details = usage.prompt_tokens_details
        return AnswerSummary(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens or 0 if details else 0,
            output_tokens=usage.completion_tokens,
            finish=finish,
        )

    def _first_model(self) -> str:
        with self._request("GET", "/v1/models") as response:
            try:
                return str(json.loads(response.read(MAX_PAGE))["data"][0]["id"])
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise ClientError(
                    502, "no_model", f"{self._url} does not say what it serves"
                ) from error

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, fields: Any = None
    ) -> Iterator[http.client.HTTPResponse]:
        """One connection a request: closing it is what cancels an answer."""
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT)
        try:
            body = None if fields is None else json.dumps(fields)
            headers = self._headers | ({"Content-Type": "application/json"} if body else {})
            connection.request(method, self._prefix + path, body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response)
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(503, "no_server", f"{self._url} does not answer: {error}") from error
        finally:
            connection.close()


def _refused(response: http.client.HTTPResponse) -> ClientError:
    raw = response.read(65536)
    try:
        error = json.loads(raw)["error"]
        message, code = str(error["message"]), str(error.get("reason") or error.get("code"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        message, code = raw[:200].decode(errors="replace"), "server_error"
    return ClientError(response.status, code, f"the server answers {response.status}: {message}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Model, server, and the engine's own settings."""
    flag_table.add_flags(parser, "sources")
    configuration.add_flags(parser, "engine", leave_out=("model",))


def from_flags(arguments: argparse.Namespace) -> AnswerSource:
    """The source that was asked for, ready to answer."""
    if arguments.base_url and arguments.chat_template:
        raise bad_setting("--chat-template: with --base-url the server has its own")
    if arguments.base_url:
        key = arguments.api_key or os.environ.get("OPENAI_API_KEY", "")
        return RemoteServer(arguments.base_url, arguments.model or "", key)
    return LocalEngine(engine_config(arguments), arguments.chat_template)


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's settings from TOML and flags."""
    flags = configuration.from_flags(arguments)
    if arguments.model is not None:
        flags["engine"]["model"] = arguments.model
    return configuration.load(arguments.config, flags).engine
