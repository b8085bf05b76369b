"""The receipts of a server's answers: who asks for one gets it at the end of the answer.

Owns when the model is hashed, with which key receipts are signed, and how a call and its streams
become a receipt. Must not know the form of one (text/receipt.py) nor how answers are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pageturner.errors import ClientError, EngineFault
from pageturner.formats.model_hash import model_hash, model_marks
from pageturner.http.error_responses import error_body
from pageturner.http.responses import sse_event
from pageturner.http.slices import in_thread
from pageturner.server.api.base.call import Call
from pageturner.server.api.base.replies import Reply
from pageturner.text import receipt as form
from pageturner.text.output_stream import OutputStream
from pageturner.text.receipt import Receipt, ReceiptInput

# as `size_of` counts; more is hashed in a thread, so that streams do not wait for it
MUCH = 1 << 14
CHOICE = 1 << 10  # what a choice counts beside its tokens


class Receipts:
    """Makes them. The model is hashed when the first one is asked for, by a thread of its own: no
    start waits for it, and no end of the server does.

    model        where the model lies; key: signs receipts, empty: they are not signed
    fingerprint  asked for that of the present engine
    """

    def __init__(self, model: Path, key: bytes, fingerprint: Callable[[], str]) -> None:
        self._model = model
        self._key = key
        self._fingerprint = fingerprint
        self._marks = model_marks(model)
        self._hash: asyncio.Future[str] | None = None

    def hashed(self) -> asyncio.Future[str]:
        """The hash of the model, sooner or later; the first to ask has it computed. ClientError 409
        as of `write`."""
        self._check()
        if self._hash is None or (self._hash.done() and self._hash.exception() is not None):
            self._hash = in_thread(lambda: model_hash(self._model) if self._marks else "")
        return self._hash

    async def write(
        self, call: Call, about: Mapping[str, Any], streams: Sequence[OutputStream]
    ) -> Receipt:
        """The receipt of an answer. streams: those of the choices that the client gets, which have
        ended; about: id, object, created, model and fingerprint of the answer. ClientError where
        nobody can say what made it: 409 model_changed, 409 engine_changed, 503 model_unreadable."""
        hashed = self.hashed()
        await asyncio.wait({hashed})
        self._check()
        if about["fingerprint"] != self._fingerprint():
            message = "the engine was started again with other kernels while this answer was made: ask again"
            raise ClientError(409, "engine_changed", message)
        try:
            written = (call, about, streams, hashed.result(), self._key)
        except EngineFault as fault:
            raise ClientError(503, fault.code, fault.message) from None
        large = size_of(call, streams) > MUCH
        return await in_thread(lambda: receipt_of(*written)) if large else receipt_of(*written)

    async def attach(
        self, reply: Reply, streams: list[OutputStream], left: asyncio.Future[None] | None = None
    ) -> bool:
        """Have an answer carry its receipt, which may take as long as the model is hashed. False if
        its client left meanwhile. ClientError as of `write`."""
        hashed = self.hashed()
        waited: set[asyncio.Future[Any]] = {hashed} if left is None else {hashed, left}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not hashed.done():
            return False
        reply.receipt = await self.write(reply.call, reply.about(), reply.best(streams))
        return True

    async def event(self, reply: Reply, streams: list[OutputStream]) -> bytes:
        """The event of the receipt, or of why there is none."""
        try:
            await self.attach(reply, streams)
        except ClientError as error:
            return sse_event(error_body(error.status, error.code, error.message))
        return reply.last_receipt()

    def _check(self) -> None:
        """Raise ClientError if the model's files have changed: a restarted engine may have loaded
        other files."""
        if model_marks(self._model) != self._marks:
            message = "the model's files were changed while they were served, so no receipt can name them:"
            raise ClientError(409, "model_changed", f"{message} the server must be started anew")


def size_of(call: Call, streams: Sequence[OutputStream]) -> int:
    """Roughly how many tokens would take as long to hash as the receipt of this answer."""
    params = call.params[0]
    lists = (
        params.stop_ids,
        params.force_ids,
        params.allowed_token_ids or (),
        params.logit_bias or (),
    )
    size = sum(map(len, lists)) + sum(map(len, params.bad_words_token_ids))
    size += sum(map(len, params.stop)) + len(params.structured_outputs or "")
    return size + sum(len(one.request.prompt) + len(one.tokens) + CHOICE for one in streams)


def receipt_of(
    call: Call, about: Mapping[str, Any], streams: Sequence[OutputStream], hash: str, key: bytes
) -> Receipt:
    """Return what `Receipts.write` returns; hash: of the model."""
    body, prompts = call.body, range(0, len(call.prompts), call.made)
    choices = [
        form.choice_of(index, index // call.kept, stream.tokens, stream.finish or "")
        for index, stream in enumerate(streams)
    ]
    return form.sealed(
        Receipt(
            version=form.VERSION,
            **about,
            model_hash=hash,
            adapter=streams[0].request.adapter,
            input=ReceiptInput(
                add_special_tokens=body.add_special_tokens,
                add_generation_prompt=body.add_generation_prompt is not False,
                skip_special_tokens=body.skip_special_tokens is not False,
                echo=bool(call.echoes),
            ),
            params=form.params_of(call.params[0], call.kept, call.made),
            prompts=tuple(
                form.prompt_of(
                    call.prompts[i], 0 if call.only_echoes else call.params[i].max_tokens or 0
                )
                for i in prompts
            ),
            choices=tuple(choices),
        ),
        key,
    )
