"""Record what Transformers' recurrent mixers make of random rows, in fp64: tests/goldens/recurrent.npz.

Weights are a function of a mixer's name and of the names and shapes of its parameters (`weights`), so
only outputs are kept.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

ROWS, WIDTH = 70, 32


def rows(name: str) -> Any:
    """What goes into a mixer."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal((ROWS, WIDTH))


def weight(name: str, parameter: str, shape: tuple[int, ...]) -> Any:
    """One parameter of a mixer, in fp32."""
    random = np.random.default_rng(zlib.crc32(f"{name} {parameter}".encode()))
    value = random.standard_normal(shape) * (0.3 if len(shape) > 1 else 0.5)
    if len(shape) == 1 and ("norm" in parameter or parameter == "D"):
        value += 1
    return value.astype(np.float32)


def mixers() -> dict[str, Any]:
    """Modules by name."""
    from transformers import GraniteMoeHybridConfig, Lfm2Config, NemotronHConfig
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
    from transformers.models.lfm2 import modeling_lfm2 as lfm2
    from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
    from transformers.models.qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    net = qwen.Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(hidden_size=WIDTH, **sizes), 0)
    kinds = {"num_hidden_layers": 2, "hidden_size": WIDTH}
    nemo = NemotronHConfig(
        mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2, conv_kernel=4,
        chunk_size=32, layers_block_type=["mamba", "attention"], **kinds,
    )  # fmt: skip
    gran = GraniteMoeHybridConfig(
        mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1, mamba_expand=2,
        mamba_chunk_size=32, layer_types=["mamba", "attention"], **kinds,
    )  # fmt: skip
    short = Lfm2Config(layer_types=["conv", "full_attention"], conv_L_cache=3, **kinds)
    return {
        "delta": net,
        "nemotron": nemotron.NemotronHMamba2Mixer(nemo, 0),
        "granite": granite.GraniteMoeHybridMambaLayer(gran, 0),
        "lfm2": lfm2.Lfm2ShortConv(short, 0),
    }


def main() -> None:
    import torch

    found = {}
    for name, mixer in mixers().items():
        with torch.no_grad():
            for parameter, value in mixer.named_parameters():
                value.copy_(torch.tensor(weight(name, parameter, tuple(value.shape))))
                print(name, parameter, tuple(value.shape), file=sys.stderr)
            out = mixer.eval().double()(torch.tensor(rows(name))[None])
        found[name] = (out[0] if isinstance(out, tuple) else out)[0].float().numpy()
        print(name, found[name].shape, float(np.abs(found[name]).max()), file=sys.stderr)
    np.savez_compressed(Path(__file__).parents[1] / "goldens" / "recurrent.npz", **found)


if __name__ == "__main__":
    main()
