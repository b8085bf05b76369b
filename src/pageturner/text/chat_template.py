"""A model's chat template: what turns a conversation into the text of a prompt.

Owns the way from messages to text, and how much work a template may be. Must not know tokens, requests or
HTTP, nor how the work of a template is counted (template_sandbox.py).
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pageturner.errors import ClientError, one_line

LONGEST = 1 << 18  # characters of a template's source; real ones have up to 30,000

MODELS_OWN = "the model's chat template"
EACH_CHARACTER = (
    64  # characters that may be made of each character of a conversation, beside the allowance
)


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may take: rounds of loops and calls; characters made on the way, those of the
    conversation counted apart; characters of the prompt itself."""

    steps: int = 1_000_000
    characters: int = 32 * 1024 * 1024
    prompt: int = 64 * 1024 * 1024


class TemplateTooLong(ClientError):
    """The template did not end within its limits. It may within larger ones."""

    def __init__(self, why: str, name: str = MODELS_OWN) -> None:
        message = f"{name} is too much work for these messages: {why}"
        super().__init__(400, "template_error", message, "messages")


class ChatTemplate:
    """A chat template, in a sandbox: it comes out of a file, or a request, that anyone may have written.

    name    what messages call it
    broken  "" or what is wrong with its source; such a template refuses every conversation
    """

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        limits: TemplateLimits = TemplateLimits(),
        *,
        name: str = MODELS_OWN,
    ) -> None:
        import jinja2
        from jinja2 import nodes

        from pageturner.text.template_sandbox import Budget, TemplateEnvironment, spending

        environment = TemplateEnvironment()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._limits = limits
        self.source, self.name = source, name
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._template, self.broken = None, ""
        if len(source) > LONGEST:
            self.broken = f"{name} has {len(source):,} characters, over {LONGEST:,}"
            return
        compiling = Budget(limits.steps, limits.characters)
        try:
            tree = spending(compiling, lambda: environment.parse(source))
            if tree.find(nodes.EvalContextModifier) is not None:
                raise jinja2.TemplateError(
                    "autoescape, which is computed when it is read, is not supported"
                )
            self._template = spending(compiling, lambda: environment.from_string(tree))
        except (
            Exception
        ) as error:  # of whatever kind: the source decides what fails in the compiler
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            self.broken = one_line(f"{name} cannot be read{line}: {_printable(error)}")

    def within(self, limits: TemplateLimits) -> ChatTemplate:
        """The same template with other limits."""
        other = copy.copy(self)
        other._limits = limits
        return other

    def render(
        self, messages: Sequence[dict[str, Any]], *, generate: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation. ClientError when the template will not take it."""
        from pageturner.text.template_sandbox import Budget, OverBudget, spending

        if self._template is None:
            raise ClientError(400, "template_error", self.broken, "messages")
        template, limits = self._template, self._limits
        given = {"tools": None, "documents": None, **self._tokens, **variables}
        given |= {"messages": messages, "add_generation_prompt": generate}
        said = sum(
            map(len, (one["content"] for one in messages if isinstance(one.get("content"), str)))
        )
        try:
            budget = Budget(limits.steps, limits.characters + EACH_CHARACTER * said)
            text: str = spending(budget, lambda: template.render(given))
        except OverBudget as error:
            raise TemplateTooLong(str(error), self.name) from error
        except Exception as error:  # of whatever kind: the template decides what fails in it
            reason = f"{self.name} refuses these messages: {_printable(error)}"
            raise ClientError(400, "template_error", reason, "messages") from error
        if len(text) > limits.prompt:
            raise TemplateTooLong(f"it makes a prompt of {len(text)} characters", self.name)
        return text


def _printable(error: Exception) -> str:
    """What an error says, if that can be sent: a source may hold lone surrogates."""
    return str(error).encode("utf-8", "replace").decode()[:2000]


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
