"""Many clients, one in four of them leaving at random, and an engine that is killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from .bytes_tokenizer import answer
from .conftest import Server

CLIENTS, REQUESTS = 64, 2000


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def client(server: Server, jobs: list[int], rng: random.Random) -> None:
    async with openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=60
    ) as api:
        while jobs:
            job = jobs.pop()
            leave_at = rng.randint(0, 30) if job % 4 == 0 else None
            stream = await api.completions.create(
                model="fake", prompt=f"job {job}", max_tokens=rng.randint(1, 40), stream=True
            )
            text, n = "", 0
            async for part in stream:
                if n == leave_at:
                    break
                text, n = text + part.choices[0].text, n + 1
            await stream.close()
            full = answer(f"job {job}", 41)
            assert full.startswith(text.rstrip("�")), (job, text)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_clients_leaving_and_crashes_leak_nothing(start: Callable[..., Server]) -> None:
    server = start()
    rng = random.Random(5)

    async def crowd(jobs: list[int]) -> None:
        await asyncio.gather(*(client(server, jobs, rng) for _ in range(CLIENTS)))

    async def killer(done: asyncio.Event) -> None:
        while not done.is_set():
            await asyncio.sleep(2)
            os.kill(server.engine_pid(), signal.SIGKILL)

    async def storm() -> None:
        done = asyncio.Event()
        kills = asyncio.ensure_future(killer(done))
        await crowd(list(range(REQUESTS)))
        done.set()
        await kills

    asyncio.run(crowd(list(range(200))))
    before = rss(server.process.pid)
    asyncio.run(storm())
    server.until(lambda: server.http.get("/health").status_code == 200)
    assert rss(server.process.pid) - before < 20_000_000
    assert server.metric("pageturner:engine_restarts_total") >= 1
    assert server.metric("pageturner:poisoned_requests_total") == 0
    server.until(lambda: server.http.get("/load").json()["server_load"] == 0)
    asyncio.run(crowd([1, 2, 3]))
    server.until(lambda: server.metric("vllm:num_requests_running") == 0)
