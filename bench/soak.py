"""`make soak`: load while the engine is killed, stopped and left by its clients; every text is compared.

What each request answers is found out first, undisturbed. Then clients ask for the same again and again while
the engine process gets SIGKILL or SIGSTOP at random moments. Any text that differs ends the run with status
1.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import openai

sys.path.insert(0, str(Path(__file__).parent / "accept"))
import harness
from harness import Server

from pageturner.lab.traffic.traffic import TrafficRequest
from pageturner.lab.traffic.traffic_generators import word_prompts


def ask(server: Server, number: int, job: TrafficRequest, leave_after: int | None = None) -> str:
    """One streamed answer, or its beginning if the client leaves."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        stream = client.completions.create(
            model="smollm2",
            prompt=job.prompt,
            max_tokens=job.max_tokens,
            temperature=0.8,
            seed=number,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        pieces = []
        for count, chunk in enumerate(stream):
            pieces.append(chunk.choices[0].text)
            if count == leave_after:
                stream.close()
                break
        return "".join(pieces)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=16)
    arguments = parser.parse_args()
    jobs = word_prompts(48, 60, 80, seed=11)
    truth: dict[int, str] = {}
    flags = ("--engine-timeout", "2", "--max-restarts", "1000")
    with harness.server(*flags) as server:
        harness.in_threads(len(jobs), lambda n: truth.__setitem__(n, ask(server, n, jobs[n])))
        until = time.monotonic() + 60 * arguments.minutes
        counts = {"answers": 0, "left": 0, "differ": 0, "disturbed": 0}
        lock = threading.Lock()

        def client(number: int) -> None:
            dice = random.Random(number)
            while time.monotonic() < until:
                n = dice.randrange(len(jobs))
                leave = dice.randrange(60) if dice.random() < 0.25 else None
                text = ask(server, n, jobs[n], leave)
                same = truth[n].startswith(text) if leave is not None else text == truth[n]
                with lock:
                    counts["answers"] += 1
                    counts["left"] += leave is not None
                    counts["differ"] += not same

        def disturber() -> None:
            dice = random.Random(0)
            while time.monotonic() < until:
                time.sleep(dice.uniform(2, 8))
                try:
                    os.kill(server.engine_pid(), dice.choice([signal.SIGKILL, signal.SIGSTOP]))
                except (RuntimeError, ProcessLookupError):
                    continue  # it is being restarted at this moment
                counts["disturbed"] += 1

        harness.in_threads(arguments.clients + 1, lambda n: client(n) if n else disturber())
        print(", ".join(f"{value} {name}" for name, value in counts.items()))
    return 1 if counts["differ"] or not counts["disturbed"] else 0


if __name__ == "__main__":
    sys.exit(main())
