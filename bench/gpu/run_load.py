"""The engine under load: two public benchmarks, how long the device idles, what the host takes, and a start.

All on Qwen3-0.6B's shape with random weights, through the engine as it serves. nano-vllm's load is that of
its bench.py: 256 requests at once, prompts and answers of 100 to 1,024 random tokens, temperature 0.6. The
other load is 500 requests of 512 prompt tokens and 128 output tokens, all at once, for which vLLM publishes
94.9 requests per second on an H100.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from run_common import Room, floor_seconds, tell
from run_models import request, roomy_engine, run_all, tokens_of, write_folder

LIMIT = 240.0  # seconds after which the load is broken off, and its pace so far told
IDLE_SEQUENCES, IDLE_STEPS = 64, 150
BURST = (500, (512, 512), (128, 128))  # requests, lengths of prompts and of answers


def nano(room: Room) -> None:
    """nano-vllm's load."""
    shape = room.qwen3_06b
    requests = load(shape.vocabulary, 2, (4, 8), (2, 3)) if room.tiny else load(shape.vocabulary)
    _served(room, "nano", requests)


def burst(room: Room) -> None:
    """500 requests of 512 prompt tokens and 128 output tokens, all at once."""
    shape = room.qwen3_06b
    lengths = (3, (4, 4), (2, 2)) if room.tiny else BURST
    _served(room, "burst", load(shape.vocabulary, *lengths))


def _served(room: Room, part: str, requests: list[Any]) -> None:
    """Tell the pace of all these requests, begun at once, and its floors."""
    shape = room.qwen3_06b
    room.ceilings()
    seats = min(256, len(requests))
    with roomy_engine(room, write_folder(room, shape), 16384, seats) as here:
        before, begin = room.driver.calls, time.perf_counter()
        events = run_all(here.engine, requests, LIMIT)
        took, tokens = time.perf_counter() - begin, tokens_of(events)
        prompts = sum(len(one.prompt) for one in requests)
        context = prompts / len(requests) + tokens / len(requests) / 2
        # as if every token's step read the weights for a full batch, and its own context
        per_token = (
            2.0 * shape.weights / seats
            + context * 4 * shape.layers * shape.kv_heads * shape.head_dim
        )
        floors = floor_seconds(room, tokens * per_token, 2.0 * shape.weights * (tokens + prompts))
        wanted = sum(one.params.max_tokens or 0 for one in requests)
        tell(
            part,
            device=room.driver.name,
            shape=shape.name,
            ahead=True,
            requests=len(requests),
            prompt_tokens=prompts,
            output_tokens=tokens,
            seconds=took,
            tok_s=tokens / took,
            requests_s=len(requests) * tokens / wanted / took,
            complete=tokens == wanted,
            calls=room.driver.calls - before,
            **floors,
        )


def load(
    vocabulary: int,
    count: int = 256,
    prompts: tuple[int, int] = (100, 1024),
    outputs: tuple[int, int] = (100, 1024),
) -> list[Any]:
    """Requests with lengths drawn evenly; the same ones each time."""
    generator = np.random.default_rng(0)
    lengths = [generator.integers(low, high + 1, count) for low, high in (prompts, outputs)]
    return [
        request(i + 1, int(lengths[0][i]), int(lengths[1][i]), vocabulary, seed=50_000 + i)
        for i in range(count)
    ]


def idle(room: Room) -> None:
    """Steps of 64 sequences that only decode: how long the device has nothing to do, and the host's part."""
    shape = room.qwen3_06b
    count, steps = (2, 2) if room.tiny else (IDLE_SEQUENCES, IDLE_STEPS)
    model = write_folder(room, shape)
    for ahead in (True, False) if not room.tiny else (True,):
        with roomy_engine(room, model, 4096, count, ahead=ahead) as here:
            engine, length = here.engine, 4 if room.tiny else 250
            for i in range(count):
                engine.submit(request(i + 1, length, 8 if room.tiny else 900, shape.vocabulary))
            produced: dict[int, int] = {}
            while len(produced) < count or min(produced.values()) < (1 if room.tiny else 20):
                for event in engine.step():  # all of them decode, and sizes have come twice
                    produced[event.id] = produced.get(event.id, 0) + len(event.tokens)
            room.driver.waited, begin = 0.0, time.perf_counter()
            for _ in range(steps):
                engine.step()
            plain, waited = time.perf_counter() - begin, room.driver.waited
            room.driver.watch()
            begin = time.perf_counter()
            for _ in range(steps):
                engine.step()
            watched, found = time.perf_counter() - begin, room.driver.unwatch()
            for i in range(count):
                engine.abort(i + 1)
            tell(
                "idle",
                device=room.driver.name,
                shape=shape.name,
                ahead=ahead,
                sequences=count,
                steps=steps,
                step_ms=1e3 * plain / steps,
                host_ms=1e3 * (plain - waited) / steps,
                watched_step_ms=1e3 * watched / steps,
                tok_s=count * steps / plain,
                **found,
            )


def batch32(room: Room) -> None:
    """Output tokens per second of 32 requests together beside one request alone."""
    shape = room.qwen3_06b
    prompt, output = (4, 2) if room.tiny else (256, 256)
    with roomy_engine(room, write_folder(room, shape), 4096, 64) as here:
        pace = {}
        many = 3 if room.tiny else 32
        for count in (1, many):
            best = 0.0
            for turn in range(1 if room.tiny else 3):  # the first records the graphs
                first = 10_000 * count + 1_000 * turn
                asked = [request(first + i, prompt, output, shape.vocabulary) for i in range(count)]
                begin = time.perf_counter()
                tokens = tokens_of(run_all(here.engine, asked))
                best = max(best, tokens / (time.perf_counter() - begin))
            pace[count] = best
        tell(
            "batch32",
            one_tok_s=pace[1],
            many=many,
            many_tok_s=pace[many],
            ratio=pace[many] / pace[1],
        )


def start(room: Room) -> None:
    """From the start of a process to the first token; three times, so that the files are in memory."""
    shape = room.qwen3_06b
    model = write_folder(room, shape)
    for turn in range(1 if room.tiny else 3):
        command = [sys.executable, str(Path(__file__).with_name("run_start.py")), str(model)]
        begin = time.time()
        done = subprocess.run(
            command + ["--tiny"] * room.tiny,
            capture_output=True,
            text=True,
            timeout=120 if room.tiny else 60,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            tell("start", turn=turn, run=False, why=(done.stderr or done.stdout)[-800:])
            continue
        found = json.loads(lines[-1])
        tell(
            "start",
            turn=turn,
            shape=shape.name,
            seconds=found.pop("first_token_at") - begin,
            **found,
        )
