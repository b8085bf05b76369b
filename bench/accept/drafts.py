"""The draft model of `make accept NAME=decoding`: a real pair, one answer at a time and sixteen at once.

Every prompt is answered with drafts and without, in turn, in the same engine: a request says whether it wants
them. Forced: the answer is the reference, whatever the models say, as if the target were perfect.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from harness import DATA, Line, NotRun

from pageturner import LLM
from pageturner.formats.hub import cache_folder
from pageturner.params import SamplingParams
from pageturner.request import Request

TARGET, DRAFT = (f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf" for size in ("1.5b", "0.5b"))
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)
TASKS, TOGETHER, MOST = 8, 16, 64  # tasks one at a time, tasks at once, tokens of an answer
Job = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, what its answer is forced to be


@dataclass(frozen=True, slots=True)
class Pace:
    """Tokens behind the first ones and the seconds that they took; drafted tokens, how many were right."""

    tokens: int
    seconds: float
    drafted: float
    right: float
    answers: dict[int, tuple[int, ...]]


def pair() -> Iterator[Line]:
    """Qwen2.5-Coder 0.5B drafts for 1.5B."""
    target, draft = cache_folder() / TARGET, cache_folder() / DRAFT
    if not (target.is_file() and draft.is_file()):
        raise NotRun(
            "no pair of models: python tests/tools/fetch_models.py qwen2.5-coder qwen2.5-coder-1.5b"
        )
    options = {"max_model_len": 2048, "enable_prefix_caching": False}
    llm = LLM(str(target), speculation="draft", draft_model=str(draft), **options)
    _pace(llm, [((5, 6, 7), ())], speculation=True)
    jobs = {"code": _jobs(llm, "code_completion"), "essays": _jobs(llm, "writing")}
    for kind, all_jobs in jobs.items():
        free = [(prompt, ()) for prompt, _ in all_jobs]
        yield from _lines(
            llm, f"{kind}, one at a time, running freely", [[job] for job in free[:TASKS]]
        )
        yield from _lines(
            llm, f"{kind}, {len(free[:TOGETHER])} at once, running freely", [free[:TOGETHER]]
        )
    forced = [job for job in jobs["code"] if job[1]]
    yield from _lines(
        llm, "code, one at a time, reference forced", [[job] for job in forced[:TASKS]]
    )
    yield from _lines(llm, f"code, {TOGETHER} at once, reference forced", [forced[:TOGETHER]])


def _jobs(llm: LLM, category: str) -> list[Job]:
    path = DATA / "text" / "prompts.jsonl"
    if not path.is_file():
        raise NotRun(f"{path} is absent")
    tasks = [json.loads(line) for line in path.read_text().splitlines()]
    jobs = []
    for task in tasks:
        if task["category"] == category:
            prompt = llm.chat_tokens([{"role": "user", "content": task["turns"][0]}])
            reference = "".join(task.get("reference", [])[:1])
            answer = llm.tokenizer.encode(reference, add_special=False, parse_special=False)
            jobs.append((tuple(prompt), tuple(answer[:MOST])))
    return jobs


def _lines(llm: LLM, what: str, batches: list[list[Job]]) -> Iterator[Line]:
    """Each batch with drafts and without, one after the other."""
    pairs = [[_pace(llm, jobs, speculation=wanted) for wanted in (True, False)] for jobs in batches]
    drafted, alone = ([each[i] for each in pairs] for i in (0, 1))
    equal = all(mine.answers == theirs.answers for mine, theirs in pairs)
    ratios = [(one.tokens / one.seconds) / (other.tokens / other.seconds) for one, other in pairs]
    with_drafts, without = (
        sum(p.tokens for p in run) / sum(p.seconds for p in run) for run in (drafted, alone)
    )
    guessed, right = (sum(getattr(p, name) for p in drafted) for name in ("drafted", "right"))
    share = (
        f"{right / guessed:.0%} of {guessed:,.0f} drafted tokens right"
        if guessed
        else "nothing drafted"
    )
    spread = (
        f" ({len(ratios)} tasks, {min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    )
    middle = statistics.median(ratios)
    figure = f"{with_drafts:.1f} tokens/s, {without:.1f} without: {middle:.2f}x{spread}; {share}"
    yield Line(f"draft model, {what}", figure, None if equal else False)


_numbers = count(1)


def _pace(llm: LLM, jobs: list[Job], *, speculation: bool) -> Pace:
    """The clock begins when every answer has begun."""
    engine, before = llm.built.engine, llm.built.engine.scheduler.stats()
    first = 0
    answers: dict[int, list[int]] = {}
    for place, (prompt, forced) in enumerate(jobs):
        params = replace(
            GREEDY, force_ids=forced, max_tokens=len(forced) or MOST, speculation=speculation
        )
        number = next(_numbers)
        first = first or number
        assert number == first + place
        answers[place] = []
        assert not engine.submit(Request(number, prompt, params))
    begin = told = 0.0
    while engine.has_work:
        for event in engine.step():
            answers[event.id - first] += event.tokens
        if not begin and all(answers.values()):
            begin, told = time.perf_counter(), sum(map(len, answers.values()))
    seconds = time.perf_counter() - begin
    after = engine.scheduler.stats()
    drafted, right = (after[name] - before[name] for name in ("draft_tokens", "accepted_tokens"))
    tokens = sum(map(len, answers.values())) - int(told)
    return Pace(
        tokens, seconds, drafted, right, {place: tuple(ids) for place, ids in answers.items()}
    )
