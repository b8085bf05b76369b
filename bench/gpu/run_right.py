"""Whether answers are right: the op grid, tiny models with recorded tokens of Transformers, cut models beside
Transformers on the device, and all of them beside the numpy backend on the host.

The bound of a cut model is Transformers' own rounding: the error of ours against Transformers in fp32 is at
most one and a half times that of Transformers in bf16, and below 3 %.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from run_common import (
    LLAMA_CUT,
    QWEN3_CUT,
    ROOT,
    TINY_QWEN3,
    Room,
    Shape,
    steps_of,
    tell,
    torch_here,
)
from run_models import write_folder

from pageturner.errors import EngineFault
from pageturner.kernels.gpu.ops import GpuOps
from pageturner.kernels.gpu.proof import TOKENS, Subject, check
from pageturner.kernels.reference import ReferenceOps
from pageturner.models.decoder import Decoder
from pageturner.models.load import load_model

GOLDENS = ROOT / "tests" / "goldens"
CUT = ROOT / "build" / "gpu" / "smollm2-cut.gguf"  # made by cut_model.py
MODELS = (
    "tiny_llama",
    "tiny_llama_untied",
    "tiny_qwen3",
    "tiny_llama_quant",
    "experts_mixtral",
    "experts_qwen3moe",
    "experts_mixtral_quant",
)
WORST, OVER = 0.03, 1.5
KINDS_OF_PROOF = (("none", "bfloat16"), ("int8", "int8"), ("int4", "fp8_e4m3"), ("int4", "float16"))
DEVICE = "cuda"  # of Transformers


def right(room: Room) -> None:
    for name in MODELS[2:3] if room.tiny else MODELS:
        golden(room, name)
    for shape in (TINY_QWEN3,) if room.tiny else (QWEN3_CUT, LLAMA_CUT):
        cut(room, shape, write_folder(room, shape))
    if room.tiny:
        return
    if CUT.exists():
        real(room)
    else:
        tell("right", model=CUT.name, run=False, why=f"{CUT} is not there (bench/gpu/cut_model.py)")


def grid(room: Room) -> None:
    """The op grid of the tests, with the device in place of the interpreter; what pytest said lies beside the
    lines that are told."""
    path = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    )
    several = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",
            "-m",
            "slow or not slow",
            *several,
            *("-k", "greedy" if room.tiny else ""),
            "tests/gpu/test_kernels.py",
            "tests/gpu/test_adapter_kernels.py",
        ],
        cwd=ROOT,
        env={**os.environ, "PAGETURNER_TEST_GPU": "" if room.tiny else "cuda", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if out := os.environ.get("PAGETURNER_GPU_OUT"):
        Path(out).with_suffix(".grid.txt").write_text(done.stdout + done.stderr)
    closing = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    tell("grid", passed=done.returncode == 0, closing=closing, told=done.stdout[-1500:])


def proof(room: Room) -> None:
    """What a first start compares, for models of each kind of weight and of KV; and how long that takes."""
    folder = write_folder(room, TINY_QWEN3 if room.tiny else QWEN3_CUT)
    for quantization, dtype in (("int4", "float16"),) if room.tiny else KINDS_OF_PROOF:
        ops = room.ops(4)
        decoder, why = load_model(folder, ops, quantization=quantization), ""
        begin = time.perf_counter()
        try:
            check(Subject(ops, decoder.stack, decoder.head, decoder.kv_spec(1, 16, dtype), TOKENS))
        except EngineFault as fault:
            why = fault.message
        seconds = time.perf_counter() - begin
        tell("proof", weights=quantization, kv=dtype, seconds=seconds, passed=not why, why=why)
        room.driver.release()


def logits_of(decoder: Decoder, ops: Any, tokens: list[int], dtype: str) -> np.ndarray[Any, Any]:
    """Logits behind each token of one sequence, computed in one step."""
    batch = steps_of([(0, len(tokens))], "all", tokens)
    kv = ops.alloc_kv(decoder.kv_spec(-(-len(tokens) // 16), 16, dtype))
    return np.array(decoder.forward(batch, kv), np.float32)


def greedy_of(decoder: Decoder, ops: Any, prompt: list[int], count: int, dtype: str) -> list[int]:
    """The likeliest tokens, a step each, so that steps are recorded and replayed."""
    kv = ops.alloc_kv(decoder.kv_spec(-(-(len(prompt) + count) // 16), 16, dtype))
    tokens: list[int] = []
    for at in range(count):
        done = 0 if not at else len(prompt) + at - 1
        batch = steps_of([(done, 1 if at else len(prompt))], "last", tokens[-1:] if at else prompt)
        tokens.append(int(decoder.forward(batch, kv)[-1].argmax()))
    return tokens


def distance(found: Any, truth: Any) -> float:
    """||found - truth|| / ||truth||, in fp64; infinite for what is not finite."""
    found, truth = np.asarray(found, np.float64), np.asarray(truth, np.float64)
    error = float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
    return error if np.isfinite(error) else float("inf")


def golden(room: Room, name: str) -> None:
    """A tiny model: the tokens that Transformers gave, and the host's logits."""
    path, told = GOLDENS / f"{name}.gguf", GOLDENS / f"{name}.npz"
    recorded = np.load(told if told.exists() else GOLDENS / f"{name.removesuffix('_quant')}.npz")
    ops, dtype = GpuOps(room.driver, 256 << 20), "auto" if "quant" in name else "float32"
    decoder = load_model(path, ops, dtype=dtype)
    prompt = recorded["prompt_0"].tolist()
    prompt = prompt[:8] if room.tiny else prompt
    reference = ReferenceOps()
    host = load_model(path, reference, dtype=dtype)
    error = distance(
        logits_of(decoder, ops, prompt, "float32"), logits_of(host, reference, prompt, "float32")
    )
    count = 2 if room.tiny else 16
    tokens = greedy_of(decoder, ops, prompt, count, "float32")
    if room.tiny or not told.exists() or "greedy_0" not in recorded:
        expected = greedy_of(host, reference, prompt, count, "float32")
    else:
        expected = recorded["greedy_0"][:count].tolist()
    same = tokens[: len(expected)] == expected
    # weights in groups are computed with activations in bf16 here and rounded to int8 on the host
    passed = error < (0.1 if "quant" in name else 1e-3) and (same or "quant" in name)
    tell("right", model=name, error_to_cpu=error, tokens_equal=same, passed=passed)
    room.driver.release()


def cut(room: Room, shape: Shape, folder: Path) -> None:
    """The real widths in few layers: our logits and Transformers' in bf16, both against Transformers' in
    fp32."""
    count = 8 if room.tiny else 300
    tokens = np.random.default_rng(3).integers(3, shape.vocabulary, count).tolist()
    ops = room.ops(8)
    ours = logits_of(load_model(folder, ops), ops, tokens, "bfloat16")
    room.driver.release()
    few, reference = min(count, 48), ReferenceOps()
    host = logits_of(load_model(folder, reference), reference, tokens[:few], "float32")
    beside_cpu = distance(ours[:few], host)
    found: dict[str, Any] = {"error_to_cpu": beside_cpu, "passed": beside_cpu < WORST}
    if torch_here(room) is not None:
        found |= _beside_transformers(
            ours, theirs(folder, tokens, "float32"), theirs(folder, tokens, "bfloat16")
        )
        found["passed"] = found["passed"] and found.pop("near")
    tell("right", model=shape.name, rows=count, **found)


def _beside_transformers(ours: Any, truth: Any, rounded: Any) -> dict[str, Any]:
    mine, own = distance(ours, truth), distance(rounded, truth)
    agree = float((ours.argmax(1) == truth.argmax(1)).mean())
    return {
        "error_to_fp32": mine,
        "error_of_transformers": own,
        "argmax_agree": agree,
        "near": mine < min(max(OVER * own, 1e-3), WORST),
    }


def theirs(model: Path | Any, tokens: list[int], dtype: str) -> Any:
    """Transformers' logits on the device. model: a folder, or a model that is made."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    kind = getattr(torch, dtype)
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=kind, attn_implementation="eager")
    model = model.to(DEVICE, kind).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device=DEVICE)).logits[0].float().cpu().numpy()
    del model
    torch.cuda.empty_cache()
    return logits


def real(room: Room) -> None:
    """SmolLM2 cut to fewer layers, its weights as they are, beside Transformers with the same values."""
    tokens = np.random.default_rng(4).integers(3, 40000, 300).tolist()
    ops = GpuOps(room.driver, 4 << 30)
    ours = logits_of(load_model(CUT, ops), ops, tokens, "float16")
    room.driver.release()
    reference = ReferenceOps()
    host = logits_of(load_model(CUT, reference), reference, tokens[:48], "float32")
    found: dict[str, Any] = {"error_to_cpu": distance(ours[:48], host)}
    if torch_here(room) is not None:
        truth, rounded = (
            theirs(_as_transformers(CUT), tokens, kind) for kind in ("float32", "bfloat16")
        )
        found |= _beside_transformers(ours, truth, rounded)
    tell("right", model=CUT.name, rows=len(tokens), passed=found.pop("near", True), **found)


def _as_transformers(path: Path) -> Any:
    """A llama of a GGUF file in Transformers, in fp32. In the file the rows of q and k are permuted so that
    rotary pairs are neighbours; here the halves of a head lie apart."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pageturner.formats import ggml
    from pageturner.formats.gguf import open_gguf

    file = open_gguf(path)
    about = {key.removeprefix("llama."): value for key, value in file.metadata.items()}
    heads, kv_heads = int(about["attention.head_count"]), int(about["attention.head_count_kv"])
    values = {}
    for name in file.tensors:
        kind, shape, data = file.tensor(name)
        values[name] = ggml.dequantise(kind, shape, np.frombuffer(data, np.uint8)).reshape(shape)
    vocabulary, hidden = values["token_embd.weight"].shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=int(about["block_count"]),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        attn_implementation="eager",
        intermediate_size=int(about["feed_forward_length"]),
        max_position_embeddings=4096,
        rms_norm_eps=float(about["attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_theta": float(about["rope.freq_base"]), "rope_type": "default"},
        tie_word_embeddings="output.weight" not in values,
    )
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
    }
    state = {}
    for name, value in values.items():  # "blk.3.attn_q.weight", "token_embd.weight"
        *block, part, _ = name.split(".")
        if part in ("attn_q", "attn_k"):
            count = heads if part == "attn_q" else kv_heads
            value = value.reshape(count, -1, 2, hidden).swapaxes(1, 2).reshape(-1, hidden)
        prefix = f"model.layers.{block[1]}." if block else ""
        state[f"{prefix}{names[part]}.weight"] = torch.from_numpy(np.array(value, np.float32))
    model = LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False)  # a tied head stands under another name
    return model
