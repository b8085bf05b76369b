"""Costs that are kept: until a clearly quieter machine measured others."""

from __future__ import annotations

from pathlib import Path

from pageturner.lab.simulation.kept_costs import KeptCosts, keep, kept_costs
from pageturner.lab.simulation.step_cost import FEATURES, CalibratedCost


def costs(weight: float, others: float) -> KeptCosts:
    cost = CalibratedCost([weight] * len(FEATURES), (0.1, 0.2), 9, {}, 0.001, {})
    return KeptCosts(cost, others, "2026-11-23")


def test_only_a_clearly_quieter_machine_replaces_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "steps" / "model.json"
    first, alike, quieter = costs(1.0, 0.5), costs(2.0, 0.45), costs(3.0, 0.2)
    assert keep(path, first) == first == kept_costs(path)
    assert keep(path, alike) == first == kept_costs(path)
    assert keep(path, quieter) == quieter == kept_costs(path)
    assert keep(path, first) == quieter
    assert [found.name for found in path.parent.iterdir()] == ["model.json"]


def test_what_is_no_file_of_costs_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    for text in ("", "{}", '{"cost": 1}'):
        path.write_text(text)
        assert kept_costs(path) is None
    assert keep(path, costs(1.0, 0.9)) == kept_costs(path)


def test_where_nothing_can_be_written_the_measured_are_used(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("no folder")
    assert keep(tmp_path / "steps" / "model.json", costs(1.0, 0.5)).cost.weights[0] == 1.0
