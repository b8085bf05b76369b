"""Records what Hugging Face Transformers computes in fp32 with the other real models: Qwen2.5-Coder, Gemma 3.

Run by hand in the `transformers` peer (see bench/peers/setup.sh):

    python tests/tools/record_real_models.py --models FOLDER --text FOLDER [qwen2.5-coder] [gemma3]

Owns tests/goldens/real_*.npz, whose keys are described in tests/goldens/README.md. The weights are the
file's, dequantised: before anything is recorded, each is compared bit for bit with what the `gguf` package
makes of the file. Attention is the plain one ("eager").
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import record_smollm2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

record_smollm2.STEPS = 48
PADDED = 2048  # tokens of a batch, padding included
SAMPLED = 2000  # logits kept of a row, evenly over the vocabulary


@dataclass(frozen=True, slots=True)
class Chat:
    """The first turn of a row of prompts.jsonl as the user's message, rendered by the file's template."""

    name: str


@dataclass(frozen=True, slots=True)
class Text:
    """`tokens` tokens of a text from a character on."""

    file: str
    start: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.file}@{self.start}"


CHATS = [
    *(
        "p005",
        "p022",
        "p026",
        "p041",
        "p044",
        "p060",
        "p076",
        "p091",
        "p101",
        "p106",
        "p111",
        "p147",
    ),
    *(
        "p104",
        "p105",
        "p168",
        "p176",
        "p187",
        "p206",
        "p211",
        "p216",
        "p217",
        "p221",
        "p222",
        "p107",
    ),
]
EN = [
    "en_alice",
    "en_inaugural_addresses",
    "en_pride_and_prejudice",
    "en_sherlock_holmes",
    "en_time_machine",
]
ZH = ["zh_classics", "zh_technical_docs"]
# Gemma 3 sees 512 tokens in most layers: two prompts are longer, one path crosses the border.
TEXTS = [
    *(Text(f"{name}.txt", 20_000 * i, 12 * i) for name in EN for i in range(1, 5)),
    Text("zh_classics.txt", 5_000, 40),
    Text("en_sherlock_holmes.txt", 100_000, 490),
    Text("en_pride_and_prejudice.txt", 300_000, 620),
    Text("zh_technical_docs.txt", 2_000, 900),
]
MODELS: dict[str, tuple[str, list[Chat] | list[Text]]] = {
    "qwen2.5-coder": ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", [Chat(name) for name in CHATS]),
    "gemma3": ("gemma3-270m-q4_k_m.gguf", TEXTS),
}
# What Transformers calls the tensors of a layer; outside of layers: _TOP.
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def load(path: Path) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """The model in fp32 and its tokenizer, both of the file alone."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    verify(model, path)
    return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def verify(model: torch.nn.Module, path: Path) -> None:
    """Every weight of the model is the file's, bit for bit, and there is no other."""
    config, weights = model.config, dict(model.named_parameters())
    gemma = config.model_type.startswith("gemma")
    names = _LAYER | _GEMMA if gemma else _LAYER
    reader = gguf.GGUFReader(path)
    fields = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items()}
    for tensor in reader.tensors:
        stem, _, ending = tensor.name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        name = f"model.layers.{layer[1]}.{names[layer[2]]}" if layer else _TOP[stem]
        mine = weights.pop(f"{name}.{ending}").detach().numpy()
        if gemma and stem.endswith("norm"):
            mine = 1 + mine  # as the model computes it
        theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(mine, theirs.reshape(mine.shape)), tensor.name
    assert not weights, list(weights)
    rope = config.rope_parameters
    assert (rope["full_attention"] if gemma else rope)["rope_theta"] == fields["rope.freq_base"], (
        rope
    )
    assert config.rms_norm_eps == fields["attention.layer_norm_rms_epsilon"]
    assert config.num_key_value_heads == fields["attention.head_count_kv"]
    if gemma:
        assert config.sliding_window == fields["attention.sliding_window"]
        assert rope["sliding_attention"]["rope_theta"] == 10_000.0
        assert [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"] == [
            5,
            11,
            17,
        ]
        assert config.query_pre_attn_scalar == fields["attention.key_length"]


def encode(prompt: Chat | Text, tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[int]:
    if isinstance(prompt, Text):
        text = (folder / prompt.file).read_text()[prompt.start :][: 8 * prompt.tokens]
        return [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)][
            : prompt.tokens
        ]
    rows = map(json.loads, (folder / "prompts.jsonl").read_text().splitlines())
    (row,) = (row for row in rows if row["id"] == prompt.name)
    messages = [{"role": "user", "content": row["turns"][0]}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
    return ids


def batches(prompts: list[list[int]]) -> list[list[int]]:
    """All prompts, those of like length together."""
    out: list[list[int]] = [[]]
    for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        if out[-1] and (len(out[-1]) + 1) * len(prompts[i]) > PADDED:
            out.append([])
        out[-1].append(i)
    return out


@torch.no_grad()
def rows_of_logits(model: torch.nn.Module, prompts: list[list[int]]) -> dict[str, np.ndarray]:
    """Logits after the last token of some prompts: a sample of them, and two sums over all."""
    rows = torch.cat(
        [model(torch.tensor([p]), logits_to_keep=1).logits[0] for p in prompts]
    ).double()
    ids = np.linspace(0, rows.shape[1] - 1, SAMPLED).astype(np.int32)
    return {
        "logit_ids": ids,
        "logits": rows[:, ids].float().numpy(),
        "logit_lse": torch.logsumexp(rows, 1).numpy(),
        "logit_norm": rows.norm(dim=1).numpy(),
    }


def record(name: str, models: Path, folder: Path, out: Path) -> None:
    file, wanted = MODELS[name]
    model, tokenizer = load(models / file)
    prompts = [encode(prompt, tokenizer, folder) for prompt in wanted]
    rows: dict[int, dict[str, np.ndarray]] = {}
    for batch in batches(prompts):
        paths = record_smollm2.continue_greedily(model, [prompts[i] for i in batch])
        for i, tokens in zip(batch, paths, strict=True):
            rows[i] = record_smollm2.judge(model, prompts[i], tokens)
            gap, text = rows[i]["gaps"].min(), tokenizer.decode(tokens)
            print(f"{wanted[i].name} ({len(prompts[i])}), {gap:.1e}: {text!r}", flush=True)
    golden = {key: np.stack([rows[i][key] for i in range(len(prompts))]) for key in rows[0]}
    golden["prompt_ids"] = np.concatenate([np.array(ids, np.int32) for ids in prompts])
    golden["prompt_starts"] = np.cumsum([0, *map(len, prompts)]).astype(np.int32)
    golden["names"] = np.array([prompt.name for prompt in wanted])
    golden["logit_prompts"] = np.linspace(0, len(prompts) - 1, 6).astype(np.int32)
    golden |= rows_of_logits(model, [prompts[i] for i in golden["logit_prompts"]])
    np.savez_compressed(out / f"real_{name}.npz", **golden)
    close = (golden["gaps"] < 1e-3).any(1).sum()
    print(f"{name}: {close} of {len(prompts)} paths meet a gap under 1e-3")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "goldens")
    parser.add_argument("names", nargs="*", default=list(MODELS), help="only these")
    args = parser.parse_args()
    torch.set_num_threads(2)
    for name in args.names:
        record(name, args.models, args.text, args.out)


if __name__ == "__main__":
    main()
