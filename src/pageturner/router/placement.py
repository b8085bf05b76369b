"""Placement: which of several engines a request goes to.

Owns the rules, and what a router remembers of the prefixes it sent where. Must not know how replicas are
reached, nor whether they exist: the router and the simulator ask the same functions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

# (load of each replica, in requests of the usual size (token_loads.py),
# replica -> prompt tokens it likely has cached, prompt tokens) -> replica
Place = Callable[[Sequence[float], Mapping[int, int], int], int]

WORTH = 4  # a prompt that is cached whole is worth so many open requests more; one that is half cached, half


class RoundRobin:
    """One after another, whatever they do."""

    def __init__(self) -> None:
        self._next = -1

    def __call__(self, loads: Sequence[float], hints: Mapping[int, int], length: int) -> int:
        self._next = (self._next + 1) % len(loads)
        return self._next


class LeastLoaded:
    """The fewest open requests; among equals one after another, so that an idle cluster is used evenly."""

    def __init__(self) -> None:
        self._last = -1

    def __call__(self, loads: Sequence[float], hints: Mapping[int, int], length: int) -> int:
        least = min(loads)
        try:
            self._last = loads.index(least, self._last + 1)
        except ValueError:
            self._last = loads.index(least)
        return self._last


class PrefixAware:
    """Where most of the prompt is cached, as long as that is worth the requests that are open there beyond
    those of the least loaded: share of the prompt times WORTH. Else the least loaded."""

    def __init__(self) -> None:
        self._least = LeastLoaded()

    def __call__(self, loads: Sequence[float], hints: Mapping[int, int], length: int) -> int:
        if hints:
            gains = {
                replica: WORTH * tokens / length - loads[replica]
                for replica, tokens in hints.items()
            }
            best = max(gains, key=lambda replica: (gains[replica], -replica))
            if gains[best] > -min(loads):
                return best
        return self._least(loads, hints, length)


PLACEMENTS: dict[str, Callable[[], Place]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}


class Content(Protocol):
    """What prompts are made of: token ids, or bytes of text; slices of it can be keys."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> object: ...


class PrefixMap:
    """Which replicas were sent which beginnings, in chunks of `chunk` tokens; the `most` latest are kept.

    A chunk is named by the hash of its content and of the name of the one before it. Two that have one name
    cost a wrong guess, and no more: a hint is never needed to be right.
    """

    def __init__(self, chunk: int = 256, most: int = 200_000) -> None:
        if chunk < 1 or most < 1:
            raise ValueError(
                f"chunks have at least one token and one is kept, not {chunk} and {most}"
            )
        self._chunk = chunk
        self._most = most
        self._sent: OrderedDict[int, list[int]] = OrderedDict()

    def hints(self, prompt: Content) -> dict[int, int]:
        """Replica -> tokens at the beginning of the prompt that it was sent before."""
        found: dict[int, int] = {}
        for end, name in self._names(prompt):
            replicas = self._sent.get(name)
            if replicas is None:
                break
            for replica in replicas:
                if found.get(replica, 0) == end - self._chunk:
                    found[replica] = end
        return found

    def sent(self, prompt: Content, replica: int) -> None:
        """Remember that the prompt went to the replica."""
        for _, name in self._names(prompt):
            replicas = self._sent.setdefault(name, [])
            self._sent.move_to_end(name)
            if replica not in replicas:
                replicas.append(replica)
        while len(self._sent) > self._most:
            self._sent.popitem(last=False)

    def gone(self, replica: int) -> None:
        """The replica has lost what it had: it was restarted or left."""
        for replicas in self._sent.values():
            if replica in replicas:
                replicas.remove(replica)

    def _names(self, prompt: Content) -> Iterator[tuple[int, int]]:
        """Where each whole chunk ends, and its name."""
        name = 0
        for end in range(self._chunk, len(prompt) + 1, self._chunk):
            name = hash((name, prompt[end - self._chunk : end]))
            yield end, name
