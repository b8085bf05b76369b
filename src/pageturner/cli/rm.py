"""`pageturner rm MODEL`: take a fetched model off the disk."""

from __future__ import annotations

import argparse

from pageturner.cli import models
from pageturner.config.flag_table import add_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The models, and whether to ask."""
    add_flags(parser, "rm")


def main(arguments: argparse.Namespace) -> int:
    """Remove each; exit code 1 where one was kept."""
    removed = [(name, models.remove(name, yes=arguments.yes)) for name in arguments.model]
    for name, done in removed:
        print(f"{name}: {'removed' if done else 'kept'}")
    return 0 if all(done for _, done in removed) else 1
