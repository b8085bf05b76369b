"""States of recurrent layers in host memory and in a file: conversations that pushed each other out are found again,
with the same bits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import LoadedEngine, make_engine
from pageturner.kernels.cpu import native_module
from pageturner.kv import kv_tiers
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.engines import GOLDENS, answers
from support.kv_files import flip_all

pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=9, logprobs=0, ignore_eos=True)


MEMORY = {"qwen3_5": 400_000, "lfm2": 100_000, "granite_h": 400_000}
Answers = list[tuple[int, ...]]


def engine(name: str, **settings: Any) -> LoadedEngine:
    """Of a model with room for a part of the conversations."""
    given = {"kv_cache_memory": MEMORY[name], "max_num_seqs": 2, "threads": 1} | settings
    return make_engine(EngineConfig(model=str(GOLDENS / "families" / name), **given))


def conversations(built: LoadedEngine, turns: int = 2, salt: str = "") -> tuple[Answers, int]:
    """All conversations turn by turn, each turn behind all before it; what was answered, and how many
    tokens a turn could have found."""
    dice, id = random.Random(2), 0
    said = [tuple(dice.randrange(3, 300) for _ in range(40 + 5 * i)) for i in range(24)]
    answered, reusable = [], 0
    for turn in range(turns):
        for i, before in enumerate(said):
            reusable += (len(before) - 1) // 32 * 32 if turn else 0
            request = Request(id, (*before, 7), PARAMS, salt=salt)
            answer = answers(built.engine, [request])[id].tokens
            answered.append(answer)
            said[i] = (*request.prompt, *answer)
            id += 1
    return answered, reusable


@pytest.mark.parametrize(
    ("name", "salt"), [("qwen3_5", ""), ("qwen3_5", "tenant"), ("lfm2", ""), ("granite_h", "")]
)
def test_no_bit_changes_and_all_is_found(name: str, salt: str) -> None:
    alone, reusable = conversations(engine(name, enable_prefix_caching=False), salt=salt)
    small = engine(name)
    assert conversations(small, salt=salt)[0] == alone
    built = engine(name, kv_host_memory=8 << 20)
    assert conversations(built, salt=salt)[0] == alone
    stats = built.engine.scheduler.stats()
    assert stats["cached_tokens"] == reusable > 2 * small.engine.scheduler.stats()["cached_tokens"]
    assert stats["state_host_hits"] > 0
    assert stats["kv_host_hits"] > 0
    assert stats["state_host_errors"] == 0
    built.engine.forget_prefixes()
    assert built.engine.stats()["state_host_blocks"] == 0


@pytest.mark.parametrize(("name", "salt"), [("qwen3_5", "tenant"), ("lfm2", ""), ("granite_h", "")])
def test_the_next_engine_finds_what_the_last_one_wrote(
    tmp_path: Path, name: str, salt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "PATIENCE", 60.0)
    monkeypatch.setattr(kv_tiers, "FLUSH", 60.0)
    alone, reusable = conversations(engine(name, enable_prefix_caching=False), salt=salt)
    files = {"kv_file": str(tmp_path / "kv"), "kv_file_size": 64 << 20}
    first = engine(name, **files)
    assert conversations(first, turns=1, salt=salt)[0] == alone[:24]
    first.engine.close()
    built = engine(name, **files)
    assert conversations(built, salt=salt)[0] == alone
    stats = built.engine.stats()
    assert stats["cached_tokens"] >= reusable
    assert stats["state_file_hits"] >= 24
    assert stats["state_file_errors"] == stats["kv_file_errors"] == 0
    built.engine.close()
    assert (tmp_path / "kv.states").stat().st_mode & 0o777 == 0o600


def test_a_file_of_damaged_states_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tiers, "PATIENCE", 60.0)
    monkeypatch.setattr(kv_tiers, "FLUSH", 60.0)
    alone = conversations(engine("qwen3_5", enable_prefix_caching=False), turns=1)[0]
    files = {"kv_file": str(tmp_path / "kv"), "kv_file_size": 64 << 20}
    first = engine("qwen3_5", **files)
    conversations(first, turns=1)
    first.engine.close()
    flip_all(tmp_path / "kv.states")
    built = engine("qwen3_5", **files)
    assert conversations(built, turns=1)[0] == alone
    assert built.engine.stats()["state_file_errors"] > 0
    assert built.engine.stats()["state_file_hits"] == 0
    built.engine.close()


def test_requests_that_run_push_each_other_out_and_come_back() -> None:
    """Side by side, in less KV than they need."""
    dice = random.Random(3)
    prompts = [tuple(dice.randrange(3, 300) for _ in range(90 + 20 * i)) for i in range(8)]
    params = SamplingParams(max_tokens=60, logprobs=0, ignore_eos=True)
    asked = [Request(i, prompt, params) for i, prompt in enumerate(prompts)]
    whole = engine("qwen3_5", kv_cache_memory=4 << 20, max_num_seqs=8)
    built = engine("qwen3_5", kv_cache_memory=800_000, kv_host_memory=8 << 20)
    assert answers(built.engine, asked, spread=2) == answers(whole.engine, asked)


def test_a_flipped_bit_is_found_and_computed_again() -> None:
    alone = conversations(engine("qwen3_5", enable_prefix_caching=False))[0]
    built = engine("qwen3_5", kv_host_memory=8 << 20)
    states = built.engine.connectors.state_tiers
    assert states is not None
    conversations(built, turns=1)
    assert len(states.host) > 3
    for _, row in states.host.newest():
        row[7] ^= 1
    assert conversations(built)[0] == alone
    assert states.stats()["state_host_errors"] > 0


def test_what_was_passed_without_a_reason_stays_here() -> None:
    """The end of each conversation goes down, and not the boundaries that lie before it."""
    built = engine("granite_h", kv_host_memory=8 << 20)
    conversations(built, turns=1)
    assert built.engine.stats()["state_host_stored"] <= 24
