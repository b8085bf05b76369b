"""The page at `/`: it needs nobody else, loads without a key, and works in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pageturner.server import home

from .conftest import Server

Start = Callable[..., Server]
MODEL = Path(__file__).parents[1] / "goldens" / "tiny_llama.gguf"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
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


def test_the_page_needs_nobody_else_and_no_key(start: Start) -> None:
    server = start("--api-key", "sesame")
    found = server.http.get("/")
    assert found.status_code == 200
    assert found.headers["content-type"].startswith("text/html")
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert found.content == home.document()
    assert "{{" not in found.text
    assert not re.search(r"https?://|@import|url\(|\son\w+=|style=|innerHTML|outerHTML", found.text)
    assert server.http.get("/v1/models").status_code == 401


NO_BROWSER = """
function made(name) { return {name, children: [], append(...more) { this.children.push(...more); },
  setAttribute() {}, addEventListener() {}}; }
const document = {createElement: made, createDocumentFragment: () => made("")};
"""
HOSTILE = """
const lists = Array.from({length: 3400}, (_, n) => " ".repeat(2 * n) + "- x").join("\\n");
const texts = [">".repeat(3400), "> ".repeat(3400) + "x", lists, "[".repeat(60000), "*a ".repeat(20000),
  "**a ".repeat(20000), "__a ".repeat(20000), "`".repeat(60000), "`a".repeat(30000), "- ".repeat(30000) + "x",
  "|".repeat(60000) + "\\n" + "-|".repeat(30000), "`a` ".repeat(300000), "#".repeat(60000), "~~~".repeat(20000)];

for (const text of texts) { const node = markdown(text); if (!node.children.length) throw new Error(text.slice(0, 9)); }

"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the scripts of the page")
def test_no_answer_hangs_or_breaks_the_page() -> None:
    script = NO_BROWSER + (home.PARTS / "markdown.js").read_text() + HOSTILE
    found = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr[-2000:]


def test_what_scripts_ask_for_by_id_is_there() -> None:
    text = home.document().decode()
    ids = set(re.findall(r'\bid="([\w-]+)"', text))
    assert set(re.findall(r'\bat\("([\w-]+)"\)', text)) <= ids
    assert len(ids) > 30


class Page:
    """A browser that shows a server's page."""

    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get(url)
        self.until("at('model').options.length > 0 && at('state').textContent !== 'Connecting …'")

    def js(self, script: str) -> Any:
        return self.driver.execute_script("return " + script)

    def until(self, condition: str) -> Any:
        from selenium.webdriver.support.wait import WebDriverWait

        return WebDriverWait(self.driver, 60, 0.05).until(lambda _: self.js(condition), condition)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def id(self, name: str) -> Any:
        return self.driver.find_element("id", name)

    def open(self, name: str) -> None:
        self.js(f"document.getElementById('{name}').open = true")

    def said(self) -> list[str]:
        found: list[str] = self.js(
            "[...document.querySelectorAll('.words')].map((one) => one.textContent)"
        )
        return found

    def faults(self) -> list[Any]:
        return [line for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]


@pytest.fixture
def browse() -> Iterator[Callable[..., Page]]:
    from selenium import webdriver

    drivers = []

    def begin(url: str, *switches: str) -> Page:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for switch in (*SWITCHES, *switches):
            options.add_argument(switch)
        drivers.append(webdriver.Chrome(options, webdriver.ChromeService(DRIVER)))
        return Page(drivers[-1], url)

    yield begin
    for driver in drivers:
        driver.quit()


class TestInABrowser:
    pytestmark = in_a_browser

    def test_a_chat_by_keys_alone(self, server: Server, browse: Callable[..., Page]) -> None:
        page = browse(server.url)
        page.press("\ue004")  # Tab: the way past what stands in front
        assert page.js("document.activeElement.className") == "skip"
        page.press("\ue007")
        page.press("hello", "\ue007")
        page.until("document.querySelector('.turn small button') !== null")
        said = page.said()
        assert said[0] == "hello"
        assert len(said[1]) > 20
        page.press("again", "\ue007")
        page.until("document.querySelectorAll('.turn small button').length > 3")
        assert len(page.said()) == 4
        assert page.faults() == []

    def test_what_a_model_says_is_never_markup(
        self, server: Server, browse: Callable[..., Page]
    ) -> None:
        page = browse(server.url)
        text = (
            "# <b>x</b>\n\n`<i>` **bold** [a](javascript:alert(1)) <img src=x onerror=alert(1)>\n\n"
        )
        text += "```html\n<u>\n```"
        page.driver.execute_script("document.body.append(markdown(arguments[0]))", text)
        assert (
            page.js(
                "document.querySelectorAll('h3 b, i:not(.parts i), img, u, a[href^=javascript]').length"
            )
            == 0
        )
        assert page.js("document.querySelector('body > p strong').textContent") == "bold"
        assert page.js("document.querySelector('body > .code pre').textContent") == "<u>"

    def test_answers_side_by_side_with_chances_are_stopped_edited_and_retried(
        self, start: Start, browse: Callable[..., Page]
    ) -> None:
        page = browse(start(FAKE_STEP_SECONDS="0.1").url)
        page.open("parameters")
        page.driver.execute_script(
            "at('n').value = 2; at('logprobs').checked = true; at('most').value = 1500;"
            "at('text').value = 'tell me'"
        )
        page.id("send").click()
        page.until("document.querySelectorAll('.token').length > 5")
        page.id("stop").click()
        page.until(
            "document.querySelector('.turn small')?.textContent.includes('stopped') || "
            "[...document.querySelectorAll('small')].some((one) => one.textContent.includes('stopped'))"
        )
        assert len(page.said()) == 3
        assert "%" in page.js("document.querySelector('.token').title")
        page.driver.execute_script(
            "[...document.querySelectorAll('small button')].find((b) => b.textContent === 'Edit').click()"
        )
        assert page.js("at('text').value") == "tell me"
        assert page.said() == []
        assert page.faults() == []

    def test_a_load_is_watched_and_a_request_clicked(
        self, start: Start, browse: Callable[..., Page]
    ) -> None:
        server = start(
            FAKE_ENGINE="own", FAKE_STEP_SECONDS="0.03", PAGETURNER_FAKE_STEP_SECONDS="0.03"
        )
        page = browse(server.url, "--force-prefers-reduced-motion")
        assert page.js("EVERY") == 1000, "whoever wants less motion has less"
        page.press("\ue004" * 2)
        page.driver.execute_script("at('demo').focus()")
        page.press("\ue007")
        page.until("cellsDrawn.some((cell) => cell[4]) && cellsDrawn.some((cell) => !cell[4])")
        page.until("at('demo').textContent === 'Show me a load'")
        body = {
            "prompt": "long",
            "max_tokens": 300,
            "ignore_eos": True,
        }  # under way while it is looked at
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                server.http.post,
                "/v1/completions",
                json=body,
                headers={"X-Request-Id": "looked-at"},
            )
            found = "[...document.querySelectorAll('#requests button')].find((b) => b.textContent === 'looked-a')"
            page.until(f"{found} !== undefined")
            label = page.js("at('batch').getAttribute('aria-label')")
            assert label.startswith("The batch: the last step has")
            page.driver.execute_script(f"{found}.click()")
            page.until("at('request').textContent.includes('so far')")
            assert page.js("at('request').querySelector('.bar') !== null")
            assert "in its way" in page.js("at('request').textContent").lower()
            page.until("at('request').textContent.includes(' in all, first token after')")
            assert answer.result().status_code == 200
        assert "decode" in page.js("at('request').textContent")
        assert "blocks in use" in page.js("at('blocks-text').textContent")
        assert page.faults() == []
        page.driver.get("about:blank")

    def test_the_policy_is_changed_by_who_has_the_key(
        self, start: Start, browse: Callable[..., Page]
    ) -> None:
        server = start("--admin-key", "secret")
        page = browse(server.url)
        page.until("!at('closed').hidden")
        assert "admin key" in page.js("at('closed').textContent")
        page.open("settings")
        page.id("admin").send_keys("secret")
        page.until("at('closed').hidden")
        page.press("\ue004")
        page.driver.execute_script("document.activeElement.blur()")
        page.until("at('policy').options.length > 3 && at('budget').value !== ''")
        page.driver.execute_script(
            "at('policy').value = 'prefill_first'; at('configure').requestSubmit()"
        )
        page.until("at('configured').textContent.includes('Changed')")
        told = server.http.get(
            "/v1/admin/config", headers={"authorization": "Bearer secret"}
        ).json()
        assert told["policy"] == "prefill_first"

    def test_light_and_dark_are_kept(self, server: Server, browse: Callable[..., Page]) -> None:
        page = browse(server.url)
        before = page.js("document.documentElement.dataset.theme")
        page.id("theme").click()
        page.driver.refresh()
        assert {before, page.js("document.documentElement.dataset.theme")} == {"light", "dark"}
