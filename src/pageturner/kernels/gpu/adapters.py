"""LoRA adapters on a device: factors, the rows of a step that have each, and the two products as
launches.

Owns how an adapter lies in memory, and the memory that its products take in a step. `pack` may be
called by any thread; the rest is for the thread that steps. Must not know layers, names of adapters
or requests.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kernels.adapters import MAX_RANK, Adapters, AdapterWeights, LowRank
from pageturner.kernels.base import I32, Batch, Stack
from pageturner.kernels.gpu.adapter_rows import (
    AdaptedRows,
    GpuAdapter,
    RowsOfKind,
    blocks_of,
    of_wanted,
    tables_of,
)
from pageturner.kernels.gpu.arrays import Arena, GpuArray
from pageturner.kernels.gpu.catalogue import (
    LORA_OUTPUTS,
    LORA_RANKS,
    LORA_ROWS,
    lora_compute,
    lora_parts,
)
from pageturner.kernels.gpu.driver import Driver
from pageturner.kernels.gpu.launches import Launches
from pageturner.kernels.gpu.weights import FILE_KINDS, FloatMatrix, Groups

ROOM = 16 << 20  # bytes for tables of a step and for first products; many tiles take turns in them
MANY_TILES = (
    64  # of so many the parts of K are added by one program, of fewer by the second product
)
ALIGNED = 128  # where a factor may begin
HEAD, EMBED, LAYERS = 0, 1, 2  # places of records; those of layers come last
ORDER = ("q", "k", "v", "o", "gate", "up", "down")  # of a layer's; joined products are neighbours


def place_of(layer: int, name: str) -> int:
    """Return the number of the record of a field of a layer; layer -1 is the head."""
    return HEAD if layer < 0 else LAYERS + len(ORDER) * layer + ORDER.index(name)


def has_head(adapters: AdaptedRows | Adapters) -> bool:
    """Return whether any row's adapter changes the head."""
    if isinstance(adapters, AdaptedRows):
        return any(part.blocks[HEAD] for part in adapters.parts)
    return any(one is not None and one.blocks[HEAD] for one in adapters)


class GpuAdapters:
    """Packs adapters, and computes what they add."""

    def __init__(self, launches: Launches) -> None:
        self._run = launches
        self._room: Arena | None = None  # there as soon as there is an adapter
        self._making = threading.Lock()

    @property
    def _driver(self) -> Driver:
        return self._run.driver

    # -- memory ------------------------------------------------------------------------------------
    def pack(self, weights: AdapterWeights, stack: Stack) -> GpuAdapter:
        """ValueError where it does not fit the stack; MemoryError where the device is full."""
        check(weights, stack)
        data, blocks = _laid_out(weights, len(stack.layers))
        try:
            with self._making:
                if self._room is None:
                    address = self._driver.keep(np.zeros(ROOM, np.uint8))
                    self._room = Arena(self._driver, ROOM, address)
                    weakref.finalize(self._room, self._driver.drop, address).atexit = False
            address = self._driver.keep(data)
        except EngineFault as fault:
            if fault.code != "gpu_memory":
                raise
            raise MemoryError(fault.message) from fault
        adapter = GpuAdapter(address, data.nbytes, FILE_KINDS[weights.kind], blocks)
        weakref.finalize(adapter, self._driver.drop, address).atexit = False
        return adapter

    def begin(self) -> None:
        """The tables of the step before are gone."""
        if self._room is not None:
            self._room.reset()

    # -- rows --------------------------------------------------------------------------------------
    def of_step(
        self, batch: Batch, recorded: bool
    ) -> tuple[AdaptedRows | None, AdaptedRows | None]:
        """Return the adapters of all rows of a step, and of those whose logits are wanted.
        recorded: tables have room for another step of the same number of rows, whatever adapters
        these have."""
        if batch.adapters is None:
            return None, None
        count = len(batch.tokens)
        every = self.of_rows(batch.adapters, batch.query_start, count if recorded else 0)
        if np.array_equal(batch.logit_rows, np.arange(count)):
            return every, every
        wanted = of_wanted(batch) or []
        return every, self.of_rows(wanted, least=len(wanted) if recorded else 0)

    def of_rows(
        self, adapters: Adapters, starts: I32 | None = None, least: int = 0
    ) -> AdaptedRows | None:
        """Adapter s has the rows starts[s] .. starts[s+1] - 1, or row s. None where nobody has any.
        least: as `RowTables.arrays`."""
        starts = np.arange(len(adapters) + 1, dtype=np.int32) if starts is None else starts
        tables = tables_of(adapters, starts)
        if not tables:
            return None
        assert self._room is not None  # there is an adapter
        arrays = self._room.upload(
            [array for each in tables.values() for array in each.arrays(least)]
        )
        blocks = blocks_of(adapters)
        threes = zip(arrays[::3], arrays[1::3], arrays[2::3], strict=True)
        parts = [
            RowsOfKind(kind, *three, blocks[kind])
            for kind, three in zip(tables, threes, strict=True)
        ]
        return AdaptedRows(tuple(parts))

    @contextmanager
    def rows(self, adapters: AdaptedRows | Adapters) -> Iterator[AdaptedRows]:
        """Yield the rows with these adapters for the launches within; or the argument, if it is
        that already."""
        if isinstance(adapters, AdaptedRows):
            yield adapters
            return
        mark = self._room.mark if self._room is not None else 0
        yield self.of_rows(adapters) or AdaptedRows(())
        if self._room is not None:
            self._room.reset(mark)

    # -- products ----------------------------------------------------------------------------------
    def add(
        self, adapted: AdaptedRows, y: GpuArray, x: GpuArray, place: int, sizes: Sequence[int]
    ) -> None:
        """y [T, sum(sizes)] plus scale * B (A x) of the fields whose records begin at `place`, one
        behind the other; each makes so many of the columns. x is as the model's own product has
        it."""
        x = next(iter(x.narrow.values()), x)
        chunk, parts = lora_parts(x.shape[1])
        for of in adapted.parts:
            most = int(of.blocks[place : place + len(sizes)].max())
            if not most:
                continue
            each = parts if len(of.tiles) > MANY_TILES else 1
            programs, width = -(-parts // each), len(sizes) * most * LORA_RANKS
            compute = lora_compute(x.kind, of.kind)
            for tiles, h in self._first(of.tiles, width, programs):
                shape = len(tiles) * LORA_ROWS, width, each, chunk, parts, x.shape[1]
                grid = (len(tiles), len(sizes) * most, programs)
                given = x, of.rows, tiles, of.bases, h, place, most
                self._run.launch(f"lora_shrink.{x.kind}.{of.kind}", grid, *given, *shape)
                self._second(of, tiles, h, y, place, sizes, compute, most, programs)

    def add_embedded(self, adapted: AdaptedRows, x: GpuArray, tokens: GpuArray) -> None:
        """The same for rows of the embedding."""
        for of in adapted.parts:
            most = int(of.blocks[EMBED])
            if not most:
                continue
            width = most * LORA_RANKS
            for tiles, h in self._first(of.tiles, width, 1):
                given = tokens, self._run.chosen, of.rows, tiles, of.bases, h, EMBED, width
                self._run.launch(f"lora_pick.{of.kind}", (len(tiles), most), *given)
                self._second(of, tiles, h, x, EMBED, (x.shape[1],), of.kind, most, 1)

    def _first(self, tiles: GpuArray, width: int, programs: int) -> list[tuple[GpuArray, GpuArray]]:
        """Tiles that are computed at once, and where their first products go: always the same
        place."""
        room = self._room
        assert room is not None  # there is an adapter
        one = 4 * LORA_ROWS * width * programs
        at_once = max(min(len(tiles), (room.size - room.mark) // one - 1), 1)
        mark = room.mark
        h = room.take((programs, at_once * LORA_ROWS, width))
        room.reset(mark)
        begins = range(0, len(tiles), at_once)
        counts = [min(at_once, len(tiles) - begin) for begin in begins]
        return [
            (GpuArray(tiles.address + 16 * begin, (count, 4), "i32"), h)
            for begin, count in zip(begins, counts, strict=True)
        ]

    def _second(
        self,
        of: RowsOfKind,
        tiles: GpuArray,
        h: GpuArray,
        y: GpuArray,
        place: int,
        sizes: Sequence[int],
        compute: str,
        most: int,
        programs: int,
    ) -> None:
        height, width = len(tiles) * LORA_ROWS, h.shape[2]
        columns = (*sizes, 0, 0)[:3]
        grid = (sum(-(-n // LORA_OUTPUTS) for n in columns), len(tiles))
        given = h, of.rows, tiles, of.bases, y, place, most, height, width, programs, y.row
        self._run.launch(f"lora_expand.{compute}.{of.kind}", grid, *given, *columns)


# -- how an adapter lies ---------------------------------------------------------------------------
def check(weights: AdapterWeights, stack: Stack) -> None:
    """ValueError where an adapter does not fit the stack."""
    if len(weights.layers) > len(stack.layers):
        raise ValueError("adapter: no such layer")
    for number, pairs in enumerate(weights.layers):
        for name, pair in pairs.items():
            weight = getattr(stack.layers[number], name, None)
            if name not in ORDER or not isinstance(weight, FloatMatrix | Groups):
                raise ValueError(f"adapter: layer {number} has no {name!r}")
            _check_pair(
                pair,
                pair.a.shape[::-1],
                (weight.columns, weight.rows),
                f"{name!r} of layer {number}",
            )
    width, vocabulary = stack.embed.columns, stack.vocabulary or stack.embed.rows
    if weights.embed is not None:
        _check_pair(weights.embed, weights.embed.a.shape, (vocabulary, width), "the embedding")
    if weights.head is not None:
        _check_pair(weights.head, weights.head.a.shape[::-1], (width, vocabulary), "the head")


def _check_pair(pair: LowRank, a: tuple[int, ...], wanted: tuple[int, int], what: str) -> None:
    """a: the shape of A as [inputs, rank]; wanted: inputs and outputs."""
    if pair.b.ndim != 2 or a != (wanted[0], pair.rank) or len(pair.b) != wanted[1]:
        raise ValueError(
            f"adapter: the factors {pair.a.shape} and {pair.b.shape} do not fit {what}"
        )
    if not 1 <= pair.rank <= MAX_RANK:
        raise ValueError(f"adapter: a rank is 1 to {MAX_RANK}, not {pair.rank}")
    if not np.isfinite(pair.scale):
        raise ValueError("adapter: the scale is no number")


def _laid_out(weights: AdapterWeights, layers: int) -> tuple[NDArray[np.uint8], I32]:
    """Records and factors as source/lora.py wants them, and the blocks of ranks of each record."""
    pairs = {
        place_of(i, name): pair
        for i, each in enumerate(weights.layers)
        for name, pair in each.items()
    }
    pairs |= {HEAD: weights.head} if weights.head is not None else {}
    pairs |= {EMBED: weights.embed} if weights.embed is not None else {}
    records = np.zeros((LAYERS + len(ORDER) * layers, 4), np.int64)
    size, factors = _ends(0, records), []
    for place, pair in pairs.items():
        padded = np.zeros((len(pair.b), -(-pair.rank // 8) * 8), pair.b.dtype)
        padded[:, : pair.rank] = pair.b
        scale = int(np.array([pair.scale], np.float32).view(np.int32)[0])
        records[place] = (size, _ends(size, pair.a), pair.rank, scale)
        factors += [(size, pair.a), (_ends(size, pair.a), padded)]
        size = _ends(_ends(size, pair.a), padded)
    data = np.zeros(size, np.uint8)
    for at, values in ((0, records), *factors):
        data[at : at + values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return data, (-(-records[:, 2] // LORA_RANKS)).astype(np.int32)


def _ends(at: int, values: NDArray[np.generic]) -> int:
    """Return where the next array may begin."""
    return -(-(at + values.nbytes) // ALIGNED) * ALIGNED
