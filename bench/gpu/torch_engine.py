"""A plain PyTorch engine to measure ours against, for Llama and Qwen3 folders of bf16 weights.

It batches continuously: prompts are computed whole, many in one forward pass by FlashAttention-2 over flat
rows (varlen), and decoding sequences take one token a step in a CUDA graph made for each batch size. Each
sequence has a place of `length` tokens in a contiguous KV cache; when one ends, the last one moves into its
place, so that a batch is always the first places. It owns no scheduler, pages or server: it stands in for an
engine such as vLLM where none can be carried to the device.

    python bench/gpu/torch_engine.py MODEL_FOLDER JOBS.json      JOBS: [[prompt tokens, output tokens], ...]

prints one line of JSON with tokens per second, and after each hundred steps one of the pace so far.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

SIZES = (1, 2, 4, 8, *range(16, 257, 16))  # batch sizes that have a graph
PREFILL_TOKENS = 16384  # most prompt tokens of one forward pass
TEMPERATURE = 0.6


def attention(
    q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, longest: tuple[int, int], used: Any
) -> Any:
    """Causal attention of flat rows [T, heads, D] over keys that begin at `starts_k`. used: how many keys of
    each sequence count, where its place is longer than it."""
    if not q.is_cuda:
        return _attention_on_host(q, k, v, starts_q, starts_k, used)
    return torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        starts_q,
        starts_k,
        *longest,
        0.0,
        True,
        False,
        scale=q.shape[-1] ** -0.5,
        seqused_k=used,
    )[0]


def _attention_on_host(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, used: Any) -> Any:
    """The same without FlashAttention, so that the engine can be tested on a CPU."""
    out = torch.empty_like(q)
    for s in range(len(starts_q) - 1):
        begin, end = int(starts_q[s]), int(starts_q[s + 1])
        count = int(used[s]) if used is not None else int(starts_k[s + 1] - starts_k[s])
        keys, values = (
            one[int(starts_k[s]) : int(starts_k[s]) + count].transpose(0, 1) for one in (k, v)
        )
        rows = torch.arange(count - (end - begin), count, device=q.device)
        mask = torch.arange(count, device=q.device)[None, :] <= rows[:, None]
        query = q[begin:end].transpose(0, 1)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        out[begin:end] = mixed.transpose(0, 1)
    return out


class TorchEngine:
    """One model with room for `places` sequences of at most `length` tokens."""

    def __init__(self, folder: Path, places: int, length: int, device: str = "cuda") -> None:
        from safetensors.torch import load_file

        self.config = config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors", device=device)
        self.weights = {name.removeprefix("model."): value for name, value in weights.items()}
        self.head = self.weights.get("lm_head.weight", self.weights["embed_tokens.weight"])
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim, self.device, self.length = config["head_dim"], device, length
        self.layers = config["num_hidden_layers"]
        for i in range(self.layers):
            for joined, names in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
                part = joined.split(".")[0]
                parts = [
                    self.weights.pop(f"layers.{i}.{part}.{name}_proj.weight") for name in names
                ]
                self.weights[f"layers.{i}.{joined}"] = torch.cat(parts)
        size = (self.layers, 2, places * length, self.kv_heads, self.dim)
        self.kv = torch.zeros(size, dtype=torch.bfloat16, device=device)
        theta = config["rope_parameters"]["rope_theta"]
        inverse = theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        angle = (
            torch.outer(torch.arange(length, dtype=torch.float32), inverse).repeat(1, 2).to(device)
        )
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        self.graphs: dict[int, Any] = {}
        self.tokens, self.positions = (
            torch.zeros(places, dtype=torch.long, device=device) for _ in range(2)
        )
        self.places = torch.arange(places + 1, device=device)

    def norm(self, x: Any, name: str) -> Any:
        weight = self.weights[name]
        return F.rms_norm(x, (weight.shape[0],), weight, self.config["rms_norm_eps"])

    def rotate(self, x: Any, positions: Any) -> Any:
        left, right = x.chunk(2, -1)
        turned = torch.cat((-right, left), -1)
        return x * self.cos[positions][:, None] + turned * self.sin[positions][:, None]

    def forward(
        self, tokens: Any, positions: Any, slots: Any, attend: Any, wanted: Any = None
    ) -> Any:
        """Tokens drawn behind the rows `wanted`, or behind all."""
        x = F.embedding(tokens, self.weights["embed_tokens.weight"])
        for i in range(self.layers):
            name = f"layers.{i}."
            h = self.norm(x, f"{name}input_layernorm.weight")
            rows = F.linear(h, self.weights[f"{name}self_attn.qkv"]).view(len(x), -1, self.dim)
            q, k, v = rows.split([self.heads, self.kv_heads, self.kv_heads], 1)
            if f"{name}self_attn.q_norm.weight" in self.weights:
                q = self.norm(q, f"{name}self_attn.q_norm.weight")
                k = self.norm(k, f"{name}self_attn.k_norm.weight")
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            self.kv[i, 0].index_copy_(0, slots, k)
            self.kv[i, 1].index_copy_(0, slots, v)
            mixed = attend(q, k, v, i).reshape(len(x), -1)
            x = x + F.linear(mixed, self.weights[f"{name}self_attn.o_proj.weight"])
            h = self.norm(x, f"{name}post_attention_layernorm.weight")
            gate, up = F.linear(h, self.weights[f"{name}mlp.gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, self.weights[f"{name}mlp.down_proj.weight"])
        x = self.norm(x if wanted is None else x[wanted], "norm.weight")
        weights = torch.softmax(F.linear(x, self.head).float() / TEMPERATURE, -1)
        return (weights / torch.empty_like(weights).exponential_()).argmax(-1)

    def prefill(self, prompts: list[list[int]], first: int) -> Any:
        """Compute whole prompts into the places from `first` on; their next tokens."""
        lengths = torch.tensor([len(one) for one in prompts])
        starts = F.pad(lengths.cumsum(0), (1, 0)).to(self.device, torch.int32)
        positions = torch.cat([torch.arange(len(one)) for one in prompts]).to(self.device)
        place = torch.repeat_interleave(torch.arange(len(prompts)) + first, lengths).to(self.device)
        tokens = torch.tensor([token for one in prompts for token in one], device=self.device)
        longest = int(lengths.max())

        def attend(q: Any, k: Any, v: Any, layer: int) -> Any:
            return attention(q, k, v, starts, starts, (longest, longest), None)

        return self.forward(
            tokens, positions, place * self.length + positions, attend, starts[1:].long() - 1
        )

    def _decode(self, size: int) -> None:
        starts, used = self.places[: size + 1].int(), (self.positions[:size] + 1).int()
        slots = self.places[:size] * self.length + self.positions[:size]

        def attend(q: Any, k: Any, v: Any, layer: int) -> Any:
            keys, values = self.kv[layer]
            return attention(q, keys, values, starts, starts * self.length, (1, self.length), used)

        found = self.forward(self.tokens[:size], self.positions[:size], slots, attend)
        self.tokens[:size] = found
        self.positions[:size] += 1

    def record(self, sizes: tuple[int, ...] = SIZES) -> None:
        """Make the graphs, the largest first."""
        pool = None
        for size in sorted(sizes, reverse=True):
            self.positions.zero_()
            self._decode(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._decode(size)
            pool, self.graphs[size] = graph.pool(), graph

    def step(self, count: int) -> None:
        """One token for the first `count` places."""
        size = next((one for one in sorted(self.graphs) if one >= count), 0)
        if size:
            self.positions[count:size] = (
                0  # the places of nobody count on from the start of their own
            )
            self.graphs[size].replay()
        else:
            self._decode(count)

    def move(self, source: int, to: int) -> None:
        """The sequence of one place takes another."""
        begin, end, many = source * self.length, to * self.length, int(self.positions[source])
        self.kv[:, :, end : end + many] = self.kv[:, :, begin : begin + many]
        self.tokens[to], self.positions[to] = self.tokens[source], self.positions[source]

    def run(self, jobs: list[Any], seats: int, told: Any = None) -> int:
        """Answer all jobs, at most `seats` at once; the number of tokens."""
        waiting, left, done = list(jobs), [], 0
        while waiting or left:
            prompts: list[list[int]] = []
            while waiting and len(left) + len(prompts) < seats:
                if prompts and sum(map(len, prompts)) + len(waiting[0][0]) > PREFILL_TOKENS:
                    break
                prompts.append(waiting[0][0])
                left.append(waiting.pop(0)[1])
            if prompts:
                first = len(left) - len(prompts)
                self.tokens[first : len(left)] = self.prefill(prompts, first)
                self.positions[first : len(left)] = torch.tensor([len(one) for one in prompts]).to(
                    self.device
                )
                fresh = range(first, len(left))
            else:
                self.step(len(left))
                fresh = range(len(left))
            done += len(fresh)
            for place in fresh:
                left[place] -= 1
            self.tokens[: len(left)].cpu()  # what a server does: each step's tokens are told
            for place in sorted((one for one in fresh if left[one] <= 0), reverse=True):
                if place != len(left) - 1:
                    self.move(len(left) - 1, place)
                left[place] = left[-1]
                left.pop()
            if told is not None:
                told(done)
        return done


def main() -> None:
    folder, jobs = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    length = max(len(prompt) + output for prompt, output in jobs) + 1
    seats = min(256, len(jobs))
    with torch.inference_mode():
        engine = TorchEngine(folder, 256, length)
        engine.run([(prompt, 2) for prompt, _ in jobs[:64]], seats)
        engine.record()
        torch.cuda.synchronize()
        begin, last = time.perf_counter(), 0.0

        def told(done: int) -> None:
            nonlocal last
            took = time.perf_counter() - begin
            if took > last + 2.0:
                print(
                    json.dumps({"tok_s": done / took, "output_tokens": done, "seconds": took}),
                    flush=True,
                )
                last = took

        tokens = engine.run(jobs, seats, told)
        took = time.perf_counter() - begin
    figures = {
        "tok_s": tokens / took,
        "output_tokens": tokens,
        "seconds": took,
        "torch": torch.__version__,
    }
    print(json.dumps(figures | {"requests_s": len(jobs) / took}), flush=True)


if __name__ == "__main__":
    main()
