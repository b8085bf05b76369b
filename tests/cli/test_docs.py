"""docs/api.md names every command, every flag and every command of the chat, and no other."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from pageturner import cli
from pageturner.cli import chat

SECTION = (
    (Path(__file__).parents[2] / "docs" / "api.md")
    .read_text()
    .split("\n## Commands", 1)[1]
    .split("\n## ")[0]
)


def flags(names: tuple[str, ...]) -> set[str]:
    """The long flags of a command, without those of the settings tables."""
    parser = argparse.ArgumentParser()
    importlib.import_module(cli.COMMANDS[names][0]).add_arguments(parser)
    return {
        flag
        for action in parser._actions
        if "." not in action.dest
        for flag in action.option_strings
        if flag.startswith("--")
    }


def test_every_command_is_in_the_table() -> None:
    found = dict(re.findall(r"^\| `([a-z ]+)` \| (.*) \|$", SECTION, re.M))
    assert found == {" ".join(names): help for names, (_, help) in cli.COMMANDS.items()}


def test_no_flag_is_made_up() -> None:
    known = set().union(*map(flags, cli.COMMANDS), {"--developer", "--step-log-tokens", "--help"})
    known |= {
        "--kv-host-memory",
        "--prefill-tokens",
        "--no-async-scheduling",
    }  # settings of serve, which simulate has too
    named = set(re.findall(r"(--[a-z][a-z-]*)", SECTION))
    assert named <= known, named - known


RECIPES = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()


@pytest.mark.parametrize("words", re.findall(r"^pageturner ([^#\n]+?)(?:  .*)?$", RECIPES, re.M))
def test_every_recipe_is_taken_by_its_command(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is parsed as it is typed, and its work is left out."""
    names = next(names for names in cli.COMMANDS if words.startswith(" ".join(names) + " "))
    called: list[argparse.Namespace] = []
    module = importlib.import_module(cli.COMMANDS[names][0])
    monkeypatch.setattr(module, "main", called.append)
    assert cli.main(shlex.split(words)) == 0
    assert len(called) == 1


def test_every_command_of_the_chat_is_named() -> None:
    listed = SECTION.split("Commands: ", 1)[1].split(".\n", 1)[0]
    assert re.findall(r"`/(\w+)`", listed) == list(chat.COMMANDS)
