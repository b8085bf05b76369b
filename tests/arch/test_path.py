"""The marked path of docs/architecture.md is the way that a request really takes, and short enough to read.

A server with no special settings is asked for a streamed chat answer, and every call of the product's functions is
counted by the file that calls and the file that is called, in the API process and in the engine process. The path is
the list of files between `<!-- path -->` and `<!-- /path -->`, in reading order, and these rules hold it:

1. *Executed*: each file of the list is executed by the request.
2. *No gap*: each is called by a file that stands before it in the list, but for one in each process, with which its
   part begins. So a reader has always met the caller.
3. *Short*: about 20 files, at most 5,000 lines (the number is in bench/house.py).
4. *Honest*: all files that the request executes, marked or not, are at most `MAX_EXECUTED_FILES` with
   `MAX_EXECUTED_LINES` lines.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

import house
import house_walk as walk
from pageturner.kernels.cpu import native_module
from support.servers import serving

TESTS = Path(__file__).parents[1]
LIST = walk.path(house.ARCHITECTURE)
MAX_EXECUTED_FILES = 118
MAX_EXECUTED_LINES = 21_710
FEWEST, MOST = 15, 25
TOKENS = 128
BODY = {
    "model": "tiny_llama",
    "messages": [{"role": "user", "content": "Hello there"}],
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "temperature": 0.7,
    "stream": True,
}
# which kernels compute is the affair of the machine: those of numpy stand where there is no compiler
STANDS_FOR = (
    {} if native_module.supported()[0] else {"kernels/reference.py": "kernels/cpu/native.py"}
)
Calls = Counter[tuple[str, str]]  # (file that calls, or "" for none of ours; file that is called)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Calls]:
    """The calls of one request in the API process and in the engine's. It is the second one after the start,
    so that what is made once is left out."""
    folder = tmp_path_factory.mktemp("calls")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS / "support" / "call_recorder"))
        patch.setenv("PAGETURNER_RECORD", str(folder))
        record(folder)
    found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    assert len(found) == 2
    return [
        Counter({(by, STANDS_FOR.get(file, file)): n for by, file, n in calls}) for calls in found
    ]


def record(folder: Path) -> None:
    with serving(TESTS / "goldens" / "tiny_llama.gguf") as client:
        for recording in (False, True):
            if recording:
                (folder / "on").touch()
                time.sleep(0.1)
            answer = client.post("/v1/chat/completions", json=BODY)
            assert answer.text.count("data: {") >= TOKENS
        (folder / "on").unlink()
        until = time.monotonic() + 20
        while len(list(folder.glob("*.json"))) < 2 and time.monotonic() < until:
            time.sleep(0.02)


def executed(calls: Calls) -> Counter[str]:
    """How often functions of each file were called."""
    found: Counter[str] = Counter()
    for (_, file), n in calls.items():
        found[file] += n
    return found


def gaps(files: list[str], processes: list[Calls]) -> list[str]:
    """Files that nobody calls who stands before them, beyond the first one of each process."""
    found = []
    entered: set[int] = set()
    for place, file in enumerate(files):
        if any(calls[before, file] for calls in processes for before in files[:place]):
            continue
        processes_of = [
            n for n, calls in enumerate(processes) if executed(calls)[file] and n not in entered
        ]
        if not processes_of:
            found.append(file)
        entered.update(processes_of[:1])
    return found


def test_each_file_is_executed(processes: list[Calls]) -> None:
    ran = executed(sum(processes, Counter()))
    assert [file for file in LIST if file not in ran] == []
    assert LIST


def test_each_is_called_by_one_before_it(processes: list[Calls]) -> None:
    assert gaps(LIST, processes) == []
    assert LIST


def test_all_that_a_request_executes(processes: list[Calls]) -> None:
    ran = list(executed(sum(processes, Counter())))
    assert len(ran) <= MAX_EXECUTED_FILES
    assert walk.lines_of(walk.read(), ran) <= MAX_EXECUTED_LINES
    assert set(LIST) <= set(ran)


def test_it_can_be_read_in_an_afternoon() -> None:
    assert FEWEST <= len(LIST) <= MOST
    assert walk.lines_of(walk.read(), LIST) <= house.BARS["lines of the path"]


def test_a_gap_is_noticed() -> None:
    api = Counter({("", "app"): 50, ("app", "text"): 40, ("", "metrics"): 10})
    engine = Counter(
        {("", "worker"): 60, ("worker", "engine"): 30, ("engine", "sampler"): 9, ("x", "y"): 1}
    )
    assert gaps(["app", "text", "worker", "engine", "sampler"], [api, engine]) == []
    assert gaps(["app", "text", "worker", "sampler"], [api, engine]) == ["sampler"]
    assert gaps(["app", "worker", "sampler", "engine"], [api, engine]) == ["sampler"]
    assert gaps(["metrics", "text", "worker"], [api, engine]) == ["text"]
