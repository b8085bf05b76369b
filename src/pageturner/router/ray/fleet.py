"""The replicas of one model as the router's code sees them (router/proxy.py): asked through a Serve
handle.

Owns the way of a request through Serve, and what a lost replica looks like there. Who gets a
request is decided in Serve's request router (request_router.py); here one attempt is told from the
next. Must not know what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Collection
from typing import Any
from urllib.parse import unquote

from pageturner.config.settings import RouterConfig
from pageturner.http.http_client import (
    MAX_REST,
    AnswerPieces,
    ConnectionLost,
    Headers,
    ServerAddress,
)
from pageturner.http.stream_marks import MARK, RESUME
from pageturner.router.breaker import Breaker
from pageturner.router.fleet import Fleet
from pageturner.router.ray.choice import Ask, Choice
from pageturner.router.replica import Replica, ReplicaRequest
from pageturner.router.request_hints import RequestHints

MODEL_PAGE = "/v1/models/"

_numbers = itertools.count(1)


class ServeFleet(Fleet):
    """handle: of the model's deployment; `answer` of it is asked. choice: what its request router
    knows."""

    def __init__(self, name: str, handle: Any, choice: Choice, config: RouterConfig) -> None:
        super().__init__([], config)
        self._name, self._timeout = name, config.read_timeout
        self._handle, self._answer = handle, handle.options(method_name="answer", stream=True)
        self.choice = choice

    @property
    def there(self) -> int:
        """Replicas that Serve sends requests to, as far as is known here."""
        return len(self.choice.replicas)

    def choose(self, asked: RequestHints, tried: Collection[Replica]) -> Replica | None:
        """Return a stand-in for whichever replica Serve will choose; None when as many failed as
        there are."""
        if len(tried) > max(1, self.there):
            return None
        avoid = tuple(one.where for one in tried if one.where)
        address = ServerAddress(self._name, len(tried) + 1)
        breaker = Breaker(time.monotonic)
        return Replica(address=address, breaker=breaker, healthy=True, avoid=avoid)

    def full(self, model: str) -> bool:
        """Never: requests wait at Serve."""
        return False

    async def tell_all(self, method: str, *arguments: Any) -> list[Any]:
        """Return what each replica that is there now answers to this method, or the exception that
        it raised. Raises ConnectionLost where none can be asked within `read_timeout`."""
        try:
            async with asyncio.timeout(self._timeout):
                told: list[Any] = await self._handle.broadcast(method, *arguments).results_async(
                    return_exceptions=True
                )
        except TimeoutError:
            raise ConnectionLost(
                "silent", f"a replica said nothing for {self._timeout:g} s"
            ) from None
        except (
            Exception
        ) as error:  # Ray's own: there is no replica, or the deployment is being taken away
            raise ConnectionLost("broken", f"{type(error).__name__}: {str(error)[:200]}") from error
        return told

    @contextlib.asynccontextmanager
    async def exchange_with(
        self, replica: Replica, request: ReplicaRequest
    ) -> AsyncIterator[AnswerPieces]:
        """Do the same as the router's own fleet, by Serve."""
        hints = request.hints
        adapter = self.choice.adapters.find(_model_of(request))
        ask = Ask(
            next(_numbers),
            request.method,
            request.target,
            request.headers,
            request.body,
            prefix=tuple(hints.prefix),
            most=0 if request.target == RESUME else hints.max_tokens,
            avoid=replica.avoid,
            adapter=adapter,
        )
        # Serve says the name in its own logs, and to whoever asks for it in a replica
        handle = (
            self._answer
            if adapter is None
            else self._answer.options(multiplexed_model_id=adapter.name)
        )
        answer = HandleAnswer(handle.remote(ask), self._timeout)
        number = ask.number
        del ask, request
        try:
            await answer.begin()
            yield answer
        finally:
            replica.where = self.choice.where(number)
            answer.close()
            self.choice.forget(number, answer.tokens if answer.ended else 0)


def _model_of(request: ReplicaRequest) -> str:
    """Return the model that a request names, in its body or as the path of a page."""
    if request.target.startswith(MODEL_PAGE):
        return unquote(request.target.removeprefix(MODEL_PAGE))
    return request.hints.model


class HandleAnswer:
    """An answer that comes through a Serve handle. tokens: those with marks so far; ended:
    nothing of it is left."""

    def __init__(self, pieces: Any, timeout: float) -> None:
        self.status = 0
        self.headers: Headers = []
        self.tokens = 0
        self._pieces, self._timeout = pieces, timeout
        self.ended = False

    async def begin(self) -> None:
        """Wait until status and headers have come. Raises ConnectionLost."""
        head = await self._next()
        if not isinstance(head, tuple):
            raise ConnectionLost("broken", "its answer has no head")
        self.status, self.headers = head

    async def read_piece(self) -> bytes:
        piece = None if self.ended else await self._next()
        if not isinstance(piece, bytes):
            return b""
        self.tokens += piece.count(b"\n" + MARK)
        return piece

    async def read_rest(self, most: int = MAX_REST, seconds: float | None = None) -> bytes:
        whole = b""
        try:
            async with asyncio.timeout(seconds or self._timeout):
                while not self.ended and len(whole) <= most:
                    whole += await self.read_piece()
        except TimeoutError:
            raise ConnectionLost("broken", "the rest of its answer does not come") from None
        if len(whole) > most:
            raise ConnectionLost("broken", f"its answer is longer than {most} bytes")
        return whole

    async def _next(self) -> tuple[int, Headers] | bytes | None:
        """Return the next piece of the answer; None at its end."""
        try:
            async with asyncio.timeout(self._timeout):
                piece: tuple[int, Headers] | bytes = await anext(self._pieces)
                return piece
        except StopAsyncIteration:
            self.ended = True
            return None
        except TimeoutError:
            raise ConnectionLost("silent", f"it said nothing for {self._timeout:g} s") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise ConnectionLost("broken", "Serve gave the request up") from None
        except (
            Exception
        ) as error:  # Ray's own, and whatever its replica raised, as another class each time
            why = str(error).strip().splitlines() or [type(error).__name__]
            raise ConnectionLost("broken", f"{type(error).__name__}: {why[0][:200]}") from error

    def close(self) -> None:
        """Stop reading the answer."""
        if not self.ended:
            self._pieces.cancel()
