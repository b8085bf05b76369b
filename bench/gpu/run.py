"""The first minutes on an NVIDIA GPU: whether the kernels are right, whether bits hold, how fast they are.

    python bench/gpu/run.py [PART ...] [--out FILE.jsonl] [--limit SECONDS] [--tiny] [--judge FILE ...]

Each part is a process of its own, so that a kernel that faults ends one part alone, and is ended after its
limit. Both ceilings (copy, bf16 products of 8192 cubed on random data) are measured in each part that needs
floors. Every figure is one line of JSON, on stdout and behind --out; last comes a table with verdicts.

What must be there, on the machine with the device:
  this repository, Python >= 3.11, numpy, cuda-bindings, pytest, msgspec, tokenizers, typing_extensions;
  src/pageturner/kernels/gpu/compiled   `make gpu-kernels ARGS="--architectures 90"`: about 1.8 MB
  build/gpu/smollm2-cut.gguf            `bench/gpu/cut_model.py FILE`, 38 MB: only `right` wants it
  build/gpu/wheels                      wheels of what is missing there: msgspec alone where torch,
                                        transformers and cuda-bindings are installed, 0.2 MB. Else also
                                        cuda-bindings and cuda-pathfinder: 8.5 MB, and no cut model
  torch and transformers are compared with where they are there; without them those lines are NOT RUN.
With the repository itself (20 MB) that is 60 MB.

On this side, once:
  make gpu-kernels ARGS="--architectures 90"
  python bench/gpu/cut_model.py ~/.cache/pageturner/models/smollm2-135m-instruct-q4_1.gguf
  pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \\
    -d build/gpu/wheels msgspec
On the other side, before each call:
  pip install -q --no-index --no-deps --target /tmp/site build/gpu/wheels/*.whl; export PYTHONPATH=/tmp/site

With little time on the device, first all at once: what is wrong anywhere is seen within the time of the
slowest, and no time that it tells means anything. Memory is shared out, models of 8B have four layers:
  0  run.py --together --limit 200 --out 0.jsonl
Then, in seconds as an H100 took them (a machine takes some 30 more to be there):
  1  run.py proof grid right bits kinds --out 1.jsonl               about 10 + 9 + 36 + 55 + about 40
  2  run.py decode prefill start idle batch32 nano --out 2.jsonl         25 + 16 + 13 + 6 + 6 + 40
  3  run.py invariance peers --out 3.jsonl                               71 + up to 220
  `tune.py dense` takes about 50.
  `pdl` takes about 25: steps with and without kernels that begin beside the one in front.
  `mixtures` takes about 30: experts, a latent KV, and blocks that travel, right and timed.
  `sampling` takes about 12: microseconds from logits to tokens, for each sort of draw.
  `attention` takes about 30: one layer's, decoding and prompts, for each type of KV, and whether bits hold.
  `profile` tells where the time of a step goes, by kernel and grid.
  `run.py --judge 1.jsonl 2.jsonl 3.jsonl` joins them, and `make accept NAME=gpu` judges the same lines.
If call 1 shows a wrong kernel, mend that first: figures of wrong kernels are worth nothing.

--tiny runs every part on the tests' fake device, which interprets kernels: it shows that the script runs to
its end, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import run_judge  # noqa: E402
from run_common import open_room, tell  # noqa: E402

# Where a part is, and seconds after which it is ended.
PARTS: dict[str, tuple[str, int]] = json.loads(HERE.joinpath("parts.json").read_bytes())
# For --together: parts that go behind each other, beside the other lanes.
LANES = (
    ("grid",),
    ("right", "proof"),
    ("bits",),
    (
        "kinds",
        "prefill",
        "profile",
        "pdl",
        "sampling",
        "attention",
        "mixtures",
        "ranks",
        "ranks_model",
    ),
    ("start", "idle", "batch32", "nano", "burst"),
    ("invariance",),
)


def run_here(name: str, tiny: bool, folder: Path) -> None:
    """One part in this process."""
    module, _ = PARTS[name]
    getattr(importlib.import_module(module), name)(open_room(tiny, folder))


def run_apart(name: str, tiny: bool, folder: Path, limit: float) -> bool:
    """One part in a process of its own; whether it came to its end. What it told until then is kept."""
    command = [sys.executable, str(HERE / "run.py"), name, "--here", "--folder", str(folder)]
    command += ["--tiny"] * tiny
    begin, why = time.perf_counter(), ""
    with tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(command, stderr=errors, timeout=limit).returncode == 0
        except subprocess.TimeoutExpired:
            done, why = False, f"not done within {limit:.0f} s; "
        errors.seek(0)
        why += errors.read()[-1500:] if not done else ""
    tell(
        "part",
        name=name,
        done=done,
        seconds=time.perf_counter() - begin,
        **({"why": why} if why else {}),
    )
    return done


def run_together(tiny: bool, folder: Path, limit: float) -> None:
    """All lanes at once, the parts of each behind each other."""
    os.environ["PAGETURNER_GPU_TOGETHER"] = str(len(LANES))
    until = time.perf_counter() + limit

    def lane(names: tuple[str, ...]) -> None:
        for name in names:
            if (left := until - time.perf_counter()) > 5:
                run_apart(name, tiny, folder / names[0], left)
            else:
                tell("part", name=name, done=False, why="no time was left")

    threads = [threading.Thread(target=lane, args=(one,)) for one in LANES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", choices=[[], *PARTS], default=[], help="all, if none are named"
    )
    parser.add_argument(
        "--out", type=Path, help="file of the lines; those of earlier calls stay in it"
    )
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for all parts together")
    parser.add_argument("--tiny", action="store_true", help="on the tests' fake device")
    parser.add_argument(
        "--together", action="store_true", help="all at once: no times, what fails is seen"
    )
    parser.add_argument(
        "--judge", type=Path, nargs="+", help="run nothing: the table of these files"
    )
    parser.add_argument("--folder", type=Path, help="where models are written; kept")
    parser.add_argument(
        "--here", action="store_true", help="in this process, without a limit and a table"
    )
    options = parser.parse_args()
    if options.judge:
        told = [one for path in options.judge for one in run_judge.read(path)]
        print(run_judge.table(told))
        return int(any(one.passed is False for one in run_judge.judge(told)))
    with tempfile.TemporaryDirectory(prefix="pageturner-gpu-") as scratch:
        folder = options.folder or Path(scratch)
        if options.here:
            for name in options.parts:
                run_here(name, options.tiny, folder)
            return 0
        out = options.out or Path(scratch) / "told.jsonl"
        os.environ["PAGETURNER_GPU_OUT"] = str(out.resolve())
        until = time.perf_counter() + options.limit
        if options.together:
            run_together(options.tiny, folder, options.limit - 25)
            options.parts = ["ceilings"]
        for name in options.parts or PARTS:
            left = until - time.perf_counter()
            if left < 10:
                tell("part", name=name, done=False, why="no time was left")
                continue
            run_apart(
                name, options.tiny, folder, left if options.tiny else min(left, PARTS[name][1])
            )
        told = run_judge.read(out)
    print(run_judge.table(told))
    if options.tiny:
        print("the device was interpreted: only what is right and what differs means anything")
    return int(any(one.passed is False for one in run_judge.judge(told)))


if __name__ == "__main__":
    sys.exit(main())
