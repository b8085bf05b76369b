"""`Ops.choose` on a device: edits, masks and the draw where the logits are; ids and their logits
come back.

Owns how edits become launches. Meaning and order are those of kernels/edits.py and
`Composites.choose`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pageturner.errors import EngineFault
from pageturner.kernels.adapters import Adapters
from pageturner.kernels.base import F32, I32, Batch, Stack
from pageturner.kernels.choosing import (
    ChooseArgs,
    Draw,
    Head,
    Logprobs,
    LogprobsWanted,
    SamplerOutput,
)
from pageturner.kernels.composites import add_candidates, add_top_logprobs
from pageturner.kernels.edits import Allowed, Edit, Edits, Operation, apply_edits, may_be_chosen
from pageturner.kernels.gpu.adapter_rows import of_wanted
from pageturner.kernels.gpu.arrays import Arena, GpuArray
from pageturner.kernels.gpu.catalogue import (
    GROUP_ROWS,
    MAX_SPLIT_TILES,
    SAMPLE_MOST,
    SAMPLE_PLACES,
    VOCABULARY_SEGMENTS,
    VOCABULARY_TILE,
)
from pageturner.kernels.gpu.driver import LATER, Driver
from pageturner.kernels.gpu.launches import GpuKV, Launches
from pageturner.kernels.gpu.steps import Step
from pageturner.kernels.reference import ReferenceOps

_Entries = list[tuple[int, int, int, int, float]]  # row, token, operation, how often, value
_HOST = ReferenceOps()


def rounds_of(edits: Edits) -> list[_Entries]:
    """Return the rounds that are launched one behind the other: no round has a token of a row
    twice."""
    rounds: list[_Entries] = []
    for row, mine in enumerate(edits):
        at = 0
        for edit in mine:
            for entries in _entries(row, edit):
                if at == len(rounds):
                    rounds.append([])
                rounds[at] += entries
                at += 1
    return rounds


def _entries(row: int, edit: Edit) -> list[_Entries]:
    """One round of an edit; of ADD as many as a token is named."""
    operation = int(edit.operation)
    match edit.operation:
        case Operation.ALLOW | Operation.FORBID:
            return []
        case Operation.ADD:
            assert isinstance(edit.value, list)
            found: list[_Entries] = []
            places: dict[int, int] = {}
            for token, amount in zip(edit.ids, edit.value, strict=True):
                place = places[token] = places.get(token, -1) + 1
                if place == len(found):
                    found.append([])
                found[place].append((row, token, operation, 1, amount))
            return found
        case _:
            assert not isinstance(edit.value, list)
            value = edit.value
            counts = Counter(edit.ids).items()
            return [[(row, token, operation, count, value) for token, count in counts]]


@dataclass(frozen=True, slots=True)
class StepChoice:
    """The choice of tokens behind a step."""

    head: Head
    draw: Draw

    @property
    def key(self) -> tuple[int, bool]:
        """The facts that a recording of it depends on."""
        return id(self.head.weight), cuts_off(self.draw)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Tokens that are being chosen. places: of ids, behind which as many of logits come."""

    rows: int
    places: int
    later: Any


class Chooser:
    """The part of `GpuOps` that makes tokens of hidden rows. `GpuOps` has the methods that are
    abstract here."""

    driver: Driver
    arena: Arena
    launches: Launches

    def on_device(self, values: Any) -> GpuArray:
        raise NotImplementedError

    def raw_logits(self, x: GpuArray, head: Head, adapters: Any) -> GpuArray:
        raise NotImplementedError

    def computed(
        self, stack: Stack, pages: Any, choice: StepChoice | None = None
    ) -> tuple[GpuArray, int]:
        raise NotImplementedError

    def choose(self, x: GpuArray, head: Head, args: ChooseArgs) -> SamplerOutput:
        """Logits leave the device only of the rows for which logprobs are wanted."""
        wanted = args.wanted
        ids, values = np.empty(len(x), np.int32), np.empty(len(x), np.float32)
        found = None if wanted is None else Logprobs.room_for(wanted)

        def some(part: slice) -> None:
            mine = None if args.edits is None else args.edits[part]
            masks = None if args.allowed is None else args.allowed[part]
            logits = self.raw_logits(x.rows(part), head, args.adapters and args.adapters[part])
            asked = _asked(wanted, part)
            raw = rows_to_host(self, logits, asked - part.start)
            edit_on_device(self, logits, masks, mine)
            ids[part], values[part] = sample_on_device(self, logits, _of(args.draw, part))
            if wanted is not None and found is not None:
                if len(asked):
                    add_top_logprobs(_HOST, raw, found, asked)
                _candidates(raw, asked, found, (ids, values), args)
                found.chosen[asked] = raw[np.arange(len(asked)), ids[asked]] - found.lse[asked]

        in_parts(self, len(x), some)
        return SamplerOutput(ids, values, found)

    def launch_step(
        self,
        stack: Stack,
        batch: Batch,
        kv: GpuKV,
        sliding: tuple[Batch, GpuKV] | None,
        head: Head,
        draw: Draw,
    ) -> Chosen:
        """Begun only. The ids lie outside of the arena, where the embedding of the next step reads
        them: the copy to the host is begun before that step, so that one place is enough."""
        rows = len(batch.logit_rows)
        if 16 * rows > LATER:
            raise EngineFault("gpu_memory", f"{rows} tokens in a step: lower --max-num-seqs")
        pages = [(batch, kv)] if sliding is None else [(batch, kv), sliding]
        hidden, places = self.computed(stack, pages, StepChoice(head, draw))
        if not places:
            return self.launch_choice(hidden, head, draw, of_wanted(batch))
        later = self.driver.download_later(8 * places, self.launches.chosen) if rows else None
        return Chosen(rows, places, later)

    def launch_choice(
        self, hidden: GpuArray, head: Head, draw: Draw, adapters: Adapters | None
    ) -> Chosen:
        """The part of `launch_step` behind the layers, where it is not recorded."""
        rows, ids = len(hidden), self.launches.chosen

        def some(part: slice) -> None:
            logits = self.raw_logits(hidden.rows(part), head, adapters and adapters[part])
            at = ids + 4 * part.start
            launch_sample(self, logits, _of(draw, part), at, at + 4 * rows)

        in_parts(self, rows, some)
        later = self.driver.download_later(8 * rows, ids) if rows else None
        return Chosen(rows, rows, later)

    def choose_recorded(self, hidden: GpuArray, step: Step, choice: StepChoice) -> None:
        """Do the part of `launch_step` behind the layers for a step that is being recorded."""
        logits = self.raw_logits(hidden, choice.head, step.adapted[1])
        ids = self.launches.chosen
        launch_draw(self, logits, step.draw, cuts_off(choice.draw), (ids, ids + 4 * len(hidden)))

    def collect(self, chosen: Chosen) -> SamplerOutput:
        if not chosen.rows:
            return SamplerOutput(np.empty(0, np.int32), np.empty(0, np.float32))
        both = (
            self.driver.wait(chosen.later)
            .view(np.int32)
            .reshape(2, chosen.places)[:, : chosen.rows]
        )
        return SamplerOutput(both[0].copy(), both[1].copy().view(np.float32))

    def sample(
        self, logits: F32, temperature: F32, top_k: I32, top_p: F32, min_p: F32, uniform: F32
    ) -> I32:
        draw = (temperature, top_k, top_p, min_p, uniform)
        return sample_on_device(self, self.on_device(logits), draw)[0]


def in_parts(ops: Chooser, rows: int, work: Callable[[slice], None]) -> None:
    """All rows at once, or where the arena has no room for their logits half as many, a quarter ...
    at a time: drafts have several rows for each sequence, masks and edits take memory beside them.
    EngineFault where there is no room for one."""
    mark, begin, most = ops.arena.mark, 0, rows
    while begin < rows:
        part = slice(begin, min(begin + most, rows))
        try:
            work(part)
            begin = part.stop
        except EngineFault as fault:
            if fault.code != "gpu_memory" or most == 1:
                raise
            most = -(-most // 2)
        ops.arena.reset(mark)


def _of(draw: Draw, part: slice) -> Draw:
    temperature, top_k, top_p, min_p, uniform = draw
    return temperature[part], top_k[part], top_p[part], min_p[part], uniform[part]


def edit_on_device(
    ops: Chooser, logits: GpuArray, allowed: Allowed | None, edits: Edits | None
) -> None:
    """Change the logits as `apply_edits` would."""
    vocabulary = logits.shape[1]
    for edit in (edit for mine in edits or [] for edit in mine):
        if len(edit.ids) and not (min(edit.ids) >= 0 and max(edit.ids) < vocabulary):
            raise ValueError("edits: no such token")
    for entries in rounds_of(edits or []):
        if entries:
            _launch_edit(ops, logits, entries)
    _forbid(ops, logits, allowed, edits)


def _launch_edit(ops: Chooser, logits: GpuArray, entries: _Entries) -> None:
    whole = ops.on_device(np.array([entry[:4] for entry in entries], np.int32))
    amounts = ops.on_device(np.array([entry[4] for entry in entries], np.float32))
    grid = (-(-len(entries) // GROUP_ROWS),)
    ops.launches.launch("edit", grid, logits, whole, amounts, len(entries), logits.shape[1])


def _forbid(ops: Chooser, logits: GpuArray, allowed: Allowed | None, edits: Edits | None) -> None:
    vocabulary = logits.shape[1]
    words = 2 * -(-vocabulary // 64)
    rows, masks = [], []
    for row in range(len(logits)):
        mine = edits[row] if edits is not None else []
        bits = None if allowed is None else allowed[row : row + 1]
        if any(
            edit.operation in (Operation.ALLOW, Operation.FORBID, Operation.FORCE) for edit in mine
        ):
            may = np.zeros(32 * words, np.bool_)
            may[:vocabulary] = may_be_chosen(vocabulary, bits, mine)
            rows.append(row)
            masks.append(np.packbits(may, bitorder="little").view(np.int32))
        elif bits is not None and (~bits).any():
            rows.append(row)
            masks.append(np.ascontiguousarray(bits[0]).view(np.int32))
    if rows:
        mask, which = ops.on_device(np.stack(masks)), ops.on_device(np.array(rows, np.int32))
        grid = (len(rows), -(-vocabulary // GROUP_ROWS))
        ops.launches.launch("forbid", grid, logits, mask, which, mask.shape[1], vocabulary)


def sample_on_device(ops: Chooser, logits: GpuArray, draw: Draw) -> tuple[I32, F32]:
    """Tokens and their logits."""
    rows = len(logits)
    out = ops.arena.take((2, rows), "i32")
    launch_sample(ops, logits, draw, out.address, out.address + 4 * rows)
    both = np.empty((2, rows), np.int32)
    ops.driver.download(both, out.address)
    return both[0].copy(), both[1].view(np.float32).copy()


def launch_sample(ops: Chooser, logits: GpuArray, draw: Draw, ids: int, values: int) -> None:
    """Tokens and their logits, at these addresses."""
    integers = [np.ascontiguousarray(array).view(np.int32) for array in draw]
    parameters = [array.address for array in ops.arena.upload(integers)]
    launch_draw(ops, logits, parameters, cuts_off(draw), (ids, values))


def cuts_off(draw: Draw) -> bool:
    """Return whether any row that is not greedy has top-k or top-p."""
    temperature, top_k, top_p, _, _ = draw
    return bool(((temperature > 0) & ((top_k > 0) | (top_p < 1))).any())


def launch_draw(
    ops: Chooser, logits: GpuArray, parameters: list[int], cuts: bool, out: tuple[int, int]
) -> None:
    """A token for each row and its logit. parameters: addresses of the arrays of a Draw; cuts:
    whether rows may have top-k or top-p; out: addresses of ids and logits."""
    rows, vocabulary = logits.shape
    take, launch = ops.arena.take, ops.launches.launch
    if rows > MAX_SPLIT_TILES:
        raise EngineFault("gpu_memory", f"{rows} rows have no counters: fewer at once")
    chunks = -(-vocabulary // (VOCABULARY_TILE * VOCABULARY_SEGMENTS))
    grid = rows, -(-vocabulary // (VOCABULARY_TILE * chunks))
    pairs = take((rows, VOCABULARY_SEGMENTS), "i64")
    masses = take((rows, 2 * VOCABULARY_SEGMENTS), "fp64")
    counts = take((rows, VOCABULARY_SEGMENTS, SAMPLE_PLACES), "i32")
    places = take((rows, VOCABULARY_SEGMENTS + 4), "i32")
    scales = take((rows, 2))
    last = take((rows,), "i64")
    arrived = ops.arena.counters
    size = vocabulary, chunks
    given = logits, *parameters[:4], pairs
    name = "sample.best.cuts" if cuts else "sample.best"
    launch(name, grid, *given, counts, places, scales, masses, arrived, *size)
    if cuts:
        found = take((rows, SAMPLE_MOST), "i32")
        launch("sample.collect", grid, *given, scales, places, masses, found, *size)
        few = pairs, places, masses, found, last, *out
        bounds = vocabulary, grid[1], VOCABULARY_TILE * chunks
        launch("sample.cut", (rows,), logits, *parameters, *few, *bounds)
    launch("sample.draw", grid, logits, *parameters, pairs, masses, last, arrived, *out, *size)


def _asked(wanted: LogprobsWanted | None, part: slice) -> I32:
    """Return those of these rows, ascending, for which logprobs or candidates are wanted."""
    if wanted is None:
        return np.empty(0, np.int32)
    asks = (wanted.top[part] >= 0) | (wanted.candidates[part] > 0)
    rows: I32 = (part.start + np.flatnonzero(asks)).astype(np.int32)
    return rows


def rows_to_host(ops: Chooser, logits: GpuArray, rows: I32) -> F32:
    """Some rows [len(rows), V], a copy for each run of neighbours: the arena need not hold them
    twice."""
    vocabulary = logits.shape[1]
    out = np.empty((len(rows), vocabulary), np.float32)
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for run in np.split(np.arange(len(rows)), breaks):
        if len(run):
            begin = logits.address + 4 * vocabulary * int(rows[run[0]])
            ops.driver.download(out[run[0] : run[-1] + 1], begin)
    return out


def _candidates(
    raw: F32, asked: I32, found: Logprobs, chosen: tuple[I32, F32], args: ChooseArgs
) -> None:
    """Find the candidates of rows that search, whose edits are done to logprobs on the host.
    chosen: ids and logits, of which theirs are written."""
    wanted, edits = args.wanted, args.edits
    ids, values = chosen
    assert wanted is not None
    here = wanted.candidates[asked] > 0
    searching = asked[here]
    if not len(searching):
        return
    logits = raw[here] - found.lse[searching, None]
    masks = None if args.allowed is None else args.allowed[searching]
    apply_edits(logits, masks, None if edits is None else [edits[row] for row in searching])
    add_candidates(_HOST, logits, found, searching)
    best, best_values = found.candidates
    ids[searching] = best[searching, 0]
    values[searching] = best_values[searching, 0]
