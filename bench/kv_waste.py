"""How much KV memory is wasted on a trace: with blocks, and with one contiguous piece for each request.

Owns the replay of lengths without a clock and without a model: as many requests as find room are always
there (a closed load, in the order of the trace), scheduler/scheduler.py plans and commits every step, and
memory
is looked at behind each. Prompts share nothing. Must not know speeds: how long a step takes plays no role.

Without paging a request reserves (the schemes of Orca in Kwon et al., arXiv 2309.06180, section 6.1):
    max     the longest sequence that the server takes, for each
    cap     its prompt and the most that its client will have (`max_tokens`)
    pow2    its prompt and the next power of two of its answer: a guess, never short, at most twice too long
    oracle  its prompt and its answer, as if these were known
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pageturner.lab.traffic.traffic import TrafficRequest
from pageturner.lab.traffic.traffic_files import TraceRow
from pageturner.policies.scheduler_config import SchedulerConfig
from pageturner.policies.scheduler_factory import make_scheduler
from pageturner.request import Request
from pageturner.scheduler.types import Item, Output, Result, Sequence, State

STOP = 1
AHEAD = 32  # requests that wait behind those that run, so that whoever fits is there


@dataclass(frozen=True, slots=True)
class KVServer:
    """memory, longest (sequence), cap (max_tokens of every client) and budget (of a step) in tokens."""

    memory: int
    longest: int
    cap: int
    slots: int = 256
    budget: int = 512
    block_size: int = 16


SCHEMES: dict[str, Callable[[KVServer, TraceRow], int]] = {
    "max": lambda server, row: server.longest,
    "cap": lambda server, row: min(server.longest, row.prompt_tokens + server.cap),
    "pow2": lambda server, row: min(
        server.longest, row.prompt_tokens + (1 << (row.output_tokens - 1).bit_length())
    ),
    "oracle": lambda server, row: row.prompt_tokens + row.output_tokens,
}


@dataclass(slots=True)
class KVUse:
    """Memory, step by step, in tokens.

    reserved  what requests hold; used: what of it holds KV; blocked: what nobody holds while the next request
              finds no room for its piece (of a pool of blocks: none, since any block serves anybody)
    """

    memory: int
    reserved: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    blocked: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    def note(self, reserved: int, used: int, blocked: int, running: int) -> None:
        self.reserved.append(reserved)
        self.used.append(used)
        self.blocked.append(blocked)
        self.running.append(running)

    @property
    def steps(self) -> int:
        return len(self.used)

    @property
    def internal(self) -> float:
        """The share of what was reserved that held nothing, over all steps."""
        return 1 - sum(self.used) / (sum(self.reserved) or 1)

    @property
    def external(self) -> float:
        """The share of memory that nobody held while somebody waited for a piece of it."""
        return sum(self.blocked) / (self.memory * self.steps)

    @property
    def usage(self) -> float:
        """The share of memory that held KV."""
        return sum(self.used) / (self.memory * self.steps)

    @property
    def most_internal(self) -> float:
        """The most that was reserved and empty at any moment, as a share of memory."""
        pairs = zip(self.reserved, self.used, strict=True)
        return max(reserved - used for reserved, used in pairs) / self.memory

    @property
    def sequences(self) -> float:
        """How many requests ran at once, on average."""
        return sum(self.running) / self.steps


def paged(server: KVServer, rows: Iterable[TraceRow]) -> KVUse:
    """In blocks, taken when a token needs them; a request that finds none is preempted and computed again."""
    replay, account = _Replay(server, server.memory), KVUse(server.memory)

    def admit(number: int, row: TraceRow) -> bool:
        return replay.waiting < AHEAD

    for _ in replay.steps(rows, admit):
        blocks = sum(len(seq.blocks) for seq in replay.running)
        account.note(blocks * server.block_size, replay.used, 0, len(replay.running))
    return account


def contiguous(server: KVServer, rows: Iterable[TraceRow], scheme: str) -> KVUse:
    """One piece for each request, which must be free before the request starts and is freed at its end."""
    length, pieces, account = SCHEMES[scheme], ContiguousMemory(server.memory), KVUse(server.memory)
    # pieces are what is scarce
    replay = _Replay(server, server.memory + server.slots * server.block_size)
    blocked = 0

    def admit(number: int, row: TraceRow) -> bool:
        nonlocal blocked
        if len(pieces) == server.slots:
            blocked = 0
            return False
        taken = pieces.take(number, length(server, row))
        blocked = 0 if taken else server.memory - pieces.reserved
        return taken

    for ended in replay.steps(rows, admit):
        for number in ended:
            pieces.free(number)
        account.note(pieces.reserved, replay.used, blocked, len(replay.running))
    return account


class ContiguousMemory:
    """`size` tokens, all free at first. Holes are kept by place; neighbours become one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._holes: list[tuple[int, int]] = [(0, size)]  # (place, length), by place
        self._pieces: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def reserved(self) -> int:
        return sum(length for _, length in self._pieces.values())

    def take(self, id: int, length: int) -> bool:
        """A piece for `id`, from the smallest hole that holds it, the first of equals. False if none does."""
        fitting = [(hole[1], hole[0]) for hole in self._holes if hole[1] >= length]
        if not fitting:
            return False
        hole, place = min(fitting)
        at = self._holes.index((place, hole))
        self._holes[at : at + 1] = [(place + length, hole - length)] if hole > length else []
        self._pieces[id] = (place, length)
        return True

    def free(self, id: int) -> None:
        """Its piece is a hole again. KeyError if it has none."""
        holes = sorted([*self._holes, self._pieces.pop(id)])
        self._holes = [holes[0]]
        for place, length in holes[1:]:
            last, before = self._holes[-1]
            if last + before == place:
                self._holes[-1] = (last, before + length)
            else:
                self._holes.append((place, length))


class _Replay:
    """A scheduler with so many tokens of KV, and who runs in it."""

    def __init__(self, server: KVServer, tokens: int) -> None:
        self.running: list[Sequence] = []
        self.waiting = 0
        self._server = server
        config = SchedulerConfig(
            block_size=server.block_size,
            enable_prefix_caching=False,
            max_num_seqs=server.slots,
            max_num_batched_tokens=server.budget,
        )
        blocks = tokens // server.block_size
        stack = make_scheduler(config, num_blocks=blocks, max_model_len=server.longest)
        self._scheduler = stack.scheduler

    @property
    def used(self) -> int:
        """Tokens whose KV is there. Nobody shares any."""
        return sum(seq.computed for seq in self.running)

    def steps(
        self, rows: Iterable[TraceRow], admit: Callable[[int, TraceRow], bool]
    ) -> Iterator[list[int]]:
        """Step by step, who ended with it. `admit` is asked for one request after the other, as long as it
        says yes."""
        scheduler, queue = self._scheduler, enumerate(rows)
        coming = next(queue, None)
        alive = 0
        while True:
            while coming is not None and admit(*coming):
                scheduler.add(_request(*coming, self._server))
                alive += 1
                self.waiting = alive - len(self.running)
                coming = next(queue, None)
            plan = scheduler.plan(0.0)
            if not plan.items:
                return
            events = scheduler.commit(plan, Result([_output(item) for item in plan.items]), 0.0)
            known = dict.fromkeys([*self.running, *(item.sequence for item in plan.items)])
            self.running = [seq for seq in known if seq.state is State.RUNNING]
            ended = [event.id for event in events if event.finish is not None]
            alive -= len(ended)
            self.waiting = alive - len(self.running)
            yield ended


def _request(number: int, row: TraceRow, server: KVServer) -> Request:
    prompt = (0,) * row.prompt_tokens
    return TrafficRequest(prompt, row.output_tokens, max_tokens=server.cap).engine_request(
        number, STOP
    )


def _output(item: Item) -> Output:
    """Token 0 for whoever wants one, the stop id where the trace's answer ends."""
    if not item.wants_logits:
        return Output()
    return Output(
        [STOP if item.sequence.generated + 1 == item.sequence.request.params.forced_end else 0]
    )
