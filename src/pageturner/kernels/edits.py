"""Edits of logits: what is done to a row before a token is chosen from it, and in numpy what each
means.

The numpy here is the executable definition, which every backend must equal bit for bit. Must not
know requests or sampling parameters, nor how logits came about.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
# The tokens that each row may have: a bit for each, 64 of them a word, lowest id first: [R, ceil(V
# / 64)]
Allowed = NDArray[np.uint64]


class Operation(IntEnum):
    """The effects of an edit on its tokens. C++ has the same numbers."""

    ALLOW = 0  # only they may be chosen, of those that might have been
    FORBID = 1  # none of them may be chosen
    FORCE = 2  # only they may be chosen, whatever was said before, and their logits are `value`
    ADD = 3  # value[i] is added to the logit of ids[i]
    REPETITION = 4  # x / value if x > 0, else x * value, once for each different token
    FREQUENCY = 5  # x - value * n for each different token, which is n times among the ids
    PRESENCE = 6  # x - value for each different token


class Edit(NamedTuple):
    """A change to the logits of one row before a token is chosen from them; ids are tokens of the
    vocabulary (else ValueError), each as often as it may be. All is fp32, and each product is
    rounded before a sum.

    Lists and tuples of Python's integers, and no arrays: the tokens of a sequence are such a list,
    which C++ reads several times as fast as numpy makes an array of it.
    """

    operation: Operation
    ids: list[int] | tuple[int, ...]
    value: float | list[float] = 0.0  # of ADD a list, one for each of the ids


Edits = list[list[Edit]]  # for each row what is done to its logits, in order
_RESTRICT = (
    Operation.ALLOW,
    Operation.FORBID,
    Operation.FORCE,
)  # these say which tokens may be chosen

# a byte of `Allowed` -> the most that each of its 8 logits may be
_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.inf,
    -np.inf,
).astype(np.float32)


def forbid(logits: F32, allowed: Allowed) -> None:
    """Make logits [R, V] of tokens that are not allowed minus infinity. The smaller one of each
    logit and its limit, which leaves the bits of what is allowed as they are: a third of the time
    of writing where a mask says so. A NaN that is not allowed goes too; one that is allowed
    stays."""
    limits = np.empty((8 * allowed.shape[1], 8), np.float32)
    for row, bits in zip(logits, allowed, strict=True):
        if (~bits).any():
            # others go by a buffer
            np.take(_LIMITS, bits.view(np.uint8), axis=0, out=limits, mode="clip")
            flat = limits.reshape(-1)[: len(row)]
            np.minimum(row, flat, out=row)
            if np.isnan(row.max()):
                row[flat < 0] = -np.inf


def may_be_chosen(vocabulary: int, bits: Allowed | None, edits: list[Edit]) -> NDArray[np.bool_]:
    """Return which tokens [V] of one row its bits of `Allowed` and its edits leave. The order of
    these matters."""
    if bits is None:
        may = np.ones(vocabulary, np.bool_)
    else:
        may = np.unpackbits(bits.view(np.uint8), count=vocabulary, bitorder="little").astype(
            np.bool_
        )
    for edit in edits:
        if edit.operation in _RESTRICT:
            named = np.zeros(vocabulary, np.bool_)
            named[_ids(edit, vocabulary)] = True
            match edit.operation:
                case Operation.ALLOW:
                    may &= named
                case Operation.FORBID:
                    may &= ~named
                case _:
                    may = named
    return may


def edit_row(row: F32, edits: list[Edit]) -> None:
    """Change the logits [V] of one row, edit by edit. What may not be chosen is not looked at
    here."""
    for edit in edits:
        ids = _ids(edit, len(row))
        different, counts = np.unique(ids, return_counts=True)
        values, value = row[different], np.array(edit.value, np.float32)
        match edit.operation:
            case Operation.ADD:
                np.add.at(row, ids, value)
            case Operation.FORCE:
                row[different] = value
            case Operation.REPETITION:
                row[different] = np.where(values > 0, values / value, values * value)
            case Operation.FREQUENCY:
                row[different] = values - value * counts.astype(np.float32)
            case Operation.PRESENCE:
                row[different] = values - value


def apply_edits(logits: F32, allowed: Allowed | None, edits: Edits | None) -> None:
    """Change logits [R, V] as the edits say; then what may not be chosen is minus infinity.
    ValueError for an id that is no token."""
    for r, row in enumerate(logits):
        bits, mine = (
            None if allowed is None else allowed[r : r + 1],
            edits[r] if edits is not None else [],
        )
        if mine:
            edit_row(row, mine)
            row[~may_be_chosen(len(row), bits, mine)] = -np.inf
        elif bits is not None:
            forbid(logits[r : r + 1], bits)


def _ids(edit: Edit, vocabulary: int) -> NDArray[np.intp]:
    ids = np.array(edit.ids, np.intp)
    if ((ids < 0) | (ids >= vocabulary)).any():
        raise ValueError("edits: no such token")
    return ids
