"""Pageturner beside its peers: the same workloads, interleaved (ours, peer, ours, peer), medians and ratios.

    python bench/peers/run.py [--peers llama openvino ...] [--workloads mixed64 ...] [--rounds 3] [--limit N]

Every measurement begins with a fresh process, so that nobody answers from the cache of the round before; a
peer that takes minutes to start (vllm) stays, and has its prefix cache emptied instead. Warm-up requests are
never counted. Writes peers.json, peers.md and peers.svg. Peers that are not installed are left out, and said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parent
sys.path[:0] = [str(BENCH), str(BENCH / "accept")]

import harness  # noqa: E402

from peers import launch, picture, table  # noqa: E402
from peers.table import Pair  # noqa: E402

WORKLOADS = list(table.JUDGED)
LIMIT_S = 3600  # for one measurement: a peer that hangs does not keep the others
Figures = dict[str, Any]
Measure = Callable[[Path, list[str]], Figures]  # workload file, flags: the figures of one run


def served(url: str, model: str, pid: int, started_s: float) -> Measure:
    """`pageturner bench serve` against a running server: the same client for everybody."""

    def measure(workload: Path, flags: list[str]) -> Figures:
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            command = [sys.executable, "-m", "pageturner", "bench", "serve", "--base-url", url]
            command += ["--model", model, "--workload", str(workload), "--output", out.name]
            count = sum(1 for line in workload.read_text().splitlines() if line.strip())
            _run([*command, "--concurrency", str(count), *_translated(flags)])
            figures: Figures = json.loads(Path(out.name).read_text())
        return figures | {"started_s": started_s, "peak_rss_mb": group_peak_mb(pid)}

    return measure


def _translated(flags: list[str]) -> list[str]:
    return ["--num-prompts" if flag == "--limit" else flag for flag in flags]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command[:4])} ... took more than {LIMIT_S} s") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ...: {(done.stdout + done.stderr)[-600:]}")


def group_peak_mb(pgid: int) -> float:
    """Sum of the largest resident sizes of a process and all its descendants."""
    total = 0.0
    for pid in harness.family(pgid):
        with contextlib.suppress(OSError, StopIteration):
            total += harness.rss_mb(pid, "VmHWM")
    return total


@contextlib.contextmanager
def ours(model: str = "smollm2") -> Iterator[Measure]:
    begin = time.monotonic()
    # as peers are by default: how far drafts help depends on the texts
    flags = ("--served-model-name", "ours", "--speculation", "off")
    with harness.server(*flags, model=model) as server:
        yield served(server.url, "ours", server.process.pid, time.monotonic() - begin)


@contextlib.contextmanager
def fresh_server(name: str, model: Path | None = None) -> Iterator[Measure]:
    with launch.running(name, model=model) as peer:
        yield served(peer.url, peer.model, peer.process.pid, peer.started_s)


@contextlib.contextmanager
def kept_server(name: str) -> Iterator[Measure]:
    """One server for all measurements, which empties its prefix cache before each."""
    with launch.running(name) as peer:
        measure = served(peer.url, peer.model, peer.process.pid, peer.started_s)

        def emptied(workload: Path, flags: list[str]) -> Figures:
            asked = urllib.request.Request(f"{peer.url}/reset_prefix_cache", method="POST")
            try:
                urllib.request.urlopen(asked, timeout=30).close()
            except OSError as error:
                raise RuntimeError(f"{name} does not empty its cache: {error}") from error
            return measure(workload, flags)

        yield emptied


@contextlib.contextmanager
def in_process(venv: str, model: Path, script: str, *flags: str) -> Iterator[Measure]:
    """A runner script in the environment of its peer: loads, warms up, runs, writes its figures."""

    def measure(workload: Path, given: list[str]) -> Figures:
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            python = launch.peers_dir() / venv / "bin" / "python"
            command = [str(python), str(BENCH / "peers" / script), "--model", str(model)]
            _run([*command, *flags, "--workload", str(workload), "--output", out.name, *given])
            figures: Figures = json.loads(Path(out.name).read_text())
            return figures

    yield measure


def openvino(name: str) -> contextlib.AbstractContextManager[Measure]:
    kind, *flags = OPENVINO[name]
    return in_process("openvino", launch.gguf(kind), "run_openvino.py", *flags)


def transformers(name: str) -> contextlib.AbstractContextManager[Measure]:
    return in_process(
        "transformers", launch.folder(), "run_transformers.py", "--mode", TRANSFORMERS[name]
    )


# Ours is always the file as it comes (Q4_1). Types that llama.cpp and OpenVINO are faster with are variants.
LLAMA = ("llama", "llama-8", "llama-64", "llama-q4_0", "llama-q8_0", "ik", "ik-8", "ik-64")
OPENVINO = {  # name -> type of the file, flags
    "openvino": ("q4_1",),
    "openvino-prefix": ("q4_1", "--prefix-caching"),
    "openvino-q4_0": ("q4_0",),
    "openvino-q8_0": ("q8_0",),
}
TRANSFORMERS = {"transformers": "static", "transformers-cb": "continuous"}  # name -> mode
PEERS: dict[str, Callable[[], contextlib.AbstractContextManager[Measure]]] = {
    **{name: partial(fresh_server, name) for name in LLAMA},
    "vllm": partial(kept_server, "vllm"),
    **{name: partial(openvino, name) for name in OPENVINO},
    **{name: partial(transformers, name) for name in TRANSFORMERS},
}
STAYS = {"vllm"}


def installed(name: str) -> bool:
    """Whether a peer and the form of the model that it loads are there."""
    if name in launch.COMMANDS:
        return launch.installed(name)
    venv, model = (
        ("openvino", launch.gguf(OPENVINO[name][0]))
        if name in OPENVINO
        else ("transformers", launch.folder())
    )
    return (launch.peers_dir() / venv / "bin" / "python").exists() and model.exists()


def compare(name: str, workloads: dict[str, Path], rounds: int, flags: list[str]) -> Iterator[Pair]:
    """All pairs with one peer: ours, peer, ours, peer, for each workload."""
    with contextlib.ExitStack() as stays:
        kept = stays.enter_context(PEERS[name]()) if name in STAYS else None
        for workload, path in workloads.items():
            timed = [*flags, "--arrivals"] if workload == "poisson" else _without_rate(flags)
            for _ in range(rounds):
                with ours() as measure:
                    mine = measure(path, timed)
                if kept is not None:
                    theirs = kept(path, timed)
                else:
                    with PEERS[name]() as measure:
                        theirs = measure(path, timed)
                yield Pair(workload, name, mine, theirs)


def _without_rate(flags: list[str]) -> list[str]:
    """Only the workload with arrival times has a rate."""
    at = flags.index("--rate-scale") if "--rate-scale" in flags else len(flags)
    return flags[:at] + flags[at + 2 :]


def machine() -> str:
    """What the figures depend on."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
        return f"{cpu}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.release()}"
    return platform.platform()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument(
        "--folder", type=Path, default=harness.DATA / "workloads", help="NAME.jsonl of each"
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs for each workload and peer")
    parser.add_argument(
        "--limit", type=int, default=0, help="the first N requests only, for a trial"
    )
    parser.add_argument(
        "--rate-scale", type=float, default=1.0, help="poisson: arrival times are divided by it"
    )
    parser.add_argument(
        "--output", type=Path, default=harness.RESULTS, help="folder of the results"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep what the folder has from an earlier run"
    )
    args = parser.parse_args()
    workloads = {name: args.folder / f"{name}.jsonl" for name in args.workloads}
    flags = (["--limit", str(args.limit)] if args.limit else []) + [
        "--rate-scale",
        str(args.rate_scale),
    ]
    args.output.mkdir(parents=True, exist_ok=True)
    pairs = read(args.output) if args.add else []
    about = f"{machine()}; poisson rate x {args.rate_scale:g}"
    about += f"; only the first {args.limit} requests" if args.limit else ""
    for name in args.peers:
        if not installed(name):
            print(f"{name}: not installed (bench/peers/setup.sh), left out", flush=True)
            continue
        try:
            for pair in compare(name, workloads, args.rounds, flags):
                pairs.append(pair)
                ratio = table.cell([pair], "output").ratio
                print(f"{pair.workload} beside {name}: output {ratio:.2f}x", flush=True)
                write(args.output, pairs, about)
        except (RuntimeError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    if not pairs:
        return 1
    print(f"\n{about}\n{table.text(pairs)}\n{args.output / 'peers.svg'}")
    return 0


def read(output: Path) -> list[Pair]:
    """What an earlier run wrote."""
    rows = json.loads((output / "peers.json").read_text())["pairs"]
    return [Pair(row["workload"], row["peer"], row["ours"], row["theirs"]) for row in rows]


def write(output: Path, pairs: list[Pair], about: str) -> None:
    """After every pair: a long run that is cut short leaves what it has."""
    raw = [
        {"workload": p.workload, "peer": p.peer, "ours": p.ours, "theirs": p.theirs} for p in pairs
    ]
    (output / "peers.json").write_text(json.dumps({"about": about, "pairs": raw}, indent=2))
    (output / "peers.md").write_text(f"{about}\n\n{table.markdown(pairs)}\n")
    (output / "peers.svg").write_text(picture.draw(pairs, "Pageturner beside its peers"))


if __name__ == "__main__":
    sys.exit(main())
