"""One process from its start to the first token, for run_load.py: prints when that was and what took long."""

from __future__ import annotations

import sys
import time

BEGIN = time.time()


def main() -> None:
    import json
    from pathlib import Path

    from run_common import open_room
    from run_models import engine_of, request

    room = open_room("--tiny" in sys.argv, Path())
    opened = time.time()
    with engine_of(room, Path(sys.argv[1])) as here:
        built, engine = time.time(), here.engine
        engine.submit(request(1, 16, 2, here.built.vocab_size, temperature=0.0))
        while not any(event.tokens for event in engine.step()):
            pass
        first = time.time()
        told = {
            "first_token_at": first,
            "imports_and_device_s": opened - BEGIN,
            "build_s": built - opened,
            "first_step_s": first - built,
            "phases": here.built.phases,
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
