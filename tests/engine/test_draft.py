"""Drafts by suffixes: where they look, who is kept apart, how sure they are; and what a step pays for."""

from __future__ import annotations

import gc
import random
from dataclasses import replace

import pytest

from pageturner import LLM
from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.kernels.base import Ops
from pageturner.params import SamplingParams
from pageturner.policies import suffix_drafts
from pageturner.policies.drafts import MAX_DRAFTED, ROWS, PricedDrafts, RowPrices
from pageturner.policies.suffix_drafts import LONGEST, MAX_DRAFT, SuffixDrafts
from pageturner.request import Request
from pageturner.scheduler.types import Item, Output, Sequence
from support.engines import GOLDENS

TEXT = list(range(40))


def sequence(tokens: list[int], id: int = 1, *, speculation: bool = True) -> Sequence:
    params = SamplingParams(speculation=speculation)
    return Sequence(Request(id, tuple(tokens), params), tokens=list(tokens))


def of(seq: Sequence, **changes: str) -> Sequence:
    seq.request = replace(seq.request, **changes)  # type: ignore[arg-type]
    return seq


def draft(drafter: SuffixDrafts, seq: Sequence, *tokens: int) -> list[int]:
    """What is proposed behind the tokens that the step has just given."""
    output = Output(list(tokens))
    drafter.propose([Item(seq, 1, seq.computed)], [output])
    assert len(output.chances) == len(output.draft)
    return output.draft


def follow(drafter: SuffixDrafts, seq: Sequence, tokens: list[int]) -> list[list[int]]:
    """The drafts behind each of these tokens, which come one by one."""
    found = []
    for token in tokens:
        found.append(draft(drafter, seq, token))
        seq.tokens.append(token)
    return found


def test_what_stood_behind_the_longest_run_that_looks_alike() -> None:
    drafter = SuffixDrafts()
    assert draft(drafter, sequence([1, 2, 3, 9, 8, 1, 2]), 3)[:2] == [9, 8]
    twice = [7, 1, 2, 3, 4, 5, 0, 6, 1, 2, 3, 9, 5, 7, 1, 2]
    assert draft(drafter, sequence(twice, id=2), 3)[0] == 4, "four tokens are alike, not three"
    assert draft(drafter, sequence([61, 62, 63, 64], id=3), 65) == []
    assert draft(drafter, sequence([61], id=4), 61) == []


def test_of_runs_as_long_what_most_of_them_went_on_with() -> None:
    tokens = [1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2]
    assert draft(SuffixDrafts(), sequence(tokens), 3)[0] == 4


def test_drafts_are_surer_the_longer_what_is_alike() -> None:
    drafter, seq = SuffixDrafts(), sequence([*TEXT, 99])
    lengths = [len(found) for found in follow(drafter, seq, TEXT[:30])]
    assert lengths[:2] == [0, 0]
    assert lengths[-15] > lengths[2] > 0
    assert max(lengths) <= MAX_DRAFT < 32, "a chunk of recurrent layers"


def test_wrong_drafts_end() -> None:
    drafter, seq = SuffixDrafts(), sequence([1, 2, 3] * 3)
    wrong = [token for i in range(300) for token in (1, 2, 3, 1_000 + i)]
    drafts = follow(drafter, seq, wrong)
    assert sum(map(len, drafts[-40:])) < sum(map(len, drafts[:40]))


def test_running_a_plan_again_gives_the_same_drafts() -> None:
    drafter, seq = SuffixDrafts(), sequence([1, 2, 3, 4, 1, 2])
    first = draft(drafter, seq, 3)
    assert draft(drafter, seq, 3) == first
    assert first[0] == 4


def test_a_token_that_did_not_count_is_forgotten() -> None:
    drafter, seq = SuffixDrafts(), sequence([1, 2, 3, 4, 5, 3, 1, 2])
    assert draft(drafter, seq, 3)[:2] == [4, 5]
    assert draft(drafter, seq, 6) == []
    seq.tokens.append(6)
    assert draft(drafter, seq, 1, 2, 3)[0] in (4, 6)


def test_nobody_is_drafted_for_who_does_not_want_it() -> None:
    assert draft(SuffixDrafts(), sequence([1, 2, 3, 4, 1, 2], speculation=False), 3) == []


@pytest.mark.parametrize("field", ["tenant", "salt", "adapter"])
def test_the_texts_of_others_are_never_looked_at(field: str) -> None:
    drafter = SuffixDrafts()
    draft(drafter, of(sequence(TEXT), **{field: "one"}), 40)
    for other in ({field: "other"}, {}):
        assert draft(drafter, of(sequence(TEXT[:9], id=2), **other), 9) == []
    assert draft(drafter, of(sequence(TEXT[:9], id=3), **{field: "one"}), 9)[:2] == [10, 11]


def test_prompt_lookup_knows_its_own_text_only() -> None:
    drafter = SuffixDrafts(own=True)
    draft(drafter, sequence(TEXT), 40)
    assert draft(drafter, sequence(TEXT[:9], id=2), 9) == []
    assert draft(drafter, sequence([*TEXT, 5, 6], id=3), 7)[0] == 8


def test_an_answer_of_the_tenant_is_found_by_the_next() -> None:
    drafter, seq = SuffixDrafts(), sequence([91, 92, 93])
    follow(drafter, seq, TEXT)
    assert draft(drafter, sequence([80, 81, 4, 5], id=2), 6)[:2] == [7, 8]


def test_memory_is_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_drafts, "MAX_TOKENS", 4_000)
    drafter, dice = SuffixDrafts(), random.Random(5)
    first = sequence([dice.randrange(10**5) for _ in range(100)])
    draft(drafter, first, 1)
    for id in range(2, 200):
        tokens = [dice.randrange(10**5) for _ in range(100)]
        draft(drafter, of(sequence(tokens, id=id), tenant=str(id % 3 // 2)), 1)
        held = [places for one in drafter._spaces.values() for places in (one.young, one.old)]
        assert sum(len(places.ends) for places in held) < 6_000
        assert sum(len(places.texts) for places in held) < 60
    gc.collect()
    held = [one for one in gc.get_objects() if isinstance(one, suffix_drafts._Places)]
    assert sum(len(places.ends) for places in held) < 6_000, "the rest is freed"
    assert draft(drafter, sequence(first.tokens[:50], id=300), first.tokens[50]) == []
    first.tokens.append(1)
    follow(drafter, first, first.tokens[10:20])
    assert draft(drafter, first, first.tokens[20])[0] == first.tokens[21], "its own is added again"


def test_a_prompt_that_begins_as_another_is_added_once() -> None:
    drafter, long = SuffixDrafts(), list(range(1_000))
    draft(drafter, sequence(long), 1)
    (space,) = drafter._spaces.values()
    places = dict(space.young.ends)
    assert draft(drafter, sequence([*long, 7, 50, 51], id=2), 52)[:2] == [53, 54]
    assert len(space.young.ends) <= len(places) + 140
    assert len(space.young.older) < 140


# -- prices ------------------------------------------------------------------------------------------------
class Sure:
    """Proposes ten tokens for everybody, each right with the same chance."""

    nbytes = 0

    def __init__(self, *chances: float) -> None:
        self.chances, self.least = chances, 0.0

    def propose(self, items: list[Item], outputs: list[Output], least: float = 0.0) -> None:
        self.least = least
        for output, chance in zip(outputs, self.chances, strict=True):
            if output.tokens:
                output.draft, output.chances = list(range(10)), [chance] * 10


def lengths(*chances: float, row: float | None = None) -> list[int]:
    priced = PricedDrafts(Sure(*chances), clock=lambda: 0.0)
    if row is not None:
        priced.prices.row = lambda sequences: row  # type: ignore[method-assign]
    seqs = [sequence([1], id=i) for i in range(len(chances))]
    outputs = [Output([5]) for _ in seqs]
    priced.propose([Item(seq, 1, 0) for seq in seqs], outputs)
    return [len(output.draft) for output in outputs]


def test_alone_likely_tokens_pay_and_unlikely_ones_do_not() -> None:
    assert lengths(0.97) == [10]
    assert 0 < lengths(0.7)[0] < 10
    assert lengths(0.15) == [0]


def test_beside_many_only_the_surest_pay() -> None:
    assert lengths(*[0.9] * 64) == [0] * 64
    assert lengths(*[0.9] * 64, row=0.001) != [0] * 64
    few = lengths(0.98, *[0.5] * 7)
    assert few[0] > 0
    assert few[1:] == [0] * 7


def test_the_best_tokens_of_all_sequences_and_no_more_than_a_step_carries() -> None:
    found = lengths(*[0.99, 0.98] * 8, row=0.0001)
    assert sum(found) <= MAX_DRAFTED
    assert min(found[::2]) >= max(found[1::2])


def test_no_choice_of_lengths_is_better() -> None:
    """Greedy by chance is the best there is where rows cost alike: all choices are tried."""
    dice = random.Random(7)
    for _ in range(50):
        chances, row = [dice.random() for _ in range(3)], dice.choice([0.05, 0.1, 0.2])

        def pace(sizes: list[int], chances: list[float] = chances, row: float = row) -> float:
            tokens = 3 + sum(
                sum(min(c, 0.99) ** (i + 1) for i in range(n))
                for c, n in zip(chances, sizes, strict=True)
            )
            return tokens / (1 + row * sum(sizes))

        best = max(pace([a, b, c]) for a in range(8) for b in range(8) for c in range(8))
        assert pace(lengths(*chances, row=row)) > 0.97 * best


def test_prices_follow_what_steps_took() -> None:
    prices = RowPrices()
    first = prices.row(1)
    for _ in range(50):
        prices.took(1, 0, 1.0)
        prices.took(1, 5, 1.1)
    assert prices.row(1) < first / 2
    for _ in range(50):
        prices.took(1, 5, 3.0)
    assert prices.row(1) > first
    for _ in range(1_000):
        prices.took(1, 0, 1.0)
    assert prices.row(1) == pytest.approx(first, rel=0.01), "no slow step ends drafts for good"


def test_a_request_whose_drafts_fail_is_trusted_less() -> None:
    priced = PricedDrafts(Sure(0.6), clock=lambda: 0.0)
    seq, found = sequence([1]), []
    for _ in range(20):
        item = Item(seq, 1 + len(seq.draft), len(seq.tokens) - 1)
        output = Output([5])
        priced.propose([item], [output])
        found.append(len(output.draft))
        seq.tokens.append(5)
        seq.computed = len(seq.tokens) - 1
        seq.draft = output.draft
    assert found[0] > found[-1] == 0


def test_new_requests_begin_with_the_trust_that_others_lost() -> None:
    priced = PricedDrafts(Sure(0.5), clock=lambda: 0.0)
    found = []
    for id in range(12):  # of each the first draft, which fails
        seq, output = sequence([1], id=id), Output([5])
        priced.propose([Item(seq, 1, 0)], [output])
        found.append(len(output.draft))
        seq.tokens.append(5)
        seq.computed, seq.draft = 1, output.draft
        priced.propose([Item(seq, 1 + len(seq.draft), 1)], [Output([6])])
    assert found[0] > found[-1] == 0
    for _ in range(1000):
        priced.propose([Item(sequence([1], id=99), 2, 0)], [Output()])
    output = Output([5])
    priced.propose([Item(sequence([1], id=100), 1, 0)], [output])
    assert len(output.draft) == found[0], "and it returns"


def test_the_proposer_is_told_what_cannot_pay() -> None:
    sure = Sure(*[0.9] * 64)
    priced = PricedDrafts(sure, clock=lambda: 0.0)
    priced.propose(
        [Item(sequence([1], id=i), 1, 0) for i in range(64)], [Output([5]) for _ in range(64)]
    )
    assert 0.9 < sure.least < 1.1
    drafter, seq = SuffixDrafts(), sequence([1, 2, 3, 4, 1, 2])
    output = Output([3])
    drafter.propose([Item(seq, 1, 0)], [output], 0.99)
    assert output.draft == []
    long = sequence([*TEXT, *TEXT[:LONGEST]], id=2)
    follow(drafter, long, TEXT[LONGEST:30])
    output = Output([30])
    drafter.propose([Item(long, 1, 0)], [output], 0.99)
    assert output.draft[0] == 31, "the longest are always followed"


@pytest.mark.parametrize("speculation", ["suffix", "ngram", "auto"])
def test_served_with_suffixes(speculation: str) -> None:
    """Answers are the same bit for bit, in fewer steps."""
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, logprobs=1)
    found = []
    for each in ("off", speculation):
        llm = LLM(str(GOLDENS / "tiny_llama.gguf"), kv_cache_memory=1 << 22, speculation=each)
        answer = llm.generate("the old house, the old house, the old house", params)[0].outputs[0]
        found.append((answer.text, answer.logprobs))
        stats = llm.built.engine.scheduler.stats()
        assert (stats["accepted_tokens"] > 0) == (each != "off")
    assert found[0] == found[1]


def follower(chance: float, *, wait: float) -> tuple[PricedDrafts, Item]:
    """Drafts beside steps that are launched ahead; one that waits takes `wait` times as long."""
    priced = PricedDrafts(Sure(chance), clock=lambda: 0.0)
    priced.steps_ahead(lambda request: request.params.logprobs is None)
    priced.prices.took_ahead(1, 1.0)
    for _ in range(200):
        priced.prices.took(1, 0, wait)
    return priced, Item(sequence([1]), 1, 0)


@pytest.mark.parametrize(("chance", "wait", "pays"), [(0.97, 2.0, True), (0.5, 1.7, False)])
def test_drafts_must_make_up_for_a_step_that_waits(chance: float, wait: float, pays: bool) -> None:
    priced, item = follower(chance, wait=wait)
    outputs = [Output([5])]
    assert priced.follow([item], outputs, ahead=True, spare=1.0) == pays
    assert outputs[0].draft == [], "a step is under way already"
    assert not priced.follow([item], outputs, ahead=True, spare=1.0, last=True)
    assert bool(outputs[0].draft) == pays
    with_drafts = [Output([5])]
    priced.propose([item], with_drafts)
    assert bool(with_drafts[0].draft) == pays
    item.sequence.request = replace(item.sequence.request, params=SamplingParams(logprobs=1))
    waits_anyway = [Output([5])]
    priced.propose([item], waits_anyway)
    assert waits_anyway[0].draft != []


def test_a_proposer_is_not_asked_where_the_device_leaves_no_time() -> None:
    priced, item = follower(0.97, wait=1.0)
    priced._took = 0.25
    assert not priced.follow([item], [Output([5])], ahead=True, spare=0.4)
    assert priced.follow([item], [Output([5])], ahead=True, spare=0.6)


def test_who_was_not_asked_for_some_tokens_takes_them_in_later() -> None:
    drafter, seq = SuffixDrafts(), sequence([1, 2, 3, 4])
    draft(drafter, seq, 9)
    seq.tokens += [9, 8, 7, 6, 1, 2]
    assert draft(drafter, seq, 3)[:3] == [4, 9, 8]


@pytest.mark.parametrize("ahead", [False, True])
def test_auto_means_suffixes_with_and_without_steps_ahead(ahead: bool) -> None:
    config = EngineConfig(
        model=str(GOLDENS / "tiny_llama.gguf"), kv_cache_memory=1 << 22, speculation="auto"
    )

    def later(ops: Ops) -> Ops:
        if ahead:
            ops.later = lambda *_: None  # type: ignore[attr-defined]
        return ops

    built = make_engine(config, wrap=later)
    assert (built.executor._drafter.prices.rows != ROWS) == ahead  # type: ignore[attr-defined]
    assert (built.engine.async_steps is not None) == ahead
