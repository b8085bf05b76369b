"""Every flag that a message names is one that some command takes."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from pathlib import Path

import pageturner
from pageturner import cli
from pageturner.server.admission.limits import RequestLimits, check_prompts
from pageturner.server.api.base.translate import FieldMap
from support.refusals import client_error

HOUSE = Path(pageturner.__file__).parent
# flags of other programs (pip, ray, vLLM), of our own processes among themselves, and variables of CSS
OTHERS = (
    "cli/other_names.py",
    "engine/worker.py",
    "formats/hub.py",
    "kernels/cpu/native_module.py",
    "lab/reporting/",
    "parallel/",
    "router/ray/deploy.py",
    "server/engine_client/process.py",
)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def taken() -> set[str]:
    """The flags of all commands."""
    found = {"--help", "--version", "--no-"}
    for module, _ in cli.COMMANDS.values():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        found |= {flag for action in parser._actions for flag in action.option_strings}
    return found


def named() -> set[tuple[str, str]]:
    """The flags that texts of the product name, each with its file."""
    found = set()
    for file in HOUSE.rglob("*.py"):
        where = str(file.relative_to(HOUSE))
        text = file.read_text()
        if where.startswith(OTHERS) or not FLAG.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= {(where, flag) for flag in FLAG.findall(node.value)}
    return found


def test_flags_that_texts_name_are_there() -> None:
    known = taken()
    assert [(file, flag) for file, flag in sorted(named()) if flag not in known] == []


def test_a_renamed_field_leaves_flags_as_they_are() -> None:
    for theirs in ("documents", "input", "options.prompt", "\\1"):
        fields = FieldMap(taken=(), names={"prompt": theirs, "max": "most", "prompts": "none"})
        with client_error() as caught:
            fields.renaming(lambda: check_prompts(3, RequestLimits(prompts=2)))
        assert FLAG.findall(caught.value.message) == ["--max-prompts-per-request"]
        assert caught.value.param == theirs
