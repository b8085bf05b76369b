"""One step ahead on the interpreted device: the tokens of the plain loop, with and without recordings."""

from __future__ import annotations

import pytest

from pageturner.kernels.gpu.ops import GpuOps
from pageturner.params import SamplingParams
from pageturner.request import Request

fake_gpu = pytest.importorskip("support.fake_gpu", exc_type=ImportError)  # skips without Triton

from support import engines  # noqa: E402
from support.engines import GOLDENS, Answer, Model, Setup, answers  # noqa: E402

PROMPTS = ((5, 9, 33, 7, 1, 60, 2), (8, 8, 21), (40, 2, 3, 9, 9, 17, 30, 4, 6))


def run(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, Answer], int, int]:
    monkeypatch.setattr(engines, "poison_blocks", lambda kv, blocks: None)
    ops = GpuOps(fake_gpu.FakeDriver(), 64 << 20)
    model = Model(GOLDENS / "tiny_llama.gguf", ops, dtype="float32", kv_dtype="float32")
    engine = model.engine(Setup(token_budget=12, kv_tokens=256, ahead=ahead))
    asked = [
        Request(
            id,
            prompt,
            SamplingParams(max_tokens=3 + id, temperature=0.7 * (id != 2), top_k=9, seed=id),
        )
        for id, prompt in enumerate(PROMPTS, 1)
    ]
    found = answers(engine, asked, spread=1)
    return found, ops.driver.replayed, engine.async_steps.made if engine.async_steps else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tokens_are_those_of_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, replayed, made = run(False, monkeypatch)
    ahead, replayed_ahead, made_ahead = run(True, monkeypatch)
    assert ahead == plain
    assert (made, replayed > 0) == (0, True)
    assert made_ahead >= 4
    assert replayed_ahead > 0
