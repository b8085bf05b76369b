"""The choices of one request go to the engine one after another: what they have in common goes, and
is kept there, once.

Owns which fields can be left out of a Submit because they are those of the Submit before it. Must
not know sockets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pageturner.ipc.channel import Submit
from pageturner.request import Request

BULKY = 64  # elements or characters; what has less is sent again
NOTHING = Request(0, ())
# fields of SamplingParams without a bound of a few bytes
LISTS = (
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "bad_words_token_ids",
    "stop",
    "stop_ids",
    "force_ids",
)


def shortened(request: Request, before: Request) -> Submit:
    """Return the message for a request, without what is the very same object in the one before."""
    params: dict[str, Any] = {}
    for name in LISTS:
        value = getattr(request.params, name)
        if value is getattr(before.params, name) and value and len(value) > BULKY:
            params[name] = getattr(NOTHING.params, name)
    prompt = request.prompt is before.prompt and len(request.prompt) > BULKY
    if params:
        request = replace(request, params=replace(request.params, **params))
    if prompt:
        request = replace(request, prompt=())
    return Submit(request, tuple(params), prompt)


def restored(message: Submit, before: Request | None) -> Request:
    """Return the request of a message, which shares the objects of the one before."""
    request = message.request
    before = before or NOTHING
    known = (name for name in LISTS if name in message.same_params)
    params = {name: getattr(before.params, name) for name in known}
    request = replace(request, params=replace(request.params, **params))
    if message.same_prompt:
        request = replace(request, prompt=before.prompt)
    return request
