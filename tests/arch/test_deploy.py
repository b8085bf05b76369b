"""What is in deploy/ and the Dockerfile names files, flags and paths that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pageturner.config import settings as config

ROOT = Path(__file__).parents[2]
FLAGS = config.flag_reference()


def test_the_image_copies_what_is_there_and_what_is_not_left_out() -> None:
    text = (ROOT / "Dockerfile").read_text()
    copied = [
        name
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.M)
        for name in line.split()[:-1]
    ]
    assert len(copied) >= 5
    kept = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    for name in copied:
        assert (ROOT / name).exists(), name
        assert name in kept, name
    assert re.search(r"^USER [1-9]\d*$", text, re.M), "not root, and by number"
    assert "HEALTHCHECK" in text


@pytest.mark.parametrize("file", ["Dockerfile", "deploy/pageturner.service", "deploy/compose.yaml"])
def test_flags_exist(file: str) -> None:
    text = (ROOT / file).read_text()
    started = re.findall(r"pageturner.{0,3} ?.{0,2}serve.*", text)
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", " ".join(started)):
        assert f"`{flag}`" in FLAGS, flag
    assert text


def test_the_compose_file_mounts_what_is_there() -> None:
    text = (ROOT / "deploy" / "compose.yaml").read_text()
    mounted = re.findall(r"\./([\w./-]+):/", text)
    assert len(mounted) == 4
    for name in mounted:
        assert (ROOT / "deploy" / name).is_file(), name
    assert not re.search(r'ports: \["(?!127\.0\.0\.1:)', text), "on loopback alone"


def test_variables_of_the_service_are_read() -> None:
    text = (ROOT / "deploy" / "pageturner.service").read_text()
    source = "\n".join(path.read_text() for path in (ROOT / "src" / "pageturner").rglob("*.py"))
    names = set(re.findall(r"\b(PAGETURNER_[A-Z_]+)=", text))
    assert names
    assert all(f'"{name}"' in source for name in names), names
