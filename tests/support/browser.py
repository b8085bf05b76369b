"""A headless Chromium that shows a page of ours, driven by Selenium, where both are installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
AXE = Path(os.environ.get("PAGETURNER_AXE") or "build/axe.min.js")  # of npm's axe-core
in_a_browser = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="apt-get install chromium chromium-driver"
    ),
]
SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1300,1000",
)
WIDE = (1300, 900)
PHONE = (390, 844)
READY = "at('state').textContent !== 'Connecting …'"


class Page:
    """A browser that shows the page of a server or router."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get(url)
        self.until(READY)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script("return " + script, *arguments)

    def until(self, condition: str) -> Any:
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, 60, 0.05).until(lambda _: self.js(condition), condition)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def id(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def click(self, text: str) -> None:
        """Press the last button with this text."""
        self.js(
            "[...document.querySelectorAll('button')].findLast(b => b.textContent === arguments[0]).click()",
            text,
        )

    def set(self, **values: Any) -> None:
        """Fill in fields, by their ids."""
        for name, value in values.items():
            kind = "checked" if isinstance(value, bool) else "value"
            self.js(f"at(arguments[0]).{kind} = arguments[1]", name, value)

    def ask(self, text: str, **values: Any) -> None:
        """Send a message; the answer may still be written."""
        self.set(text=text, **values)
        self.js("at('ask').requestSubmit()")

    def answered(self) -> None:
        self.until("!stopper")

    def said(self) -> list[str]:
        found: list[str] = self.js(
            "[...document.querySelectorAll('.words')].map((one) => one.textContent)"
        )
        return found

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def faults(self) -> list[Any]:
        return [line for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]

    def serious(self) -> list[str]:
        """Return what axe-core finds serious or critical."""
        self.driver.execute_script(AXE.read_text())
        found = self.driver.execute_async_script("axe.run().then(arguments[0])")
        bad = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
        return [f"{one['id']}: {one['nodes'][0]['html'][:120]}" for one in bad]


@pytest.fixture
def browse() -> Iterator[Callable[..., Page]]:
    """browse(url, *switches) -> a page in a browser of its own."""
    from selenium import webdriver

    drivers = []

    def begin(url: str, *switches: str) -> Page:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for switch in (*SWITCHES, *switches):
            options.add_argument(switch)
        drivers.append(webdriver.Chrome(options, webdriver.ChromeService(DRIVER)))
        return Page(drivers[-1], url)

    yield begin
    for driver in drivers:
        driver.quit()
