"""The door of the API: what it promises and which tests hold it, and Schemathesis on our own document.

Owns how it is installed and run, and what counts as a violation. Schemathesis is no dependency of the
project: it goes into a virtual environment of its own, below ${PAGETURNER_PEERS:-~/.cache/pageturner/peers};
where it cannot be installed the lines are NOT RUN.

    python bench/accept/api_door.py [--examples 60] [--coverage 240]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from harness import Line, NotRun

VERSION = "4.32.5"
KEY, ADMIN = "sesame", "open-admin"
LEAST_ACCEPTED = 0.7
# kinds of failures that are no violation of ours: what is valid by the document and refused all the same is
# counted, and held to LEAST_ACCEPTED
COUNTED = frozenset({"positive_data_acceptance"})
# any client may send headers that nobody knows
UNKNOWN_HEADERS = "in header - object with unexpected properties"
# a deadline of a moment is kept by answering 504, as the document says
MEANT = frozenset({"deadline_exceeded"})


@dataclass(slots=True)
class Outcome:
    """What a run of Schemathesis saw. positive: statuses of requests that are valid by the document, by
    operation; violations: by check and operation, with an example of each."""

    cases: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    positive: dict[str, Counter[int]] = field(default_factory=dict)
    violations: dict[str, str] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def accepted(self) -> tuple[int, int]:
        """Positive cases that got an answer, and all of them; without operations whose path has an id, which
        nobody can guess."""
        counted = [statuses for label, statuses in self.positive.items() if "{" not in label]
        good = sum(
            count for statuses in counted for status, count in statuses.items() if status < 300
        )
        return good, sum(sum(statuses.values()) for statuses in counted)


def installed() -> Path:
    """The program. NotRun says why there is none."""
    peers = Path(
        os.environ.get("PAGETURNER_PEERS") or Path.home() / ".cache" / "pageturner" / "peers"
    )
    folder = peers / "schemathesis"
    program = folder / "bin" / "schemathesis"
    if not (folder / ".complete").exists():
        try:
            subprocess.run(
                [sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True
            )
            pip = [str(folder / "bin" / "pip"), "install", "--quiet", f"schemathesis=={VERSION}"]
            subprocess.run(pip, check=True, capture_output=True, timeout=600)
        except (subprocess.SubprocessError, OSError) as error:
            raise NotRun(f"Schemathesis cannot be installed: {error}") from error
        (folder / ".complete").touch()
    return program


def run(program: Path, url: str, phases: str, examples: int, *more: str) -> Outcome:
    """One run against a server. Its report is read, not its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.ndjson"
        words = (
            f"run {url}/openapi.json --phases {phases} --max-examples {examples} --seed 1"
            " --exclude-path-regex ^/v1/(admin|(un)?load_lora_adapter) --continue-on-failure"
            " --suppress-health-check all --report ndjson --request-timeout 60"
            f" --report-ndjson-path {report}"
        )
        key = ("-H", f"Authorization: Bearer {KEY}")
        command = [str(program), *words.split(), *key, *more]
        done = subprocess.run(
            command, check=False, cwd=folder, capture_output=True, text=True, timeout=3600
        )
        if not report.exists():
            raise RuntimeError(f"no report: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        with report.open() as lines:
            return read(map(json.loads, lines))


def read(events: Iterator[dict[str, Any]]) -> Outcome:
    """The outcome that a report tells."""
    outcome = Outcome()
    for event in events:
        if (ended := event.get("ScenarioFinished")) and ended.get("recorder"):
            _scenario(ended["recorder"], outcome)
        for name in ("NonFatalError", "FatalError"):
            if name in event and not _takes_none(event[name]):
                outcome.violations[name] = json.dumps(event[name])[:300]
    return outcome


def _takes_none(error: dict[str, Any]) -> bool:
    """Whether nothing could be made up for /infill: SmolLM2 has no marks of gaps, as the document says."""
    value = error.get("value") or {}
    return value.get("type") == "Unsatisfiable" and "/GapRequest" in str(value.get("message"))


def _scenario(recorder: dict[str, Any], outcome: Outcome) -> None:
    for id, case in recorder.get("cases", {}).items():
        interaction = recorder.get("interactions", {}).get(id) or {}
        answer = interaction.get("response") or {}
        status, value = int(answer.get("status_code", 0)), case["value"]
        label = f"{value['method']} {value['path']}"
        outcome.cases += 1
        outcome.statuses[status] += 1
        mode = ((value.get("meta") or {}).get("generation") or {}).get("mode")
        derived = case.get("parent_id") and not case.get("is_transition_applied")
        if mode == "positive" and not derived:
            outcome.positive.setdefault(label, Counter())[status] += 1
            if status >= 400 and "{" not in label:
                outcome.reasons[f"{value['path']}: {_message(answer)[:110]}"] += 1
        for check in recorder.get("checks", {}).get(id, []):
            if check["status"] != "failure":
                continue
            outcome.kinds[check["name"]] += 1
            told, reason = _said(check), _message(answer, "reason")
            if check["name"] not in COUNTED and reason not in MEANT and UNKNOWN_HEADERS not in told:
                outcome.violations.setdefault(f"{check['name']} {label}", f"{status}: {told}")


def _said(check: dict[str, Any]) -> str:
    failure = (check.get("failure_info") or {}).get("failure") or {}
    return f"{failure.get('title')}: {failure.get('message')}".replace("\n", " ")[:400]


def _message(answer: dict[str, Any], name: str = "message") -> str:
    """What an answer says of itself."""
    try:
        body = json.loads(base64.b64decode((answer.get("content") or {}).get("$base64", "")))
    except ValueError:
        return ""
    error = body.get("error", "") if isinstance(body, dict) else ""
    if isinstance(error, dict):
        return str(error.get(name, ""))
    return str(body.get(name, error)) if isinstance(body, dict) else ""


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    program = installed()
    with tempfile.TemporaryDirectory() as folder:
        usual = Path(folder) / "generation_config.json"
        usual.write_text('{"max_new_tokens": 8}')  # chats that do not say it end soon
        flags = (
            f"--api-key {KEY} --admin-key {ADMIN} --max-model-len 256 --log-level warning".split()
        )
        log = Path(folder) / "log"
        with harness.server(*flags, "--generation-config", str(usual), log=log) as server:
            begin = time.monotonic()
            random = run(program, server.url, "fuzzing,stateful", arguments.examples)
            yield from _violations(
                random, "random requests and chains of them", time.monotonic() - begin
            )
            good, all_ = random.accepted()
            share = good / all_ if all_ else 0.0
            why = ", ".join(
                f"{count} x {reason!r}" for reason, count in random.reasons.most_common(4)
            )
            figure = f"{share:.1%} of {all_:,}; refused most: {why}"
            yield Line(
                f"positive cases accepted, at least {LEAST_ACCEPTED:.0%}",
                figure,
                share >= LEAST_ACCEPTED,
            )
            if arguments.coverage:
                begin, most = time.monotonic(), str(arguments.coverage)
                extremes = run(
                    program, server.url, "coverage", arguments.examples, "--max-time", most
                )
                yield from _violations(
                    extremes, "extremes of every field", time.monotonic() - begin
                )
            restarts = server.metric("pageturner:engine_restarts_total")
        said = log.read_text().count("Traceback")
        figure = f"{said} tracebacks, {restarts:.0f} restarts"
        yield Line(
            "Schemathesis leaves no traceback and the same engine",
            figure,
            not said and not restarts,
        )


def _violations(outcome: Outcome, what: str, seconds: float) -> Iterator[Line]:
    fives = {status: n for status, n in outcome.statuses.items() if status >= 500 and status != 504}
    statuses = dict(sorted(outcome.statuses.items()))
    figure = f"{outcome.cases:,} requests in {seconds:.0f} s, statuses {statuses}"
    yield Line(
        f"Schemathesis on /openapi.json, {what}: no 500", figure, bool(outcome.cases) and not fives
    )
    examples = "; ".join(f"{name}: {told}" for name, told in list(outcome.violations.items())[:5])
    figure = f"{len(outcome.violations)} {examples}".strip()
    yield Line(
        "no violation (status, content type, headers, schema, methods, keys)",
        figure,
        not outcome.violations,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--examples", type=int, default=60, help="requests for each operation, at most"
    )
    parser.add_argument(
        "--coverage", type=int, default=240, help="seconds for enumerated extremes; 0: none"
    )
