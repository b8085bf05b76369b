"""Quality where people look: logprobs of short chats as served, beside fp32 with the same weights.

Owns the targets. The prompts, the forced answers and the errors are those of bench/quality_prompts.py.
Numerics were chosen on the prompts of half 0; the figures of half 1 stand beside those of all.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness import DATA, Line

import quality
import quality_prompts as prompts
from pageturner.formats.hub import cache_folder

MODELS = {
    "SmolLM2": "smollm2-135m-instruct-q4_1.gguf",
    "Qwen2.5-Coder 0.5B": "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "Gemma 3 270M": "gemma3-270m-q4_k_m.gguf",
}
MEAN, P99 = 0.005, 0.03
KL, SAME = (
    0.00103,
    0.97,
)  # of that commit over 20,440 tokens of prose (bench/LOG.md), and its target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--quality-count", type=int, default=100, help="prompts")
    parser.add_argument("--quality-models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--quality-tokens", type=int, default=4096, help="of prose; 20440: as in the log"
    )
    parser.add_argument("--quality-only", nargs="*", choices=("prompts", "prose"))


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Errors for each model, Paris, and prose."""
    wanted = arguments.quality_only or ("prompts", "prose")
    if "prompts" in wanted:
        for name in arguments.quality_models:
            file = cache_folder() / MODELS[name]
            yield from _prompts(name, file, arguments.quality_count)
    if "prose" in wanted:
        yield from _prose(arguments.quality_tokens)


def _prompts(name: str, model: Path, count: int) -> Iterator[Line]:
    what = f"{name}: error of logprobs as served, {count} prompts x {prompts.ANSWER} tokens"
    path = DATA / "text" / "prompts.jsonl"
    if not model.is_file() or not path.is_file():
        yield Line(what, f"{model if path.is_file() else path} is not here", None, run=False)
        return
    forced = prompts.answered(str(model), prompts.read_prompts(path, count))
    base, served = prompts.exact(str(model), forced), prompts.served(str(model), forced)
    found = prompts.error(base, served)
    good = found.mean <= MEAN and found.p99 <= P99
    yield Line(f"{what} (mean {MEAN}, p99 {P99})", str(found), good)
    other = prompts.error(base.half(1), served.half(1))
    yield Line(
        f"{name}: the half that nothing was chosen on",
        str(other),
        other.mean <= MEAN and other.p99 <= P99,
    )
    if name == "SmolLM2":
        exact, mine = (
            prompts.answer_to(str(model), prompts.PARIS, **way)
            for way in ({"dtype": "float32"}, {})
        )
        yield Line(
            f"{prompts.PARIS} as in fp32",
            f"{mine!r}, fp32 {exact!r}",
            mine == exact and "Paris" in mine,
        )


def _prose(tokens: int) -> Iterator[Line]:
    model, text = cache_folder() / MODELS["SmolLM2"], DATA / "text" / "en_time_machine.txt"
    if not model.is_file() or not text.is_file():
        yield Line(
            "SmolLM2 on prose", f"{model if text.is_file() else text} is not here", None, run=False
        )
        return
    windows = quality.read_windows(model, text, tokens)
    with tempfile.TemporaryDirectory() as folder:
        base = quality.keep(Path(folder) / "base", quality.logits_of(model, quality.EXACT, windows))
        found = quality.loss(
            base, quality.logits_of(model, quality.WAYS["file, auto"], windows), windows
        )
    figure = f"KL {found.kl:.5f}, same top token {found.same:.2%}, perplexity {found.change:+.2%}"
    what = f"SmolLM2 on {found.tokens:,} tokens of prose (KL {KL}, {SAME:.0%} as before)"
    yield Line(what, figure, found.kl <= KL and found.same >= SAME)
