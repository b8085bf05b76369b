"""The small endpoints that a server answers at once: health, models, metrics, tokens of a text.

Owns their fields and what they say. Must not know how anything is generated.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

import pageturner
from pageturner.errors import ClientError
from pageturner.serve import metrics, replies
from pageturner.serve.body import SMALL, RequestBody, bad_request, convert
from pageturner.serve.call import ServedModel, check_model
from pageturner.serve.chat import chat_tokens
from pageturner.serve.limits import check_size
from pageturner.serve.middleware import read_body
from pageturner.serve.prometheus import MEDIA_TYPE
from pageturner.serve.service import Service
from pageturner.text.detokenizer import token_text


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Fields of /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Fields of /detokenize."""

    tokens: list[int]
    model: str | None = None


class ServerPages:
    """The endpoints that answer at once."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _: HTTPRequest) -> Response:
        if self._service.healthy:
            return replies.json_response({"status": "ok"})
        self._service.check_open()
        self._service.served()
        if trouble := self._service.supervisor.crash_loop:
            raise ClientError(503, "crash_loop", trouble)
        raise ClientError(503, "no_engine", "the engine is not there: it is being restarted, or it is stuck")

    async def ping(self, _: HTTPRequest) -> Response:
        return Response()

    async def version(self, _: HTTPRequest) -> Response:
        return replies.json_response({"version": pageturner.__version__})

    async def load(self, _: HTTPRequest) -> Response:
        return replies.json_response({"server_load": self._service.active})

    async def models(self, _: HTTPRequest) -> Response:
        service, ready = self._service, self._service.supervisor.ready
        model = {
            "id": service.model,
            "object": "model",
            "created": service.created,
            "owned_by": "pageturner",
            "root": service.model,
            "parent": None,
            "max_model_len": None if ready is None else ready.max_model_len,
            "permission": [],
        }
        return replies.json_response({"object": "list", "data": [model]})

    async def metrics(self, _: HTTPRequest) -> Response:
        service, ready = self._service, self._service.supervisor.ready
        cache = {"block_size": "0", "num_gpu_blocks": "0"}
        if ready is not None:
            cache = {"block_size": str(ready.block_size), "num_gpu_blocks": str(ready.num_blocks)}
        text = metrics.render(service.metrics, service.model, service.healthy, cache)
        return Response(text, media_type=MEDIA_TYPE)

    async def tokenize(self, request: HTTPRequest) -> Response:
        service, served = self._service, self._service.served()
        body = convert(await read_body(request.receive, service.config.max_body_size), TokenizeBody)
        tokens = await asyncio.to_thread(_tokenize, body, served)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": served.context,
            "tokens": tokens,
            "token_strs": None,
        }
        if body.return_token_strs:
            answer["token_strs"] = [token_text(service.tokenizer, token) for token in tokens]
        return replies.json_response(answer)

    async def detokenize(self, request: HTTPRequest) -> Response:
        service, served = self._service, self._service.served()
        body = convert(
            await read_body(request.receive, service.config.max_body_size),
            DetokenizeBody,
            served.limits.text + SMALL,
        )
        check_model(RequestBody(model=body.model), served)
        check_size(len(body.tokens), "tokens", "ids", served.limits)
        if any(not 0 <= token < served.vocab_size for token in body.tokens):
            raise bad_request("invalid_value", f"token ids are 0 to {served.vocab_size - 1}", "tokens")
        return replies.json_response(
            {"prompt": service.tokenizer.decode_whole(body.tokens, skip_special=False)}
        )


def _tokenize(body: TokenizeBody, served: ServedModel) -> list[int]:
    check_model(RequestBody(model=body.model), served)

    def check(text: str) -> None:
        check_size(len(text), "the text", "characters", served.limits)

    if body.messages is not None:
        chat = RequestBody(
            messages=body.messages,
            add_special_tokens=body.add_special_tokens,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        return chat_tokens(chat, served, check)
    if body.prompt is None:
        raise bad_request("missing_field", "prompt or messages is missing", "prompt")
    check(body.prompt)
    special = body.add_special_tokens is not False
    return served.tokenizer.encode(body.prompt, add_special=special, parse_special=True)
