"""`pageturner verify`: is an answer what its receipt says? It is made again, alone, and compared.

Owns the order of the checks and what is said of each. Must not know how a receipt is hashed or
signed (text/receipt.py), nor how servers write one. Exit codes: 0 verified; 1 a part differs, which
is named; 2 it cannot be checked here, and why.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pageturner.config import settings as configuration
from pageturner.config.flag_table import add_flags
from pageturner.engine.fingerprint import settings_of
from pageturner.errors import ClientError, EngineFault, bad_setting
from pageturner.formats import hub
from pageturner.formats.model_hash import model_hash
from pageturner.lab.commands.receipt_prompts import GivenAnswer, given_answers, given_prompts
from pageturner.llm import LLM, Completion
from pageturner.text import receipt as form
from pageturner.text.receipt import NoReceipt, Receipt
from pageturner.text.receipt_key import VARIABLE, read_key

SETTLED = ("model", "dtype", "kv_cache_dtype", "quantization", "activation_bits", "backend")
SLOTS, MAX_SLOTS = 64, 1024  # sequences at once: what an engine has, and the most for a receipt
ADAPTER = "adapter"  # what that of a receipt is called here
SAME, DIFFERS, UNKNOWN, NOTE = "same", "differs", "cannot be checked", "not checked"


class Finding(NamedTuple):
    """The result of checking one part: SAME, DIFFERS, UNKNOWN (the answer cannot be proved here) or
    NOTE."""

    verdict: str
    part: str
    what: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.part} {self.what}".rstrip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_flags(parser, "verify")
    configuration.add_flags(parser, "engine", leave_out=SETTLED)


def main(arguments: argparse.Namespace) -> int:
    """Check one receipt, say what was found, and return the exit code."""
    key = read_key(arguments.key_file, "" if arguments.key_file else os.environ.get(VARIABLE, ""))
    text = read(arguments.receipt)
    prompt, output = (_given(value) for value in (arguments.prompt, arguments.output))
    findings = []
    for finding in _check(text, key, prompt, output, arguments):
        findings.append(finding)
        print(finding, flush=True)
    code = exit_code(findings)
    print(("verified", "not what the receipt says", "neither proved nor disproved")[code])
    return code


def exit_code(findings: list[Finding]) -> int:
    verdicts = {finding.verdict for finding in findings}
    return 1 if DIFFERS in verdicts else 2 if UNKNOWN in verdicts else 0


def _check(
    text: str, key: bytes, prompt: str | None, output: str | None, arguments: argparse.Namespace
) -> Iterator[Finding]:
    """Everything that can be checked, the cheap parts first; nothing behind one that differs."""
    try:
        receipt = form.read_receipt(text)
    except NoReceipt as wrong:
        yield Finding(DIFFERS, *wrong.difference)
        return
    found = list(unchanged(receipt, key))
    yield from found
    if exit_code(found):
        return
    model = _model(receipt, arguments.model)
    try:
        path = hub.resolve(model).path
        finding = _model_finding(receipt, path)
    except EngineFault as fault:
        finding = Finding(
            UNKNOWN, "model_hash", f"because there is no such model here: {fault.message}"
        )
    yield finding
    if finding.verdict != SAME:
        return
    if prompt is None:
        yield Finding(UNKNOWN, "choices", "without what was asked: give --prompt")
        return
    _use_isa_of(receipt.fingerprint)
    flags = configuration.from_flags(arguments)["engine"]
    try:
        settings = dataclasses.asdict(configuration.load(None, {"engine": flags}).engine)
        llm = load(
            receipt, path, **settings, chat_template=arguments.chat_template, lora=arguments.lora
        )
    except EngineFault as fault:
        yield Finding(UNKNOWN, "choices", f"because no engine can be loaded here: {fault.message}")
        return
    yield from made_again(receipt, llm, prompt, given_answers(text if output is None else output))


# -- parts -----------------------------------------------------------------------------------------
def unchanged(receipt: Receipt, key: bytes = b"") -> Iterator[Finding]:
    """Yield the findings on whether the receipt is as it was written, and by whom."""
    differences = form.changes(receipt, key)
    yield from (Finding(DIFFERS, *difference) for difference in differences)
    if differences:
        return
    yield Finding(SAME, "digest")
    if receipt.signature is None:
        yield Finding(NOTE, "signature", "because there is none: who made the receipt is not known")
    elif key:
        yield Finding(SAME, "signature")
    else:
        what = f"because the server's key ({receipt.signature.key}) was not given: --key-file"
        yield Finding(NOTE, "signature", what)
    if receipt.version != form.VERSION:
        what = f"is {receipt.version}, and this program knows {form.VERSION}"
        yield Finding(UNKNOWN, "version", what)


def load(
    receipt: Receipt, path: Path, chat_template: str = "", lora: str = "", **settings: object
) -> LLM:
    """An engine that computes as the one of the receipt did, as far as settings say how.
    EngineFault where there can be none. lora: folder of the adapter, which the receipt knows by its
    content."""
    given = {name: value for name, value in settings.items() if name not in SETTLED}
    widest = max(receipt.params.best_of, receipt.params.beam_width)
    if widest > SLOTS:  # but no receipt may have any amount of memory taken
        given["max_num_seqs"] = min(widest, MAX_SLOTS)
    made_with: dict[str, Any] = given | settings_of(receipt.fingerprint)
    folders = {ADAPTER: lora} if lora and receipt.adapter else {}
    return LLM(str(path), chat_template=chat_template, lora=folders, **made_with)


def made_again(
    receipt: Receipt, llm: LLM, prompt: str, answers: dict[int, GivenAnswer] | None = None
) -> Iterator[Finding]:
    """Compare the answer with one that is made here, alone. prompt: as --prompt; answers: what was
    answered, by choice, where that is known."""
    if receipt.adapter:
        finding = _adapter_finding(receipt.adapter, llm)
        yield finding
        if finding.verdict != SAME:
            return
    if receipt.fingerprint != llm.built.fingerprint:
        what = f"is {receipt.fingerprint}, and here runs {llm.built.fingerprint}"
        yield Finding(UNKNOWN, "fingerprint", f"{what}: only equal ones promise equal bits")
        return
    yield Finding(SAME, "fingerprint")
    prompts, differences = given_prompts(receipt, prompt, llm.tokenizer)
    yield from (Finding(DIFFERS, *difference) for difference in differences)
    if differences:
        return
    yield Finding(SAME, "prompts")
    try:
        made = list(_answers(receipt, llm, prompts))
    except ClientError as error:
        yield Finding(
            UNKNOWN, "choices", f"because this engine refuses the request: {error.message}"
        )
        return
    yield from _compared(receipt, llm, made, answers or {})


def _model(receipt: Receipt, given: str | None) -> str:
    if (
        given is None and receipt.model not in hub.ALIASES
    ):  # a receipt may not choose what is fetched
        raise bad_setting(
            f"say where the model is that the receipt calls {receipt.model[:80]!r}: --model"
        )
    return given or receipt.model


def _model_finding(receipt: Receipt, path: Path) -> Finding:
    hash = model_hash(path)
    if hash == receipt.model_hash:
        return Finding(SAME, "model_hash")
    return Finding(DIFFERS, "model_hash", f"is {receipt.model_hash}, and that of {path} is {hash}")


def _adapter_finding(digest: str, llm: LLM) -> Finding:
    try:
        mine = llm.adapters.digest(ADAPTER)
    except ClientError:
        return Finding(
            UNKNOWN, "adapter", f"{digest[:64]} is not here: say where its folder is, --lora"
        )
    if mine == digest:
        return Finding(SAME, "adapter")
    return Finding(DIFFERS, "adapter", f"is {digest[:64]}, and that of the folder given is {mine}")


def _use_isa_of(fingerprint: str) -> None:
    """Have the kernels use the receipt's instruction set, where this machine has it too."""
    from pageturner.kernels.cpu import native_module

    isa = fingerprint.removeprefix("native-").split("-")[0]
    if isa in native_module.available_isas():
        os.environ.setdefault("PAGETURNER_ISA", isa)


def _answers(receipt: Receipt, llm: LLM, prompts: list[list[int]]) -> Iterator[list[Completion]]:
    """The answers to each prompt. ClientError where it cannot run."""
    for prompt, tokens in zip(receipt.prompts, prompts, strict=True):
        if not prompt.max_tokens:  # nothing but its echo was wanted
            yield [Completion(finish_reason="length") for _ in range(receipt.params.n)]
            continue
        skip = receipt.input.skip_special_tokens
        params = form.sampling_of(receipt, prompt)
        lora = ADAPTER if receipt.adapter else ""
        (output,) = llm.generate(
            [tokens], params, progress=False, skip_special_tokens=skip, lora=lora
        )
        yield output.outputs


def _compared(
    receipt: Receipt, llm: LLM, made: list[list[Completion]], answers: dict[int, GivenAnswer]
) -> Iterator[Finding]:
    every = [answer for of_prompt in made for answer in of_prompt]
    if len(every) != len(receipt.choices):
        what = f"are {len(receipt.choices)}, and {len(every)} were made again"
        yield Finding(DIFFERS, "choices", what)
        return
    for choice, answer in zip(receipt.choices, every, strict=True):
        given = answers.get(choice.index)
        differences = list(form.differences(choice, answer.token_ids, answer.finish_reason or ""))
        if given is not None:
            differences += given.differences(choice, answer, llm.tokenizer, echo=receipt.input.echo)
        yield from (Finding(DIFFERS, *difference) for difference in differences)
        if not differences:
            as_given = ", as it was given" if given is not None else ""
            what = f"({choice.tokens} tokens, {choice.finish_reason}{as_given})"
            yield Finding(SAME, f"choices[{choice.index}]", what)


# -- what is given ---------------------------------------------------------------------------------
def read(path: str) -> str:
    """Every byte counts: nothing is done to the ends of lines. Windows writes UTF-16 behind its
    mark."""
    try:
        raw = Path({"-": "/dev/stdin"}.get(path, path)).read_bytes()
        if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
            return raw.decode("utf-16")
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise bad_setting(f"cannot read {path}: {error}") from error


def _given(value: str | None) -> str | None:
    """The text of a flag, or of the file that it names."""
    return read(value[1:]) if value is not None and value.startswith("@") else value
