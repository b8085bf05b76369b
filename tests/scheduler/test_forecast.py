"""Forecasts of the first token: by hand, and against a run of single steps; how steps are measured."""

from __future__ import annotations

import random
from copy import deepcopy
from math import inf

import pytest

from pageturner.policies.step_time import HICCUP, StepTimeCurve, StepTimeModel
from pageturner.policies.ttft_forecast import RemainingWork, StepLimits, TtftForecast


def seconds(tokens: float) -> float:
    return 1.0 + 0.1 * tokens


def told(
    running: list[RemainingWork], ahead: list[RemainingWork], asked: RemainingWork, **limits: int
) -> tuple[float, float]:
    usual = {"slots": 9, "budget": 10, "room": 1000, "seconds": seconds} | limits
    first, idle = TtftForecast(running, [*ahead, asked], asked, StepLimits(**usual)).times()  # type: ignore[arg-type]
    return round(first, 9), round(idle, 9)


def test_a_prompt_alone_takes_its_chunks() -> None:
    assert told([], [], RemainingWork(25, 7)) == (2.0 + 2.0 + 1.5, 5.5)


def test_who_decodes_takes_a_place_in_each_step() -> None:
    assert told([RemainingWork(0, 2)], [], RemainingWork(18, 7)) == (2 * seconds(1 + 9), 4.0)
    assert told([RemainingWork(0, 5, ways=3)], [], RemainingWork(7, 1)) == (
        seconds(10),
        seconds(10) + 4 * seconds(3),
    )


def test_prompts_in_front_come_first_and_then_decode() -> None:
    assert told([], [RemainingWork(5, 1)], RemainingWork(5, 1)) == (seconds(10), seconds(10))
    # 6 of the running prompt, 4 of the one in front; 5 more of that and 4; 3 beside two that decode
    first = seconds(10) + seconds(1 + 9) + seconds(2 + 3)
    assert told([RemainingWork(6, 3)], [RemainingWork(9, 9)], RemainingWork(7, 1)) == (
        first,
        round(first + 7 * seconds(1), 9),
    )


def test_a_place_is_free_when_somebody_ends() -> None:
    assert told([RemainingWork(0, 3), RemainingWork(0, 8)], [], RemainingWork(5, 1), slots=2)[
        0
    ] == round(3 * seconds(2) + seconds(6), 9)


def test_memory_is_free_when_somebody_ends() -> None:
    running = [RemainingWork(0, 2, reserved=10, grows=False)]
    assert told(running, [], RemainingWork(5, 1, reserved=12), room=5)[0] == round(
        2 * seconds(1) + seconds(5), 9
    )
    assert told(deepcopy(running), [], RemainingWork(5, 1, reserved=5), room=5)[0] == seconds(1 + 5)
    # the two tokens that it takes meanwhile come back with the rest
    growing = [RemainingWork(0, 2, reserved=10)]
    assert told(growing, [], RemainingWork(5, 1, reserved=15), room=5)[0] == round(
        2 * seconds(1) + seconds(5), 9
    )
    assert told([], [], RemainingWork(5, 1, reserved=99), room=5)[0] == seconds(5), (
        "alone it runs, whatever there is"
    )


def test_steps_for_prompts_alone() -> None:
    limits = StepLimits(9, 10, 99, seconds, apart=True)
    asked = RemainingWork(10, 1)
    assert list(TtftForecast([RemainingWork(0, 2)], [asked], asked, limits).times()) == [
        seconds(10),
        seconds(10) + 2 * seconds(1),
    ]


def one_by_one(
    running: list[RemainingWork],
    waiting: list[RemainingWork],
    asked: RemainingWork,
    limits: StepLimits,
) -> float:
    """The same, without leaps."""
    now, room, steps = 0.0, limits.room, {id(work): 0 for work in (*running, *waiting)}
    queue, prompts = list(waiting), [work for work in running if work.prompt]
    decoding = [work for work in running if not work.prompt]
    while True:
        ways = sum(work.ways for work in decoding)
        left = max(limits.budget - (0 if limits.apart else ways), 1)
        tokens, joined = 0, []
        while left:
            if not prompts:
                places = sum(work.ways for work in (*decoding, *joined))
                if not queue or (
                    places and (places + queue[0].ways > limits.slots or queue[0].reserved > room)
                ):
                    break
                room -= queue[0].reserved
                prompts.append(queue.pop(0))
            n = min(left, prompts[0].prompt)
            prompts[0].prompt, left, tokens = prompts[0].prompt - n, left - n, tokens + n
            if prompts[0].prompt:
                break
            joined.append(prompts.pop(0))
        moves = bool(decoding) and not (limits.apart and tokens)
        now += limits.seconds(tokens + (ways if moves else 0))
        if asked in joined:
            return now
        for work in list(decoding) if moves else ():
            steps[id(work)] += 1
            work.answer -= 1
            room -= work.ways * work.grows
            if work.answer == 0:
                decoding.remove(work)
                room += work.reserved + steps[id(work)] * work.ways * work.grows
        for work in joined:
            work.answer -= 1
            if work.answer:
                decoding.append(work)
            else:
                room += work.reserved


def test_leaps_are_as_good_as_steps() -> None:
    dice = random.Random(5)

    def work(least: int) -> RemainingWork:
        ways, grows = dice.choice((1, 1, 1, 2)), dice.random() < 0.7
        return RemainingWork(
            dice.randint(least, 40), dice.randint(1, 30), ways, dice.randint(0, 40), grows
        )

    for _ in range(400):
        running = [
            work(0) if dice.random() < 0.3 else RemainingWork(0, dice.randint(1, 50))
            for _ in range(dice.randint(0, 5))
        ]
        waiting = [work(1) for _ in range(dice.randint(1, 12))]
        asked = dice.randrange(len(waiting))
        slots = max(dice.randint(2, 12), sum(one.ways for one in running))
        budget = dice.choice((slots, 16, 64)) if slots <= 16 else slots
        limits = StepLimits(slots, budget, dice.randint(0, 300), seconds, dice.random() < 0.3)
        again, queue = deepcopy((running, waiting))
        first = next(TtftForecast(running, waiting, waiting[asked], limits).times())
        assert first == pytest.approx(one_by_one(again, queue, queue[asked], limits))


# -- what steps take -----------------------------------------------------------------------------------------
def test_a_curve_goes_through_what_was_measured() -> None:
    curve = StepTimeCurve([(2, 1.0), (10, 3.0), (100, 2.0), (200, 6.0)])
    assert [curve(n) for n in (1, 2, 6, 10, 50, 100)] == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]
    assert curve(400) == pytest.approx(12.0), "along the last line"
    assert StepTimeCurve([])(100) == 0.0, "nothing is known"
    assert StepTimeCurve([(4, 1.0)])(100) == 1.0, "what is not known is not assumed to be slow"


def test_prompts_are_not_forgotten_while_others_decode() -> None:
    pace = StepTimeModel()
    for _ in range(5):
        pace.took(500, 0.5)
    for _ in range(1000):
        pace.took(4, 0.02)
    assert pace.curve(500) == pytest.approx(0.5)
    assert pace.curve(4) == pytest.approx(0.02)


def test_a_hiccup_counts_little_and_a_new_pace_soon() -> None:
    pace = StepTimeModel()
    for _ in range(50):
        pace.took(8, 0.1)
    pace.took(8, 60.0)
    assert pace.curve(8) < 0.1 + HICCUP * 0.1 / 20
    for _ in range(60):
        pace.took(8, 1.0)
    assert 0.8 < pace.curve(8) <= 1.0
    pace.took(8, -inf)
    assert pace.curve(8) <= 1.0
