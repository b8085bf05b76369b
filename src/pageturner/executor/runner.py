"""The real executor: a plan in, its result out. Owns the KV storage of one model.

Must not know policies or queues. Running a plan again before its commit, or any items of it, gives
the same result; its copies of blocks are made once (bisect_step.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Protocol

import numpy as np

from pageturner.errors import EngineFault
from pageturner.executor import sampler
from pageturner.executor.batch import (
    NO_ROWS,
    BlockRows,
    Rows,
    pack,
    pack_sliding,
    state_tables,
)
from pageturner.executor.draft import Drafter
from pageturner.executor.grammar import Grammars, no_masks
from pageturner.executor.kv_memory import KVLayout
from pageturner.executor.model_costs import model_costs
from pageturner.executor.pooling import pool
from pageturner.executor.prompt_scores import score_prompts
from pageturner.kernels.base import KV, Batch, KVSpec, Ops
from pageturner.kernels.recurrent import RecurrentCache
from pageturner.kernels.recurrent import alloc as alloc_recurrent
from pageturner.models.decoder import Decoder
from pageturner.scheduler.types import Output, Plan, Result


class Executor(Protocol):
    """Turns plans into results: the Runner, or one of the fakes."""

    def run(self, plan: Plan) -> Result:
        """Compute one step. What is wrong with one sequence is a Failure. Where it raises, parts of
        the plan are run again (bisect_step.py), but for an EngineFault: then the engine cannot go
        on."""


class Runner:
    """Runs plans on a model, with KV storage of its own: `sizes.blocks` blocks and a scratch block
    that the padding of static batching (`Plan.ballast`) reads. A model with windowed layers has a
    second storage for these, of `sizes.sliding` blocks and a scratch block, and one with recurrent
    layers `recurrent` for their states and tails, one of each for padding. EngineFault when the memory is not there.

    grammars  where masks come from; without them no sequence may ask for structured output
    drafter   proposes draft tokens that the next step verifies
    alloc     gives storage that is not of this process's own making, in the order of the stores
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        layout: KVLayout,
        grammars: Grammars | None = None,
        drafter: Drafter | None = None,
        alloc: Callable[[KVSpec], KV] | None = None,
    ) -> None:
        self._decoder = decoder
        self._ops = ops
        sizes, block_size, kv_dtype = layout.sizes, layout.block_size, layout.dtype
        self._block_size = block_size
        self._sizes = sizes
        self._block_rows = BlockRows()
        self._grammars = grammars
        self._drafter = drafter
        self.needs = model_costs(decoder, kv_dtype)
        specs = [decoder.kv_spec(sizes.blocks + 1, block_size, kv_dtype)]
        if sizes.window:
            specs = [*decoder.kv_specs(sizes.blocks + 1, sizes.sliding + 1, block_size, kv_dtype)]
        self.nbytes = sum(spec.nbytes for spec in specs) + (drafter.nbytes if drafter else 0)
        alloc = alloc or ops.alloc_kv
        self.storage: list[KV] = [alloc(spec) if spec.layers else None for spec in specs]
        recurrent = decoder.spec.recurrent_spec(kv_dtype)
        self.recurrent: RecurrentCache | None = None
        if recurrent is not None:
            self.recurrent = alloc_recurrent(recurrent, sizes.states + 1, sizes.tails + 1)
            self.nbytes += self.recurrent.states.nbytes + self.recurrent.tail.nbytes

    def pack(self, plan: Plan, before: Rows = NO_ROWS) -> tuple[Batch, tuple[Batch, KV] | None]:
        """Make the plan's copies; its arrays, and those of layers with a window. before: as
        batch.pack."""
        self._copy_blocks(plan)
        batch = pack(plan, self._block_size, self._sizes.blocks, before, self._block_rows)
        names = [item.sequence.request.adapter for item in plan.items]
        if self.recurrent is not None:
            scratch = (self._sizes.states, self._sizes.tails)
            batch.recurrent = state_tables(plan, self.recurrent, scratch)
        batch.adapters = self._decoder.adapters_of(names + [""] * len(plan.ballast))
        if not self._sizes.window:
            return batch, None
        return batch, (
            pack_sliding(batch, plan, self._block_size, self._sizes.sliding),
            self.storage[1],
        )

    def run(self, plan: Plan) -> Result:
        begin = perf_counter()
        batch, sliding = self.pack(plan)
        each = [sampler.rows_of(item) if item.wants_logits else [] for item in plan.items]
        ending = [row for rows in each for row in rows]
        # while the layers are computed
        masks = self._grammars.begin(ending) if self._grammars else no_masks
        packed = perf_counter()
        wanted = batch.logit_rows
        watch = self._drafter.watch if self._drafter is not None else None
        if watch is not None:
            batch = replace(batch, logit_rows=np.arange(len(batch.tokens), dtype=np.int32))
        hidden = self._decoder.hidden(batch, self.storage[0], sliding)
        computed = perf_counter()
        if watch is not None:
            watch(hidden)
            hidden = self._ops.take_rows(hidden, wanted)
        rows = len(wanted)
        pooled = pool(self._decoder, self._ops, plan.items, hidden)
        scores = {}
        if rows > len(ending):
            scores = score_prompts(self._decoder, self._ops, plan.items, hidden, len(ending))
            hidden = self._ops.take_rows(hidden, np.arange(len(ending), dtype=np.int32))
        waits = perf_counter()
        allowed, instead = masks()
        grammar = perf_counter() - waits
        chosen = iter(sampler.choose(self._decoder, hidden, ending, allowed) if ending else ())
        outputs = [
            sampler.accept([next(chosen) for _ in rows], item.sequence.draft) if rows else Output()
            for item, rows in zip(plan.items, each, strict=True)
        ]
        sampled = perf_counter()
        spent = {"overhead": packed - begin, "sampling": sampled - computed - grammar}
        if allowed:
            spent["grammar"] = grammar
        if self._drafter is not None:
            self._drafter.propose(plan.items, outputs)
            spent["drafting"] = perf_counter() - sampled
        for i, item in enumerate(plan.items):
            outputs[i] = instead.get(item.sequence, outputs[i])
        for i, found in scores.items():
            if None in found:
                outputs[i] = Output(failure=sampler.NOT_A_NUMBER)
            else:
                outputs[i].prompt_logprobs = [score for score in found if score is not None]
        for i, told in pooled.items():
            outputs[i] = (
                replace(outputs[i], pooled=told) if told else Output(failure=sampler.NOT_A_NUMBER)
            )
        return Result(outputs, spent)

    def _copy_blocks(self, plan: Plan) -> None:
        try:
            for kv, copies in zip(self.storage, plan.copies, strict=False):
                if copies and kv is not None:
                    self._ops.copy_blocks(kv, copies)
            if self.recurrent is not None and plan.copies:
                for source, destination in plan.copies[len(self.storage)]:  # of tails; no state is
                    self.recurrent.tail[destination] = self.recurrent.tail[source]
        except Exception as error:  # it is unknown which of them were made
            raise EngineFault("copy_failed", f"blocks could not be copied: {error}") from error
