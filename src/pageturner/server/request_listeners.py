"""The work of a server's features for each request that generates, in the order in which they do
it.

Owns that order: refusals come first, then what makes room by taking something from others, then
what follows the request. The end of a request undoes all of it, the last first. Must not know how a
request is read, opened or answered (api/base/generate.py), nor how a feature works.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pageturner.http.request_info import RequestInfo
from pageturner.server.admission.quota import Work
from pageturner.server.api.base.call import Call
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.observability.answer_spans import note_answer
from pageturner.server.service import Service
from pageturner.text.output_stream import OutputStream

TOO_SLOW = "client too slow"


@dataclass(frozen=True, slots=True)
class GeneratingRequest:
    """One request that generates. streams: the choices of its answer; work: of its key."""

    call: Call
    served: ServedModel
    streams: list[OutputStream]
    info: RequestInfo
    work: Work


Step = Callable[[GeneratingRequest], None]


def _nothing(_: GeneratingRequest) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RequestListener:
    """One feature.

    begin     may refuse the request by a ClientError, and has no other effect
    admitted  nobody has refused the request: take what it needs
    ended     the request has ended, however it did; called wherever `admitted` was
    """

    begin: Step = _nothing
    admitted: Step = _nothing
    ended: Step = _nothing


def listeners_of(service: Service) -> tuple[RequestListener, ...]:
    """Return the listeners of a server."""
    supervisor, background, history = service.supervisor, service.background, service.history

    def check_room(request: GeneratingRequest) -> None:
        supervisor.check_open(request.streams, background.leaving(request.streams))

    def check_quota(request: GeneratingRequest) -> None:
        waiting = len(service.streams.unfinished)
        service.quota.admit(request.work, request.streams, waiting, request.served.limits)

    def count_active(more: int) -> None:
        service.active += more

    def unpin_prefixes(request: GeneratingRequest) -> None:
        positions = request.call.positions(request.served.block_size)
        service.prefixes.make_room(positions, request.served)

    def hash_model(request: GeneratingRequest) -> None:
        if request.call.body.receipt:
            service.receipts.hashed()  # while the answer is made

    def begin_history(request: GeneratingRequest) -> None:
        history.begin(request.streams, request.info.id, request.info.tenant)

    def end_history(request: GeneratingRequest) -> None:
        history.end(request.streams, request.info.id, request.info.tenant, time.monotonic())

    def count_answer(request: GeneratingRequest) -> None:
        service.metrics.phases.add_request(request.streams)
        service.metrics.cut_readers += request.info.abort_reason == TOO_SLOW
        service.adapters.count(request.call.body.model, request.streams)
        note_answer(request.info, request.streams)

    return (
        RequestListener(begin=check_room),
        RequestListener(begin=check_quota),
        RequestListener(admitted=lambda _: count_active(1), ended=lambda _: count_active(-1)),
        RequestListener(admitted=unpin_prefixes),
        RequestListener(
            admitted=lambda request: background.make_room(request.streams),
            ended=lambda request: background.leave(request.streams),
        ),
        RequestListener(admitted=hash_model),
        RequestListener(admitted=begin_history, ended=end_history),
        RequestListener(
            admitted=lambda request: service.sessions.begin(request.streams[0], request.info),
            ended=lambda request: service.sessions.end(request.streams[0]),
        ),
        RequestListener(ended=count_answer),
    )
