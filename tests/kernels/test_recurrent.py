"""Recurrent layers: a row has the same bits however its sequence is cut, and they are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grid import ISAS, close, i32, normal, rng
from recurrent_grid import Driver, Mixer, Sequence, alone, recurrence

from pageturner.kernels.base import Batch, StateTables, Tensor
from pageturner.kernels.cpu.native import NativeOps
from pageturner.kernels.cpu.native_module import available_isas
from pageturner.kernels.recurrent import (
    CHUNK,
    Conv,
    GatedNorm,
    Place,
    Rates,
    RecurrentSpec,
    StateRule,
    alloc,
)
from pageturner.kernels.reference import ReferenceOps
from pageturner.kernels.reference_recurrent import ChunkState, linear_end
from tools.record_recurrent import rows, weight

REFERENCE = ReferenceOps()
MIXERS = [
    Mixer("delta"),
    Mixer("delta", "bfloat16", tiled=True),
    Mixer("mamba", "float16"),
    Mixer("conv", "float16"),
]
SIZES = (1, 2, 64, 64)
NAMES = [f"{m.kind}-{m.dtype}" for m in MIXERS]


@pytest.fixture(scope="module", params=["reference", *ISAS])
def ops(request: pytest.FixtureRequest) -> Any:
    return REFERENCE if request.param == "reference" else NativeOps(3, request.param)


@pytest.fixture(scope="module")
def goldens() -> Iterator[Any]:
    with np.load(Path(__file__).parents[1] / "goldens" / "recurrent.npz") as found:
        yield found


@pytest.mark.parametrize("mixer", MIXERS, ids=NAMES)
def test_bits_do_not_depend_on_cuts_and_crowds(ops: Any, mixer: Mixer) -> None:
    """Crowds, odd cuts, wrong drafts over boundaries, steps computed twice, and preemption."""
    lengths = (130, 75, 33)
    sequences = [Sequence(mixer.inputs(n, seed=10 * n)) for n in lengths]
    driver, random = Driver(ops, mixer), rng(7)
    while any(seq.computed < n for seq, n in zip(sequences, lengths, strict=True)):
        rows, accepted = [], {}
        for i in random.permutation(len(sequences)):
            left = lengths[i] - sequences[i].computed
            if not left or random.random() < 0.2:
                continue
            if random.random() < 0.1:
                driver.drop(sequences[i])
                left = lengths[i] - sequences[i].computed
            count = min(left, int(random.choice([1, 1, 2, 5, 9, 31, 32, 33, 64, 70])))
            if count < 10 and random.random() < 0.5:
                accepted[len(rows)] = int(random.integers(1, count + 1))
            rows.append((sequences[i], count))
        if rows:
            driver.step(rows, accepted, runs=int(random.integers(1, 3)))
    for seq in sequences:
        assert np.array_equal(seq.result, alone(ops, mixer, seq.inputs))


@pytest.mark.parametrize("mixer", MIXERS, ids=NAMES)
def test_token_by_token_is_one_step(ops: Any, mixer: Mixer) -> None:
    seq, driver = Sequence(mixer.inputs(70)), Driver(ops, mixer)
    for _ in range(70):
        driver.step([(seq, 1)])
    assert np.array_equal(seq.result, alone(ops, mixer, seq.inputs))


@pytest.mark.parametrize("mixer", MIXERS, ids=NAMES)
def test_bits_do_not_depend_on_threads(mixer: Mixer) -> None:
    inputs = mixer.inputs(100)
    for isa in available_isas():
        outs = [alone(NativeOps(threads, isa), mixer, inputs) for threads in (1, 2, 5, 8)]
        assert all(np.array_equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_error_to_the_recurrence(ops: Any, kind: str, strong: bool) -> None:
    sizes = (1, 2, 64, 64) if ops.name == "reference" else (2, 4, 128, 128)
    mixer = Mixer(kind, strong=strong, sizes=sizes)
    inputs = mixer.inputs(130 if ops.name == "reference" else 512)
    out, exact = alone(ops, mixer, inputs), recurrence(mixer, inputs)
    most = np.abs(exact).max()
    assert np.abs(out - exact).max() <= 1e-6 * most
    assert np.abs(out - recurrence(mixer, inputs, np.float32)).max() <= 1e-5 * most
    for dtype, bound in (("float16", 1e-3), ("bfloat16", 8e-3)):
        half = alone(ops, replace(mixer, dtype=dtype), inputs)
        assert np.abs(half - exact).max() <= bound * most


@pytest.mark.parametrize("mixer", MIXERS, ids=NAMES)
def test_native_against_the_reference(mixer: Mixer) -> None:
    """Outputs, and what states and tails hold."""
    inputs = mixer.inputs(77)
    for isa in available_isas():
        found = []
        for each in (REFERENCE, NativeOps(2, isa)):
            seq, driver = Sequence(inputs), Driver(each, mixer)
            for count in (20, 1, 40, 16):
                driver.step([(seq, count)])
            names = ("state", "past", "k", "u", "g", "x") if mixer.spec.key_heads else ("past", "x")
            parts = []
            for name in names:
                at = seq.slots[2] if name in ("state", "past") else seq.tail[2]
                part = driver.cache.part(name, driver.layer)[at]
                held = {"k": part[..., :13], "u": part[..., :13, :], "g": part[:, :13]}
                part = held.get(name, part[:13] if name == "x" else part)
                if part.dtype == np.uint16:
                    part = (part.astype(np.uint32) << 16).view(np.float32)
                parts.append(part.astype(np.float32))
            found.append([seq.result, *parts])
        bound = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[mixer.dtype]
        for mine, theirs in zip(*found, strict=True):
            close(theirs, mine, bound)


@pytest.mark.parametrize("n", [16, 40, 48, 128])
def test_rows_of_native_against_the_reference(ops: Any, n: int) -> None:
    x, gate = normal(5, 3 * n, seed=1) * 4, normal(5, 3 * n, seed=2) * 30
    a, b = x * 3, gate
    for each in (x, gate):
        each[0, :2] = [0, -100]
    close(ops.l2norm(x, n, 1e-6, 0.3), REFERENCE.l2norm(x, n, 1e-6, 0.3), 3e-6)
    close(ops.gate_mul(x, gate), REFERENCE.gate_mul(x, gate), 1e-6)
    rates = Rates(-np.exp(normal(3 * n, seed=3)), normal(3 * n, seed=4), 0.001, 20.0)
    for gates in (b, None):
        found, expected = (each.linear_gates(a, gates, rates) for each in (ops, REFERENCE))
        for mine, theirs in zip(found, expected, strict=True):
            assert (np.abs(mine - theirs) <= 1e-6 * np.abs(theirs) + 1e-30).all()
    for first in (False, True):
        for act in ("silu", "sigmoid"):
            for size in (n, 3 * n):
                w, norm = normal(size, seed=5), GatedNorm(1e-6, n, first, act)
                mine = ops.gated_norm(x, gate, w, norm)
                close(mine, REFERENCE.gated_norm(x, gate, w, norm), 1e-5)


def test_tables_beyond_the_storage_are_refused() -> None:
    if not available_isas():
        pytest.skip("the native kernels are not built")
    ops, mixer = NativeOps(1), Mixer("delta")
    seq, driver = Sequence(mixer.inputs(70)), Driver(ops, mixer)
    driver.step([(seq, 40)])
    batch = driver.batch([(seq, 30)])
    x, a, b = (each[40:] for each in seq.inputs)
    for name, value, match in (
        ("state_read", [64], "no such slot"),
        ("state_read", [-1], "missing"),
        ("state_writes", [[0, 2, 64]], "no such slot"),
        ("state_writes", [[0, 3, 9]], "does not reach"),
        ("tail_table", [[-1, -1]], "rows before are missing"),
        ("tail_table", [[32, -1]], "no such block"),
        ("tail_table", [[0, -2]], "no such block"),
    ):
        tables = replace(batch.recurrent, **{name: i32(value)})
        place = Place(driver.cache, driver.layer, replace(batch, recurrent=tables))
        with pytest.raises(ValueError, match=match):
            mixer.run(ops, x, a, b, place)
    with pytest.raises(ValueError, match="no such recurrent layer"):
        mixer.run(ops, x, a, b, Place(driver.cache, 2, batch))
    short = replace(driver.cache, states=driver.cache.states[:, :-64].copy())
    with pytest.raises(ValueError, match="another size"):
        mixer.run(ops, x, a, b, Place(short, driver.layer, batch))


def _mixer(name: str) -> Any:
    return lambda parameter, *shape: weight(name, parameter, shape)


def _matrix(ops: Any, values: Any) -> Any:
    data = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
    return ops.pack_weight(Tensor("w", "F32", values.shape, data))


def _one_step(spec: RecurrentSpec, rows: int) -> Place:
    tables = StateTables(i32([-1]), i32(np.zeros((0, 3))), i32([[-1, -1]]))
    at, empty = i32(np.arange(rows)), i32([[0]])
    batch = Batch(at, at, i32([0, rows]), empty[0], empty, at, at[:0], None, tables)
    return Place(alloc(spec, 1, 1), 0, batch)


def _conv(of: Any, channels: int, kernel: int, bias: bool, prefix: str = "conv1d") -> Conv:
    taps = np.ascontiguousarray(of(f"{prefix}.weight", channels, 1, kernel)[:, 0].T)
    return Conv(taps, of(f"{prefix}.bias", channels) if bias else None, kernel == 4)


def test_delta_net_of_transformers(ops: Any, goldens: Any) -> None:
    of, x = _mixer("delta"), rows("delta").astype(np.float32)
    spec = RecurrentSpec(1, 160, 4, 2, 6, 16, 16, "float32")
    place = _one_step(spec, len(x))

    def product(name: str, n: int) -> Any:
        return ops.linear(x, _matrix(ops, of(f"in_proj_{name}.weight", n, 32)))

    y = ops.conv_rows(product("qkv", 160), _conv(of, 160, 4, False), place)
    qkv = ops.l2norm(y[:, :32], 16, 1e-6, 0.25), ops.l2norm(y[:, 32:64], 16, 1e-6, 1.0), y[:, 64:]
    rates = Rates(-np.exp(of("A_log", 6)), of("dt_bias", 6))
    gates = ops.linear_gates(product("a", 6), product("b", 6), rates)
    found = {}
    for tiled in (False, True):
        o = ops.linear_rows(qkv, gates, StateRule(True, tiled), place)
        norm = GatedNorm(1e-6, 16, False)
        o = ops.gated_norm(o, product("z", 96), of("norm.weight", 16), norm)
        found[tiled] = ops.linear(o, _matrix(ops, of("out_proj.weight", 32, 96)))
    close(found[False], goldens["delta"], 2e-5)
    assert np.abs(found[True] - goldens["delta"]).max() > 0.1


@pytest.mark.parametrize(("name", "groups"), [("nemotron", 2), ("granite", 1)])
def test_mamba2_of_transformers(ops: Any, goldens: Any, name: str, groups: int) -> None:
    of, x = _mixer(name), rows(name).astype(np.float32)
    channels = 64 + 32 * groups
    spec = RecurrentSpec(1, channels, 4, groups, 4, 16, 16, "float32")
    place = _one_step(spec, len(x))
    y = ops.linear(x, _matrix(ops, of("in_proj.weight", 64 + channels + 4, 32)))
    z, dt = y[:, :64], np.ascontiguousarray(y[:, 64 + channels :])
    y = ops.conv_rows(y[:, 64 : 64 + channels], _conv(of, channels, 4, True), place)
    qkv = y[:, 64 + 16 * groups :], y[:, 64 : 64 + 16 * groups], y[:, :64]
    rates = Rates(-np.exp(of("A_log", 4)), of("dt_bias", 4), 0.001 if name == "nemotron" else 0.0)
    gates = ops.linear_gates(dt, None, rates)
    o = ops.linear_rows(qkv, gates, StateRule(False, skip=of("D", 4)), place)
    norm = GatedNorm(1e-5 if name == "nemotron" else 1e-6, 64 // groups, True)
    o = ops.gated_norm(o, z, of("norm.weight", 64), norm)
    close(ops.linear(o, _matrix(ops, of("out_proj.weight", 32, 64))), goldens[name], 2e-5)


def test_short_convolution_of_transformers(ops: Any, goldens: Any) -> None:
    of, x = _mixer("lfm2"), rows("lfm2").astype(np.float32)
    place = _one_step(RecurrentSpec(1, 32, 3, dtype="float32"), len(x))
    b, c, x = np.split(ops.linear(x, _matrix(ops, of("in_proj.weight", 96, 32))), 3, axis=1)
    y = c * ops.conv_rows(b * x, _conv(of, 32, 3, False, "conv"), place)
    close(ops.linear(y, _matrix(ops, of("out_proj.weight", 32, 32))), goldens["lfm2"], 2e-5)


# -- mutants: what the tests above must tell from the right thing


def test_decode_by_the_plain_recurrence_has_other_bits(ops: Any) -> None:
    mixer = Mixer("delta")
    inputs = mixer.inputs(70)
    plain, right = recurrence(mixer, inputs, np.float32), alone(ops, mixer, inputs)
    assert np.abs(plain - right).max() < 1e-5 * np.abs(right).max()
    assert (plain != right).any(axis=1).sum() > 60


def test_a_grid_from_the_beginning_of_a_step_has_other_bits() -> None:
    """The state behind 20 rows, as if a chunk ended there."""
    mixer, count = Mixer("delta"), 20
    inputs = mixer.inputs(60)
    right = alone(REFERENCE, mixer, inputs)
    first, driver = Sequence(inputs), Driver(REFERENCE, mixer)
    driver.step([(first, count)])
    chunk = ChunkState(mixer.spec, mixer.rule, np.zeros((4, 32, 48), np.float32))
    place = Place(driver.cache, driver.layer, driver.batch([(first, 1)]))
    chunk.load(place, first.tail[0])
    for rows_of in (chunk.k, chunk.u, chunk.g):
        rows_of[count:] = 0
    state = linear_end(chunk).reshape(4, 32, 3, 16).swapaxes(1, 2)
    driver.cache.part("state", driver.layer)[5] = state
    kept = driver.cache.part("x", driver.layer)[first.tail[0]]
    driver.cache.part("past", driver.layer)[5] = kept[count - 3 : count]
    moved = Sequence(tuple(np.concatenate([x[:CHUNK], x[count:]]) for x in inputs), CHUNK, {1: 5})
    driver.slots.remove(5)
    driver.step([(moved, 40)])
    assert np.abs(moved.result - right[count:]).max() < 1e-5 * np.abs(right).max()
    assert (moved.result != right[count:]).any(axis=1).sum() > 30


def test_a_slot_that_is_written_in_place_is_not_the_same_again() -> None:
    mixer = Mixer("delta")
    seq, driver = Sequence(mixer.inputs(64)), Driver(REFERENCE, mixer)
    driver.step([(seq, 32)])
    batch = driver.batch([(seq, 32)])
    x, a, b = (each[32:] for each in seq.inputs)
    wrong = StateTables(
        batch.recurrent.state_read,
        i32([[0, 2, batch.recurrent.state_read[0]]]),
        batch.recurrent.tail_table,
    )
    place = Place(driver.cache, driver.layer, replace(batch, recurrent=wrong))
    outs = [mixer.run(REFERENCE, x, a, b, place) for _ in range(2)]
    assert not np.array_equal(outs[0], outs[1])
    if available_isas():
        with pytest.raises(ValueError, match="a slot that is read"):
            mixer.run(NativeOps(1), x, a, b, place)
