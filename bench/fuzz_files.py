"""`python bench/fuzz_files.py --seconds 60`: hostile model files, each loaded in a process of its own.

A case is a small sound model with one to three places made hostile (hostile/models.py). It is loaded the way
the API process does it (tokenizer, sampling defaults, chat template), the way the engine process does it, the
way it compiles a grammar, and the way `pageturner plan` does it. Each of them has to end, soon and within
bounds, with a model or with an EngineFault that names the file in one line. Anything else is a finding:
another exception, a warning, a timeout, too much memory, a signal, something on standard error. Exit code 1
if there was any.

    --number N    only this case, in this process: for a debugger, and to see its traceback
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hostile import models
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.errors import ClientError, EngineFault
from pageturner.formats.load_tokenizer import load_with_defaults
from pageturner.lab.planning.model_outline import read_outline
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.grammar.compiler import Compiler, GrammarError
from pageturner.text.structured_outputs import StructuredOutputsParams

ADDRESS_SPACE = 2 << 30  # bytes beyond what this process has mapped already
RESIDENT = 600_000  # kB that a case may add to this process
SECONDS = 5  # of processor time that a case may take, all three ways together
WAITING = 60.0  # seconds until a case is given up that does not even compute
KV_BYTES = 64 << 20
GRAMMAR = StructuredOutputsParams(regex="[a-f]{2,9} ?é?")
TEXT = "Hello  world\n\n123 </s><s>é \ud800 aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"


# -- one case ------------------------------------------------------------------------------------------------
def as_api_process(path: Path) -> None:
    """What `pageturner serve` reads, and a text there and back."""
    tokenizer, generation = load_with_defaults(path)
    str(generation)
    ids = tokenizer.encode(TEXT, add_special=True, parse_special=True)
    tokenizer.decode([*ids, 0, tokenizer.vocab_size - 1, tokenizer.vocab_size])
    if tokenizer.chat_template:
        ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)


def as_engine_process(path: Path) -> None:
    settings = {"kv_cache_memory": KV_BYTES, "threads": 1, "max_num_seqs": 4}
    make_engine(EngineConfig(model=str(path), **settings))  # type: ignore[arg-type]


def as_plan(path: Path) -> None:
    read_outline(path)


def as_grammar(path: Path) -> None:
    """The vocabulary as grammars are compiled for it, which the engine process does late, and in a thread."""
    tokenizer = load_with_defaults(path)[0]
    if tokenizer.eos_ids:  # else it is refused
        Compiler(lambda: tokenizer)(GRAMMAR)


WAYS: tuple[Callable[[Path], None], ...] = (as_api_process, as_engine_process, as_plan, as_grammar)


def load(path: Path, ways: tuple[Callable[[Path], None], ...]) -> tuple[list[str], list[str]]:
    """(what became of it each way: "model" or a code, findings)."""
    outcomes, findings = [], []
    for way in ways:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                way(path)
            outcomes.append("model")
        except ClientError as refusal:
            outcomes.append(refusal.code)  # of the text, by a model that is there
        except GrammarError:
            outcomes.append("grammar_error")  # of the grammar
        except EngineFault as fault:
            outcomes.append(fault.code)
            if str(path) not in fault.message or not fault.message.isprintable():
                findings.append(
                    f"{way.__name__}: {fault.code} does not name the file: {fault.message[:200]}"
                )
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in frames if "pageturner" in frame.filename] or frames
            last = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
            where = f"{last}, from {ours[-1].name}:{ours[-1].lineno}"
            outcomes.append("traceback")
            findings.append(
                f"{way.__name__}: {type(error).__name__} at {where}: {str(error)[:150]!r}"
            )
    return outcomes, findings


# -- many ----------------------------------------------------------------------------------------------------
def in_child(path: Path, scratch: Path) -> tuple[list[str], list[str]]:
    """`load` in a child with limits."""
    read, write = os.pipe()
    log = scratch / "stderr"
    pid = os.fork()
    if pid == 0:
        _child(path, write, log)
    os.close(write)
    said, begin = b"", time.monotonic()
    while (left := begin + WAITING - time.monotonic()) > 0:
        if select.select([read], [], [], left)[0]:
            chunk = os.read(read, 1 << 16)
            if not chunk:
                break
            said += chunk
    os.close(read)
    if left <= 0:
        os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    if left <= 0 or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return ["timeout"], [f"no end within {SECONDS} s of processor time, or {WAITING:.0f} s"]
    if os.WIFSIGNALED(status) or not said:
        return ["signal"], [
            f"ended by {os.waitstatus_to_exitcode(status)}: {log.read_text(errors='replace')[-300:]!r}"
        ]
    outcomes, findings = json.loads(said)
    if noise := log.read_bytes():
        findings.append(f"on standard error: {noise[:200]!r}")
    if (added := used.ru_maxrss - _mapped(1) // 1024) > RESIDENT:
        findings.append(f"memory: {added / 1e3:.0f} MB")
    return outcomes, findings


def _mapped(field: int) -> int:
    """Bytes of this process: 0 all that is mapped, 1 what of it is resident."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()


def _child(path: Path, write: int, log: Path) -> None:
    """Never returns."""
    try:
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(sink, 2)
        limit = ADDRESS_SPACE + _mapped(0)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.write(write, json.dumps(load(path, WAYS)).encode())
    finally:
        os._exit(0)


def cases(seed: int, numbers: Iterable[int], folder: Path) -> Iterator[tuple[int, Path, str]]:
    """(number, path, what was done), one after the other at the same place below `folder`."""
    sound, target = folder / "sound", folder / "case"
    if not sound.exists():
        sound.mkdir()
        models.seeds(sound)
    for number in numbers:
        shutil.rmtree(target, ignore_errors=True)
        yield number, *models.make_case(sound, target, seed, number)


def until(seconds: float) -> Iterator[int]:
    """Numbers from 0 on, until the time is over."""
    end = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.count())


def one(seed: int, number: int, folder: Path) -> int:
    """One case with its tracebacks."""
    for _, path, note in cases(seed, [number], folder):
        print(ascii(note))
        for way in WAYS:
            try:
                way(path)
            except Exception:
                traceback.print_exc()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz_files.py")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="only this case, in this process")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.number is not None:
            return one(arguments.seed, arguments.number, Path(folder))
        outcomes: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        number = 0
        for number, path, note in cases(arguments.seed, until(arguments.seconds), Path(folder)):
            came, findings = in_child(path, Path(folder))
            outcomes.update(came)
            for finding in findings:
                kind = finding.split(": ", 1)[0] + finding.partition(" at ")[2][:60]
                kinds[kind] += 1
                if kinds[kind] <= 3:
                    print(f"case {number}: {finding!a}\n    {note!a}", flush=True)
        times = resource.getrusage(resource.RUSAGE_CHILDREN)
        minutes, found = (times.ru_utime + times.ru_stime) / 60, sum(kinds.values())
        print(f"{number + 1} cases, {minutes:.1f} CPU minutes, {found} findings")
        print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(main())
