"""The size of KV memory, and how many blocks become of it.

Owns the arithmetic; must not know backends or allocate anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pageturner import memory
from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault
from pageturner.kernels.base import KVSpec
from pageturner.kernels.recurrent import CHUNK, RecurrentSpec

GIB = 1024**3
MAX_KV_BYTES = 4 * GIB  # what is taken unasked; ask for more with --kv-cache-memory


@dataclass(frozen=True, slots=True)
class KVSizes:
    """Blocks to allocate. Without a window each holds all layers. With one, `blocks` hold the
    layers that see everything and cost nothing if there are none; `sliding` blocks hold those that
    see `window` positions. With recurrent layers there are `states` slots for states, and `tails`
    blocks for what is behind the last one of a sequence."""

    blocks: int
    window: int = 0
    sliding: int = 0
    states: int = 0
    tails: int = 0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The number of KV blocks, the tokens in each of them, and the type of the KV that they
    hold."""

    sizes: KVSizes
    block_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class KVForm:
    """The memory that one block takes.

    one       the spec of one block of all layers, of which `windowed` see only `window` positions
    of_draft  bytes of a draft model beside each of `KVSizes.blocks`
    recurrent  the storage of recurrent layers; None: there are none
    """

    one: KVSpec
    windowed: int = 0
    window: int = 0
    of_draft: int = 0
    recurrent: RecurrentSpec | None = None


SNAPSHOTS = 0.6  # of the memory that running sequences leave, the part for states that are kept
SEATS = 0.5  # of all memory, the most for states and tails of running sequences


def available_memory() -> int:
    """Bytes that this process may still take. EngineFault where the machine does not say."""
    free = memory.available()
    if free is None:
        raise EngineFault(
            "kv_memory", "this machine does not say how much memory is free: no /proc/meminfo"
        )
    return free


def _may_take(config: EngineConfig, available: int) -> int:
    """Bytes for the KV cache."""
    asked = config.kv_cache_memory
    if asked > available:
        raise EngineFault(
            "kv_memory",
            f"--kv-cache-memory asks for {asked / GIB:.2f} GiB, and {available / GIB:.2f} GiB are free:"
            " ask for less, or leave it out to have it chosen",
        )
    return asked or min(MAX_KV_BYTES, available // 2)


def plan_kv(form: KVForm, config: EngineConfig, max_model_len: int, available: int) -> KVSizes:
    """Return the blocks to allocate in `available` bytes. EngineFault('kv_memory') if there is no
    room for any that are of use. Memory too small for a window and a block is used as if nothing
    had a window."""
    size, total = config.block_size, _may_take(config, available)
    two = form.one.beside is not None
    if two and not form.windowed:
        raise EngineFault(
            "model_unsupported",
            "this model's KV heads are of two sizes, of which KV tiers and remote prefill know nothing yet",
        )
    nbytes = form.one.nbytes + form.of_draft
    if form.recurrent is not None:
        return _with_states(form, form.recurrent, config, max_model_len, total)
    sizes = KVSizes(total // nbytes)
    if form.windowed:
        split = _split(form, config, max_model_len, total)
        if split.sliding >= touched(form.window, size, size):
            sizes = split
        elif two:
            sizes = KVSizes(0)
    if not config.kv_cache_memory:
        useful = config.max_num_seqs * -(-max_model_len // size)
        sizes = replace(sizes, blocks=min(sizes.blocks, useful), sliding=min(sizes.sliding, useful))
    if sizes.blocks < 2:
        raise EngineFault(
            "kv_memory",
            f"no room for the KV cache: one block of {size} tokens takes {nbytes / 1024:.0f} KiB and"
            f" {total / 1024:,.0f} KiB may be used: raise --kv-cache-memory (or free some memory), or lower"
            " --block-size",
        )
    return sizes


def _with_states(
    form: KVForm, storage: RecurrentSpec, config: EngineConfig, max_model_len: int, total: int
) -> KVSizes:
    """Return the sizes of a model with recurrent layers: two states and two tails for as many
    sequences as may run, or as half of the memory holds, and one of each for padding; the rest for
    states that are kept, and for KV. Without the prefix cache no state is kept. Blocks that nobody
    can use become states."""
    state, tail = storage.state_bytes, storage.tail_bytes
    block = form.one.nbytes + form.of_draft
    seats = min(config.max_num_seqs, int((total * SEATS / (state + tail) - 1) // 2))
    rest = total - (2 * seats + 1) * (state + tail)
    share = state_share(state, block, config.block_size)
    kept = share if config.enable_prefix_caching else 0.0
    useful = config.max_num_seqs * -(-max_model_len // config.block_size)
    blocks = int(rest * (1 - kept)) // block
    if not config.enable_prefix_caching or not config.kv_cache_memory:
        blocks = min(blocks, useful)
    if seats < 1 or blocks < 2:
        raise EngineFault(
            "kv_memory",
            f"no room for recurrent states and KV: one sequence takes {3 * (state + tail):,} bytes of"
            f" states, a block of {config.block_size} tokens {block:,} bytes, and {total:,} bytes"
            " may be used: raise --kv-cache-memory (or free some memory)",
        )
    snapshots = (rest - blocks * block) // state if kept else 0
    snapshots = min(snapshots, blocks * config.block_size // CHUNK)  # one at every boundary
    return KVSizes(blocks, states=2 * seats + snapshots, tails=2 * seats)


def state_share(state: int, block: int, block_size: int) -> float:
    """The part of memory for KV and states that are kept which is for states of so many bytes,
    beside blocks of so many: with less than SNAPSHOTS one at every boundary."""
    return min(SNAPSHOTS, state / (state + block * CHUNK / block_size))


def _split(form: KVForm, config: EngineConfig, max_model_len: int, total: int) -> KVSizes:
    """Return sliding blocks for all sequences at once, in at most half of the memory: with fewer, a
    long context still runs, in smaller steps. The rest is for the layers that see everything;
    without any, all is sliding."""
    size, one, beside = config.block_size, form.one, form.of_draft
    longest = -(-max_model_len // size)
    whole, each = (spec.nbytes for spec in one.split(form.windowed))
    useful = config.max_num_seqs * longest
    if not whole and not beside:
        return KVSizes(useful, form.window, total // each)
    step = min(config.token_budget or max_model_len, max_model_len)
    most = config.max_num_seqs * min(longest, touched(form.window, step, size))
    sliding = min(most, total // 2 // each, total // (one.nbytes + beside))
    blocks = (total - sliding * each) // (whole + beside)
    return KVSizes(blocks if whole else min(blocks, useful), form.window, sliding)


def touched(window: int, step: int, size: int) -> int:
    """Most blocks in which lies what a step of so many tokens sees."""
    return -(-(window + step - 2) // size) + 1
