"""`pageturner generate`: one prompt in, its continuation out, piece by piece or as one JSON
object."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from pageturner.cli import sampling_flags, sources
from pageturner.cli.sampling_flags import SamplingOptions
from pageturner.cli.sources import Answer, AnswerSource, AnswerSummary
from pageturner.config.flag_table import add_flags
from pageturner.errors import ClientError, bad_setting
from pageturner.formats import hub
from pageturner.progress import LINE_EVERY, NEVER, Still

MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    sources.add_flags(parser)
    add_flags(parser, "generate")
    sampling_flags.add_flags(parser, MAX_TOKENS)


def main(arguments: argparse.Namespace) -> int:
    """Answer one prompt. Returns the exit code: 130 when it was interrupted."""
    sampling = sampling_flags.from_flags(arguments)
    _question_is_prompt(arguments)
    prompt = _prompt(arguments)
    source = sources.from_flags(arguments)
    begin = time.monotonic()
    if arguments.chat is False and arguments.system:
        raise bad_setting("--system is part of a chat: leave --no-chat out")
    answer = _answer(source, arguments, prompt, sampling)
    text, summary = _take(answer, None if arguments.json else sys.stdout)
    if arguments.json:
        seconds = round(time.monotonic() - begin, 3)
        print(json.dumps(_record(source.name, prompt, text, summary, seconds), ensure_ascii=False))
    elif not text.endswith("\n"):
        print()
    if not text.strip() and arguments.chat is False:
        print(
            "(the model ended at once: a question to a chat model is one of --chat)",
            file=sys.stderr,
        )
    return 130 if summary.finish == "abort" else 0


def _answer(
    source: AnswerSource, arguments: argparse.Namespace, prompt: str, sampling: SamplingOptions
) -> Answer:
    """The answer to a message; where the model has no chat template and nobody asked for a chat, the
    continuation of a text."""
    if arguments.chat is not False:
        messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
        try:
            return (
                yield from source.chat([*messages, {"role": "user", "content": prompt}], sampling)
            )
        except ClientError as error:  # ours by its code; vLLM's and others' by what they say
            lacks = error.code == "no_chat_template" or "chat template" in error.message.lower()
            if arguments.chat or arguments.system or not lacks or error.code == "template_error":
                raise
    return (yield from source.complete(prompt, sampling))


def _question_is_prompt(arguments: argparse.Namespace) -> None:
    """`generate [MODEL] "a question"`: a lone text of several words that is no file is the prompt,
    not a model."""
    first, given = arguments.model or "", arguments.prompt is not None or arguments.file is not None
    if arguments.text is None and len(first.split()) > 1 and not Path(first[:4096]).exists():
        arguments.text, arguments.model = first, None
        if given:
            raise bad_setting(f"there are two prompts, or no such model: {first!r}")
    if arguments.text is not None:
        if given:
            raise bad_setting("there are two prompts: one without a flag, and --prompt or --file")
        arguments.prompt = arguments.text
    elif first and not given and _is_word(first):
        raise bad_setting(f"{first!r} is no model; if it is the prompt: -p {shlex.quote(first)}")


def _is_word(text: str) -> bool:
    """Return whether this text cannot be a model: it is no alias, no existing file, no id of the
    hub and no name of a GGUF file."""
    known = text in hub.ALIASES or text in hub.HUB_ALIASES
    return (
        not known
        and "/" not in text
        and not text.endswith(".gguf")
        and not Path(text[:4096]).exists()
    )


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.prompt is not None and arguments.file is not None:
        raise bad_setting("give --prompt or --file, not both")
    if arguments.prompt is not None:
        return str(arguments.prompt)
    if arguments.file is not None:
        try:
            return str(arguments.file.read_bytes(), "utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise bad_setting(f"cannot read {arguments.file}: {error}") from error
    if sys.stdin.isatty():
        print("(the prompt, then Ctrl-D)", file=sys.stderr)
    prompt = sys.stdin.read()
    if not prompt.strip():
        raise bad_setting(
            "there is no prompt: give it as an argument, with --file, or on standard input",
        )
    return prompt


def _take(answer: Answer, out: object) -> tuple[str, AnswerSummary]:
    """The whole text and its summary; `out` (a text file, or None) gets the pieces as they come."""
    pieces: list[str] = []
    waiting = Still(lambda: "the prompt is computed", LINE_EVERY if out else NEVER)
    try:
        while True:
            try:
                pieces.append(next(answer))
            except StopIteration as end:
                return "".join(pieces), end.value
            waiting.end()
            if out is not None:
                print(pieces[-1], end="", flush=True, file=out)  # type: ignore[call-overload]
    finally:
        waiting.end()


def _record(
    model: str, prompt: str, text: str, summary: AnswerSummary, seconds: float
) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "text": text,
        "finish_reason": summary.finish,
        "usage": {
            "prompt_tokens": summary.prompt_tokens,
            "cached_tokens": summary.cached_tokens,
            "completion_tokens": summary.output_tokens,
        },
        "seconds": seconds,
    }
