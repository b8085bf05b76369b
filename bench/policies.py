"""The pictures of docs/policies.md: every policy and every order on a few requests that tell them apart.

Owns these requests, what a step of theirs takes, and a picture with a line for each. Simulated, by the
engine's own scheduler and with steps of a fixed cost, so that they are the same, byte for byte, everywhere:
tests/lab/test_policy_pictures.py holds them to it. Must not know how anything is scheduled.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import msgspec

from pageturner.config.settings import EngineConfig
from pageturner.lab.bench.engine_bench import EngineBench
from pageturner.lab.compare import comparison
from pageturner.lab.compare.comparison import Contender
from pageturner.lab.compare.run_timeline import SlotSpan, timeline_of
from pageturner.lab.reporting.charts import HATCH, Axis, standalone
from pageturner.lab.reporting.comparison_pictures import KINDS
from pageturner.lab.simulation.step_cost import CalibratedCost
from pageturner.params import SamplingParams
from pageturner.policies.batching import POLICIES
from pageturner.policies.orders import ORDERS
from pageturner.request import Request, SessionHint
from pageturner.telemetry.step_log import Arrived

FOLDER = Path(__file__).parents[1] / "docs" / "policies"
WIDTH, LABELS, RIGHT, TOP, ROW = 700, 152, 14, 44, 15
STEP, TOKEN = 0.02, 0.001  # seconds that each step, and each row of it, takes
SETTINGS = EngineConfig(
    model="none",
    max_num_seqs=4,
    max_num_batched_tokens=64,
    static_batch=4,
    static_patience=0.5,
    served_steps=10,
    tpot_ms=40.0,
)
BLOCKS = 96  # of 16 tokens; room for any batch, padded
FEW = 28  # for the orders: a cached prefix that nobody uses soon is lost
BEFORE, ROUNDS, APART = (
    24.0,
    2,
    0.5,
)  # seconds before the picture begins; what came then, so far apart
MEANING = {
    "dashed": "waits",
    "prefill": "prompt",
    "decode": "answer, a cell for each token",
    "stalled": "stands still for others' prompts",
    "padding": "has ended, is computed on",
}


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. prompt, answer: tokens; shared: how many of the prompt's first `topic` has in common."""

    at: float
    prompt: int
    answer: int
    priority: int = 0
    ttft: float | None = None
    tenant: str = ""
    topic: int = 0
    shared: int = 0
    session: str = ""

    def request(self, id: int) -> Request:
        """max_tokens says nothing: it is the same for all (docs/adr/0006)."""
        same = [1 + (150 * self.topic + i) % 300 for i in range(self.shared)]
        own = [1 + (31 * id + i * i) % 300 for i in range(self.prompt - self.shared)]
        params = SamplingParams(
            temperature=0.0, max_tokens=96, stop_ids=(0,), forced_end=self.answer
        )
        return Request(
            id,
            (*same, *own),
            params,
            BEFORE + self.at,
            priority=self.priority,
            ttft_target=self.ttft,
            tenant=self.tenant,
            session=SessionHint(self.session) if self.session else None,
        )


_ASKS = json.loads((Path(__file__).parent / "data" / "policy_asks.json").read_text())
# Three at once, a fourth a little later; then a long prompt in the middle of their answers, then a few more.
FOR_POLICIES = [Ask(**row) for row in _ASKS["policies"]]
FOR_ORDERS = [Ask(**row) for row in _ASKS["orders"]]


def _size(ask: Ask) -> str:
    return f"{ask.prompt} + {ask.answer} tokens"


LABELLED: dict[str, Callable[[Ask], str]] = {  # what an order looks at
    "fcfs": lambda ask: f"at {ask.at:.2f} s",
    "priority": lambda ask: f"priority {ask.priority}",
    "deadline": lambda ask: (
        f"first token by {ask.at + ask.ttft:.2f} s" if ask.ttft else "no target"
    ),
    "adaptive": lambda ask: f"priority {ask.priority}, {ask.prompt} + {ask.answer}",
    "fair": lambda ask: f"{ask.tenant}, {ask.prompt} + {ask.answer}",
    "prefix": lambda ask: f"prefix {'AB'[ask.topic - 1]}" if ask.topic else "no prefix",
    "programs": lambda ask: f"agent {ask.tenant}, {ask.prompt} + {ask.answer}",
    "uniboost": lambda ask: f"at {ask.at:.2f} s, {ask.prompt} tokens",
}


def _bench(settings: EngineConfig, blocks: int) -> EngineBench:
    about = {
        "config": msgspec.to_builtins(settings),
        "blocks": blocks,
        "window": 0,
        "recent": 0,
        "max_model_len": 512,
    }
    bench, _ = comparison.simulated_engine(
        CalibratedCost([STEP, 0, TOKEN, 0, 0, 0, 0], (0, 0), 1, 0.0, about), lambda c: c
    )
    return bench


@dataclass(frozen=True, slots=True)
class Line:
    """What became of one request: how it was computed when, and when it got its tokens."""

    ask: Ask
    spans: list[SlotSpan]
    tokens: list[float]


def _lines(bench: EngineBench, contender: Contender, asks: list[Ask]) -> list[Line]:
    """The same lengths came before, one at a time, so that length predictor and pace know them."""
    known = [replace(ask, at=0.0, shared=0, ttft=None) for ask in asks] * ROUNDS
    before = [replace(ask.request(100 + i), arrival=APART * i) for i, ask in enumerate(known)]
    requests = [*before, *(ask.request(number) for number, ask in enumerate(asks, 1))]
    with tempfile.TemporaryDirectory() as folder:
        run = bench.run(requests, contender.settings(bench.config), log=Path(folder) / "steps")
    begin = min(record.arrival for record in run.records if isinstance(record, Arrived)) + BEFORE
    lines = {number: Line(ask, [], []) for number, ask in enumerate(asks, 1)}
    for span in timeline_of(run).spans:
        if span.id in lines:
            shifted = replace(span, begin=span.begin - BEFORE, end=span.end - BEFORE)
            lines[span.id].spans.append(shifted)
    for step in run.steps:
        for item in step.items:
            if item.tokens and item.id in lines:
                lines[item.id].tokens.append(step.end - begin)
    return list(lines.values())


def drawn() -> dict[str, str]:
    """All pictures: name of the policy or order -> SVG. Those of one kind have the same axis of time."""
    bench = _bench(SETTINGS, BLOCKS)
    three = _bench(replace(SETTINGS, max_num_seqs=3), FEW)
    policies = {name: _lines(bench, Contender(name), FOR_POLICIES) for name in POLICIES}
    free = [
        replace(ask, ttft=None) for ask in FOR_ORDERS
    ]  # other orders miss targets: the door would refuse
    own = {
        "deadline": FOR_ORDERS,
        "programs": [replace(ask, session=ask.tenant) for ask in free],
    }
    orders = {
        name: _lines(three, Contender("chunked", name), own.get(name, free)) for name in ORDERS
    }
    pictures = {}
    for each in (policies, orders):
        ends = (line.tokens[-1] for lines in each.values() for line in lines)
        axis = Axis(0.0, max(ends), LABELS, WIDTH - RIGHT)
        pictures |= {name: picture(name, lines, axis) for name, lines in each.items()}
    return pictures


def picture(name: str, lines: list[Line], axis: Axis) -> str:
    """A line for each request, from its arrival to its end; a cell ends where a token is there."""
    bottom = TOP + ROW * len(lines) + 3
    seen = {span.kind for line in lines for span in line.spans}
    first = sum(line.tokens[0] - line.ask.at for line in lines) / len(lines)
    gap = max(b - a for line in lines for a, b in itertools.pairwise(line.tokens))
    end = max(line.tokens[-1] for line in lines)
    words = (
        f"mean time to first token {first:.2f} s, longest gap {gap:.2f} s, all done at {end:.2f} s"
    )
    parts = [_text(4, 14, name, "title"), _text(WIDTH - 4, 14, words, "", "end")]
    parts += _legend([kind for kind in MEANING if kind in {*seen, "dashed"}])
    for tick in axis.ticks():
        x = axis.at(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
        parts.append(_text(x, bottom + 13, f"{tick:g} s", "soft", "middle"))
    label = LABELLED.get(name, _size)
    for number, line in enumerate(lines, 1):
        y = TOP + ROW * (number - 1)
        parts.append(_text(16, y + 11, f"{number}", "soft", "end"))
        parts.append(_text(24, y + 11, label(line.ask), "soft"))
        parts += _line(line, axis, y)
        if name == "deadline" and line.ask.ttft:
            parts.append(
                f'<path class="line" d="M{axis.at(line.ask.at + line.ask.ttft):.1f} {y}v{ROW}"/>'
            )
    height = bottom + 20
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pt" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img" aria-label="{name}: when each request waits and is computed">'
    )
    return standalone("\n".join([opening, HATCH, *parts, "</svg>\n"]))


def _line(line: Line, axis: Axis, y: int) -> list[str]:
    joined = min(span.begin for span in line.spans)
    parts = [
        f'<path class="dashed" d="M{axis.at(line.ask.at):.1f} {y + 7.5}H{axis.at(joined):.1f}"/>'
    ]
    for kind in KINDS:
        spans = [span for span in line.spans if span.kind == kind]
        if spans:
            boxes = "".join(_box(axis.at(span.begin), axis.at(span.end), y) for span in spans)
            parts.append(f'<path class="{kind}" d="{boxes}"/>')
    cells = "".join(_box(axis.at(at) - 0.5, axis.at(at) + 0.5, y) for at in line.tokens)
    return [*parts, f'<path class="page" d="{cells}"/>']


def _legend(kinds: list[str]) -> list[str]:
    parts, x = [], 4.0
    for kind in kinds:
        mark = (
            f'<path class="dashed" d="M{x:.1f} 29h14"/>'
            if kind == "dashed"
            else (f'<rect class="{kind}" x="{x:.1f}" y="24" width="14" height="11"/>')
        )
        parts += [mark, _text(x + 18, 33, MEANING[kind], "soft")]
        x += 34 + 5.6 * len(MEANING[kind])
    return parts


def _box(left: float, right: float, y: float) -> str:
    return f"M{left:.1f} {y + 1.5}h{right - left:.1f}v{ROW - 3}h-{right - left:.1f}z"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    about = f' class="{kind}"' if kind else ""
    return f'<text{about} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in drawn().items():
        (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")
