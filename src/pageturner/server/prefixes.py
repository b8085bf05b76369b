"""Prefixes whose KV stays: preloaded, listed, deleted, rebuilt when an engine was restarted.

Owns which prefixes there are. Must not know their endpoints (pages.py), nor how an engine keeps
them: it is sent a request whose blocks stay when it has ended, and is told when they may go.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pageturner.errors import ClientError, bad_setting
from pageturner.formats.tokenizer import Tokenizer
from pageturner.http.api_keys import cache_salt_of
from pageturner.http.error_responses import STATUS
from pageturner.ipc.channel import Unpin
from pageturner.params import SamplingParams
from pageturner.request import Failure, Request
from pageturner.server.api.base.served_model import ServedModel
from pageturner.server.engine_client.quarantine import POISON
from pageturner.server.engine_client.supervisor import EngineListener, Supervisor
from pageturner.server.text_workers.text_jobs import PrefixBody
from pageturner.text.output_stream import OutputPiece, output_streams

log = logging.getLogger("pageturner")

MAX_PREFIXES = 1024
GONE = ("deleted", "gave_way")  # their memory is for others
COMPUTE_ONLY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=0)


@dataclass(slots=True)
class Prefix:
    """tenant: whose it is; "" for everybody's, and where tenants are not told apart. adapter:
    digest of the adapter that it is for; "": the model itself. status: "loading" until its KV is
    there, "ready", "deleted", "gave_way" when a request needed its memory, or why the engine did
    not take it. `request`: the id under which the present engine keeps it."""

    id: str
    tokens: tuple[int, ...]
    salt: str
    created: int
    tenant: str = ""
    adapter: str = ""
    status: str = "loading"
    request: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "prefix",
            "created": self.created,
            "tokens": len(self.tokens),
            "status": self.status,
        }


class _PrefixSink:
    """Waits for the end of the request that computes a prefix. One deleted meanwhile is let go at
    once."""

    def __init__(self, prefix: Prefix, unpin: Callable[[int], None]) -> None:
        self.done: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self._prefix = prefix
        self._unpin = unpin

    def put(self, piece: OutputPiece) -> None:
        if piece.last:
            failure = piece.stream.failure
            if self._prefix.status in GONE:
                self._unpin(self._prefix.request)
            else:
                self._prefix.status = "ready" if failure is None else failure.code
            if failure is not None:
                log.warning("the prefix %s is not kept: %s", self._prefix.id, failure.message)
            if not self.done.done():
                self.done.set_result(failure)


class Prefixes:
    """All prefixes of a server, by tenant and id. Every engine process is given all of them. The
    tenants that keys tell apart, as many as `tenants` says now, have equal parts of what prefixes
    may have."""

    def __init__(
        self,
        supervisor: Supervisor,
        tokenizer: Tokenizer,
        ids: itertools.count[int],
        tenants: Callable[[], int] = lambda: 1,
    ) -> None:
        self._supervisor = supervisor
        self._tokenizer = tokenizer
        self._ids = ids
        self._tenants = tenants
        self._prefixes: dict[tuple[str, str], Prefix] = {}
        # as `pinned` has told it since the last change
        self._pinned: dict[tuple[int, str | None], int] = {}
        supervisor.listeners.append(EngineListener(ready=self._recompute_all))

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._prefixes.values())

    def pinned(self, block_size: int, tenant: str | None = None) -> int:
        """Tokens of KV memory that all prefixes keep, or those of one tenant, in whole blocks.
        Blocks that several share count for each of them."""
        if (block_size, tenant) not in self._pinned:
            mine = (p for p in self if p.status not in GONE and tenant in (None, p.tenant))
            blocks = sum(-(-len(prefix.tokens) // block_size) for prefix in mine)
            self._pinned[block_size, tenant] = blocks * block_size
        return self._pinned[block_size, tenant]

    def check_share(self, tokens: int, tenant: str, served: ServedModel, share: float) -> None:
        """ClientError where one more prefix of so many tokens is more than all of them may keep,
        which is so large a share of the KV memory, or than the tenant's part of it."""
        size = served.block_size
        need, all_ = -(-tokens // size) * size, int(share * served.capacity)
        own = all_ // self._tenants() if tenant else all_
        kept, kept_own = self.pinned(size), self.pinned(size, tenant)
        bounds = (("all tenants together", kept, all_), ("this tenant", kept_own, own))
        for whose, taken, most in bounds:
            if taken + need > most:
                raise ClientError(
                    400,
                    "pin_share_exceeded",
                    f"the prefix keeps {need} tokens of KV memory, and the prefixes of {whose} may keep"
                    f" {most}, of which {taken} are taken: delete some, or raise --max-pinned-share or"
                    " --kv-cache-memory",
                )

    def _unpin(self, id: int) -> None:
        """Let go of the KV that the ended request keeps."""
        self._supervisor.tell(Unpin(id))

    def make_room(self, positions: int, served: ServedModel) -> None:
        """Let prefixes go, the oldest of whoever keeps most first, until a request that needs so
        much KV memory can run: nothing that is kept makes a request of others impossible."""
        size = served.block_size
        while positions + (kept := self.pinned(size)) > served.capacity and kept:
            present = [prefix for prefix in self if prefix.status not in GONE]
            most = max(present, key=lambda prefix: self.pinned(size, prefix.tenant)).tenant
            oldest = next(prefix for prefix in present if prefix.tenant == most)
            log.warning("the prefix %s gives way to a request of %d tokens", oldest.id, positions)
            oldest.status = "gave_way"
            self._pinned.clear()
            self._unpin(oldest.request)

    async def add(
        self,
        id: str,
        tokens: tuple[int, ...],
        salt: str | None,
        tenant: str = "",
        adapter: str = "",
    ) -> Prefix:
        """Compute a prefix and keep it. ClientError where the engine does not."""
        if (tenant, id) in self._prefixes:
            raise ClientError(
                409, "prefix_exists", f"there is a prefix {id!r} already: delete it first", "id"
            )
        own, most = sum(one.tenant == tenant for one in self), MAX_PREFIXES
        most_own = most // self._tenants() if tenant else most
        if len(self._prefixes) >= most or own >= most_own:
            message = f"there are {len(self._prefixes)} prefixes of {most}, {own} of your {most_own}: delete some"
            raise ClientError(400, "too_many_prefixes", message)
        prefix = Prefix(
            id=id,
            tokens=tokens,
            salt=cache_salt_of(tenant, salt),
            created=int(time.time()),
            tenant=tenant,
            adapter=adapter,
        )
        end = self._compute(prefix)
        self._prefixes[tenant, id] = prefix
        self._pinned.clear()
        failure = await end.done
        if failure is not None:
            self._prefixes.pop((tenant, id), None)
            self._pinned.clear()
            raise ClientError(STATUS.get(failure.code, 400), failure.code, failure.message)
        return prefix

    def remove(self, id: str, tenant: str = "") -> Prefix:
        """Let it go. ClientError 404 where the tenant has none."""
        prefix = self._prefixes.pop((tenant, id), None)
        if prefix is None:
            raise ClientError(404, "no_such_prefix", f"there is no prefix {id[:128]!r} here", "id")
        prefix.status = "deleted"
        self._pinned.clear()
        self._unpin(prefix.request)
        return prefix

    def _compute(self, prefix: Prefix) -> _PrefixSink:
        prefix.request, prefix.status = next(self._ids), "loading"
        request = Request(
            id=prefix.request,
            prompt=prefix.tokens,
            params=COMPUTE_ONLY,
            arrival=time.monotonic(),
            salt=prefix.salt,
            adapter=prefix.adapter,
            pin=True,
        )
        end = _PrefixSink(prefix, self._unpin)
        streams = output_streams(request, [end], self._ids, self._tokenizer, silent=True)
        self._supervisor.check_open(streams)
        self._supervisor.open(streams)
        return end

    def _recompute_all(self) -> None:
        """A new engine has nothing of what the last one kept. What was under way is sent to it
        anyway, and what brought one down is not, or every engine would end with it."""
        for prefix in self._prefixes.values():
            if prefix.status not in ("loading", "gave_way", POISON.code):
                try:
                    self._compute(prefix)
                except ClientError as error:  # the queue is full
                    prefix.status = error.code
                    log.warning("the prefix %s is not kept: %s", prefix.id, error.message)


def read_preload_file(path: Path) -> list[PrefixBody]:
    """The prefixes of a file: JSON lines of the fields of POST /v1/prefixes, or else one text.
    EngineFault says what is wrong with it."""
    try:
        text = path.read_bytes().decode()  # as it is: ends of lines are tokens
    except (OSError, UnicodeDecodeError) as error:
        raise bad_setting(f"preload: cannot read {path}: {error}") from error
    if path.suffix not in (".jsonl", ".json"):
        return [PrefixBody(id=path.stem, prompt=text)]
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found.append(msgspec.convert(json.loads(line), PrefixBody))
            except (ValueError, msgspec.ValidationError) as error:
                raise bad_setting(f"preload: {path}, line {number}: {error}") from error
    return found
