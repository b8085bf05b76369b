"""What is installed is pinned by version and hash, and every way to install it keeps to that."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINNED = re.findall(
    r"^([A-Za-z0-9._-]+)==(\S+)(.*(?:\n .*)*)", (ROOT / "requirements.txt").read_text(), re.M
)


def test_every_dependency_is_pinned_with_hashes() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = {canonicalize_name(name): version for name, version, _ in PINNED}
    for one in map(Requirement, wanted):
        assert one.specifier.contains(pinned[canonicalize_name(one.name)]), one
    assert len(PINNED) >= len(wanted)
    for name, _, rest in PINNED:
        assert re.search("--hash=sha256:[0-9a-f]{64}", rest), name


def test_every_installation_keeps_to_it() -> None:
    for name in ("setup/install.py", "Dockerfile"):
        text = re.sub("[\"',]", "", (ROOT / name).read_text())
        assert "--require-hashes -r requirements.txt" in text
        for line in re.findall(r"(?:pip install|own = ).*", text):
            own = re.search(r"(--editable |--no-deps )?\.( |\]|$)", line)
            assert own is None or "--no-deps" in line, f"{name}: {line}"


def test_the_policy_names_what_is_there() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / link).exists(), link
    assert "make audit" in (ROOT / ".ci" / "run").read_text()
