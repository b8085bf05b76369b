"""`pageturner serve` with the fake engine and the bytes tokenizer; takes the same flags. FAKE_ENGINE=own:
with the engine of the product, but without a model."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pageturner.config import settings as config
from pageturner.errors import EngineFault
from pageturner.formats.generation_config import read_generation
from pageturner.server import server
from pageturner.server.api.base import generate
from pageturner.server.engine_client.process import engine_command


def main() -> int:
    from server.bytes_tokenizer import BytesTokenizer

    if soon := os.environ.get("FAKE_ALIVE_SECONDS"):
        generate.ALIVE_SECONDS = float(soon)
    parser = argparse.ArgumentParser()
    server.add_arguments(parser)
    arguments = parser.parse_args()
    settings = config.load(arguments.config, config.from_flags(arguments))
    command = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
    try:
        generation = read_generation(None, settings.engine.generation_config)
        own = os.environ.get("FAKE_ENGINE") == "own"
        return server.serve(
            settings,
            "fake",
            lambda: (BytesTokenizer(), generation),
            lambda engine: engine_command(replace(engine, backend="fake")) if own else command,
        )
    except EngineFault as error:
        print(f"pageturner: {error.message}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
