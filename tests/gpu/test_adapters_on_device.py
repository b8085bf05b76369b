"""LoRA adapters on the interpreted device: beside Transformers and the reference, against themselves in other
steps, and what becomes of their memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pageturner.errors import EngineFault
from pageturner.executor.adapters import read_adapter
from pageturner.ipc.adapter_messages import UnloadAdapter
from pageturner.kernels.adapters import FIELDS, AdapterWeights
from pageturner.kernels.gpu import adapters as module
from pageturner.kernels.gpu.adapter_rows import shape_of
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.steps import pad
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model
from pageturner.models.lora import load_adapter, read_folder
from pageturner.params import SamplingParams
from pageturner.request import Request
from support.adapters import ALL, TOP, random_weights, write_adapter

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

from support import decoding, engines  # noqa: E402
from support.adapted_product import INPUTS, Products  # noqa: E402
from support.decoding import Decoding, backend  # noqa: E402
from support.engines import GOLDENS, Model, Setup, answers  # noqa: E402

slow = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def no_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a device are poisoned by its driver."""
    for where in (decoding, engines):
        monkeypatch.setattr(where, "poison_blocks", lambda kv, blocks: None)


def device(**options: Any) -> GpuOps:
    return GpuOps(fake_gpu.FakeDriver(), 64 << 20, **options)


# -- models --------------------------------------------------------------------------------------------------
OTHERS = ("llama3_head", "qwen2", "gemma2", "mixtral", "gpt2")
FAMILIES, ADAPTERS = GOLDENS / "families", GOLDENS / "adapters"


@pytest.mark.parametrize(
    "name",
    ["llama3", *(pytest.param(one, marks=slow) for one in OTHERS)],
)
def test_logits_equal_transformers_with_peft(name: str) -> None:
    ops = device(graphs=False)
    decoder = load_model(FAMILIES / name.removesuffix("_head"), ops, dtype="float32")
    decoder.adapters["a"] = decoder.pack_adapter(
        load_adapter(read_folder(ADAPTERS / name), decoder.spec)
    )
    truth = np.load(ADAPTERS / name / "golden.npz")
    got = Decoding(decoder, ops, adapters={"p": "a"}).step([("p", truth["prompt_0"].tolist())])[0]
    np.testing.assert_allclose(got[-8:], truth["logits_0"], atol=1e-4, rtol=0)


PROMPTS = {
    "all": [5, 9, 33, 71, 8],
    "attention": [7] * 9,
    "none": list(range(3, 9)),
    "mlp": [9, 8, 7],
    "large": [5, 9, 33, 71, 8],
    "again": [5, 9, 33],
}
WHO = {"all": "a", "attention": "b", "mlp": "c", "large": "d", "again": "a"}
OF = {
    "a": ((*FIELDS, *TOP), 4, "F32"),
    "b": (("q", "v"), 8, "BF16"),
    "c": (("gate", "down"), 3, "F16"),
    "d": (FIELDS, 37, "BF16"),
}


def adapted(family: str, ops: Any, dtype: str) -> Decoder:
    """A model with four adapters of different products, ranks and types."""
    decoder = load_model(FAMILIES / family, ops, dtype=dtype)
    for seed, (name, (fields, rank, kind)) in enumerate(OF.items()):
        weights = random_weights(decoder.spec, fields, rank, seed, kind)
        decoder.adapters[name] = decoder.pack_adapter(weights)
    return decoder


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=slow)
        for family, dtype in (("llama3", "auto"), ("gemma2", "float32"), ("qwen2", "auto"))
    ],
)
def test_a_mix_of_adapters_changes_no_bit(family: str, dtype: str) -> None:
    """Alone, in a mix, in chunks and recorded; and who has none has the bits of the model without any."""
    ops = device(graphs=False)
    decoder = adapted(family, ops, dtype)
    mixed = Decoding(decoder, ops, adapters=WHO).step(list(PROMPTS.items()))
    for (name, prompt), rows in zip(PROMPTS.items(), mixed, strict=True):
        assert (Decoding(decoder, ops, adapters=WHO).step([(name, prompt)])[0] == rows).all(), name
    plain = Decoding(decoder, ops).step([("none", PROMPTS["none"]), ("all", PROMPTS["all"])])
    assert (plain[0] == mixed[2]).all()
    assert np.abs(plain[1] - mixed[0]).max() > 0.1
    assert (mixed[0][:3] == mixed[-1]).all()
    ops.graphs = ops.graphs_of()
    crowd, got = Decoding(decoder, ops, adapters=WHO), []
    for at in range(5):  # all but the first are replayed
        chunks = [(name, PROMPTS[name][at : at + 1]) for name in ("all", "attention", "none")]
        got.append(crowd.step(chunks)[0])
    assert (np.concatenate(got) == mixed[0]).all()
    assert ops.driver.replayed >= 4
    expected = Decoding(
        adapted(family, backend("reference"), dtype), backend("reference"), adapters=WHO
    )
    for mine, theirs in zip(mixed, expected.step(list(PROMPTS.items())), strict=True):
        assert (
            np.abs(mine - theirs).max()
            < (1e-4 if dtype == "float32" else 5e-2) * np.abs(theirs).max()
        )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_recording_serves_other_adapters_of_the_same_ranks() -> None:
    ops = device()
    decoder = load_model(GOLDENS / "tiny_llama.gguf", ops, dtype="float32")
    for seed, name in enumerate("abc"):
        decoder.adapters[name] = decoder.pack_adapter(
            random_weights(decoder.spec, ALL, 5 + seed, seed)
        )
    decoder.adapters["d"] = decoder.pack_adapter(random_weights(decoder.spec, ("q",), 5, 9))
    who = {"1": "a", "2": "b", "3": "c", "4": "d", "5": "d"}
    runs, found = Decoding(decoder, ops, adapters=who), {}
    for name in who:
        found[name] = [runs.step([(name, [token])])[0] for token in (5, 9)]
    assert ops.graphs is not None
    assert len(ops.graphs.recorded) == 2  # of a, b and c, and of d
    ops.graphs = None
    runs = Decoding(decoder, ops, adapters=who)
    for name in "25":
        for token, rows in zip((5, 9), found[name], strict=True):
            assert (runs.step([(name, [token])])[0] == rows).all()


def test_a_step_that_is_padded_has_rows_without_adapters() -> None:
    batch = grid.batch([(4, 1), (7, 1), (2, 1)], 16, 4)
    batch.adapters = ["a", None, "b"]
    assert pad(batch, 8, 8).adapters == ["a", None, "b", None, None, None, None, None]
    assert shape_of(None) == shape_of([None]) == ()


# -- engines -------------------------------------------------------------------------------------------------
def requests(digests: list[str]) -> list[Request]:
    prompts = (
        (5, 9, 33, 7, 1, 60, 2),
        (8, 8, 21),
        (40, 2, 3, 9, 9, 17, 30, 4, 6),
        (11, 12, 13, 14),
    )
    params = [
        SamplingParams(max_tokens=4 + id, temperature=0.0, ignore_eos=True) for id in range(4)
    ]
    return [Request(id, prompts[id], params[id], adapter=digests[id]) for id in range(4)]


class Served:
    """A tiny model with three adapters, of which two are in memory."""

    def __init__(self, ops: Any, folder: Path) -> None:
        self.model = Model(GOLDENS / "tiny_llama.gguf", ops, dtype="float32", kv_dtype="float32")
        fields = {"a": (*ALL, *TOP), "b": ("q", "v"), "c": ("o", "gate", "down")}
        self.model.adapters = {
            name: write_adapter(
                folder / name,
                self.model.decoder.spec,
                of,
                3 + seed,
                seed,
                ("F32", "BF16", "F16")[seed],
            )
            for seed, (name, of) in enumerate(fields.items())
        }
        self.requests = requests(
            ["", *(read_folder(one).digest for one in self.model.adapters.values())]
        )

    def engine(self, ahead: bool) -> Any:
        return self.model.engine(Setup(token_budget=12, kv_tokens=256, adapters=2, ahead=ahead))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_gives_the_references_tokens_and_memory_comes_back(tmp_path: Path) -> None:
    theirs = Served(ReferenceOps(), tmp_path)
    expected = answers(theirs.engine(False), theirs.requests, spread=1)
    here = Served(device(), tmp_path)
    driver = here.model.ops.driver  # type: ignore[attr-defined]
    for ahead in (False, True):
        engine = here.engine(ahead)
        found = answers(engine, here.requests, spread=1)
        assert [one.tokens for one in found.values()] == [one.tokens for one in expected.values()]
        assert engine.adapters.stats()["adapter_evictions"] > 0
        assert len(driver.kept) == 1 + 2, "what all share, and two adapters"
        for name in here.model.adapters:
            engine.adapters.change(UnloadAdapter(name))
        assert len(driver.kept) == 1
    assert engine.async_steps.made > 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_unloading_lets_those_under_way_finish_first(tmp_path: Path) -> None:
    here = Served(device(), tmp_path)
    driver = here.model.ops.driver  # type: ignore[attr-defined]
    engine = here.engine(True)
    (truth,) = answers(engine, here.requests[1:2]).values()
    again = replace(here.requests[1], id=9)
    events = engine.submit(again)
    for _ in range(3):
        events += engine.step()
    held = len(driver.kept)
    engine.adapters.change(UnloadAdapter("a"))
    assert len(driver.kept) == held
    while engine.has_work:
        events += engine.step()
    assert tuple(token for event in events for token in event.tokens) == truth.tokens
    assert len(driver.kept) == held - 1


# -- memory and refusals -------------------------------------------------------------------------------------
def _wider(weights: AdapterWeights) -> AdapterWeights:
    pair = weights.layers[0]["o"]
    return replace(weights, layers=({"o": replace(pair, a=np.repeat(pair.a, 2, axis=1))},))


BAD: dict[str, tuple[Callable[[AdapterWeights], AdapterWeights], str]] = {
    "another width": (_wider, "do not fit 'o' of layer 0"),
    "a product that is not there": (
        lambda w: replace(w, layers=({"up": w.layers[0]["o"]},)),
        "has no 'up'",
    ),
    "a layer too many": (lambda w: replace(w, layers=w.layers * 2), "no such layer"),
    "another vocabulary": (lambda w: replace(w, head=replace(w.head, b=w.head.b[:-1])), "the head"),  # type: ignore[union-attr, type-var]
    "tokens too few": (
        lambda w: replace(w, embed=replace(w.embed, a=w.embed.a[:-1])),
        "the embedding",
    ),  # type: ignore[union-attr, type-var]
    "no scale": (
        lambda w: replace(w, layers=({"o": replace(w.layers[0]["o"], scale=np.inf)},)),
        "no number",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_and_takes_no_memory(case: str) -> None:
    here, (spoil, told) = Products(fake_gpu.FakeDriver()), BAD[case]
    before = here.ops.driver.memory()
    with pytest.raises(ValueError, match=told):
        here.ops.pack_adapter(spoil(here.weights("F32", 4)), here.stack)
    assert here.ops.driver.memory() == before


def test_more_tiles_than_have_room_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOM", 4 << 10)
    small = Products(fake_gpu.FakeDriver())
    few, x = small.ops.pack_adapter(small.weights("BF16", 9), small.stack), grid.normal(40, INPUTS)
    found = small.adapt(x, [few] * 40)
    assert small.ops.driver.launched.count("lora_expand.fp32.bf16") == 2
    for row in (0, 31, 39):
        assert (found[row] == small.adapt(x[row : row + 1], [few])).all()


def test_a_rank_too_large_is_refused() -> None:
    here = Products(fake_gpu.FakeDriver())
    with pytest.raises(ValueError, match="a rank is 1 to 256, not 257"):
        here.ops.pack_adapter(here.weights("F32", 257), here.stack)


def test_a_full_device_refuses_the_adapter_and_nothing_else(tmp_path: Path) -> None:
    ops = device(graphs=False)
    decoder = load_model(GOLDENS / "tiny_llama.gguf", ops, dtype="float32")
    folder = write_adapter(tmp_path / "a", decoder.spec, ALL)
    ops.driver.total -= ops.driver.memory()[0] - 1000
    with pytest.raises(EngineFault, match="there is no memory for it") as fault:
        read_adapter(decoder, folder)
    assert fault.value.code == "adapter_memory"


def test_memory_is_given_back_with_the_adapter_and_any_thread_may_pack() -> None:
    here = Products(fake_gpu.FakeDriver())
    found: list[Any] = []

    def pack() -> None:
        found.append(here.ops.pack_adapter(here.weights("F16", 4), here.stack))

    pack()
    before = here.ops.driver.memory()[0]
    here.ops.driver.begin_recording()  # of the thread that steps
    thread = threading.Thread(target=pack)
    thread.start()
    thread.join()
    here.ops.driver.end_recording()
    assert before - here.ops.driver.memory()[0] == found[1].nbytes
    x = grid.normal(2, INPUTS)
    assert (here.adapt(x, [found[0]] * 2) == here.adapt(x, [found[1]] * 2)).all()
    del found[1]
    assert here.ops.driver.memory()[0] == before
