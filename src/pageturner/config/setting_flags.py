"""One command-line flag for each setting, in the groups in which `--help` shows them.

Owns the groups (setting_groups.json) and how a flag looks. Must not know any section of the
settings, nor what a setting may be: it is given both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any

OTHERS = "HTTP and TLS"  # the group of a setting that no group names
MEBI = 1 << 20
LONGEST_CHOICES = (
    80  # characters of choices that are shown beside their flag; longer ones stand in the text
)

# title -> settings, in the order in which --help shows them
GROUPS: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("setting_groups.json").read_bytes()
)


@dataclass(frozen=True, slots=True)
class SettingFlag:
    """A setting of a section, and what it may be: () if it is free."""

    section: str
    setting: Field[Any]
    choices: tuple[str, ...]

    @property
    def name(self) -> str:
        return "--" + self.setting.name.replace("_", "-")

    @property
    def group(self) -> str:
        """The title under which --help shows it."""
        return next(
            (title for title, names in GROUPS.items() if self.setting.name in names), OTHERS
        )

    def explained(self) -> str:
        """Return the text of --help for a setting."""
        default = self.setting.default
        text = str(self.setting.metadata["help"])
        if self.choices and not self._choices_fit():
            text += f" (one of {', '.join(self.choices)})"
        return text if default == "" else f"{text} (default: {self._default()})"

    def _default(self) -> str:
        default: Any = self.setting.default
        if isinstance(default, bool):
            return "on" if default else "off"
        if "bytes" in self.setting.metadata["help"] and default and default % MEBI == 0:
            return (
                f"{default // MEBI}M" if default % (MEBI << 10) else f"{default // (MEBI << 10)}G"
            )
        return str(default)

    def _choices_fit(self) -> bool:
        return len(",".join(self.choices)) <= LONGEST_CHOICES

    def arguments(self) -> dict[str, Any]:
        """Return what `add_argument` takes beside the name. Only a flag that was given shows up in
        the result."""
        kind: dict[str, Any] = {"metavar": self._metavar()}
        if isinstance(self.setting.default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        elif self.setting.metadata["repeats"]:
            kind = {"action": JoinedAction, "metavar": "NAME=PATH"}
        help = self.explained().replace("%", "%%")
        target = f"{self.section}.{self.setting.name}"
        return {"dest": target, "default": argparse.SUPPRESS, "help": help, **kind}

    def _metavar(self) -> str:
        if self.choices and self._choices_fit():
            return "{" + ",".join(self.choices) + "}"
        if isinstance(self.setting.default, int):
            return "SIZE" if "bytes" in self.setting.metadata["help"] else "N"
        return self.setting.name.rsplit("_", 1)[-1].upper()


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[SettingFlag]) -> None:
    """Add them to the parser, group by group."""
    every = list(flags)
    for title in GROUPS:
        if members := [flag for flag in every if flag.group == title]:
            group = parser.add_argument_group(title)
            order = {name: place for place, name in enumerate(GROUPS[title])}
            for flag in sorted(members, key=lambda flag: order.get(flag.setting.name, len(order))):
                group.add_argument(flag.name, **flag.arguments())


class JoinedAction(argparse.Action):
    """A list that a flag is given piece by piece, with commas between."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, "")
        setattr(namespace, self.dest, f"{before},{values}" if before else values)
