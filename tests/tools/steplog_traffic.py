"""What the engine of commit 8cc2ebe is asked when its step logs are recorded (record_steplogs.py).

Owns the requests, when they come and when they leave. Must not know which engine gets them. Speaks that
commit's names, and draws everything from seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pageturner.engine.fake import next_token
from pageturner.scheduler.types import Request, Resume, SamplingParams
from pageturner.structured import StructuredOutputsParams

VOCABULARY = 320  # of the fake engine and of the tiny models
END = 2  # the end-of-sequence token
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Act:
    """Something that happens at a time: `what` is called with the driver of the engine."""

    at: float
    what: Callable[[Any], None]


def submit(at: float, request: Request) -> Act:
    return Act(at, lambda driver: driver.submit(request))


def prompt_of(dice: random.Random, shared: tuple[int, ...], most: int) -> tuple[int, ...]:
    begin = shared[: dice.choice((0, 0, len(shared) // 2, len(shared)))]
    return begin + tuple(dice.randrange(3, VOCABULARY) for _ in range(dice.randint(1, most)))


def crowd(
    seed: int,
    count: int = 26,
    *,
    rate: float = 50.0,
    begin: int = 64,
    most: int = 60,
    output: int = 70,
    stops: int = 2,
    targets: bool = True,
) -> list[Act]:
    """Requests of every kind that needs no model: tenants, salts, priorities, targets, deadlines, choices of
    one prompt, echoes, pins; some leave.

    begin  tokens that many prompts begin with; most: others of a prompt; output: of an answer
    stops  how many tokens end an answer, beside the end of sequence
    targets  whether some have deadlines and targets
    """
    dice = random.Random(seed)
    shared = tuple(dice.randrange(3, VOCABULARY) for _ in range(begin))
    acts: list[Act] = []
    at, number = 0.0, 1
    for _ in range(count):
        at += dice.expovariate(rate)
        params = SamplingParams(
            temperature=0.0,
            seed=0,
            max_tokens=dice.randint(1, output),
            ignore_eos=dice.random() < 0.3,
            stop_ids=(END, *range(10, 10 + stops)),
            min_tokens=dice.choice((0, 0, 1)),
            logprobs=dice.choice((None, 1)),
        )
        request = Request(
            number,
            prompt_of(dice, shared, most),
            params,
            priority=dice.choice((0, 0, 0, -1, 2)),
            tenant=dice.choice(("red", "red", "red", "blue", "")),
            salt=dice.choice(("", "", "", "s")),
            ttft_target=dice.choice((None, None, None, 0.4, 3.0)),
            tpot_target=dice.choice((None, None, 0.02)),
            logits_from=dice.choice((None, None, None, None, 0)),
            pin=dice.random() < 0.08,
        )
        if request.logits_from is not None:
            request = replace(request, params=replace(params, prompt_logprobs=1))
        if not targets:
            request = replace(request, ttft_target=None, tpot_target=None)
        if dice.random() < 0.15 and targets:
            acts.append(_with_deadline(at, request, dice.uniform(0.3, 3.0)))
        else:
            acts.append(submit(at, request))
        if dice.random() < 0.15:
            acts += [
                submit(
                    at, replace(request, id=number + index, index=index, parent=number, pin=False)
                )
                for index in (1, 2)
            ]
        if request.pin:
            acts.append(_call(at + dice.uniform(1.0, 3.0), "unpin", number))
        if dice.random() < 0.12:
            acts.append(_call(at + dice.uniform(0.05, 1.0), "abort", number))
        number += 3
    return acts


def _with_deadline(at: float, request: Request, patience: float) -> Act:
    return Act(
        at, lambda driver: driver.submit(replace(request, deadline=driver.clock.now + patience))
    )


def _call(at: float, name: str, id: int) -> Act:
    return Act(at, lambda driver: getattr(driver.engine, name)(id))


def change(at: float, **settings: Any) -> Act:
    return Act(at, lambda driver: driver.change(**settings))


def beams(seed: int, count: int, **more: int) -> list[Act]:
    """Beam searches among other requests."""
    dice = random.Random(seed)
    acts = crowd(seed, count, **more)
    for number in range(count // 2):
        width = dice.choice((2, 3, 4))
        early = dice.choice((False, True, "never"))
        params = SamplingParams(
            temperature=0.0,
            seed=0,
            max_tokens=dice.randint(2, 16),
            stop_ids=(END,),
            beam_width=width,
            length_penalty=dice.choice((0.5, 1.0, 2.0)),
            early_stopping=early,
            n=width,
        )
        request = Request(1000 + number, prompt_of(dice, (5, 6, 7, 8) * 8, 50), params)
        acts.append(submit(dice.uniform(0, 1.2), request))
    return acts


def resumed(seed: int) -> list[Act]:
    """What a server hands the engine that it starts when another has died: answers that had begun."""
    dice = random.Random(seed)
    acts = crowd(seed, 20)
    for number in range(12):
        prompt = prompt_of(dice, (9,) * 40, 60)
        begun: list[int] = []
        for _ in range(dice.randint(1, 12)):
            begun.append(next_token([*prompt, *begun], VOCABULARY))
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=30, stop_ids=(1,))
        taken_up = Request(2000 + number, prompt, params, resume=(Resume(0, tuple(begun)),))
        acts.append(submit(0.01 * number, taken_up))
    return acts


def sampled(seed: int, count: int, most: int, output: int, **more: Any) -> list[Act]:
    """Requests to a model: drawn and greedy, with penalties, biases, logprobs, several choices."""
    dice = random.Random(seed)
    shared = tuple(dice.randrange(3, 256) for _ in range(48))
    acts: list[Act] = []
    for number in range(count):
        id, at = 10 * number + 1, number * 0.02
        begin = shared[: dice.choice((0, 24, 48))]
        prompt = begin + tuple(dice.randrange(3, 256) for _ in range(dice.randint(1, most)))
        params = SamplingParams(
            temperature=dice.choice((0.0, 0.8)),
            seed=number,
            max_tokens=dice.randint(2, output),
            stop_ids=(END,),
            top_k=dice.choice((0, 20)),
            top_p=dice.choice((1.0, 0.9)),
            repetition_penalty=dice.choice((1.0, 1.0, 1.3)),
            presence_penalty=dice.choice((0.0, 0.5)),
            frequency_penalty=dice.choice((0.0, 0.4)),
            logit_bias=dice.choice((None, None, {40: 5.0})),
            logprobs=dice.choice((None, 2)),
            **more,
        )
        request = Request(id, prompt, params)
        acts += [
            submit(at, replace(request, id=id + index, index=index, parent=id if index else None))
            for index in range(dice.choice((1, 1, 3)))
        ]
    return acts


def drafts(seed: int) -> list[Act]:
    """Prompts that repeat themselves, which is what prompt lookup guesses from."""
    dice = random.Random(seed)
    acts = sampled(seed, 6, 30, 30)
    for number in range(14):
        phrase = tuple(dice.randrange(3, 256) for _ in range(9))
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True)
        if number % 3 == 0:  # an answer that copies its prompt, as an edited text does
            params = replace(params, force_ids=(phrase * 4)[:30])
        acts.append(submit(number * 0.03, Request(500 + number, phrase * 3, params)))
    return acts


def searches(seed: int) -> list[Act]:
    acts = sampled(seed, 6, 30, 24)
    for number in range(6):
        params = SamplingParams(
            temperature=0.0, seed=0, max_tokens=12, stop_ids=(END,), beam_width=3, n=3
        )
        acts.append(
            submit(number * 0.05, Request(700 + number, tuple(range(20, 40 + 3 * number)), params))
        )
    return acts


def forms(seed: int, count: int, output: int, **more: Any) -> list[Act]:
    """Answers held to a schema, a pattern or a choice, among free ones."""
    asked = (
        {"json": SCHEMA, "disable_any_whitespace": True},
        {"regex": r"[a-f]{2,6}-\d{3}"},
        {"choice": ["yes", "no"]},
    )
    acts = sampled(seed, 4, 20, 16)
    for number in range(count):
        grammar = StructuredOutputsParams(**asked[number % 3])  # type: ignore[arg-type]
        params = SamplingParams(
            temperature=float(number % 2),
            seed=number,
            max_tokens=output,
            stop_ids=(END,),
            structured_outputs=grammar,
            **more,
        )
        acts.append(submit(number * 0.02, Request(600 + number, (20, 30, 40 + number), params)))
    return acts
