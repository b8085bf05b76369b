"""The page at `/`: it needs no other server, loads without a key, and no answer breaks it. What a person
sees of it: test_home_in_a_browser.py."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable

import pytest

from pageturner.http import web_pages
from pageturner.server.observability.admin import LOCKED

from .conftest import Server

Start = Callable[..., Server]


def test_the_page_needs_nobody_else_and_no_key(start: Start) -> None:
    server = start("--api-key", "sesame")
    found = server.http.get("/")
    assert found.status_code == 200
    assert found.headers["content-type"].startswith("text/html")
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert found.text == web_pages.document("home").replace("{{settings}}", LOCKED)
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
const starts = ["'", "`", '"', '"'.repeat(3), "/*", "//", "#", "1.", "a ", "<!--", "\\n"];
for (const one of starts) for (const language of ["python", "js", "sql", "html"])
  if (!coloured(one.repeat(16000), language).length) throw new Error(one);
"""


def _part(name: str) -> str:
    return (web_pages.PARTS / name).read_text()


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the scripts of the page")
def test_no_answer_hangs_or_breaks_the_page() -> None:
    script = NO_BROWSER + _part("markdown.js") + _part("highlight.js") + HOSTILE
    found = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr[-2000:]


def test_what_scripts_ask_for_by_id_is_there() -> None:
    text = web_pages.document("home")
    ids = set(re.findall(r'\bid="([\w-]+)"', text))
    assert set(re.findall(r'\bat\("([\w-]+)"\)', text)) <= ids
    assert len(ids) > 30


def rule_of(server: Server) -> str:
    """Return what the page is told of who may change the settings."""
    found = re.search(r'<meta name="settings" content="(.*?)">', server.http.get("/").text)
    assert found
    return found[1]


def configure(server: Server, key: str, order: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    body = {"order": order}
    return server.http.post("/v1/admin/config", json=body, headers=headers).status_code


def test_the_page_has_a_key_for_the_settings_on_this_machine_alone(start: Start) -> None:
    server = start("--page-settings")
    word, key = rule_of(server).split(" ")
    assert word == "open"
    assert configure(server, key, "sjf") == 200
    assert server.http.get("/v1/live").json()["settings"]["order"] == "sjf"
    assert [configure(server, other, "fcfs") for other in ("x", key[:-1], key + "x")] == [
        404,
        404,
        404,
    ]
    state = server.http.get("/v1/admin/state", headers={"authorization": f"Bearer {key}"})
    assert state.status_code == 404, "it opens the settings, and nothing else"
    foreign = server.http.get("/", headers={"origin": "https://evil.example"})
    assert foreign.status_code == 403, "web pages of others cannot read it"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ((), LOCKED),
        (("--page-settings", "--host", "0.0.0.0"), LOCKED),
        (("--page-settings", "--api-key", "k"), LOCKED),
        (("--page-settings", "--allowed-origins", "*"), LOCKED),
        (("--page-settings", "--allowed-hosts", "x.example"), LOCKED),
        (("--page-settings", "--admin-key", "a"), "key"),
    ],
)
def test_elsewhere_it_has_none(start: Start, flags: tuple[str, ...], rule: str) -> None:
    assert rule_of(start(*flags)) == rule
