"""`pageturner serve` whose engine notes when each of its steps ended, and for whom.

Owns the notes. The server is the one of the product, and so is the engine but for the two functions through
which a request comes in and its tokens go out. `python stamped_server.py server MODEL FLAGS`, with STAMPS in
the environment: the file in which the notes lie when the engine has ended.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from array import array
from pathlib import Path

FILE = "STAMPS"


class Stamps:
    """When tokens left the engine.

    begins  id of a request -> the first token of its prompt
    times   end of each step, in seconds of time.monotonic()
    ids     of the requests that got a token from each step
    """

    def __init__(self) -> None:
        self.begins: dict[int, int] = {}
        self.times = array("d")
        self.ids: list[array[int]] = []

    def by_prompt(self) -> dict[int, list[float]]:
        """First token of a prompt -> when its tokens left, one after the other."""
        found: dict[int, list[float]] = {begin: [] for begin in self.begins.values()}
        for at, ids in zip(self.times, self.ids, strict=True):
            for id in ids:
                found[self.begins[id]].append(at)
        return found


def engine() -> int:
    from pageturner.engine import worker
    from pageturner.engine.engine import Engine

    stamps, submit, step = Stamps(), Engine.submit, Engine.step

    def submitted(self, request):
        stamps.begins[request.id] = request.prompt[0]
        return submit(self, request)

    def stepped(self, ledger=None):
        events = step(self, ledger)
        stamps.times.append(time.monotonic())
        stamps.ids.append(array("q", [event.id for event in events if event.tokens]))
        return events

    Engine.submit, Engine.step = submitted, stepped  # type: ignore[method-assign]
    code = worker.main()
    Path(os.environ[FILE]).write_bytes(pickle.dumps((stamps.begins, stamps.times, stamps.ids)))
    return code


def read(file: Path) -> Stamps:
    """What an engine noted."""
    stamps = Stamps()
    stamps.begins, stamps.times, stamps.ids = pickle.loads(file.read_bytes())
    return stamps


def server() -> int:
    from pageturner.config import settings as config
    from pageturner.formats import hub
    from pageturner.formats.load_tokenizer import load_with_defaults
    from pageturner.server import server as product
    from pageturner.server.engine_client.process import engine_command

    parser = argparse.ArgumentParser()
    product.add_arguments(parser)
    arguments = parser.parse_args()
    flags = config.from_flags(arguments)
    flags["engine"]["model"] = str(hub.resolve(arguments.model).path)
    settings = config.load(None, flags)
    model = settings.engine
    return product.serve(
        settings,
        arguments.model,
        lambda: load_with_defaults(model.model, model.generation_config),
        lambda wanted: [sys.executable, __file__, "engine", *engine_command(wanted)[3:]],
    )


if __name__ == "__main__":
    sys.exit({"engine": engine, "server": server}[sys.argv.pop(1)]())
