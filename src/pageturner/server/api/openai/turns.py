"""Conversations of agents, for templates that take fewer forms of them than clients send.

Owns when a conversation is put into another form. Must not know which shape it came in, nor how it
is rendered (chat.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from pageturner.errors import ClientError
from pageturner.server.api.base.body import RequestBody
from pageturner.text.chat_template import TemplateTooLong
from pageturner.text.conversation import alternating

T = TypeVar("T")


def read_turns(body: RequestBody, read: Callable[[RequestBody], T]) -> T:
    """The outcome of `read`. Where the template refuses the conversation, it is asked once more
    with turns that alternate behind one system message, which is all that many templates know."""
    try:
        return read(body)
    except TemplateTooLong:
        raise
    except ClientError as error:
        turns = (
            alternating(body.messages or []) if error.code == "template_error" else body.messages
        )
        if turns == body.messages:
            raise
        try:
            return read(msgspec.structs.replace(body, messages=turns))
        except TemplateTooLong:
            raise
        except ClientError:
            raise error from None
