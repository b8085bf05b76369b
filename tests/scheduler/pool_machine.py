"""Random lives of sequences on a BlockPool against the shadow KV: attach, extend, fork, seal, trim, release.

What no scheduler does yet is done here: forks at any moment, several members of a fork written in one plan,
drafts rejected, and sequences released in the middle of a plan.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pageturner.policies.pinned_prefixes import PinnedPrefixes
from pageturner.request import Request
from pageturner.scheduler.blocks import BlockPool
from pageturner.scheduler.types import Sequence
from pageturner.telemetry.kv_usage import pool_stats
from support.schedulers import check_pool

from .shadow import Shadow, tables

VOCABULARY = 3  # so small that equal blocks behind different parents are common


class PoolMachine:
    """One run of one seed. AssertionError at the first property that does not hold."""

    def __init__(self, seed: int, make_pool: Callable[..., BlockPool] = BlockPool) -> None:
        self.rng = random.Random(seed)
        size = self.rng.choice((1, 2, 3, 4, 8))
        blocks = self.rng.choice((4, 8, 8, 20))
        window = self.rng.choice((0, 0, 0, 1, 2, 3, 5, 8, 13))
        sliding = -(-(window - 1) // size) + 1 + self.rng.choice((0, 1, 5))
        caching = self.rng.random() < 0.8
        recurrent = random.Random(f"states {seed}")
        options: dict[str, Any] = {"window": window, "sliding": sliding}
        if not window and recurrent.random() < 0.5:
            options["chunk"] = recurrent.choice((1, 2, 3, 4, 8))
            options |= {name: recurrent.choice((2, 4, 9, 30)) for name in ("states", "tails")}
        self.pool = make_pool(blocks, size, prefix_caching=caching, **options)
        grain, often = self.pool.grain, recurrent.choice((1, 1, 3))
        self.pool.wanted = lambda seq, start, end: range(
            (start // (often * grain) + 1) * often * grain, end + 1, often * grain
        )
        self.shadow = Shadow(self.pool, self.rng)
        self.alive: list[Sequence] = []
        self.pins = PinnedPrefixes(self.pool)
        self.common = [self.rng.randrange(VOCABULARY) for _ in range(10)]
        self.refused = self.shared = 0
        self.parents: dict[bytes, bytes] = {}  # key of a block -> key of the one before it

    def run(self, steps: int = 40) -> PoolMachine:
        for _ in range(steps):
            if self.rng.random() < 0.4:
                self.begin()
            if self.alive and self.rng.random() < 0.3:
                self.fork(self.rng.choice(self.alive))
            self.step()
            if self.alive and self.rng.random() < 0.15:
                self.release(self.rng.choice(self.alive))
            self.pin()
        for pin in self.pins.sequences:
            self.pins.drop(pin.request.id)
        for seq in list(self.alive):
            self.release(seq)
        assert pool_stats(self.pool)["blocks_used"] == 0, "blocks leaked"
        assert pool_stats(self.pool).get("recent_blocks_used", 0) == 0, "recent blocks leaked"
        assert pool_stats(self.pool).get("state_blocks_used", 0) == 0, "states leaked"
        assert self.pool.tails.available == self.pool.tails.num_blocks, "tails leaked"
        return self

    def begin(self) -> None:
        rng = self.rng
        known = rng.choice(([], self.common[: rng.randrange(10)]))
        prompt = (
            *known,
            *(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 14 - len(known)))),
        )
        stop = rng.randrange(len(prompt)) if rng.random() < 0.1 else None
        request = Request(
            0, prompt, salt=rng.choice(("", "b")), adapter=rng.choice(("", "a")), logits_from=stop
        )
        seq = Sequence(request, tokens=list(prompt))
        gained = self.pool.attach(seq)
        assert gained == seq.computed < len(prompt), "the last token must stay to be computed"
        assert stop is None or gained <= stop, "attached past logits_from"
        assert set(seq.blocks[: seq.public]) <= self.public(), "took what is not everybody's"
        self.shared += seq.public
        self.alive.append(seq)
        self.check()

    def pin(self) -> None:
        """Keep one for ever, or let one go that was kept."""
        kept = self.pins.sequences
        if kept and self.rng.random() < 0.1:
            self.pins.drop(self.rng.choice(kept).request.id)
        elif (
            self.alive
            and self.pool.prefix_caching
            and not self.pool.window
            and self.rng.random() < 0.2
        ):
            seq = min(
                self.rng.sample(self.alive, min(2, len(self.alive))), key=lambda s: s.request.salt
            )
            self.alive.remove(seq)
            seq.request = replace(seq.request, id=self.rng.randrange(10**9))
            self.pins.keep(seq)
        self.check()

    def public(self) -> set[int]:
        return {
            block for pin in self.pins.sequences if not pin.request.salt for block in pin.blocks
        }

    def fork(self, src: Sequence) -> None:
        dst = Sequence(src.request, tokens=list(src.tokens))
        if self.rng.random() < 0.5:
            dst.tokens[src.computed :] = [self.rng.randrange(VOCABULARY)]
        self.pool.fork(src, dst)
        self.alive.append(dst)
        self.check()

    def release(self, seq: Sequence) -> None:
        self.alive.remove(seq)
        self.pool.release(seq)
        self.check()

    def check_ages(self) -> None:
        """Children are evicted before their parents: what nobody can reach any more takes no room."""
        store = self.pool.full
        for seq in (*self.alive, *self.pins.sequences):
            keys = [store.keys[block] for block in seq.blocks[: seq.num_cached_blocks]]
            self.parents.update(
                (child, parent) for parent, child in pairwise(keys) if parent and child
            )
        orphans = [key for key in store.index if self.parents.get(key, key) not in store.index]
        assert orphans == [], "a cached block outlived its parent"

    def check(self) -> None:
        check_pool(self.pool, [*self.alive, *self.pins.sequences])
        self.check_ages()
        self.shadow.poison()

    def step(self) -> None:
        """Plan for some, drop some of the others in between, run, commit."""
        granted: list[tuple[Sequence, int]] = []
        for seq in self.rng.sample(self.alive, len(self.alive)):
            if self.rng.random() < 0.3:
                continue
            seq.draft = [self.rng.randrange(VOCABULARY) for _ in range(self.rng.choice((0, 0, 3)))]
            n = self.rng.randint(1, seq.pending)
            if self.extend(seq, n):
                granted.append((seq, n))
            if self.rng.random() < 0.1:
                others = [other for other in self.alive if other not in [seq for seq, _ in granted]]
                if others:
                    self.release(self.rng.choice(others))
        self.check()
        self.shadow.copy(*self.copies())
        for seq, n in granted:
            self.shadow.write(seq, n)
        for seq, n in granted:
            self.shadow.read(seq, n)
        self.pool.release_held()
        for seq, n in granted:
            self.commit(seq, n)
        self.check()

    def extend(self, seq: Sequence, n: int) -> bool:
        if seq not in self.alive:  # released in this plan
            return False
        room, before = self.pool.room(seq), self.snapshot(seq)
        done = self.pool.extend(seq, n)
        assert done == (n <= room), "room and extend disagree"
        if not done:
            self.refused += 1
            assert self.snapshot(seq) == before, "a refused extend changed something"
        return done

    def snapshot(self, seq: Sequence) -> Any:
        pool = self.pool
        return deepcopy(
            (
                [(list(table), getattr(table, "released", 0)) for table in tables(pool, seq)],
                seq.computed,
                self.copies(),
                pool_stats(pool),
            )
        )

    def copies(self) -> list[list[tuple[int, int]]]:
        return [kind.store.copies for kind in self.pool.kinds]

    def commit(self, seq: Sequence, n: int) -> None:
        """Accept some of the drafts that were computed, and a token of our own behind them."""
        drafted = seq.computed + n - len(seq.tokens)
        if drafted < 0:
            seq.computed += n
        else:
            seq.tokens += seq.draft[: self.rng.randint(0, drafted)]
            seq.computed = len(seq.tokens)
            seq.tokens.append(self.rng.randrange(VOCABULARY))
        seq.draft = []
        self.pool.cache_full_blocks(seq)
        self.pool.trim(seq)
        assert len(seq.blocks) == self.pool.blocks_for(seq.computed), "spare blocks after trim"
