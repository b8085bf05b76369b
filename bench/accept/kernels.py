"""`make accept NAME=kernels`: every line that the CPU kernels must show, measured in parts that add up.

    python bench/accept/kernels.py [--only PART ...] [--rounds 5] [--limit N] [--report]
                                   [--picture docs/peers.svg]

Each part writes what it measured to bench/results/kernels/PART.json. The lines are judged from these files
(kernels_judge.py), so that a part can be measured again alone. --report measures nothing and prints all
lines. --limit N is a trial with the first N requests of a few tokens, and one round; nothing is judged by it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kernels_judge as judge
from harness import DATA, RESULTS, ROOT, NotRun

sys.path.insert(0, str(ROOT / "bench"))

import quality_types
from pageturner.formats import hub
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.kernels import peak
from pageturner.kernels.cpu.native import NativeOps
from pageturner.lab.traffic.traffic_files import read_workload
from peers import launch, picture, rounds, run, table

FOLDER = RESULTS / "kernels"
QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
PEERS = ("llama", "llama-q4_0", "llama-q8_0", "openvino", "openvino-q4_0", "openvino-q8_0", "vllm")
TYPES = ("Q4_0", "Q4_1", "Q8_0", "F16", "F32")
UNSEEN_TEXTS = (
    "en_sherlock_holmes.txt",
    "en_inaugural_addresses.txt",
)  # no other workload has words of these
UNSEEN_SEED = 20_261
LOAD = 0.7  # of what the fastest peer can do, for poisson


@dataclass(frozen=True, slots=True)
class Options:
    """How much is measured. `limit`: requests of a trial; 0: the real thing."""

    rounds: int
    limit: int


def _play(
    name: str, engines: list[str], paths: dict[str, Path], o: Options, **how: Any
) -> dict[str, Any]:
    """Turns of all engines that are there, saved as they come."""
    present = list(dict.fromkeys(engine for engine in engines if rounds.is_there(engine)))
    failed = {engine: "not installed" for engine in engines if engine not in present}
    about = {"machine": run.machine(), "failed": failed, **how.get("about", {})}
    if len(present) < 2 or present[0].partition("@")[0] != rounds.OURS:
        raise NotRun(f"none of these is installed: {', '.join(engines[1:])} (bench/peers/setup.sh)")
    if o.limit:
        paths = {workload: _shortened(path, o.limit) for workload, path in paths.items()}
    flags = {workload: how.get("flags", []) for workload in paths}
    turns = []
    for turn in rounds.play(present, paths, o.rounds, flags, how.get("fewer", rounds.SLOW), failed):
        turns.append(turn)
        rate = turn.figures["output_tokens_per_s"]
        print(
            f"          round {turn.round + 1}, {turn.workload}: {turn.engine} {rate:.1f} tok/s",
            flush=True,
        )
        rounds.save(FOLDER / f"{name}.json", about, turns)
    return {**about, "turns": [asdict(turn) for turn in turns]}


def _shortened(path: Path, requests: int) -> Path:
    """The first requests with a few words and tokens each."""
    short = []
    for line in path.read_text().splitlines()[:requests]:
        job = json.loads(line)
        short.append(
            json.dumps(
                job | {"prompt": job["prompt"][:80], "max_tokens": min(job["max_tokens"], 4)}
            )
        )
    target = FOLDER / f"trial_{path.name}"
    target.write_text("\n".join(short) + "\n")
    return target


def _workload(name: str) -> Path:
    path = DATA / "workloads" / f"{name}.jsonl"
    if not path.is_file():
        raise NotRun(f"{path} is absent")
    return path


def _recorded(name: str) -> dict[str, Any]:
    """What a part measured. NotRun if it has not."""
    try:
        found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
        return found
    except (OSError, ValueError) as error:
        raise NotRun(f"the part {name} has not been measured") from error


def _json_of(command: list[Any]) -> dict[str, Any]:
    """The figures that a script of ours writes to its --json."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        words = [sys.executable, *map(str, command), "--json", out.name]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=3600)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words[1:4])}: {(done.stdout + done.stderr)[-500:]}")
        figures: dict[str, Any] = json.loads(Path(out.name).read_text())
        return figures


def _steps(*flags: Any) -> dict[str, Any]:
    return _json_of([ROOT / "bench" / "steps.py", *flags])


# -- loads ---------------------------------------------------------------------------------------------------


def mixed64(o: Options) -> dict[str, Any]:
    return _play(
        "mixed64", [rounds.OURS, *PEERS, "transformers"], {"mixed64": _workload("mixed64")}, o
    )


def poisson(o: Options) -> dict[str, Any]:
    """At the rate that loads the fastest peer to 70 %, by what it did with mixed64; the same file for all."""
    path = _workload("poisson")
    turns = rounds.load_turns(_recorded("mixed64"))
    fastest = rounds.best_peer(turns, "mixed64", "output")
    rate = rounds.medians(turns, "mixed64", "output")[fastest]
    jobs = read_workload(path)
    offered = sum(job.max_tokens for job in jobs) / max(job.arrival for job in jobs)
    scale = LOAD * rate / offered
    engines = [rounds.OURS, fastest, "openvino-q4_0", "vllm", "llama-q4_0"]
    about = {"rate_scale": scale, "fastest": fastest, "offered_tokens_per_s": offered * scale}
    flags = ["--arrivals", "--rate-scale", f"{scale:.4f}"]
    return _play("poisson", engines, {"poisson": path}, o, flags=flags, about=about)


def prefix(o: Options) -> dict[str, Any]:
    engines = [rounds.OURS, "vllm", "openvino-prefix", "llama-q4_0", "llama"]
    slow = {"openvino-prefix": 3, "llama-q4_0": 3, "llama": 2}
    return _play("prefix", engines, {"prefix": _workload("prefix")}, o, fewer=slow)


def single(o: Options) -> dict[str, Any]:
    engines = [rounds.OURS, "llama", "llama-q4_0", "openvino-q4_0"]
    found = _play("single", engines, {"single": _workload("single")}, o, fewer={})
    ops = NativeOps()
    reading = [peak.measure(ops.isa, ops.threads, 1.0).read_gb_s["256M"] for _ in range(o.rounds)]
    return found | {"read_gb_s": max(reading), "read_bytes": _packed("smollm2")["read_bytes"]}


def unseen(o: Options) -> dict[str, Any]:
    """Lengths drawn anew from those of mixed64, words of texts that no workload has."""
    path = FOLDER / "mixed64_unseen.jsonl"
    path.write_text(_unseen(_workload("mixed64")))
    turns = rounds.load_turns(_recorded("mixed64"))
    engines = [e for e in rounds.ranked(turns, "mixed64", "output") if e != rounds.OURS][:2]
    about = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return _play("unseen", [rounds.OURS, *engines], {"mixed64": path}, o, about=about)


def _unseen(source: Path) -> str:
    """The JSONL file: prompt and answer lengths drawn from those of `source`, each apart."""
    tokenizer = load_tokenizer(hub.resolve("smollm2").path)
    texts = [DATA / "text" / name for name in UNSEEN_TEXTS]
    if not all(text.is_file() for text in texts):
        raise NotRun(f"{texts[0].parent} has not all of {', '.join(UNSEEN_TEXTS)}")
    tokens = [
        tokenizer.encode(t.read_text(), add_special=False, parse_special=False) for t in texts
    ]
    jobs, dice, lines = read_workload(source), random.Random(UNSEEN_SEED), []
    lengths = [len(tokenizer.encode(j.text, add_special=False, parse_special=False)) for j in jobs]
    for _ in jobs:
        n, answer, words = dice.choice(lengths), dice.choice(jobs).max_tokens, dice.choice(tokens)
        start = dice.randrange(len(words) - n)
        prompt = tokenizer.decode(words[start : start + n])
        lines.append(json.dumps({"prompt": prompt, "max_tokens": answer, "arrival_s": 0.0}))
    return "\n".join(lines) + "\n"


def floats(o: Options) -> dict[str, Any]:
    files = {kind: _type_file(kind) for kind in ("F32", "F16")}
    engines = [f"{name}@{file}" for name in (rounds.OURS, "llama") for file in files.values()]
    slow = {engine: 3 for engine in engines if engine.startswith("llama")}
    return _play("floats", [*engines, "vllm"], {"mixed64": _workload("mixed64")}, o, fewer=slow)


def qwen(o: Options) -> dict[str, Any]:
    path = hub.cache_folder() / QWEN
    if not path.is_file():
        raise NotRun(f"{path} is absent: python tests/tools/fetch_models.py")
    half = FOLDER / "mixed64_half.jsonl"
    lines = _workload("mixed64").read_text().splitlines(keepends=True)
    half.write_text("".join(lines[: len(lines) // 2]))
    # OpenVINO reads no Q5_0, which this file has: it gets a Q4_0 and a Q8_0 made of it
    engines = [f"{name}@{path}" for name in (rounds.OURS, "llama")]
    engines += [f"openvino@{_type_file(kind, path)}" for kind in ("Q4_0", "Q8_0")]
    return _play("qwen", engines, {"mixed64": half, "single": _workload("single")}, o)


def _type_file(kind: str, source: Path | None = None) -> Path:
    """SmolLM2, or another file, in another type, made by llama-quantize if it is not there."""
    folder = launch.cache_dir() / "types"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return quality_types.make_file(source or hub.resolve("smollm2").path, kind, folder)
    except FileNotFoundError as error:
        raise NotRun(str(error)) from error


def _packed(model: str) -> dict[str, Any]:
    """Bytes of the packed weights: of all, and of those that every token reads."""
    found = _steps("--model", model, "--prefill", 16, "--batch")
    return {name: found[name] for name in ("packed_bytes", "read_bytes")}


# -- fixed sizes ---------------------------------------------------------------------------------------------


def _llama(program: str, *flags: Any) -> str:
    try:
        command = [launch.find_llama(program), *flags]
    except FileNotFoundError as error:
        raise NotRun(str(error)) from error
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise RuntimeError(f"{program}: {done.stderr[-300:]}")
    return done.stdout


def prefill(o: Options) -> dict[str, Any]:
    """Prompts of 512 tokens, whole engine, beside `llama-bench -p 512` of every type; our products alone."""
    tokens = 32 if o.limit else 512
    files = {kind: _type_file(kind) for kind in TYPES}
    turns = []
    for _ in range(o.rounds):
        mine = _steps("--prefill", tokens, "--batch")["served"][0]["tokens_per_s"]
        models = [word for file in files.values() for word in ("-m", file)]
        rows = json.loads(
            _llama("llama-bench", *models, "-p", tokens, "-n", 0, "-t", 2, "-r", 2, "-o", "json")
        )
        theirs = {kind: row["avg_ts"] for kind, row in zip(files, rows, strict=True)}
        turns.append({"ours": mine, "theirs": theirs})
    ladder = _json_of(
        ["-m", "pageturner.lab.bench.bench_kernels", "--only", "gemm", "--budget", 0.3]
    )
    return {"machine": run.machine(), "rounds": turns, "ladder": ladder}


def batch32(o: Options) -> dict[str, Any]:
    """Decode of 32 sequences around a context of 250, whole engine, beside llama-batched-bench."""
    batch, context = (4, 40) if o.limit else (32, 250)
    turns = []
    for _ in range(o.rounds):
        mine = _steps("--prefill", "--batch", batch, "--context", context)["served"][0][
            "tokens_per_s"
        ]
        theirs = {}
        for kind in ("Q4_0", "Q4_1", "Q8_0"):
            sizes = ["-npp", context - 12, "-ntg", 24, "-npl", batch, "-c", batch * (context + 32)]
            out = _llama(
                "llama-batched-bench",
                "-m",
                _type_file(kind),
                "-t",
                2,
                *sizes,
                "--output-format",
                "jsonl",
            )
            theirs[kind] = json.loads(out.strip().splitlines()[-1])["speed_tg"]
        turns.append({"ours": mine, "theirs": theirs})
    return {"machine": run.machine(), "rounds": turns}


def sampler(o: Options) -> dict[str, Any]:
    """64 sequences that decode together, every second one sampled with every filter."""
    flags = ["--prefill", "--batch", 4 if o.limit else 64, "--sampled", "--operators"]
    runs = []
    for _ in range(min(o.rounds, 3)):
        found = _steps(*flags)
        runs.append({"served": found["served"][0], "apart": found["apart"][0]})
    return {"machine": run.machine(), "runs": runs}


def profile(o: Options) -> dict[str, Any]:
    sizes = ["--prefill", 32, "--batch", 1] if o.limit else ["--prefill", 512, "--batch", 1, 8, 32]
    return {"machine": run.machine(), **_steps(*sizes, "--operators")}


def memory(o: Options) -> dict[str, Any]:
    """The peak of a fresh engine under mixed64, and its bound: packed weights, KV in use, and 150 MB."""
    path = _workload("mixed64")
    with rounds.opened(rounds.OURS) as measure:
        peak_mb = measure(_shortened(path, o.limit) if o.limit else path, [])["peak_rss_mb"]
    tokenizer = load_tokenizer(hub.resolve("smollm2").path)
    jobs = read_workload(path)[: o.limit or None]
    lengths = [len(tokenizer.encode(j.text, add_special=True, parse_special=False)) for j in jobs]
    blocks = sum(-(-(n + job.max_tokens) // 16) for n, job in zip(lengths, jobs, strict=True))
    kv = judge.KV_BYTES * 16 * blocks
    return {"peak_mb": peak_mb, "kv_bytes": kv, **_packed("smollm2")}


# -- quality and suites --------------------------------------------------------------------------------------


PARTS: dict[str, Callable[[Options], dict[str, Any]]] = {
    "mixed64": mixed64,
    "poisson": poisson,
    "single": single,
    "prefill": prefill,
    "batch32": batch32,
    "prefix": prefix,
    "floats": floats,
    "qwen": qwen,
    "unseen": unseen,
    "sampler": sampler,
    "memory": memory,
    "profile": profile,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="measure these parts")
    parser.add_argument(
        "--rounds", type=int, default=5, help="slow peers run fewer, and the line says so"
    )
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N", help="a trial: the first N requests, one round"
    )
    parser.add_argument(
        "--report", action="store_true", help="print every line from what was measured before"
    )
    parser.add_argument(
        "--picture", type=Path, help="only draw the peers, from what was measured before"
    )
    args = parser.parse_args()
    if args.picture:
        args.picture.write_text(_picture())
        return 0
    options = Options(1 if args.limit else args.rounds, args.limit)
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = [] if args.report else args.only or list(PARTS)
    for name in wanted:
        begin = time.monotonic()
        _measure(name, options)
        print(f"          ({name}: {time.monotonic() - begin:.0f} s)", flush=True)
    verdicts = [v for name in args.only or PARTS for v in _report(name)]
    print(
        f"{len(verdicts)} lines, {verdicts.count('FAIL')} failed, {verdicts.count('NOT RUN')} not run"
    )
    return 1 if "FAIL" in verdicts else 0


def _measure(name: str, options: Options) -> None:
    """One part into its file; what went wrong is written too, and is a line of the report."""
    try:
        found = PARTS[name](options)
    except NotRun as reason:
        found = {"not_run": str(reason)}
    except Exception as error:  # the other parts are still measured
        found = {"error": f"{type(error).__name__}: {error}"}
    found |= {"trial": bool(options.limit)}
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=2))


def _picture() -> str:
    """The SVG of every peer on the four workloads."""
    turns = [turn for name in table.JUDGED for turn in rounds.load_turns(_recorded(name))]
    return picture.draw(rounds.pairs(turns), "Pageturner beside its peers")


def _report(name: str) -> list[str]:
    """Print the lines of a part; their verdicts."""
    try:
        found = _recorded(name)
        rows = [
            (line.what, line.figure, judge.VERDICTS[line.passed])
            for line in judge.lines(name, found)
        ]
        if found.get("trial"):
            rows = [(what, figure, "TRIAL") for what, figure, _ in rows]
    except NotRun as reason:
        rows = [(what, str(reason), "NOT RUN") for what in judge.TITLES[name]]
    except Exception as error:  # a line that cannot be judged has failed
        rows = [(what, f"{type(error).__name__}: {error}", "FAIL") for what in judge.TITLES[name]]
    for what, figure, verdict in rows:
        print(f"{verdict:9} {what}: {figure}", flush=True)
    return [verdict for _, _, verdict in rows]


if __name__ == "__main__":
    sys.exit(main())
