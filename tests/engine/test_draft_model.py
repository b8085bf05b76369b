"""A draft model: what it proposes, what it keeps of a sequence, when it is silent, which are refused."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pageturner import LLM
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.executor.draft import Costs, best_length
from pageturner.executor.draft_compatibility import check_tokens, cost_of
from pageturner.executor.draft_model import CATCH_UP, MAX_DRAFT, DraftModel
from pageturner.executor.kv_memory import KVLayout, KVSizes
from pageturner.formats.load_tokenizer import load_tokenizer
from pageturner.kernels.base import Ops
from pageturner.models.decoder import Decoder
from pageturner.params import SamplingParams
from pageturner.policies.drafts import MAX_DRAFTED
from pageturner.request import Request
from pageturner.scheduler.types import Item, Output, Plan, Result, Sequence
from support.decoding import backend
from support.engines import GOLDENS, Model, Setup, answers
from support.gguf_writer import gguf_bytes, taken_apart
from support.hf_folder import make_folder
from support.poison import poison_blocks
from support.refusals import engine_fault

TINY = GOLDENS / "tiny_llama_quant.gguf"
FREE = Costs(step=0.0, rows=1e9)  # drafts always pay
POOL = {16: 384, 1: 280, 64: 640}  # block size -> tokens; so few that sequences are preempted


@pytest.fixture(scope="module")
def ops() -> Ops:
    return backend("native")


@pytest.fixture(scope="module")
def model(ops: Ops) -> Model:
    return Model(TINY, ops)


@pytest.fixture(scope="module")
def other(ops: Ops) -> Decoder:
    """The weights before they were quantised: right now and then."""
    return Model(GOLDENS / "tiny_llama.gguf", ops).decoder


def drafter(decoder: Decoder, ops: Ops, setup: Setup, costs: Costs = FREE) -> DraftModel:
    """Its storage poisoned: a read of what was not written ends a draft."""
    blocks = setup.kv_tokens // setup.block_size
    made = DraftModel(decoder, ops, KVLayout(KVSizes(blocks), setup.block_size, "float16"), costs)
    poison_blocks(made.storage, list(range(blocks + MAX_DRAFTED)))
    return made


def requests(count: int, longest: int = 60, **params: float) -> list[Request]:
    dice = random.Random(1)
    shared = tuple(dice.randrange(300) for _ in range(40))
    made = []
    for id in range(1, count + 1):
        prompt = (shared if id % 2 else ()) + tuple(
            dice.randrange(300) for _ in range(dice.randint(1, longest))
        )
        options = {
            "temperature": dice.choice([0.0, 0.0, 0.9]),
            "max_tokens": dice.randint(8, 100),
        } | params
        made.append(Request(id, prompt, SamplingParams(seed=id, **options)))  # type: ignore[arg-type]
        if id % 5 == 0:
            made.append(replace(made[-1], id=1000 + id, index=1, parent=id))
    return made


# -- what it proposes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", POOL)
def test_a_model_that_drafts_for_itself_is_always_right(model: Model, block: int) -> None:
    """Over prefix hits, copies, preemption and forks: nothing stale is ever taken for the KV of a token."""
    crowd = requests(40)
    truth = answers(model.engine(Setup()), crowd)
    setup = Setup(block_size=block, kv_tokens=POOL[block])
    engine = model.engine(replace(setup, drafter=lambda: drafter(model.decoder, model.ops, setup)))
    assert answers(engine, crowd, spread=1) == truth
    stats = engine.scheduler.stats()
    assert stats["accepted_tokens"] == stats["draft_tokens"] > 0.6 * stats["generated_tokens"]
    assert stats["steps"] < 0.7 * stats["generated_tokens"]
    if block < 64:
        assert stats["preemptions"] > 0
    if block == 16:
        assert stats["copies"] > 0


def test_another_model_changes_no_answer(model: Model, other: Decoder) -> None:
    crowd = requests(24)
    truth = answers(model.engine(Setup()), crowd)
    setup = Setup()
    engine = model.engine(replace(setup, drafter=lambda: drafter(other, model.ops, setup)))
    assert answers(engine, crowd, spread=2) == truth
    stats = engine.scheduler.stats()
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]


def test_garbage_in_the_second_storage_changes_no_answer(model: Model) -> None:
    crowd = requests(12)
    truth = answers(model.engine(Setup()), crowd)
    blocks = Setup().kv_tokens // 16
    made = DraftModel(model.decoder, model.ops, KVLayout(KVSizes(blocks), 16, "float16"), FREE)
    engine = model.engine(Setup(drafter=lambda: made))
    dice, run = random.Random(3), engine.executor.run

    def spoiling(plan: Plan) -> Result:
        copies = [(dice.randrange(30), 30 + dice.randrange(30)) for _ in range(5)]
        model.ops.copy_blocks(made.storage, copies + [(b, a) for a, b in copies])
        return run(plan)

    engine.executor.run = spoiling  # type: ignore[method-assign]
    assert answers(engine, crowd, spread=2) == truth
    stats = engine.scheduler.stats()
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]


def first(drafts: DraftModel, seq: Sequence, token: int, n: int = 1) -> list[int]:
    output = Output([token])
    drafts.propose([Item(seq, n, seq.computed)], [output])
    return output.draft


def running(
    prompt: int, done: int = 1, *, limit: int = 400, block: int = 16, **params: bool
) -> Sequence:
    """A sequence of which everything but its last token is computed; its blocks are 0, 1, 2 ..."""
    tokens = [(7 * i) % 300 for i in range(prompt + done)]
    request = Request(1, tuple(tokens[:prompt]), SamplingParams(temperature=0.0, **params))
    blocks = list(range(-(-len(tokens) // block)))
    return Sequence(request, tokens=tokens, computed=len(tokens) - 1, blocks=blocks, limit=limit)


def test_running_a_step_again_gives_the_same_draft(model: Model) -> None:
    drafts, seq = drafter(model.decoder, model.ops, Setup()), running(20)
    once = first(drafts, seq, 5)
    assert first(drafts, seq, 5) == once
    assert len(once) == MAX_DRAFT


def test_what_it_has_not_seen_is_computed_in_parts(model: Model) -> None:
    """And nobody's first token waits for it."""
    drafts, seq = (
        drafter(model.decoder, model.ops, Setup()),
        running(2 * CATCH_UP + 20, 0, limit=500),
    )
    lengths = []
    for token in range(5):
        lengths.append(len(first(drafts, seq, token)))
        seq.tokens.append(token)
        seq.blocks = list(range(-(-len(seq.tokens) // 16)))
    assert lengths == [0, 0, 0, MAX_DRAFT, MAX_DRAFT]


def test_several_that_are_far_behind_share_a_step(model: Model) -> None:
    drafts = drafter(model.decoder, model.ops, Setup())
    seqs = [running(100), running(100)]
    seqs[1].request = replace(seqs[1].request, id=2)
    seqs[1].tokens[0] += 1
    seqs[1].blocks = [block + 50 for block in seqs[1].blocks]
    outputs = [Output([3]), Output([3])]
    drafts.propose([Item(seq, 1, seq.computed) for seq in seqs], outputs)
    assert [len(output.draft) for output in outputs] == [MAX_DRAFT, 0]


def test_blocks_behind_the_pool_suffice(model: Model) -> None:
    """Blocks of one token, tables that end with the last one computed: each drafted token needs a block."""
    drafts = drafter(model.decoder, model.ops, Setup(block_size=1))
    seqs = [running(12, block=1) for _ in range(8)]
    seqs.insert(0, running(2 * CATCH_UP, block=1))  # of which a step computes a part
    for i, seq in enumerate(seqs):
        seq.request = replace(seq.request, id=i)
        seq.blocks = [1000 * i + block for block in range(len(seq.tokens))]
    lengths: list[int] = []
    for first_of_step in (1, 0):
        outputs = [Output([7]) for _ in seqs]
        pairs = list(zip(seqs, outputs, strict=True))[first_of_step:]
        drafts.propose(
            [Item(seq, 1, seq.computed) for seq, _ in pairs], [output for _, output in pairs]
        )
        lengths = [len(output.draft) for output in outputs]
    assert sum(lengths) == MAX_DRAFTED
    assert lengths[0] == 0


def test_a_draft_ends_where_the_sequence_can_end(model: Model) -> None:
    assert len(first(drafter(model.decoder, model.ops, Setup()), running(20, limit=25), 5)) == 2
    assert first(drafter(model.decoder, model.ops, Setup()), running(20, limit=23), 5) == []
    drafts, seq = drafter(model.decoder, model.ops, Setup()), running(20)
    whole = first(drafts, seq, 5)
    params = replace(seq.request.params, stop_ids=(whole[2],))
    stopping = replace(seq.request, params=params)
    cut = whole[: whole.index(whole[2]) + 1]
    seq.request = stopping
    assert first(drafts, seq, 5) == cut
    assert first(drafts, seq, whole[2]) == []


def test_a_request_can_do_without(model: Model) -> None:
    drafts = drafter(model.decoder, model.ops, Setup())
    assert first(drafts, running(20, speculation=False), 5) == []
    assert first(drafts, running(20, speculation=True), 5) != []


def test_it_is_silent_beyond_its_context(model: Model, tmp_path: Path) -> None:
    shorter = Model(_changed(tmp_path, "context", {"llama.context_length": 40}), model.ops).decoder
    drafts = drafter(shorter, model.ops, Setup())
    assert len(first(drafts, running(30), 5)) == MAX_DRAFT
    assert len(first(drafter(shorter, model.ops, Setup()), running(36), 5)) == 3
    assert first(drafter(shorter, model.ops, Setup()), running(41), 5) == []


def test_tokens_that_it_does_not_have_are_no_fault(model: Model) -> None:
    """A target with more padding behind the vocabulary may choose it."""
    drafts, seq = drafter(model.decoder, model.ops, Setup()), running(20)
    seq.tokens[7] = model.decoder.spec.vocab + 3
    assert len(first(drafts, seq, 5)) == MAX_DRAFT


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_a_draft_model_with_a_window(ops: Ops, name: str) -> None:
    """Its KV is in whole blocks, whether the target's is or not."""
    windowed = Model(GOLDENS / "families" / name, ops)
    assert windowed.decoder.window
    crowd = [
        replace(request, params=replace(request.params, stop_ids=()))
        for request in requests(8, longest=90)
    ]
    truth = answers(windowed.engine(Setup()), crowd)
    for recent in (0, 600):
        setup = Setup(recent_tokens=recent)
        engine = windowed.engine(
            replace(setup, drafter=lambda s=setup: drafter(windowed.decoder, ops, s))
        )  # type: ignore[misc]
        assert answers(engine, crowd) == truth
        stats = engine.scheduler.stats()
        assert stats["accepted_tokens"] == stats["draft_tokens"] > 0


# -- when drafting pays --------------------------------------------------------------------------------------
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("length", [1, 4])
def test_the_gain_is_what_a_simulation_finds(chance: float, length: int) -> None:
    costs, sequences, dice = Costs(step=0.25, rows=5.0), 3, random.Random(2)
    with_drafts = alone = 0.0
    for _ in range(20000):
        right = next((i for i in range(length) if dice.random() >= chance), length)
        alone += (right + 1) * (1 + sequences / 5)
        with_drafts += (1 + sequences * (length + 1) / 5) + length * 0.25 * (1 + sequences / 5)
    assert costs.gain(chance, sequences, length) == pytest.approx(alone / with_drafts, rel=0.02)


def test_long_drafts_where_they_are_right_and_none_in_a_full_batch() -> None:
    lengths = [
        best_length(Costs(0.1), percent, 1, MAX_DRAFT)[0] for percent in (10, 50, 70, 90, 99)
    ]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1] > 3) == (0, True)
    assert best_length(Costs(0.1), 90, 64, MAX_DRAFT) == (0, 1.0)
    assert best_length(Costs(0.9), 90, 1, MAX_DRAFT) == (0, 1.0)


def wrong_drafts(model: Model, runs: int) -> list[int]:
    """Their lengths, when every step is run so many times and nothing is ever right."""
    drafts, seq = drafter(model.decoder, model.ops, Setup(), Costs(0.3)), running(20)
    lengths = []
    for _ in range(80):
        for _ in range(runs):
            draft = first(drafts, seq, 5, n=1 + len(seq.draft))
        lengths.append(len(draft))
        seq.computed, seq.draft = len(seq.tokens), []
        seq.tokens.append(5)
        seq.draft = [299 - token for token in draft]  # whatever it says is wrong
        seq.blocks = list(range(-(-(len(seq.tokens) + len(draft)) // 16)))
    return lengths


def test_wrong_drafts_end_for_a_while(model: Model) -> None:
    lengths = wrong_drafts(model, 1)
    assert wrong_drafts(model, 2) == lengths, "a step that is run twice teaches nothing more"
    silent = lengths.index(0)
    assert 0 < silent < 12
    assert sum(length > 0 for length in lengths[silent:]) < 10
    assert any(lengths[silent:]), "it must try again"


def test_a_long_prompt_for_a_short_answer_is_not_worth_it(model: Model) -> None:
    costs = Costs(0.3)
    assert (
        first(drafter(model.decoder, model.ops, Setup(), costs), running(100, limit=110), 5) == []
    )
    assert (
        first(drafter(model.decoder, model.ops, Setup(), costs), running(100, limit=400), 5) != []
    )


# -- settings ------------------------------------------------------------------------------------------------
def _changed(folder: Path, name: str, values: dict[str, object]) -> Path:
    metadata, tensors = taken_apart(TINY)
    path = folder / f"{name}.gguf"
    path.write_bytes(gguf_bytes(metadata | values, tensors))  # type: ignore[arg-type]
    return path


def config(**settings: object) -> EngineConfig:
    options = {"model": str(TINY), "kv_cache_memory": 1 << 22, "speculation": "draft"} | settings
    return EngineConfig(**options)  # type: ignore[arg-type]


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models are of one size: drafts would not pay."""
    monkeypatch.setattr("pageturner.engine.engine_factory.cost_of", lambda draft, target: 0.01)


def test_served_with_a_draft_model(cheap: None) -> None:
    plain = LLM(str(TINY), kv_cache_memory=1 << 22)
    drafted = LLM(str(TINY), kv_cache_memory=1 << 22, speculation="draft", draft_model=str(TINY))
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompt = "the old house"
    assert (
        drafted.generate(prompt, params)[0].outputs[0].text
        == plain.generate(prompt, params)[0].outputs[0].text
    )
    stats = drafted.built.engine.scheduler.stats()
    assert stats["accepted_tokens"] == stats["draft_tokens"] > 0
    assert drafted.built.fingerprint == plain.built.fingerprint


def test_blocks_cost_the_bytes_of_both(cheap: None) -> None:
    one = make_engine(config(speculation="off"))
    both = make_engine(config(draft_model=str(TINY)))
    assert both.num_blocks == one.num_blocks // 2
    spare = (MAX_DRAFTED + 2) * one.kv_bytes // (one.num_blocks + 1)
    assert one.kv_bytes <= both.kv_bytes <= one.kv_bytes + spare


def test_random_weights_of_a_draft_model(cheap: None, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "qwen3")
    (folder / "model.safetensors").unlink()
    make_engine(config(load_format="dummy", model=str(folder), draft_model=str(folder)))


def test_a_draft_model_that_is_too_large_is_told() -> None:
    with pytest.warns(RuntimeWarning, match="draft model takes 100% of one"):
        make_engine(config(draft_model=str(TINY)))


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ({}, "bad_setting", "--draft-model MODEL go together"),
        ({"speculation": "ngram", "draft_model": str(TINY)}, "bad_setting", "go together"),
        ({"draft_model": "nowhere/at/all.gguf"}, "model_not_found", "nowhere/at/all.gguf"),
        ({"draft_model": __file__}, "gguf_magic", "test_draft_model.py"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], code: str, message: str) -> None:
    with engine_fault(message, code=code):
        make_engine(config(**settings))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    metadata, _ = taken_apart(TINY)
    tokens, kinds = (
        list(metadata["tokenizer.ggml.tokens"]),
        list(metadata["tokenizer.ggml.token_type"]),
    )  # type: ignore[arg-type]
    tokens[200], tokens[201] = tokens[201], tokens[200]
    swapped = _changed(tmp_path, "swapped", {"tokenizer.ggml.tokens": tokens})
    with engine_fault(r"token 200 is .* to the model and .* to the draft", code="draft_model"):
        make_engine(config(draft_model=str(swapped)))
    kinds[1] = 1
    plain = _changed(tmp_path, "plain", {"tokenizer.ggml.token_type": kinds})
    with engine_fault("token 1 is a control token to one of them"):
        make_engine(config(draft_model=str(plain)))


def test_padding_behind_the_vocabulary_is_no_difference() -> None:
    whole, fewer = load_tokenizer(TINY), load_tokenizer(TINY)
    fewer.vocab_size -= 5
    check_tokens(whole, fewer, "x")
    check_tokens(fewer, whole, "x")


def test_the_cost_is_the_ratio_of_what_is_multiplied(model: Model) -> None:
    spec = model.decoder.spec
    assert cost_of(spec, spec) == 1
    deep = replace(spec, layers=10 * spec.layers, vocab=10 * spec.vocab)
    assert cost_of(spec, deep) == pytest.approx(0.1)
    assert cost_of(replace(spec, ffn=1, vocab=1), spec) < 0.7
