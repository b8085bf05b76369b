"""The page: its tests in a browser, what axe-core finds, pictures of it, and its cost in pairs.

Owns the rounds of the cost: the same requests to the same server, with somebody who polls as an open page
does and with nobody, by turns, one first and then the other. Pictures go to docs/page with --page-pictures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import harness
from harness import Line, NotRun, median

from pageturner.formats import hub

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "page"
MODEL = "smollm2-135m-instruct-q4_1.gguf"
POLL = 0.4  # seconds, as live.js
CLIENTS, TOKENS = 16, 48
WIDE, PHONE = (1280, 900), (390, 844)
SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--hide-scrollbars",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--page-rounds", type=int, default=8, help="pairs of the cost")
    parser.add_argument(
        "--page-axe", type=Path, help="axe.min.js of axe-core, from the npm registry"
    )
    parser.add_argument("--page-pictures", action="store_true", help="write docs/page/*.png anew")


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """All of it."""
    path = hub.cache_folder() / MODEL
    if not path.is_file():
        raise NotRun(f"{MODEL} is absent: make model")
    with harness.server(model=str(path)) as server:
        yield from _seen(server.url, arguments)
        yield _cost(server, arguments.page_rounds)


# -- in a browser --------------------------------------------------------------------------------------------
def _seen(url: str, arguments: argparse.Namespace) -> Iterator[Line]:
    """What axe-core finds in both themes and on a phone, while a load runs."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        yield Line(
            "axe-core", "no browser: apt-get install chromium chromium-driver", None, run=False
        )
        return
    serious, passes = [], 0
    for theme, size in (("light", WIDE), ("dark", WIDE), ("light", PHONE)):
        driver = _browser(size)
        try:
            _look(driver, url, theme)
            name = f"{theme}{'-phone' if size == PHONE else ''}"
            if arguments.page_pictures:
                PICTURES.mkdir(exist_ok=True)
                driver.save_screenshot(str(PICTURES / f"{name}.png"))
            if arguments.page_axe is not None:
                driver.execute_script(arguments.page_axe.read_text())
                found = driver.execute_async_script("axe.run().then(arguments[0])")
                passes += len(found["passes"])
                serious += [
                    f"{name}: {one['id']}"
                    for one in found["violations"]
                    if one["impact"] in ("serious", "critical")
                ]
        finally:
            driver.quit()
    if arguments.page_axe is None:
        yield Line("axe-core", "--page-axe PATH of axe.min.js", None, run=False)
    else:
        said = f"{len(serious)} in light, dark and on a phone ({passes} rules passed) {' '.join(serious)}"
        yield Line("serious or critical findings of axe-core", said, not serious)


def _browser(size: tuple[int, int]) -> Any:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for switch in (*SWITCHES, f"--window-size={size[0]},{size[1]}"):
        options.add_argument(switch)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False},
    )
    return driver


def _look(driver: Any, url: str, theme: str) -> None:
    """An answer, and a load that runs."""
    driver.get(url)
    driver.execute_script(f"theme('{theme}')")
    _until(driver, "at('model').options.length")
    driver.execute_script(
        "at('text').value = 'Why is the sky blue? Answer briefly.'; at('most').value = 80"
    )
    driver.execute_script("at('temperature').value = 0; at('ask').requestSubmit()")
    _until(driver, "document.querySelector('.turn small button')")
    driver.execute_script("at('demo').click(); at('turns').firstChild.scrollIntoView()")
    _until(driver, "steps.filter((step) => step.rows.length > 4).length > 30")
    driver.execute_script("scrollTo(0, 0)")
    time.sleep(0.4)


def _until(driver: Any, condition: str) -> None:
    until = time.monotonic() + 300  # a busy machine computes a step in a second
    while not driver.execute_script(f"return {condition}"):
        if time.monotonic() > until:
            raise TimeoutError(condition)
        time.sleep(0.1)


# -- what it costs -------------------------------------------------------------------------------------------
def _cost(server: harness.Server, rounds: int) -> Line:
    """Processor time of both processes while the page polls, beside nobody who does: what other processes of
    the machine do counts for neither."""
    _load(server.url, 0)
    ratios, paces, each = [], [], []
    for number in range(rounds):
        spent, pace = {}, {}
        for polled in (False, True) if number % 2 else (True, False):
            time.sleep(0.0 if polled else 3.2)  # until the engine notes no steps any more
            before = harness.processor_seconds(server.process.pid, server.engine_pid())
            with _polling(server.url) if polled else contextlib.nullcontext():
                pace[polled] = _load(server.url, 2 * number + polled + 1)
            spent[polled] = (
                harness.processor_seconds(server.process.pid, server.engine_pid()) - before
            )
        ratios.append(spent[True] / spent[False])
        paces.append(pace[True] / pace[False])
        # it asks by the clock: a machine that is slow because it is busy computes less between two looks
        each.append(1000 * (spent[True] - spent[False]) * pace[True] / (CLIENTS * TOKENS))
    said = (
        f"{100 * (median(ratios) - 1):+.2f} % processor time ({100 * (min(ratios) - 1):+.1f} to "
        f"{100 * (max(ratios) - 1):+.1f}, {rounds} pairs), pace {median(paces):.3f}x,"
        f" {median(each):.1f} ms of a processor each second that it is open"
    )
    return Line("an open page costs under 1 %", said, median(ratios) <= 1.01)


def _load(url: str, mark: int) -> float:
    """Tokens a second of some requests at once, whose prompts nobody asked before."""
    begun = time.monotonic()

    def one(number: int) -> None:
        body = {
            "prompt": f"{mark} {number} " + "word " * (8 + 5 * number),
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=120).read()

    harness.in_threads(CLIENTS, one)
    return CLIENTS * TOKENS / (time.monotonic() - begun)


class _polling:
    """Asks as an open page does, on one connection after another."""

    def __init__(self, url: str) -> None:
        self._url, self._end = url, threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def _poll(self) -> None:
        since = 0
        while not self._end.wait(POLL):
            with urllib.request.urlopen(f"{self._url}/v1/live?since={since}", timeout=30) as answer:
                steps = json.load(answer)["steps"]
            since = max([since, *(step["number"] for step in steps if step["ended_s"])])

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(60)
