"""The chat template that a model's conversations go through: the given one, its own, or its
family's.

Owns that order, the settings that give a template, and the families: rows of markup/families.json,
whose templates are our own and lie in templates/. Must not know how a template is rendered
(chat_template.py), nor requests.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pageturner.errors import EngineFault
from pageturner.formats.tokenizer import Tokenizer
from pageturner.text.chat_template import LONGEST, ChatTemplate
from pageturner.text.tool_formats import aliases, rows

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class ChatFamily:
    """Models that were taught one way to write a conversation; templates/ holds it under the name.

    tokens    all of which a vocabulary has, and none of `without`; (): its marks are plain text,
              which tells nothing, so the model has to say what it is by its name, `called`
    architectures  as the files name them; (): any
    called    a pattern of the model's name, in which everything but letters and digits counts as a
              dash
    spaced    whether its tokenizer puts a space in front of a text; None: either
    aliases   what llama.cpp calls it
    end       the token behind an answer, which not every file says; "": end of sequence
    """

    name: str
    tokens: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    called: str = ""
    spaced: bool | None = None
    end: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        return (TEMPLATES / f"{self.name}.jinja").read_text(encoding="utf-8")


# The first one that fits is a model's. Those that tokens tell come before those that a name tells.
FAMILIES = tuple(ChatFamily(**row) for row in rows("families"))
BY_NAME = {family.name: family for family in FAMILIES}
NAMES = tuple(BY_NAME)
_ALIASES = aliases("families")
HOW_TO_GIVE = (
    "this model has no chat template, and its family is not known: give one by --chat-template, a file with a"
    f" Jinja template or one of {', '.join(NAMES)}"
)


def give_template(tokenizer: Tokenizer, given: str) -> str:
    """Give the tokenizer the chat template that its conversations go through. Returns the name of
    the family whose it is, "" for every other one.

    given  a file, the text of a template, the name of a family, or "": the model's own, or its
           family's
    EngineFault('bad_setting') for a file that cannot be read and a template that cannot.
    """
    given = _ALIASES.get(given, given)
    if given:
        tokenizer.named_templates = {}
    if given in BY_NAME:
        _take(BY_NAME[given], tokenizer)
    elif given:
        tokenizer.chat_template = _text(given)
        template = ChatTemplate(
            tokenizer.chat_template, name=f"the template of --chat-template {given[:80]}"
        )
        if template.broken:
            raise EngineFault("bad_setting", template.broken)
    elif tokenizer.chat_template is None and (family := recognised(tokenizer)) is not None:
        _take(family, tokenizer)
        return family.name
    return ""


def _take(family: ChatFamily, tokenizer: Tokenizer) -> None:
    """Its template, and the end of its answers."""
    tokenizer.chat_template = family.template
    end = tokenizer.token_of(family.end) if family.end else None
    if end is not None and end not in tokenizer.eos_ids:
        tokenizer.eos_ids = (*tokenizer.eos_ids, end)


def _text(given: str) -> str:
    if "\n" in given or "{%" in given or "{{" in given:
        return given
    try:
        if os.path.getsize(given) > 4 * LONGEST:
            raise EngineFault(
                "bad_setting", f"--chat-template {given} is larger than any template may be"
            )
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        names = ", ".join(NAMES)
        raise EngineFault(
            "bad_setting",
            f"--chat-template {given}: no file that can be read ({error}), and none of {names}",
        ) from error


def recognised(tokenizer: Tokenizer) -> ChatFamily | None:
    """The family of the model with this tokenizer, or None where nothing says it."""
    name = re.sub(r"[^a-z0-9]+", "-", tokenizer.name.lower())
    return next((one for one in FAMILIES if _fits(one, tokenizer, name)), None)


def _fits(family: ChatFamily, tokenizer: Tokenizer, name: str) -> bool:
    if family.architectures and tokenizer.architecture not in family.architectures:
        return False
    if family.called:
        return re.search(family.called, name) is not None
    if family.spaced is not None and family.spaced != tokenizer.space_prefix:
        return False
    needed = (*family.tokens, family.end) if family.end else family.tokens
    if any(tokenizer.token_of(token) is None for token in needed):
        return False
    return all(tokenizer.token_of(token) is None for token in family.without)
