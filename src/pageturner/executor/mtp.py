"""Drafts by the head that a checkpoint brings to predict a second token (multi-token prediction).

Owns the KV of that head, which lies in blocks with the ids of the target's. Every row that the
target computes goes through the head too, so that a cached prefix has its KV; a block that was
copied or came from elsewhere lacks it, which lowers acceptance and changes no answer. Must not know
policies or queues, nor how the target accepts a draft.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import replace

from pageturner.executor import sampler
from pageturner.executor.batch import i32
from pageturner.executor.draft import Costs
from pageturner.executor.draft_compatibility import cost_of
from pageturner.executor.draft_model import DraftingKV, Guess, extended
from pageturner.executor.kv_memory import KVLayout
from pageturner.kernels.base import KV, Array, Batch, Ops
from pageturner.kernels.choosing import ChooseArgs, Head
from pageturner.models.decoder import Decoder
from pageturner.policies.drafts import MAX_DRAFTED
from pageturner.scheduler.types import Item, Output

MAX_DRAFT = 3  # tokens of a draft; the head was trained for the first one


class MTPHead:
    """The computation of a head: from hidden rows of the target, and the token behind each, to rows
    of which the next token is chosen.

    own  what makes logits of its rows: the target's head behind a norm of its own
    """

    def __init__(self, decoder: Decoder, ops: Ops) -> None:
        assert decoder.mtp is not None
        self._weights, self._ops, self._stack = decoder.mtp, ops, decoder.stack
        self.target = decoder.head
        self.own = replace(decoder.head, norm=decoder.mtp.mtp_norm)

    def hidden(self, batch: Batch, before: Array, by: Head, kv: KV) -> Array:
        """Write K and V of every row; return the wanted rows [R, d].

        batch   the tokens behind the rows `before`, at the positions of these
        before  hidden rows of the target, or of the head itself; by: `target` or `own`
        """
        ops, w, eps = self._ops, self._weights, by.eps
        embedded = ops.norm(ops.embed_tokens(self._stack, batch.tokens), w.mtp_enorm, eps)
        before = ops.norm(ops.norm(before, by.norm, eps), w.mtp_hnorm, eps)
        x = ops.linear(ops.join_heads(embedded, before, 1), w.mtp_fc)
        x = ops.attention_block(x, w.layer, kv, 0, batch)
        x = ops.take_rows(x, batch.logit_rows)
        return ops.mlp_block(x, w.layer) if len(x) else x


class MTPDrafter(DraftingKV):
    """Proposes what the head predicts."""

    def __init__(
        self, decoder: Decoder, ops: Ops, layout: KVLayout, costs: Costs | None = None
    ) -> None:
        costs = costs or Costs(cost_of(decoder.spec.mtp, decoder.spec))
        super().__init__(ops, layout, costs, decoder.spec.mtp.kv_spec)
        self._head = MTPHead(decoder, ops)
        self._rows: Array = None

    def watch(self, rows: Array) -> None:
        """Take the hidden rows of a step."""
        self._rows = rows

    def propose(self, items: Tokens[Item], outputs: Tokens[Output]) -> None:
        guesses, wanted = self._begin(items, outputs)
        rows = self._ops.take_rows(self._rows, i32(wanted))
        self._rows = None  # those of a long prompt are large
        by = self._head.target
        while guesses:
            guesses, rows = self._step(guesses, rows, by)
            by = self._head.own

    def _begin(self, items: Tokens[Item], outputs: Tokens[Output]) -> tuple[list[Guess], list[int]]:
        """The sequences of a step, each with its tokens that are right, and the rows of these whose
        next token is known."""
        ending = sum(bool(output.tokens) for output in outputs)
        guesses: list[Guess] = []
        rows: list[int] = []
        first = drafted = 0
        for item, output in zip(items, outputs, strict=True):
            seq = item.sequence
            tokens = [*seq.tokens, *output.tokens]
            n = min(item.n, len(tokens) - 1 - item.start)
            if n:
                rows += range(first, first + n)
                length = self._length(item, output, ending, MAX_DRAFTED - drafted)
                drafted += length
                row = self._row(seq, tokens, item.start, item.start + n + max(length - 1, 0))
                guesses.append(Guess(row, output, [], n, length))
            first += item.n
        return guesses, rows

    def _length(self, item: Item, output: Output, sequences: int, most: int) -> int:
        """Tokens to draft for the sequence of an item, at most so many."""
        record, seq = self._followed(item, output), item.sequence
        if record is None:
            return 0
        most = min(MAX_DRAFT, most, seq.limit - record.length - 1)
        return record.best_length(self._costs, sequences, most)[0]

    def _step(self, guesses: list[Guess], before: Array, by: Head) -> tuple[list[Guess], Array]:
        """Compute rows, and give each sequence that wants one a token. The sequences that want
        another one, and their rows."""
        batch = self._batch(guesses)
        behind: list[int] = []
        for guess in guesses:
            start = guess.row.computed + 1
            guess.row.computed += guess.n
            behind += guess.row.tokens[start : start + guess.n]
        ends = (batch.query_start[1:] - 1)[[guess.length > 0 for guess in guesses]]
        batch = replace(batch, tokens=i32(behind), logit_rows=ends)
        hidden = self._head.hidden(batch, before, by, self.storage)
        drawn = [guess for guess in guesses if guess.length]
        if not drawn:
            return [], hidden
        draws = sampler.draws([guess.row for guess in drawn])
        more = extended(drawn, self._ops.choose(hidden, self._head.own, ChooseArgs(draws)))
        return [drawn[i] for i in more], self._ops.take_rows(hidden, i32(more))
