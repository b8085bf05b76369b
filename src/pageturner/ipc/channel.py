"""Messages between the API process and the engine process, and how they are framed on a socket
pair.

Ground floor: both processes import it, so it knows neither of them. A frame is a 4-byte
little-endian length followed by one msgpack-encoded message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from pageturner.ipc.adapter_messages import (
    AdapterLoaded,
    AdaptersInMemory,
    LoadAdapter,
    UnloadAdapter,
)
from pageturner.ipc.session_messages import KeptSession, ReleaseSession, RestoreSession
from pageturner.request import Event, Request, Timings
from pageturner.telemetry.work import MachineLimits

MAX_FRAME = 64 * 1024 * 1024


class Submit(msgspec.Struct, tag=True, frozen=True):
    """API to engine: take this request (or take it up again, if it carries `resume`). same_params,
    same_prompt: what was left out of it, as the Submit before has it (submit_repeats.py)."""

    request: Request
    same_params: tuple[str, ...] = ()
    same_prompt: bool = False


class Abort(msgspec.Struct, tag=True, frozen=True):
    """API to engine: forget the request, free its blocks now. Answered by Aborted."""

    id: int


class Aborted(msgspec.Struct, tag=True, frozen=True):
    """Engine to API, in answer to Abort. timings: where the time of the request went until now;
    None for a request that is not here, because it had just ended or was never let in."""

    id: int
    timings: Timings | None


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Engine to API, once: the model is loaded. Lengths in tokens."""

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    kv_bytes: int
    fingerprint: str
    phases: dict[str, float]  # start-up budget: phase -> seconds
    token_budget: int = 512  # of a step; 0: no limit
    limits: MachineLimits | None = None  # of the machine; None: not known
    kv_blocks_taken_back: int = 0  # from the engine process before
    device: str = ""  # where it computes, and why


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Engine to API: cannot start, and a restart would not help. The process ends after it."""

    code: str
    message: str


class Events(msgspec.Struct, tag=True, frozen=True):
    """Engine to API: what one step brought."""

    events: list[Event]


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Engine to API, about four times a second while it works and once when it falls idle: name ->
    value.

    Gauges: running, waiting, pinned, blocks_used, blocks_cached, blocks_total, and where layers
    have a window recent_blocks_used and so on, where they are recurrent state_blocks_used;
    kv_reserved and its like in tokens. Counters: steps, step_tokens, prompt_tokens, cached_tokens,
    generated_tokens, recomputed_tokens, preemptions, drafts, draft_tokens, accepted_tokens,
    accepted_tokens_at_0 and so on; where KV outlives the process kv_blocks_taken_back and
    kv_checksum_seconds; where steps are counted the fields of observe.work.WorkTotals. Each is a
    number since the start of this engine process. sessions:
    those of which something has changed. accounts: where the time went of the requests under way
    that the ledger asks for."""

    values: dict[str, float]
    sessions: list[KeptSession] = []
    accounts: dict[int, Timings] = {}


class Unpin(msgspec.Struct, tag=True, frozen=True):
    """API to engine: the blocks that the ended request `id` keeps may go."""

    id: int


class ForgetPrefixes(msgspec.Struct, tag=True, frozen=True):
    """API to engine: requests behind this find no KV of earlier ones, but what is pinned or in
    use."""


class Configure(msgspec.Struct, tag=True, frozen=True):
    """API to engine: go on with these settings as soon as that is safe. All of them, so that an
    engine that was started again needs only the newest. widest: sequences of the widest search ever
    acceptable."""

    max_num_batched_tokens: int
    max_num_seqs: int
    policy: str
    order: str
    widest: int


class Configured(msgspec.Struct, tag=True, frozen=True):
    """Engine to API: from here on these."""

    settings: Configure


OfSessions = ReleaseSession | RestoreSession
ToEngine = (
    Submit | Abort | Unpin | ForgetPrefixes | Configure | OfSessions | LoadAdapter | UnloadAdapter
)
FromEngine = (
    Ready | Failed | Events | Aborted | Stats | Configured | AdapterLoaded | AdaptersInMemory
)

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToEngine | FromEngine) -> bytes:
    """The message as one frame."""
    body = _encoder.encode(message)
    return struct.pack("<I", len(body)) + body


class BadFrame(ValueError):
    """A frame over MAX_FRAME, or one that holds no message: nothing that comes behind it can be
    read."""


class MessageDecoder:
    """Bytes in, messages out. `kind` is what may come in this direction: ToEngine or FromEngine."""

    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[object] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """True if a frame has begun that is not whole yet."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[object]:
        """The messages that are complete with `data`. Raises BadFrame."""
        self._buffer += data
        start, end = 0, len(self._buffer)
        while end - start >= 4:
            (size,) = struct.unpack_from("<I", self._buffer, start)
            if size > MAX_FRAME:
                raise BadFrame(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
            if end - start - 4 < size:
                break
            body = bytes(self._buffer[start + 4 : start + 4 + size])
            start += 4 + size
            try:
                message = self._decoder.decode(body)
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
                raise BadFrame(f"a frame that holds no message: {error}") from error
            yield message
        del self._buffer[:start]
