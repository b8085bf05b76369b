"""Drafts by suffixes (`--speculation suffix`): tokens a step and pace with and without, one to 64 at once.

    python bench/accept/speed_drafts.py [--drafts-models smollm2 FILE ...] [--drafts-rounds N]

Every batch is answered with drafts and without, in turn, in the same engine: a request says whether it wants
them. `code` and `agents` are answered as their references say, as if the model were perfect; in `agents` a file
is written, and then once more in the next turn of the same session. `chat` runs freely. Tokens a step, rows and
steps are exact on any machine; paces are medians of pairs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import harness
from harness import DATA, Line, NotRun

from pageturner import LLM
from pageturner.formats.hub import cache_folder
from pageturner.params import SamplingParams
from pageturner.request import Request

CODER = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
GREEDY = SamplingParams(temperature=0.0, seed=0)
SIZES = (1, 8, 64)
MOST = {1: 192, 8: 96, 64: 48}  # tokens of an answer
LEAST = {"code": 2.0, "agents": 2.0}  # times the pace alone; elsewhere 0.99
Job = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, what its answer is forced to be
_numbers = count(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--drafts-models", nargs="+", help="default: smollm2, and a coder if cached"
    )
    parser.add_argument("--drafts-rounds", type=int, default=5, help="pairs alone; fewer at once")


def lines(options: argparse.Namespace) -> Iterator[Line]:
    coder = cache_folder() / CODER
    models = options.drafts_models or ["smollm2", *[str(coder)] * coder.is_file()]
    for model in models:
        llm = LLM(model, speculation="suffix", max_model_len=4096, enable_prefix_caching=False)
        stops = llm.tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
        params = replace(GREEDY, stop_ids=tuple(stops))
        run(llm, [((5, 6, 7), ())], params, 8, speculation=True)
        for kind, jobs in _jobs(llm).items():
            for size in SIZES[: 3 if kind == "chat" else 2]:  # 64 long prompts take minutes
                rounds = max(2, options.drafts_rounds * (2 if size == 1 else 1) // 2)
                name = f"{model.rsplit('/', 1)[-1]}, {kind}, {size} at once"
                yield _line(
                    llm,
                    name,
                    LEAST.get(kind, 0.99) if size == 1 else 0.99,
                    [
                        (
                            ([*jobs, *jobs, *jobs][i * size % len(jobs) :] * size)[:size],
                            params,
                            MOST[size],
                        )
                        for i in range(rounds)
                    ],
                )


def _jobs(llm: LLM) -> dict[str, list[Job]]:
    found: dict[str, list[Job]] = {"code": [], "agents": [], "chat": []}
    for name in ("copy_heavy", "prompts"):
        path = DATA / "text" / f"{name}.jsonl"
        if not path.is_file():
            raise NotRun(f"{path} is absent")
        for task in map(json.loads, path.read_text().splitlines()):
            if task.get("kind") == "rename_identifier":
                ask, answer = (encoded(llm, task[key]) for key in ("prompt", "reference"))
                again = encoded(llm, "\n\nThe same file once more, please:\n\n")
                found["code"].append((ask, answer))
                found["agents"].append((ask + answer + again, answer))
            elif task.get("turns") and task["lang"] == "en":
                chat = llm.chat_tokens([{"role": "user", "content": task["turns"][0]}])
                found["chat"].append((tuple(chat), ()))
    found["chat"] = found["chat"][::3]
    return found


def encoded(llm: LLM, text: str) -> tuple[int, ...]:
    return tuple(llm.tokenizer.encode(text, add_special=False, parse_special=False))


@dataclass(slots=True)
class Run:
    """One batch behind its first tokens. answers: of every job, all of it; drafted, right: tokens of all of it."""

    answers: list[list[int]]
    tokens: int = 0
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    drafted: float = 0.0
    right: float = 0.0

    @property
    def pace(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def run(llm: LLM, jobs: list[Job], params: SamplingParams, most: int, *, speculation: bool) -> Run:
    engine, places = llm.built.engine, {}
    found = Run([[] for _ in jobs])
    for place, (prompt, forced) in enumerate(jobs):
        number = next(_numbers)
        places[number] = place
        wanted = replace(
            params,
            force_ids=forced[:most],
            max_tokens=min(most, len(forced) or most),
            speculation=speculation,
            ignore_eos=params.ignore_eos or bool(forced),
        )
        assert not engine.submit(Request(number, prompt, wanted))
    start = engine.scheduler.stats()
    before = 0.0
    while engine.has_work:
        begun = all(found.answers)
        begin = time.perf_counter()
        events = engine.step()
        seconds = time.perf_counter() - begin
        for event in events:
            found.answers[places[event.id]] += event.tokens
        drafted = engine.scheduler.stats()["draft_tokens"]
        if begun:
            found.seconds += seconds
            found.steps += 1
            found.tokens += sum(len(event.tokens) for event in events)
            found.rows += len(events) + int(drafted - before)
        before = drafted
    ended = engine.scheduler.stats()
    found.drafted = ended["draft_tokens"] - start["draft_tokens"]
    found.right = ended["accepted_tokens"] - start["accepted_tokens"]
    return found


def _line(
    llm: LLM, name: str, least: float, batches: list[tuple[list[Job], SamplingParams, int]]
) -> Line:
    """Each batch with drafts and without, one after the other, the other way round every second time."""
    with_drafts, without = [], []
    for i, (jobs, params, most) in enumerate(batches):
        for drafts in (i % 2 == 0, i % 2 == 1):
            side = with_drafts if drafts else without
            side.append(run(llm, jobs, params, most, speculation=drafts))
    pairs = list(zip(with_drafts, without, strict=True))
    equal = all(one.answers == other.answers for one, other in pairs)
    ratio = statistics.median(one.pace / other.pace for one, other in pairs)
    sums = [
        [sum(getattr(one, what) for one in runs) for what in ("tokens", "steps", "rows")]
        for runs in (with_drafts, without)
    ]
    (tokens, steps, rows), (plain, plain_steps, plain_rows) = sums
    figure = (
        f"{ratio:.2f}x the pace ({len(pairs)} pairs); {tokens / steps:.2f} tokens a step,"
        f" {plain / plain_steps:.2f} without; {steps:,} steps of {rows:,} rows, {plain_steps:,} of"
        f" {plain_rows:,}; bits {'equal' if equal else 'DIFFER'}"
    )
    return Line(f"{name}: at least {least}x", figure, equal and ratio >= least)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
