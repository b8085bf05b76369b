"""How the engine's own refusals and failures look over HTTP. Must not know what else can be wrong."""

from __future__ import annotations

from pageturner.core.types import Failure
from pageturner.errors import ClientError

# everything else is a 500. A passed deadline is a 504, as gateways translate gRPC's DEADLINE_EXCEEDED: not
# the client's mistake (408 would say that it was slow to ask), nor to be tried elsewhere, as a 503 is
STATUS = {
    "queue_full": 429,
    "ttft_target_unreachable": 429,
    "deadline_unreachable": 429,
    "deadline_exceeded": 504,
    "empty_prompt": 400,
    "prompt_too_long": 400,
    "kv_too_small": 400,
    "nothing_to_generate": 400,
    "nothing_allowed": 400,
    "invalid_grammar": 400,
    "grammar_too_long": 400,
    "too_many_beams": 400,
    "structured_outputs_unsupported": 400,
    "n_unsupported": 400,
    "engine_gave_up": 503,
    "shutting_down": 503,
}


def refusal(failure: Failure) -> ClientError:
    """What the client is told."""
    status = STATUS.get(failure.code, 500)
    return ClientError(status, failure.code, failure.message, retry_after=failure.retry_after)


def turned_away(failure: Failure) -> bool:
    """Whether the request was not even begun, for want of room or time."""
    return STATUS.get(failure.code) == 429
