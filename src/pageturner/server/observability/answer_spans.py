"""The part of a request's span that is about its answer, and the spans below it.

Owns the attributes of generating requests and the names of their phases, and the same figures in
the log. Must not know how spans reach a collector (http/tracing.py), nor who measured the times.

    chat tiny                  tokens, latencies                     the request
      accept                   until it was handed to the engine
      queue                    by what it was held up: pageturner.cause
      prefill, decode ...      as /v1/requests/ID/timeline has them  by whom: pageturner.behind
      delivery                 behind its last step
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pageturner.http.request_info import RequestInfo
from pageturner.http.tracing import AnswerSpan, ChildSpan, plain
from pageturner.server.observability.request_phases import phases_of
from pageturner.server.observability.timings import parts_of, spans_of
from pageturner.text.output_stream import OutputStream

MAX_CHOICES = 8  # of a request, that have spans
MAX_BEHIND = 8  # requests that one span names
CHATS = ("/v1/chat/", "/v1/messages", "/v1/responses", "/api/chat")


def note_answer(info: RequestInfo, streams: Iterable[OutputStream]) -> None:
    """Have the log line and the span of a request tell the tokens and times of its answer."""
    info.streams = streams = list(streams)
    begun = [stream.times for stream in streams if stream.tokens]
    first = min((times.first_at - times.arrival for times in begun), default=0.0)
    info.about = {
        "prompt_tokens": sum(len(stream.request.prompt) for stream in streams),
        "cached_tokens": sum(stream.cached for stream in streams),
        "recomputed_tokens": sum(stream.recomputed for stream in streams),
        "output_tokens": sum(len(stream.tokens) for stream in streams),
        "ttft_seconds": round(first, 6),
        "finish_reason": ",".join(stream.finish or "unfinished" for stream in streams[:8]),
    }


@dataclass(frozen=True, slots=True)
class AnswerSpans:
    """The answers of one server.

    name           returns by which id a client knows the request of this number; "": unknown
    await_timings  waits until the engine has reported the times of these streams, a second at most
    """

    name: Callable[[int], str]
    await_timings: Callable[[list[OutputStream]], Awaitable[None]]

    def is_settled(self, info: RequestInfo) -> bool:
        return all(stream.times.timings for stream in info.streams)

    async def settle(self, info: RequestInfo) -> None:
        await self.await_timings(info.streams)

    def describe(self, info: RequestInfo, path: str, now: float) -> AnswerSpan:
        operation = "chat" if path.startswith(CHATS) else "text_completion"
        attributes = {"gen_ai.operation.name": operation, **attributes_of(info, now)}
        children = [
            child for stream in info.streams[:MAX_CHOICES] for child in self._phases(stream, now)
        ]
        if len(info.streams) == 1:
            for child in children:
                del child.attributes["pageturner.choice"]
        return AnswerSpan(f"{operation} {info.model}", attributes, children)

    def _phases(self, stream: OutputStream, now: float) -> Iterator[ChildSpan]:
        for start, end, what, behind in _pieces(stream, now, time.monotonic()):
            name, _, cause = what.partition("_") if what.startswith("queue_") else (what, "", "")
            attributes: dict[str, Any] = {"pageturner.cause": cause} if cause else {}
            names = [plain(name) for name in map(self.name, behind) if name]
            if names:
                attributes["pageturner.behind"] = tuple(names[:MAX_BEHIND])
            attributes["pageturner.choice"] = stream.choice
            yield ChildSpan(name, start, end, attributes)


def _pieces(
    stream: OutputStream, answered: float, latest: float
) -> Iterator[tuple[float, float, str, list[int]]]:
    """Yield begin, end and name of the phases of a choice, one after another, and the requests
    because of which they took so long. A phase that lies outside of the time between the arrival
    and `latest` is left out: an engine that reports it is mistaken."""
    times = stream.times
    if times.timings is None:
        return
    spans = spans_of(times, times.timings, max(answered, times.timings.until))
    for what, group in groupby(spans, key=lambda span: span[2]):
        pieces = list(group)
        start, end = pieces[0][0], pieces[-1][1]
        if times.arrival <= start < end <= latest:
            yield start, end, what, list(dict.fromkeys(by for *_, by in pieces if by))


def attributes_of(info: RequestInfo, now: float) -> dict[str, Any]:
    """Return the attributes of a request that generated: by the conventions for generative AI, and
    by vLLM's names where those have none. Of several choices the latencies are those of the first,
    in seconds."""
    streams: list[OutputStream] = info.streams
    first = streams[0]
    prompts = [stream for stream in streams if stream.request.parent is None]
    inputs = sum(len(stream.request.prompt) for stream in prompts)
    outputs = sum(len(stream.tokens) for stream in streams)
    params, times = first.request.params, first.times
    found: dict[str, Any] = {
        "gen_ai.provider.name": "pageturner",
        "gen_ai.request.model": info.model,
        "gen_ai.response.model": info.model,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": len(streams),
        "gen_ai.response.finish_reasons": [
            stream.finish or "unfinished" for stream in streams[:MAX_CHOICES]
        ],
        "gen_ai.usage.input_tokens": inputs,
        "gen_ai.usage.output_tokens": outputs,
        "gen_ai.usage.prompt_tokens": inputs,
        "gen_ai.usage.completion_tokens": outputs,
        "gen_ai.usage.cache_read.input_tokens": sum(stream.cached for stream in prompts),
        "gen_ai.usage.num_sequences": len(streams),
        "gen_ai.latency.e2e": now - times.arrival,
    }
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    if times.first_at:
        found["gen_ai.latency.time_to_first_token"] = times.first_at - times.arrival
    if (phases := phases_of(times)) is not None:
        found["gen_ai.latency.time_in_queue"] = phases.queue
        found["gen_ai.latency.time_in_model_prefill"] = phases.prefill
        found["gen_ai.latency.time_in_model_decode"] = phases.decode
        found["gen_ai.latency.time_in_model_inference"] = phases.prefill + phases.decode
        for part, seconds in parts_of(times, now).items():
            if seconds:
                found[f"pageturner.seconds.{part}"] = seconds
    return found
