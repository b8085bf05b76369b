"""Shapes of today's models with random weights beside llama-server and ik_llama.cpp, in turns on the same machine.

    python bench/accept/hybrid_speed.py --speed-shapes qwen3_5_4b qwen2.5-7b [--speed-rounds 3]

Each file has as many layers as `LAYERS` says. In a round each engine starts once and meets all loads; prompts are of
other places of a book in each, so that nothing is found again. Turns are kept in bench/results/shapes.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import harness
import weights_peers
from harness import RESULTS, Line, NotRun

import random_model
from peers import launch, rounds, run
from peers.rounds import OURS, Turn

# Shape -> its layers, 0 for all. A mixture of experts has as many as memory allows beside a peer's page cache.
LAYERS = {"qwen3_5_4b": 0, "gemma4_e2b": 0, "qwen3_30b": 12, "qwen3_6_35b": 10, "qwen2.5-7b": 0}
ISSUE = ("qwen3_30b", "qwen3_6_35b", "qwen3_5_4b", "gemma4_e2b")
PEERS = ("llama-8", "ik-8")
# Load -> requests, tokens of each prompt, tokens of each answer; metric; how many times the fastest peer
LOADS = {
    "prompt512": (1, 512, 2, "TTFT p50", 1.2),
    "prompt2048": (1, 2048, 2, "TTFT p50", 1.2),
    "alone": (1, 64, 48, "TPOT p50", 1.0),
    "eight": (8, 64, 48, "output", 1.5),
}
KEPT = RESULTS / "shapes.json"
TYPE = "Q4_K_M"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--speed-shapes", nargs="+", choices=list(LAYERS), default=list(ISSUE))
    parser.add_argument("--speed-loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--speed-rounds", type=int, default=1)


def lines(options: argparse.Namespace) -> Iterator[Line]:
    for shape in options.speed_shapes:
        path = model(shape)
        named = [f"{engine}@{path}" for engine in (OURS, *PEERS)]
        present = [engine for engine in named if rounds.is_there(engine)]
        failed = {engine: "not installed" for engine in named if engine not in present}
        turns = list(played(shape, present, options, failed))
        for load in options.speed_loads:
            yield judged(shape, load, turns, failed)


def model(shape: str, layers: int | None = None) -> Path:
    """The file of a shape with so many layers, written where it is not there."""
    layers = LAYERS[shape] if layers is None else layers
    path = launch.cache_dir() / "shapes" / f"{shape}.{layers or 'all'}.{TYPE}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        random_model.write(path, shape, TYPE, seed=1, layers=layers)
    return path


def played(
    shape: str, engines: Sequence[str], options: argparse.Namespace, failed: dict[str, str]
) -> Iterator[Turn]:
    """One start of each engine in each round."""
    kept = json.loads(KEPT.read_text()) if KEPT.is_file() else {}
    turns: list[Turn] = []
    for number in range(options.speed_rounds):
        loads = {
            load: weights_peers.words(
                load, model(shape), *LOADS[load][:3], begin=1000 + 3000 * (number * len(LOADS) + at)
            )
            for at, load in enumerate(LOADS)
            if load in options.speed_loads
        }
        for engine in [one for one in engines if one not in failed]:
            try:
                with rounds.opened(engine) as measure:
                    for load, workload in loads.items():
                        turns.append(Turn(number, load, engine, measure(workload, [])))
                        yield turns[-1]
            except (RuntimeError, OSError) as error:
                failed[engine] = " ".join(str(error).split())[-160:]
    each = [
        [turn.round, turn.workload, turn.engine.partition("@")[0], turn.figures] for turn in turns
    ]
    kept[shape] = {"machine": run.machine(), "failed": list(failed), "turns": each}
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    KEPT.write_text(json.dumps(kept, indent=1))


def judged(shape: str, load: str, turns: Sequence[Turn], failed: dict[str, str]) -> Line:
    """Ours beside the best peer that ran; NOT RUN where one that the issue names did not."""
    *_, metric, least = LOADS[load]
    what = f"{shape}, {LAYERS[shape] or 'all'} layers, {load}, {metric}"
    try:
        return weights_peers.judged(what, turns, failed, load, metric, least)
    except NotRun as reason:
        return Line(what, str(reason), None, run=False)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
