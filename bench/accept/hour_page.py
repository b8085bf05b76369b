"""The page: its tests in a browser, sentence by sentence, what axe-core finds, and the pictures.

axe-core is npm's: `--page-axe axe.min.js`, or it is fetched by `npm pack` into build/. Without a browser the
lines are NOT RUN.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import harness
from harness import Line, NotRun

TESTS = "tests/server/test_home_in_a_browser.py"
AXE = "axe-core@4.14"
MOST = 2_000_000  # bytes of an animated picture


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
    yield from harness.proved("hour_page", TESTS, *always, environment=environment)
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
    harness.alone(__file__, __doc__)
