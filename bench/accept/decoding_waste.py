"""KV memory on the conversation trace: in blocks and in one piece for each request, simulated and real."""

from __future__ import annotations

from collections.abc import Iterator

from harness import DATA, Line, NotRun

from kv_waste import KVServer, contiguous, paged
from pageturner import LLM
from pageturner.lab.traffic.traffic_files import TraceRow, read_trace
from pageturner.params import SamplingParams
from pageturner.request import Request

TRACE = "azure2023_conv.jsonl.gz"
SERVER = KVServer(memory=93_184, longest=8192, cap=1024)  # 2 GiB of SmolLM2's KV in fp16
REAL, SCALE = 100, 0.2  # requests on the real model, and their lengths as a share of the true ones
KV_BYTES = 512 * 1024**2  # of it, so that not all fit at once


def waste() -> Iterator[Line]:
    path = DATA / "traces" / TRACE
    if not path.is_file():
        raise NotRun(f"{path} is absent")
    rows = [
        row
        for row in read_trace(path, sessions=False)
        if row.prompt_tokens + row.output_tokens <= SERVER.longest
    ]
    blocks = paged(SERVER, rows)
    figure = (
        f"{blocks.internal:.2%} of what is reserved, at the most {blocks.most_internal:.2%} of memory"
        f"; {blocks.usage:.1%} of memory holds KV, {blocks.sequences:.1f} of {len(rows):,} requests at once"
    )
    below = max(blocks.internal, blocks.most_internal) < 0.01
    yield Line("waste in blocks of 16, true lengths, the whole trace: below 1 %", figure, below)
    for scheme, what in (
        ("max", f"{SERVER.longest:,} tokens"),
        ("cap", f"prompt + {SERVER.cap:,}"),
    ):
        account = contiguous(SERVER, rows, scheme)
        figure = (
            f"{account.internal:.1%} of what is reserved, {account.external:.1%} of memory in holes too small"
            f"; {account.usage:.1%} of memory holds KV, {account.sequences:.1f} requests at once"
        )
        yield Line(f"the same in one piece each, {what}", figure, None)
    yield _real([_scaled(row) for row in rows[:REAL]])


def _scaled(row: TraceRow) -> TraceRow:
    return TraceRow(
        max(1, round(row.prompt_tokens * SCALE)), max(1, round(row.output_tokens * SCALE))
    )


def _real(rows: list[TraceRow]) -> Line:
    """The same requests on a model and in the simulation: the share of reserved memory that is empty."""
    llm = LLM("smollm2", max_model_len=2048, enable_prefix_caching=False, kv_cache_memory=KV_BYTES)
    engine, ids, config = llm.built.engine, llm.tokenizer.eos_ids, llm.config
    memory = int(engine.scheduler.stats()["blocks_total"]) * config.block_size
    budget = config.max_num_batched_tokens
    server = KVServer(memory, longest=2048, cap=256, slots=config.max_num_seqs, budget=budget)
    for number, row in enumerate(rows, 1):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=server.cap,
            stop_ids=ids,
            forced_end=row.output_tokens,
            seed=0,
        )
        prompt = tuple(1000 + (number * 7 + i) % 4000 for i in range(row.prompt_tokens))
        assert not engine.submit(Request(number, prompt, params))
    reserved = used = 0.0
    while engine.has_work:
        engine.step()
        stats = engine.scheduler.stats()
        reserved, used = reserved + stats["kv_reserved"], used + stats["kv_used"]
    real, simulated = 1 - used / reserved, paged(server, rows).internal
    figure = f"{real:.3%}, simulated {simulated:.3%}, lengths x {SCALE}"
    same = abs(real - simulated) < 0.001
    return Line(f"{REAL} real requests waste what is simulated, within 0.1 points", figure, same)
