"""The offline API on a tiny model: texts, streams, stop strings, refusals, and what stays behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pageturner import LLM, SamplingParams
from pageturner.config.settings import EngineConfig
from pageturner.engine.fingerprint import weights_digest
from support.refusals import client_error, engine_fault

GOLDENS = Path(__file__).parent.parent / "goldens"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(GOLDENS / "tiny_llama.gguf"), backend="reference", kv_cache_dtype="float32")


def idle(llm: LLM) -> bool:
    stats = llm.built.engine.scheduler.stats()
    return stats["blocks_used"] == 0 and not llm.built.engine.scheduler.has_work


def test_token_prompts_are_answered_as_recorded(llm: LLM) -> None:
    golden = np.load(GOLDENS / "tiny_llama.npz")
    prompts = [golden[f"prompt_{i}"].tolist() for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    for i, output in enumerate(llm.generate(prompts, params)):
        assert output.prompt_token_ids == prompts[i]
        assert output.outputs[0].token_ids == golden[f"greedy_{i}"].tolist()
        assert output.outputs[0].finish_reason == "length"
    assert idle(llm)


def test_text_is_the_decoding_of_its_tokens(llm: LLM) -> None:
    (output,) = llm.generate("the old house", GREEDY)
    answer = output.outputs[0]
    assert len(answer.token_ids) == 12
    assert answer.text == llm.tokenizer.decode(answer.token_ids)
    assert answer.text


def test_a_stream_is_the_same_text_in_pieces(llm: LLM) -> None:
    whole = llm.generate("the old house", GREEDY)[0].outputs[0].text
    pieces = list(llm.stream("the old house", replace(GREEDY, speculation=False)))
    assert "".join(pieces) == whole
    assert len(pieces) > 3


def test_leaving_a_stream_frees_its_blocks(llm: LLM) -> None:
    pieces = llm.stream(
        "the old house", SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    )
    next(pieces)
    pieces.close()
    assert idle(llm)


def test_a_stop_string_cuts_the_text_and_ends_the_request(llm: LLM) -> None:
    whole = llm.generate("the old house", GREEDY)[0].outputs[0].text
    stop = whole[5:8]
    (output,) = llm.generate(
        "the old house",
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=(stop,)),
    )
    answer = output.outputs[0]
    assert answer.text == whole[: whole.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert len(answer.token_ids) < 12
    assert idle(llm)


def test_control_tokens_are_in_a_text_that_is_to_have_them(llm: LLM) -> None:
    params = replace(GREEDY, allowed_token_ids=(min(llm.tokenizer.special_ids),))
    plain, whole = (
        llm.generate("the old house", params, skip_special_tokens=skip)[0].outputs[0]
        for skip in (True, False)
    )
    assert plain.token_ids == whole.token_ids
    assert (plain.text, whole.text) == (
        "",
        llm.tokenizer.decode(whole.token_ids, skip_special=False),
    )


def test_seeds_repeat_and_differ(llm: LLM) -> None:
    def texts(seed: int | None) -> list[str]:
        params = SamplingParams(temperature=1.5, max_tokens=12, seed=seed, ignore_eos=True)
        return [output.outputs[0].text for output in llm.generate(["a", "a", "b"], params)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert texts(1)[0] == texts(1)[1]
    assert len(set(texts(None)[:2])) == 2, "without a seed two equal requests draw on their own"


def test_logprobs_come_with_each_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
    answer = llm.generate("hello", params)[0].outputs[0]
    assert len(answer.logprobs) == 5
    for token, (value, top) in zip(answer.token_ids, answer.logprobs, strict=True):
        assert top[0] == (token, value)
        assert top[0][1] >= top[1][1]


def test_chat_goes_through_the_template(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": "hello"}], GREEDY)
    text = llm.tokenizer.decode(output.prompt_token_ids, skip_special=False)
    assert text.startswith("<|im_start|>")
    assert "hello" in text
    assert text.endswith("<|im_start|>assistant\n")


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 4)]
    outputs = llm.generate(["a", "b"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4]
    with client_error("2 prompts but 1"):
        llm.generate(["a", "b"], params[:1])


def test_a_prompt_that_cannot_run_is_refused_and_nothing_stays(llm: LLM) -> None:
    with client_error(code="prompt_too_long"):
        llm.generate(["fine", [5] * 5000], GREEDY)
    assert idle(llm)
    with client_error("at least one"):
        llm.generate([[]], GREEDY)


def test_more_prompts_than_a_server_would_queue() -> None:
    llm = LLM(str(GOLDENS / "tiny_llama.gguf"), backend="null", max_model_len=16, max_num_seqs=64)
    outputs = llm.generate([[1]] * 1500, SamplingParams(max_tokens=2, ignore_eos=True))
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)


def test_settings_that_cannot_work_are_faults() -> None:
    path = str(GOLDENS / "tiny_llama.gguf")
    for settings, code in (
        ({"block_size": 0}, "bad_setting"),
        ({"block_size": 257}, "bad_setting"),
        ({"max_model_len": 10_000_000}, "bad_setting"),
        ({"kv_cache_memory": 1 << 60}, "kv_memory"),
        ({"kv_cache_memory": 100}, "kv_memory"),
    ):
        with engine_fault(code=code):
            LLM(path, backend="reference", **settings)


def test_a_cancelled_stream_keeps_what_it_has_and_frees_its_blocks(llm: LLM) -> None:
    seen: list[str] = []
    alone = replace(GREEDY, speculation=False)  # one token a step
    stream = llm.stream("the old house", alone, cancelled=lambda: len(seen) == 3)
    while True:
        try:
            seen.append(next(stream))
        except StopIteration as end:
            answer = end.value.outputs[0]
            break
    assert answer.finish_reason == "abort"
    assert answer.text == "".join(seen)
    assert idle(llm)
    assert not list(llm.stream("the old house", GREEDY, cancelled=lambda: True))
    assert idle(llm)


def test_what_memory_was_too_short_for_is_computed_once_more_and_said() -> None:
    """Two answers that do not fit side by side: one gives way, and its second start is no cache hit."""
    kv = {
        "kv_cache_memory": 24 * 1024,
        "block_size": 4,
        "max_model_len": 40,
        "kv_cache_dtype": "float32",
    }
    llm = LLM(str(GOLDENS / "tiny_llama.gguf"), backend="reference", **kv)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    first, second = llm.generate([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]], params)
    stats = llm.built.engine.scheduler.stats()
    assert stats["preemptions"] == 1
    assert (first.recomputed_tokens, first.cached_tokens, second.cached_tokens) == (0, 0, 0)
    assert second.recomputed_tokens == stats["recomputed_tokens"] > 0


def test_cached_blocks_are_named_after_the_weights_not_the_file(tmp_path: Path) -> None:
    """Keys of cached KV mean the same wherever the model lies, and nothing to a fine-tune of it."""
    data = bytearray((GOLDENS / "tiny_llama.gguf").read_bytes())
    copy, tuned = tmp_path / "copy.gguf", tmp_path / "tuned.gguf"
    copy.write_bytes(data)
    data[-len(data) // 3] ^= 1  # one weight
    tuned.write_bytes(data)
    paths = (GOLDENS / "tiny_llama.gguf", copy, tuned)
    digests = [weights_digest(EngineConfig(model=str(path))) for path in paths]
    assert digests[0] == digests[1] != digests[2]
    assert weights_digest(EngineConfig(backend="fake")) == ""
