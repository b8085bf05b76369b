"""JSON schemas and GBNF: the reported cases, two foreign suites of schemas against the grammar byte by byte, and
foreign suites of servers against ours.

Sources lie outside: `PAGETURNER_CASES` (cases/), `PAGETURNER_SOURCES` (a folder with `jsts`, `jsb`, `llamacpp` and
`vllm`). Answers are judged by the package `jsonschema`. What is absent is NOT RUN.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "clients")]

import harness  # noqa: E402
from harness import Line, NotRun  # noqa: E402

from pageturner.errors import ClientError  # noqa: E402
from pageturner.text.grammar.check import byte_tokens, compiled  # noqa: E402
from pageturner.text.structured_outputs import StructuredOutputsParams  # noqa: E402

# the cases whose kind is schemas and grammars; the others belong to other parts
KINDS = re.compile("pattern|bounds|propertyNames|oneOf|json_object|gbnf|hint")
IDS = (
    "json-object-schema-dropped",
    "gbnf-u-escapes",
    "date-feb-29",
    "valid-schemas-called-invalid",
    "oneof-message",
    "schema-true-refused",
)
# what is right: the status, and what stands in the answer; else 200
RIGHT = {
    "date-feb-29": (400, "unsatisfiable_schema"),
    "json-object-schema-dropped": (200, r"\"blue\""),
    "json_object-schema": (200, "{"),
    "gbnf-u-escapes": (200, '"A"'),
    "gbnf-u-string": (200, "é"),
    "resp-format-hint": (400, r"\"name\": ..., \"schema\""),
}
# `$id` beside `$ref` says nothing in draft 7, and counts in later ones, as which all are read
KNOWN = ("$ref resolves to /definitions/base_foo",)
FORMATS = ("date", "ipv4", "ipv6")  # that jsonschema judges by itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grammar-schemas", type=int, default=700, help="of JSONSchemaBench")
    parser.add_argument("--grammar-http", type=int, default=60, help="of these over HTTP")


def folder(name: str, within: str) -> Path:
    root = os.environ.get(name)
    if not root or not (Path(root) / within).exists():
        raise NotRun(f"{name} names no folder with {within}")
    return Path(root) / within


# -- cases -----------------------------------------------------------------------------------------
def post(url: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def case_lines() -> Iterator[Line]:
    cases = folder("PAGETURNER_CASES", "api.jsonl").parent
    rows = [
        json.loads(line)
        for name in ("api.jsonl", "suites.jsonl")
        for line in (cases / name).read_text().strip().split("\n")
    ]
    rows = [row for row in rows if row["id"] in IDS or KINDS.search(row.get("kind", ""))]
    wrong = []
    with harness.server("--tool-call-parser", "hermes", "--developer") as server:
        for row in rows:
            status, text = post(server.url + row["request"]["path"], row["request"]["body"])
            wanted, word = RIGHT.get(row["id"], (200, ""))
            if status != wanted or word not in text:
                wrong.append(f"{row['id']} {status} {text[:120]}")
    figure = f"{len(rows) - len(wrong)} of {len(rows)} {'; '.join(wrong)}"
    yield Line("cases of schemas and grammars have the right answer", figure, not wrong)


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


def suite_lines() -> Iterator[Line]:
    root = folder("PAGETURNER_SOURCES", "jsts/tests")
    kinds, reasons, found = Counter[str](), Counter[str](), Counter[str]()
    wrong = list[str]()
    files = [*(root / "draft2020-12").glob("*.json"), *(root / "draft7").glob("*.json")]
    for path in sorted(files):
        for group in json.loads(path.read_text()):
            name, why, grammar = verdict(group["schema"])
            kinds[name] += 1
            if name == "refused":
                reasons[kind_of(why)] += 1
            for test in group["tests"] if name == "held" else ():
                taken = takes(grammar, written(test["data"], group["schema"]))
                found[
                    f"{'valid' if test['valid'] else 'invalid'} {'' if taken else 'not '}taken"
                ] += 1
                if taken and not test["valid"] and not test["description"].startswith(KNOWN):
                    wrong.append(f"{path.parent.name}/{path.name}: {test['description']}")
    figure = (
        f"schemas {dict(kinds)}; instances of held ones {dict(found)}; refused: {dict(reasons)}"
    )
    yield Line("JSON-Schema-Test-Suite, drafts 7 and 2020-12", figure, None)
    what = (
        f"instances that a held schema calls invalid, and a grammar takes: 0 ({len(KNOWN)} known)"
    )
    yield Line(what, f"{len(wrong)} {wrong[:6]}", not wrong)


def sampled(count: int) -> list[tuple[str, Any]]:
    """So many files of JSONSchemaBench, the same ones each time."""
    root = folder("PAGETURNER_SOURCES", "jsb")

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True).stdout

    names = sorted(git("ls-tree", "HEAD:maskbench/data", "--name-only").split())
    chosen = random.Random(1).sample(names, min(count, len(names)))
    texts = [(name, git("show", f"HEAD:maskbench/data/{name}")) for name in chosen]
    return [(name, json.loads(text)) for name, text in texts if text.startswith("{")]


def bench_lines(files: list[tuple[str, Any]]) -> Iterator[Line]:
    kinds, reasons, found = Counter[str](), Counter[str](), Counter[str]()
    wrong = list[str]()
    finished, dice, judge = 0, random.Random(2), importlib.util.find_spec("jsonschema")
    for name, file in files:
        schema = file["schema"]
        kind, why, grammar = verdict(schema)
        kinds[kind] += 1
        if kind != "held":
            reasons[f"{kind}: {kind_of(why)}"] += 1
            continue
        for test in file.get("tests", ()):
            taken = takes(grammar, written(test["data"], schema))
            found[f"{'valid' if test['valid'] else 'invalid'} {'' if taken else 'not '}taken"] += 1
            if taken and not test["valid"]:
                wrong.append(f"{name}: {str(test.get('description'))[:60]}")
        if judge and (text := answer(grammar, dice)) is not None:
            finished += 1
            wrong += [] if is_valid(text, schema) else [f"{name}: {text[:80]}"]
    most = dict(reasons.most_common(12))
    yield Line(
        f"JSONSchemaBench, {len(files)} files", f"{dict(kinds)}; {dict(found)}; {most}", None
    )
    what = "invalid instances that a grammar takes, and invalid answers of random logits: 0"
    yield Line(what, f"{len(wrong)} of {finished} answers {wrong[:6]}", not wrong)


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
        status, text = post(server.url + "/v1/chat/completions", body)
        if status != 200:
            return "refused" if status == 400 else f"status {status}", name
        choice = json.loads(text)["choices"][0]
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
        sources = folder("PAGETURNER_SOURCES", place).parents[len(Path(place).parts) - 1]
        found = foreign_suites.run(suite, sources)
        reasons = "; ".join(f"{why} {len(tests)}" for why, tests in found["reasons"].items())
        failed = " | ".join(one[:90] for one in found["failed"])
        figure = f"{dict(found['counts'])}; not applicable: {reasons}; failed: {failed}"
        yield Line(f"tests of {suite} against our server", figure, None)


def lines(options: argparse.Namespace) -> Iterator[Line]:
    yield from harness.safely("cases of schemas and grammars", case_lines)
    yield from harness.safely("JSON-Schema-Test-Suite", suite_lines)
    files = list[tuple[str, Any]]()
    try:
        files += sampled(options.grammar_schemas)
    except NotRun as reason:
        yield Line("JSONSchemaBench", str(reason), None, run=False)
    if files:
        yield from harness.safely("JSONSchemaBench", lambda: bench_lines(files))
        some = files[: options.grammar_http]
        yield from harness.safely("schemas over HTTP", lambda: http_lines(some))
    yield from harness.safely("foreign suites of servers", server_suite_lines)


if __name__ == "__main__":
    sys.exit(harness.main("bring_grammar", __doc__, {"grammar": harness.part("bring_grammar")}))
