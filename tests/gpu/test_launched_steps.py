"""Steps that are launched with the choice of their tokens: one upload, one replay and one download. They give
the tokens and bits of plain steps, whatever their rows. The device reads the tokens of the step before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pageturner.errors import EngineFault
from pageturner.kernels.base import Batch
from pageturner.kernels.choosing import Draw, SamplerOutput
from pageturner.kernels.gpu import graphs
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from tests.kernels import grid  # noqa: E402

from support.adapters import ALL, random_weights  # noqa: E402
from support.engines import GOLDENS  # noqa: E402

pytestmark = pytest.mark.timeout(600)
BLOCK, BLOCKS, WIDTH = 16, 100, 24
Run = tuple[int, int]  # positions that are there already, and rows


class Driver(fake_gpu.FakeDriver):
    """One that counts what the host asks for. full: no recording fits."""

    full = False

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, int] = {}

    def count(self, what: str) -> None:
        self.asked[what] = self.asked.get(what, 0) + 1

    def upload(self, address: int, data: NDArray[Any]) -> None:
        self.count("upload")
        super().upload(address, data)

    def download_later(self, nbytes: int, address: int) -> Any:
        self.count("download")
        return super().download_later(nbytes, address)

    def copy(self, *given: int) -> None:
        self.count("copy")
        super().copy(*given)

    def replay(self, graph: Any) -> None:
        self.count("replay")
        launched = len(self.launched)
        super().replay(graph)
        del self.launched[launched:]

    def end_recording(self) -> Any:
        graph = super().end_recording()
        if self.full:
            raise EngineFault("gpu_memory", "no room for a recording")
        return graph


class Steps:
    """Steps of sequences that have random keys and values; sequence s has WIDTH blocks of its own."""

    def __init__(self, graphs: bool, model: str = "tiny_llama.gguf", windows: bool = False) -> None:
        self.driver = Driver()
        self.ops = GpuOps(self.driver, 64 << 20, graphs)
        self.decoder: Decoder = load_model(GOLDENS / model, self.ops, dtype="float32")
        specs = [self.decoder.kv_spec(BLOCKS, BLOCK, "float16")]
        if windows:
            specs = [*self.decoder.kv_specs(BLOCKS, BLOCKS, BLOCK, "float16")]
        self.storage = [self.ops.alloc_kv(spec) for spec in specs]
        for seed, kv in enumerate(self.storage):
            values = grid.normal(kv.layer_bytes // 2 * kv.spec.layers, seed=seed).astype(np.float16)
            for address in (kv.keys, kv.values):
                self.driver.upload(address, values)

    def launch(
        self,
        runs: list[Run],
        tokens: Any,
        draw: Draw,
        wanted: list[int] | None = None,
        adapters: str = "",
    ) -> Any:
        """wanted: the last row of each sequence, if not said. adapters: a letter for each sequence, or ."""
        batch = batch_of(runs, tokens, wanted)
        batch.adapters = self.decoder.adapters_of([name.strip(".") for name in adapters])
        beside = None
        if len(self.storage) > 1:
            beside = batch_of(runs, tokens, wanted, BLOCKS - 1), self.storage[1]
        self.driver.asked.clear()
        self.driver.launched.clear()
        head = self.decoder.head
        return self.ops.launch_step(self.decoder.stack, batch, self.storage[0], beside, head, draw)

    def step(self, *given: Any) -> tuple[list[int], bytes]:
        """Tokens, and the bytes of their logits."""
        found: SamplerOutput = self.ops.collect(self.launch(*given))
        return found.ids.tolist(), found.logits.tobytes()

    def kept(self) -> bytes:
        """All keys and values."""
        whole = b""
        for kv in self.storage:
            for address in (kv.keys, kv.values):
                out = np.empty(kv.layer_bytes * kv.spec.layers, np.uint8)
                self.driver.download(out, address)
                whole += out.tobytes()
        return whole


def batch_of(
    runs: list[Run], tokens: Any, wanted: list[int] | None = None, flip: int = -1
) -> Batch:
    starts = np.cumsum([0, *(rows for _, rows in runs)]).astype(np.int32)
    positions = np.concatenate([np.arange(at, at + rows) for at, rows in runs]).astype(np.int32)
    table = np.arange(len(runs) * WIDTH, dtype=np.int32).reshape(-1, WIDTH)
    table = table if flip < 0 else flip - table
    owner = np.repeat(np.arange(len(runs)), np.diff(starts))
    slots = table[owner, positions // BLOCK] * BLOCK + positions % BLOCK
    asked = starts[1:] - 1 if wanted is None else wanted
    contexts = [at + rows for at, rows in runs]
    return Batch(
        grid.i32(tokens), positions, starts, grid.i32(contexts), table, slots, grid.i32(asked)
    )


def draw_of(rows: int, top_k: int = 0, temperature: float = 0.8) -> Draw:
    noise = np.random.default_rng(rows).random(rows, np.float32)
    heat, zeros = np.full(rows, temperature, np.float32), np.zeros(rows, np.float32)
    return heat, np.full(rows, top_k, np.int32), np.ones(rows, np.float32), zeros, noise


ONE_OF_EACH = {"upload": 1, "replay": 1, "download": 1}


def test_a_step_is_one_upload_one_replay_and_one_download() -> None:
    plain, recorded = Steps(False), Steps(True)
    for turn in range(4):
        given = [(300 + turn, 1), (9 + turn, 1), (turn, 1)], [7, 8, 9], draw_of(3)
        assert recorded.step(*given) == plain.step(*given)
        assert recorded.driver.asked == ONE_OF_EACH or turn == 0
        assert recorded.driver.launched == [] or turn == 0
    assert recorded.kept() == plain.kept()  # the row that fills the recording up wrote nowhere
    assert len(recorded.ops.graphs.recorded) == 1


def test_layers_with_a_window_share_the_upload() -> None:
    plain, recorded = (Steps(one, "families/gemma3", windows=True) for one in (False, True))
    for turn in range(3):
        given = [(300 + turn, 1), (9 + turn, 1)], [7, 8], draw_of(2)
        assert recorded.step(*given) == plain.step(*given)
    assert recorded.driver.asked == ONE_OF_EACH
    assert recorded.kept() == plain.kept()


@pytest.mark.parametrize(
    ("graphs", "model"),
    [
        (True, "tiny_llama.gguf"),
        pytest.param(True, "tiny_llama_quant.gguf", marks=pytest.mark.slow),
        pytest.param(False, "tiny_llama.gguf", marks=pytest.mark.slow),
    ],
)
def test_tokens_of_the_step_before_are_read_where_they_are(graphs: bool, model: str) -> None:
    ahead, known = Steps(graphs, model), Steps(False, model)
    first, second = [(30, 1), (9, 1), (40, 1)], [(31, 1), (4, 1), (41, 1), (10, 1)]
    for _ in range(3):
        expected = known.step(first, [7, 8, 9], draw_of(3))
        one = ahead.launch(first, [7, 8, 9], draw_of(3))
        unknown = ahead.launch(second, [-1, 5, -3, -2], draw_of(4))
        assert "copy" not in ahead.driver.asked
        found = ahead.ops.collect(one)
        assert (found.ids.tolist(), found.logits.tobytes()) == expected
        a, b, c = expected[0]
        found = ahead.ops.collect(unknown)
        assert (found.ids.tolist(), found.logits.tobytes()) == known.step(
            second, [a, 5, c, b], draw_of(4)
        )


MIXED: dict[str, tuple[list[Run], list[int] | None]] = {
    "prompts": ([(250, 1), (9, 1), (20, 10), (0, 2)], None),
    "a prompt, not to its end": ([(250, 1), (0, 12)], [0]),
    "drafts": ([(254, 4), (9, 4)], list(range(8))),
    "drafts and a prompt": ([(254, 3), (0, 9)], [0, 1, 2, 11]),
}


@pytest.mark.parametrize(
    "name",
    [
        "prompts",
        *(pytest.param(name, marks=pytest.mark.slow) for name in MIXED if name != "prompts"),
    ],
)
def test_steps_with_rows_of_prompts_and_drafts_are_recorded(name: str) -> None:
    runs, wanted = MIXED[name]
    plain, recorded = Steps(False), Steps(True)
    draw = draw_of(len(runs) if wanted is None else len(wanted))
    for turn in range(graphs.MIXED_USES + 1):
        here = [(at + turn, count) for at, count in runs]
        if turn == graphs.MIXED_USES and name == "prompts":  # other rows of the same size
            here = [(100, 2), (3, 1), (9, 11), (270, 1)]
        tokens = (np.arange(sum(rows for _, rows in here)) * 5 + turn) % 60
        assert recorded.step(here, tokens, draw, wanted) == plain.step(
            here, tokens, draw, wanted
        ), turn
    assert recorded.kept() == plain.kept()
    assert recorded.driver.asked == ONE_OF_EACH
    assert len(recorded.ops.graphs.recorded) == 1


@pytest.mark.slow
def test_a_recording_knows_which_wanted_rows_have_adapters() -> None:
    """Where none of them had any when it was made, nothing is added behind the last attention."""
    plain, recorded = Steps(False), Steps(True)
    for one in (plain, recorded):
        weights = random_weights(one.decoder.spec, ALL, 5, 3)
        one.decoder.adapters["a"] = one.decoder.pack_adapter(weights)
    runs, tokens = [(20, 1), (0, 2)], [7, 8, 9]
    for wanted, adapters in [([0], ".a")] * graphs.MIXED_USES + [([0], "a.")]:
        given = runs, tokens, draw_of(1), wanted, adapters
        assert recorded.step(*given) == plain.step(*given), adapters
    assert len(recorded.ops.graphs.recorded) == 1


@pytest.mark.slow
def test_a_step_that_cuts_tokens_off_has_a_recording_of_its_own() -> None:
    plain, recorded = Steps(False), Steps(True)
    runs = [(30, 1), (9, 1)]
    for draw in (draw_of(2), draw_of(2, top_k=2), draw_of(2, temperature=0)):
        for _ in range(2):
            assert recorded.step(runs, [7, 8], draw) == plain.step(runs, [7, 8], draw)
    assert sorted(key.choice[1] for key in recorded.ops.graphs.recorded) == [False, True]


def test_hidden_rows_alone_have_recordings_without_a_choice() -> None:
    steps = Steps(True)
    batch = batch_of([(30, 1), (9, 1), (2, 1)], [7, 8, 9])
    rows = [steps.ops.to_numpy(steps.decoder.hidden(batch, steps.storage[0])) for _ in range(3)]
    assert rows[0].shape == rows[2].shape
    assert (rows[0] == rows[2]).all()
    assert [key.choice for key in steps.ops.graphs.recorded] == [None]


def test_a_choice_that_does_not_fit_is_made_without_a_recording() -> None:
    plain, recorded = Steps(False), Steps(True)
    recorded.driver.full = True
    given = [(30, 1), (9, 1)], [7, 8], draw_of(2)
    for turn in range(5):
        assert recorded.step(*given) == plain.step(*given)
        recorded.driver.full = turn == 0
    assert [key.choice for key in recorded.ops.graphs.recorded] == [None]  # the layers alone
    assert recorded.driver.asked["replay"] == 1


def test_a_step_of_which_no_token_is_wanted_is_not_downloaded() -> None:
    steps = Steps(True)
    assert steps.step([(0, 20)], np.arange(20), draw_of(0), []) == ([], b"")
    assert "download" not in steps.driver.asked
