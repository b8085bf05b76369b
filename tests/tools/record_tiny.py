"""Records the tiny random models: small GGUF files and what Hugging Face Transformers computes with them.

Run by hand in the `transformers` peer (see bench/peers/setup.sh).
Owns every file `tests/goldens/tiny_*`; the tests only read them and need neither torch nor transformers.

The files follow llama.cpp's converter: for architecture `llama` the rows of q and k are permuted so that
rotary works on neighbouring pairs (NORM); `qwen3` keeps the halves apart (NEOX) and is not permuted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = 320
STEPS = 32
GAIN = 1.6  # standard deviation of a weight times the square root of its fan-in
MIN_GAP = (
    0.02  # of the two best logits on a recorded path: no order of fp32 sums can change the choice
)
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a tiny model<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to
do: once or twice she had peeped into the book her sister was reading, but it had no pictures or
conversations in it, and what is the use of a book, thought Alice, without pictures or
conversations? So she was considering in her own mind (as well as she could, for the hot day made
her feel very sleepy and stupid), whether the pleasure of making a daisy-chain would be worth the
trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close
by her. There was nothing so very remarkable in that; nor did Alice think it so very much out of the
way to hear the Rabbit say to itself, Oh dear! Oh dear! I shall be late!"""
PROMPTS = ["\n", "The White Rabbit, 1865", CORPUS[200:272]]
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   and\ttabs\n\n\nlines  ",
    "it's 3.14159 in 2021, or  42?",
    "zażółć gęślą jaźń",
    "第一章 白兔洞",
    "👩‍👩‍👧 emoji and \u200b zero width",
    "<|im_start|>user\nhi<|im_end|>\n",
    "½ Ⅷ ① ٣ 一",
    "I'll we've he'd DON'T 'tis",
]


KindOf = Callable[[str], Kind]


@dataclass(frozen=True, slots=True)
class Case:
    """One model and what is special about its file."""

    name: str
    arch: str
    config: LlamaConfig | Qwen3Config
    explicit_head_dim: bool = True  # the file states key_length and value_length
    quantised_too: bool = False  # there is a second file with Q8_0 and Q4_1 weights


def common(kv_heads: int, ffn: int, tied: bool, eps: float, rope_base: float) -> dict[str, Any]:
    """The configuration of a tiny model: two layers, four heads, 64 wide."""
    return {
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "tie_word_embeddings": tied,
        "rms_norm_eps": eps,
        "rope_parameters": {"rope_theta": rope_base, "rope_type": "default"},
        "attn_implementation": "eager",
    }


CASES = [
    Case(
        "tiny_llama",
        "llama",
        LlamaConfig(**common(kv_heads=2, ffn=128, tied=True, eps=1e-5, rope_base=10_000.0)),
        explicit_head_dim=False,
        quantised_too=True,
    ),
    Case(
        "tiny_llama_untied",
        "llama",
        LlamaConfig(
            **common(kv_heads=1, ffn=96, tied=False, eps=1e-6, rope_base=500_000.0), head_dim=32
        ),
    ),
    Case(
        "tiny_qwen3",
        "qwen3",
        Qwen3Config(
            **common(kv_heads=2, ffn=96, tied=True, eps=1e-6, rope_base=1_000_000.0), head_dim=32
        ),
    ),
]


def build_tokenizer() -> Tokenizer:
    """Byte-level BPE as SmolLM's: each digit alone, then GPT-2's split; the special tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


def build_model(case: Case, seed: int) -> torch.nn.Module:
    """Random weights, wide enough that logits are far from flat and every norm weight matters."""
    kind = LlamaForCausalLM if case.arch == "llama" else Qwen3ForCausalLM
    model = kind(case.config).eval().float()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(0.5 + torch.rand(weight.shape, generator=draw))
            elif "embed_tokens" in name or "lm_head" in name:
                weight.copy_(0.4 * torch.randn(weight.shape, generator=draw))
            else:
                std = GAIN / weight.shape[1] ** 0.5
                weight.copy_(std * torch.randn(weight.shape, generator=draw))
    return model


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float], list[float]]:
    """The best token at each of STEPS steps (end of sequence ignored), its logprob, the gap to the second."""
    tokens, logprobs, gaps = list(prompt), [], []
    for _ in range(STEPS):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        best = torch.topk(logits, 2)
        tokens.append(int(best.indices[0]))
        logprobs.append(float(torch.log_softmax(logits, -1)[tokens[-1]]))
        gaps.append(float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], logprobs, gaps


def record(model: torch.nn.Module, prompts: list[list[int]]) -> dict[str, np.ndarray]:
    """The golden of one model; see tests/goldens/README.md for keys and shapes."""
    out: dict[str, np.ndarray] = {}
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0]
        tokens, logprobs, gaps = greedy(model, prompt)
        out[f"prompt_{i}"] = np.array(prompt, np.int32)
        out[f"logits_{i}"] = logits.numpy().astype(np.float32)
        out[f"greedy_{i}"] = np.array(tokens, np.int32)
        out[f"logprobs_{i}"] = np.array(logprobs, np.float32)
        out[f"gaps_{i}"] = np.array(gaps, np.float32)
    return out


def is_clear(golden: dict[str, np.ndarray]) -> bool:
    """Whether no choice on the greedy paths is close."""
    return all(golden[key].min() > MIN_GAP for key in golden if key.startswith("gaps_"))


def is_lively(golden: dict[str, np.ndarray]) -> bool:
    """Whether the greedy paths are varied and differ from prompt to prompt."""
    paths = [golden[key] for key in golden if key.startswith("greedy_")]
    varied = all(len(set(path.tolist())) >= STEPS * 2 // 3 for path in paths)
    return varied and len({tuple(path[-8:].tolist()) for path in paths}) == len(paths)


def find(
    case: Case, prompts: list[list[int]]
) -> tuple[torch.nn.Module, list[dict[str, np.ndarray]], int]:
    """The first seed whose model, and its quantised twin if there is one, has lively paths; their goldens."""
    for seed in range(5000):
        model = build_model(case, seed)
        twins = [model, dequantised(case, model)] if case.quantised_too else [model]
        if all(is_clear(record(twin, prompts[:1])) for twin in twins):
            goldens = [record(twin, prompts) for twin in twins]
            if all(is_clear(golden) and is_lively(golden) for golden in goldens):
                return model, goldens, seed
    raise RuntimeError(f"{case.name}: no seed gives an unambiguous path")


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: rotary pairs (i, i + d/2) of each head become neighbours."""
    pairs = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `permute`."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(key: str) -> str:
    """llama.cpp's name of a tensor that Transformers calls `key`."""
    stem = key.removesuffix(".weight")
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def permuted_heads(case: Case, name: str) -> int | None:
    """The number of heads whose rows the file permutes in this tensor, or None."""
    if case.arch != "llama":
        return None
    if name.endswith(".attn_q.weight"):
        return case.config.num_attention_heads
    return case.config.num_key_value_heads if name.endswith(".attn_k.weight") else None


def gguf_tensors(case: Case, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The model's weights under llama.cpp's names and in its order of rows."""
    out: dict[str, np.ndarray] = {}
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and case.config.tie_word_embeddings:
            continue
        name, weight = gguf_name(key), value.numpy().astype(np.float32)
        heads = permuted_heads(case, name)
        out[name] = np.ascontiguousarray(permute(weight, heads) if heads else weight)
    return out


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    vocab = {index: token for token, index in tokenizer.get_vocab().items()}
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([vocab[i] for i in range(VOCAB)])
    writer.add_token_types(
        [
            gguf.TokenType.CONTROL if i < len(SPECIALS) else gguf.TokenType.NORMAL
            for i in range(VOCAB)
        ]
    )
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(TEMPLATE)


def write_gguf(
    path: Path, case: Case, tensors: dict[str, np.ndarray], tokenizer: Tokenizer, kind_of: KindOf
) -> None:
    """A GGUF v3 file with the metadata that llama.cpp's converter writes for this architecture."""
    kinds = {name: kind_of(name) for name in tensors}
    writer = gguf.GGUFWriter(path, case.arch)
    write_config(writer, case)
    quantised = any(kind is not Kind.F32 for kind in kinds.values())
    writer.add_file_type(
        gguf.LlamaFileType.MOSTLY_Q4_1 if quantised else gguf.LlamaFileType.ALL_F32
    )
    write_tokenizer(writer, tokenizer)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, weight in tensors.items():
        kind = kinds[name]
        data = weight if kind is Kind.F32 else gguf.quants.quantize(weight, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_config(writer: gguf.GGUFWriter, case: Case) -> None:
    config = case.config
    writer.add_type("model")
    writer.add_name(case.name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if case.explicit_head_dim:
        writer.add_key_length(case.config.head_dim)
        writer.add_value_length(case.config.head_dim)
    if case.arch == "llama":
        writer.add_vocab_size(VOCAB)
        writer.add_rope_dimension_count(case.config.head_dim)


def quantised_kind(name: str) -> Kind:
    """As in SmolLM2's file: 8-bit embedding, 4-bit matrices; but the second layer is 8-bit too."""
    if "norm" in name:
        return Kind.F32
    return Kind.Q4_1 if name.startswith("blk.0.") else Kind.Q8_0


def dequantised(case: Case, model: torch.nn.Module) -> torch.nn.Module:
    """The same model with every weight replaced by what its quantised form stands for."""
    state = {}
    for key, value in model.state_dict().items():
        tied_head = key == "lm_head.weight" and case.config.tie_word_embeddings
        name = "token_embd.weight" if tied_head else gguf_name(key)
        weight, kind, heads = value.numpy(), quantised_kind(name), permuted_heads(case, name)
        if kind is not Kind.F32:
            weight = permute(weight, heads) if heads else weight
            weight = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind).reshape(
                weight.shape
            )
            weight = unpermute(weight, heads) if heads else weight
        state[key] = torch.from_numpy(np.ascontiguousarray(weight))
    other = type(model)(case.config).eval().float()
    other.load_state_dict(state)
    return other


def without_specials(tokenizer: Tokenizer) -> Tokenizer:
    """A copy to which the special tokens are ordinary text."""
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(data))


def record_tokens(tokenizer: Tokenizer, path: Path) -> None:
    """Texts and their ids, with the special tokens recognised (`parsed`) and as ordinary text (`plain`)."""
    plain = without_specials(tokenizer)
    rows = [
        {"text": t, "parsed": tokenizer.encode(t).ids, "plain": plain.encode(t).ids} for t in TEXTS
    ]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def describe(name: str, seed: int, golden: dict[str, np.ndarray]) -> None:
    gaps = min(float(golden[key].min()) for key in golden if key.startswith("gaps_"))
    last = max(key for key in golden if key.startswith("logits_"))
    print(f"{name}: seed {seed}, smallest gap {gaps:.4f}, logit std {golden[last].std():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "goldens")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    record_tokens(tokenizer, out / "tiny_tokens.json")
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    for case in CASES:
        model, goldens, seed = find(case, prompts)
        tensors = gguf_tensors(case, model)
        kinds = [lambda _: Kind.F32, quantised_kind]
        for suffix, golden, kind_of in zip(["", "_quant"], goldens, kinds, strict=False):
            name = case.name + suffix
            describe(name, seed, golden)
            write_gguf(out / f"{name}.gguf", case, tensors, tokenizer, kind_of)
            np.savez_compressed(out / f"{name}.npz", **golden)


if __name__ == "__main__":
    main()
