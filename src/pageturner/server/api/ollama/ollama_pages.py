"""The small endpoints of Ollama's API: which models there are, what one is like, and having one
loaded.

Owns what they say. Must not know how anything is generated.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pageturner.http.receiving import again, read_body
from pageturner.http.responses import json_response
from pageturner.http.slices import in_thread
from pageturner.server.admission.metered import metered
from pageturner.server.admission.service_level import service_level_of
from pageturner.server.api.base import answer_grammar
from pageturner.server.api.base.body import RequestBody, convert, json_or_none
from pageturner.server.api.base.call import check_model
from pageturner.server.api.base.dialect import Dialect
from pageturner.server.api.base.generate import GenerateEndpoint
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.api.ollama.model_files import ModelFiles, model_files
from pageturner.server.api.ollama.ollama import LATEST, OLLAMA_CHAT, OLLAMA_GENERATE, created_at
from pageturner.server.service import Service
from pageturner.text.fim import fim_tokens

# answers to what asks for nothing, by dialect
NOTHING: dict[str, dict[str, Any]] = {
    OLLAMA_CHAT.id_prefix: {"message": {"role": "assistant", "content": ""}},
    OLLAMA_GENERATE.id_prefix: {"response": ""},
    "embed": {"embeddings": []},
    "embeddings": {"embedding": []},
}
ASKING = ("prompt", "messages", "suffix", "input")  # fields by which something is asked
SHORT = 4096  # bytes of a body that may ask for nothing but loading
ARCHITECTURE = "pageturner"  # where the model's files do not say its family
SPOKEN = "0.12.11"  # the version of Ollama's API that is spoken here: clients look for a least one


class ShowBody(msgspec.Struct):
    """Fields of /api/show and /api/pull; `name` is the old name of `model`."""

    model: str | None = None
    name: str | None = None


class AsksNothing(msgspec.Struct):
    """A request without a prompt, by which clients have a model loaded or unloaded."""

    model: str | None = None
    prompt: str | None = None
    suffix: str | None = None
    messages: list[msgspec.Raw] | None = None
    keep_alive: str | float | None = None


class AsksForNoRow(msgspec.Struct):
    """A request without a text, by which clients have a model loaded."""

    model: str | None = None
    input: str | list[msgspec.Raw] | None = None
    prompt: str | None = None


class OllamaPages:
    """The pages of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._files: ModelFiles | None = None

    async def version(self, _: HTTPRequest) -> Response:
        return json_response({"version": SPOKEN})

    async def tags(self, _: HTTPRequest) -> Response:
        files = await self._read()
        names = self._service.names
        return json_response({"models": [self._model(name, files) for name in names]})

    async def running(self, _: HTTPRequest) -> Response:
        """List the running models. They are those of `tags`: a served model is always loaded."""
        context = self._service.served().context
        more = {"expires_at": "0001-01-01T00:00:00Z", "size_vram": 0, "context_length": context}
        files = await self._read()
        models = [self._model(name, files) | more for name in self._service.names]
        return json_response({"models": models})

    async def show(self, request: HTTPRequest) -> Response:
        service, served = self._service, self._service.served()
        await self._check_named(request)
        sampling = service.generation.sampling
        files = await self._read()
        family = files.family or ARCHITECTURE
        return json_response(
            {
                "modelfile": f"FROM {service.model}\n",
                "license": "",
                "parameters": "\n".join(f"{name} {value}" for name, value in sampling.items()),
                "template": service.tokenizer.chat_template or "",
                "details": files.details,
                "model_info": {
                    "general.architecture": family,
                    "general.basename": service.model,
                    "general.parameter_count": files.parameters,
                    f"{family}.context_length": served.context,
                    f"{family}.vocab_size": served.vocab_size,
                    **files.info,
                },
                "capabilities": _capabilities(served),
                "modified_at": self._modified(),
            }
        )

    async def pull(self, request: HTTPRequest) -> Response:
        """Say that the served model is there. No other one is fetched on request."""
        await self._check_named(request)
        return json_response({"status": "success"})

    async def _check_named(self, request: HTTPRequest) -> None:
        """ClientError where the body names another model than the served one."""
        service = self._service
        body = convert(await read_body(request.receive, service.config.max_body_size), ShowBody)
        check_model(_named(body.model or body.name), service.served())

    async def _read(self) -> ModelFiles:
        if self._files is None:
            path = Path(self._service.live_settings.config.model)
            self._files = await in_thread(lambda: model_files(path))
        return self._files

    def _model(self, name: str, files: ModelFiles) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "modified_at": self._modified(),
            "size": files.size,
            "digest": files.digest(name),
            "details": files.details,
        }

    def _modified(self) -> str:
        return datetime.datetime.fromtimestamp(self._service.created, datetime.UTC).isoformat()


class OllamaEndpoint:
    """/api/chat or /api/generate: what asks for nothing is answered here, the rest generates."""

    asks: type[AsksNothing | AsksForNoRow] = AsksNothing

    def __init__(
        self, service: Service, dialect: Dialect, generate: GenerateEndpoint | None = None
    ) -> None:
        self._service = service
        self._said = NOTHING[dialect.id_prefix]
        self._generate = generate or GenerateEndpoint(service, dialect)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._service.check_open()
        with metered(self._service.quota, scope, receive) as (work, counted):
            raw = await read_body(counted, self._service.config.max_body_size)
            body = self._asks_nothing(raw)
            if body is not None:
                service_level_of(RequestBody(), scope["headers"], scope["pageturner"].key)
                served = self._service.served()
                check_model(_named(body.model), served)
                response = json_response(self._loaded(body, served.model))
                await response(scope, receive, send)
                return
            await self._generate.answer(scope, again(raw, counted), send, work)

    def _asks_nothing(self, raw: bytes) -> Any:
        """The request, if it asks for nothing; None for what does, and for what cannot be read:
        what is wrong with that is said where it is read."""
        if len(raw) > SHORT:
            return None
        body = json_or_none(raw, self.asks)
        return None if any(getattr(body, name, None) for name in ASKING) else body

    def _loaded(self, body: Any, model: str) -> dict[str, Any]:
        """The model is there, whatever is asked of it."""
        reason = "unload" if body.keep_alive in (0, "0") else "load"
        told = {"model": model, "created_at": created_at(), **self._said}
        return {**told, "done": True, "done_reason": reason}


class OllamaEmbedEndpoint(OllamaEndpoint):
    """One of Ollama's two embedding endpoints. It answers requests without input itself."""

    asks = AsksForNoRow

    def _loaded(self, body: Any, model: str) -> dict[str, Any]:
        named = {"model": model} if "embeddings" in self._said else {}
        return named | self._said


def _named(name: str | None) -> RequestBody:
    return RequestBody(model=name and name.removesuffix(LATEST))


def _capabilities(served: ServedModel) -> list[str]:
    """Return the capabilities that clients look for before they use tools, thinking or infill."""
    gaps = ["insert"] if fim_tokens(served.tokenizer) else []
    knows = {
        "tools": answer_grammar.formats_of(served.for_tools).tools,
        "thinking": answer_grammar.formats_of(served).reasoning,
    }
    return ["completion", *gaps, *(name for name, format in knows.items() if format is not None)]
