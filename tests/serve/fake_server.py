"""`pageturner serve` with the fake engine and the bytes tokenizer; takes the same flags."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pageturner import config
from pageturner.errors import EngineFault
from pageturner.files.generation import read_generation
from pageturner.serve import server


def main() -> int:
    from serve.bytes_tokenizer import BytesTokenizer

    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    arguments = parser.parse_args()
    settings = config.load(arguments.config, config.from_flags(arguments))
    command = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
    try:
        generation = read_generation(None, settings.engine.generation_config)
        return server.serve(settings, "fake", lambda: (BytesTokenizer(), generation), lambda _: command)
    except EngineFault as error:
        print(f"pageturner: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
