"""Flags of vLLM and llama-server: understood where ours means the same, else answered with ours.

Owns the names. Must not know what a flag of ours does. Only for commands that take the engine's
settings.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from pageturner.errors import EngineFault

OWN = "--max-num-seqs"  # who takes this takes the engine's settings

# the same under another name
ALIASES = {
    "--scheduling-policy": "--order",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--uvicorn-log-level": "--log-level",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-t": "--threads",
    "--alias": "--served-model-name",
    "-a": "--served-model-name",
    "--cache-type-k": "--kv-cache-dtype",
    "-ctk": "--kv-cache-dtype",
}
# the same value under another name
VALUES: Mapping[str, Mapping[str, str]] = {
    "--dtype": {"float": "float32"},
    "--kv-cache-dtype": {"fp8": "fp8_e4m3"},
    "--tool-call-parser": {"llama3_json": "llama3", "openai": "harmony"},
    "--reasoning-parser": {"deepseek_r1": "think", "qwen3": "think", "openai_gptoss": "harmony"},
}
# what they ask for is so anyway
NOT_NEEDED = {
    "--trust-remote-code": "code that comes with a model is never run",
    "--enforce-eager": "no graphs are captured",
    "--enable-chunked-prefill": "the default policy chunks prefill",
    "--enable-lora": "--lora NAME=FOLDER is enough",
    "--enable-auto-tool-choice": "tools are always on",
    "--cont-batching": "batching is continuous",
    "-cb": "batching is continuous",
    "--jinja": "chat templates are always Jinja's",
}
# how many processes or GPUs compute one model; 1 is so anyway
PARALLEL = {
    "--data-parallel-size": "-dp",
}
ANSWERS = {
    "--gpu-memory-utilization": "memory is given as a size, not a share: --kv-cache-memory 4G (without it,"
    " the size is chosen from free memory)",
    "--swap-space": "KV blocks go to host memory with --kv-host-memory 4G",
    "--cpu-offload-gb": "weights are not offloaded; a smaller model file or --quantization int8 takes less",
    "--num-gpu-blocks-override": "the KV cache is given as a size: --kv-cache-memory 4G",
    "--max-cpu-loras": "the most adapters in memory are --max-loras",
    "--max-lora-rank": "adapters of any rank are taken; leave it out",
    "--max-logprobs": "the limit is --max-logprobs-per-request",
    "--speculative-config": "drafts are --speculation ngram, or --speculation draft --draft-model MODEL",
    "--num-speculative-tokens": "the number of draft tokens is chosen by what was accepted; leave it out",
    "--kv-transfer-config": "prefill elsewhere is --role, --prefill-listen and --prefill-from",
    "--kv-events-config": "KV events are --kv-events tcp://*:5557",
    "--override-generation-config": "sampling defaults are --generation-config FILE",
    "--tokenizer": "the tokenizer is the model's own; leave it out",
    "--tokenizer-mode": "the tokenizer is the model's own; leave it out",
    "--download-dir": "models are kept in the cache of huggingface_hub: set HF_HOME",
    "--revision": "pass the folder of a snapshot in place of the model's id",
    "--seed": "a seed belongs to a request: send its field seed",
    "--task": "one server generates, embeds and reranks, by route; leave it out",
    "--runner": "one server generates, embeds and reranks, by route; leave it out",
    "--long-prefill-token-threshold": "chunks are bounded by --max-num-batched-tokens",
    "--ctx-size": "the longest sequence is --max-model-len (for each request, not for all together)",
    "--n-gpu-layers": "all layers are computed on one device: --device cuda or cpu",
    "--parallel": "the most sequences at once are --max-num-seqs",
    "--batch-size": "the most tokens in a step are --max-num-batched-tokens",
    "--ubatch-size": "the most tokens in a step are --max-num-batched-tokens",
    "--flash-attn": "attention is computed block by block anyway; leave it out",
    "--cache-type-v": "keys and values have one type: --kv-cache-dtype",
    "--hf-repo": "the id on the hub is given as the model: pageturner serve org/name",
    "--no-mmap": "files are mapped, and packed into memory of our own; leave it out",
    "--mlock": "memory is not locked; leave it out",
}
# llama-server's short names of these
SHORT = {
    "-c": "--ctx-size",
    "-ngl": "--n-gpu-layers",
    "--gpu-layers": "--n-gpu-layers",
    "-np": "--parallel",
    "-b": "--batch-size",
    "-ub": "--ubatch-size",
    "-fa": "--flash-attn",
    "-ctv": "--cache-type-v",
    "-hf": "--hf-repo",
    "-m": "--model",
}
ANSWERED_VALUES = {
    "--dtype": (
        ("half", "float16", "bfloat16"),
        "weights are computed as the file has them (auto) or in float32; of the KV cache: --kv-cache-dtype",
    ),
    "--quantization": (
        (
            "awq",
            "gptq",
            "fp8",
            "bitsandbytes",
            "compressed-tensors",
            "gguf",
            "mxfp4",
            "awq_marlin",
            "gptq_marlin",
        ),
        "a quantised checkpoint is read as its own files say: leave it out",
    ),
}

# commands of vLLM, Ollama and llama.cpp -> what there is for it here
COMMANDS = {
    "run": "pageturner chat MODEL talks to a model, pageturner generate MODEL PROMPT asks it once",
    "complete": "pageturner generate MODEL PROMPT continues a text",
    "run-batch": "pageturner batch IN.jsonl OUT.jsonl",
    "ls": "pageturner list",
    "show": "pageturner plan MODEL tells what it is and what it takes",
    "ps": "what a server has: curl http://127.0.0.1:8000/v1/models",
    "stop": "a server ends with Ctrl-C, or when its process gets SIGTERM",
    "create": "pageturner serve --chat-template and --generation-config take what a Modelfile says",
    "collect-env": "pageturner doctor",
    "bench latency": "pageturner bench engine",
    "bench throughput": "pageturner bench engine",
}
# flags of `vllm bench serve` -> ours
BENCH = {
    "--random-input-len": "--input-len",
    "--random-output-len": "--output-len",
    "--max-concurrency": "--concurrency",
    "--result-filename": "--output",
    "--url": "--base-url",
}
BENCH_ANSWERS = {
    "--host": "the server is --base-url http://HOST:PORT",
    "--port": "the server is --base-url http://HOST:PORT",
    "--backend": "any OpenAI-compatible server is asked in one way; --endpoint says where; leave it out",
    "--dataset-name": "prompts are random, or --workload FILE, or --trace FILE; leave it out",
    "--dataset-path": "a file of prompts is --workload FILE, a trace --trace FILE",
    "--save-result": "the figures are written with --output FILE.json",
    "--percentile-metrics": "all percentiles are told; leave it out",
}


def other_command(typed: str) -> str:
    """Return the hint to append to the message about another engine's command: what to use here
    instead. "" if there is none."""
    return f": {COMMANDS[typed]}" if typed in COMMANDS else ""


def concerns(words: Sequence[str]) -> bool:
    """Return whether one of the words may be a flag of another engine."""
    theirs = {"--model", "--lora-modules", *PARALLEL.values()}
    theirs.update(
        BENCH, BENCH_ANSWERS, ALIASES, VALUES, NOT_NEEDED, PARALLEL, ANSWERS, ANSWERED_VALUES, SHORT
    )
    names = [word.partition("=")[0] for word in words]
    return any(name in theirs or _hyphened(name) != name for name in names)


def _hyphened(name: str) -> str:
    """A long flag as it is written here: vLLM takes underscores, too."""
    return name.replace("_", "-") if name.startswith("--") else name


def translate(words: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """The words with our names in place of others, and notes about what was left out. known: the
    flags of the command.

    EngineFault('bad_setting') names our flag where another engine's has no equal here.
    """
    if OWN not in known:
        return _bench(words, known) if "--request-rate" in known else list(words), []
    rest, found, notes = list(words), list[str](), list[str]()
    while rest and rest[0] != "--":
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        flag = next(
            (long for long, short in PARALLEL.items() if flag == short), SHORT.get(flag, flag)
        )
        if (name := _hyphened(flag)) != flag and (name in known or concerns([name])):
            flag, word = name, name + equals + value

        def taken(equals: str = equals, value: str = value) -> str:
            return value if equals or not rest else rest.pop(0)

        if flag in known and (flag in VALUES or flag in ANSWERED_VALUES):
            found += [flag, _value(flag, taken())]
        elif flag in known:
            found.append(word)
        elif flag in NOT_NEEDED:
            notes.append(f"{flag} was left out: {NOT_NEEDED[flag]}")
        elif flag in PARALLEL:
            notes.append(_one_process(flag, taken()))
        elif flag == "--model":
            found.append(taken())
        elif flag == "--lora-modules" and "--lora" in known:
            found += ["--lora", _adapter(taken())]
            while rest and rest[0][:1] != "-" and "=" in rest[0]:
                found += ["--lora", _adapter(rest.pop(0))]
        elif flag in ANSWERS:
            raise EngineFault("bad_setting", f"{flag} is not a flag here: {ANSWERS[flag]}")
        else:
            found.append(ALIASES[flag] + equals + value if ALIASES.get(flag) in known else word)
    return found + rest, notes


def _bench(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words of `bench serve`."""
    found = []
    for word in words:
        flag, equals, value = word.partition("=")
        flag = _hyphened(flag)
        if flag in BENCH_ANSWERS and flag not in known:
            raise EngineFault("bad_setting", f"{flag} is not a flag here: {BENCH_ANSWERS[flag]}")
        ours = flag if flag in known else BENCH.get(flag, "")
        found.append(ours + equals + value if ours in known else word)
    return found


def _value(flag: str, value: str) -> str:
    values, answer = ANSWERED_VALUES.get(flag, ((), ""))
    if value in values:
        raise EngineFault("bad_setting", f"{flag} {value} is not a value here: {answer}")
    return VALUES.get(flag, {}).get(value, value)


def _one_process(flag: str, value: str) -> str:
    """The note about 1. EngineFault for more."""
    if value == "1":
        return f"{flag} 1 was left out: one process computes a model"
    message = (
        f"{flag} is 1 here: one process computes a model; for several servers behind one address:"
    )
    raise EngineFault("bad_setting", f"{message} pageturner route URL URL")


def _adapter(given: str) -> str:
    """NAME=PATH, which vLLM also takes as JSON."""
    if not given.startswith("{"):
        return given
    try:
        fields = json.loads(given)
        return f"{fields['name']}={fields['path']}"
    except (ValueError, KeyError, TypeError) as error:
        raise EngineFault(
            "bad_setting", f"--lora-modules: {given!r} has no name and path"
        ) from error
