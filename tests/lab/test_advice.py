"""Advice: what is tied, what a measurement may say, and that noise changes nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pageturner.lab.planning.advice import DEFAULT, Advice, Known, advise, chance_of, overall


def figures(speed: float = 100.0, **others: float) -> dict[str, Any]:
    return {
        "output_tokens_per_s": speed,
        "goodput_per_s": others.get("goodput", 1.0),
        "ttft_ms": {"mean": others.get("ttft", 500.0)},
        "itl_ms": {"max": others.get("gap", 100.0)},
        "e2e_s": {"p99": others.get("e2e", 5.0)},
        "short_e2e_s": others.get("short", 1.0),
    } | ({"tenants": {"difference": others["unfair"]}} if "unfair" in others else {})


def known(policy: str, *speeds: float, **others: float) -> Known:
    return Known(policy, [figures(speed, **others) for speed in speeds])


def throughput(found: list[Advice]) -> Advice:
    return next(one for one in found if one.want == "most throughput")


@pytest.mark.parametrize(
    ("mine", "best", "tied"),
    [
        ((96.0,), (100.0,), True),
        ((94.0,), (100.0,), False),
    ],
)
def test_reckoned_figures_are_tied_within_five_percent(
    mine: tuple[float, ...], best: tuple[float, ...], tied: bool
) -> None:
    each = {"orca": known("orca", *best), "chunked": known("chunked", *mine)}
    one = throughput(advise(each, {}, {}, 0.0))
    assert one.choose == (("chunked", "orca") if tied else ("orca",))
    assert one.chosen == ("tied: chunked, orca" if tied else "orca")
    assert one.behind == ("-" if tied else "chunked: 94 tokens/s")


@pytest.mark.parametrize(
    ("mine", "best", "tied"),
    [
        ((80.0, 101.0), (100.0, 120.0), True),  # one round overlaps
        ((80.0, 90.0), (100.0, 120.0), False),
        ((91.0,), (100.0,), True),  # one round: nobody knows its spread
        ((89.0,), (100.0,), False),
    ],
)
def test_measured_figures_are_tied_within_their_spread(
    mine: tuple[float, ...], best: tuple[float, ...], tied: bool
) -> None:
    measured = {"orca": known("orca", *best), "static": known("static", *mine)}
    chance = chance_of(len(mine), 0.0)
    assert throughput(advise(measured, {}, {}, chance)).choose == (
        ("orca", "static") if tied else ("orca",)
    )
    reckoned = {"orca": known("orca", 100.0), "static": known("static", 50.0)}
    one = throughput(advise(measured, reckoned, {}, chance))
    assert one.choose == ("orca",)
    assert one.measured.startswith("tied: orca, static (" if tied else "orca")
    assert one.agrees


def test_on_a_busy_machine_few_rounds_tell_little() -> None:
    measured = {"orca": known("orca", 100.0), "chunked": known("chunked", 60.0)}
    for taken, tied in ((0.05, False), (0.35, False), (0.45, True), (0.95, True)):
        found = throughput(advise(measured, {}, {}, chance_of(1, taken)))
        assert (len(found.choose) == 2) == tied
    assert chance_of(1, 0.0) == pytest.approx(0.1)
    assert chance_of(5, 0.1) == pytest.approx(0.05)


def test_noise_changes_no_advice() -> None:
    """Two dozen machines, each disturbed otherwise, and the same choice on all of them."""
    names = ("static", "orca", "prefill_first", "chunked")
    reckoned = {
        name: known(name, 100.0 + 7 * i, ttft=500.0 - 40 * i) for i, name in enumerate(names)
    }
    stalls = {name: known(name, 100.0, gap=600.0 / (1 + i)) for i, name in enumerate(names)}
    told = set()
    for seed in range(24):
        dice = random.Random(seed)
        measured = {name: known(name, *(dice.uniform(10, 200) for _ in range(3))) for name in names}
        found = advise(measured, reckoned, stalls, chance=0.05)
        told.add(tuple((one.want, one.choose, one.figure, one.behind) for one in found))
    assert len(told) == 1


def test_a_measurement_that_says_otherwise_is_shown() -> None:
    reckoned = {"orca": known("orca", 100.0), "chunked": known("chunked", 200.0)}
    measured = {"orca": known("orca", 180.0, 200.0), "chunked": known("chunked", 90.0, 100.0)}
    one = throughput(advise(measured, reckoned, {}, chance=0.05))
    assert one.choose == ("chunked",)
    assert not one.agrees
    assert one.measured == "orca (180 to 200 tokens/s)"


def test_the_steadiest_stream_is_told_by_long_prompts() -> None:
    """All at once, nobody is in the middle of an answer when a prompt comes."""
    names = ("prefill_first", "chunked", "static")
    same = {name: known(name, 100.0) for name in names}
    stalls = {
        name: known(name, 100.0, gap=gap)
        for name, gap in zip(names, (900.0, 90.0, 9.0), strict=True)
    }
    for reckoned in (same, {}):
        found = {
            one.want: one for one in advise(same, reckoned, stalls, chance=0.05 * bool(reckoned))
        }
        one = found["steadiest stream while others are let in"]
        assert one.choose == ("chunked",), "static has it for nothing: it lets nobody in"
        assert one.behind == "prefill_first: longest gap 900 ms"


def test_a_row_about_fairness_where_there_are_tenants() -> None:
    plain = {"chunked": known("chunked", 1.0), "chunked + fair": known("chunked", 1.0)}
    assert all("fair" not in one.want for one in advise(plain, {}, {}, 0.0))
    tenants = {
        "chunked": known("chunked", 1.0, unfair=900.0),
        "chunked + fair": known("chunked", 1.0, unfair=90.0),
    }
    one = next(one for one in advise(tenants, {}, {}, 0.0) if "fair" in one.want)
    assert one.choose == ("chunked + fair",)


def test_nobody_is_chosen_for_what_nobody_does() -> None:
    each = {"orca": known("orca", 1.0, goodput=0.0), "chunked": known("chunked", 1.0, goodput=0.0)}
    one = next(one for one in advise(each, each, {}, chance=0.05) if "targets" in one.want)
    assert one.choose == ()
    assert one.chosen == one.measured == "none of these"
    assert one.agrees, "both say that nobody does it"


def test_the_default_is_named_first_among_equals() -> None:
    each = {name: known(name, 100.0) for name in ("orca", DEFAULT, "prefill_first")}
    found = advise(each, {}, {}, 0.0)
    assert {one.choose for one in found} == {(DEFAULT, "orca", "prefill_first")}
    assert overall(found) == ((DEFAULT, "orca", "prefill_first"), len(found), len(found))
    assert overall([]) == ((), 0, 0)
