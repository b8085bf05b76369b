"""Which chat template a model's conversations go through: the one that is given, its own, or its family's.

Owns that order, and what a setting that gives one may be. Must not know how a template is rendered, nor
requests.
"""

from __future__ import annotations

import os
from pathlib import Path

from pageturner.errors import EngineFault
from pageturner.formats.tokenizer import Tokenizer
from pageturner.text import family_templates
from pageturner.text.chat_template import LONGEST, ChatTemplate
from pageturner.text.family_templates import ChatFamily

HOW_TO_GIVE = (
    "this model has no chat template, and its family is not known: give one by --chat-template, a file with a"
    f" Jinja template or one of {', '.join(family_templates.NAMES)}"
)


def give_template(tokenizer: Tokenizer, given: str) -> str:
    """Give the tokenizer the chat template that its conversations go through. Returns the name of the family
    whose it is, "" for every other one.

    given  a file, the text of a template, the name of a family, or "": the model's own, or its family's
    EngineFault('bad_setting') for a file that cannot be read and a template that cannot.
    """
    if given in family_templates.BY_NAME:
        _take(family_templates.BY_NAME[given], tokenizer)
    elif given:
        tokenizer.chat_template = _text(given)
        template = ChatTemplate(
            tokenizer.chat_template, name=f"the template of --chat-template {given[:80]}"
        )
        if template.broken:
            raise EngineFault("bad_setting", template.broken)
    elif (
        tokenizer.chat_template is None
        and (family := family_templates.recognised(tokenizer)) is not None
    ):
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
        names = ", ".join(family_templates.NAMES)
        message = (
            f"--chat-template {given}: no file that can be read ({error}), and none of {names}"
        )
        raise EngineFault("bad_setting", message) from error
