"""What a crash costs: `kill -9` to the next token, KV taken back or computed again; and what that takes.

    python bench/recovery.py [--streams 8] [--context 4000] [--rounds 3]    a server, killed under its streams
    python bench/recovery.py --steps                                        the same steps with and without

A server answers all prompts undisturbed, then again with its engine killed in the middle, with
--kv-survival and with --no-kv-survival in turn. Every text must be what it was. With --steps two engines take
turns, one with KV in a memory file and checksums, one with neither: prefill of all prompts, then decoding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "accept"))
import harness
from harness import Server

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.params import SamplingParams
from pageturner.request import Request

BEFORE, AFTER = 24, 40  # tokens of each stream before the engine is killed, and behind that
MEMORY = "1400M"
SLICE, SLICES = (
    32,
    8,
)  # decode steps that one engine takes before it is the other's turn, and how often


@dataclass(slots=True)
class Stream:
    """One answer as a client sees it. arrivals: of its tokens, on the clock of time.monotonic."""

    text: str = ""
    arrivals: list[float] = field(default_factory=list)

    def back_at(self, killed: float) -> float:
        """When it went on: the end of the longest gap that ends behind the kill."""
        gaps = zip([killed, *self.arrivals], self.arrivals, strict=False)
        return max(
            (after - max(before, killed), after) for before, after in gaps if after > killed
        )[1]


def prompts_of(streams: int, context: int) -> list[list[int]]:
    dice = random.Random(5)
    return [[dice.randrange(1000, 40000) for _ in range(context)] for _ in range(streams)]


def ask(server: Server, prompts: list[list[int]], kill: bool) -> tuple[list[Stream], float]:
    """All answers, streamed at once; and when the engine was killed, as soon as all had BEFORE tokens."""
    streams = [Stream() for _ in prompts]
    enough = threading.Barrier(len(prompts) + 1)

    def one(number: int) -> None:
        body = {
            "prompt": prompts[number],
            "max_tokens": BEFORE + AFTER,
            "seed": number,
            "temperature": 0.8,
            "ignore_eos": True,
            "stream": True,
        }
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    streams[number].arrivals.append(time.monotonic())
                    streams[number].text += json.loads(line[6:])["choices"][0]["text"]
                    if len(streams[number].arrivals) == BEFORE:
                        enough.wait()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    enough.wait()
    killed = time.monotonic()
    if kill:
        os.kill(server.engine_pid(), signal.SIGKILL)
    for thread in threads:
        thread.join()
    return streams, killed


def recover(streams: int, context: int, rounds: int) -> int:
    prompts = prompts_of(streams, context)
    found: dict[str, list[tuple[float, float]]] = {"--kv-survival": [], "--no-kv-survival": []}
    truth: list[str] = []
    for _ in range(rounds):
        for flag, times in found.items():
            with harness.server(flag, "--kv-cache-memory", MEMORY) as server:
                undisturbed, _ = ask(server, prompts, kill=False)
                truth = truth or [stream.text for stream in undisturbed]
                disturbed, killed = ask(server, prompts, kill=True)
                for run in (undisturbed, disturbed):
                    if [stream.text for stream in run] != truth:
                        print(f"{flag}: a text differs")
                        return 1
                back = sorted(stream.back_at(killed) - killed for stream in disturbed)
                times.append((back[0], back[-1]))
                taken = server.metric("pageturner:kv_blocks_taken_back_total")
                again = server.metric("pageturner:recomputed_tokens_total")
            print(
                f"{flag:17} first stream back after {back[0]:.2f} s, all after {back[-1]:.2f} s;"
                f" {taken:.0f} blocks taken back, {again:.0f} tokens computed again",
                flush=True,
            )
    kept, lost = (
        [statistics.median(part) for part in zip(*times, strict=True)] for times in found.values()
    )
    print(
        f"median of {rounds}, {streams} streams with {context} tokens each, all texts as undisturbed:"
        f" first {kept[0]:.2f} s and {lost[0]:.2f} s (x{lost[0] / kept[0]:.1f}),"
        f" all {kept[1]:.2f} s and {lost[1]:.2f} s (x{lost[1] / kept[1]:.1f})"
    )
    return 0


def clocks() -> tuple[float, float]:
    """Of the wall, and of the processors that this process had: others are in the first one alone."""
    return time.perf_counter(), time.process_time()


def until_decoding(built: LoadedEngine, prompts: list[list[int]]) -> tuple[float, float]:
    """Seconds, by both clocks, until every prompt has its first token."""
    for id, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=SLICE * SLICES + 50, stop_ids=(), temperature=0.0)
        built.engine.submit(Request(id, tuple(prompt), params))
    (wall, cpu), begun = clocks(), set[int]()
    while len(begun) < len(prompts):
        begun |= {event.id for event in built.engine.step()}
    return time.perf_counter() - wall, time.process_time() - cpu


def steps(streams: int, context: int, threads: int) -> int:
    prompts, fd = prompts_of(streams, context), os.memfd_create("bench")
    config = EngineConfig(kv_cache_memory=1400 << 20, threads=threads)
    engines = {"memory file": make_engine(config, kv_fd=fd), "private": make_engine(config)}
    spent = {}
    for name, built in engines.items():
        wall, cpu = until_decoding(built, prompts)
        spent[name] = built.engine.stats().get("kv_checksum_seconds", 0.0)
        print(
            f"{name}: prefill of {streams * context} tokens {wall:.2f} s, {cpu:.2f} s of processors,"
            f" for the directory {spent[name]:.3f} s ({spent[name] / wall:.2%})",
            flush=True,
        )
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(SLICES):
        for name, built in engines.items():
            for _ in range(SLICE):
                wall, cpu = clocks()
                built.engine.step()
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    for i, clock in enumerate(("wall", "processors")):
        ours, before = (statistics.median(one[i] for one in each) for each in times.values())
        print(
            f"decode step of {streams} sequences, median by the {clock}: {ours * 1e3:.3f} ms in the memory"
            f" file, {before * 1e3:.3f} ms in private memory ({ours / before - 1:+.2%})"
        )
    directory = engines["memory file"].engine.stats()["kv_checksum_seconds"] - spent["memory file"]
    print(
        f"for the directory {directory / sum(wall for wall, _ in times['memory file']):.3%} of the steps"
    )
    engines.clear()
    again = make_engine(config, kv_fd=fd)
    seconds, gigabytes = (
        again.phases.get("kv_taken_back", 0.0),
        again.taken_back * again.kv_bytes / again.num_blocks / 1e9,
    )
    print(
        f"{again.taken_back} blocks, {gigabytes:.2f} GB, taken back in {seconds:.3f} s; {again.phases}"
    )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/recovery.py")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--context", type=int, default=4000, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", action="store_true", help="what it costs, without any crash")
    parser.add_argument("--threads", type=int, default=0, help="kernel threads, with --steps")
    arguments = parser.parse_args()
    if arguments.steps:
        return steps(arguments.streams, arguments.context, arguments.threads)
    return recover(arguments.streams, arguments.context, arguments.rounds)


if __name__ == "__main__":
    sys.exit(main())
