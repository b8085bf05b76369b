"""The policy stack: a batching policy, and around it the rules that hold whatever the policy is.

From the outside in:

    session starts   turns that begin a session and stand aside are not shown to anybody
                     (session_starts.py)
    background       background requests are asked for behind all others (background.py)
    work pricing     what is asked for is charged with what it costs beside its tokens
                     (work_pricing.py)

Owns this order, and the lists of the View: the rules say which sequences come later or not at all,
and only this file changes the lists. Must not know why a rule decides as it does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pageturner.policies.background import BackgroundWork, background_tokens, in_background
from pageturner.policies.session_starts import SessionStarts
from pageturner.policies.work_pricing import WorkPricing
from pageturner.scheduler.batching import Asks, Policy, View, WaitCause, chunked
from pageturner.scheduler.types import Sequence, State

_BACKGROUND_POLICY = Policy(chunked, bounded=True)


class PolicyStack:
    """The rules of one scheduler, around whichever policy it has."""

    def __init__(
        self, starts: SessionStarts, background: BackgroundWork, pricing: WorkPricing
    ) -> None:
        self._starts, self._background, self._pricing = starts, background, pricing

    def wrap_policy(self, policy: Policy) -> Policy:
        """Return the same policy inside all rules."""

        def asks(v: View) -> Asks:
            if held := self._starts.held(v):
                v.waiting = [seq for seq in v.waiting if seq not in held]
            if self._background.present:
                return self._with_background(policy, v)
            return self._priced(policy, v)

        return replace(policy, asks=asks)

    def _with_background(self, policy: Policy, v: View) -> Asks:
        lists = v.decoding, v.prefilling, v.waiting
        decoding, prefilling, waiting = (list(filter(in_background, one)) for one in lists)
        v.decoding, v.prefilling, v.waiting = map(_foreground, lists)
        budget = v.token_budget_left
        joining, prompts = v.waiting, bool(v.prefilling)
        yield from self._priced(policy, v)
        waits = any(seq.state is State.WAITING for seq in joining)
        prompts = prompts or any(seq.state is State.RUNNING for seq in joining)
        refused = v.refused
        if awaited := _awaited(v, (*decoding, *prefilling)):
            yield awaited, awaited.pending
        prompts = prompts or (waits and v.granted > 0)
        v.limit(background_tokens(budget, v.granted, prompts=prompts))
        v.decoding, v.prefilling, v.waiting = decoding, prefilling, [] if waits else waiting
        if v.token_budget_left:
            yield from self._priced(_BACKGROUND_POLICY, v)
        v.decoding, v.prefilling, v.waiting = lists
        v.refused = refused or v.refused

    def _priced(self, policy: Policy, v: View) -> Asks:
        """Ask as the policy does, at the prices of the work. A policy whose steps nothing bounds
        computes prompts whole and pays nothing."""
        if not (policy.bounded and self._pricing.present):
            return policy.asks(v)
        prices = self._pricing.begin_step(v)
        v.waiting = prices.waiting
        return self._pricing.charged(policy.asks(v), v, prices)


def _foreground(sequences: Iterable[Sequence]) -> list[Sequence]:
    return [seq for seq in sequences if not in_background(seq)]


def _awaited(v: View, running: Iterable[Sequence]) -> Sequence | None:
    """Return the background sequence whose prompt a refused request waits for, to share its KV."""
    if v.refused is None or v.refused[1] is not WaitCause.PROMPT:
        return None
    return next((seq for seq in running if seq.request.id == v.refused[2]), None)
