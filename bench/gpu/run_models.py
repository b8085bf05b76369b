"""Models of a shape with random weights, as Hugging Face folders, and engines on the device under test.

Owns the folder's form: config.json and one safetensors file of bf16, which Pageturner and Transformers load
alike. Must not know what is asked of an engine.
"""

from __future__ import annotations

import json
import struct
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from run_common import Room, Shape, fits, normal_bits, tell, to_bf16

from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault
from pageturner.params import SamplingParams
from pageturner.request import Event, Request

CONTEXT = 16384


def config_of(shape: Shape) -> dict[str, Any]:
    """config.json."""
    names = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {
        "architectures": [names[shape.family]],
        "model_type": shape.family,
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def tensors_of(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes, in the order of the file."""
    s = shape
    sizes = s.projections
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (s.vocabulary, s.hidden)}
    for i in range(s.layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (s.hidden,),
            **{f"self_attn.{name}_proj": sizes[name] for name in "qkvo"},
            "post_attention_layernorm": (s.hidden,),
            **{f"mlp.{name}_proj": sizes[name] for name in ("gate", "up", "down")},
        }
        if s.family == "qwen3":
            layer |= {"self_attn.q_norm": (s.head_dim,), "self_attn.k_norm": (s.head_dim,)}
        found |= {f"model.layers.{i}.{name}.weight": size for name, size in layer.items()}
    found["model.norm.weight"] = (s.hidden,)
    return found if s.tied else found | {"lm_head.weight": (s.vocabulary, s.hidden)}


def write_folder(room: Room, shape: Shape) -> Path:
    """The folder of a shape; written once in a call."""
    path = room.folder / shape.name.replace(" ", "_")
    if (path / "config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    header, at, found = {}, 0, tensors_of(shape)
    for name, size in found.items():
        nbytes = 2 * int(np.prod(size))
        header[name] = {"dtype": "BF16", "shape": size, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for seed, size in enumerate(found.values()):
            if len(size) == 1:
                near = np.random.default_rng(seed).normal(1.0, 0.1, size).astype(np.float32)
                file.write(to_bf16(near).data)
            else:
                file.write(normal_bits(size[0], size[1], seed).data)
    (path / "config.json").write_text(json.dumps(config_of(shape)))
    return path


class Built:
    """An engine on the device, and its backend."""

    def __init__(self, built: Any, ops: Any, seconds: float) -> None:
        self.built, self.ops, self.seconds = built, ops, seconds
        self.engine = built.engine


@contextmanager
def engine_of(
    room: Room, model: Path, *, graphs: bool = True, ahead: bool = True, **settings: Any
) -> Iterator[Built]:
    """The engine as `--device cuda` makes it, on the driver of the room. Its memory is given back."""
    from pageturner.engine.engine_factory import make_engine
    from pageturner.kernels.gpu import cuda_driver

    found: list[Any] = []

    def kept(ops: Any) -> Any:
        if not graphs:
            ops.graphs = None
        found.append(ops)
        return ops

    settings["async_scheduling"] = ahead
    few: dict[str, Any] = {}
    if room.tiny:  # the dry run computes the largest step, and the interpreter each of its rows
        few = {
            "max_model_len": 64,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "kv_cache_memory": 1 << 20,
        }
    settings = {"device": "cuda", "max_model_len": 4096, "kv_survival": False, **few, **settings}
    real, begin = cuda_driver.CudaDriver, time.perf_counter()
    cuda_driver.CudaDriver = lambda *_, **__: room.driver  # type: ignore[assignment, misc]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = make_engine(EngineConfig(model=str(model), **settings), wrap=kept)
        yield Built(built, found[0], time.perf_counter() - begin)
        built.engine.close()
    finally:
        cuda_driver.CudaDriver = real  # type: ignore[misc]
        room.driver.release()


@contextmanager
def roomy_engine(
    room: Room, model: Path, budget: int, sequences: int, **settings: Any
) -> Iterator[Built]:
    """An engine with the largest token budget whose step fits the memory that is set aside for one: `budget`
    tokens or a half, a quarter ... of that. It has computed prompts that fill a step."""
    if room.tiny:
        budget, sequences = 64, 4
    while True:
        sizes = {"max_num_batched_tokens": budget, "max_num_seqs": sequences}
        with ExitStack() as stack:
            try:
                built = stack.enter_context(engine_of(room, model, **sizes, **settings))
                length = min(budget, built.built.max_model_len) - 2
                count = min(-(-budget // length), sequences)
                asked = [
                    request(10**6 + i, length, 2, built.built.vocab_size) for i in range(count)
                ]
                run_all(built.engine, asked)
            except EngineFault as fault:
                if not fits(fault) or budget <= 8:
                    raise
                tell("engine", budget=budget, refused=fault.message)
                budget //= 2
                continue
            tell("engine", budget=budget, blocks=built.built.num_blocks, build_s=built.seconds)
            yield built
            return


def request(
    id: int, prompt: int, output: int, vocabulary: int, *, seed: int | None = None, **params: Any
) -> Request:
    """Random tokens; the end of sequence is ignored."""
    tokens = (
        np.random.default_rng(id if seed is None else seed).integers(3, vocabulary, prompt).tolist()
    )
    given = {"temperature": 0.6, "seed": id, "ignore_eos": True, "max_tokens": output, **params}
    return Request(id=id, prompt=tuple(tokens), params=SamplingParams(**given))


def run_all(engine: Any, requests: list[Request], limit: float = 1e9) -> dict[int, list[Event]]:
    """Events by request, until all are answered or `limit` seconds are over. RuntimeError for a refusal."""
    events: list[Event] = []
    begin = time.perf_counter()
    for one in requests:
        events += engine.submit(one)
    while engine.has_work and time.perf_counter() - begin < limit:
        events += engine.step()
    found: dict[int, list[Event]] = {one.id: [] for one in requests}
    for event in events:
        if event.failure is not None:
            raise RuntimeError(f"request {event.id}: {event.failure.message}")
        found[event.id].append(event)
    for one in requests:  # whoever is not done when the time is over
        if not found[one.id] or found[one.id][-1].finish is None:
            engine.abort(one.id)
    return found


def tokens_of(events: dict[int, list[Event]]) -> int:
    """Output tokens of all requests."""
    return sum(len(event.tokens) for mine in events.values() for event in mine)
