"""The ends of streams in OpenAI's older APIs: an error event, or usage if it is wanted, and then
the `[DONE]` mark.

Must not know what stands before that.
"""

from __future__ import annotations

from pageturner.errors import ClientError
from pageturner.http.error_responses import error_body
from pageturner.http.responses import sse_event
from pageturner.server.api.base.replies import DONE, Reply
from pageturner.text.output_stream import OutputStream


def failed_stream(_: Reply, error: ClientError) -> bytes:
    """Return the end of a stream that failed."""
    return sse_event(error_body(error.status, error.code, error.message)) + DONE


def ended_stream(reply: Reply, streams: list[OutputStream]) -> bytes:
    """Return the end of a stream that is complete."""
    return (reply.last_usage(streams) if reply.call.options.include_usage else b"") + DONE
