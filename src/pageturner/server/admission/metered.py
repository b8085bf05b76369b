"""An endpoint that makes work, held against the key of whoever asks for it.

Owns where a request begins to count: before its body is read, of which every byte that comes counts
too. Must not know limits and prices (quota.py, price.py), nor what is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.types import Message, Receive, Scope

from pageturner.server.admission.quota import Quota, Work


@contextlib.contextmanager
def metered(quota: Quota, scope: Scope, receive: Receive) -> Iterator[tuple[Work, Receive]]:
    """The work of this request for as long as it is under way, and its `receive` that counts.
    ClientError 429 when its key may have no more."""
    with quota.work(scope["pageturner"].key) as work:

        async def counted() -> Message:
            message = await receive()
            if body := message.get("body"):
                quota.read(work, len(body))
            return message

        yield work, counted
