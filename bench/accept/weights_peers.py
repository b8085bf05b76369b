"""Middling models beside the fastest engines that one can have, in turns, on the same machine.

Owns the loads, the engines that are named for each, and the targets. An engine that is not installed, or
fails, makes the line NOT RUN (with the figure against the others): nobody is the fastest of those who stayed
away. In each round everybody runs once; who is far behind after the first round runs no more. Each load's
turns are kept in bench/results/weights/NAME.json, and `--peers-report` judges them without measuring.

mixed64   SmolLM2, 64 requests at once: output, and the gap between tokens
poisson   the same at 70 % of what the fastest peer makes of mixed64
qwen      Qwen2.5-Coder 0.5B and 1.5B: half of mixed64, and one request
four      random weights of Qwen3-4B's shape in Q4_0: a prompt of 512, 16 at once, one alone
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import DATA, RESULTS, Line, NotRun

import quality_types
import random_model
from pageturner.formats import hub
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.lab.traffic.traffic_files import read_workload
from peers import launch, rounds, run, table
from peers.rounds import OURS, Turn

FOLDER = RESULTS / "weights"
LOADS = ("mixed64", "poisson", "qwen", "four")

SMOLLM2 = (
    "openvino",
    "openvino-q4_0",
    "openvino-q8_0",
    "ik",
    "llama",
    "llama-q4_0",
    "vllm",
    "ik-64",
    "llama-64",
)
QWEN = ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")
BEHIND = 0.75  # of the best peer's first round: who made less than this of it runs no more
LOAD = 0.7
TEXT = "en_sherlock_holmes.txt"
# load of the 4B shape -> requests, tokens of each prompt, tokens of each answer
FOUR = {"prompt512": (1, 512, 2), "sixteen": (16, 64, 48), "alone": (1, 64, 48)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--peers-loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--peers-rounds", type=int, default=3)
    parser.add_argument(
        "--peers-report", action="store_true", help="judge what was measured before"
    )


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """Measure the loads that are asked for, and judge each."""
    for load in arguments.peers_loads:
        try:
            yield from _JUDGES[load](arguments)
        except NotRun as reason:
            yield Line(load, str(reason), None, run=False)


def _play(
    name: str,
    engines: Sequence[str],
    workloads: dict[str, Path],
    arguments: argparse.Namespace,
    flags: Sequence[str] = (),
) -> tuple[list[Turn], dict[str, str]]:
    """Turns of all engines, and why some have none."""
    path = FOLDER / f"{name}.json"
    if arguments.peers_report:
        if not path.is_file():
            raise NotRun(f"{name} has not been measured")
        saved = json.loads(path.read_text())
        return rounds.load_turns(saved), saved["failed"]
    present = [engine for engine in engines if rounds.is_there(engine)]
    failed = {engine: "not installed" for engine in engines if engine not in present}
    about = {
        "machine": run.machine(),
        "isa": os.environ.get("PAGETURNER_ISA", "native"),
        "failed": failed,
    }
    turns: list[Turn] = []
    fewer: dict[str, int] = {}
    each = {workload: list(flags) for workload in workloads}
    for turn in rounds.play(present, workloads, arguments.peers_rounds, each, fewer, failed):
        turns.append(turn)
        rate, gap = turn.figures["output_tokens_per_s"], turn.figures["itl_ms"]["p99"]
        said = f"{rate:.1f} tok/s, TTFT p99 {turn.figures['ttft_ms']['p99']:.0f} ms, gap p99 {gap:.0f} ms"
        print(
            f"          {name} {turn.round + 1}, {turn.workload}: {_short(turn.engine)} {said}",
            flush=True,
        )
        rounds.save(path, about, turns)
        fewer |= dict.fromkeys(_behind(turns, list(workloads)), 1)
    return turns, failed


def _behind(turns: Sequence[Turn], workloads: Sequence[str]) -> set[str]:
    """Engines that are slow on every load of the first round, once all have run it."""
    slow: set[str] | None = None
    for workload in workloads:
        first = {
            t.engine: t.figures["output_tokens_per_s"]
            for t in turns
            if t.round == 0 and t.workload == workload and not t.engine.startswith(OURS)
        }
        best = max(first.values(), default=0.0)
        here = {engine for engine, rate in first.items() if rate < BEHIND * best}
        slow = here if slow is None else slow & here
    return slow or set()


def _short(engine: str) -> str:
    """ "llama@/folder/model.gguf" as "llama"."""
    name, _, file = engine.partition("@")
    return f"{name} ({Path(file).stem[-12:]})" if file and name == "openvino" else name


def _fastest(turns: Sequence[Turn], workload: str, metric: str) -> str:
    try:
        return rounds.best_peer(turns, workload, metric)
    except LookupError as error:
        raise NotRun(str(error)) from error


def judged(
    what: str,
    turns: Sequence[Turn],
    failed: dict[str, str],
    workload: str,
    metric: str,
    least: float,
) -> Line:
    """Ours against the best of all who ran; NOT RUN where somebody named did not."""
    best = _fastest(turns, workload, metric)
    mine = next(t.engine for t in turns if t.engine.startswith(OURS))
    ratio, count = rounds.ratio(turns, workload, metric, mine, best)
    middle = rounds.medians(turns, workload, metric)
    unit = table.METRICS[metric][1]
    figure = f"{ratio:.2f}x {_short(best)} ({middle[mine]:.1f} / {middle[best]:.1f} {unit}, {count} rounds); "
    figure += ", ".join(
        f"{_short(engine)} {value:.1f}"
        for engine, value in middle.items()
        if engine not in (mine, best)
    )
    return _unless_missing(f"{what}: at least {least:g}x", figure, ratio >= least, failed)


def _unless_missing(what: str, figure: str, passed: bool, failed: dict[str, str]) -> Line:
    """NOT RUN where somebody named did not run."""
    if not failed:
        return Line(what, figure, passed)
    missing = ", ".join(f"{_short(engine)}: {why[:60]}" for engine, why in failed.items())
    return Line(what, f"{figure}; without {missing}", None, run=False)


def _workload(name: str) -> Path:
    path = DATA / "workloads" / f"{name}.jsonl"
    if not path.is_file():
        raise NotRun(f"{path} is absent")
    return path


def mixed64(arguments: argparse.Namespace) -> Iterator[Line]:
    """All of the workload at once."""
    turns, failed = _play("mixed64", [OURS, *SMOLLM2], {"mixed64": _workload("mixed64")}, arguments)
    yield judged("mixed64, output (aim 2x)", turns, failed, "mixed64", "output", 1.7)
    gaps = {
        engine: statistics.median(t.figures["itl_ms"]["p99"] for t in turns if t.engine == engine)
        for engine in dict.fromkeys(t.engine for t in turns)
    }
    # a server that lets most clients wait has short gaps: only who makes half of the best output counts
    output = rounds.medians(turns, "mixed64", "output")
    enough = max(rate for engine, rate in output.items() if engine != OURS) / 2
    best = min((e for e in gaps if e != OURS and output[e] >= enough), key=lambda e: gaps[e])
    figure = f"{gaps[OURS]:.0f} ms, {best} {gaps[best]:.0f} ms; "
    figure += ", ".join(f"{e} {gap:.0f}" for e, gap in gaps.items() if e not in (OURS, best))
    what = "mixed64, gap between tokens, p99: no worse than the best peer's"
    yield _unless_missing(what, figure, gaps[OURS] <= gaps[best], failed)


def poisson(arguments: argparse.Namespace) -> Iterator[Line]:
    """The same arrivals for everybody, scaled to the load of the fastest peer."""
    path, saved = _workload("poisson"), FOLDER / "mixed64.json"
    if not saved.is_file():
        raise NotRun("mixed64 has not been measured, which says how fast the fastest peer is")
    before = rounds.load_turns(json.loads(saved.read_text()))
    ranked = [e for e in rounds.ranked(before, "mixed64", "output") if e != OURS]
    rate = rounds.medians(before, "mixed64", "output")[ranked[0]]
    jobs = read_workload(path)
    offered = sum(job.max_tokens for job in jobs) / max(job.arrival for job in jobs)
    scale = LOAD * rate / offered
    engines = [OURS, *ranked[:3]]
    turns, failed = _play(
        "poisson",
        engines,
        {"poisson": path},
        arguments,
        ["--arrivals", "--rate-scale", f"{scale:.4f}"],
    )
    for metric in ("TTFT p99", "TPOT p50"):
        what = f"poisson at {LOAD:.0%} of {ranked[0]} (arrivals x {scale:.2f}), {metric}"
        yield judged(what, turns, failed, "poisson", metric, 2)


def qwen(arguments: argparse.Namespace) -> Iterator[Line]:
    """A real model of each size."""
    half = FOLDER / "mixed64_half.jsonl"
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = _workload("mixed64").read_text().splitlines(keepends=True)
    half.write_text("".join(rows[: len(rows) // 2]))
    for name in QWEN:
        path, size = hub.cache_folder() / name, name.split("-")[2]
        if not path.is_file():
            yield Line(f"Qwen2.5-Coder {size}", f"{name} is absent", None, run=False)
            continue
        engines = [f"{engine}@{path}" for engine in (OURS, "llama", "ik")]
        # OpenVINO reads no Q5_0: it gets files of types that it is fast with
        engines += [f"openvino@{_made(kind, path)}" for kind in ("Q4_0", "Q8_0")]
        loads = {"mixed64": half, "single": _workload("single")}
        turns, failed = _play(f"qwen-{size}", engines, loads, arguments)
        for workload, least in (("mixed64", 1.6), ("single", 1.3)):
            yield judged(
                f"Qwen2.5-Coder {size}, {workload}", turns, failed, workload, "output", least
            )


def _made(kind: str, source: Path) -> Path:
    """A file of one type, made by llama-quantize if it is not there."""
    folder = launch.cache_dir() / "types"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return quality_types.make_file(source, kind, folder)
    except (FileNotFoundError, RuntimeError) as error:
        raise NotRun(str(error)) from error


def four(arguments: argparse.Namespace) -> Iterator[Line]:
    """Random weights of a 4B shape."""
    path = launch.cache_dir() / "types" / "random-qwen3-4b.Q4_0.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        random_model.write(path, "qwen3-4b", "Q4_0", seed=1)
    loads = {name: words(name, path, *size) for name, size in FOUR.items()}
    engines = [f"{engine}@{path}" for engine in (OURS, "ik", "llama", "openvino")]
    turns, failed = _play("four", engines, loads, arguments)
    yield judged(
        "4B shape, a prompt of 512, first token", turns, failed, "prompt512", "TTFT p50", 1.2
    )
    yield judged("4B shape, 16 at once, output", turns, failed, "sixteen", "output", 2)
    yield judged("4B shape, one alone, time per token", turns, failed, "alone", "TPOT p50", 1.05)


def words(
    name: str, model: Path, requests: int, prompt: int, answer: int, *, begin: int = 1000
) -> Path:
    """A workload of prompts of so many tokens, each from its own place of a book from `begin` on."""
    text = DATA / "text" / TEXT
    if not text.is_file():
        raise NotRun(f"{text} is absent")
    tokenizer = load_tokenizer(model)
    tokens = tokenizer.encode(text.read_text()[:400_000], add_special=False, parse_special=False)
    target = FOLDER / f"{name}.jsonl"
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(requests):
        first = begin + 2 * i * prompt
        words = tokenizer.decode(tokens[first : first + prompt])
        rows.append(json.dumps({"prompt": words, "max_tokens": answer, "arrival_s": 0.0}))
    target.write_text("\n".join(rows) + "\n")
    return target


_JUDGES: dict[str, Any] = {"mixed64": mixed64, "poisson": poisson, "qwen": qwen, "four": four}
