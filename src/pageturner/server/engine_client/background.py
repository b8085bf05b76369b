"""Room for those in front: what of the background leaves the engine when others come, and when it
returns.

Streams of the priority BACKGROUND (batches, and whoever asks for it) take the slots and the KV
memory that others leave. The engine gives them no token while others need it
(policies/background.py); here they give up their places too. Before a stream of others is opened,
as many of them are taken out of the engine as have to leave for it, the newest first; so it never
finds its slot, its memory or its place in the queue taken by the background. Who was taken out
keeps its tokens, and goes on behind them as soon as there is room: that is what streams do when an
engine process dies.

Owns who is aside. Must not know batches, nor how an engine is told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from pageturner.errors import ClientError
from pageturner.request import BACKGROUND
from pageturner.server.engine_client.open_streams import OpenStreams
from pageturner.server.engine_client.supervisor import Supervisor
from pageturner.server.observability.metrics import Metrics
from pageturner.text.output_stream import OutputStream

GROWTH = 64  # tokens of KV that an answer is thought to take beyond those that it has
MAX_KV = 0.85  # share of the KV memory up to which the background may fill it
TICK = 0.05  # seconds between two looks at who could return
PATIENCE = 0.5  # seconds that others wait beside the background before all of it leaves
MAX_READ = 4  # requests that are being read: what each will take is not known before
AHEAD = 8  # a slot for each so many is kept filled from the queue, where nobody else is there

Group = list[OutputStream]  # the choices of one prompt, which share its KV


class BackgroundPlaces:
    """The background of one server. slots: sequences that its engine runs at once."""

    def __init__(
        self,
        supervisor: Supervisor,
        streams: OpenStreams,
        metrics: Metrics,
        ids: Iterator[int],
        slots: Callable[[], int],
    ) -> None:
        self._supervisor, self._streams, self._metrics = supervisor, streams, metrics
        self._ids, self._slots = ids, slots
        self._aside: list[Group] = []  # who left first returns first
        self._task: asyncio.Task[None] | None = None

    def leaving(self, coming: list[OutputStream]) -> int:
        """Return how many streams of the background would leave for these, if there is no other
        place for them."""
        if is_background(coming[0]):
            return 0
        return sum(map(is_background, self._streams.unfinished.values()))

    def make_room(self, coming: list[OutputStream]) -> None:
        """Make room for streams that are about to be opened; start the task that tends the
        background if they belong to it."""
        if is_background(coming[0]):
            if self._task is None:
                self._task = asyncio.ensure_future(self._tend())
        elif self._task is not None:
            self._make_room(coming)

    def leave(self, streams: Iterable[OutputStream]) -> None:
        """Forget streams whose client has left."""
        if self._aside:
            gone = {id(stream) for stream in streams}
            self._aside = [group for group in self._aside if id(group[0]) not in gone]

    @property
    def aside(self) -> Iterator[OutputStream]:
        """The streams that left the engine for others, and will return."""
        return (stream for group in self._aside for stream in group)

    def room(self, under_way: int) -> int:
        """Return how many more requests of the background may begin, where so many are under
        way."""
        others = sum(not is_background(stream) for stream in self._streams.unfinished.values())
        inside = len(self._streams.unfinished) - others
        behind, being_read = max(under_way, inside), max(0, under_way - inside)
        if self._aside or self._supervisor.ready is None or self._full([]):
            return 0
        slots = self._slots()
        most = slots - others if others else min(slots + slots // AHEAD, self._streams.limit)
        return min(most - behind, MAX_READ - being_read)

    # -- who leaves --------------------------------------------------------------------------------
    def _make_room(self, coming: list[OutputStream], most: int | None = None) -> None:
        """Take out the newest until the others fit, with those that come; most: at least so that no
        more than so many of the background stay."""
        groups = self._groups()
        others = len(self._streams.unfinished) - sum(map(len, groups)) + len(coming)
        room = self._slots() - others if others and most is None else most
        while groups and (
            (room is not None and sum(map(len, groups)) > room) or self._full(coming)
        ):
            if not others and len(groups) == 1:  # alone it may have all there is
                return
            self._take_out(groups.pop())

    def _groups(self) -> list[Group]:
        """Return the background requests in the engine, oldest first."""
        found: dict[int, Group] = {}
        for stream in self._streams.unfinished.values():
            if is_background(stream):
                request = stream.request
                first = request.id if request.parent is None else request.parent
                found.setdefault(first, []).append(stream)
        return list(found.values())

    def _full(self, coming: Iterable[OutputStream]) -> bool:
        """Return whether all that is open, and these, take more KV than the background may fill."""
        ready = self._supervisor.ready
        if ready is None:
            return False
        taken = sum(map(_positions, self._streams.unfinished.values())) + sum(
            map(_positions, coming)
        )
        return taken > MAX_KV * ready.num_blocks * ready.block_size

    def _take_out(self, group: Group) -> None:
        for stream in group:
            self._supervisor.cancel(stream)
            self._metrics.finished["abort"] -= 1  # it goes on
        self._aside.insert(0, group)

    # -- who returns -------------------------------------------------------------------------------
    async def _tend(self) -> None:
        """Look after the background for as long as there is one."""
        while self._aside or any(map(is_background, self._streams.unfinished.values())):
            await asyncio.sleep(TICK)
            if self._others_wait():
                self._make_room([], most=0)
            else:
                self._make_room([])
                self._return()
        self._task = None

    def _others_wait(self) -> bool:
        """Return whether a request that is not in the background has waited in the engine's queue
        for a while."""
        given, running = self._supervisor.placed()
        since = time.monotonic() - PATIENCE
        return any(
            not is_background(stream)
            and not stream.tokens
            and 0.0 < stream.times.submitted_at < since
            and id in given
            and id not in running
            for id, stream in self._streams.unfinished.items()
        )

    def _return(self) -> None:
        while self._aside:
            group = self._aside[0]
            room = self._slots() - len(self._streams.unfinished)
            if self._streams.unfinished and (len(group) > room or self._full(group)):
                return
            self._rename(group)
            try:
                self._supervisor.check_open(group)
            except ClientError:  # the server is full: it may not be in a moment
                return
            self._supervisor.open(group)
            self._aside.pop(0)

    def _rename(self, group: Group) -> None:
        """Other ids, under which the engine does not know them."""
        ids = {stream.request.id: next(self._ids) for stream in group}
        for stream in group:
            request = stream.request
            parent = (
                request.parent
                if request.parent is None
                else ids.get(request.parent, request.parent)
            )
            stream.request = replace(request, id=ids[request.id], parent=parent)


def is_background(stream: OutputStream) -> bool:
    return stream.request.priority == BACKGROUND


def _positions(stream: OutputStream) -> int:
    """KV that a stream takes, or soon will, in tokens."""
    params, length = stream.request.params, len(stream.request.prompt) + len(stream.tokens)
    rest = (params.max_tokens or GROWTH) - len(stream.tokens)
    return length + max(1, params.beam_width) * min(GROWTH, max(0, rest))
