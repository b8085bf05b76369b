"""The page: its tests in a browser, sentence by sentence, what axe-core finds, and the pictures.

axe-core is npm's: `--page-axe axe.min.js`, or it is fetched by `npm pack` into build/. Without a browser the
lines are NOT RUN.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
import harness
from harness import Line, NotRun

TESTS = "tests/server/test_home_in_a_browser.py"
AXE = "axe-core@4.14"
MOST = 2_000_000  # bytes of an animated picture
# each sentence of what the page must do -> the tests of it (of pytest's -k)
SENTENCES = {
    "follows six long answers, wide and on a phone; nothing under the composer": "six_long_answers",
    "who reads further up is left there, and jumps to the latest": "further_up",
    "parameters leave the conversation in sight on a phone": "parameters_leave",
    "conversations survive a reload: titles, rename, delete": "survive_a_reload",
    "an answer goes on while another conversation is open": "another_conversation",
    "export as Markdown and JSON": "exported",
    "continue, where the limit or a reload ended an answer; the limit is the context": "goes_on",
    "copy, colours of code": "copied",
    "stop, edit, retry, several answers, system prompt": "side_by_side",
    "by keys alone": "keys_alone",
    "a list of models where there are several": "models_are_a_list",
    "tiles in full rows, numbers fit": "tiles",
    "a load watched, a request clicked, TTFT at the first token, scale of KV": "load_is_watched",
    "words explained on hover and focus": "explained",
    "policy changed under make serve, disabled with its reason elsewhere": "policy or elsewhere",
    "one design for /, /docs and the report": "one_design",
    "axe-core: nothing serious in light, dark, on a phone, in /docs": "axe_core",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page-axe", type=Path, help="axe.min.js of npm's axe-core")


def axe(given: Path | None) -> Path | None:
    """Return the script of axe-core; None where npm does not bring it."""
    kept = given or harness.ROOT / "build" / "axe.min.js"
    if kept.is_file() or shutil.which("npm") is None:
        return kept if kept.is_file() else None
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["npm", "pack", AXE], cwd=folder, capture_output=True, check=False)
        packed = next(Path(folder).glob("*.tgz"), None)
        if done.returncode or packed is None:
            return None
        with tarfile.open(packed) as archive:
            found = archive.extractfile("package/axe.min.js")
            assert found is not None
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes(found.read())
    return kept


def lines(options: argparse.Namespace) -> Iterator[Line]:
    yield from pictures()
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        raise NotRun("no browser: apt-get install chromium chromium-driver")
    environment = {"PAGETURNER_AXE": str(axe(options.page_axe) or "absent").strip()}
    always = ("-m", "slow or not slow")
    for sentence, which in SENTENCES.items():
        yield harness.pytest_line(sentence, TESTS, "-k", which, *always, environment=environment)
    fleet = "tests/router/test_fleet_view.py"
    yield harness.pytest_line(
        "the fleet, where a stream moved, how far a model is fetched", fleet, *always
    )


def pictures() -> Iterator[Line]:
    """The animated picture is the first thing of the README, and small."""
    readme = (harness.ROOT / "README.md").read_text()
    path = harness.ROOT / "docs" / "page" / "tokens.svg"
    size = path.stat().st_size
    first = next(line for line in readme.splitlines()[1:] if line.strip())
    said = f"{size / 1000:.0f} KB; after the title: {first[:60]}"
    shown = "docs/page/tokens.svg" in first and b"<animate" in path.read_bytes()
    yield Line("an animated picture begins the README, under 2 MB", said, shown and size < MOST)


if __name__ == "__main__":
    made = argparse.ArgumentParser(description=__doc__)
    add_arguments(made)
    one = made.parse_args()
    sys.exit(harness.report("hour_page", {"page": lambda: lines(one)}))
