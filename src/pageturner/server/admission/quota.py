"""The account of what each API key has under way and has used, held against the limits that are
written beside it.

Owns the account of every key, and what is under way for it. Must not know HTTP, where limits are
written down, what things cost (price.py), nor who else refuses requests. The clock is given, so
that a test can say what time it is.

Tokens are in a bucket: it holds the tokens of a minute, and fills steadily. A request takes its
price out when it comes in, with answers as long as those of its key have been of late, and when it
ends the difference to what it really used is taken or given back. That may leave the bucket with a
debt, which is paid before the next request comes in. So the average holds, whatever `max_tokens`
says.

What is open is bounded apart from that, by the price of the longest answers that may come:
everything that a key has open together may cost its `max_cost`. Where none is written down, that is
as much as all places of the server with a plain answer of the whole context each: only who asks for
dear things ever meets it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pageturner.errors import ClientError
from pageturner.http.api_keys import ApiKey
from pageturner.server.admission.limits import NO_LIMITS, RequestLimits
from pageturner.server.admission.price import (
    FREE,
    Price,
    price_of,
    price_of_answers,
    price_of_reading,
)
from pageturner.text.output_stream import OutputStream

MINUTE = 60.0
ROUNDING = 1e-6  # seconds
REMEMBERED = 16  # ends of requests of a key, from which its pace is known
SAFETY = (
    1.5  # by which the wait for what others of the key have open is longer than their pace says
)
OF_LATE = 0.2  # weight of the last answer in the share that answers take of what they may


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
        """Seconds until so many tokens can be taken; 0: now. As much as it ever holds is enough for
        more."""
        self._fill(now)
        return max(0.0, (min(tokens, self.size) - self.level) / self.rate)

    def take(self, tokens: int, now: float) -> None:
        """tokens: below 0 they are given back."""
        self._fill(now)
        self.level = min(self.size, self.level - tokens)

    def held(self, now: float) -> float:
        """Tokens that it has; below 0 it owes."""
        self._fill(now)
        return self.level

    def _fill(self, now: float) -> None:
        self.level = min(self.size, self.level + (now - self.at) * self.rate)
        self.at = now


@dataclass(slots=True, eq=False)
class Work:
    """A request of a key, from before its body is read until it has ended.

    size      bytes of its body that came
    streams   its choices, once it is admitted
    price     what it may cost then
    expected  what was taken for its answers
    """

    key: ApiKey
    account: KeyAccount
    size: int = 0
    streams: Sequence[OutputStream] = ()
    price: Price = FREE
    expected: int = 0


@dataclass(slots=True)
class KeyAccount:
    """One key.

    used        tokens that all its requests were charged
    released    when the last ones ended, and the price that each had held; first, when it began to
                ask
    usual       tokens that a request of it takes when it comes in; 0: none yet
    long        share that its answers have taken of late of the price that they might have had; 0:
                none yet
    """

    bucket: TokenBucket | None = None
    under_way: dict[Work, None] = field(default_factory=dict)
    used: int = 0
    released: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    usual: float = 0.0
    long: float = 0.0

    def charge(self, tokens: int, now: float) -> None:
        """Take so many tokens; below 0 they are given back."""
        self.used += tokens
        if self.bucket is not None:
            self.bucket.take(tokens, now)

    @property
    def open_cost(self) -> int:
        """Return what everything that is open may cost together, in tokens."""
        return sum(work.price.whole for work in self.under_way)

    def wait_for_release(self, tokens: int, now: float) -> float:
        """Seconds until so much of what is open has ended, at the pace of late; 0: nothing is known
        of it."""
        freed = sum(price for _, price in self.released)
        return 1.0 + SAFETY * tokens * (now - self.released[0][0]) / freed if freed else 0.0


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

    def account(self, key: ApiKey) -> KeyAccount | None:
        """Return the account of a key; None before it has asked for something."""
        return self._accounts.get(key.sha256)

    @contextlib.contextmanager
    def work(self, key: ApiKey) -> Iterator[Work]:
        """A request that is under way. ClientError 429 when the key has too many of them, or has
        used its tokens up."""
        account = self._account(key)
        if 0 < key.max_concurrent <= len(account.under_way):
            message = f"this key may have {key.max_concurrent} requests under way: wait until one has ended"
            raise ClientError(429, "concurrency_limit", message)
        self._check_rate(key, account, 1, usual=int(account.usual))
        work = Work(key, account)
        account.under_way[work] = None
        try:
            yield work
        finally:
            self._end(work)

    def read(self, work: Work, size: int) -> None:
        """So many more bytes of its body came. It is charged for them, whatever comes of it."""
        before, work.size = price_of_reading(work.size), work.size + size
        if more := price_of_reading(work.size) - before:
            work.account.charge(more, self._clock())

    def charge(self, work: Work, tokens: int) -> None:
        """ClientError 429 where the key has not so many tokens left for something that has no
        answer."""
        self._check_rate(work.key, work.account, tokens)
        work.account.charge(tokens, self._clock())

    def charge_kept(self, key: ApiKey, tokens: int) -> None:
        """So many tokens for what its sessions keep. Nothing is refused for it: what the key asks
        for next finds its bucket emptier."""
        self._account(key).charge(tokens, self._clock())

    def admit(
        self,
        work: Work,
        streams: Sequence[OutputStream],
        unfinished: int,
        limits: RequestLimits = NO_LIMITS,
    ) -> None:
        """Its choices are known, and from now on under way. ClientError 429 when they are beyond a
        limit of the key, 400 when they always would be.

        unfinished  requests that the server has already
        """
        key, account = work.key, work.account
        price = price_of(stream.request for stream in streams)
        self._check_share(key, account, price.whole, limits)
        expected = int(account.long * price.answers)
        asked = price.certain + expected
        account.usual += OF_LATE * (asked - account.usual) if account.usual else asked
        self._check_rate(key, account, asked)
        if (
            key.queue_share and unfinished + len(streams) > self._slots
        ):  # somebody will have to wait
            waiting = sum(not stream.tokens for one in account.under_way for stream in one.streams)
            most = max(1, int(key.queue_share * self._queue))
            if waiting + len(streams) > most:
                message = f"this key may have {most} requests waiting, and has {waiting}: wait for answers"
                raise ClientError(429, "queue_share", message)
        work.streams, work.price, work.expected = streams, price, expected
        account.charge(asked, self._clock())

    def _check_rate(self, key: ApiKey, account: KeyAccount, tokens: int, usual: int = 0) -> None:
        """usual: what it may turn out to take, which is what somebody who is refused is told to
        wait for."""
        if account.bucket is not None:
            wait = account.bucket.wait_for(tokens, self._clock())
            if wait > ROUNDING:
                wait = account.bucket.wait_for(max(tokens, usual), self._clock())
                message = f"this key may use {key.tokens_per_minute} tokens a minute: come again in {wait:.1f} s"
                raise ClientError(429, "token_rate_limit", message, retry_after=wait)

    def _check_share(
        self, key: ApiKey, account: KeyAccount, price: int, limits: RequestLimits
    ) -> None:
        most = key.max_cost or limits.choices * limits.context
        if price > most and key.max_cost:
            raise ClientError(
                400,
                "request_too_costly",
                f"the request may cost {price} tokens, and all that this key has open may cost {most}: lower"
                " max_tokens, n, or the number of logprobs, or send fewer prompts",
            )
        held = account.open_cost
        if not held:  # how long it asked for nothing says nothing about its pace
            account.released.clear()
            account.released.append((self._clock(), 0))
        if held and held + price > most:
            wait = account.wait_for_release(held + price - most, self._clock())
            message = (
                f"what this key has open may cost {held} tokens, this request {price} more, and together they"
                f" may cost {most}: wait until some of it has ended"
            )
            raise ClientError(429, "cost_limit", message, retry_after=wait)

    def _end(self, work: Work) -> None:
        account, now = work.account, self._clock()
        del account.under_way[work]
        if not work.streams:
            return
        made = price_of_answers(work.streams)
        account.released.append((now, work.price.whole))
        account.charge(made - work.expected, now)
        account.long += OF_LATE * (min(1.0, made / max(1, work.price.answers)) - account.long)

    def _account(self, key: ApiKey) -> KeyAccount:
        """Return the account of a key. Limits that were changed while the server runs hold from
        here on."""
        account = self._accounts.setdefault(key.sha256, KeyAccount())
        rate = key.tokens_per_minute / MINUTE
        if not rate:
            account.bucket = None
        elif account.bucket is None or account.bucket.rate != rate:
            account.bucket = TokenBucket(rate, MINUTE * rate, self._clock())
        return account
