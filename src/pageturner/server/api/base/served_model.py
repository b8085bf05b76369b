"""The model that a server serves, as its APIs see it: names, limits, defaults and the settings of
parsers.

Owns the fields alone. Must not know the bodies of requests, nor how they are checked (call.py,
answer_grammar.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pageturner.formats.tokenizer import Tokenizer
from pageturner.server.admission.limits import NO_LIMITS, RequestLimits
from pageturner.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of this server, as a request is checked against it.

    context            the longest sequence, in tokens
    capacity, pinned   KV memory of all sequences, and what pinned prefixes keep of it, in tokens
    slots              the largest number of sequences at once
    defaults           fields of SamplingParams that the model's files set, where a request does not
    names, adapters    other names of the model, and those of its adapters, which are in both
    fits               max_tokens above the room that is left is lowered to it
    request_templates  chats may bring their own chat template
    in_worker          this is not the event loop: slow work is allowed
    grammar            the grammar of this request's answer, where it is known and checked already
    """

    model: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    context: int
    capacity: int
    vocab_size: int
    slots: int = 64
    block_size: int = 1
    developer: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    limits: RequestLimits = NO_LIMITS
    pinned: int = 0
    grammar: str | None = None
    names: tuple[str, ...] = ()
    adapters: frozenset[str] = frozenset()
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    fits: bool = False
    request_templates: bool = False
    in_worker: bool = False
    rerank_by: str = "auto"

    @property
    def for_tools(self) -> ServedModel:
        """Return this model for a request with tools, which may have a template of its own."""
        named = self.template and self.template.tool_use
        return replace(self, template=named or self.template)

    def with_grammar(self, grammar: str | None) -> ServedModel:
        """Return this model for a request whose grammar is checked already."""
        return self if grammar is None else replace(self, grammar=grammar)
