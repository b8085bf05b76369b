"""The page at `/` in a browser, by what a person sees: the chat, its conversations, the engine beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pageturner.lab.reporting.page import page as report
from support.browser import AXE, PHONE, WIDE, Page, browse, in_a_browser

from .conftest import Server

__all__ = ["browse"]
pytestmark = in_a_browser
Start = Callable[..., Server]
Browse = Callable[..., Page]
LAST_LINE_SEEN = """(() => {
  const last = [...document.querySelectorAll('.answers > div')].pop().getBoundingClientRect();
  const view = at('turns').getBoundingClientRect(), composer = at('ask').getBoundingClientRect();
  return last.bottom <= view.bottom + 1 && last.bottom > view.top && view.bottom <= composer.top
    && composer.bottom <= innerHeight + 1;
})()"""
LONG = {"most": 400}


# -- reading along ---------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [(1300, 600), PHONE])
def test_the_last_line_of_six_long_answers_is_visible_at_the_end_of_each(
    server: Server, browse: Browse, size: tuple[int, int]
) -> None:
    page = browse(server.url)
    page.size(*size)
    for number in range(6):
        page.ask(f"question {number}", most=250)
        page.until(f"conversation.turns.length === {number + 1} && !stopper")
        page.until(LAST_LINE_SEEN)
    assert page.js("at('turns').scrollHeight > 2 * at('turns').clientHeight")
    assert page.js("at('latest').hidden")
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    assert page.faults() == []


def test_who_reads_further_up_is_left_there_and_jumps_to_the_latest(
    start: Start, browse: Browse
) -> None:
    page = browse(start(FAKE_STEP_SECONDS="0.01").url)
    page.size(390, 560)
    page.ask("first", most=500)
    page.answered()
    page.ask("second", most=900)
    page.until("stopper && at('turns').scrollHeight > at('turns').clientHeight + 150")
    page.js("at('turns').scrollTop = 40")
    page.until("!at('latest').hidden")
    length = page.js("stopper.answers[0].text.length")
    page.until(f"stopper.answers[0].text.length > {length + 60}")
    assert page.js("Math.round(at('turns').scrollTop)") == 40
    page.id("latest").click()
    page.until("at('latest').hidden")
    page.answered()
    page.until(LAST_LINE_SEEN)


def test_parameters_leave_the_conversation_in_sight_on_a_phone(
    server: Server, browse: Browse
) -> None:
    page = browse(server.url)
    page.size(*PHONE)
    page.ask("hello", **LONG)
    page.answered()
    page.id("parameters").find_element("tag name", "summary").click()
    page.until("at('turns').clientHeight < innerHeight / 2")
    assert page.js("at('turns').clientHeight >= 0.33 * innerHeight")
    page.until(LAST_LINE_SEEN)
    assert page.js("at('seed').getBoundingClientRect().right <= innerWidth")


# -- conversations ---------------------------------------------------------------------------------
def titles(page: Page) -> list[str]:
    found: list[str] = page.js(
        "[...document.querySelectorAll('#conversations .name')].map((one) => one.textContent)"
    )
    return found


def test_conversations_survive_a_reload_with_titles_and_are_renamed_and_deleted(
    server: Server, browse: Browse
) -> None:
    page = browse(server.url)
    page.set(system="Be brief.")
    page.ask("What is a page?", most=40)
    page.answered()
    page.id("new").click()
    assert page.said() == []
    page.ask("And a very long second question that goes on and on?", most=40)
    page.answered()
    page.driver.refresh()
    page.until("document.querySelectorAll('#conversations li').length === 2")
    assert titles(page) == ["And a very long second question that goes on …", "What is a page?"]
    page.js("document.querySelectorAll('#conversations .name')[1].click()")
    assert page.said()[0] == "What is a page?"
    assert len(page.said()[1]) > 20
    assert page.js("at('system').value") == "Be brief."
    page.click("Rename")
    page.press("Pages\ue007")
    assert "Pages" in titles(page)
    page.click("Delete")
    assert len(titles(page)) == 1
    assert "is deleted" in page.js("at('notice').textContent")
    page.click("Undo")
    assert len(titles(page)) == 2
    page.driver.refresh()
    page.until("document.querySelectorAll('#conversations li').length === 2")
    assert "Pages" in titles(page)


def test_a_conversation_is_exported_as_markdown_and_as_messages(
    server: Server, browse: Browse, tmp_path: Path
) -> None:
    page = browse(server.url)
    page.driver.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)}
    )
    page.set(system="Be brief.")
    page.ask("What is a page?", most=30)
    page.answered()
    answer = page.js("conversation.turns[0].answers[0].text")
    for label in ("Markdown", "JSON"):
        page.click(label)
    deadline = time.monotonic() + 30
    written = [tmp_path / f"What-is-a-page-.{kind}" for kind in ("md", "json")]
    while not all(one.exists() for one in written) and time.monotonic() < deadline:
        time.sleep(0.05)
    text = written[0].read_text()
    assert text.startswith(
        "# What is a page?\n\n> Be brief.\n\n## You\n\nWhat is a page?\n\n## Answer"
    )
    assert answer in text
    messages = json.loads(written[1].read_text())["messages"]
    assert [one["role"] for one in messages] == ["system", "user", "assistant"]
    assert messages[2]["content"] == answer


def test_an_answer_that_a_reload_broke_off_is_kept_and_goes_on(
    start: Start, browse: Browse
) -> None:
    page = browse(start(FAKE_STEP_SECONDS="0.02").url)
    page.ask("tell me", most=500)
    page.until("stopper && stopper.answers[0].text.length > 60")
    page.driver.refresh()
    page.until("document.querySelectorAll('.words').length === 2")
    before = page.said()[1]
    assert len(before) > 40
    assert "broken off" in page.js("document.querySelector('.foot').textContent")
    page.set(most=30)
    page.click("Continue")
    page.answered()
    assert page.js("conversation.turns[0].answers[0].text.length") > len(before)
    assert page.said()[1].startswith(before[:40])


def test_an_answer_goes_on_while_another_conversation_is_open(start: Start, browse: Browse) -> None:
    page = browse(start(FAKE_STEP_SECONDS="0.02").url)
    page.ask("the first", most=150)
    page.until("stopper && stopper.answers[0].text.length > 20")
    page.id("new").click()
    page.ask("the second", most=20)
    assert "“the first” is still being answered." in page.js("at('notice').textContent")
    assert page.said() == []
    page.answered()
    page.js("at('ask').requestSubmit()")
    page.until("conversation.turns.length === 1 && !stopper")
    assert page.said()[0] == "the second"
    page.js("[...document.querySelectorAll('#conversations .name')].at(-1).click()")
    assert page.said()[0] == "the first"
    assert len(page.said()[1]) > 120
    assert page.faults() == []


# -- asking ----------------------------------------------------------------------------------------
def body_of(page: Page) -> dict[str, Any]:
    """Return what the page would send for its last turn."""
    body: dict[str, Any] = page.js("bodyOf(conversation.turns.at(-1))")
    return body


def test_the_limit_is_the_context_unless_one_is_set_and_an_answer_it_ended_goes_on(
    server: Server, browse: Browse
) -> None:
    page = browse(server.url)
    page.ask("tell me", most=20)
    page.answered()
    assert "The token limit ended it." in page.js("document.querySelector('.foot').textContent")
    before = page.js("conversation.turns[0].answers[0].text")
    page.click("Continue")
    page.answered()
    after = page.js("conversation.turns[0].answers[0].text")
    assert after.startswith(before)
    assert len(after) >= len(before) + 15
    assert body_of(page)["max_tokens"] == 20
    page.set(most="")
    assert "max_tokens" not in body_of(page)
    assert page.js("at('most').placeholder") == "the whole context"


def test_a_chat_by_keys_alone(server: Server, browse: Browse) -> None:
    page = browse(server.url)
    page.press("\ue004")  # Tab: the way past what stands in front
    assert page.js("document.activeElement.className") == "skip"
    page.press("\ue007")
    page.set(most=60)
    page.press("hello", "\ue007")
    page.until("stopper")
    page.answered()
    assert page.said()[0] == "hello"
    assert len(page.said()[1]) > 20
    page.press("again", "\ue007")
    page.until("conversation.turns.length === 2")
    page.answered()
    assert len(page.said()) == 4
    assert page.faults() == []


def test_answers_side_by_side_with_chances_are_stopped_chosen_retried_and_edited(
    start: Start, browse: Browse
) -> None:
    page = browse(start(FAKE_STEP_SECONDS="0.05").url)
    page.set(system="Answer in French.")
    page.ask("tell me", n=2, logprobs=True, most=1500)
    page.until("document.querySelectorAll('.token').length > 5")
    assert page.js("at('send').hidden && !at('stop').hidden")
    page.id("stop").click()
    page.answered()
    assert "Stopped" in page.js("document.querySelector('.turn > .foot').textContent")
    assert len(page.said()) == 3
    assert "%" in page.js("document.querySelector('.token').title")
    page.click("Go on from this one")
    second = page.js("conversation.turns[0].answers[1].text")
    page.ask("and then", n=1, logprobs=False, most=10)
    page.answered()
    assert [one["content"] for one in body_of(page)["messages"]] == [
        "Answer in French.",
        "tell me",
        second,
        "and then",
    ]
    page.click("Retry")
    page.until("stopper")
    page.answered()
    assert len(page.said()) == 5
    page.js("[...document.querySelectorAll('button')].find(b => b.textContent === 'Edit').click()")
    assert page.js("at('text').value") == "tell me"
    assert len(page.said()) == 5, "nothing is lost before the new message is sent"
    page.click("Cancel")
    assert page.js("at('text').value") == ""
    page.js("[...document.querySelectorAll('button')].find(b => b.textContent === 'Edit').click()")
    page.ask("tell me more")
    page.answered()
    assert page.said()[0] == "tell me more"
    assert len(page.said()) == 2
    assert page.faults() == []


def test_an_answer_is_copied_and_its_code_has_colours(server: Server, browse: Browse) -> None:
    page = browse(server.url)
    page.driver.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    page.ask("hello", most=30)
    page.answered()
    page.click("Copy")
    page.until(
        "[...document.querySelectorAll('.foot button')].some(b => b.textContent === 'Copied')"
    )
    copied = page.driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied == page.js("conversation.turns[0].answers[0].text")
    code = "```python\ndef f(x):  # a comment\n    return 'text' + 12\n```"
    page.driver.execute_script("document.body.append(markdown(arguments[0]))", code)
    kinds = page.js(
        "[...document.querySelectorAll('.code span')].map(s => [s.className, s.textContent])"
    )
    assert ["c-keyword", "def"] in kinds
    assert ["c-comment", "# a comment"] in kinds
    assert ["c-string", "'text'"] in kinds
    assert ["c-number", "12"] in kinds
    shown = page.js(
        "new Set([...document.querySelectorAll('.code span, .code code')].map(s => getComputedStyle(s).color)).size"
    )
    assert shown == 5


def test_what_a_model_says_is_never_markup(server: Server, browse: Browse) -> None:
    page = browse(server.url)
    text = (
        "# <b>x</b>\n\n`<i>` **bold** [a](javascript:alert(1)) <img src=x onerror=alert(1)>\n\n"
        "```html\n<u>\n```"
    )
    page.driver.execute_script("document.body.append(markdown(arguments[0]))", text)
    found = "document.querySelectorAll('h3 b, i:not(.parts i), img, u, a[href^=javascript]').length"
    assert page.js(found) == 0
    assert page.js("document.querySelector('body > p strong').textContent") == "bold"
    assert page.js("document.querySelector('body > .code pre').textContent") == "<u>"


def test_models_are_a_list_where_the_server_has_several(start: Start, browse: Browse) -> None:
    page = browse(start("--served-model-name", "one,two").url)
    page.until("!at('models').hidden")
    assert page.js("[...at('model').options].map(o => o.value)") == ["one", "two"]
    page.ask("hello", model="two", most=5)
    page.answered()
    assert body_of(page)["model"] == "two"
    page = browse(start().url)
    page.until("at('model').options.length === 1")
    assert page.js("at('models').hidden")


# -- the engine ------------------------------------------------------------------------------------
def test_a_load_is_watched_and_a_request_clicked(start: Start, browse: Browse) -> None:
    server = start(FAKE_ENGINE="own", FAKE_STEP_SECONDS="0.03", PAGETURNER_FAKE_STEP_SECONDS="0.03")
    page = browse(server.url, "--force-prefers-reduced-motion")
    assert page.js("EVERY") == 1000, "whoever wants less motion has less"
    page.driver.execute_script("at('demo').focus()")
    page.press("\ue007")
    page.until("batch.cells.some((cell) => cell[4]) && batch.cells.some((cell) => !cell[4])")
    page.until("at('demo').textContent === 'Start a demo load'")
    body = {"prompt": "long", "max_tokens": 300, "ignore_eos": True}
    named = {"X-Request-Id": "looked-at"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, "/v1/completions", json=body, headers=named)
        found = "[...document.querySelectorAll('#requests button')].find((b) => b.textContent === 'looked-a')"
        page.until(f"{found} !== undefined")
        page.until(
            "at('batch').getAttribute('aria-label').includes('the last step has 1 requests')"
        )
        page.until("document.querySelectorAll('#figures dd')[2].textContent !== '–'")
        assert page.js("at('request-count').textContent") == "(1)", "TTFT counts at the first token"
        page.driver.execute_script(f"{found}.click()")
        page.until("at('request').textContent.includes('so far')")
        assert page.js("at('request').querySelector('.bar') !== null")
        assert "It waits for no other request." in page.js("at('request').textContent")
        page.until("at('request').textContent.includes(' in all, first token after')")
        assert answer.result().status_code == 200
    assert "decode" in page.js("at('request').textContent")
    assert "blocks in use" in page.js("at('blocks-text').textContent")
    assert "A square is " in page.js("at('scale').textContent")
    assert page.faults() == []
    page.driver.get("about:blank")


def test_six_tiles_fill_their_rows_and_the_longest_numbers_fit(
    server: Server, browse: Browse
) -> None:
    page = browse(server.url)
    page.until("at('figures').children.length === 6")
    page.id("pause").click()
    longest = "[spread([998, 998]), '1024 / 1024', spread([9900, 900000])]"
    page.js(f"drawFigures(tilesOf(batch.seen).map(([t], i) => [t, {longest}[i % 3]]), [])")
    for width in (1440, 1100, 900, 390):
        page.size(width, 900)
        page.js("showView('engine')")
        rows = page.js(
            "(() => { const tops = {}; for (const one of at('figures').children) {"
            " const top = Math.round(one.getBoundingClientRect().top); tops[top] = (tops[top] || 0) + 1; }"
            " return Object.values(tops); })()"
        )
        assert rows in ([6], [3, 3])
        wide = "filter(d => d.scrollWidth > d.clientWidth + 1).map(d => d.textContent)"
        tight = f"[...document.querySelectorAll('#figures dt, #figures dd')].{wide}"
        assert page.js(tight) == []


def test_words_of_the_field_are_explained_on_hover_and_focus(
    server: Server, browse: Browse
) -> None:
    from selenium.webdriver import ActionChains

    page = browse(server.url)
    page.until("at('figures').children.length === 6")
    terms = page.driver.find_elements("css selector", "[data-word]")
    assert len(terms) > 10
    assert page.js(
        "[...document.querySelectorAll('[data-word]')].every(n => WORDS[n.dataset.word] && n.tabIndex === 0)"
    )
    ttft = page.driver.find_elements("css selector", "#figures dt")[2]
    ActionChains(page.driver).move_to_element(ttft).perform()
    page.until("!at('tip').hidden")
    assert page.js("at('tip').textContent").startswith("Time to first token")
    assert page.js("at('tip').getBoundingClientRect().right <= innerWidth")
    page.js("document.querySelector('[data-word=step]').focus()")
    page.until("at('tip').textContent.startsWith('One forward pass')")


def change_policy(page: Page) -> None:
    page.js("at('settings').open = true")
    page.until("at('policy').options.length > 3 && at('budget').value !== ''")
    page.js("at('policy').value = 'prefill_first'")
    page.js("at('configure').requestSubmit()")
    page.until("at('configured').textContent.includes('Applied')")


def test_the_policy_is_changed_without_a_key_where_the_page_has_one(
    start: Start, browse: Browse
) -> None:
    server = start("--page-settings")
    page = browse(server.url)
    change_policy(page)
    assert server.http.get("/v1/live").json()["settings"]["policy"] == "prefill_first"
    assert page.faults() == []


def test_elsewhere_it_is_disabled_and_the_reason_stands_there(
    server: Server, browse: Browse
) -> None:
    page = browse(server.url)
    page.js("at('settings').open = true")
    assert page.js("at('choices').disabled")
    assert "--page-settings" in page.js("at('locked').textContent")
    assert page.faults() == []


def test_the_policy_is_changed_by_who_has_the_key(start: Start, browse: Browse) -> None:
    server = start("--admin-key", "secret")
    page = browse(server.url)
    page.until("!at('closed').hidden")
    assert "admin key" in page.js("at('closed').textContent")
    page.js("at('settings').open = true")
    assert page.js("at('choices').disabled")
    assert "needs the admin key" in page.js("at('locked').textContent")
    page.id("admin").send_keys("secret")
    page.until("at('closed').hidden")
    page.driver.execute_script("document.activeElement.blur()")
    change_policy(page)
    told = server.http.get("/v1/admin/config", headers={"authorization": "Bearer secret"}).json()
    assert told["policy"] == "prefill_first"


# -- how it looks ----------------------------------------------------------------------------------
def test_one_design_for_the_page_the_docs_and_the_report(
    server: Server, browse: Browse, tmp_path: Path
) -> None:
    page = browse(server.url)
    (tmp_path / "report.html").write_text(report("A report", "", "<h1>A report</h1><p>text</p>"))
    looks = (
        "['fontFamily', 'backgroundColor', 'color'].map((k) => getComputedStyle(document.body)[k])"
    )
    found = []
    for address in (server.url, f"{server.url}/docs", (tmp_path / "report.html").as_uri()):
        page.driver.get(address)
        found.append(page.js(looks))
        found[-1].append(page.js("getComputedStyle(document.querySelector('h1')).fontSize"))
    assert found[0] == found[1] == found[2]


def test_light_and_dark_are_kept(server: Server, browse: Browse) -> None:
    page = browse(server.url)
    before = page.js("document.documentElement.dataset.theme")
    page.id("theme").click()
    page.driver.refresh()
    assert {before, page.js("document.documentElement.dataset.theme")} == {"light", "dark"}


@pytest.mark.skipif(
    not AXE.is_file(), reason="PAGETURNER_AXE names no axe.min.js of npm's axe-core"
)
@pytest.mark.parametrize(("theme", "size"), [("light", WIDE), ("dark", WIDE), ("light", PHONE)])
def test_axe_core_finds_nothing_serious(
    server: Server, browse: Browse, theme: str, size: tuple[int, int]
) -> None:
    page = browse(server.url)
    page.size(*size)
    page.js("theme(arguments[0])", theme)
    page.ask("hello", n=2, most=40)
    page.answered()
    page.js("[...document.querySelectorAll('details')].forEach((one) => { one.open = true })")
    found = []
    for view in ("chat", "list", "engine"):
        page.js("showView(arguments[0])", view)
        found += page.serious()
    page.driver.get(f"{server.url}/docs")
    page.until("document.querySelectorAll('details').length > 9")
    assert found + page.serious() == []
