"""Records what Hugging Face Transformers computes with SmolLM2 in fp32: greedy paths, token losses, beams.

Run by hand in the `transformers` peer (see bench/peers/setup.sh):

    python tests/tools/record_smollm2.py --model FILE.gguf --text FOLDER

FOLDER holds prompts.jsonl and en_time_machine.txt. Owns tests/goldens/smollm2_*.npz; their keys are described
in tests/goldens/README.md. The weights are the file's, dequantised; attention is the plain one ("eager").
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

PROMPTS, STEPS, BATCH = 100, 64, 20
WINDOWS, WINDOW = 4, 512
EOS = 2
BEAM_PROMPTS, BEAM_WIDTH, BEAM_STEPS = 30, 4, 48
BEAM_SETTINGS = ((0.6, False), (1.0, False), (1.4, False), (1.0, True), (1.0, "never"))


def load(path: Path) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """The model in fp32 and its tokenizer with the pre-tokenizer that the file names (`smollm`)."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    config = model.config
    assert config.rope_parameters["rope_theta"] == 1e5, config.rope_parameters
    assert abs(config.rms_norm_eps - 1e-5) < 1e-9, config.rms_norm_eps
    assert config.tie_word_embeddings
    assert config.head_dim == 64
    assert all(p.dtype == torch.float32 for p in model.parameters())
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return model, tokenizer


def choose(path: Path) -> list[dict[str, object]]:
    """PROMPTS prompts spread evenly over the file, so that every category and language occurs."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [rows[i * len(rows) // PROMPTS] for i in range(PROMPTS)]


@torch.no_grad()
def continue_greedily(model: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    """STEPS best tokens for each prompt, left-padded to one batch; end of sequence does not end a path."""
    width = max(map(len, prompts))
    ids = torch.tensor([[EOS] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions, cache, tokens = (mask.cumsum(1) - 1).clamp(min=0), None, []
    for _ in range(STEPS):
        out = model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        )
        cache = out.past_key_values
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(ids)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)
        positions = positions[:, -1:] + 1
    return [[int(t) for t in row] for row in torch.cat(tokens, 1)]


@torch.no_grad()
def judge(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> dict[str, np.ndarray]:
    """Logprob, runner-up and gap of each token, from one forward pass over the whole sequence."""
    logits = model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits[0]
    best = torch.topk(logits, 2)
    chosen = torch.tensor(tokens)
    differ = (best.indices[:, 0] != chosen).nonzero()
    gaps = best.values[:, 0] - best.values[:, 1]
    for place in differ.flatten().tolist():
        print(f"  alone in one pass and in a batch differ at {place}: gap {float(gaps[place]):.2e}")
    second = torch.where(best.indices[:, 0] == chosen, best.indices[:, 1], best.indices[:, 0])
    return {
        "tokens": chosen.numpy().astype(np.int32),
        "logprobs": torch.log_softmax(logits, -1).gather(1, chosen[:, None])[:, 0].numpy(),
        "second": second.numpy().astype(np.int32),
        "gaps": gaps.numpy(),
    }


def record_greedy(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, text: Path, out: Path
) -> None:
    chosen = choose(text / "prompts.jsonl")
    prompts = []
    for row in chosen:
        messages = [{"role": "user", "content": row["turns"][0]}]  # type: ignore[index]
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        prompts.append(tokenizer.encode(rendered, add_special_tokens=False))
    by_length = sorted(range(PROMPTS), key=lambda i: len(prompts[i]))
    rows: dict[int, dict[str, np.ndarray]] = {}
    for first in range(0, PROMPTS, BATCH):
        batch = by_length[first : first + BATCH]
        for i, tokens in zip(
            batch, continue_greedily(model, [prompts[i] for i in batch]), strict=True
        ):
            rows[i] = judge(model, prompts[i], tokens)
        print(f"{len(rows)} of {PROMPTS} prompts", flush=True)
    golden = {key: np.stack([rows[i][key] for i in range(PROMPTS)]) for key in rows[0]}
    golden["prompt_ids"] = np.concatenate([np.array(p, np.int32) for p in prompts])
    golden["prompt_starts"] = np.cumsum([0, *map(len, prompts)]).astype(np.int32)
    golden["names"] = np.array([str(row["id"]) for row in chosen])
    np.savez_compressed(out / "smollm2_greedy.npz", **golden)
    gaps = golden["gaps"]
    print(
        f"tokens with a gap under 1e-3: {(gaps < 1e-3).sum()} of {gaps.size}, smallest {gaps.min():.2e}"
    )
    print(f"prompts whose path contains end of sequence: {(golden['tokens'] == EOS).any(1).sum()}")


@torch.no_grad()
def record_loss(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, text: Path, out: Path
) -> None:
    """Negative log-likelihood of each token but the first, in separate windows of English prose."""
    source = (text / "en_time_machine.txt").read_text()
    ids = tokenizer.encode(source, add_special_tokens=False)[: WINDOWS * WINDOW]
    windows = torch.tensor(ids).view(WINDOWS, WINDOW)
    logits = torch.cat([model(window[None]).logits for window in windows])[:, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(2, windows[:, 1:, None])[..., 0]
    golden = {
        "ids": windows.numpy().astype(np.int32),
        "nll": -logprobs.numpy(),
        "top": logits.argmax(-1).numpy().astype(np.int32),
    }
    np.savez_compressed(out / "smollm2_loss.npz", **golden)
    print(f"mean loss {golden['nll'].mean():.6f}, perplexity {np.exp(golden['nll'].mean()):.4f}")


def record_beams(model: torch.nn.Module, out: Path) -> None:
    """Beam search from BEAM_PROMPTS of the greedy prompts, under every one of BEAM_SETTINGS."""
    greedy = np.load(out / "smollm2_greedy.npz")
    starts = greedy["prompt_starts"]
    chosen = [i * PROMPTS // BEAM_PROMPTS for i in range(BEAM_PROMPTS)]
    shape = (len(chosen), len(BEAM_SETTINGS), BEAM_WIDTH)
    tokens = np.full((*shape, BEAM_STEPS), -1, np.int32)
    scores = np.zeros(shape, np.float32)
    for row, i in enumerate(chosen):
        prompt = torch.tensor(
            greedy["prompt_ids"][None, starts[i] : starts[i + 1]], dtype=torch.long
        )
        for column, (penalty, early) in enumerate(BEAM_SETTINGS):
            found = model.generate(  # type: ignore[operator]
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                num_beams=BEAM_WIDTH,
                num_return_sequences=BEAM_WIDTH,
                max_new_tokens=BEAM_STEPS,
                length_penalty=penalty,
                early_stopping=early,
                eos_token_id=EOS,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
            for rank, answer in enumerate(found.sequences[:, prompt.shape[1] :].tolist()):
                length = answer.index(EOS) + 1 if EOS in answer else len(answer)
                tokens[row, column, rank, :length] = answer[:length]
                scores[row, column, rank] = found.sequences_scores[rank]
        print(f"beams: {row + 1} of {len(chosen)} prompts", flush=True)
    np.savez_compressed(
        out / "smollm2_beams.npz",
        prompts=np.array(chosen, np.int32),
        settings=np.array([[penalty, str(early)] for penalty, early in BEAM_SETTINGS]),
        tokens=tokens,
        scores=scores,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--only-beams", action="store_true", help="the greedy paths are there already"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "goldens")
    args = parser.parse_args()
    print("model", hashlib.sha256(args.model.read_bytes()).hexdigest())
    model, tokenizer = load(args.model)
    if not args.only_beams:
        record_loss(model, tokenizer, args.text, args.out)
        record_greedy(model, tokenizer, args.text, args.out)
    record_beams(model, args.out)


if __name__ == "__main__":
    main()
