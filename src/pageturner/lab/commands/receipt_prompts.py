"""The prompts and answers that the checker of a receipt gives, in any of the ways to write them.

Owns how a text of a flag or a file becomes prompts and answers. Must not know how answers are made.
Where a text can be read in more than one way, the hash in the receipt says which was meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from pageturner.errors import ClientError
from pageturner.formats.tokenizer import Tokenizer
from pageturner.llm import Completion
from pageturner.text import conversation, tools
from pageturner.text import receipt as form
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.fim import fim_prompt, fim_tokens
from pageturner.text.receipt import Difference, Receipt, ReceiptChoice

LARGEST = 2**31  # of a token id


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """The answer that was given, as far as it is known. texts: what it may have been; tokens: None,
    or those of `return_token_ids`."""

    texts: tuple[str, ...]
    tokens: list[int] | None = None

    def differences(
        self, choice: ReceiptChoice, made: Completion, tokenizer: Tokenizer, *, echo: bool = False
    ) -> Iterator[Difference]:
        """Yield where and how this answer differs from the one that was made again. echo: the
        prompt, which is compared by its hash, stands in front of the text."""
        path = f"choices[{choice.index}]"
        if self.tokens is not None:
            if (at := form.first_difference(self.tokens, made.token_ids)) is not None:
                yield Difference(path, f"as it was given differs from token {at} on")
        elif self.texts:
            said = (
                text[max(len(text) - len(made.text), 0) :] if echo else text for text in self.texts
            )
            places = [form.first_difference(text, made.text) for text in said]
            at = places[0]
            if at is not None and None not in places:
                token = _token_of(made.token_ids, at, tokenizer)
                what = f"as it was given differs from character {at} on, which is in token {token}"
                yield Difference(path, what)


def _token_of(tokens: Sequence[int], character: int, tokenizer: Tokenizer) -> int:
    """The token, from 1, that has a character of the text, from 1; or the one behind the last."""
    for count in range(1, len(tokens) + 1):
        if len(tokenizer.decode_whole(list(tokens[:count]), skip_special=True)) >= character:
            return count
    return len(tokens) + 1


def given_answers(text: str) -> dict[int, GivenAnswer]:
    """The answers in a text, by choice: a whole answer as JSON, or the text of the only one. A
    receipt alone has none."""
    value = _json(text)
    choices = value.get("choices") if isinstance(value, dict) else None
    if not isinstance(choices, list):
        return {0: GivenAnswer(_before_filing(text))}
    found = {}
    for choice in choices:
        if isinstance(choice, dict) and isinstance(choice.get("index"), int):
            message = choice.get("message")
            said = _said(message) if isinstance(message, dict) else choice.get("text")
            ids = choice.get("token_ids")
            if isinstance(said, str) or _is_ids(ids):
                found[choice["index"]] = GivenAnswer(
                    (said,) if isinstance(said, str) else (), ids if _is_ids(ids) else None
                )
    return found


def _said(message: dict[str, Any]) -> Any:
    """The text of a message where it is that of the answer: calls and thoughts were parts of it."""
    apart = message.get("tool_calls") or message.get("reasoning_content")
    return None if apart else message.get("content")


def given_prompts(
    receipt: Receipt, text: str, tokenizer: Tokenizer
) -> tuple[list[list[int]], list[Difference]]:
    """The prompts in a text as tokens, and how they differ from those of the receipt: of all ways
    to read the text the one that does not, or the first."""
    first: tuple[list[list[int]], list[Difference]] | None = None
    readings = (_readings(receipt, one, tokenizer) for one in _before_filing(text))
    for whole in chain.from_iterable(readings):
        prompts = form.truncated(receipt, whole)
        differences = form.matching_prompts(receipt, prompts)
        if not differences:
            return prompts, []
        first = first or (prompts, differences)
    return first or (
        [],
        [Difference("prompts", "are not in what was given: messages, or a prompt")],
    )


def _readings(receipt: Receipt, text: str, tokenizer: Tokenizer) -> Iterator[list[list[int]]]:
    value = _json(text)
    if receipt.object == "chat.completion":
        yield from _chats(receipt, text, value, tokenizer)
        return
    suffix = ""
    if isinstance(value, dict) and "prompt" in value:
        suffix = str(value.get("suffix") or "")
        value = value["prompt"]
    special = receipt.input.add_special_tokens is not False
    several = [value] if isinstance(value, str) or _is_ids(value) else value
    for one in (several, [text]):
        if (
            isinstance(one, list)
            and one
            and all(isinstance(each, str) or _is_ids(each) for each in one)
        ):
            yield [_tokens(each, suffix, special, tokenizer) for each in one]


def _tokens(prompt: str | list[int], suffix: str, special: bool, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt, or of the gap between it and a suffix."""
    if suffix and (marks := fim_tokens(tokenizer)) is not None:
        return fim_prompt(marks, tokenizer, prompt, suffix)
    if isinstance(prompt, list):
        return prompt
    return tokenizer.encode(prompt, add_special=special, parse_special=True)


def _chats(
    receipt: Receipt, text: str, value: Any, tokenizer: Tokenizer
) -> Iterator[list[list[int]]]:
    """Messages, a request with messages, or what the user said in the only one."""
    request = value if isinstance(value, dict) else {}
    if request:
        value = request.get("messages")
    for messages in (value, [{"role": "user", "content": text}]):
        if not _is_chat(messages):
            continue
        try:
            variables = _variables(request)
            source = request.get("chat_template") or tokenizer.template_for("tools" in variables)
            render = partial(
                conversation.prompt_text,
                ChatTemplate(source or "", tokenizer.bos_token, tokenizer.eos_token),
                variables=variables,
                generate=receipt.input.add_generation_prompt,
                goes_on=request.get("continue_final_message") or False,
            )
            prompt = conversation.marked_prompt(render, messages, tokenizer, variables)
        except (ClientError, TypeError):  # not what the server was sent: it rendered that
            continue
        special = bool(receipt.input.add_special_tokens)
        yield [conversation.prompt_tokens(tokenizer, *prompt, special)]
        whole = prompt[0].replace(prompt[1], "")  # as with parse_special
        yield [conversation.prompt_tokens(tokenizer, whole, "", special)]


def _variables(request: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that the template was given beside the messages, as
    server/api/openai/chat_fields.py makes them of a request."""
    choice = tools.read(request.get("tools"), request.get("tool_choice"), None)
    return conversation.variables(
        choice.shown, request.get("reasoning_effort"), request.get("chat_template_kwargs")
    )


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) for message in value)
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(token) is int and 0 <= token < LARGEST for token in value
    )


def _before_filing(text: str) -> tuple[str, ...]:
    """The texts that a file may have been made of, itself first: programs put a byte order
    mark in front of a file, an end of line behind it, and CR LF in place of LF."""
    texts = [text]
    texts += [one.removeprefix("\ufeff") for one in texts]
    texts += [re.sub(r"(\r\n|\n|\r)\Z", "", one) for one in texts]
    texts += [one.replace("\r\n", "\n") for one in texts]
    return tuple(dict.fromkeys(texts))


def _json(text: str) -> Any:
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None
