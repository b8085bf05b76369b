"""What reading an ordinary chat costs: its JSON, the checks of its fields, its template, its tokens.

Two commits, each in processes of its own, by turns (A B B A ...): processor time of a thread, the least of
many rounds, so that other programs hardly matter. No HTTP and no engine: `decode` and `read` of the chat's
dialect, with the tokenizer and the template of a real model.

    python bench/chat_path.py --base COMMIT [--model smollm2] [--pairs 5]
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, CALLS = 60, 40
MESSAGE = "Write a haiku about the sea, and say in one sentence what it means. "
BODIES = {
    "one message": [{"role": "user", "content": MESSAGE}],
    "nine messages": [
        {"role": "assistant" if i % 2 else "user", "content": MESSAGE * (3 if i < 8 else 1)}
        for i in range(9)
    ],
}
# runs in a tree of either commit, so it uses nothing that is not in both
CHILD = """
import json, sys, time
tree = sys.argv[5]
sys.meta_path[:] = [one for one in sys.meta_path if not type(one).__name__.startswith("ScikitBuild")]
sys.path.insert(0, tree)  # in place of what is installed
import pageturner
assert pageturner.__file__.startswith(tree), pageturner.__file__
from pageturner.formats import hub
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.server.api.base.body import decode
from pageturner.server.api.base.call import ServedModel
from pageturner.server.api.openai import chat
from pageturner.server.admission.limits import NO_LIMITS
from pageturner.text.chat_template import ChatTemplate
from pageturner.server.text_workers.reading import AT_ONCE_LIMITS

tokenizer = load_tokenizer(hub.resolve(sys.argv[1], offline=True).path)
template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token, AT_ONCE_LIMITS)
served = ServedModel("m", tokenizer, template, 8192, 8192, tokenizer.vocab_size)
rounds, calls = int(sys.argv[2]), int(sys.argv[3])
found = {}
for name, messages in json.loads(sys.argv[4]).items():
    fields = {"model": "m", "messages": messages, "max_tokens": 64, "temperature": 0.7, "stream": True}
    raw = json.dumps(fields | {"seed": 1}).encode()
    stages = {"decode": lambda: decode(raw, NO_LIMITS)}
    stages["whole"] = lambda: chat.read(decode(raw, NO_LIMITS), served)
    for stage, work in stages.items():
        least = float("inf")
        for _ in range(rounds):
            begin = time.thread_time()
            for _ in range(calls):
                work()
            least = min(least, time.thread_time() - begin)
        found[f"{name}, {stage}"] = least / calls * 1e6
print(json.dumps(found))
"""


def measure(tree: Path, model: str) -> dict[str, float]:
    """Microseconds of each case, by the source of this tree."""
    given = [model, str(ROUNDS), str(CALLS), json.dumps(BODIES), str(tree / "src")]
    command = [sys.executable, "-c", CHILD, *given]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tree)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def compared(
    base: str, model: str = "smollm2", pairs: int = 5
) -> dict[str, tuple[float, float, float]]:
    """Case -> microseconds of the base and of this tree, the least of all runs, and the median of the ratios
    of the pairs."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", base, "src"], check=True, cwd=ROOT, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        runs: dict[str, list[dict[str, float]]] = {"base": [], "here": []}
        trees = {"base": Path(folder), "here": ROOT}
        for pair in range(pairs):
            for name in ("base", "here") if pair % 2 == 0 else ("here", "base"):
                runs[name].append(measure(trees[name], model))
    found = {}
    for case in runs["base"][0]:
        before, now = ([run[case] for run in runs[name]] for name in ("base", "here"))
        ratio = statistics.median(b / a for a, b in zip(before, now, strict=True))
        found[case] = min(before), min(now), ratio
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", required=True, help="the commit to compare with")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    for case, (before, now, ratio) in compared(
        arguments.base, arguments.model, arguments.pairs
    ).items():
        print(f"{case:22} {before:8.1f} us {now:8.1f} us  x{ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
