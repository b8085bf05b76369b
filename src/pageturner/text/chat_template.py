"""A model's chat template: what turns a conversation into the text of a prompt.

Owns the sandbox it runs in, and what it may call. Must not know tokens, requests or HTTP.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any

from pageturner.errors import ClientError, one_line

LONGEST = 1 << 18  # characters of a template's source; real ones have up to 30,000


class ChatTemplate:
    """A model's own chat template, in a sandbox: it comes out of a file that anyone may have written.

    broken  "" or what is wrong with its source; such a template refuses every conversation
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        import jinja2
        from jinja2 import ext, nodes, sandbox

        class GenerationBlock(ext.Extension):
            """`{% generation %}` marks what an assistant said, for training; here it changes nothing."""

            tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.Scope(body).set_lineno(line)

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock],
            # reading a template computes nothing: `10**(10**9)` in it would not end
            optimized=False, finalize=jinja2.pass_context(lambda context, value: value),
        )  # fmt: skip
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._errors = (
            jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
            RecursionError,
        )  # fmt: skip
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._template, self.broken = None, ""
        if len(source) > LONGEST:
            self.broken = f"the model's chat template has {len(source):,} characters, over {LONGEST:,}"
            return
        try:
            tree = environment.parse(source)
            if tree.find(nodes.EvalContextModifier) is not None:
                raise jinja2.TemplateError("autoescape, which is computed when it is read, is not supported")
            self._template = environment.from_string(tree)
        except Exception as error:  # also what Python says of the code that a template becomes
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            self.broken = one_line(f"the model's chat template cannot be read{line}: {error}")

    def render(self, messages: Sequence[dict[str, Any]], *, generate: bool = True, **variables: Any) -> str:
        """The prompt of a conversation. ClientError when the template will not take it."""
        if self._template is None:
            raise ClientError(400, "template_error", self.broken, "messages")
        given = {"tools": None, "documents": None, **self._tokens, **variables}
        try:
            text: str = self._template.render(messages=messages, add_generation_prompt=generate, **given)
        except self._errors as error:
            reason = f"the model's chat template refuses these messages: {error}"
            raise ClientError(400, "template_error", reason, "messages") from error
        return text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escaping, as templates expect it (jinja2's own filter escapes)."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
