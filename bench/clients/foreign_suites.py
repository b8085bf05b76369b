"""Suites that test other servers, against ours: vLLM's entrypoint tests and llama.cpp's server tests, read by path.

Both come to our server through a thin shim that is a plugin of pytest: llama.cpp's tests know an external server,
vLLM's get a `tests.utils` whose server is ours, and modules of `vllm` that hold nothing. A test is passed, failed,
or not applicable, for a reason of foreign_suites.json: the first rule whose pattern is in the test's name or in its
error.

    python bench/clients/foreign_suites.py llamacpp FOLDER_OF_SOURCES
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock
from xml.etree import ElementTree

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "accept")]

import harness  # noqa: E402

FOLDERS = {
    "llamacpp": "llamacpp/vendor/llama.cpp/tools/server/tests",
    "vllm": "vllm/tests",
}
FLAGS = ("--tool-call-parser", "hermes", "--developer")
RULES = json.loads((HERE / "foreign_suites.json").read_text())


# -- in the process of pytest ----------------------------------------------------------------------
class Nothing(types.ModuleType):
    """A module of which every name is a mock."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class NothingFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of vLLM, and those beside it that are not installed."""

    roots = frozenset({"vllm", "torch", "transformers", "huggingface_hub", "wget", "tokenizers"})

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Nothing:
        return Nothing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


class OurServer:
    """vLLM's RemoteOpenAIServer as far as its tests use it: our server, whatever the flags are."""

    DUMMY_API_KEY = "token"

    def __init__(self, *words: Any, **more: Any) -> None:
        self.port = int(os.environ["PORT"])
        self.host = "127.0.0.1"

    def __enter__(self) -> OurServer:
        return self

    def __exit__(self, *error: object) -> None:
        """It is ended elsewhere."""

    def url_for(self, *parts: str) -> str:
        return "/".join((f"http://127.0.0.1:{self.port}", *parts))

    def get_async_client(self, **more: Any) -> Any:
        import openai

        url = self.url_for("v1")
        return openai.AsyncOpenAI(base_url=url, api_key="token", max_retries=0, timeout=300, **more)


def pytest_configure(config: Any) -> None:
    """Put the shims in place before a test is imported."""
    sys.meta_path.append(NothingFinder())
    root = os.environ["FOREIGN_FOLDER"]
    sys.path.append(root)
    if root.endswith(FOLDERS["llamacpp"]):
        utils = importlib.import_module("utils")
        utils.match_regex = lambda pattern, text: bool(text)  # what its own small model says
    if root.endswith(FOLDERS["vllm"]):
        package, utils = types.ModuleType("tests"), Nothing("tests.utils")
        package.__path__ = [root]
        for name in ("RemoteOpenAIServer", "RemoteVLLMServer", "RemoteLaunchRenderServer"):
            setattr(utils, name, OurServer)
        sys.modules.update({"tests": package, "tests.utils": utils})
        config.pluginmanager.register(importlib.import_module("entrypoints.conftest"))


# -- outside ---------------------------------------------------------------------------------------
def run(suite: str, sources: Path) -> dict[str, Any]:
    """Run the suite's files that RULES names; tests by outcome, reasons, and the failed ones."""
    folder = sources / FOLDERS[suite]
    rules = RULES[suite]
    names = ["--served-model-name", ",".join(rules["models"])]
    with (
        tempfile.TemporaryDirectory() as place,
        harness.server(*FLAGS, *names, *rules["flags"]) as server,
    ):
        report = Path(place) / "report.xml"
        words = ["-q", "-p", "foreign_suites", "-p", "no:cacheprovider", "--noconftest"]
        words += [
            "-p",
            "no:xdist",
            "--timeout",
            "300",
            f"--junitxml={report}",
            "--import-mode=importlib",
        ]
        words += ["-c", os.devnull, f"--rootdir={folder}", "-o", "asyncio_mode=auto"]
        environment = os.environ | {
            "FOREIGN_FOLDER": str(folder),
            "DEBUG_EXTERNAL": "1",
            "PORT": server.url.rpartition(":")[2],
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", ""))),
        }
        files = [str(folder / name) for name in rules["files"]]
        command = [sys.executable, "-m", "pytest", *words, *files]
        said = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
        if not report.exists():
            raise harness.NotRun(f"pytest: {(said.stdout + said.stderr)[-300:]}")
        return tally(report, rules["not_applicable"])


def tally(report: Path, rules: list[list[str]]) -> dict[str, Any]:
    """Count the tests of a report of pytest's."""
    counts, failed = Counter[str](), list[str]()
    reasons = dict[str, list[str]]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        wrong = [one for one in case if one.tag in ("failure", "error", "skipped")]
        text = f"{name} " + " ".join(f"{one.get('message')} {one.text}" for one in wrong)
        reason = next((why for pattern, why in rules if re.search(pattern, text)), None)
        if not wrong:
            counts["pass"] += 1
        elif wrong[0].tag == "skipped" or reason:
            counts["not applicable"] += 1
            told = " ".join((wrong[0].get("message") or "").split())[:160]
            reasons.setdefault(reason or "skipped by the suite itself", []).append(
                f"{name}: {told}"
            )
        else:
            counts["fail"] += 1
            failed.append(f"{name}: {' '.join((wrong[0].get('message') or '').split())[:160]}")
    return {"counts": counts, "reasons": reasons, "failed": failed}


if __name__ == "__main__":
    found = run(sys.argv[1], Path(sys.argv[2]))
    print(dict(found["counts"]), *found["failed"], sep="\n")
    for why, tests in found["reasons"].items():
        print(f"\n{why}: {len(tests)}", *tests, sep="\n  ")
