"""Engines of every configuration on one loaded model, and what they answer. For the metamorphic tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pageturner.engine.engine import Engine, EngineParts
from pageturner.executor.adapters import AdapterStore
from pageturner.executor.async_runner import AsyncRunner
from pageturner.executor.draft import Drafter
from pageturner.executor.grammar import Grammars
from pageturner.executor.kv_memory import KVLayout, KVSizes
from pageturner.executor.runner import Runner
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.kernels.base import Ops
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model
from pageturner.request import Event, Logprob, PromptLogprob, Request
from pageturner.text.grammar.compiler import Compiler
from support.poison import poison_blocks
from support.schedulers import check, make_stack

GOLDENS = Path(__file__).parent.parent / "goldens"


@dataclass(frozen=True)
class Setup:
    """One point of the product: whatever is here must not change an answer."""

    policy: str = "chunked"
    token_budget: int = 512
    block_size: int = 16
    prefix_caching: bool = True
    kv_tokens: int = 16384
    max_num_seqs: int = 64
    order: str = "fcfs"
    drafter: Callable[[], Drafter] | None = None
    adapters: int = 8  # in memory at most
    ahead: bool = False  # one step ahead, where the backend need not wait
    recent_tokens: int = (
        0  # KV of windowed layers apart, so much of it; 0: all layers keep everything
    )
    snapshots: int = 20  # states of recurrent layers beside those of running sequences
    snapshot_interval: int = 64


@dataclass(frozen=True)
class Answer:
    """What a request got: compared bit for bit."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    finish: str | None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


class Model:
    """A model loaded once on one backend; engines with storage of their own are cheap to make."""

    def __init__(
        self,
        path: Path,
        ops: Ops,
        *,
        dtype: str = "auto",
        kv_dtype: str = "float16",
        mtp: bool = False,
    ) -> None:
        self.ops = ops
        self.decoder: Decoder = load_model(path, ops, dtype=dtype, max_positions=0, mtp=mtp)
        self.kv_dtype = kv_dtype
        self.compiler = Compiler(lambda: load_tokenizer(path))
        self.adapters: dict[str, Path] = {}  # folders by name, for every engine made from here on

    def engine(self, setup: Setup) -> Engine:
        blocks = setup.kv_tokens // setup.block_size
        recent = setup.recent_tokens // setup.block_size
        if self.decoder.spec.local_heads is not None:  # two shapes of KV: always two stores
            recent = recent or blocks
        recurrent = self.decoder.spec.linear is not None
        seats = 2 * setup.max_num_seqs if recurrent else 0
        states = seats + 1 + setup.snapshots if recurrent else 0
        window = self.decoder.window if recent else 0
        sizes = KVSizes(blocks, window, recent, states, seats)
        grammars = Grammars(self.compiler)
        drafter = setup.drafter() if setup.drafter else None
        runner = Runner(
            self.decoder,
            self.ops,
            KVLayout(sizes, setup.block_size, self.kv_dtype),
            grammars,
            drafter,
        )
        for kv, count in zip(runner.storage, (blocks, recent), strict=False):
            if kv is not None:  # a read of what was never written becomes NaN
                poison_blocks(kv, list(range(count)))
        if runner.recurrent is not None:
            runner.recurrent.states[:] = runner.recurrent.tail[:] = 0xFF  # NaN
        plans = make_stack(
            num_blocks=sizes.blocks,
            window=sizes.window,
            sliding=sizes.sliding,
            states=sizes.states,
            tails=sizes.tails,
            snapshot_interval=setup.snapshot_interval,
            block_size=setup.block_size,
            prefix_caching=setup.prefix_caching,
            policy=setup.policy,
            order=setup.order,
            static_patience=0.0,  # all requests are there from the start: nobody to wait for
            max_num_seqs=setup.max_num_seqs,
            token_budget=setup.token_budget,
            max_model_len=min(self.decoder.spec.context, setup.kv_tokens),
        )
        store = AdapterStore(self.decoder, setup.adapters)
        for name, folder in self.adapters.items():
            store.load(name, folder)
        ahead = AsyncRunner(runner, self.decoder, self.ops.later, drafter) if setup.ahead else None  # type: ignore[attr-defined, arg-type]
        parts = EngineParts(grammars=grammars, adapters=store, async_executor=ahead)
        return Engine(plans, runner, parts=parts)


def run(engine: Engine, requests: list[Request], steps: int = 100_000) -> dict[int, list[int]]:
    """Return the tokens that come in so many steps, or until all have ended."""
    found: dict[int, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        assert engine.submit(request) == []
    while engine.has_work and steps:
        steps -= 1
        events = engine.step()
        if not events:
            time.sleep(0.0005)  # the anteroom may wait for a thread
        for event in events:
            assert event.failure is None
            found[event.id] += event.tokens
    return found


def answers(engine: Engine, requests: list[Request], *, spread: int = 0) -> dict[int, Answer]:
    """Answer all requests: all at once, or `spread` steps apart so that they join a running crowd."""
    events: list[Event] = []
    waiting = list(requests)
    steps = 0
    while waiting or engine.has_work:
        while waiting and (not spread or steps % spread == 0):
            events += engine.submit(waiting.pop(0))
            if spread:
                break
        events += engine.step()
        if steps % 50 == 0:
            check(engine.stack)
        steps += 1
    result = {}
    for request in requests:
        mine = [event for event in events if event.id == request.id]
        assert all(event.failure is None for event in mine), mine
        result[request.id] = Answer(
            tuple(token for event in mine for token in event.tokens),
            tuple(logprob for event in mine for logprob in event.logprobs),
            mine[-1].finish,
            _prompt_logprobs(request, mine),
        )
    return result


def _prompt_logprobs(request: Request, events: list[Event]) -> tuple[PromptLogprob, ...]:
    """Each must have come once, and in order."""
    found: list[PromptLogprob] = []
    start = (request.logits_from or 0) + 1
    for event in events:
        if event.prompt_logprobs:
            assert event.prompt_position == start + len(found), (
                "a prompt logprob was lost or repeated"
            )
            found += event.prompt_logprobs
    return tuple(found)
