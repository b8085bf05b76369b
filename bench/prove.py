"""Claims put to servers with the OpenAI API, one page of results: `make prove`.

    python bench/prove.py [--server NAME=URL | --server NAME="COMMAND --port {port}"] ... [--claims kill ...]

Without --server: ours, and each peer that bench/peers/setup.sh has installed. A server that a command starts is
ended at the end; only such a server is killed and timed from its start. Writes prove.md and prove.json.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import random
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCH), str(BENCH / "accept")]

import harness  # noqa: E402

import prove_claims as claims  # noqa: E402
import prove_weights  # noqa: E402
from peers import launch, run  # noqa: E402
from prove_claims import Target, Verdict  # noqa: E402

PEERS = ("llama", "ik", "vllm")
CLAIMS = {
    "cold": f"process start to the first token: at most {claims.COLD_LIMIT:.0f} s",
    "batch": f"same answer alone, beside {claims.CROWD} others, cold and warm, to the bit",
    "prefix": f"a common beginning is found again: {claims.FOUND:.0%} of it",
    "shift": f"what follows {claims.CUT} words cut or changed is found again: {claims.SHIFTED:.0%}",
    "weights": "it runs the weights it says: its logprobs beside our engine's",
    "neighbour": f"beside a hostile neighbour no gap grows by more than {claims.MORE_GAP} s",
    "kill": "`kill -9` in mid-stream: the answer goes on, unchanged",
}
Table = dict[str, dict[str, dict[str, Any]]]  # server -> claim -> a Verdict's fields
LEGEND = (
    "Gaps are between the chunks of one polite stream, without the neighbour -> beside it. A server that finds KV"
    " again behind another beginning cannot also give the bits that a new computation gives."
)


def standard(model: str) -> list[Target]:
    """Ours, and the peers that are installed."""
    found = [Target("ours", harness.command("serve", model, "--port", "{port}"))]
    for name in PEERS:
        if model == "smollm2" and launch.installed(name):
            command, environment, _ = launch.COMMANDS[name](0, None)
            command[command.index("--port") + 1] = "{port}"
            if name == "vllm":
                command += ["--enable-prompt-tokens-details", "--enforce-eager"]
            else:
                command += ["-c", str(16 * 2048)]  # the long prompts need 2,048 tokens in each slot
            found.append(Target(name, command, environment))
    return found


def given(text: str) -> Target:
    """A server from the command line; a ValueError is a complaint of its parser."""
    name, what = text.split("=", 1)
    if what.startswith(("http://", "https://")):
        return Target(name, url=what.rstrip("/").removesuffix("/v1"))
    return Target(name, shlex.split(what))


def prove(targets: list[Target], options: argparse.Namespace) -> Table:
    """Put the claims to one server after the other."""
    end = time.monotonic() + options.seconds
    table: Table = {}
    with contextlib.ExitStack() as stack:

        @functools.cache
        def reference() -> prove_weights.Reference:
            return stack.enter_context(prove_weights.reference(options.model))

        for target in targets:
            column = table.setdefault(target.name, {})
            stack.callback(target.stop)
            for name in options.claims:
                check = getattr(claims, name, lambda one, _: reference().judge(one))
                verdict = Verdict("out of time", None)
                if time.monotonic() < end:
                    verdict = put(target, check, random.Random(options.seed))
                column[name] = asdict(verdict)
                print(f"{target.name}, {name}: {words(column[name])}", flush=True)
            target.stop()
    return table


def put(
    target: Target, check: Callable[[Target, random.Random], Verdict], dice: random.Random
) -> Verdict:
    """Put one claim to a server that runs. A claim that breaks is not held."""
    try:
        if check is not claims.cold:
            target.prepare()
        return check(target, dice)
    except Exception as error:
        return Verdict(f"{type(error).__name__}: {error}"[:150], False)


def words(cell: dict[str, Any]) -> str:
    """A cell of the table."""
    mark = {True: "held", False: "**not held**", None: "not asked"}[cell["held"]]
    return f"{mark}: {cell['figure']}".replace("|", "/").replace("\n", " ")


def page(table: Table, about: str) -> str:
    """The results in Markdown."""
    rows = [["claim", *table], ["--"] * (len(table) + 1)]
    for name in next(iter(table.values())):
        rows.append([CLAIMS[name], *(words(column[name]) for column in table.values())])
    return "\n".join([about, "", *(f"| {' | '.join(row)} |" for row in rows), "", LEGEND, ""])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--server", type=given, action="append", help="NAME=URL or NAME=COMMAND")
    add("--claims", nargs="+", choices=CLAIMS, default=list(CLAIMS))
    add("--model", default="smollm2", help="what ours serves, and all say they run")
    add("--seconds", type=float, default=540, help="no claim begins later than this")
    add("--seed", type=int, default=time.time_ns() % 2**32)
    add("--output", type=Path, default=harness.RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    about = f"{time.strftime('%Y-%m-%d')}, {run.machine()}, seed {options.seed}"
    table = prove(options.server or standard(options.model), options)
    text = page(table, about)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "prove.md").write_text(text)
    raw = {"about": about, "servers": table}
    (options.output / "prove.json").write_text(json.dumps(raw, indent=2))
    print(f"\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
