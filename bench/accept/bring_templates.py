"""Public chat templates beside Transformers: 24 conversations, with a generation prompt and without, thinking
unset, on and off, through the function that renders every prompt.

A rendering that is not Transformers' must be better by a rule that can be checked: Transformers refuses the
conversation; it writes "None" for no content; it writes text parts as objects; or it loses words that are
here. `--templates-folder` (or PAGETURNER_TEMPLATES) is walked for the templates; `--templates-python` is a
Python with transformers.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
from harness import ROOT, Line, NotRun

from pageturner.errors import ClientError
from pageturner.text import chat_template, tools
from pageturner.text.chat_template import ChatTemplate
from pageturner.text.conversation import prompt_text, variables

Messages = list[dict[str, Any]]
DATA = json.loads((ROOT / "bench" / "data" / "template_talks.json").read_text())
TOOLS: dict[str, Any] = DATA["tools"]
TALKS: dict[str, Any] = DATA["talks"]  # name -> messages, names of tools
LARGEST_TRIALS = 0.3  # seconds of this process, once for a template
# reads the sources and the conversations, writes the renderings of each with arguments as objects and as texts
REFERENCE = """
import json, sys
from transformers.utils.chat_template_utils import render_jinja_template as render
given = json.load(sys.stdin)
made = []
for source in given["sources"]:
    for job in given["jobs"]:
        row = []
        for messages in job["forms"]:
            try:
                texts, _ = render([messages], chat_template=source, bos_token="<s>", eos_token="</s>", **job["with"])
                row.append(texts[0])
            except Exception:
                row.append(None)
        made.append(row)
json.dump(made, sys.stdout)
"""

# each stands in what a client has said, and in nothing else
WORDS = re.findall(
    r"\S+", "Zoe Ann Bob Rome Lima Oslo Carl Quito 31C grey 12:30 look weather time Tells days"
)
HISTORY = ("Lima", "Oslo", "31C", "grey", "12:30")  # of calls and results
OBJECT = re.compile(r"""["']text["'] ?: ?["']""")
CLOCK_TIME = re.compile(r"\d\d:\d\d:\d\d")  # a template that writes the time


@dataclass(frozen=True, slots=True)
class Job:
    """One conversation and its variables. generate: with a generation prompt."""

    talk: str
    generate: bool
    thinking: bool | None

    @property
    def messages(self) -> Messages:
        return list(TALKS[self.talk]["messages"])

    @property
    def shown(self) -> list[Any]:
        return [TOOLS[name] for name in TALKS[self.talk]["tools"]]

    @property
    def given(self) -> dict[str, Any]:
        """The variables of this conversation."""
        given = {name: one for name, one in TALKS[self.talk].items() if name == "documents"}
        if self.thinking is not None:
            given |= {"enable_thinking": self.thinking, "thinking": self.thinking}
        return given

    def reference(self) -> dict[str, Any]:
        given = {**self.given, "tools": self.shown or None, "add_generation_prompt": self.generate}
        none = [{**one, "content": one.get("content") or None} for one in self.messages]
        forms = [self.messages, with_texts(self.messages)]
        if self.talk == "call":  # whose empty content may be none
            forms += [none, with_texts(none)]
        return {"forms": forms, "with": given}

    def ours(self, template: ChatTemplate) -> str:
        """The prompt of a client that sends this, arguments as texts."""
        known = variables(tools.read(self.shown, None, None).shown, None, self.given)
        return prompt_text(template, with_texts(self.messages), known, generate=self.generate)


JOBS = [Job(*of) for of in itertools.product(TALKS, (True, False), (None, True, False))]


def template_paths(folder: str) -> list[Path]:
    """The templates below a folder. NotRun where there are none."""
    paths = sorted(Path(folder or os.devnull).rglob("*.jinja*"))
    if not paths:
        raise NotRun("no templates: PAGETURNER_TEMPLATES, or an option, names their folder")
    return paths


def with_texts(messages: Messages) -> Messages:
    """The messages with arguments as texts."""
    made = copy.deepcopy(messages)
    for message in made:
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
    return made


def reason(theirs: list[str], ours: str) -> str:
    """Why this is equal to one of those or better; "": it is neither."""
    if CLOCK_TIME.sub("", ours) in [CLOCK_TIME.sub("", text) for text in theirs]:
        return "equal"
    if not theirs:
        return "Transformers refuses"
    why = (worse(text, ours) for text in theirs)
    return next((one for one in why if one), "")


def worse(theirs: str, ours: str) -> str:
    """What is worse in the text of Transformers, "" for nothing."""
    counts = [(ours.count(word), theirs.count(word)) for word in WORDS]
    if OBJECT.search(theirs) and not OBJECT.search(ours):
        return "parts are text"
    if any(mine < other for mine, other in counts):
        return ""
    if len(re.findall("None|null", theirs)) > len(re.findall("None|null", ours)):
        return "no None"
    if any(mine > other for mine, other in counts):
        return "nothing is lost"
    return ""


@dataclass(slots=True)
class Found:
    """What came out. lost: renderings of ours without a call or a result of the history."""

    reasons: Counter[str] = field(default_factory=Counter)
    differ: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    both: set[str] = field(default_factory=set)
    both_refuse: int = 0
    lost: list[str] = field(default_factory=list)
    trials: list[float] = field(default_factory=list)

    def add(self, name: str, template: ChatTemplate, job: Job, theirs: list[str]) -> None:
        where = f"{name} ({job.talk})"
        try:
            ours = job.ours(template)
        except ClientError:
            if theirs:
                self.refused.append(where)
            else:
                self.both_refuse += 1
                self.both.add(name)
            return
        why = reason(theirs, ours)
        self.reasons[why] += 1
        if not why:
            self.differ.append(where)
        said = json.dumps(job.messages)
        lost = any(word in said and word not in ours for word in HISTORY)
        if lost and "Ann" in ours:  # else it is no template for chats: users are not written either
            self.lost.append(where)


def references(python: str, sources: list[str]) -> list[list[str | None]]:
    """The renderings of Transformers, source by source and job by job."""
    probe = subprocess.run([python, "-c", "import transformers"], capture_output=True, check=False)
    if probe.returncode:
        raise NotRun(f"{python} has no transformers: --templates-python names one that has")
    asked = {"sources": sources, "jobs": [job.reference() for job in JOBS]}
    done = subprocess.run(
        [python, "-c", REFERENCE],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    made: list[list[str | None]] = json.loads(done.stdout)
    return made


def rendered(sources: dict[str, str], theirs: list[list[str | None]]) -> Found:
    found = Found()
    rows = iter(theirs)
    for name, source in sources.items():
        template = ChatTemplate(source, "<s>", "</s>")
        begin = time.process_time()
        for shown in (False, True):
            chat_template.habits_of(template, shown)
        found.trials.append(time.process_time() - begin)
        for job in JOBS:
            found.add(name, template, job, [text for text in next(rows) if text is not None])
    return found


def images_refused(sources: dict[str, str]) -> int:
    """How many templates refuse a picture with a message that says so."""
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    picture = {"role": "user", "content": content}
    count = 0
    for source in sources.values():
        try:
            prompt_text(ChatTemplate(source), [picture], {})
        except ClientError as error:
            count += "only text parts" in error.message
    return count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    folder = os.environ.get("PAGETURNER_TEMPLATES", "")
    parser.add_argument("--templates-folder", default=folder, help="walked for chat templates")
    parser.add_argument("--templates-python", default=sys.executable, help="has transformers")


def lines(options: argparse.Namespace) -> Iterator[Line]:
    paths = template_paths(options.templates_folder)
    sources = {f"{path.parent.name}/{path.stem}": path.read_text() for path in paths}
    theirs = references(options.templates_python, list(sources.values()))
    found = rendered(sources, theirs)
    better = sum(count for why, count in found.reasons.items() if why not in ("equal", ""))
    figure = (
        f"{len(sources)} templates x {len(JOBS)}: {found.reasons['equal']:,} equal, {better:,} better,"
        f" {len(found.differ)} differ, {len(found.refused)} refused"
    )
    wrong = sorted({*found.differ, *found.refused})
    yield Line(
        "rendered as Transformers does or better", "; ".join([figure, *wrong[:5]]), not wrong
    )
    whys = ", ".join(f"{why} {n:,}" for why, n in found.reasons.most_common() if why != "equal")
    yield Line("why they are better", whys, None)
    both = f"{found.both_refuse:,} renderings of {len(found.both)} templates"
    yield Line("refused by Transformers too, with the template's own reason", both, None)
    lost = "; ".join([f"{len(found.lost)} renderings", *sorted(set(found.lost))[:5]])
    yield Line("calls and results of a history that are lost", lost, not found.lost)
    count = images_refused(sources)
    yield Line("pictures refused by name", f"{count} of {len(sources)}", count == len(sources))
    most = max(found.trials)
    figure = f"median {statistics.median(found.trials) * 1e3:.0f} ms, most {most * 1e3:.0f} ms"
    yield Line("trials of a template, once, processor time", figure, most < LARGEST_TRIALS)


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
