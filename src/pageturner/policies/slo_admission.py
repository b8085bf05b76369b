"""Targets of single requests: who cannot meet its own is refused at the door, who is past its
deadline ends.

Owns both decisions, and how true the forecasts were that the first one rests on. Must not know how
a forecast is made (ttft_forecast.py), what a target is worth to whom, or the clock.

Forecasts are never quite true, so some of the time that a request gives is kept as a margin: as
much as one in ten of those who were let in needed beyond its forecast, a share of its patience that
is learnt from them.

An engine that has nothing else to do takes whoever comes: that hurts nobody, and it is how it finds
out that it is faster than it thought. Who was taken once is not refused when another engine has to
take it up again.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import ceil, inf, log

from pageturner.params import beyond_limits
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.policies.ttft_forecast import RemainingWork, StepLimits, TtftForecast
from pageturner.request import BACKGROUND, EXPIRED, Event, Refused, Request
from pageturner.scheduler.types import Sequence, State

KEPT = 0.9  # of those who are let in should have their first token in time
MAX_MARGIN = 0.5
STRIDE = 0.05  # of the patience, by which the margin moves at one request
TYPICAL = (
    0.6  # the quantile of an answer's length that forecasts go by: about the mean, as queues take
)


class SloAdmission:
    """Stands before a scheduler: requests come in by `add`, and before a plan those leave that
    expired."""

    def __init__(self, stack: SchedulerStack) -> None:
        self._stack, self._scheduler = stack, stack.scheduler
        self._deadlines: list[tuple[float, int]] = []
        self._sizes: dict[
            Sequence, tuple[int, int]
        ] = {}  # tokens to compute, and of the whole answer
        self._due: dict[
            int, tuple[float, float, float]
        ] = {}  # arrival, first token foretold, patience
        self._refused = self._expired = self._judged = self._later = 0
        self._error = self._margin = 0.0

    def add(self, request: Request, now: float) -> None:
        """Queue a request. Refused as Scheduler.add does, and with invalid_value,
        deadline_exceeded, or, and then with retry_after, with ttft_target_unreachable or
        deadline_unreachable."""
        if wrong := beyond_limits(
            request.params
        ):  # which the door has seen; but what came is bytes
            raise Refused("invalid_value", wrong)
        self._scheduler.add(request)
        if request.deadline is not None and request.deadline <= now:
            self._scheduler.abort(request.id)
            self._expired += 1
            raise Refused(EXPIRED.code, EXPIRED.message)
        if not request.resume and request.parent is None:
            self._refuse_late(request, now)
        if request.deadline is not None:
            if (
                len(self._deadlines) > 2 * sum(self._scheduler.load[:2]) + 1024
            ):  # of ended ones, mostly
                self._deadlines = [one for one in self._deadlines if one[1] in self._scheduler]
                heapify(self._deadlines)
            heappush(self._deadlines, (request.deadline, request.id))

    def expired(self, now: float) -> list[Event]:
        """End those whose deadline has passed, wherever they are. One plan may be under way: blocks
        that it uses are held until it is committed, and what it computes for them is dropped."""
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id = heappop(self._deadlines)
            if id in self._scheduler:
                events += self._scheduler.end(id, EXPIRED)
                self.forget(id)
                self._expired += 1
        return events

    # -- the door ----------------------------------------------------------------------------------
    def _refuse_late(self, request: Request, now: float) -> None:
        patience = inf if request.ttft_target is None else request.ttft_target
        if request.deadline is not None:
            patience = min(patience, request.deadline - request.arrival)
        if patience == inf or not self._scheduler.policy.forecastable:
            return
        times = self._foretell(request, now)
        first = next(times)
        self._due[request.id] = request.arrival, now + first, patience
        bound = patience * (1 - self._margin)
        if now + first <= request.arrival + bound or self._alone(request):
            return
        self.forget(request.id)
        self._scheduler.abort(request.id)
        self._refused += 1
        wait = min(first - bound, next(times))  # once all others have ended it is taken in any case
        code = "deadline" if patience != request.ttft_target else "ttft_target"
        raise Refused(
            f"{code}_unreachable",
            f"the first token would come after {now + first - request.arrival:.2f} s, and the request gives"
            f" it {patience:.3g} s: ask again in {ceil(wait)} s, or give it more time",
            wait,
        )

    def _alone(self, request: Request) -> bool:
        """Return whether only background requests are here besides this one."""
        everybody = (*self._scheduler.running, *self._scheduler.waiting)
        return all(
            seq.request.id == request.id or seq.request.priority == BACKGROUND for seq in everybody
        )

    def _foretell(self, request: Request, now: float) -> Iterator[float]:
        scheduler, pool = self._scheduler, self._stack.pool
        known, self._sizes = self._sizes, {}
        last = max(request.priority, BACKGROUND - 1)  # the background makes nobody else wait
        running = [
            self._work(seq, known) for seq in scheduler.running if seq.request.priority <= last
        ]
        queue = [seq for seq in scheduler.queue(now) if seq.request.priority <= last]
        waiting = {seq: self._work(seq, known) for seq in queue}
        taken = sum(len(seq.blocks) for seq in scheduler.running) * pool.block_size
        limits = StepLimits(
            slots=scheduler.slots,
            budget=min(scheduler.budget, scheduler.policy.budget()),
            room=pool.full.available * pool.block_size
            + taken
            - sum(work.reserved for work in running),
            seconds=self._stack.step_times.curve,
            apart=not scheduler.policy.mixes,
        )
        asked = next(work for seq, work in waiting.items() if seq.request.id == request.id)
        return TtftForecast(running, waiting.values(), asked, limits).times()

    def _work(self, seq: Sequence, known: dict[Sequence, tuple[int, int]]) -> RemainingWork:
        """Return the work that is left of a sequence. Costly numbers are kept: what no cache gives,
        how long the answer is."""
        scheduler, pool = self._scheduler, self._stack.pool
        missing, length = known.get(seq, (0, 0))
        if length <= seq.generated:
            length = ceil(self._stack.predictor.length(seq, TYPICAL))
        if seq.state is State.RUNNING:
            missing = 0
        elif not missing:  # choices of one prompt share it
            missing = 1 if seq.source is not None else seq.pending - pool.attachable(seq)
        self._sizes[seq] = missing, length
        gap = len(seq.tokens) - seq.computed
        promised, _ = scheduler.reserve(seq, scheduler.peak(seq), pool.block_size)
        waits = seq.state is State.WAITING
        return RemainingWork(
            prompt=missing if waits else gap * (gap > 1),
            answer=max(length - seq.generated, 1),
            ways=max(1, seq.request.params.beam_width) if waits else 1,
            reserved=max(promised, len(seq.blocks) * pool.block_size),
            grows=promised < seq.prompt_len + length,
        )

    # -- how true the forecasts were ---------------------------------------------------------------
    def saw(self, events: list[Event], now: float) -> None:
        """Learn from the events of a step how true the forecasts were."""
        for event in events:
            if event.tokens and event.id in self._due:
                arrival, due, patience = self._due[event.id]
                beyond = now - due > self._margin * patience
                margin = self._margin + STRIDE * (KEPT if beyond else KEPT - 1)
                self._margin = min(max(margin, 0.0), MAX_MARGIN)
                self._judged += 1
                self._later += now > due
                self._error += abs(log(max(now - arrival, 1e-6) / max(due - arrival, 1e-6)))
            if event.tokens or event.finish is not None:
                self.forget(event.id)

    def forget(self, id: int) -> None:
        """The request is no more, or its first token is there."""
        self._due.pop(id, None)

    def stats(self) -> dict[str, float]:
        """Counters refused_late, expired. Of ttft_forecasts forecasts, of requests that were taken:
        the share whose first token came later, and the mean |ln(true / foretold TTFT)|;
        ttft_margin: what is kept."""
        judged = max(self._judged, 1)
        return {
            "refused_late": float(self._refused),
            "expired": float(self._expired),
            "ttft_forecasts": float(self._judged),
            "ttft_forecast_later": self._later / judged,
            "ttft_forecast_log_error": self._error / judged,
            "ttft_margin": self._margin,
        }
