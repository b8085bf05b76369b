"""Several engines on the same workloads in turns: in each round everybody runs once, then again.

Owns the turns, and the engines by name: "ours", a peer of run.py, or either with a file, as "ours@FILE",
"llama@FILE", "openvino@FILE". Must not know what is judged. Ratios are taken within a round.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers import run, table

OURS = "ours"
# Rounds at most, of mixed loads: those who need minutes, and who are far from being the fastest.
SLOW = {
    "transformers": 1,
    "llama": 2,
    "llama-q4_0": 2,
    "llama-q8_0": 2,
    "openvino-q8_0": 2,
    "vllm": 2,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine's figures of one workload in one round."""

    round: int
    workload: str
    engine: str
    figures: dict[str, Any]


def opened(engine: str) -> contextlib.AbstractContextManager[run.Measure]:
    """A fresh engine, ready to be measured."""
    name, _, file = engine.partition("@")
    if name == OURS:
        return run.ours(file or "smollm2")
    if not file:
        return run.PEERS[name]()
    if name == "openvino":
        return run.in_process("openvino", Path(file), "run_openvino.py")
    return run.fresh_server(name, Path(file))


def is_there(engine: str) -> bool:
    """Whether an engine and its file can be run."""
    name, _, file = engine.partition("@")
    return (name == OURS or run.installed(name)) and (not file or Path(file).is_file())


def play(
    engines: Sequence[str],
    workloads: Mapping[str, Path],
    rounds: int,
    flags: Mapping[str, list[str]],
    fewer: Mapping[str, int],
    failed: dict[str, str],
) -> Iterator[Turn]:
    """Every turn, as it is known. An engine that fails is left out from then on: `failed` says why.

    flags  of `bench serve`, by workload; fewer: rounds of engines that take minutes
    """
    with contextlib.ExitStack() as stays:
        kept: dict[str, run.Measure] = {}
        for number in range(rounds):
            for engine in engines:
                if engine in failed or number >= fewer.get(engine, rounds):
                    continue
                try:
                    if engine in run.STAYS and engine not in kept:
                        kept[engine] = stays.enter_context(opened(engine))
                    for name, path in workloads.items():
                        if engine in kept:
                            figures = kept[engine](path, flags.get(name, []))
                        else:
                            with opened(engine) as measure:
                                figures = measure(path, flags.get(name, []))
                        yield Turn(number, name, engine, figures)
                except (RuntimeError, OSError) as error:
                    print(f"{engine}: {error}", file=sys.stderr, flush=True)
                    failed[engine] = " ".join(str(error).split())[-160:]


def save(path: Path, about: dict[str, Any], turns: Sequence[Turn]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**about, "turns": [asdict(turn) for turn in turns]}, indent=2))


def load_turns(saved: Mapping[str, Any]) -> list[Turn]:
    """The turns of what `save` wrote."""
    return [Turn(**turn) for turn in saved.get("turns", ())]


def values(turns: Sequence[Turn], workload: str, metric: str) -> dict[str, dict[int, float]]:
    """Engine -> round -> value of a metric of table.METRICS."""
    found: dict[str, dict[int, float]] = {}
    for turn in turns:
        if turn.workload == workload:
            found.setdefault(turn.engine, {})[turn.round] = table.value(turn.figures, metric)
    return found


def medians(turns: Sequence[Turn], workload: str, metric: str) -> dict[str, float]:
    """Engine -> median over its rounds."""
    return {e: statistics.median(v.values()) for e, v in values(turns, workload, metric).items()}


def ratio(
    turns: Sequence[Turn], workload: str, metric: str, ours: str, peer: str
) -> tuple[float, int]:
    """Median of the rounds' ratios, above 1 where ours is better, and in how many rounds both ran."""
    found = values(turns, workload, metric)
    mine, theirs = found[ours], found[peer]
    both = sorted(mine.keys() & theirs.keys())
    more = table.METRICS[metric][2]
    ratios = [mine[n] / theirs[n] if more else theirs[n] / mine[n] for n in both]
    return statistics.median(ratios), len(both)


def pairs(turns: Sequence[Turn]) -> list[table.Pair]:
    """Ours beside each peer of the same round, for the table and the picture."""
    mine = {(turn.workload, turn.round): turn.figures for turn in turns if turn.engine == OURS}
    return [
        table.Pair(turn.workload, turn.engine, mine[turn.workload, turn.round], turn.figures)
        for turn in turns
        if turn.engine != OURS and (turn.workload, turn.round) in mine
    ]


def ranked(turns: Sequence[Turn], workload: str, metric: str) -> list[str]:
    """All engines, the best median first."""
    found = medians(turns, workload, metric)
    return sorted(found, key=lambda engine: found[engine], reverse=table.METRICS[metric][2])


def best_peer(turns: Sequence[Turn], workload: str, metric: str) -> str:
    """The peer with the best median. LookupError where no peer ran."""
    for engine in ranked(turns, workload, metric):
        if engine.partition("@")[0] != OURS:
            return engine
    raise LookupError(f"no peer has run {workload}")
