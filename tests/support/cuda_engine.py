"""A tiny model on GpuOps over CudaDriver over the stub: `python -m support.cuda_engine CASE MANIFEST`.

Its kernels compute nothing, so every token is 0; what counts is what is asked of the device, and when.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pageturner.engine.engine import Engine
from pageturner.kernels.gpu.cuda_driver import CudaDriver
from pageturner.kernels.gpu.manifest import Manifest
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.params import SamplingParams
from pageturner.request import Request
from support import engines
from support.engines import GOLDENS, Model, Setup
from support.stub_cuda import GRAPH, MODULE, READY, Stub

PROMPTS = ((5, 9, 33, 7, 1, 60, 2), (8, 8, 21), (40, 2, 3, 9, 9, 17, 30, 4, 6))
TOKENS = 24
LAUNCHES = ("cuLaunchKernel", "cuLaunchKernelEx")
SYNCS = ("cuStreamSynchronize", "cuMemFree", "cuMemAlloc", "cuMemHostAlloc", "cuModuleLoadData")


def engine_of(manifest: Manifest, ahead: bool) -> tuple[Stub, CudaDriver, Engine]:
    engines.poison_blocks = lambda kv, blocks: None  # type: ignore[assignment]  (its KV is not the host's)
    stub, driver = Stub(), CudaDriver(manifest)
    model = Model(GOLDENS / "tiny_llama.gguf", GpuOps(driver, 64 << 20), kv_dtype="float16")
    engine = model.engine(Setup(token_budget=12, kv_tokens=256, ahead=ahead))
    for id, prompt in enumerate(PROMPTS, 1):
        how = SamplingParams(
            max_tokens=TOKENS, temperature=0.7 * (id != 2), top_k=9, seed=id, ignore_eos=True
        )
        engine.submit(Request(id, prompt, how))
    return stub, driver, engine


def steps(stub: Stub, engine: Engine) -> list[dict[str, int]]:
    """What each step asked for, by call; "waits": how often for work that was not done; and "tokens"."""
    found = []
    names = (*SYNCS, *LAUNCHES, "cuGraphLaunch", "cuMemcpyHtoDAsync")
    while engine.has_work:
        before = {name: stub.calls(name) for name in names} | {"waits": stub.waits()}
        events = engine.step()
        after = {name: stub.calls(name) for name in names} | {"waits": stub.waits()}
        found.append({name: after[name] - before[name] for name in after})
        found[-1]["tokens"] = sum(len(event.tokens) for event in events)
        assert all(event.failure is None for event in events), events
    assert sum(one["tokens"] for one in found) == TOKENS * len(PROMPTS)
    return found


def check(told: list[dict[str, int]], syncs: int, launches: int, uploads: int) -> None:
    """Steps that only replay wait once, for their tokens, and take nothing."""
    replayed = [one for one in told if one["cuGraphLaunch"] and one["tokens"] == len(PROMPTS)]
    steady = replayed[1:]  # in the first one the recording may have been made
    assert len(steady) > TOKENS // 2, told
    for one in steady:
        assert one["waits"] <= 1, one
        assert one["cuStreamSynchronize"] == syncs, one
        assert {one[name] for name in SYNCS[1:]} == {0}, one
        assert one["cuGraphLaunch"] == 1, one
        assert sum(one[name] for name in LAUNCHES) == launches, one
        assert one["cuMemcpyHtoDAsync"] == uploads, one


def end(stub: Stub, driver: CudaDriver, manifest: Manifest) -> None:
    """Every kernel that ran had what it wants, and everything is given back."""
    assert stub.refused == []
    held = stub.held()
    assert (held[GRAPH], held[READY] > 0, held[MODULE] > 0) == (0, True, True), held
    kernels = manifest.kernels(*manifest.choose(driver.architecture))
    known = {}
    for name, (_, _, types, _) in driver._loaded.items():
        one = kernels[name]
        assert len(stub.parameters(one.symbol)) == len(types), name
        known.setdefault(one.symbol, []).append(one)
    ran = stub.launches()
    assert len(ran) > 100
    for symbol, _, threads, shared, bits in ran:
        assert any(
            (one.threads, one.shared, len(one.kinds) + one.hidden) == (threads, shared, len(bits))
            for one in known[symbol]
        ), symbol
    print("\n".join(driver._loaded))
    driver.close()
    assert set(stub.held().values()) == {0}, stub.held()
    assert stub.refused == []


def plain(manifest: Manifest) -> None:
    stub, driver, engine = engine_of(manifest, False)
    # a norm, the head and four of the choice, by what is uploaded
    check(steps(stub, engine), 1, 6, 2)
    end(stub, driver, manifest)


def ahead(manifest: Manifest) -> None:
    stub, driver, engine = engine_of(manifest, True)
    check(steps(stub, engine), 0, 0, 1)  # all is in the recording
    assert engine.async_steps is not None
    assert engine.async_steps.made > TOKENS // 2
    end(stub, driver, manifest)


if __name__ == "__main__":
    globals()[sys.argv[1]](Manifest(Path(sys.argv[2])))
