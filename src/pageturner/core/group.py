"""Groups: the sequences of one request, as one unit for admission and abort.

Owns how a request becomes sequences. Must not know blocks, budgets or queues. A request for several choices
or beams will be one more class here with the same face.
"""

from __future__ import annotations

from typing import Protocol

from pageturner.core.types import Refused, Request, Sequence, State


class Group(Protocol):
    """What the scheduler sees of a request."""

    @property
    def sequences(self) -> list[Sequence]:
        """Every sequence, finished ones included, by index."""

    @property
    def done(self) -> bool:
        """Whether nothing of the request is left to compute."""


class Single:
    """One request, one sequence; it goes on behind its `resume` tokens if it has some."""

    def __init__(self, request: Request) -> None:
        resume = request.resume[0] if request.resume else None
        self._sequence = Sequence(
            request,
            index=request.index,
            tokens=[*request.prompt, *(resume.tokens if resume else ())],
        )

    @property
    def sequences(self) -> list[Sequence]:
        return [self._sequence]

    @property
    def done(self) -> bool:
        return self._sequence.state is State.FINISHED


def make_group(request: Request) -> Group:
    """The group for a request. Refused('n_unsupported') for what no group can do: choices of one prompt are
    requests of their own, with the first one as their parent."""
    if request.params.n != 1 or len(request.resume) > 1:
        raise Refused("n_unsupported", "the engine takes one choice per request: send one request for each")
    return Single(request)
