"""The property machine: random workloads through the scheduler against a shadow KV and the plain truth.

A run is one seed: a configuration, a stream of requests that share prefixes, and random add / abort / step
/ crash; in a quarter of the runs requests are held to their deadlines and targets. After every plan and
commit the scheduler audits itself; every context position is read from the shadow; at the end each output
must equal what token-by-token generation without any scheduler gives, and the pool must be empty.

The fake model's next token is a hash of the whole prefix. Some requests fail at a set token. Drafts are
proposed by a fake that is right most of the time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pageturner.params import SamplingParams
from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS
from pageturner.policies.scheduler_factory import SchedulerStack
from pageturner.policies.slo_admission import SloAdmission
from pageturner.request import Event, Failure, PromptLogprob, Refused, Request, Resume
from pageturner.scheduler.types import Item, Output, Plan, Result, Sequence, State
from support.schedulers import check, make_stack

from .rules import Rules
from .shadow import MASK, Shadow, chains, mix, root

VOCABULARY = 23
STOP = (0, 1)
Build = Callable[..., SchedulerStack]


def runs(machine: Callable[[int], Any], seeds: range) -> Iterator[Any]:
    """Yield one machine for each seed, when its run is over."""
    for seed in seeds:
        try:
            yield machine(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def rare(totals: Counter[str], forced: dict[str, int], share: float) -> dict[str, int]:
    """Return what happened less often than it must in this share of the runs."""
    return {name: totals[name] for name, least in forced.items() if totals[name] <= least * share}


def next_token(chain: int, index: int = 0) -> int:
    """Drawn by the prefix and by which of several choices it is."""
    return ((chain + 31 * index) * 0xD6E8FEB86659FD93 & MASK) % VOCABULARY


def prompt_logprob(chain: int) -> PromptLogprob:
    """What the fake model says at the position behind which the next prompt token comes."""
    return (-float(chain % 97), chain % 5 + 1, ())


@dataclass(slots=True)
class Truth:
    tokens: list[int]
    finish: str


def truth(request: Request, max_model_len: int, capacity: int, fails_at: int | None) -> Truth:
    """What the request must give: one token after the other, nothing shared, nothing scheduled."""
    params = request.params
    if params.beam_width:
        return searched(request, max_model_len, capacity, fails_at)
    room = max_model_len - len(request.prompt)
    if params.max_tokens is None:
        most = min(room, capacity + 1 - len(request.prompt))
    else:
        most = min(room, params.max_tokens)
    chain = root(request)
    for token in request.prompt:
        chain = mix(chain, token)
    tokens: list[int] = []
    while True:
        if len(tokens) == fails_at:
            return Truth(tokens, "error")
        tokens.append(next_token(chain, request.index))
        chain = mix(chain, tokens[-1])
        if tokens[-1] in params.stop_ids and len(tokens) >= params.min_tokens:
            return Truth(tokens, "stop")
        if len(tokens) == most:
            return Truth(tokens, "length")


def candidates(chain: int) -> list[tuple[int, float]]:
    """Every token and its logprob behind a prefix, the likeliest first. Coarse, so that there are ties."""
    values = [(-((mix(chain, token) >> 9) % 64) / 16.0, token) for token in range(VOCABULARY)]
    return [(token, value) for value, token in sorted(values, key=lambda pair: (-pair[0], pair[1]))]


def searched(request: Request, max_model_len: int, capacity: int, fails_at: int | None) -> Truth:
    """What a beam search must give, by lists of whole sequences: the answer of this choice."""
    params, width, length = request.params, request.params.beam_width, 0
    most = max_model_len - len(request.prompt)
    bound = capacity + 1 - len(request.prompt)
    most = min(most, bound if params.max_tokens is None else params.max_tokens)
    start = root(request)
    for token in request.prompt:
        start = mix(start, token)
    beams: list[tuple[float, list[int], int]] = [(0.0, [], start)]
    ended: list[tuple[float, list[int], str]] = []
    while beams:
        if length == fails_at:
            return Truth([], "error")
        length += 1
        found = [
            (score + value, place, [*tokens, token], mix(chain, token))
            for place, (score, tokens, chain) in enumerate(beams)
            for token, value in candidates(chain)
        ]
        found.sort(key=lambda one: (-one[0], one[1], one[2][-1]))
        beams = []
        for place, (score, _, tokens, chain) in enumerate(
            found[: width * (1 + max(1, len(params.stop_ids)))]
        ):
            stops = tokens[-1] in params.stop_ids and length >= params.min_tokens
            if not stops and length < most:
                beams.append((score, tokens, chain))
            elif place < width:
                finish = "stop" if stops else "length"
                ended.append((score / length**params.length_penalty, tokens, finish))
        ended.sort(key=lambda one: -one[0])
        beams, ended = beams[:width], ended[:width]
        if beams and len(ended) == width:
            at = most if params.early_stopping == "never" and params.length_penalty > 0 else length
            hopeless = beams[0][0] / at**params.length_penalty <= ended[-1][0]
            if params.early_stopping is True or hopeless:
                break
    return Truth(*ended[request.index][1:])


@dataclass(slots=True)
class Stream:
    """What a client holds: its request, the tokens so far, and how it ended."""

    request: Request
    truth: Truth
    tokens: list[int] = field(default_factory=list)
    scored: list[PromptLogprob] = field(default_factory=list)
    finish: str | None = None
    cached: int = 0
    max_computed_tokens: int = (
        0  # tokens whose KV this engine, or one before it, once computed or found
    )

    def take(self, event: Event) -> None:
        assert self.finish is None, f"request {event.id}: an event after its end"
        assert event.position == len(self.request.prompt) + len(self.tokens), (
            "a token was lost or repeated"
        )
        self.take_scored(event)
        self.tokens += event.tokens
        self.finish = event.finish
        assert (event.failure is not None) == (event.finish == "error")
        assert self.tokens == self.truth.tokens[: len(self.tokens)], (
            f"request {event.id}: another answer"
        )
        assert self.cached <= event.cached < len(self.request.prompt), "hits are not forgotten"
        self.cached = event.cached

    def take_scored(self, event: Event) -> None:
        """Prompt logprobs come once each, in order, before the first token."""
        request = self.request
        if event.prompt_logprobs:
            assert event.prompt_position == self.next_scored + 1, (
                "a prompt logprob was lost or repeated"
            )
            self.scored += event.prompt_logprobs
            known = chains(request, request.prompt)[request.logits_from : self.next_scored]
            assert self.scored == [prompt_logprob(chain) for chain in known]
        if event.tokens and request.logits_from is not None:
            assert self.next_scored == len(request.prompt) - 1, (
                "a token before the end of the prompt"
            )

    @property
    def next_scored(self) -> int:
        return (self.request.logits_from or 0) + len(self.scored)

    def resumed(self) -> Request:
        """As the owner of the streams sends it to a new engine. `resume` also where there is no token yet:
        who was let in once is not turned away for a full queue."""
        start = None if self.request.logits_from is None else self.next_scored
        self.cached, self.max_computed_tokens = 0, len(self.request.prompt) + len(self.tokens) - 1
        resume = Resume(self.request.index, tuple(self.tokens))
        return replace(self.request, resume=(resume,), logits_from=start)


def random_config(rng: random.Random) -> dict[str, Any]:
    size = rng.choice((1, 2, 3, 4, 8, 16))
    tokens = rng.choice((30, 45, 45, 60, 100, 400))
    window = rng.choice((0, 0, 0, 1, 3, 8, 13))
    if window and rng.random() < 0.5:
        tokens = 2000  # as if nothing but the window mattered
    return {
        "num_blocks": -(-tokens // size),
        "window": window,
        "block_size": size,
        "prefix_caching": rng.random() < 0.7,
        "policy": rng.choice(("chunked", "chunked", *POLICIES)),
        "order": rng.choice(tuple(ORDERS)),
        "ageing": rng.choice((0.0, 0.03, 0.2, 30.0)),
        "admission": rng.choice(("none", "none", "none", "full", "predicted")),
        "max_num_seqs": rng.choice((1, 3, 9, 9, 64, 64)),
        "token_budget": rng.choice((0, 0, 1, 3, 7, 16, 64)),
        "max_model_len": rng.choice((24, 40, 40, 64)),
        "max_queue": rng.choice((3, 12, 100)),
        "static_batch": rng.choice((1, 2, 5)),
        "window_ms": rng.choice((0.0, 30.0, 100.0)),
        "static_patience": rng.choice((0.05, 10.0)),
        "served_ratio": rng.choice((0.0, 0.5, 1.2, 9.0)),
        "served_steps": rng.choice((1, 3, 20)),
        "tpot_ms": rng.choice((1.0, 8.0, 50.0)),
        "knee_tokens": rng.choice((0, 2, 9, 1000)),
        "knee_seqs": rng.choice((0, 1, 4, 1000)),
        "output_weight": rng.choice((0.0, 1.0, 2.0, 7.5)),
    }


class Machine:
    """One run. AssertionError at the first property that does not hold."""

    def __init__(
        self,
        seed: int,
        build: Build = make_stack,
        config: dict[str, Any] | None = None,
        load: str | None = None,
        targets: Callable[[SchedulerStack], SloAdmission] = SloAdmission,
    ) -> None:
        self.rng = random.Random(seed)
        self.build, self.door = build, targets
        self.config = random_config(self.rng)
        # crowded: short prompts, long answers, so that memory runs out while decoding; long: while prefilling
        self.load = load or self.rng.choices(("mixed", "crowded", "long"), (5, 4, 2))[0]
        if self.load == "long":
            self.config |= {
                "block_size": 1,
                "num_blocks": 60,
                "max_model_len": 60,
                "max_num_seqs": 3,
            }
            self.config |= {
                "token_budget": self.rng.randint(3, 6),
                "policy": "chunked",
                "admission": "none",
            }
        self.config |= config or {}
        if self.config["window"]:
            least = -(-(self.config["window"] - 1) // self.config["block_size"]) + 1
            self.config["sliding"] = least + self.rng.choice((0, 1, 3, 10, 40))
        recurrent = random.Random(f"states {seed}")
        if not self.config["window"] and recurrent.random() < 0.4:
            tokens = self.config["num_blocks"] * self.config["block_size"]
            size = recurrent.choice((1, 1, 2, 3, 4))  # so that states lie where blocks end
            self.config |= {"block_size": size, "num_blocks": -(-tokens // size)}
            self.config["prefix_caching"] = recurrent.random() < 0.9
            self.config |= {"chunk": recurrent.choice((1, 2, 3, 4, 8))}
            self.config |= {name: recurrent.choice((8, 9, 20, 150)) for name in ("states", "tails")}
            self.config["snapshot_interval"] = recurrent.choice((1, 1, 5, 2048))
        self.dice = random.Random(f"prices {seed}")
        self.config["context_price"] = self.dice.choice((0.0, 0.0, 20.0, 300.0))
        beside = random.Random(f"beside {seed}")
        self.config["max_prefill_beside_decode"] = beside.choice((0, 0, 1, 3, 8))
        # share of prompts whose rows have a price
        self.dear = self.dice.choice((0.0, 0.0, 0.2, 0.7))
        self.capacity = self.config["num_blocks"] * self.config["block_size"]
        # share of prompts; books are kept without them
        self.searching = self.rng.choice((0.0, 0.0, 0.3))
        self.drafting = self.rng.choice((0, 0, 1, 4))
        self.pinning = (
            not self.config["window"] and self.config["prefix_caching"] and self.rng.random() < 0.5
        )
        self.adding = self.rng.choice((0.2, 0.5, 0.9))
        self.punctual = random.Random(f"punctual {seed}").random() < 0.25
        self.prefixes = [[self.rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(3)]
        self.streams: dict[int, Stream] = {}
        self.fails_at: dict[int, int | None] = {}
        self.now = 0.0
        self.ids = 0
        self.steps = 0
        self.totals: dict[str, float] = {"given_back": 0}
        self.lost = 0  # requests that were aborted, or begun again, or searches: whose work is not summed up
        self.fresh = self.again = (
            0  # prompt tokens computed for the first time; tokens computed once more
        )
        self._boot()

    def _boot(self) -> None:
        self.stack = self.build(**self.config)
        self.scheduler, self.pool = self.stack.scheduler, self.stack.pool
        self.shadow = Shadow(self.pool, self.rng)
        self.rules = Rules(self.config, self.peak, self.stack)
        self.targets = self.door(self.stack)

    def run(self, requests: int = 16) -> Machine:
        if self.pinning:
            self.preload()
        while self.ids < requests:
            roll = self.rng.random()
            if roll < 0.02:
                self.abort()
            elif roll < 0.03:
                self.crash()
            elif roll < 0.04:
                self.unpin()
            elif roll < self.adding:
                self.add()
            else:
                self.step()
        self.drain()
        return self

    # -- what clients do -------------------------------------------------------------------------------------
    def random_request(self) -> Request:
        rng = self.rng
        prefix = rng.choice(self.prefixes[: 1 if self.pinning else 3])[
            : rng.choice((rng.randrange(34), rng.randrange(8)))
        ]
        if self.load == "crowded":
            prefix = prefix[:4]
        prompt = prefix + [
            rng.randrange(VOCABULARY) for _ in range(rng.randrange(0 if prefix else 1, 6))
        ]
        return Request(
            id=self.ids,
            prompt=tuple(prompt),
            params=SamplingParams(
                # without max_tokens memory decides, and of that pins take some
                max_tokens=rng.choice(
                    (1, 3, 12, 20, 30, None) if self.load == "mixed" else (20, 30, None)
                )
                or (25 if self.pinning else None),
                min_tokens=rng.choice((0, 0, 3)),
                stop_ids=STOP if rng.random() < (0.5 if self.load == "mixed" else 0.1) else (),
            ),
            arrival=self.now,
            # long prompts that outrank what decodes: who gives way to them, and who must not
            priority=int(len(prompt) < 12) if self.load == "long" else rng.choice((0, 0, 1)),
            deadline=self.now + rng.uniform(0, 0.5) if rng.random() < 0.5 else None,
            ttft_target=rng.uniform(0, 0.2) if rng.random() < 0.5 else None,
            tenant=rng.choice(("", "", "red", "blue")),
            salt=rng.choice(("", "", "b", "b" if self.pinning else "")),
            adapter=rng.choice(("", "", "", "a")),
            logits_from=rng.randrange(len(prompt)) if rng.random() < 0.3 else None,
            pin=self.pinning and rng.random() < 0.3,
        )

    def add(self) -> None:
        """A request, or several for choices of one prompt; those of a search fail together."""
        request, choices, fails_at = (
            self.random_request(),
            self.rng.choice((1, 1, 2, 4)),
            self.failure(),
        )
        if self.rng.random() < self.searching:
            request, choices = self.search(request), min(choices, 3)
        if self.dice.random() < self.dear:
            request = replace(request, row_price=self.dice.choice((0.3, 1.0, 5.0, 40.0)))
        self.add_one(request, fails_at)
        for index in range(1, choices):
            fails_at = fails_at if request.params.beam_width else self.failure()
            self.add_one(replace(request, id=self.ids, index=index, parent=request.id), fails_at)

    def preload(self) -> None:
        """A prefix for everybody, there before anybody comes."""
        prefix = tuple(self.prefixes[0][: self.rng.randrange(1, 24)])
        self.add_one(
            Request(self.ids, prefix, SamplingParams(max_tokens=1), pin=True), self.failure()
        )
        while self.scheduler.has_work:
            self.step()

    def failure(self) -> int | None:
        return self.rng.randrange(6) if self.rng.random() < 0.1 else None

    def search(self, request: Request) -> Request:
        """The same request, searching."""
        params = replace(
            request.params,
            beam_width=self.rng.choice((3, 3, 4)),
            length_penalty=self.rng.choice((0.0, 0.6, 1.0, 1.4)),
            early_stopping=self.rng.choice((False, True, "never")),
        )
        return replace(request, params=params, pin=False, logits_from=None)

    def add_one(self, request: Request, fails_at: int | None) -> None:
        self.ids += 1
        try:
            self.hand_over(request)
        except Refused as refused:
            self.check_refusal(request, refused)
        else:
            share = self.unpinned_share(max(1, request.params.beam_width))
            expected = truth(request, self.config["max_model_len"], share, fails_at)
            self.streams[request.id] = Stream(request, expected)
            self.fails_at[request.id] = fails_at

    def hand_over(self, request: Request) -> None:
        if self.punctual:
            self.targets.add(request, self.now)
        else:
            self.scheduler.add(request)

    def check_refusal(self, request: Request, refused: Refused) -> None:
        longest, code = self.config["max_model_len"], refused.code
        if code == "deadline_exceeded":
            assert request.deadline is not None
            assert request.deadline <= self.now
        elif code in ("ttft_target_unreachable", "deadline_unreachable"):
            assert request.ttft_target is not None or request.deadline is not None
            assert refused.retry_after > 0, "come again at once, to be refused again"
            assert self.scheduler.has_work, "an idle engine turned somebody away"
            self.totals["refused_late"] = self.totals.get("refused_late", 0) + 1
        elif code == "queue_full":
            assert self.scheduler.stats()["waiting"] >= self.config["max_queue"]
        elif code == "prompt_too_long":
            assert len(request.prompt) >= longest
        elif code == "too_many_beams":
            assert request.params.beam_width > self.scheduler.slots
        elif code == "pin_too_large":
            assert request.pin
        else:
            assert code == "kv_too_small"
            most = min(longest, len(request.prompt) + (request.params.max_tokens or 1))
            ways = max(1, request.params.beam_width)
            assert most - 1 > self.pool.share(ways)

    def abort(self) -> None:
        alive = [id for id, stream in self.streams.items() if stream.finish is None]
        if alive:
            id = self.rng.choice(alive)
            self.lost += 1
            assert self.scheduler.abort(id)
            assert not self.scheduler.abort(id)
            del self.streams[id]

    def unpin(self, *, everything: bool = False) -> None:
        """Let one pin go, or all."""
        pins = [seq.request.id for seq in self.stack.pins.sequences]
        for id in pins if everything else self.rng.sample(pins, min(len(pins), 1)):
            self.totals["unpinned"] = self.totals.get("unpinned", 0) + 1
            assert self.stack.pins.drop(id)
            assert not self.stack.pins.drop(id)
        check(self.stack)

    def crash(self) -> None:
        """The engine dies with everything in it; its owner submits what is unfinished once more."""
        self._sum_up()
        self.lost += 1
        self._boot()
        for stream in self.streams.values():
            if stream.finish is None:
                try:
                    self.hand_over(replace(stream.resumed(), pin=False))
                except Refused as refused:
                    if refused.code != "deadline_exceeded":
                        raise  # who was taken once is taken again
                    self.check_refusal(stream.request, refused)
                    stream.finish = "expired"

    def expire(self) -> None:
        """Whose deadline has passed ends, nobody else, and leaves nothing behind."""
        for event in self.targets.expired(self.now):
            stream = self.streams[event.id]
            assert event.failure is not None
            assert (event.failure.code, event.finish, event.tokens) == (
                "deadline_exceeded",
                "error",
                (),
            )
            assert event.position == len(stream.request.prompt) + len(stream.tokens)
            assert (stream.request.deadline or 0.0) <= self.now, "ended before its deadline"
            stream.finish = "expired"
            self.lost += 1
            self.totals["expired"] = self.totals.get("expired", 0) + 1
        check(self.stack)
        for id, stream in self.streams.items():
            if stream.finish is None and stream.request.deadline is not None:
                assert stream.request.deadline > self.now, f"request {id} is past its deadline"

    # -- what the engine does --------------------------------------------------------------------------------
    def step(self) -> bool:
        """One plan and its commit. False if there was nothing to run."""
        plan = self.plan()
        if not plan.items:
            return False
        result = self.execute(plan)
        if self.rng.random() < 0.1:
            self.abort()
            check(self.stack)
        if self.rng.random() < 0.1:
            assert self.execute(plan).outputs == result.outputs, (
                "running a plan again gave something else"
            )
        ignored = {item.sequence.request.id for item in plan.items} - set(self.streams)
        spans = [(item.sequence, item.sequence.computed, item.n) for item in plan.items]
        self.let_time_pass(plan)
        self.take(self.scheduler.commit(plan, result, self.now), ignored, spans)
        self.steps += 1
        return True

    def plan(self) -> Plan:
        """A plan as any engine makes it, and what must hold of it."""
        self.now += 0.01
        if self.punctual:
            self.expire()
        before, queue = list(self.scheduler.running), list(self.scheduler.waiting)
        self.rules.prepare(queue, self.now)
        plan = self.scheduler.plan(self.now)
        self.audit(plan)
        self.rules.audit(plan, before, queue, self.now)
        self.audit_public([item.sequence for item in plan.items if item.sequence not in before])
        if plan.preempted:
            self.audit_preemption(plan, before)
        if not plan.items:
            if self.scheduler.has_work:
                assert (plan.wake or 0.0) > self.now, "work, but no plan and no wake"
                self.now = min(plan.wake, self.now + self.rng.choice((0.01, 99.0)))
            assert not any((plan.copies, plan.preempted, plan.ballast))
        return plan

    def let_time_pass(self, plan: Plan) -> None:
        """The time that a step takes."""
        self.now += self.rng.choice((0.0, 0.0003)) * plan.tokens
        self.rules.computed(plan, self.now)

    def take(
        self, events: list[Event], ignored: set[int], spans: list[tuple[Sequence, int, int]]
    ) -> None:
        """Take the events of a commit. spans: what was computed of each sequence, and how many tokens."""
        self.targets.saw(events, self.now)
        for event in events:
            assert event.id not in ignored, "an event for an aborted request"
            self.streams[event.id].take(event)
        for seq, begin, n in spans:
            if seq.request.id not in ignored:
                self.count_work(self.streams[seq.request.id], seq, begin, begin + n)
        check(self.stack)
        self.shadow.poison()
        self.totals["given_back"] += sum(seq.sliding.released for seq in self.scheduler.running)

    def count_work(self, stream: Stream, seq: Sequence, begin: int, end: int) -> None:
        """What a step computed of a sequence, for the first time or once more, by the machine's own books.
        Those know nothing of the sequences of a search, which take turns."""
        if seq.request.params.beam_width:
            self.lost += 1
        known = max(begin, stream.max_computed_tokens)
        self.fresh += max(0, min(end, seq.prompt_len) - known)
        if stream.finish != "error":
            self.again += min(end, known) - begin
        stream.max_computed_tokens = max(known, seq.computed)

    def audit_work(self) -> None:
        """Every prompt token was computed, or a hit, or neither because its request went."""
        stats = self.scheduler.stats()
        if not self.lost:
            assert self.fresh == stats["prompt_tokens"] - stats["cached_tokens"], (
                "hits that were none"
            )
            assert self.again == stats["recomputed_tokens"], (
                "another sum of what was computed once more"
            )
            assert sum(stream.cached for stream in self.streams.values()) == stats["cached_tokens"]

    def audit(self, plan: Plan) -> None:
        check(self.stack)
        self.shadow.poison()
        if self.config["policy"] in ("chunked", "adaptive_chunk") and self.config["token_budget"]:
            assert plan.tokens <= self.config["token_budget"], "over the budget"
        sequences = [item.sequence for item in plan.items]
        assert len(set(sequences)) == len(sequences), "a sequence is twice in a plan"
        assert len(sequences) <= self.config["max_num_seqs"]
        for item in plan.items:
            assert item.sequence.state is State.RUNNING
            assert 1 <= item.n <= len(item.sequence.tokens) + len(item.sequence.draft) - item.start
            assert item.start + item.n <= self.peak(item.sequence), "past the end of a sequence"
        if self.config["admission"] == "full" or self.config["policy"] in (
            "static",
            "window",
            "orca",
        ):
            assert not plan.preempted, "preempted in spite of a reservation"

    def audit_public(self, admitted: list[Sequence]) -> None:
        """Whoever has a salt begins with blocks of others only where these are pinned and have none, or as
        the choice does whose prompt it shares."""
        pinned = [pin for pin in self.stack.pins.sequences if not pin.request.salt]
        for seq in admitted:
            length = seq.public * self.config["block_size"]
            assert not (length and not seq.request.salt)
            alike = [pin for pin in pinned if pin.tokens[:length] == seq.tokens[:length]]
            theirs = {block for pin in alike for block in pin.blocks}
            theirs |= set(seq.source.blocks[: seq.source.public]) if seq.source else set()
            assert set(seq.blocks[: seq.public]) <= theirs, "took what is not everybody's"
            self.totals["public"] = self.totals.get("public", 0) + seq.public

    def audit_preemption(self, plan: Plan, before: list[Sequence]) -> None:
        granted = {item.sequence for item in plan.items}
        victims = [seq for seq in before if seq.request.id in plan.preempted]
        assert {seq.request.id for seq in victims} == set(plan.preempted)
        mates = {seq.request.id for seq in granted}
        assert granted <= set(before), "admitted while preempting"
        assert not granted & set(victims), "preempted and granted"
        assert before[0] not in victims, "the smallest rank was preempted"
        for seq in before[before.index(victims[0]) :]:
            assert seq.request.id in mates or seq in victims, "a larger rank was spared"

    def peak(self, seq: Sequence) -> int:
        """Most positions whose KV the sequence may ever need."""
        most, ways = self.config["max_model_len"], max(1, seq.request.params.beam_width)
        if seq.request.params.max_tokens is not None:
            most = min(most, seq.prompt_len + seq.request.params.max_tokens)
        return min(most - 1, self.unpinned_share(ways))

    def unpinned_share(self, ways: int) -> int:
        """What each of so many sequences can hold when nothing is pinned."""
        pinned, self.pool.pinned = self.pool.pinned, 0
        share = self.pool.share(ways)
        self.pool.pinned = pinned
        return share

    def execute(self, plan: Plan) -> Result:
        """All copies, then all writes, then all reads, as a layer does."""
        self.shadow.copy(*plan.copies)
        for item in plan.items:
            self.shadow.write(item.sequence, item.n)
        return Result([self.output(item) for item in plan.items])

    def output(self, item: Item) -> Output:
        seq = item.sequence
        read = self.shadow.read(seq, item.n)
        scored = [prompt_logprob(read[position - seq.computed]) for position in item.scored]
        if not item.wants_logits:
            return Output(prompt_logprobs=scored)
        fails_at = self.fails_at[seq.request.id]
        if seq.generated == fails_at:
            return Output(failure=Failure("fake", "told to fail"))
        start = len(seq.tokens) - seq.computed - 1
        if seq.request.params.beam_width:
            return Output(candidates=candidates(read[start]))
        tokens: list[int] = []
        for chain, drafted in zip(read[start:], [*seq.draft, None], strict=False):
            tokens.append(next_token(chain, seq.index))
            if tokens[-1] != drafted or seq.generated + len(tokens) == fails_at:
                break
        draft = self.propose_behind(seq, [*seq.tokens, *tokens])
        return Output(tokens, draft=draft, prompt_logprobs=scored)

    def propose_behind(self, seq: Sequence, tokens: list[int]) -> list[int]:
        """Deterministic, so that running a plan twice gives the same."""
        chain = chains(seq.request, tokens)[-1]
        draft: list[int] = []
        for _ in range(self.drafting):
            wrong = chain % 5 == 0
            draft.append(next_token(chain + wrong, seq.index))
            chain = mix(chain, draft[-1])
        return draft

    # -- the end ---------------------------------------------------------------------------------------------
    def drain_bound(self) -> int:
        """Most steps until everything is done, when nothing is added any more.

        Every step generates a token, or computes at least one token of the smallest running rank, which is
        never preempted. So: all tokens still to come, and for each sequence its own length once.
        """
        alive = [stream for stream in self.streams.values() if stream.finish is None]
        longest = self.config["max_model_len"]
        return sum(
            max(1, stream.request.params.beam_width)
            * (2 * longest - len(stream.request.prompt) - len(stream.tokens))
            for stream in alive
        )

    def drain(self) -> None:
        bound, steps = self.drain_bound(), 0
        while self.scheduler.has_work:
            steps += self.step()
            assert steps <= bound, f"not drained within {bound} steps"
        for id, stream in self.streams.items():
            if stream.finish == "expired":
                continue
            assert stream.tokens == stream.truth.tokens, f"request {id}: another answer"
            assert stream.finish == stream.truth.finish, f"request {id}: another end"
        self.audit_work()
        self.unpin(everything=True)
        stats = self.scheduler.stats()
        assert stats["running"] == stats["waiting"] == stats["blocks_used"] == 0
        assert stats.get("recent_blocks_used", 0) == 0
        check(self.stack)
        self._sum_up()

    def _sum_up(self) -> None:
        for name, value in self.scheduler.stats().items():
            self.totals[name] = self.totals.get(name, 0) + value
