"""Where tests find the SmolLM2 file and the texts of its goldens; they skip where those are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pageturner.errors import EngineFault
from pageturner.formats import hub

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens"


def model_path() -> Path:
    """The model file in the cache. Where it is not the test is skipped; in CI, which has it, it fails."""
    try:
        return hub.resolve("smollm2", offline=True).path
    except EngineFault as fault:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(fault.message)


def text_folder() -> Path:
    """The folder of texts; skips the test where it is not."""
    folder = Path(os.environ.get("PAGETURNER_DATA") or ROOT.parent / "shared" / "data") / "text"
    if not folder.is_dir():
        pytest.skip(f"no texts in {folder}; set PAGETURNER_DATA")
    return folder
