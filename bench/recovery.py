"""What a crash costs: `kill -9` to the next token, KV taken back or computed again.

    python bench/recovery.py [--streams 8] [--context 4000] [--rounds 3]

A server answers all prompts undisturbed, then again with its engine killed in the middle, with
--kv-survival and with --no-kv-survival in turn. Every text must be what it was.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "accept")]
import harness  # noqa: E402
from harness import Server  # noqa: E402

from prove_claims import Answer, Target, ask  # noqa: E402

BEFORE, AFTER = 24, 40  # tokens of each stream before the engine is killed, and behind that
MEMORY = "1400M"


def prompts_of(streams: int, context: int) -> list[list[int]]:
    dice = random.Random(5)
    return [[dice.randrange(1000, 40000) for _ in range(context)] for _ in range(streams)]


def run(server: Server, prompts: list[list[int]], kill: bool) -> tuple[list[Answer], float]:
    """All answers, streamed at once; and when the engine was killed, as soon as all had BEFORE tokens."""
    enough = threading.Barrier(len(prompts) + 1)
    target = Target("ours", url=server.url, model="smollm2")

    def pause(answer: Answer) -> bool:
        if len(answer.arrivals) == BEFORE:
            enough.wait()
        return False

    def one(number: int) -> Answer:
        drawn = {"seed": number, "temperature": 0.8}
        return ask(target, prompts[number], BEFORE + AFTER, pause, **drawn)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(one, range(len(prompts)))
        enough.wait()
        killed = time.monotonic()
        if kill:
            os.kill(server.engine_pid(), signal.SIGKILL)
        return list(answers), killed


def recover(streams: int, context: int, rounds: int) -> int:
    prompts = prompts_of(streams, context)
    found: dict[str, list[tuple[float, float]]] = {"--kv-survival": [], "--no-kv-survival": []}
    truth: list[str] = []
    for _ in range(rounds):
        for flag, times in found.items():
            with harness.server(flag, "--kv-cache-memory", MEMORY) as server:
                undisturbed, _ = run(server, prompts, kill=False)
                truth = truth or [answer.text for answer in undisturbed]
                disturbed, killed = run(server, prompts, kill=True)
                for answers in (undisturbed, disturbed):
                    if [answer.text for answer in answers] != truth:
                        print(f"{flag}: a text differs")
                        return 1
                back = sorted(answer.back_at(killed) - killed for answer in disturbed)
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/recovery.py")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--context", type=int, default=4000, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    return recover(arguments.streams, arguments.context, arguments.rounds)


if __name__ == "__main__":
    sys.exit(main())
