"""The output head with the choice of tokens in one native call, against its default body: every bit.

The default body does the edits in numpy (kernels/edits.py) and has the backend sample the logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from grid import ISAS, i32, normal, rng, vector, weight

from pageturner.formats import ggml
from pageturner.kernels.base import Tensor
from pageturner.kernels.choosing import ChooseArgs, Head, LogprobsWanted, SamplerOutput
from pageturner.kernels.composites import Composites
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.edits import Allowed, Edit, Edits, Operation, apply_edits, forbid
from pageturner.kernels.reference import ReferenceOps

pytestmark = pytest.mark.skipif(not available_isas(), reason="the native kernels are not built")


def heads(test: Any) -> Any:
    """Heads of some kinds and sizes, and shares of greedy rows."""
    sizes = [("Q8_0", 5001), ("F32", 129), ("Q4_1", 20), ("F32", 1)]
    test = pytest.mark.parametrize(("kind", "vocabulary"), sizes)(test)
    return pytest.mark.parametrize("greedy", [0.0, 0.5, 1.0])(test)


@pytest.fixture(scope="module", params=ISAS)
def crowd(request: pytest.FixtureRequest) -> list[NativeOps]:
    return [NativeOps(threads, request.param) for threads in (1, 3)]


def draw(rows: int, greedy: float) -> tuple[Any, ...]:
    """All parameters at random; `greedy` is the share of rows of temperature 0."""
    dice = rng(3)
    one = np.ones(rows, np.float32)
    temperature = dice.choice([0.3, 1.0, 1.7], rows) * (dice.random(rows) >= greedy)
    top_k = dice.choice([0, 0, 1, 7, 5000], rows)
    top_p, min_p = dice.choice([1.0, 0.9, 0.3], rows), dice.choice([0.0, 0.0, 0.05, 1.0], rows)
    return (
        temperature.astype(np.float32),
        i32(top_k),
        one * top_p.astype(np.float32),
        one * min_p.astype(np.float32),
        dice.random(rows, dtype=np.float32),
    )


@pytest.mark.parametrize("rows", [1, 7, 70])
@heads
def test_choosing_equals_sampling_of_the_logits(
    crowd: list[NativeOps], kind: str, vocabulary: int, greedy: float, rows: int
) -> None:
    x, norm, parameters = 2 * normal(rows, 96), np.ones(96, np.float32), draw(rows, greedy)
    for ops in crowd:
        head = Head(norm, 1e-5, ops.pack_weight(weight(kind, vocabulary, 96)))
        choice = ops.choose(x, head, ChooseArgs(parameters))
        logits = ops.logits(x, head)
        assert np.array_equal(choice.ids, ops.sample(logits, *parameters))
        assert np.array_equal(choice.logits, logits[np.arange(rows), choice.ids])
        assert choice.logprobs is None


def allowed(rows: int, vocabulary: int) -> Allowed:
    """For every seventh row: any token, most, half, the last few, one, none, those of one block. Bits behind
    the vocabulary are at random."""
    dice = rng(4)
    bits = (
        dice.random((rows, -(-vocabulary // 64) * 64))
        < np.resize([1, 0.99, 0.5, 0, 0, 0, 0], rows)[:, None]
    )
    bits[3::7, -70:] |= dice.random(bits[3::7, -70:].shape) < 0.5
    bits[4::7, dice.integers(vocabulary)] = True
    bits[6::7, vocabulary // 128 * 64 :][:, :64] = True
    bits[:, vocabulary:] = dice.random(bits[:, vocabulary:].shape) < 0.5
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint64)


@pytest.mark.parametrize("rows", [1, 70])
@heads
def test_choosing_of_what_is_allowed_equals_sampling_of_the_logits_without_the_rest(
    crowd: list[NativeOps], kind: str, vocabulary: int, greedy: float, rows: int
) -> None:
    x, norm, parameters = 2 * normal(rows, 96), np.ones(96, np.float32), draw(rows, greedy)
    bits = allowed(rows, vocabulary)
    for ops in crowd:
        head = Head(norm, 1e-5, ops.pack_weight(weight(kind, vocabulary, 96)))
        choice = ops.choose(x, head, ChooseArgs(parameters, bits))
        ids, values = choice.ids, choice.logits
        logits = ops.logits(x, head)
        forbid(logits, bits)
        possible = np.isfinite(logits).any(1)
        assert np.array_equal(ids[possible], ops.sample(logits, *parameters)[possible])
        assert np.array_equal(values, np.where(possible, logits[np.arange(rows), ids], -np.inf))
        assert ((ids >= 0) & (ids < vocabulary)).all()
    if rows > 1:
        assert not possible.all()


def near_rows(kind: str, rows: int, columns: int) -> Tensor:
    """Every output stands eight times, and half of the copies have one weight one step off."""
    few = weight(kind, rows // 8, columns)
    data = np.tile(few.data.reshape(rows // 8, -1), (8, 1))
    data[:, ggml.BY_NAME[kind].nbytes // 2] ^= (rng(9).random(rows) < 0.5).astype(np.uint8)
    return Tensor("head", kind, (rows, columns), data.reshape(-1))


@pytest.mark.parametrize("rows", [32, 70])
@pytest.mark.parametrize("bits", [12, 15])
@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q8_W", "Q4_1"])
def test_the_largest_logit_is_found_among_near_ones(
    crowd: list[NativeOps], kind: str, bits: int, rows: int
) -> None:
    """Many greedy rows are multiplied in 8 bits first, which orders near logits wrongly."""
    x, norm, parameters = 2 * normal(rows, 256), np.ones(256, np.float32), draw(rows, 1.0)
    x[1::4] *= np.float32(1e-4)
    # beside so large a one 8 bits leave little of the rest of its group
    x[2::4, ::32] *= np.float32(300)
    x[3] = 0
    tensor = replace(near_rows(kind, 5000, 256), bits=bits)
    for ops in crowd:
        head = Head(norm, 1e-5, ops.pack_weight(tensor))
        for _ in range(2):  # the lengths of weights are computed once
            choice = ops.choose(x, head, ChooseArgs(parameters))
            logits = ops.logits(x, head)
            assert np.array_equal(choice.ids, logits.argmax(1))
            assert np.array_equal(choice.logits, logits.max(1))
        alone = [
            ops.choose(x[i : i + 1], head, ChooseArgs(tuple(p[i : i + 1] for p in parameters)))
            for i in range(rows)
        ]
        assert np.array_equal(choice.ids, np.concatenate([one.ids for one in alone]))


def test_allowed_of_another_shape_is_refused(crowd: list[NativeOps]) -> None:
    head = Head(np.ones(32, np.float32), 1e-5, crowd[0].pack_weight(weight("F32", 129, 32)))
    for shape in ((2, 2), (1, 3)):
        with pytest.raises(ValueError, match="allowed"):
            crowd[0].choose(
                normal(2, 32), head, ChooseArgs(draw(2, 1.0), np.zeros(shape, np.uint64))
            )


def test_equal_logits_go_to_the_lowest_id(crowd: list[NativeOps]) -> None:
    """Every output is there three times, far apart; and rows of zeros, whose logits are all equal."""
    values = np.tile(normal(700, 32), (3, 1))
    tensor = Tensor("head", "F32", values.shape, values.reshape(-1).view(np.uint8))
    x = normal(40, 32)
    x[[3, 20]] = 0
    zero = np.zeros(40, np.float32)
    for ops in crowd:
        head = Head(np.ones(32, np.float32), 1e-5, ops.pack_weight(tensor))
        choice = ops.choose(x, head, ChooseArgs((zero, i32(zero), zero + 1, zero, zero)))
        ids, best = choice.ids, choice.logits
        logits = ops.logits(x, head)
        assert np.array_equal(ids, np.argmax(logits, axis=1))
        assert np.array_equal(best, logits.max(axis=1))
        assert ids.max() < 700
        assert ids[3] == ids[20] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_numbers_give_none(crowd: list[NativeOps], temperature: float) -> None:
    x, zero = normal(6, 32), np.zeros(6, np.float32)
    x[2], x[4, 7] = np.nan, np.inf
    for ops in crowd:
        head = Head(np.ones(32, np.float32), 1e-5, ops.pack_weight(weight("F32", 200, 32)))
        rest = (zero + np.float32(temperature), i32(zero), zero + 1, zero, zero + np.float32(0.5))
        with np.errstate(invalid="ignore"):
            choice = ops.choose(x, head, ChooseArgs(rest))
        assert np.isfinite(choice.logits).tolist() == [True, True, False, True, False, True]
        assert ((choice.ids >= 0) & (choice.ids < 200)).all()


# -- edits -------------------------------------------------------------------------------------------------


def some_edits(rows: int, vocabulary: int, seed: int = 5) -> Edits:
    """Every operation, alone and with others, of few ids and of many, with ids that are there several times;
    every fifth row has none."""
    dice = rng(seed)
    ids = lambda most: dice.integers(vocabulary, size=dice.integers(most + 1)).tolist()  # noqa: E731

    def edit(operation: Operation) -> Edit:
        match operation:
            case Operation.ADD:
                mine = ids(30)
                return Edit(operation, mine, dice.normal(size=len(mine)).tolist())
            case Operation.ALLOW:
                return Edit(operation, [*ids(3 * vocabulary), *ids(9)], 0.0)
            case Operation.FORCE:
                return Edit(operation, tuple(ids(1)), float(dice.normal()))
            case Operation.REPETITION:
                return Edit(operation, ids(400), float(dice.choice([1.3, 0.7, 2.0])))
        return Edit(operation, ids(200), float(dice.normal()))

    kinds = [o for o in Operation if o is not Operation.FORCE] * 3 + [Operation.FORCE]
    return [
        [edit(kinds[i]) for i in dice.integers(len(kinds), size=dice.integers(1, 6))]
        if r % 5
        else []
        for r in range(rows)
    ]


def both(
    ops: NativeOps, x: np.ndarray, head: Head, *rest: Any
) -> tuple[SamplerOutput, SamplerOutput]:
    with np.errstate(invalid="ignore"):
        args = ChooseArgs(*rest)
        return ops.choose(x, head, args), Composites.choose(ops, x, head, args)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 70])
@heads
def test_edits_are_those_of_the_definition(
    crowd: list[NativeOps], kind: str, vocabulary: int, greedy: float, rows: int, masked: bool
) -> None:
    x, parameters = 2 * normal(rows, 96), draw(rows, greedy)
    bits = allowed(rows, vocabulary) if masked else None
    edits = some_edits(rows, vocabulary)
    for ops in crowd:
        head = Head(np.ones(96, np.float32), 1e-5, ops.pack_weight(weight(kind, vocabulary, 96)))
        found, expected = both(ops, x, head, parameters, bits, edits)
        possible = ~np.isneginf(expected.logits)
        assert np.array_equal(found.ids[possible], expected.ids[possible])
        assert np.array_equal(found.logits, expected.logits)
        logits = ops.logits(x, head)
        plain = logits.copy()
        apply_edits(logits, bits, edits)
        assert np.array_equal(np.isneginf(logits).all(1), ~possible)
        if vocabulary > 1000 and rows > 60:
            assert 5 < possible.sum() < rows or not masked
            changed = (plain != logits).any(1)
            assert changed.sum() >= rows // 2
            assert not changed[::5].any() or masked


@pytest.mark.parametrize("greedy", [0.0, 1.0])
@pytest.mark.parametrize("name", ["norm with a bias", "soft cap", "both", "bias"])
def test_heads_of_other_families(crowd: list[NativeOps], name: str, greedy: float) -> None:
    rows, vocabulary = 33, 1003
    x, parameters, edits = 2 * normal(rows, 96), draw(rows, greedy), some_edits(rows, vocabulary)
    for ops in crowd:
        norm, bias = (ops.pack_weight(vector(96, seed=n)) for n in (1, 2))
        head = Head(norm, 1e-5, ops.pack_weight(weight("Q8_0", vocabulary, 96)))
        head = head if name == "soft cap" else replace(head, norm_bias=bias)
        head = head if name == "norm with a bias" else replace(head, soft_cap=3.0)
        if name == "bias":
            plain = ops.logits(x, replace(head, soft_cap=0.0)).copy()
            head = replace(head, soft_cap=0.0, bias=ops.pack_weight(vector(vocabulary, seed=3)))
            assert np.array_equal(ops.logits(x, head), plain + head.bias)
        assert np.array_equal(ops.logits(x, head), Composites.logits(ops, x, head))
        for rest in (
            (),
            (allowed(rows, vocabulary), edits),
            (None, edits, logprobs_wanted(rows, vocabulary)),
        ):
            found, expected = both(ops, x, head, parameters, *rest)
            possible = ~np.isneginf(expected.logits)
            assert np.array_equal(found.ids[possible], expected.ids[possible])
            assert np.array_equal(found.logits, expected.logits)


def logprobs_wanted(rows: int, vocabulary: int) -> LogprobsWanted:
    """Of each seven rows two have nothing to tell, two search, and one of these tells logprobs too."""
    top = np.resize([-1, 0, 3, 20, -1, 5, 1], rows)
    candidates = np.resize([0, 0, 0, 0, 6, 40, 0], rows)
    return LogprobsWanted(i32(np.minimum(top, vocabulary)), i32(np.minimum(candidates, vocabulary)))


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@heads
def test_what_is_told_is_that_of_the_definition(
    crowd: list[NativeOps], kind: str, vocabulary: int, greedy: float, masked: bool, edited: bool
) -> None:
    rows = 70
    x, parameters, wanted = (
        2 * normal(rows, 96),
        draw(rows, greedy),
        logprobs_wanted(rows, vocabulary),
    )
    bits = allowed(rows, vocabulary) if masked else None
    edits = some_edits(rows, vocabulary) if edited else None
    for ops in crowd:
        head = Head(np.ones(96, np.float32), 1e-5, ops.pack_weight(weight(kind, vocabulary, 96)))
        found, expected = both(ops, x, head, parameters, bits, edits, wanted)
        possible = ~np.isneginf(expected.logits)
        assert np.array_equal(found.ids[possible], expected.ids[possible])
        assert np.array_equal(found.logits, expected.logits)
        a, b = found.logprobs, expected.logprobs
        assert a is not None
        assert b is not None
        for r, (top, best) in enumerate(zip(wanted.top, wanted.candidates, strict=True)):
            if top >= 0 or best:
                assert a.lse[r] == b.lse[r]
            if top >= 0 and not best and possible[r]:
                assert a.chosen[r] == b.chosen[r]
            for mine, theirs in zip(a.top, b.top, strict=True):
                assert np.array_equal(mine[r, : max(top, 0)], theirs[r, : max(top, 0)])
            some = np.isfinite(b.candidates[1][r, :best])
            assert np.array_equal(np.isfinite(a.candidates[1][r, :best]), some)
            for mine, theirs in zip(a.candidates, b.candidates, strict=True):
                assert np.array_equal(mine[r, :best][some], theirs[r, :best][some])


def test_rows_do_not_depend_on_their_neighbours_edits(crowd: list[NativeOps]) -> None:
    rows, vocabulary = 21, 1003
    x, parameters, edits = 2 * normal(rows, 96), draw(rows, 0.5), some_edits(rows, vocabulary)
    wanted, bits = logprobs_wanted(rows, vocabulary), allowed(rows, vocabulary)
    for ops in crowd:
        head = Head(np.ones(96, np.float32), 1e-5, ops.pack_weight(weight("Q8_0", vocabulary, 96)))
        together = ops.choose(x, head, ChooseArgs(parameters, bits, edits, wanted))
        for r in range(rows):
            one = slice(r, r + 1)
            mine = LogprobsWanted(wanted.top[one], wanted.candidates[one])
            alone = ops.choose(
                x[one],
                head,
                ChooseArgs(tuple(p[one] for p in parameters), bits[one], edits[one], mine),
            )
            assert alone.logits[0] == together.logits[r]
            assert alone.ids[0] == together.ids[r] or np.isneginf(alone.logits[0])


def test_the_definition_by_hand() -> None:
    def of(*edits: Edit, row: tuple[float, ...] = (4.0, -1.0, 4.0, -1.0)) -> list[float]:
        logits = np.array([row], np.float32)
        apply_edits(logits, None, [list(edits)])
        return logits[0].tolist()

    inf = np.inf
    assert of(Edit(Operation.ALLOW, [0, 3])) == [4, -inf, -inf, -1]
    assert of(Edit(Operation.FORBID, (0, 3))) == [-inf, -1, 4, -inf]
    assert of(Edit(Operation.FORBID, [1]), Edit(Operation.FORCE, [1], 0.5)) == [
        -inf,
        0.5,
        -inf,
        -inf,
    ]
    assert of(Edit(Operation.FORCE, [1], 0.5), Edit(Operation.FORBID, [1])) == [-inf] * 4
    assert of(Edit(Operation.ADD, [1, 1, 2], [1.0, 2.0, 0.5])) == [4, 2, 4.5, -1]
    assert of(Edit(Operation.REPETITION, [0, 1, 0, 1], 2.0)) == [2, -2, 4, -1]
    assert of(Edit(Operation.FREQUENCY, [0, 1, 0], 0.5)) == [3, -1.5, 4, -1]
    assert of(Edit(Operation.PRESENCE, [0, 1, 0], 0.5)) == [3.5, -1.5, 4, -1]
    assert of(Edit(Operation.ADD, [3], [5.0]), Edit(Operation.REPETITION, [3], 2.0)) == [
        4,
        -1,
        4,
        2,
    ]
    assert of(Edit(Operation.REPETITION, [3], 2.0), Edit(Operation.ADD, [3], [5.0])) == [
        4,
        -1,
        4,
        3,
    ]
    assert of() == [4, -1, 4, -1]


@pytest.mark.parametrize("token", [129, -1, 2**40])
@pytest.mark.parametrize("operation", Operation)
def test_a_token_outside_of_the_vocabulary_is_refused(
    crowd: list[NativeOps], operation: Operation, token: int
) -> None:
    value: Any = [0.0, 0.0] if operation is Operation.ADD else 1.0
    for ops in (*crowd, ReferenceOps()):
        head = Head(np.ones(32, np.float32), 1e-5, ops.pack_weight(weight("F32", 129, 32)))
        edits: Edits = [[], [Edit(operation, [3, token], value)]]
        with pytest.raises(ValueError, match="no such token"):
            ops.choose(normal(2, 32), head, ChooseArgs(draw(2, 1.0), None, edits))


def test_malformed_questions_are_refused(crowd: list[NativeOps]) -> None:
    ops = crowd[0]
    head = Head(np.ones(32, np.float32), 1e-5, ops.pack_weight(weight("F32", 129, 32)))
    wrong: list[Any] = [
        [[]],  # one list for two rows
        [[], [(9, [1], 0.0)]],
        [[], [(-1, [1], 0.0)]],
        [[], [(1, [1])]],
        [[], [(3, [1, 2], [0.5])]],
        [[], [(1, {1}, 0.0)]],
        [[], 7],
    ]
    for edits in wrong:
        with pytest.raises(ValueError, match="edits"):
            ops.choose(normal(2, 32), head, ChooseArgs(draw(2, 1.0), None, edits))
    for bad in ([[], [(1, ["a"], 0.0)]], [[], [(4, [1], "a")]]):
        with pytest.raises(TypeError):
            ops.choose(normal(2, 32), head, ChooseArgs(draw(2, 1.0), None, bad))
    for top, candidates in (((-2, 0), (0, 0)), ((0, 0), (-1, 0)), ((130, 0), (0, 0)), ((0,), (0,))):
        with pytest.raises(ValueError, match="logprobs"):
            ops.choose(
                normal(2, 32),
                head,
                ChooseArgs(draw(2, 1.0), None, None, LogprobsWanted(i32(top), i32(candidates))),
            )
    with pytest.raises(ValueError, match="head"):
        ops.choose(
            normal(2, 32),
            replace(head, norm_bias=np.ones(31, np.float32)),
            ChooseArgs(draw(2, 1.0)),
        )


def test_a_row_of_no_numbers_is_told_without_harm(crowd: list[NativeOps]) -> None:
    """The memory of a call is that of calls before it: nothing in it may be taken for an id."""
    x = normal(4, 32)
    x[1] = np.nan
    wanted = LogprobsWanted(i32([2, 2, -1, 2]), i32([0, 0, 3, 3]))
    for ops in crowd:
        ops.linear(1e30 + normal(64, 64), ops.pack_weight(weight("F32", 5000, 64)))
        head = Head(np.ones(32, np.float32), 1e-5, ops.pack_weight(weight("F32", 300, 32)))
        with np.errstate(invalid="ignore"):
            choice = ops.choose(x, head, ChooseArgs(draw(4, 0.5), None, some_edits(4, 300), wanted))
            many = ops.top_logprobs(np.full((50, 300), np.nan, np.float32), 7)
        assert choice.logprobs is not None
        assert np.isfinite(choice.logprobs.lse).tolist() == [True, False, True, True]
        assert np.isnan(many[0]).all()
        assert np.isnan(many[2]).all()
        assert not many[1].any()
