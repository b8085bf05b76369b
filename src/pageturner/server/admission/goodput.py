"""Goodput: how many of the requests that carried targets met them.

Owns what "met" means to the server, which measures as its clients do, but for the network: TTFT
from the first byte of the request to the first token, TPOT the mean gap of the tokens behind it,
the deadline to the last one. Must not know how metrics are written.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pageturner.http.error_responses import was_turned_away
from pageturner.text.output_stream import OutputStream

WINDOW = 60.0  # seconds that share and rate look back
MET, MISSED, REFUSED = "met", "missed", "refused"


@dataclass(slots=True)
class Goodput:
    """Counts of the choices that had a target, by target and outcome; "all": of all its targets
    together.

    One that failed missed them all. One whose client left counts only if it was late already.
    """

    outcomes: Counter[tuple[str, str]] = field(
        default_factory=lambda: Counter({("all", outcome): 0 for outcome in (MET, MISSED, REFUSED)})
    )
    _lately: deque[tuple[float, bool]] = field(default_factory=deque)

    def ended(self, stream: OutputStream, now: float) -> None:
        """Count a choice that has been answered or has failed."""
        failure = stream.failure
        outcomes = {}
        for target, met in _targets(stream).items():
            outcomes[target] = MET if failure is None and met(now) else MISSED
            if failure is not None and was_turned_away(failure):
                outcomes[target] = REFUSED
        self._count(outcomes, now)

    def left(self, stream: OutputStream, now: float) -> None:
        """Its client did not wait for the end."""
        targets = _targets(stream)
        targets.pop("tpot", None)
        if targets and stream.tokens:
            targets.pop("ttft", None)
        late = {target: MISSED for target, met in targets.items() if not met(now)}
        self._count(late, now)

    def turned_away(self, stream: OutputStream, now: float) -> None:
        """Count a choice that was refused for lack of room."""
        self._count(dict.fromkeys(_targets(stream), REFUSED), now)

    def last_minute(self, now: float) -> tuple[float, float]:
        """The share that met all their targets, and how many did in a second, of the last minute.
        Nobody without a target counts; of nobody the share is 1."""
        met, answers = self.counted(now)
        return met / answers if answers else 1.0, met / WINDOW

    def counted(self, now: float) -> tuple[int, int]:
        """Return how many choices of the last minute met all their targets, and how many had
        any."""
        self._forget(now)
        return sum(good for _, good in self._lately), len(self._lately)

    def _count(self, outcomes: dict[str, str], now: float) -> None:
        if not outcomes:
            return
        whole = next((one for one in (REFUSED, MISSED) if one in outcomes.values()), MET)
        for target, outcome in (*outcomes.items(), ("all", whole)):
            self.outcomes[target, outcome] += 1
        self._forget(now)
        self._lately.append((now, whole == MET))

    def _forget(self, now: float) -> None:
        while self._lately and self._lately[0][0] < now - WINDOW:
            self._lately.popleft()


def _targets(stream: OutputStream) -> dict[str, Callable[[float], bool]]:
    """Return whether each of its targets is met as it stands at a time."""
    request, times, more = stream.request, stream.times, len(stream.tokens) - 1
    found: dict[str, Callable[[float], bool]] = {}
    if (ttft := request.ttft_target) is not None:
        found["ttft"] = lambda now: (
            (times.first_at if stream.tokens else now) - times.arrival <= ttft
        )
    if (tpot := request.tpot_target) is not None:
        found["tpot"] = lambda _: more < 1 or (times.last_at - times.first_at) / more <= tpot
    if (deadline := request.deadline) is not None:
        found["deadline"] = lambda now: (times.last_at if stream.done else now) <= deadline
    return found
