"""Columns of GPTQ with `desc_act` in the order of their groups, so that each group is 32 neighbours again.

Owns which matrices of a folder may lie so: those whose inputs a step can gather in that order (q, k and v
together, o, gate and up together), and those of down, whose inputs gate and up make in that order at once,
by the order of their rows, so that a step does nothing for it. Must not know how matrices are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pageturner.formats.ggml import GROUP

Order = NDArray[np.int32]  # which column (or row) of the file lies at each place


@dataclass(frozen=True, slots=True)
class Placement:
    """By the names of matrices. gathered: orders of columns whose inputs a step gathers; made: of columns
    whose inputs come in that order; rows: of outputs."""

    gathered: Mapping[str, Order]
    made: Mapping[str, Order]
    rows: Mapping[str, Order]

    def columns(self, name: str) -> Order | None:
        """In which the columns of a matrix lie; None: as in the file."""
        return self.gathered.get(name, self.made.get(name))


def order_of(groups: NDArray[np.int32], count: int) -> Order | None:
    """The columns by their group, those of a group as they come. None where groups are not all as large, or
    not whole blocks of 32."""
    size = len(groups) // max(count, 1)
    if size % GROUP or not size or groups.min() < 0:
        return None
    if not np.array_equal(np.bincount(groups, minlength=count), np.full(count, size)):
        return None
    return np.argsort(groups, kind="stable").astype(np.int32)


def placement(
    names: Iterable[str], orders: Mapping[str, Order], has: Callable[[str], bool]
) -> Placement:
    """What of a folder can lie in the order of its groups.

    names   of all quantised matrices, without the ending of their tensors
    orders  of those that want one
    has     whether there is a tensor of this name
    """
    names, gathered, made = set(names), dict[str, Order](), dict[str, Order]()
    rows = dict[str, Order]()
    for name, order in orders.items():
        stem, _, last = name.rpartition(".")
        where = stem.rpartition(".")[2]
        if where == "self_attn" and last in ("q_proj", "k_proj", "v_proj"):
            fits = _alike([f"{stem}.{one}" for one in ("q_proj", "k_proj", "v_proj")], orders)
        elif where == "self_attn" and last == "o_proj":
            fits = any(
                {f"{stem}.{one}", f"{stem}.qkv_proj"} & names for one in ("k_proj", "v_proj")
            )
        elif where == "mlp" and last in ("gate_proj", "up_proj"):
            fits = _alike([f"{stem}.{one}" for one in ("gate_proj", "up_proj")], orders)
        elif where == "mlp" and last == "down_proj":
            before = [f"{stem}.{one}" for one in ("gate_proj", "up_proj")]
            if names.issuperset(before) and not any(has(f"{one}.bias") for one in before):
                made[name] = order
                rows |= dict.fromkeys(before, order)
            continue
        else:
            fits = last in ("qkv_proj", "gate_up_proj") and where in ("self_attn", "mlp")
        if fits:
            gathered[name] = order
    return Placement(gathered, made, rows)


def _alike(names: list[str], orders: Mapping[str, Order]) -> bool:
    """Whether all of these have one order: they share their input, which is gathered once."""
    return all(name in orders and np.array_equal(orders[name], orders[names[0]]) for name in names)
