"""Models of many kinds by `LLM`, from start to end, on CudaDriver over the stub:
`python -m support.cuda_models all MANIFEST`. What kernels would have made is 0.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pageturner import LLM, SamplingParams
from pageturner.kernels.gpu.cuda_driver import CudaDriver
from pageturner.kernels.gpu.manifest import Manifest
from pageturner.parallel.drivers import DRIVER
from support.engines import GOLDENS
from support.stub_cuda import Stub

SMALL: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "block_size": 16,
}
MODELS: tuple[tuple[str, dict[str, str]], ...] = (
    ("tiny_llama_quant.gguf", {}),
    ("experts_qwen3moe_quant.gguf", {}),
    ("tiny_llama.gguf", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    ("tiny_qwen3.gguf", {"quantization": "int4", "kv_cache_dtype": "fp8_e4m3"}),
    *(
        (f"families/{one}", {"load_format": "dummy"})
        for one in (
            "bloom",
            "gemma2",
            "gemma3",
            "gpt2",
            "gpt_oss",
            "granite",
            "llama4_text",
            "mixtral",
            "phi3",
            "qwen2",
        )
    ),
)
ASKED = (
    SamplingParams(
        temperature=0.5, seed=1, max_tokens=6, ignore_eos=True, logit_bias={3: 1.5, 4: -1.0}
    ),
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3),
    SamplingParams(
        temperature=1.0, min_p=0.1, top_k=3, max_tokens=6, ignore_eos=True, min_tokens=3
    ),
)


class OnStub(CudaDriver):
    """With the kernels of a folder."""

    folder: Path

    def __init__(self) -> None:
        super().__init__(Manifest(OnStub.folder))
        self.version = ""  # it computes nothing, so nothing is to be proven

    def download(self, array: NDArray[Any], address: int) -> None:
        super().download(array, address)
        array.fill(0)


def bf16(folder: Path) -> str:
    """The folder's config.json elsewhere, of another type: weights are random."""
    config = json.loads((folder / "config.json").read_text())
    elsewhere = Path(tempfile.mkdtemp())
    (elsewhere / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    return str(elsewhere)


def main() -> None:
    from support.cuda_models import OnStub  # the same class as the one that the variable names

    OnStub.folder = Path(sys.argv[2])
    os.environ[DRIVER] = "support.cuda_models:OnStub"
    stub, launched = Stub(), 0
    for name, settings in MODELS:
        path = GOLDENS / name
        llm = LLM(bf16(path) if path.is_dir() else str(path), **SMALL, **settings)
        for how in ASKED:
            found = llm.generate([[5, 6, 7], [9] * 20, [3]], how)
            assert [len(one.outputs[0].token_ids) for one in found] == [6, 6, 6], name
        assert stub.refused == [], name
        del llm
        gc.collect()  # whoever drops an LLM gives its device back
        assert set(stub.held().values()) == {0}, name
        ran = len(stub.launches())
        print(name, *settings.values(), ran - launched)
        assert ran - launched > 500, name
        launched = ran


if __name__ == "__main__":
    main()
