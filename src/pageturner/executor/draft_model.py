"""Drafts by a second, smaller model of the same vocabulary, which draws with the same noise.

Owns the KV of the draft model, and when drafting pays. That KV lies in blocks with the ids of the
target's, so that nobody has to plan for it; of each it is known which tokens it holds. So prefix
hits, forks, copies, preemption and rejected drafts need no word from anybody: what a block lacks is
computed when it is needed. Must not know policies or queues, nor how the target accepts a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from itertools import cycle
from math import isfinite

import numpy as np

from pageturner.executor import sampler
from pageturner.executor.batch import pack
from pageturner.executor.draft import FADING, GUESS, Costs, best_length
from pageturner.executor.kv_memory import KVLayout
from pageturner.kernels.base import Batch, KVSpec, Ops
from pageturner.kernels.choosing import ChooseArgs, SamplerOutput
from pageturner.models.decoder import Decoder
from pageturner.models.spec import unsupported
from pageturner.policies.drafts import MAX_DRAFTED, SequenceMemory
from pageturner.scheduler.types import Item, Output, Plan, Sequence

MAX_DRAFT = 7  # tokens of a draft
CATCH_UP = 128  # rows of a step for sequences of which the draft model has not seen nearly all
SHORTEST_REST, LONGEST_REST = 16, 256  # steps without drafts, where they did not pay


class DraftingKV:
    """The KV of a drafter, which lies in blocks with the ids of the target's. EngineFault when
    the memory for it is not there.

    layout  of the target: there are as many blocks as its whole ones
    """

    def __init__(
        self, ops: Ops, layout: KVLayout, costs: Costs, kv_spec: Callable[[int, int, str], KVSpec]
    ) -> None:
        self._ops, self._costs = ops, costs
        self._blocks, self._size = layout.sizes.blocks, layout.block_size
        # Behind the target's blocks: `_spare` for drafts that end beyond their tables, each drafted
        # token one at most, forgotten after the step
        spec = kv_spec(self._blocks + MAX_DRAFTED + 1, self._size, layout.dtype)
        if spec.beside is not None:
            raise unsupported("a model with KV heads of two sizes cannot be a draft model yet")
        self.nbytes = spec.nbytes
        self.storage = ops.alloc_kv(spec)
        self._records = SequenceMemory(DraftRecord)
        self._spare = cycle(range(self._blocks, self._blocks + MAX_DRAFTED))

    def _followed(self, item: Item, output: Output) -> DraftRecord | None:
        """The record of a sequence, with what came since; None where a draft is of no use."""
        seq, params = item.sequence, item.sequence.request.params
        if not output.tokens or not params.speculation or output.tokens[-1] in params.stop_ids:
            return None
        record = self._records.of(seq)
        length = len(seq.tokens) + len(output.tokens)
        record.follow(length, item.drafted, len(output.tokens) - 1)
        return record

    def _row(self, seq: Sequence, tokens: list[int], start: int, end: int) -> Sequence:
        """The sequence with these tokens, computed up to `start`, and blocks up to `end`."""
        count = -(-end // self._size)
        blocks = seq.blocks[:count] + [next(self._spare) for _ in range(count - len(seq.blocks))]
        return Sequence(seq.request, seq.index, tokens, start, blocks, scored=seq.prompt_len)

    def _batch(self, guesses: list[Guess]) -> Batch:
        items = [Item(guess.row, guess.n, guess.row.computed) for guess in guesses]
        return pack(Plan(items), self._size, self._blocks + MAX_DRAFTED)


class DraftModel(DraftingKV):
    """Proposes what a smaller model would say.

    decoder  of the target's vocabulary; of a shorter context: silent beyond it
    """

    watch = None

    def __init__(self, decoder: Decoder, ops: Ops, layout: KVLayout, costs: Costs) -> None:
        super().__init__(ops, layout, costs, decoder.kv_spec)
        self._decoder = decoder
        self._pages: dict[int, _Page] = {}

    def propose(self, items: Tokens[Item], outputs: Tokens[Output]) -> None:
        guesses = list(
            self._begin([pair for pair in zip(items, outputs, strict=True) if pair[1].tokens])
        )
        while guesses:
            guesses = self._step(guesses)

    def _begin(self, ending: list[tuple[Item, Output]]) -> Iterator[Guess]:
        """The sequences whose draft pays."""
        drafted, behind = 0, CATCH_UP
        for item, output in ending:
            seq, record = item.sequence, self._followed(item, output)
            if record is None:
                continue
            tokens = [*seq.tokens, *output.tokens]
            lengthen(record.chains, tokens, self._size)
            known = min(self._known(seq.blocks, tokens, record.chains), len(tokens) - 1)
            n, left = len(tokens) - known, seq.limit - len(tokens)
            most = min(
                MAX_DRAFT,
                MAX_DRAFTED - drafted,
                left - 1,
                self._decoder.spec.context - len(tokens) + 1,
            )
            length = self._length(record, len(ending), most, n, left)
            if length and n > MAX_DRAFT + 1:
                # its first token does not wait for this
                part = min(n, behind) if seq.generated else 0
                length, n, behind = length if part == n else 0, part, behind - part
                if not n:
                    continue
            elif not length:
                continue
            drafted += length
            row = self._row(seq, tokens, known, known + n + max(length - 1, 0))
            yield Guess(row, output, list(record.chains), n, length)

    def _length(
        self, record: DraftRecord, sequences: int, most: int, behind: int, left: int
    ) -> int:
        """Tokens to draft, 0 where that does not pay: among so many sequences, with so many tokens
        that the draft model has not seen, and at most so many left to draft for."""
        costs = self._costs
        length, gained = record.best_length(costs, sequences, most)
        if not length:
            return 0
        saved = left * (1 - 1 / gained) * (1 + sequences / costs.rows) / sequences
        return length if saved >= behind * costs.step / costs.rows else 0

    def _known(self, blocks: list[int], tokens: list[int], chains: list[int]) -> int:
        """Return how many leading tokens have their KV in these blocks."""
        size = self._size
        for i, (block, before) in enumerate(zip(blocks, chains, strict=False)):
            mine, page = tokens[i * size : (i + 1) * size], self._pages.get(block)
            if page is None or page.before != before:
                return i * size
            if page.tokens != mine:
                pairs = enumerate(zip(page.tokens, mine, strict=False))
                same = min(len(page.tokens), len(mine))
                return i * size + next((j for j, (a, b) in pairs if a != b), same)
        return min(len(blocks), len(chains)) * size

    def _step(self, guesses: list[Guess]) -> list[Guess]:
        """Compute, and give each of those that are at their end a token more. Those that want
        another one."""
        batch, vocab = self._batch(guesses), self._decoder.spec.vocab
        # the target may have more padding, and choose it
        tokens = np.minimum(batch.tokens, vocab - 1)
        hidden = self._decoder.hidden(replace(batch, tokens=tokens), self.storage)
        for guess in guesses:
            self._note(guess)
            guess.row.computed += guess.n
        drawn = [guess for guess in guesses if guess.row.computed == len(guess.row.tokens)]
        if not drawn:
            return []
        draws = sampler.draws([guess.row for guess in drawn])
        chosen = self._decoder.choose(hidden, ChooseArgs(draws))
        return [drawn[i] for i in extended(drawn, chosen)]

    def _note(self, guess: Guess) -> None:
        """Write down what the blocks hold now."""
        row, chains, size = guess.row, guess.chains, self._size
        end = row.computed + guess.n
        lengthen(chains, row.tokens, size)
        for i in range(row.computed // size, -(-end // size)):
            self._pages[row.blocks[i]] = _Page(
                chains[i], row.tokens[i * size : min(end, (i + 1) * size)]
            )


class DraftRecord:
    """The record of one sequence: how its drafts did, and the chain of its blocks."""

    def __init__(self) -> None:
        self.chains = [0]
        self.length = 0  # tokens when it was last looked at
        self.right, self.tried = GUESS
        self.rest = self.rests = 0

    @property
    def percent(self) -> int:
        return _percent(self.right, self.tried)

    def follow(self, length: int, drafted: int, accepted: int) -> None:
        """Take in what came since the last call; nothing if it was about this very step."""
        if length == self.length:
            return
        self.length = length
        if drafted:
            self.right = FADING * self.right + accepted
            self.tried = FADING * self.tried + min(accepted + 1, drafted)
        elif self.rest:
            self.rest -= 1

    def best_length(self, costs: Costs, sequences: int, most: int) -> tuple[int, float]:
        """The function of this name by what was right so far. Where no draft pays because of that,
        there is none for a while."""
        if self.rest:
            return 0, 1.0
        length, gained = best_length(costs, self.percent, sequences, most)
        if not length and best_length(costs, _percent(*GUESS), sequences, most)[0]:
            self.pause()
        return length, gained

    def pause(self) -> None:
        """Drafts do not pay: none for a while, then another try, of which the first outcomes
        decide."""
        self.rest = min(SHORTEST_REST << self.rests, LONGEST_REST)
        self.rests += 1
        self.right, self.tried = (part / 4 for part in GUESS)


@dataclass(frozen=True, slots=True)
class _Page:
    """The content of one block's KV: `tokens`, behind the blocks that the chain `before` names."""

    before: int
    tokens: list[int]


@dataclass(slots=True)
class Guess:
    """A sequence that is worked on.

    row     the sequence, if its draft is right so far
    n       positions to compute next
    length  of its draft; 0 if there is more to catch up with than one step does
    """

    row: Sequence
    output: Output
    chains: list[int]
    n: int
    length: int


def extended(guesses: list[Guess], chosen: SamplerOutput) -> list[int]:
    """Give each of these drafts the token that was chosen for it. The indices of those that want
    another one."""
    more = []
    for i, (token, logit) in enumerate(
        zip(chosen.ids.tolist(), chosen.logits.tolist(), strict=True)
    ):
        guess = guesses[i]
        if isfinite(logit):
            guess.output.draft.append(token)
            guess.row.tokens.append(token)
            guess.n = 1
            stops = token in guess.row.request.params.stop_ids
            if len(guess.output.draft) < guess.length and not stops:
                more.append(i)
    return more


def lengthen(chains: list[int], tokens: list[int], size: int) -> None:
    """chains[i] names the first i blocks of the tokens; add those that are missing."""
    for start in range((len(chains) - 1) * size, len(tokens) - size + 1, size):
        chains.append(hash((chains[-1], *tokens[start : start + size])))


def _percent(right: float, tried: float) -> int:
    return round(100 * right / tried)
