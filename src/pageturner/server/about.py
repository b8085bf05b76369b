"""The pages by which clients of other servers ask a server about itself: its tokenizer, its
settings, its slots.

Owns the shapes of these pages, which are those of vLLM and llama.cpp as far as their clients look.
Must not know how anything is generated, and tells nothing of what was said.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

import pageturner
from pageturner.errors import ClientError
from pageturner.http.responses import json_response
from pageturner.ipc.channel import ForgetPrefixes
from pageturner.server.service import Service

# settings that name places on this machine
UNTOLD = frozenset(
    {
        "model",
        "draft_model",
        "step_log",
        "generation_config",
        "kv_file",
        "kv_events",
        "kv_events_replay",
        "prefill_listen",
        "prefill_from",
        "prefill_key_file",
    }
)
# sampling parameters by llama.cpp's names, with what they are where neither request nor model says
# anything
NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
THEIRS = {"repetition_penalty": "repeat_penalty"}


class AboutPages:
    """The endpoints that describe one server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenizer_info(self, _: HTTPRequest) -> Response:
        """vLLM's page: what a client needs to know of the tokenizer to render chats by itself."""
        tokenizer = self._service.tokenizer
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "vocab_size": tokenizer.vocab_size,
                "model_max_length": self._context(),
                "bos_token": tokenizer.bos_token or None,
                "eos_token": tokenizer.eos_token or None,
                "eos_token_ids": tokenizer.eos_ids,
                "add_bos_token": tokenizer.add_bos,
                "add_eos_token": tokenizer.add_eos,
                "additional_special_tokens": [
                    *map(tokenizer.text_of, sorted(tokenizer.special_ids))
                ],
                "chat_template": tokenizer.chat_template,
            }
        )

    async def server_info(self, _: HTTPRequest) -> Response:
        """The settings of the engine as they are now, without keys and paths."""
        service = self._service
        engine = asdict(service.live_settings.config)
        return json_response(
            {
                "version": pageturner.__version__,
                "model": service.model,
                "served_model_names": service.names,
                "max_model_len": self._context(),
                "engine": {name: value for name, value in engine.items() if name not in UNTOLD},
                "kv_tiers": service.metrics.tiers(),
            }
        )

    async def props(self, _: HTTPRequest) -> Response:
        """llama.cpp's page: the context of a slot, how many there are, the template."""
        service, tokenizer = self._service, self._service.tokenizer
        return json_response(
            {
                "default_generation_settings": {
                    "n_ctx": self._context(),
                    "params": self._defaults(),
                },
                "total_slots": service.live_settings.slots,
                "model_alias": service.model,
                "model_path": service.model,
                "chat_template": tokenizer.chat_template or "",
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "modalities": {"vision": False, "audio": False},
                "build_info": f"pageturner-{pageturner.__version__}",
                "is_sleeping": False,
            }
        )

    async def slots(self, _: HTTPRequest) -> Response:
        """llama.cpp's page. A slot is a sequence that may run; which one has which changes with
        each step."""
        service, context = self._service, self._context()
        running = sum(id in service.streams.unfinished for id in service.supervisor.placed()[1])
        return json_response(
            [
                {
                    "id": id,
                    "n_ctx": context,
                    "speculative": service.live_settings.config.speculation != "off",
                    "is_processing": id < running,
                }
                for id in range(service.live_settings.slots)
            ]
        )

    async def reset_prefix_cache(self, request: HTTPRequest) -> Response:
        """vLLM's, for measurements. Where there are several tenants it takes a key that may do such
        things, because it costs all of them."""
        service, info = self._service, request.scope["pageturner"]
        if len({key.tenant for key in service.keys.keys}) > 1 and not info.key.admin:
            message = "the prefixes are those of several tenants: send a key that is marked admin"
            raise ClientError(403, "invalid_admin_key", message)
        service.supervisor.tell(ForgetPrefixes())
        return Response()

    def _context(self) -> int:
        return self._service.served().context

    def _defaults(self) -> dict[str, Any]:
        defaults = NEUTRAL | self._service.generation.sampling
        told = {THEIRS.get(name, name): defaults[name] for name in NEUTRAL}
        return told | {"n_predict": defaults.get("max_tokens", -1), "seed": -1}
