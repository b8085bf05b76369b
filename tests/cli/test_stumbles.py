"""Commands that newcomers typed who knew vLLM, llama.cpp or Ollama: stumbles.json keeps what they were told before it
was mended, and has what they must be told now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pageturner import cli

STUMBLES = json.loads(Path(__file__).with_name("stumbles.json").read_text())


@pytest.mark.parametrize("typed", STUMBLES, ids=[typed["words"] for typed in STUMBLES])
def test_what_newcomers_typed_is_answered(
    typed: dict[str, str | int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    try:
        code = cli.main(str(typed["words"]).split())
    except SystemExit as end:
        code = int(end.code or 0)
    told = capsys.readouterr()
    assert re.search(str(typed["now"]), told.out + told.err)
    assert code == typed["code"]
