"""bench/prove.py on servers that keep its claims, and on one that breaks each: the script can fail."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "accept")]

import prove  # noqa: E402
import prove_claims as claims  # noqa: E402
from prove_claims import Target  # noqa: E402
from prove_weights import Reference  # noqa: E402

FAKE = f"{sys.executable} {ROOT / 'tests' / 'support' / 'cheating_server.py'} {{port}}"


@contextmanager
def fake(*words: str) -> Iterator[Target]:
    target = Target("fake", [*FAKE.split(), *words])
    try:
        target.prepare()
        yield target
    finally:
        target.stop()


def proved(folder: Path, *words: str) -> dict[str, Any]:
    assert prove.main(["--output", str(folder), "--seed", "1", *words]) == 0
    return dict(json.loads((folder / "prove.json").read_text())["servers"])


def test_our_server_keeps_what_it_says(tmp_path: Path) -> None:
    tiny = ROOT / "tests" / "goldens" / "tiny_llama.gguf"
    ours = f"ours={sys.executable} -m pageturner serve {tiny} --port {{port}}"
    found = proved(tmp_path, "--server", ours, "--claims", "cold", "batch", "kill")["ours"]
    assert found["batch"] == {
        "held": True,
        "figure": "0 of 8 requests differ in text, 0 in logprobs",
    }
    assert found["kill"]["held"], found
    assert "(starts: 3)" in found["cold"]["figure"]


def test_servers_that_cheat_are_caught(tmp_path: Path) -> None:
    servers = ["--server", f"honest={FAKE}", "--server", f"cheat={FAKE} batch forgets silent"]
    found = proved(tmp_path, *servers, "--claims", "batch", "prefix", "shift", "kill")
    held = {name: [cell["held"] for cell in column.values()] for name, column in found.items()}
    assert held == {"honest": [True, True, False, False], "cheat": [False, False, False, False]}
    assert "its process ended" in found["cheat"]["kill"]["figure"]
    assert "no logprobs" in found["cheat"]["batch"]["figure"]
    assert "| claim | honest | cheat |" in (tmp_path / "prove.md").read_text()


def test_a_neighbour_who_holds_up_everybody_is_seen() -> None:
    with fake("stalls") as target:
        verdict = claims.neighbour(target, random.Random(1), seconds=6.0)
    assert verdict.held is False
    assert "longest" in verdict.figure


@pytest.mark.parametrize("cheats", [(), ("silent",)])
def test_other_weights_are_told_from_other_rounding(cheats: tuple[str, ...]) -> None:
    with (
        fake() as reference,
        fake("--noise", "1.01") as rounded,
        fake(*cheats, "--noise", "1.01") as honest,
        fake(*cheats, "--weights", "other") as other,
    ):
        judge = Reference(reference.url)
        judge.allow(rounded)
        assert judge.judge(honest).held
        assert not judge.judge(other).held


def test_what_cannot_be_asked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "PATIENCE", 5.0)
    with fake() as target:
        found = proved(tmp_path, "--server", f"there={target.url}/v1", "--claims", "cold", "kill")
        assert {cell["held"] for cell in found["there"].values()} == {None}
        late = proved(
            tmp_path, "--server", f"there={target.url}", "--claims", "batch", "--seconds", "0"
        )
    assert late["there"]["batch"] == {"held": None, "figure": "out of time"}
    gone = proved(tmp_path, "--server", f"gone={target.url}", "--claims", "prefix")
    assert gone["gone"]["prefix"]["held"] is False
