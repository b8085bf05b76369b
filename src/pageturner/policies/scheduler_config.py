"""SchedulerConfig: the settings of a scheduler and of the policies and orders that plug into it.

The one source of these: `EngineConfig` has them by inheritance, the flags, the documentation, the
simulator and `tune` read them from the fields. Must not know what a setting does, nor which
policies there are.
"""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.option import option

# what can be changed while an engine runs
CHANGEABLE = ("max_num_batched_tokens", "max_num_seqs", "policy", "order")
MAX_TOKENS = 512  # of a step whose budget nobody set


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Settings of how an engine schedules and keeps KV."""

    max_num_seqs: int = option(64, "most sequences running at once", least=1)
    max_num_batched_tokens: int = option(
        -1,
        "most tokens in one step; 0: no limit; below 0: what this machine computes in 0.08 s, at most 512"
        " (2,048 of a mixture of experts)",
        least=-1,
    )
    max_prefill_beside_decode: int = option(
        -1,
        "most tokens of prompts in a step of chunked in which others decode; 0: what the budget leaves; below"
        " 0: what this machine computes in 0.08 s, at least 32, unless a budget is given",
        least=-1,
    )
    decode_wait_ms: float = option(
        0.0,
        "most milliseconds by which prompts lengthen a step in which others decode, as this"
        " machine computes, but 16 tokens of them; 0: as max_prefill_beside_decode says",
        least=0,
    )
    max_queue: int = option(1024, "most requests waiting; one more is answered 429", least=0)
    block_size: int = option(16, "tokens in one KV block, 1 to 256", least=1, most=256)
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of equal prefixes")
    snapshot_interval: int = option(
        2048,
        "tokens between the states of recurrent layers that are kept of a prompt, beside those at its end"
        " and where it parts from others",
        least=1,
    )
    policy: str = option(
        "chunked",
        "batching policy: who gets how many tokens in a step",
    )
    order: str = option("fcfs", "queue order: which waiting request is admitted first")
    ageing: float = option(
        30.0, "seconds after which no later request may overtake a waiting one", least=0
    )
    static_batch: int = option(16, "requests in a batch of the policies static and window", least=1)
    static_patience: float = option(10.0, "seconds that static waits for a full batch", least=0)
    window_ms: float = option(100.0, "milliseconds that window waits for a full batch", least=0)
    served_ratio: float = option(
        1.2, "served_ratio prefills when waiting / running exceeds this", least=0
    )
    served_steps: int = option(
        20,
        "served_ratio prefills after this many steps without prefill, whatever the ratio",
        least=1,
    )
    tpot_ms: float = option(
        50.0, "target of adaptive_chunk for the time of a step, in milliseconds", least=0.001
    )
    knee_tokens: int = option(
        0,
        "first token budget of adaptive_chunk; 0: what this machine computes in --tpot-ms",
        least=0,
    )
    knee_seqs: int = option(
        0,
        "first number of running sequences of adaptive_chunk; 0: what this machine decodes in --tpot-ms",
        least=0,
    )
    output_weight: float = option(
        2.0,
        "cost of a generated token in prompt tokens, for the orders fair, sjf and adaptive",
        least=0,
    )
    context_price: float = option(
        -1.0,
        "budget that a prompt token takes in addition for each thousand tokens before it while others decode;"
        " below 0: by the cost of the model's attention",
        least=-1,
    )
    admission: str = option("none", "KV memory reserved when a request is admitted")
    max_sessions: int = option(
        1024, "most sessions whose KV is kept, divided equally among tenants", least=1
    )
    max_session_share: float = option(
        0.8,
        "share of the KV memory, 0 to 1, for sessions, divided equally among tenants",
        least=0,
        most=1,
    )
    session_keep: float = option(
        60.0, "most seconds that the KV of a session is kept after a turn", least=0
    )
    session_wait: float = option(
        60.0,
        "most seconds that a new session waits for room beside the others; 0: it does not wait",
        least=0,
    )

    @property
    def token_budget(self) -> int:
        """The most tokens of one step; 0: no limit. MAX_TOKENS where that was left to a machine
        that nobody asked."""
        return MAX_TOKENS if self.max_num_batched_tokens < 0 else self.max_num_batched_tokens

    @property
    def slots(self) -> int:
        """Most sequences that run at once: a token budget below max_num_seqs lowers it."""
        return min(self.max_num_seqs, self.token_budget or self.max_num_seqs)
