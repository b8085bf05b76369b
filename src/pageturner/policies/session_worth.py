"""The worth of keeping the KV of a conversation, for a block and a second: who is given up first.

    worth = cost / (expected + idle) * part

    cost      tokens of work to compute the last block of the conversation again: block_size * (1 +
              context_price * its place / 1000), for what looks back further is dearer
              (work_pricing.py)
    expected  seconds between its turns: as it says itself (next_in), else as it was so far, else as
              all are
    idle      seconds since its last turn. With a gap of which only the order of magnitude is known
              (it is exponential, and its rate is again) 1 / (expected + idle) is the chance, for
              each second, that the next turn comes now. It falls with the time for which nobody
              came: that is the decay
    part      of its owner: an equal part of what sessions may keep, divided by what the owner's
              sessions keep, at most 1. Whoever has twice its part loses as if all of it were worth
              half

Of conversations with the same hints and lengths, the one that was used least recently is worth
least, so without hints this is the order of LRU, conversation by conversation. Must not know blocks
or claims.
"""

from __future__ import annotations

from math import inf

from pageturner.policies.session_claims import KeptConversation

FIRST_GAP = 5.0  # seconds between two turns, until some were seen
SEEN = 0.1  # weight of a gap that was seen in the mean of all, and a third of that in the conversation's own
PATIENCE = (
    3.0  # times the expected gap, or the mean of all: then nobody waits for a conversation any more
)


class Gaps:
    """The mean time for which conversations are silent between two turns. mean: of all."""

    def __init__(self) -> None:
        self.mean = FIRST_GAP

    def saw(self, one: KeptConversation, gap: float) -> None:
        """A turn of it came so many seconds behind the one before."""
        self.mean += SEEN * (gap - self.mean)
        one.gap = one.gap + 3 * SEEN * (gap - one.gap) if one.gap else gap

    def expected(self, one: KeptConversation) -> float:
        return max(0.001, one.next_in or one.gap or self.mean)

    def awaited_until(self, one: KeptConversation) -> float:
        """Return until when other conversations wait for it while it is silent. A hint says how
        long a tool takes; what a client and its network take on top is in the mean of all."""
        return one.ended + min(one.keep, PATIENCE * max(self.expected(one), self.mean))

    def awaited(self, one: KeptConversation, now: float) -> bool:
        """Return whether its next turn is still expected."""
        return one.open > 0 or (bool(one.keys) and now <= self.awaited_until(one))


def worth(one: KeptConversation, now: float, expected: float, cost: float, part: float) -> float:
    """Return the worth as the docstring of this file has it. part: at most 1. Whoever is here
    already is worth any price."""
    return inf if one.open else cost * part / (expected + max(0.0, now - one.ended))
