"""The number of sequences that fit in KV memory: with the longest length reserved for each, and in
blocks.

Owns the arithmetic of the three schemes; must not know files, machines or how a plan is shown.
Whoever asks takes the weights off the memory first; activations are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pageturner.config.settings import EngineConfig
from pageturner.executor.kv_memory import KVForm, KVSizes, plan_kv, touched
from pageturner.lab.bench.prompt_alone import prefill_seconds
from pageturner.lab.planning.model_outline import Outline
from pageturner.lab.planning.model_outline_keys import KVLayers
from pageturner.lab.simulation.fleet import Roles, TierSizes
from pageturner.lab.simulation.step_cost import StepCost

# Tokens for which one kind of layers has memory, of a sequence of so many tokens.
Tokens = Callable[[KVLayers, int], int]


@dataclass(frozen=True, slots=True)
class Fit:
    """The number of sequences that fit at once by one scheme.

    each   bytes that one of them takes, on average
    used   the share of these that holds what a token may still look at
    """

    sequences: int
    each: float
    used: float

    @property
    def wasted(self) -> float:
        return 1.0 - self.used

    @property
    def cells(self) -> tuple[str, str]:
        """The sequences and the waste as cells of a table."""
        return f"{self.sequences:,}", f"{100 * self.wasted:.1f} %"


@dataclass(frozen=True, slots=True)
class KVPlanner:
    """A model, a KV type, blocks, the longest sequence a server promises (tokens), and memory
    (bytes)."""

    model: Outline
    dtype: str
    block_size: int
    longest: int
    memory: int

    def fits(self, lengths: Sequence[int]) -> dict[str, Fit]:
        """The fit by each scheme, for sequences of these lengths in equal shares, when each has all
        of its tokens.

        contiguous    `longest` tokens for each, as servers without paging reserve: "Orca (Max)" of
                      Kwon et al., arXiv 2309.06180, section 6.1
        power_of_two  the next power of two, at most `longest`: what a buddy allocator gives to a
                      length that is known beforehand
        paged         blocks; of layers with a window those that the next token may look at (while a
                      prompt is computed, a step's tokens more)
        """
        schemes: dict[str, Tokens] = {
            "contiguous": lambda layers, length: self.longest,
            "power_of_two": lambda layers, length: min(
                1 << (length - 1).bit_length(), self.longest
            ),
            "paged": self._in_blocks,
        }
        needed = self._bytes(seen, lengths)
        taken = {name: self._bytes(tokens, lengths) for name, tokens in schemes.items()}
        return {
            name: Fit(self.memory * len(lengths) // total, total / len(lengths), needed / total)
            for name, total in taken.items()
        }

    def sequence_bytes(self, length: int) -> int:
        """The blocks of one sequence, with its states."""
        return self._bytes(self._in_blocks, [length])

    def sizes(self, config: EngineConfig) -> KVSizes:
        """Return how the engine divides the memory: into blocks, those of layers with a window
        apart, and states of recurrent layers; for a model that it does not run, blocks alone."""
        spec, size = self.model.spec, self.block_size
        if spec is None:
            return KVSizes(self.memory // (self.model.bytes_per_token(self.dtype) * size))
        one = spec.kv_spec(1, size, self.dtype, self.model.gpu_kv)
        windowed = spec.hiding(self.longest)
        draft = spec.mtp.kv_spec(1, size, self.dtype).nbytes if self.model.mtp else 0
        form = KVForm(one, windowed, spec.window, draft, self.model.recurrent(self.dtype))
        asked = replace(config, kv_cache_memory=self.memory)
        return plan_kv(form, asked, self.longest, self.memory)

    def _bytes(self, tokens: Tokens, lengths: Sequence[int]) -> int:
        kv = sum(
            self.model.layer_bytes(layers, self.dtype)
            * sum(tokens(layers, length) for length in lengths)
            for layers in self.model.kv
        )
        storage = self.model.recurrent(self.dtype)
        if storage is not None:
            kv += len(lengths) * 2 * (storage.state_bytes + storage.tail_bytes)
        return kv

    def _in_blocks(self, layers: KVLayers, length: int) -> int:
        """Less than one block of waste, with a window less than one at each end of it."""
        size = self.block_size
        blocks = -(-length // size)
        return size * (min(blocks, touched(layers.window, 1, size)) if layers.window else blocks)


def seen(layers: KVLayers, length: int) -> int:
    """Return how many of its tokens a sequence of this length looks at."""
    return min(length, layers.window or length)


def states_in_words(sizes: KVSizes) -> str:
    """The states of recurrent layers that an engine has."""
    seats = sizes.tails // 2
    kept = f"{sizes.states - sizes.tails:,} kept; {sizes.blocks:,} blocks"
    return f"{sizes.tails:,} of {seats:,} sequences at once, {kept}"


# -- several replicas ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A prompt of so many tokens, in a cluster. Seconds; None where it is not known or there is
    none.

    computed    to compute it on an empty replica
    sent        its KV over the link, whole
    late        from the end of its computation to its last KV at the other replica, which has got
                the rest meanwhile
    host, file  its KV back from memory and from a file
    per_second  such prompts that all prefill replicas compute
    """

    tokens: int
    computed: float | None
    sent: float
    late: float | None
    host: float | None
    file: float | None
    per_second: float | None


@dataclass(frozen=True, slots=True)
class Links:
    """The ways on which KV comes, with the same links, tiers and step times that the simulator has.
    budget: tokens of a step; cost: None where step times are not known."""

    roles: Roles
    tiers: TierSizes
    cost: StepCost | None
    budget: int

    def row(self, length: int, prefill: int) -> PromptRow:
        """A prompt of so many tokens. prefill: replicas that compute prompts; 0: all do
        everything."""
        tiers, computed, late = self.tiers, None, None
        if self.cost is not None:
            computed = prefill_seconds(self.cost, 0, length, self.budget)
            late = self.roles.on_the_way(self.cost, 0, length, self.budget)
        return PromptRow(
            length,
            computed,
            sent=length * self.roles.token_seconds + self.roles.latency,
            late=late,
            host=tiers.host_seconds * length if tiers.host_tokens >= length else None,
            file=tiers.file_seconds * length if tiers.file_tokens >= length else None,
            per_second=prefill / computed if computed and prefill else None,
        )


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Replicas apart by what they do, or with slower memory. gpus: in each; sequences: of the
    longest length that all replicas which answer hold; tokens: of KV in each tier of a replica;
    link, host, file: GB/s."""

    prefill: int
    decode: int
    gpus: int
    sequences: int
    host_tokens: int
    file_tokens: int
    link: float
    host: float
    file: float
    rows: list[PromptRow]
