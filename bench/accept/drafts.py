"""The draft model of `make accept NAME=decoding`: a real pair, one answer at a time and sixteen at once.

Every prompt is answered with drafts and without, in turn, in the same engine (speed_drafts.py). Forced: the answer is
the reference, whatever the models say, as if the target were perfect.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator

from harness import DATA, Line, NotRun
from speed_drafts import Job, encoded, run

from pageturner import LLM
from pageturner.formats.hub import cache_folder
from pageturner.params import SamplingParams

TARGET, DRAFT = (f"qwen2.5-coder-{size}-instruct-q4_k_m.gguf" for size in ("1.5b", "0.5b"))
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)
TASKS, TOGETHER, MOST = 8, 16, 64  # tasks one at a time, tasks at once, tokens of an answer


def pair() -> Iterator[Line]:
    """Qwen2.5-Coder 0.5B drafts for 1.5B."""
    target, draft = cache_folder() / TARGET, cache_folder() / DRAFT
    if not (target.is_file() and draft.is_file()):
        raise NotRun(
            "no pair of models: python tests/tools/fetch_models.py qwen2.5-coder qwen2.5-coder-1.5b"
        )
    options = {"max_model_len": 2048, "enable_prefix_caching": False}
    llm = LLM(str(target), speculation="draft", draft_model=str(draft), **options)
    run(llm, [((5, 6, 7), ())], GREEDY, MOST, speculation=True)
    code = _jobs(llm, "code_completion")
    kinds = {
        f"{kind}, %s, running freely": [(prompt, ()) for prompt, _ in jobs]
        for kind, jobs in (("code", code), ("essays", _jobs(llm, "writing")))
    }
    kinds["code, %s, reference forced"] = [job for job in code if job[1]]
    for what, jobs in kinds.items():
        yield _line(llm, what % "one at a time", [[job] for job in jobs[:TASKS]])
        yield _line(llm, what % f"{len(jobs[:TOGETHER])} at once", [jobs[:TOGETHER]])


def _jobs(llm: LLM, category: str) -> list[Job]:
    path = DATA / "text" / "prompts.jsonl"
    if not path.is_file():
        raise NotRun(f"{path} is absent")
    jobs = []
    for task in map(json.loads, path.read_text().splitlines()):
        if task["category"] == category:
            prompt = llm.chat_tokens([{"role": "user", "content": task["turns"][0]}])
            answer = encoded(llm, "".join(task.get("reference", [])[:1]))
            jobs.append((tuple(prompt), answer[:MOST]))
    return jobs


def _line(llm: LLM, what: str, batches: list[list[Job]]) -> Line:
    """Each batch with drafts and without, one after the other."""
    pairs = [
        [run(llm, jobs, GREEDY, MOST, speculation=wanted) for wanted in (True, False)]
        for jobs in batches
    ]
    drafted, alone = zip(*pairs, strict=True)
    ratios = [mine.pace / theirs.pace for mine, theirs in pairs]
    paces = [
        sum(p.tokens for p in side) / sum(p.seconds for p in side) for side in (drafted, alone)
    ]
    guessed, right = (sum(getattr(p, name) for p in drafted) for name in ("drafted", "right"))
    share = f"{right / max(guessed, 1):.0%} of {guessed:,.0f} drafted tokens right"
    spread = f"({len(ratios)} tasks, {min(ratios):.2f} to {max(ratios):.2f})"
    figure = f"{paces[0]:.1f} tokens/s, {paces[1]:.1f} without: {statistics.median(ratios):.2f}x"
    equal = all(mine.answers == theirs.answers for mine, theirs in pairs)
    return Line(f"draft model, {what}", f"{figure} {spread}; {share}", None if equal else False)
