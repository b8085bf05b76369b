"""Two examples of each command, which its `--help` ends with.

Owns the texts. A test parses every one with the command's own flags.
"""

from __future__ import annotations

# command -> what is typed behind it, and what that does
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "serve": (
        ("smollm2 --port 8001", "the page and the API at http://127.0.0.1:8001/"),
        ("model.gguf --kv-cache-memory 4G --max-num-seqs 32 --api-key SECRET", "limits, and a key"),
    ),
    "route": (
        ("http://gpu1:8000 http://gpu2:8000", "one address, :8080, for two servers"),
        (
            "story=http://gpu1:8000 code=http://gpu2:8000 --replicas-file replicas.txt",
            "models, and a file that is watched",
        ),
    ),
    "chat": (
        ("", "a chat with smollm2 in this process"),
        ("--base-url http://127.0.0.1:8000", "a chat with the model of a running server"),
    ),
    "batch": (
        ("requests.jsonl answers.jsonl", "answer every line; run it again to go on after a stop"),
        (
            "requests.jsonl answers.jsonl --model model.gguf --max-num-seqs 128",
            "another model, more at once",
        ),
    ),
    "generate": (
        ('--temperature 0 "What does HTTP stand for?"', "a question, greedily"),
        ('model.gguf --no-chat "Once upon a time" -n 40', "a text to go on with"),
    ),
    "pull": (("smollm2", "an alias"), ("Qwen/Qwen3-0.6B", "an id of the hub")),
    "list": (("", "as a table"), ("--json", "for a program")),
    "rm": (("smollm2", "asks first"), ("--yes Qwen/Qwen3-0.6B", "does not ask")),
    "plan": (
        ("model.gguf --memory 8GB", "how many sequences fit beside the weights in 8 GB"),
        ("Qwen/Qwen3-8B --gpu H100", "on a GPU that is not here; its config.json alone is fetched"),
    ),
    "compare": (
        ("smollm2 --policies static,chunked", "static beside continuous batching"),
        ("smollm2 --mix tenants --orders fcfs,fair", "two queue orders, for several tenants"),
    ),
    "simulate": (
        (
            "--model config.json --gpu H100 --rate 4 --ttft-ms 2000 --search",
            "how many H100s serve 4 requests a second",
        ),
        ("--log steps.log --policy prefill_first", "recorded traffic under another policy"),
    ),
    "tune": (
        ("smollm2 --rate 1 --ttft-ms 2000 --tpot-ms 100", "for one request a second"),
        ("--log steps.log --tpot-ms 100 --budget 60", "for recorded traffic, in one minute"),
    ),
    "calibrate": (
        (
            "smollm2",
            "measure this machine; then: pageturner simulate --calibration calibration.json",
        ),
        ("smollm2 --check", "and compare predictions with five more measured loads"),
    ),
    "verify": (
        (
            'answer.json --prompt "Why is the sky blue?" --key-file receipts.key',
            "an answer with its receipt",
        ),
        (
            "receipt.json --prompt @request.json --model model.gguf",
            "the prompt as the whole request",
        ),
    ),
    "replay": (
        ("steps.log", "plans, and tokens too if the log holds them (serve --step-log-tokens)"),
        ("steps.log --plans --run 1", "only plans, of the first start of the engine"),
    ),
    "doctor": (("", "this machine"), ("model.gguf --no-measure --json", "for one model, as JSON")),
    "completion": (
        (
            "bash",
            'in ~/.bashrc: eval "$(pageturner completion bash)"; zsh: the same, after compinit',
        ),
        ("fish", "in ~/.config/fish/config.fish: pageturner completion fish | source"),
    ),
    "key new": (
        ("--tenant alice >> keys.toml", "then: pageturner serve --api-key-file keys.toml"),
        ("--tenant bob --max-concurrent 4 --tokens-per-minute 20000", "with limits"),
    ),
    "bench serve": (
        (
            "--base-url http://127.0.0.1:8000 --concurrency 8",
            "eight clients, each after its answer",
        ),
        (
            "--request-rate 2 --goodput ttft:2000 tpot:100",
            "two requests a second, and how many are in time",
        ),
    ),
    "bench sweep": (
        (
            "--model smollm2 --server other=http://127.0.0.1:8080",
            "a server of ours beside another one",
        ),
        (
            "--server ours=http://127.0.0.1:8000 --rate auto",
            "requests a second, doubled to the knee",
        ),
    ),
    "deploy": (
        ("app.toml --detach", "start the models of the file, and leave them running"),
        ("app.toml --write serve.yaml", "only write the configuration"),
    ),
    "bench engine": (
        ("--model smollm2", "random prompts"),
        ("--backend null --max-num-seqs 64", "the engine's own time, without a model"),
    ),
    "bench kernels": (
        ("--threads 1 --only gemm", "matrix products on one thread"),
        ("--json new.json --against old.json", "beside an earlier run"),
    ),
}


def epilog(command: str) -> str:
    """Return the examples that end the help of a command; "" for a command without examples."""
    lines = []
    for words, does in EXAMPLES.get(command, ()):
        lines.append(f"  {' '.join(('pageturner', command, words)).rstrip()}\n      {does}")
    return "\n".join(["examples:", *lines]) if lines else ""
