"""Sessions: the same tokens as without them; memory shared while it can be, and gone when they are freed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pageturner import LLM, SamplingParams
from pageturner.errors import ClientError
from support.refusals import client_error

GOLDENS = Path(__file__).parent.parent / "goldens"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(3, 40))
BLOCK = 4


def make(**settings: object) -> LLM:
    fixed = {"backend": "reference", "kv_cache_dtype": "float32", "block_size": BLOCK}
    return LLM(str(GOLDENS / "tiny_llama.gguf"), **(fixed | settings))


@pytest.fixture(scope="module")
def shared() -> LLM:
    return make()


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert stats(shared)["pinned"] == stats(shared)["blocks_used"] == 0, (
        "a test did not free its sessions"
    )


def stats(llm: LLM) -> dict[str, float]:
    return llm.built.engine.scheduler.stats()


def alone(llm: LLM, tokens: list[int], params: SamplingParams = GREEDY) -> list[int]:
    """The answer without a session."""
    return llm.generate([tokens], params)[0].outputs[0].token_ids


def test_a_session_is_its_tokens(llm: LLM) -> None:
    with llm.session(PROMPT) as session:
        first = session.generate(GREEDY)
        assert first.token_ids == alone(llm, PROMPT)
        assert session.tokens == PROMPT + first.token_ids
        session.append([50, 51]).append("the house")
        before = list(session.tokens)
        assert before == PROMPT + first.token_ids + [50, 51] + llm.encode("the house")
        second = session.generate(GREEDY)
        assert second.token_ids == alone(llm, before)


def test_what_was_computed_is_not_computed_again(llm: LLM) -> None:
    with llm.session(PROMPT) as session:
        session.generate(GREEDY)
        computed = stats(llm)["step_tokens"]
        session.append([50, 51, 52]).generate(replace(GREEDY, max_tokens=1))
        assert stats(llm)["step_tokens"] - computed < BLOCK + 1 + 3


def test_forks_share_until_they_part(llm: LLM) -> None:
    root = llm.session(PROMPT)
    root.generate(GREEDY)
    used, kept = stats(llm)["blocks_used"], root.stats["blocks"]
    assert root.stats == {"tokens": 49, "blocks": 48 // BLOCK, "blocks_shared": 0}
    forks = root.fork(3)
    assert [fork.stats["blocks_shared"] for fork in forks] == [kept] * 3
    assert stats(llm)["blocks_used"] == used, "a fork takes no memory"
    sampled = [replace(GREEDY, temperature=1.2, seed=seed) for seed in range(3)]
    answers = llm.advance(forks, sampled)
    assert len({tuple(answer.token_ids) for answer in answers}) == 3
    for fork, params, answer in zip(forks, sampled, answers, strict=True):
        assert answer.token_ids == alone(llm, root.tokens, params)
        assert fork.stats["blocks_shared"] == kept
        assert fork.stats["blocks"] == (len(fork.tokens) - 1) // BLOCK
    more = sum(fork.stats["blocks"] - kept for fork in forks)
    assert stats(llm)["blocks_used"] == used + more
    root.free()
    assert stats(llm)["blocks_used"] == used + more, "others still need them"
    for fork in forks:
        fork.free()


def test_a_fork_lives_longer_than_its_origin(llm: LLM) -> None:
    root = llm.session(PROMPT)
    root.generate(GREEDY)
    (fork,) = root.fork()
    root.free()
    root.free()
    expected = alone(llm, fork.tokens)
    assert fork.generate(GREEDY).token_ids == expected
    fork.free()
    for use in (root.generate, root.fork, lambda: root.append("x")):
        with pytest.raises(ValueError, match="freed"):
            use()


def test_memory_of_a_session_survives_others() -> None:
    llm = make(kv_cache_memory=96 * 1024, max_model_len=120)
    with llm.session(PROMPT) as session:
        session.generate(GREEDY)
        for start in range(8):
            alone(llm, [start + i for i in range(90)])
        assert stats(llm)["evictions"] > 0
        output = llm.generate([session.tokens], GREEDY)[0]
        assert output.cached_tokens == 48


def test_a_session_goes_on_behind_a_stop_string(llm: LLM) -> None:
    whole = llm.generate([PROMPT], GREEDY)[0].outputs[0].text
    for stop in {whole[3:5], whole[4:5], whole[5:8]}:
        with llm.session(PROMPT) as session:
            answer = session.generate(replace(GREEDY, stop=(stop,)))
            assert answer.finish_reason == "stop"
            told = llm.tokenizer.decode_whole(session.tokens[len(PROMPT) :], skip_special=True)
            assert told == answer.text == whole.split(stop)[0]


def test_a_stop_token_is_not_part_of_the_session(llm: LLM) -> None:
    tokens = alone(llm, PROMPT)
    with llm.session(PROMPT) as session:
        session.generate(replace(GREEDY, stop_ids=(tokens[4],)))
        assert session.tokens == PROMPT + tokens[: tokens.index(tokens[4])]


def test_what_cannot_be(llm: LLM) -> None:
    with llm.session(PROMPT) as session, pytest.raises(ClientError, match="fork it"):
        session.generate(replace(GREEDY, n=2))
    with client_error("prefix caching"):
        make(enable_prefix_caching=False).session(PROMPT).generate(GREEDY)
    small = make(kv_cache_memory=96 * 1024, max_model_len=120)
    first, second = (small.session([start + i for i in range(90)]) for start in (0, 100))
    first.generate(GREEDY)
    with client_error("there is memory for", code="kv_too_small"):
        second.generate(GREEDY)
    first.free()
    assert second.generate(GREEDY).finish_reason == "length"


def test_a_batch_that_fails_keeps_nothing() -> None:
    small = make(kv_cache_memory=96 * 1024, max_model_len=120)
    first, second = small.session(PROMPT), small.session([300 + i for i in range(30)])
    second.append([10**6])
    with client_error("token ids"):
        small.advance([first, second], GREEDY)
    held = small.session([start % 250 for start in range(70)])
    held.generate(GREEDY)
    with client_error():
        small.advance([first, small.session(list(range(100, 190)))], replace(GREEDY, max_tokens=1))
    held.free()
    assert stats(small)["pinned"] == stats(small)["blocks_used"] == 0
    assert first.tokens == PROMPT
