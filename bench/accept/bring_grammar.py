"""JSON schemas: two foreign suites of schemas against the grammar byte by byte, and foreign suites of servers against
ours.

Sources lie outside: `PAGETURNER_SOURCES` (a folder with `jsts`, `jsb`, `llamacpp` and `vllm`). Answers are judged by
the package `jsonschema`. What is absent is NOT RUN.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import subprocess
import urllib.error
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from harness import Line, NotRun

from pageturner.errors import ClientError
from pageturner.text.grammar.check import byte_tokens, compiled
from pageturner.text.structured_outputs import StructuredOutputsParams

# `$id` beside `$ref` says nothing in draft 7, and counts in later ones, as which all are read
KNOWN = ("$ref resolves to /definitions/base_foo",)
FORMATS = ("date", "ipv4", "ipv6")  # that jsonschema judges by itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grammar-schemas", type=int, default=700, help="of JSONSchemaBench")
    parser.add_argument("--grammar-http", type=int, default=60, help="of these over HTTP")


def folder(within: str) -> Path:
    """A folder of the sources."""
    root = os.environ.get("PAGETURNER_SOURCES")
    if not root or not (Path(root) / within).exists():
        raise NotRun(f"PAGETURNER_SOURCES names no folder with {within}")
    return Path(root) / within


# -- what is held of a schema ----------------------------------------------------------------------
def verdict(schema: Any) -> tuple[str, str, str]:
    """held, passed over or refused; why; and the grammar."""
    why = ""
    for strict, name in ((True, "held"), (False, "passed over")):
        try:
            return name, why, StructuredOutputsParams(json=schema, strict=strict)
        except ClientError as error:
            why = f"{error.code}: {error.message.partition(': ')[2]}"
    return "refused", why, ""


def kind_of(reason: str) -> str:
    words = re.sub(r"[\"'/\[(].*|\d+", "", reason)
    return " ".join(words.split()[:7])


def takes(grammar: str, text: str) -> bool:
    matcher = compiled(byte_tokens(), grammar)
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


def ordered(value: Any, schema: Any) -> Any:
    """The value with its properties in the order of the schema, as a grammar wants them."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [ordered(one, schema["items"]) for one in value]
    known = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(known, dict):
        return value
    required = [one for one in schema.get("required", []) if isinstance(one, str)]
    names = dict.fromkeys([*known, *required, *value])
    return {name: ordered(value[name], known.get(name)) for name in names if name in value}


def written(value: Any, schema: Any) -> str:
    return json.dumps(ordered(value, schema), ensure_ascii=False, separators=(",", ":"))


def answer(grammar: str, dice: random.Random, longest: int = 1500) -> str | None:
    """A text that random logits would write under the grammar; None: it was cut."""
    matcher, text = compiled(byte_tokens(), grammar), bytearray()
    while len(text) < longest:
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_accepting() and (matcher.is_stopped() or dice.random() < 0.3):
            return text.decode()
        possible = [byte for byte in range(256) if bits >> byte & 1]
        if not possible:
            return None
        closing = [byte for byte in possible if byte in b'"}]']
        chosen = dice.choice(closing if closing and dice.random() < 0.4 else possible)
        matcher.consume_token(chosen)
        text.append(chosen)
    return None


def is_valid(text: str, schema: Any) -> bool:
    """By jsonschema; what it cannot judge, as a regex that Python does not have, counts as valid."""
    import jsonschema

    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        checker = jsonschema.FormatChecker(FORMATS)
        return bool(kind(schema, format_checker=checker).is_valid(json.loads(text)))
    except (re.error, RecursionError, jsonschema.exceptions.SchemaError):
        return True
    except Exception as error:
        return "resolv" in str(type(error)).lower() or "Unresolvable" in str(error)


@dataclass(slots=True)
class Tally:
    """What becomes of the schemas of a suite, and of the instances of those that are held."""

    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, where: str, schema: Any, tests: list[dict[str, Any]]) -> str:
        """Count one schema and its instances. The grammar of a held one, else ""."""
        kind, why, grammar = verdict(schema)
        self.kinds[kind] += 1
        if kind != "held":
            self.reasons[f"{kind}: {kind_of(why)}"] += 1
            return ""
        for test in tests:
            said, taken = (
                str(test.get("description")),
                takes(grammar, written(test["data"], schema)),
            )
            judged = "valid" if test["valid"] else "invalid"
            self.found[f"{judged} {'taken' if taken else 'not taken'}"] += 1
            if taken and not test["valid"] and not said.startswith(KNOWN):
                self.wrong.append(f"{where}: {said[:60]}")
        return grammar

    def line(self, what: str) -> Line:
        figure = f"{dict(self.kinds)}; {dict(self.found)}; {dict(self.reasons.most_common(12))}"
        return Line(what, figure, None)


def suite_lines() -> Iterator[Line]:
    root, tally = folder("jsts/tests"), Tally()
    files = [*(root / "draft2020-12").glob("*.json"), *(root / "draft7").glob("*.json")]
    for path in sorted(files):
        for group in json.loads(path.read_text()):
            tally.add(f"{path.parent.name}/{path.name}", group["schema"], group["tests"])
    yield tally.line("JSON-Schema-Test-Suite, drafts 7 and 2020-12")
    what = (
        f"instances that a held schema calls invalid, and a grammar takes: 0 ({len(KNOWN)} known)"
    )
    yield Line(what, f"{len(tally.wrong)} {tally.wrong[:6]}", not tally.wrong)


def sampled(count: int) -> list[tuple[str, Any]]:
    """So many files of JSONSchemaBench, the same ones each time."""
    root = folder("jsb")

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True).stdout

    names = sorted(git("ls-tree", "HEAD:maskbench/data", "--name-only").split())
    chosen = random.Random(1).sample(names, min(count, len(names)))
    texts = [(name, git("show", f"HEAD:maskbench/data/{name}")) for name in chosen]
    return [(name, json.loads(text)) for name, text in texts if text.startswith("{")]


def bench_lines(files: list[tuple[str, Any]]) -> Iterator[Line]:
    tally, dice, finished = Tally(), random.Random(2), 0
    judge = importlib.util.find_spec("jsonschema")
    for name, file in files:
        grammar = tally.add(name, file["schema"], file.get("tests", []))
        text = answer(grammar, dice) if judge and grammar else None
        if text is not None:
            finished += 1
            tally.wrong += [] if is_valid(text, file["schema"]) else [f"{name}: {text[:80]}"]
    yield tally.line(f"JSONSchemaBench, {len(files)} files")
    what = "invalid instances that a grammar takes, and invalid answers of random logits: 0"
    yield Line(what, f"{len(tally.wrong)} of {finished} answers {tally.wrong[:6]}", not tally.wrong)


def http_lines(files: list[tuple[str, Any]]) -> Iterator[Line]:
    import jsonschema  # noqa: F401

    def ask(pair: tuple[int, tuple[str, Any]]) -> tuple[str, str]:
        number, (name, file) = pair
        form = {"name": "x", "schema": file["schema"]}
        body = {
            "messages": [{"role": "user", "content": "An example, please."}],
            "response_format": {"type": "json_schema", "json_schema": form},
            "temperature": 1 + number % 3 / 4,
            "max_tokens": 200,
            "seed": number,
        }
        try:
            choice = json.loads(harness.fetch(server.url, "/v1/chat/completions", body))["choices"][
                0
            ]
        except urllib.error.HTTPError as error:
            return "refused" if error.code == 400 else f"status {error.code}", name
        if choice["finish_reason"] != "stop":
            return "cut", name
        if verdict(file["schema"])[0] != "held":
            return "passed over", name
        good = is_valid(choice["message"]["content"], file["schema"])
        return ("valid" if good else "invalid"), name

    with harness.server("--tool-call-parser", "hermes") as server, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(ask, enumerate(files)))
    counts = Counter(result for result, _ in results)
    bad = [name for result, name in results if result.startswith(("invalid", "status"))]
    yield Line(
        "schemas over HTTP, temperature 1 to 1.5: 0 invalid", f"{dict(counts)} {bad}", not bad
    )


def server_suite_lines() -> Iterator[Line]:
    import foreign_suites

    for suite, place in foreign_suites.FOLDERS.items():
        sources = folder(place).parents[len(Path(place).parts) - 1]
        found = foreign_suites.run(suite, sources)
        reasons = "; ".join(f"{why} {len(tests)}" for why, tests in found["reasons"].items())
        failed = " | ".join(one[:90] for one in found["failed"])
        figure = f"{dict(found['counts'])}; not applicable: {reasons}; failed: {failed}"
        yield Line(f"tests of {suite} against our server", figure, None)


def of_bench(options: argparse.Namespace) -> Iterator[Line]:
    files = sampled(options.grammar_schemas)
    yield from bench_lines(files)
    yield from harness.safely(
        "schemas over HTTP", lambda: http_lines(files[: options.grammar_http])
    )


def lines(options: argparse.Namespace) -> Iterator[Line]:
    yield from harness.safely("JSON-Schema-Test-Suite", suite_lines)
    yield from harness.safely("JSONSchemaBench", lambda: of_bench(options))
    yield from harness.safely("foreign suites of servers", server_suite_lines)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
