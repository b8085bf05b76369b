"""The pictures of the README and of the page, anew: `make docs-pictures`, on a quiet machine.

docs/page/tokens.svg is animated: requests that came at different times, their tokens when they came, and the
batch of each step, as one run recorded them in real time. The others are the page in light, in dark and on a
phone, while the same load runs; they want `apt-get install chromium chromium-driver`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "accept"))
import harness

PICTURES = harness.ROOT / "docs" / "page"
WIDE, PHONE = (1440, 900), (390, 844)
SWITCHES = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
QUESTIONS = (
    "Why is the sky blue?",
    "Give me three tips for a good sleep.",
    "Write a haiku about the sea.",
    "What is a compiler?",
    "Name three primary colors.",
    "How do bees make honey?",
    "Tell me a story about a lighthouse.",
    "What does HTTP stand for?",
    "Explain photosynthesis briefly.",
    "Who wrote Hamlet?",
    "What is the capital of France?",
    "How far away is the moon?",
)
TOKENS, APART = 32, 0.2  # of an answer; seconds between two requests
NAME = "picture-"  # and its number: the name of a request
HELD = 2.5  # seconds for which the whole picture stands
LINE, LEFT, WIDTH, LETTER = 19, 236, 960, 6.02  # pixels; of a letter of 10 pixels of the text
CHARACTERS = int((WIDTH - LEFT - 12) / LETTER)
GRID, CELL = 11, 8
STYLE = """
svg { background: #0d1117 } text { font: 13px system-ui, sans-serif; fill: #e6edf3 }
.soft { fill: #9198a1 } .mono { font: 10px ui-monospace, Menlo, Consolas, monospace; white-space: pre }
.q { font-size: 11.5px; fill: #f0a040 } .prefill { fill: #f0a040 } .decode { fill: #5a9bf0 }
"""


@dataclass(slots=True)
class Stream:
    """One request: when it was sent, and each piece of its answer with its time."""

    question: str
    sent: float = 0.0
    id: int = 0
    pieces: list[tuple[float, str]] = field(default_factory=list)


# -- what is recorded ------------------------------------------------------------------------------
def ask(url: str, stream: Stream, name: str = "") -> None:
    body = {
        "messages": [{"role": "user", "content": stream.question}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    named = {"X-Request-Id": name or "other"}
    request = harness.request(url, "/v1/chat/completions", body, **named)
    stream.sent = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text = choice["delta"].get("content")
                    if text:
                        stream.pieces.append((time.monotonic(), text))


def record(url: str) -> tuple[list[Stream], list[dict[str, Any]]]:
    """The streams, and the steps that the engine made meanwhile."""
    streams, steps = [Stream(question) for question in QUESTIONS], dict[int, dict[str, Any]]()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.03):
            live = json.loads(harness.fetch(url, "/v1/live"))
            for one in live["requests"]:
                if one["request"].startswith(NAME):
                    streams[int(one["request"].removeprefix(NAME))].id = one["id"]
            steps.update({step["number"]: step for step in live["steps"] if step["ended_s"]})

    def later(number: int) -> None:
        time.sleep(0.3 + APART * number)
        ask(url, streams[number], f"{NAME}{number}")

    watch = threading.Thread(target=look)
    watch.start()
    harness.in_threads(len(streams), later)
    time.sleep(0.2)
    done.set()
    watch.join()
    ids = {stream.id for stream in streams}
    ours = [step for _, step in sorted(steps.items()) if ids & {row[0] for row in step["rows"]}]
    return streams, ours


# -- the animated picture --------------------------------------------------------------------------
def revealed(name: str, box: str, widths: list[tuple[float, float]], length: float) -> str:
    """A clip that grows: (seconds, pixels). What shows no animation shows all of it."""
    times = ";".join(f"{second / length:.4f}" for second, _ in [(0.0, 0.0), *widths])
    values = ";".join(f"{width:.1f}" for _, width in [(0.0, 0.0), *widths])
    timing = f'calcMode="discrete" dur="{length:.2f}s" repeatCount="indefinite"'
    animated = f'<animate attributeName="width" values="{values}" keyTimes="{times}" {timing}/>'
    return f'<clipPath id="{name}"><rect {box} width="{WIDTH}">{animated}</rect></clipPath>'


def animation(streams: list[Stream], steps: list[dict[str, Any]]) -> str:
    begun = min(stream.sent for stream in streams)
    ended = max(stream.pieces[-1][0] for stream in streams)
    length = ended - begun + HELD
    tokens = sum(len(stream.pieces) for stream in streams)
    top = 44 + LINE * len(streams)
    height = top + 34 + GRID * len(streams)
    title = f"{len(streams)} requests, {tokens} tokens in {ended - begun:.1f} s, in real time"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{title}"><style>{STYLE}</style>',
        f'<text x="12" y="22">Prompts become tokens <tspan class="soft">· {title} · SmolLM2-135M on'
        " two cores</tspan></text>",
    ]
    for number, stream in enumerate(streams):
        parts += row_of(number, stream, begun, length)
    parts += grid_of(streams, steps, begun, length)
    return "\n".join([*parts, "</svg>\n"])


def row_of(number: int, stream: Stream, begun: float, length: float) -> Iterator[str]:
    y = 46 + LINE * number
    sent = [(stream.sent - begun + 1e-3, float(WIDTH))]
    yield revealed(f"q{number}", f'x="0" y="{y - 14}" height="{LINE}"', sent, length)
    yield f'<text class="q" x="12" y="{y}" clip-path="url(#q{number})">{escape(stream.question)}</text>'
    text, widths = "", []
    for when, piece in stream.pieces:
        text += piece.replace("\n", " ")
        widths.append((when - begun, min(len(text), CHARACTERS) * LETTER + 2))
    yield revealed(f"a{number}", f'x="{LEFT}" y="{y - 14}" height="{LINE}"', widths, length)
    shown = escape(text[:CHARACTERS])
    stretch = f'textLength="{min(len(text), CHARACTERS) * LETTER:.0f}"'
    yield f'<text class="mono" x="{LEFT}" y="{y}" {stretch} clip-path="url(#a{number})">{shown}</text>'


def grid_of(
    streams: list[Stream], steps: list[dict[str, Any]], begun: float, length: float
) -> Iterator[str]:
    top = 52 + LINE * len(streams)
    wide = (WIDTH - 24) / max(1, len(steps))
    rows = {stream.id: number for number, stream in enumerate(streams)}
    yield f'<text class="soft" x="12" y="{top + 8}">The batch: a column is a step, a row a request; orange reads'
    yield "a prompt, blue writes a token</text>"
    widths = [(step["ended_s"] - begun, (i + 1) * wide) for i, step in enumerate(steps)]
    box = f'x="12" y="{top + 14}" height="{GRID * len(streams) + 4}"'
    yield revealed("grid", box, widths, length)
    yield '<g clip-path="url(#grid)">'
    for i, step in enumerate(steps):
        for id, _, prompt in step["rows"]:
            if id in rows:
                kind = "prefill" if prompt else "decode"
                x, y = 12 + i * wide, top + 16 + GRID * rows[id]
                size = f'width="{max(1.0, wide - 0.7):.1f}" height="{CELL}"'
                yield f'<rect class="{kind}" x="{x:.1f}" y="{y}" {size}/>'
    yield "</g>"


# -- the page --------------------------------------------------------------------------------------
@contextmanager
def browser(size: tuple[int, int]) -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for switch in SWITCHES:
        options.add_argument(switch)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield driver
    finally:
        driver.quit()


def until(driver: Any, condition: str) -> None:
    end = time.monotonic() + 300  # a busy machine computes a step in a second
    while not driver.execute_script(f"return {condition}"):
        if time.monotonic() > end:
            raise TimeoutError(condition)
        time.sleep(0.1)


def photograph(url: str, name: str, theme: str, size: tuple[int, int]) -> None:
    """Two answers, and the page while a load runs."""
    with browser(size) as driver:
        driver.get(url)
        driver.execute_script(f"theme('{theme}')")
        until(driver, "at('model').options.length")
        for question in QUESTIONS[:2]:
            script = "at('most').value = 160; at('temperature').value = 0; say(arguments[0])"
            driver.execute_script(script, question)
            until(driver, "!stopper")
        streams = [Stream(question) for question in QUESTIONS]

        def later(number: int) -> None:
            time.sleep(APART * number)
            ask(url, streams[number], f"{number:02}-demo")

        load = threading.Thread(target=harness.in_threads, args=(len(streams), later))
        load.start()
        until(driver, "batch.steps.filter((step) => step.rows.length > 2).length > 25")
        driver.save_screenshot(str(PICTURES / f"{name}.png"))
        load.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("tokens", "page"), help="these alone")
    only = parser.parse_args().only
    PICTURES.mkdir(exist_ok=True)
    looks = (("light", "light", WIDE), ("dark", "dark", WIDE), ("light-phone", "light", PHONE))
    with harness.server("--page-settings", wait=300) as server:
        ask(server.url, Stream("Hello."))
        if only != "page":
            streams, steps = record(server.url)
            (PICTURES / "tokens.svg").write_text(animation(streams, steps))
        for look in looks if only != "tokens" else ():
            photograph(server.url, *look)
    return 0


if __name__ == "__main__":
    sys.exit(main())
