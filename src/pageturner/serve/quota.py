"""What each API key has under way and has used, held against the limits that are written beside it.

Owns the account of every key that has limits. Must not know HTTP, where limits are written down, nor who else
refuses requests. The clock is given, so that a test can say what time it is.

Tokens are in a bucket: it holds the tokens of a minute, and fills steadily. A request takes the tokens of its
prompt out when it comes in, and those of its answer when they are known; the answer may leave the bucket
with a debt, which is paid before the next request comes in. So the average holds, whatever `max_tokens` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pageturner.errors import ClientError
from pageturner.serve.api_keys import ApiKey
from pageturner.text.output_stream import OutputStream

MINUTE = 60.0
ROUNDING = 1e-6  # seconds


@dataclass(slots=True)
class TokenBucket:
    """rate: tokens a second. level: what it held at `at`; below 0 it owes."""

    rate: float
    level: float
    at: float

    @property
    def size(self) -> float:
        return MINUTE * self.rate

    def wait_for(self, tokens: int, now: float) -> float:
        """Seconds until so many tokens can be taken; 0: now. As much as it ever holds is enough for more."""
        self._fill(now)
        return max(0.0, (min(tokens, self.size) - self.level) / self.rate)

    def take(self, tokens: int, now: float) -> None:
        self._fill(now)
        self.level -= tokens

    def _fill(self, now: float) -> None:
        self.level = min(self.size, self.level + (now - self.at) * self.rate)
        self.at = now


@dataclass(slots=True)
class KeyAccount:
    """One key. under_way: the choices of each request that it has open."""

    bucket: TokenBucket | None
    under_way: list[Sequence[OutputStream]] = field(default_factory=list)


class Quota:
    """The accounts of all keys.

    queue  most requests that may wait
    slots  how many run at once
    """

    def __init__(self, queue: int, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._queue = queue
        self._slots = slots
        self._clock = clock
        self._accounts: dict[bytes, KeyAccount] = {}

    def check(self, key: ApiKey, prompt_tokens: int = 1) -> None:
        """ClientError 429 when the key has too many requests under way, or has used its tokens up."""
        account = self._accounts.get(key.sha256)
        if account is None:
            return
        if 0 < key.max_concurrent <= len(account.under_way):
            message = f"this key may have {key.max_concurrent} requests under way: wait until one has ended"
            raise ClientError(429, "concurrency_limit", message)
        if account.bucket is not None:
            wait = account.bucket.wait_for(prompt_tokens, self._clock())
            if wait > ROUNDING:
                message = (
                    f"this key may use {key.tokens_per_minute} tokens a minute: come again in {wait:.1f} s"
                )
                raise ClientError(429, "token_rate_limit", message, retry_after=wait)

    def admit(self, key: ApiKey, streams: Sequence[OutputStream], unfinished: int) -> None:
        """ClientError 429 when this request would be beyond a limit of its key. Counts nothing yet.

        unfinished  requests that the server has already
        """
        self.check(key, _prompt_tokens(streams))
        account = self._accounts.get(key.sha256)
        if key.queue_share and unfinished + len(streams) > self._slots:  # somebody will have to wait
            open_ones = [] if account is None else account.under_way
            waiting = sum(not stream.tokens for choices in open_ones for stream in choices)
            most = max(1, int(key.queue_share * self._queue))
            if waiting + len(streams) > most:
                message = f"this key may have {most} requests waiting, and has {waiting}: wait for answers"
                raise ClientError(429, "queue_share", message)

    def enter(self, key: ApiKey, streams: Sequence[OutputStream]) -> None:
        """An admitted request is under way."""
        if key.max_concurrent or key.tokens_per_minute or key.queue_share:
            account = self._account(key)
            account.under_way.append(streams)
            if account.bucket is not None:
                account.bucket.take(_prompt_tokens(streams), self._clock())

    def leave(self, key: ApiKey, streams: Sequence[OutputStream]) -> None:
        """A request that came in has ended, in whatever way."""
        account = self._accounts.get(key.sha256)
        if account is None or not any(streams is one for one in account.under_way):
            return
        account.under_way = [one for one in account.under_way if one is not streams]
        if account.bucket is not None:
            account.bucket.take(sum(len(stream.tokens) for stream in streams), self._clock())

    def _account(self, key: ApiKey) -> KeyAccount:
        """That of a key. Limits that were changed while the server runs hold from here on."""
        account = self._accounts.setdefault(key.sha256, KeyAccount(None))
        rate = key.tokens_per_minute / MINUTE
        if not rate:
            account.bucket = None
        elif account.bucket is None or account.bucket.rate != rate:
            account.bucket = TokenBucket(rate, MINUTE * rate, self._clock())
        return account


def _prompt_tokens(streams: Sequence[OutputStream]) -> int:
    """Choices of one prompt share it."""
    return sum(len(stream.request.prompt) for stream in streams if stream.request.parent is None)
