"""Values of flags: lists in them, and how they are typed again.

Owns what several commands of the lab do with their flags. Must not know any flag but --goodput,
whose values stand behind each other.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable

from pageturner.config import settings as configuration
from pageturner.errors import bad_setting


def names(text: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(flag: str, text: str, form: str = "a number, or several with commas") -> list[float]:
    """The numbers in a list with commas, each above 0."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise bad_setting(f"{flag} is {form}, not {text!r}") from None
    if not all(0 < value < float("inf") for value in found):
        raise bad_setting(f"{flag} is more than 0, not {text}")
    return found


def command_again(
    command: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    arguments: argparse.Namespace,
    *positional: str,
) -> str:
    """The command that does the same again, without the flags that are as by default.
    add_arguments: of its module; positional: names of its arguments that have no flag."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = {
        name: value
        for name, value in vars(arguments).items()
        if "." not in name and name not in positional and value != parser.get_default(name)
    }
    words = ["pageturner", *command.split(), *(getattr(arguments, name) for name in positional)]
    for name, value in {**given, **configuration.from_flags(arguments)["engine"]}.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "goodput":
            words += [flag, *value]
        elif isinstance(value, list):
            words += [f"{flag}={one}" for one in value]
        elif isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, str(value)]
    return shlex.join(words)
