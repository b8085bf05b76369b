"""The prompt by which a model says yes or no to a document, for rerankers that are language models.

Owns the prompt, from a template or through the model's chat template, and which tokens say yes and
no. Must not know how likely they are, nor requests.
"""

from __future__ import annotations

import re
from pathlib import Path

from pageturner.errors import ClientError, EngineFault
from pageturner.formats.tokenizer import Tokenizer
from pageturner.text.chat_template import ChatTemplate

INSTRUCTION = "Find texts that answer the query."
_SYSTEM = "You judge whether a document does what the instruction asks of it. Say yes or no, nothing else."
_ASKED = "Instruction: {instruction}\nQuery: {query}\nDocument: {document}"
_ENDS = "Does it? yes or no:"
_PLACE = re.compile(r"\{(query|document|instruction)\}")
_LARGEST = 1 << 20  # bytes of a file with a template


def made_for_it(tokenizer: Tokenizer) -> bool:
    """Return whether the model was made for judging documents: there is a prompt for it, or its
    name says so."""
    return bool(tokenizer.rerank_template) or "rerank" in tokenizer.name.lower()


def read_template(given: str) -> str:
    """A template from a setting: its text, or a file. EngineFault('bad_setting') where it is
    none."""
    text = given
    if given and "{" not in given:
        try:
            with Path(given).open("rb") as file:
                text = file.read(_LARGEST).decode()
        except (OSError, ValueError) as error:
            raise EngineFault(
                "bad_setting", f"--rerank-template {given}: no file that can be read ({error})"
            ) from error
    if given and not all(place in text for place in ("{query}", "{document}")):
        raise EngineFault(
            "bad_setting", f"--rerank-template {given[:80]} lacks {{query}} or {{document}}"
        )
    return text


class Judge:
    """Makes the prompts of one model.

    chat     the template of its conversations, for a tokenizer without a template for this
    special  whether BOS is put in front of its prompts
    """

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate | None) -> None:
        self._template = tokenizer.rerank_template
        self._chat = None if self._template else chat
        self._tokenizer = tokenizer
        self.special = self._chat is None

    def prompt(self, query: str, document: str, instruction: str) -> str:
        """The prompt of one pair. ClientError where the chat template refuses it."""
        values = {"query": query, "document": document, "instruction": instruction or INSTRUCTION}
        if self._template:
            return _filled(self._template, values)
        asked = _filled(_ASKED, values)
        if self._chat is None:
            return f"{_SYSTEM}\n\n{asked}\n{_ENDS}"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]
        return self._chat.render(messages, enable_thinking=False)

    def tokens(self, prompt: str) -> tuple[int, int]:
        """The tokens that begin yes and no behind this prompt: behind white space or a mark as
        words alone, behind anything else with a space in front. ClientError where they are the
        same."""
        space = "" if prompt[-1:].isspace() or prompt.endswith((">", "｜>")) else " "
        yes, no = (self._tokenizer.encode_inside(space + word)[:1] for word in ("yes", "no"))
        if not yes or not no or yes == no:
            message = "the tokens of this model do not tell yes from no: send rerank_by cosine"
            raise ClientError(400, "unsupported_parameter", message, "rerank_by")
        return yes[0], no[0]


def _filled(template: str, values: dict[str, str]) -> str:
    """All places at once: what stands in a value is no place."""
    return _PLACE.sub(lambda found: values[found[1]], template)
