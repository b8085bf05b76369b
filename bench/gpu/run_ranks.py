"""Sums over ranks on one device: two processes that share memory by CUDA IPC, and two streams of one process.

Two processes take turns on a device, some milliseconds each, so only what is right and which bits come out is
told of them. Two streams run beside each other: their times are those of the kernels without a link between
devices, both ranks' traffic being of one memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from run_common import ROOT, Room, tell

from pageturner.errors import EngineFault
from pageturner.kernels.gpu.arrays import Arena, GpuArray
from pageturner.kernels.gpu.exchange import DeviceExchange

# A kernel that is loaded when it is first launched waits for those that run, and these wait for it
os.environ["CUDA_MODULE_LOADING"] = "EAGER"
COLUMNS, ROWS = 4096, (1, 5, 64, 300, 2048)
TINY_COLUMNS, TINY_ROWS = 64, (1, 5)
TIMED, TINY_TIMED = (1, 64, 2048), (1,)
KERNELS = ("all_reduce", "all_reduce_twice", "gather")
WAYS = {"one": 1 << 40, "twice": 0}  # bytes up to which a sum takes one exchange
PATIENCE = 1 << 22  # looks: some seconds
AGAIN, RECORDED = 3, 20
VOCABULARY = (0, 64128, 128256)


class Rank:
    """One of two, on a driver of its own, with an exchange for each way."""

    def __init__(self, driver: Any, rank: int, tiny: bool) -> None:
        self.driver, self.rank, self.tiny = driver, rank, tiny
        self.meet: Callable[[], object] = lambda: None  # before what waits for the whole device
        if not tiny:
            driver.load(KERNELS)
        self.arena = Arena(driver, 4 << 20 if tiny else 320 << 20)
        area = {"area": 1 << 12} if tiny else {}
        self.ways = {
            name: DeviceExchange(
                driver,
                self.arena,
                rank,
                2,
                one_exchange=most,
                patience=1 << 30 if tiny else PATIENCE,
                **area,
            )
            for name, most in WAYS.items()
        }

    @property
    def handles(self) -> str:
        return ",".join(one.handle.hex() for one in self.ways.values())

    def open(self, theirs: str) -> None:
        """The other rank's regions, by its handles."""
        for mine, handle in zip(self.ways.values(), theirs.split(","), strict=True):
            found = [mine.handle, mine.handle]
            found[1 - self.rank] = bytes.fromhex(handle)
            mine.open(found)

    def put(self, values: np.ndarray[Any, Any]) -> GpuArray:
        array = self.arena.take(values.shape)
        self.driver.upload(array.address, values)
        return array

    def got(self, array: GpuArray) -> np.ndarray[Any, Any]:
        out = np.empty(array.shape, np.float32)
        self.driver.download(out, array.address)
        return out


def parts(rows: int, columns: int) -> np.ndarray[Any, Any]:
    """What two ranks have, and a residual: [3, rows, columns]."""
    random = np.random.default_rng(rows)
    return random.standard_normal((3, rows, columns), np.float32) * np.float32(
        1000
    ) ** random.integers(-1, 2, (3, rows, 1)).astype(np.float32)


def sums(me: Rank) -> list[dict[str, Any]]:
    """By way and rows: elements that are wrong, and how many of several runs, replayed ones too, have other
    bits than the first. Both ranks do the same."""
    found = []
    for rows in TINY_ROWS if me.tiny else ROWS:
        values = parts(rows, TINY_COLUMNS if me.tiny else COLUMNS)
        expected = values[2] + (values[0] + values[1])
        first = None
        for name, exchange in me.ways.items():
            me.arena.reset()
            x, residual = me.put(values[me.rank]), me.put(values[2])
            mark, out = me.arena.mark, exchange.sum(x, residual)
            runs = [me.got(out)]
            me.meet()
            me.driver.begin_recording()
            me.arena.reset(mark)
            out = exchange.sum(x, residual)
            graph = me.driver.end_recording()
            me.meet()
            for _ in range(AGAIN):
                me.driver.replay(graph)
                runs.append(me.got(out))
            me.meet()
            me.driver.forget(graph)
            first = runs[0] if first is None else first
            differ = sum(int((one.view(np.int32) != first.view(np.int32)).sum()) for one in runs)
            wrong = int((runs[0] != expected).sum())
            found.append(
                {"rows": rows, "way": name, "wrong": wrong, "differ": differ, "lost": exchange.lost}
            )
    return found


def other(tiny: bool) -> None:
    """The process of rank 1: says its handles, reads those of rank 0, and does what that does."""
    me = Rank(driver_of(tiny), 1, tiny)
    print(me.handles, flush=True)
    me.open(sys.stdin.readline().strip())
    print(json.dumps(sums(me)), flush=True)
    me.driver.close()


def driver_of(tiny: bool) -> Any:
    if tiny:
        from support.fake_gpu import FakeDriver

        return FakeDriver()
    from pageturner.kernels.gpu.cuda_driver import CudaDriver

    return CudaDriver()


def processes(room: Room) -> None:
    """Two processes on one device, which open each other's memory."""
    command = [sys.executable, __file__, "other", *(["--tiny"] if room.tiny else [])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    begin = time.perf_counter()
    me = Rank(driver_of(room.tiny), 0, room.tiny)
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            if not (handles := process.stdout.readline().strip()):
                raise EngineFault("rank_lost", "the other process ended: its message is above")
            me.open(handles)
            process.stdin.write(f"{me.handles}\n")
            process.stdin.flush()
            mine = sums(me)
            theirs = json.loads(process.stdout.readline())
        except EngineFault as fault:  # some containers know no IPC
            process.kill()
            tell("ranks", what="processes", run=False, why=fault.message)
            return
        finally:
            me.driver.close()
    for a, b in zip(mine, theirs, strict=True):
        both = {name: a[name] + b[name] for name in ("wrong", "differ")}
        tell(
            "ranks",
            what="processes",
            rows=a["rows"],
            way=a["way"],
            **both,
            lost=a["lost"] or b["lost"],
        )
    tell("ranks", what="processes took", seconds=time.perf_counter() - begin)


def streams(room: Room) -> None:
    """Two streams of this process: bits again, and microseconds of sums and of a gather."""
    both = [Rank(driver_of(room.tiny), rank, room.tiny) for rank in range(2)]
    meeting = threading.Barrier(2, timeout=60)  # a rank that fails must not leave the other there
    for me in both:
        me.meet = meeting.wait
        for name, exchange in me.ways.items():
            regions = {one.rank: one.ways[name].region for one in both}
            exchange.open([b"", b""], regions)
            exchange.starts = (0, 64, 160) if room.tiny else VOCABULARY
            exchange.tell = _silent
        me.driver.synchronise()
    for a, b in zip(*_at_once(both, sums), strict=True):
        wrong, differ = a["wrong"] + b["wrong"], a["differ"] + b["differ"]
        tell(
            "ranks",
            what="streams",
            rows=a["rows"],
            way=a["way"],
            wrong=wrong,
            differ=differ,
            lost=a["lost"] or b["lost"],
        )
    columns = TINY_COLUMNS if room.tiny else COLUMNS
    for rows in TINY_TIMED if room.tiny else TIMED:
        for name in WAYS:
            us = _microseconds(
                both, lambda me, rows=rows, name=name: _sum_of(me, name, rows, columns)
            )  # type: ignore[misc]
            rate = 1e-3 * 4 * rows * columns / us
            tell(
                "ranks",
                what="sum",
                rows=rows,
                columns=columns,
                way=name,
                us=us,
                gb_s_of_a_rank=rate,
            )
    rows = 2 if room.tiny else 64
    us = _microseconds(both, lambda me: _gather_of(me, rows))
    tell("ranks", what="gather", rows=rows, columns=both[0].ways["one"].starts[-1], us=us)
    lost = any(one.lost for me in both for one in me.ways.values())
    tell("ranks", what="end", lost=lost)
    for me in both:
        me.driver.close()


class _Silent:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def _silent(x: GpuArray) -> _Silent:
    return _Silent()


def _at_once(both: list[Rank], work: Callable[[Rank], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, both))


def _sum_of(me: Rank, way: str, rows: int, columns: int) -> Callable[[], object]:
    x, residual = me.arena.take((rows, columns)), me.arena.take((rows, columns))
    for one in (x, residual):
        me.driver.clear(one.address, one.nbytes)
    mark = me.arena.mark

    def once() -> None:
        me.arena.reset(mark)
        me.ways[way].sum(x, residual)

    return once


def _gather_of(me: Rank, rows: int) -> Callable[[], object]:
    exchange = me.ways["one"]
    mine = me.arena.take((rows, exchange.starts[me.rank + 1] - exchange.starts[me.rank]))
    me.driver.clear(mine.address, mine.nbytes)
    mark = me.arena.mark

    def once() -> None:
        me.arena.reset(mark)
        exchange.gather(mine, mine)

    return once


def _microseconds(both: list[Rank], work: Callable[[Rank], Callable[[], object]]) -> float:
    """Of one of many that are recorded behind each other, by both ranks at once; the fastest of some."""

    def recorded(me: Rank) -> Any:
        me.arena.reset()
        once = work(me)
        once()  # what is loaded and put there once
        me.driver.synchronise()
        me.meet()
        me.driver.begin_recording()
        for _ in range(RECORDED):
            once()
        return me.driver.end_recording()

    graphs = _at_once(both, recorded)
    took = []
    for _ in range(2 if both[0].tiny else 12):
        begin = time.perf_counter()
        _at_once(list(zip(both, graphs, strict=True)), _replayed)  # type: ignore[arg-type]
        took.append(time.perf_counter() - begin)
    for me, graph in zip(both, graphs, strict=True):
        me.driver.forget(graph)
    return 1e6 * min(took[1:]) / RECORDED


def _replayed(one: Any) -> None:
    me, graph = one
    me.driver.replay(graph)
    me.driver.synchronise()


def ranks_model(room: Room) -> None:
    """A tiny model by two processes on one device, beside one process: the same greedy tokens."""
    found = {}
    for size in (1, 2):
        command = [sys.executable, __file__, "tokens", str(size)]
        paths = os.pathsep.join(
            [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        )
        more = {
            "PYTHONPATH": paths,
            "PAGETURNER_GPU_DEVICES": "0,0",
            "PAGETURNER_CACHE": str(room.folder),
        }
        if room.tiny:
            more["PAGETURNER_GPU_DRIVER"] = "support.fake_gpu:FakeDriver"
        begin = time.perf_counter()
        done = subprocess.run(command, text=True, capture_output=True, env=os.environ | more)
        if done.returncode:
            tell("ranks", what="model", size=size, run=False, why=done.stderr[-600:])
            return
        found[size] = done.stdout.splitlines()[-1]
        tell("ranks", what="model took", size=size, seconds=time.perf_counter() - begin)
    tell("ranks", what="model", passed=found[1] == found[2], tokens=found[2], one=found[1])


def tokens(size: int) -> None:
    """Greedy tokens of a tiny model by so many ranks."""
    from pageturner import LLM, SamplingParams

    llm = LLM(
        str(ROOT / "tests/goldens/tiny_llama.gguf"),
        device="cuda",
        tensor_parallel_size=size,
        max_model_len=64,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        kv_cache_memory=1 << 20,
        dtype="float32",
        kv_cache_dtype="float32",
    )
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    answers = llm.generate([[5, 9, 33, 7], [8, 8, 21, 1, 2]], params, progress=False)
    print(json.dumps([one.outputs[0].token_ids for one in answers]))


def ranks(room: Room) -> None:
    streams(room)
    processes(room)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]
    if sys.argv[1] == "other":
        other("--tiny" in sys.argv)
    else:
        tokens(int(sys.argv[2]))
