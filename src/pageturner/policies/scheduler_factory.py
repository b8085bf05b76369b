"""The factory of a scheduler: from settings to a scheduler and all that plugs into it.

Owns the assembly. Must not know what any part of it does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pageturner.policies.background import BackgroundWork
from pageturner.policies.backlog import backlog
from pageturner.policies.batching import POLICIES
from pageturner.policies.beam_search import BeamSearch
from pageturner.policies.kept_sessions import OWN_HINT, KeptSessions
from pageturner.policies.length_predictor import LengthPredictor
from pageturner.policies.orders import ORDERS, Context
from pageturner.policies.pinned_prefixes import PinnedPrefixes
from pageturner.policies.policy_stack import PolicyStack
from pageturner.policies.programs import Programs
from pageturner.policies.reserves import RESERVES
from pageturner.policies.scheduler_config import CHANGEABLE, SchedulerConfig
from pageturner.policies.session_starts import SessionStarts
from pageturner.policies.single_sequence import SingleSequence
from pageturner.policies.snapshots import Snapshots
from pageturner.policies.step_time import StepTimeModel
from pageturner.policies.work_pricing import WorkPricing
from pageturner.request import Refused, Request
from pageturner.scheduler.batching import Policy
from pageturner.scheduler.blocks import CHUNK, BlockPool
from pageturner.scheduler.group import Group
from pageturner.scheduler.listener import Listener
from pageturner.scheduler.order import Order
from pageturner.scheduler.scheduler import Scheduler
from pageturner.telemetry.counters import Counters
from pageturner.telemetry.kv_usage import kv_usage, pool_stats


@dataclass(slots=True)
class SchedulerStack:
    """A scheduler with its pool, and what plugs into it, whichever policy and order it has. config:
    as it was last set."""

    config: SchedulerConfig
    scheduler: Scheduler = field(init=False)
    pool: BlockPool
    pins: PinnedPrefixes
    sessions: KeptSessions
    predictor: LengthPredictor
    step_times: StepTimeModel
    background: BackgroundWork
    rules: PolicyStack
    starts: SessionStarts

    def reconfigure(self, wanted: SchedulerConfig, max_beam_width: int) -> bool:
        """Go on with token budget, most sequences, policy and order of `wanted`; the other settings
        stay. False if that has to wait: ask again after the next commit. ValueError for what does
        not exist.

        max_beam_width  sequences of the widest search that is still taken, see
                        Scheduler.reconfigure
        """
        check_names(wanted)
        if wanted.max_num_seqs < 1 or wanted.max_num_batched_tokens < -1:
            raise ValueError(f"max_num_seqs is at least 1, max_num_batched_tokens -1, not {wanted}")
        now = self.config
        config = replace(now, **{name: getattr(wanted, name) for name in CHANGEABLE})
        if config.max_num_batched_tokens < 0:  # nobody set it: it stays as the machine has it
            config = replace(config, max_num_batched_tokens=now.token_budget)
        done = self.scheduler.reconfigure(
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            policy=self.policy(config) if config.policy != now.policy else None,
            order=self.order(config) if config.order != now.order else None,
            max_beam_width=max_beam_width,
        )
        self.config = config if done else now
        return done

    def policy(self, config: SchedulerConfig) -> Policy:
        return self.rules.wrap_policy(POLICIES[config.policy](config, self.step_times))

    def order(self, config: SchedulerConfig) -> Order:
        programs = Programs()
        self.starts.idle_joins = config.order == "programs"
        self.starts.wait = config.session_wait
        self.sessions.hint_of = OWN_HINT
        if self.starts.idle_joins:
            self.sessions.hint_of = programs.hint_of
            self.starts.wait = min(config.session_wait, config.ageing)
        context = Context(
            ageing=config.ageing,
            output_weight=config.output_weight,
            cached=self.pool.attachable,
            predictor=self.predictor,
            step_times=self.step_times,
            programs=programs,
        )
        return self.background.wrap_order(ORDERS[config.order](context))


def check_names(config: SchedulerConfig) -> None:
    """ValueError for a policy, an order or an admission rule that does not exist."""
    kinds = (
        ("policy", config.policy, POLICIES),
        ("order", config.order, ORDERS),
        ("admission", config.admission, RESERVES),
    )
    for kind, name, names in kinds:
        if name not in names:
            raise ValueError(f"unknown {kind} {name!r}: one of {', '.join(names)}")


def make_group(request: Request) -> Group:
    """The group for a request. Refused('n_unsupported') for what no group can do: choices of one
    prompt are requests of their own, with the first one as their parent."""
    if request.params.n != 1 or len(request.resume) > 1:
        raise Refused(
            "n_unsupported", "the engine takes one choice per request: send one request for each"
        )
    return BeamSearch(request) if request.params.beam_width else SingleSequence(request)


def make_scheduler(
    config: SchedulerConfig,
    *,
    num_blocks: int,
    max_model_len: int = 8192,
    window: int = 0,
    sliding: int = 0,
    states: int = 0,
    tails: int = 0,
    chunk: int = CHUNK,
    model: str = "",
    listeners: tuple[Listener, ...] = (),
) -> SchedulerStack:
    """A scheduler over so many blocks. ValueError for a name or a size that does not exist.

    window, sliding  positions that a query sees in sliding blocks, and how many of these there are
    states, tails    slots and blocks of recurrent layers, which have a state every `chunk` positions
    model            names the weights, for the keys of cached blocks
    listeners        who else wants to be told
    """
    check_names(config)
    pool = BlockPool(
        num_blocks,
        config.block_size,
        prefix_caching=config.enable_prefix_caching,
        window=window,
        sliding=sliding,
        states=states,
        tails=tails,
        chunk=chunk,
        model=model,
    )
    predictor, step_times = LengthPredictor(), StepTimeModel()
    pins, counters, pricing = PinnedPrefixes(pool), Counters(), WorkPricing(config.context_price)
    background, sessions = BackgroundWork(), KeptSessions(pool, config)
    if states:
        Snapshots(pool, config.snapshot_interval).keep_for(sessions.claims, sessions.give_up)
    starts = SessionStarts(sessions)
    rules = PolicyStack(starts, background, pricing)
    stack = SchedulerStack(
        config, pool, pins, sessions, predictor, step_times, background, rules, starts
    )

    def kv_stats() -> dict[str, float]:
        """Return what all owners hold, and what servers without pages would reserve for those that
        run."""
        usage = kv_usage([*scheduler.running, *pins.sequences], pool.full, pool.block_size)
        return {**usage, "kv_contiguous": len(scheduler.running) * max_model_len}

    def backlog_stats() -> dict[str, float]:
        return backlog([*scheduler.running, *scheduler.waiting], predictor)

    scheduler = Scheduler(
        pool,
        policy=stack.policy(config),
        order=stack.order(config),
        reserve=RESERVES[config.admission](predictor),
        make_group=make_group,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        max_model_len=max_model_len,
        max_queue=config.max_queue,
        listeners=(
            Listener(stats=lambda: pool_stats(pool)),
            Listener(stats=kv_stats),
            Listener(stats=backlog_stats),
            step_times.listener,
            predictor.listener,
            pins.listener,
            counters.listener,
            pricing.listener,
            background.listener,
            *listeners,
            sessions.listener,  # last: a request that another one refuses opens no session
        ),
    )
    stack.scheduler = scheduler
    return stack
