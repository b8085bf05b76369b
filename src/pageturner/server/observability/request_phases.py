"""The phases of requests that ended, by vLLM's names, and the seconds of all of them by cause.

Owns how the account of a request becomes queue, prefill and decode. Must not know who measured it
(telemetry/latency_breakdown.py), nor how Prometheus is written.

    queue      from the hand-over to the engine until the first step that computed something of it
    prefill    from there until its first token
    decode     from the first token until the last one
    inference  prefill and decode
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pageturner.http.prometheus import Exposition, Histograms
from pageturner.server.observability.metric_tables import expose, histograms_of
from pageturner.text.output_stream import OutputStream, StreamTimes

QUEUE = "vllm:request_queue_time_seconds"
PREFILL = "vllm:request_prefill_time_seconds"
DECODE = "vllm:request_decode_time_seconds"
INFERENCE = "vllm:request_inference_time_seconds"
COMPUTED = "vllm:request_prefill_kv_computed_tokens"
CHOICES = "vllm:request_params_n"
LONGEST = "vllm:request_max_num_generation_tokens"
PREEMPTED = "vllm:request_num_preemptions"
# spans in which it is in a step
COMPUTING = frozenset(["prefill", "recompute", "decode", "stalled"])
MAX_CAUSES = 64


@dataclass(frozen=True, slots=True)
class RequestPhases:
    """Moments of one choice, in seconds of one clock. scheduled_at: the first step that computed
    something of it; first_at and last_at: its tokens, both scheduled_at where there were none."""

    queued_at: float
    scheduled_at: float
    first_at: float
    last_at: float

    @property
    def queue(self) -> float:
        return self.scheduled_at - self.queued_at

    @property
    def prefill(self) -> float:
        return self.first_at - self.scheduled_at

    @property
    def decode(self) -> float:
        return self.last_at - self.first_at


def phases_of(times: StreamTimes) -> RequestPhases | None:
    """Return the phases of a choice; None if the engine reported no timings. A choice that never
    ran spent all of its time in the queue. After a restart the timings are those of the last
    engine: its first step may lie behind the first token, which then counts as the end of the
    queue."""
    timings = times.timings
    if timings is None:
        return None
    began = next((start for start, _, what, _ in timings.spans if what in COMPUTING), timings.until)
    if times.first_at:
        began = min(began, times.first_at)
    began = max(began, times.submitted_at)
    first = max(times.first_at, began)
    return RequestPhases(times.submitted_at, began, first, max(times.last_at, first))


@dataclass(slots=True)
class PhaseMetrics:
    """seconds_by_part: of all choices that ended, by the parts of `Timings`."""

    histograms: Histograms = field(default_factory=lambda: histograms_of("phase_histograms"))
    seconds_by_part: dict[str, float] = field(default_factory=dict)

    def add_times(self, times: StreamTimes) -> None:
        """Observe the phases of a choice that has ended and whose timings are known."""
        phases = phases_of(times)
        if phases is None or times.timings is None:
            return
        lost = sum(what == "preempted" for _, _, what, _ in times.timings.spans)
        self.histograms.observe(PREEMPTED, lost)
        self.histograms.observe(QUEUE, phases.queue)
        self.histograms.observe(PREFILL, phases.prefill)
        self.histograms.observe(DECODE, phases.decode)
        self.histograms.observe(INFERENCE, phases.prefill + phases.decode)
        for part, seconds in times.timings.parts.items():
            known = part in self.seconds_by_part or len(self.seconds_by_part) < MAX_CAUSES
            part = part if known else "other"
            self.seconds_by_part[part] = self.seconds_by_part.get(part, 0.0) + seconds

    def add_request(self, streams: Iterable[OutputStream]) -> None:
        """A request with these choices, of one prompt or several, has been answered."""
        groups: dict[int, list[int]] = {}
        for stream in streams:
            first = stream.request.id if stream.request.parent is None else stream.request.parent
            groups.setdefault(first, []).append(len(stream.tokens))
        for lengths in groups.values():
            self.histograms.observe(CHOICES, len(lengths))
            self.histograms.observe(LONGEST, max(lengths))

    def expose(self, exposition: Exposition) -> None:
        """Add all of it."""
        self.histograms.expose(exposition)
        expose(exposition, {"request_seconds": self.seconds_by_part})
