"""Records tiny models quantised by the libraries that people use, and logits of their dequantised weights.

Run by hand in an environment of its own, with torch 2.13.0, transformers 5.23.0, safetensors, tokenizers,
gptqmodel 7.6.0, autoawq 0.2.9, compressed-tensors 0.20.0, bitsandbytes 0.50.2:
    python tests/tools/record_checkpoints.py tests/goldens/checkpoints [gptq awq compressed fp8 bitsandbytes]
Owns every folder there; the tests only read them.

The weights are quantised and written by the libraries; those of `fp8`, for which there is none, by the
definition of the format. `logits.npy` is what Transformers gives in fp32 with the weights that the library's
own dequantising makes of the file: several libraries multiply by kernels whose rounding is not ours.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

TOKENS = [7 * i % 64 for i in range(24)]
GPTQ: dict[str, dict[str, Any]] = {
    "gptq_32": {"bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    "gptq_64": {"bits": 4, "group_size": 64, "sym": False, "desc_act": False},
    "gptq_v2": {"bits": 4, "group_size": 128, "sym": False, "desc_act": False, "format": "gptq_v2"},
    "gptq_column": {
        "bits": 4,
        "group_size": -1,
        "sym": True,
        "desc_act": False,
        "act_group_aware": False,
    },
    "gptq_act": {
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": True,
        "act_group_aware": False,
    },
    "gptq_8": {"bits": 8, "group_size": 32, "sym": True, "desc_act": False},
    "gptq_8_asym": {"bits": 8, "group_size": 64, "sym": False, "desc_act": False},
}


def plain() -> LlamaForCausalLM:
    """Random weights, rounded to fp16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
    )
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.normal_(0, 0.08)
        weight.data = weight.data.half().float()
    return model


def quantised(model: LlamaForCausalLM) -> list[tuple[str, torch.nn.Linear]]:
    """The linear layers that become integers: all but the head."""
    found = [
        (name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)
    ]
    return [(name, part) for name, part in found if name != "lm_head"]


def finish(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Record what the folder's own floats and these weights give, by name of the layer."""
    model, stored = plain(), load_file(folder / "model.safetensors")
    for name, weight in model.named_parameters():
        layer = name.removesuffix(".weight")
        weight.data.copy_((weights[layer] if layer in weights else stored[name]).float())
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    np.save(folder / "logits.npy", logits.float().numpy())
    for other in folder.iterdir():
        if other.name not in ("config.json", "model.safetensors", "logits.npy"):
            other.unlink()


def write(folder: Path, state: dict[str, torch.Tensor], said: dict[str, Any]) -> None:
    config = plain().config.to_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "quantization_config": said}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def source(root: Path) -> Path:
    """The unquantised model with a tokenizer, which some libraries ask for."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = root / "plain"
    plain().half().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    names = {"unk_token": "w0", "pad_token": "w1", "eos_token": "w2", "bos_token": "w3"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(folder)
    return folder


def gptq(root: Path) -> None:
    os.cpu_count = lambda: 4  # type: ignore[method-assign, assignment]  # the library wants two in each pool
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    folder = source(root)
    torch.manual_seed(1)
    ids = [torch.randint(0, 64, (1, 64)) for _ in range(16)]
    data = [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids]
    for name, settings in GPTQ.items():
        model = GPTQModel.load(
            str(folder), QuantizeConfig(offload_to_disk=False, **settings), device="cpu"
        )
        model.quantize(data, batch_size=4)
        model.save(str(root / name))
        loaded = GPTQModel.load(str(root / name), backend=BACKEND.TORCH, device="cpu")
        stored, weights = load_file(root / name / "model.safetensors"), {}
        for layer, part in loaded.model.named_modules():
            if hasattr(part, "dequantize_weight"):
                part.scales = stored[layer + ".scales"].float()
                weights[layer] = part.dequantize_weight().float().T
        finish(root / name, weights)
    shutil.rmtree(folder)


def awq(root: Path) -> None:
    from awq.modules.linear.gemm import WQLinear_GEMM

    for name, size in {"awq_32": 32, "awq_128": 128}.items():
        model = plain()
        state, weights = {key: value.half() for key, value in model.state_dict().items()}, {}
        for layer, part in quantised(model):
            rows, columns = part.weight.shape
            groups = part.weight.data.reshape(rows, -1, size)
            scale = ((groups.amax(-1) - groups.amin(-1)) / 15).half()
            zero = (-(groups.amin(-1) / scale.float()).round()).clamp(0, 15)
            wide = scale.float()[..., None]
            q = ((groups / wide).round() + zero[..., None]).clamp(0, 15)
            weights[layer] = ((q - zero[..., None]) * wide).reshape(rows, columns)
            one = torch.nn.Linear(columns, rows, bias=False).half()
            one.weight.data = weights[layer].half()
            packed = WQLinear_GEMM.from_linear(
                one, 4, size, scales=scale.T.contiguous(), zeros=zero.T.contiguous()
            )
            del state[layer + ".weight"]
            state |= {f"{layer}.{key}": value for key, value in packed.state_dict().items()}
        said = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": size,
            "zero_point": True,
            "version": "gemm",
        }
        write(root / name, state, said)
        finish(root / name, weights)


def compressed(root: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    def ints(bits: int, **more: Any) -> QuantizationArgs:
        return QuantizationArgs(num_bits=bits, type="int", **{"symmetric": True, **more})

    floats = {"num_bits": 8, "type": "float", "symmetric": True}
    by_token = {"strategy": "token", "dynamic": True}
    cases = {
        "ct_w4_32": (ints(4, strategy="group", group_size=32), None, torch.bfloat16),
        "ct_w4_64_asym": (
            ints(4, strategy="group", group_size=64, symmetric=False),
            None,
            torch.float16,
        ),
        "ct_w4_channel": (ints(4, strategy="channel"), None, torch.float16),
        "ct_w8_128": (ints(8, strategy="group", group_size=128), None, torch.float16),
        "ct_w8a8": (ints(8, strategy="channel"), ints(8, **by_token), torch.float32),
        "ct_fp8": (
            QuantizationArgs(**floats, strategy="channel"),
            QuantizationArgs(**floats, **by_token),
            torch.bfloat16,
        ),
        "ct_fp8_tensor": (QuantizationArgs(**floats, strategy="tensor"), None, torch.float16),
        "ct_fp8_block": (
            QuantizationArgs(**floats, strategy="block", block_structure=[64, 64]),
            None,
            torch.float16,
        ),
        "ct_mxfp4": (preset_name_to_scheme("MXFP4A16", ["Linear"]).weights, None, torch.float16),
    }
    for name, (args, activations, dtype) in cases.items():
        model = plain().to(dtype)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
        config = QuantizationConfig(
            config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="frozen"
        )
        apply_quantization_config(model, config)
        for _, part in quantised(model):
            scale, zero = calculate_qparams(*extremes(part.weight.data, args), args)
            part.weight_scale.data.copy_(scale.reshape(part.weight_scale.shape))
            if hasattr(part, "weight_zero_point"):
                part.weight_zero_point.data.copy_(zero.reshape(part.weight_zero_point.shape))
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(root / name)
        compressor.update_config(root / name)
        model.float()
        compressor.decompress_model(model)
        finish(root / name, {layer: part.weight.data for layer, part in quantised(model)})


def extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of each part that has a scale."""
    strategy = getattr(args.strategy, "value", args.strategy)
    if strategy == "group":
        parts = weight.reshape(len(weight), -1, args.group_size)
        return parts.amin(-1), parts.amax(-1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "block":
        high, wide = args.block_structure
        blocks = weight.reshape(len(weight) // high, high, -1, wide)
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    return weight.min()[None], weight.max()[None]


def fp8(root: Path) -> None:
    blocks: dict[str, tuple[int, int] | None] = {
        "fp8_block": (128, 128),
        "fp8_block_96": (96, 32),
        "fp8_tensor": None,
    }
    for name, block in blocks.items():
        model = plain()
        state, weights = {key: value.bfloat16() for key, value in model.state_dict().items()}, {}
        for layer, part in quantised(model):
            weight = part.weight.data
            high, wide = block or weight.shape
            padded = torch.zeros(
                -(-weight.shape[0] // high) * high, -(-weight.shape[1] // wide) * wide
            )
            padded[: weight.shape[0], : weight.shape[1]] = weight
            scale = padded.reshape(len(padded) // high, high, -1, wide).abs().amax((1, 3)) / 448
            each = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
            each = each[: weight.shape[0], : weight.shape[1]]
            bits = (weight / each).to(torch.float8_e4m3fn)
            state[layer + ".weight"], weights[layer] = bits, bits.float() * each
            if block:
                state[layer + ".weight_scale_inv"] = scale
            else:
                state[layer + ".weight_scale"] = scale.reshape(())
                state[layer + ".input_scale"] = torch.tensor(1.0)
        said: dict[str, Any] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
        }
        if block:
            said["weight_block_size"] = list(block)
        write(root / name, state, said)
        finish(root / name, weights)


def bitsandbytes(root: Path) -> None:
    from bitsandbytes import nn
    from bitsandbytes.functional import dequantize_4bit

    folder = source(root)
    four = {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.float32,
    }
    cases = {
        "bnb_nf4": BitsAndBytesConfig(**four),
        "bnb_nf4_double": BitsAndBytesConfig(**four, bnb_4bit_use_double_quant=True),
        "bnb_int8": BitsAndBytesConfig(load_in_8bit=True),
    }
    for name, config in cases.items():
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, device_map="cpu", dtype=torch.float32
        )
        model.save_pretrained(root / name)
        stored, weights = load_file(root / name / "model.safetensors"), {}
        for layer, part in model.named_modules():
            if isinstance(part, nn.Linear4bit):
                weights[layer] = dequantize_4bit(part.weight.data, part.weight.quant_state).float()
            elif isinstance(part, nn.Linear8bitLt):
                largest = stored[layer + ".SCB"].float()[:, None]
                weights[layer] = stored[layer + ".weight"].float() * largest / 127
        finish(root / name, weights)
    shutil.rmtree(folder)


ALL: dict[str, Callable[[Path], None]] = {
    f.__name__: f for f in (gptq, awq, compressed, fp8, bitsandbytes)
}

if __name__ == "__main__":
    for part in sys.argv[2:] or ALL:
        ALL[part](Path(sys.argv[1]))
