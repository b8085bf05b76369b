"""Names of vLLM, llama.cpp and Ollama: understood where ours means the same, left out with a note
where they change nothing, else answered with ours.

other_names.json has a row for each kind of flag. This file applies the rows; it must not know what
a flag of ours does. It concerns only commands that take the engine's settings, and `bench serve`.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from pageturner.errors import bad_setting
from pageturner.text.tool_formats import aliases

# parsers of vLLM that go by a model's own files, as ours does
BY_TEMPLATE = ("hf", "beam", "k2_horizon")
OWN = "--max-num-seqs"  # a command with this flag takes the engine's settings
SWITCHES = ("on", "off", "auto", "true", "false", "0", "1")


@dataclass(frozen=True, slots=True)
class FlagRule:
    """A row of the table: what becomes of some flags.

    flags   names, with wild cards; rule: "same", "list" (values joined by commas), "model" (the
            positional argument), "noted" (left out) or "answered" (refused with `text`)
    takes   values of a noted flag: "0", "1", "+" (one or more) or "?" (one of SWITCHES or none)
    ours    our flag, or several words; values: theirs -> ours, "" to leave the flag out;
    suffix  appended to the value; note: what is said when one of `values` was replaced
    """

    flags: str
    rule: str
    takes: str = "1"
    text: str = ""
    ours: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""
    note: str = ""


@cache
def table() -> dict[str, Any]:
    """The rows, by command: flag or wild card -> its rule; variables and commands -> a text."""
    read: dict[str, Any] = json.loads(
        files("pageturner.cli").joinpath("other_names.json").read_bytes()
    )
    for command in ("serve", "bench serve"):
        rules = [FlagRule(**row) for row in read[command]]
        read[command] = {flag: rule for rule in rules for flag in rule.flags.split()}
    for flag, formats in (("--tool-call-parser", "calls"), ("--reasoning-parser", "thoughts")):
        names = dict.fromkeys(BY_TEMPLATE, "auto") | aliases(formats)
        read["serve"][flag] = FlagRule(flag, "same", ours=flag, values=names)
    return read


def other_command(typed: str) -> str:
    """Return the hint to append to the message about another engine's command: what to use here
    instead. "" if there is none."""
    commands = table()["commands"]
    return f": {commands[typed]}" if typed in commands else ""


def notes_on_variables() -> Iterator[str]:
    """Yield a note for each variable of Ollama that is set: what says the same here."""
    rules = table()["variables"]
    for name in sorted(os.environ):
        if name.startswith("OLLAMA_"):
            yield f"the variable {name} is not read: {rules.get(name) or rules['OLLAMA_*']}"


def concerns(words: Sequence[str]) -> bool:
    """Return whether one of the words may be a flag of another engine, or be written as theirs."""
    rules = table()["serve"] | table()["bench serve"]
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    return any("_" in name or _rule(name.partition(".")[0], rules) for name in names)


def translate(words: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the words with our names in place of others, and notes about what was left out.

    known   the flags of the command
    EngineFault('bad_setting') names our flag where another engine's has no equal here.
    """
    if OWN in known:
        rules = table()["serve"]
    elif "--request-rate" in known:
        rules = table()["bench serve"]
    else:
        return list(words), []
    rest = deque(_without_dots(words, rules))
    naming = {flag for flag, rule in rules.items() if rule.rule == "model"}
    has_model = not words[0].startswith("-") or any(
        word.partition("=")[0] in naming for word in words
    )
    found: list[str] = []
    notes: list[str] = []
    while rest and rest[0] != "--":
        word = rest.popleft()
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")  # vLLM takes underscores, too
        rule = _rule(flag, rules)
        if rule is None or not _concerned(rule, flag, known):
            if flag in known:
                word = flag + equals + value
            found.append(word)
            continue
        if rule.rule == "answered" or (rule.ours and rule.ours.split()[-1] not in known):
            raise bad_setting(f"{flag} is not a flag here: {rule.text}")
        given = _taken(rule, [value] if equals else [], rest)
        if rule.rule == "list" and has_model:  # else the last word may be the model
            given += _plain(rest)
        if rule.rule == "noted":
            notes.append(f"{flag} was left out: {rule.text}")
        else:
            _understood(Given(flag, equals, given), rule, found, notes)
    return found + list(rest), notes


def _without_dots(words: Sequence[str], rules: Mapping[str, FlagRule]) -> list[str]:
    """The words with one JSON object in place of a flag's fields: `--flag.field value` of vLLM."""
    found: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=")
        flag, *path = name.replace("_", "-").split(".")
        if not path or not _rule(flag, rules):
            found.append(word)
            continue
        if not equals and rest:
            value = rest.popleft()
        if flag not in objects:
            found += [flag, ""]
        place = objects.setdefault(flag, {})
        *outer, last = name.split(".")[1:]
        for one in outer:
            place = place.setdefault(one, {})
        try:
            place[last] = json.loads(value)
        except ValueError:
            place[last] = value
        found[found.index(flag) + 1] = json.dumps(objects[flag])
    return found


@dataclass(frozen=True, slots=True)
class Given:
    """A flag as it was typed: with "=" or without, and its values."""

    flag: str
    equals: str
    values: list[str]


def _understood(given: Given, rule: FlagRule, found: list[str], notes: list[str]) -> None:
    """Append what the flag is here to `found`, and what was changed to `notes`."""
    if rule.rule == "model":
        found += given.values
    elif rule.rule == "list":
        found += [given.flag, ",".join(_listed(given.values))]
    elif rule.rule == "json":
        found += READERS[given.flag](given, notes)
    else:
        value = "".join(given.values[:1])
        ours = rule.values.get(value, value)
        if ours != value and rule.note:
            notes.append(f"{given.flag} {value} was left out: {rule.note}")
        if not ours:
            return
        if rule.suffix and ours[-1:].isdigit():
            ours += rule.suffix
        *before, last = rule.ours.split()
        found += before
        if given.equals:
            found.append(f"{last}={ours}")
        else:
            found += [last, ours]


def _rule(flag: str, rules: Mapping[str, FlagRule]) -> FlagRule | None:
    """The rule for a flag, by its name, by its name without `no-`, or by a wild card."""
    if not flag.startswith("-") or len(flag) < 2:
        return None
    plain = "--" + flag.removeprefix("--no-")
    for name in (flag, plain):
        rule = rules.get(name)
        if rule is not None and (name == flag or rule.takes == "0"):
            return rule
    return next((rules[name] for name in rules if "*" in name and fnmatchcase(flag, name)), None)


def _concerned(rule: FlagRule, flag: str, known: Collection[str]) -> bool:
    """Return whether a rule says what becomes of a flag of a command that has the flags `known`:
    not where the flag is the command's own, unless the rule reads it in another engine's form, nor
    where the command lacks ours and nothing is said for that."""
    if flag in known:
        return flag == rule.ours or rule.rule in ("list", "json")
    return not rule.ours or bool(rule.text) or rule.ours.split()[-1] in known


def _taken(rule: FlagRule, given: list[str], rest: deque[str]) -> list[str]:
    """The values of a flag, taken from the words behind it where it has none after "="."""
    if given or rule.takes == "0" or not rest:
        return given
    if rule.takes == "?" and rest[0].lower() not in SWITCHES:
        return given
    given.append(rest.popleft())
    if rule.takes == "+":
        given += _plain(rest)
    return given


def _plain(rest: deque[str]) -> list[str]:
    """Take the words up to the next flag."""
    taken = []
    while rest and not rest[0].startswith("-"):
        taken.append(rest.popleft())
    return taken


def _listed(values: list[str]) -> Iterator[str]:
    """The values of a list that may be given as JSON."""
    for value in values:
        if value.startswith("["):
            yield from map(str, _json("a list", value))
        else:
            yield value


def _json(flag: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise bad_setting(f"{flag}: {value!r} is no JSON") from error


def _adapters(given: Given, notes: list[str]) -> list[str]:
    """NAME=PATH, which vLLM also takes as JSON."""
    found = []
    for value in given.values:
        if value.startswith("{"):
            fields = _json(given.flag, value)
            if not {"name", "path"} <= fields.keys():
                raise bad_setting(f"{given.flag}: {value!r} has no name and path")
            value = f"{fields['name']}={fields['path']}"
        found += ["--lora", value]
    return found


def _drafts(given: Given, notes: list[str]) -> list[str]:
    """vLLM's settings of speculation."""
    fields = _json(given.flag, "".join(given.values))
    method = fields.get("method") or ("draft_model" if "model" in fields else "ngram")
    notes.append(f"{given.flag}: the number of drafted tokens is chosen by what was accepted")
    if method in ("ngram", "ngram_gpu", "suffix", "[ngram]"):
        return ["--speculation", "suffix" if method == "suffix" else "ngram"]
    if method == "draft_model" and "model" in fields:
        return ["--speculation", "draft", "--draft-model", str(fields["model"])]
    if method == "mtp" or method.endswith("_mtp"):  # of a family of models
        return ["--speculation", "mtp"]
    methods = "suffix, ngram, draft_model, mtp"
    raise bad_setting(f"{given.flag}: there is no method {method!r} here; there are {methods}")


def _overrides(given: Given, notes: list[str]) -> list[str]:
    """vLLM's changes of config.json."""
    fields = _json(given.flag, "".join(given.values))
    if "max_position_embeddings" in fields:
        return ["--max-model-len", str(fields["max_position_embeddings"])]
    if fields:
        raise bad_setting(
            f"{given.flag}: write {', '.join(fields)} into config.json of the model's folder"
        )
    return []


def _one_server(given: Given, notes: list[str]) -> list[str]:
    """Return no words for one server, which there is anyway; refuse more."""
    if given.values != ["1"]:
        raise bad_setting(
            f"{given.flag} is 1 here; several servers behind one address: pageturner route URL URL"
        )
    notes.append(f"{given.flag} 1 was left out: one process computes a model")
    return []


READERS: dict[str, Callable[[Given, list[str]], list[str]]] = {
    "--lora-modules": _adapters,
    "--speculative-config": _drafts,
    "-sc": _drafts,
    "--hf-overrides": _overrides,
    "--data-parallel-size": _one_server,
    "-dp": _one_server,
}
