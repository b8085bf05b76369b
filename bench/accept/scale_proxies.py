"""What routers add to an answer: `pageturner route` beside nginx and smg, before two servers.

One short streamed answer at a time, each in turn directly and through each of them (interleaved, so that a
busy machine hits all alike): seconds to the first byte, and processor time of the proxy for each answer.
`--nginx` and `--smg` name their programs; one that is not there is NOT RUN.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
import harness
from harness import Line, Server
from scale_router import TINY, stream

NGINX = """worker_processes 1; daemon off; pid {where}/pid; error_log {where}/error.log;
events {{ worker_connections 512; }}
http {{ access_log off; client_body_temp_path {where}/body; proxy_temp_path {where}/proxy;
fastcgi_temp_path {where}/f; uwsgi_temp_path {where}/u; scgi_temp_path {where}/s;
upstream both {{ least_conn; {servers} }}
server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://both; proxy_buffering off;
proxy_http_version 1.1; proxy_set_header Host $http_host; }} }} }}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this part of the acceptance."""
    parser.add_argument("--nginx", default=shutil.which("nginx") or "nginx", help="program")
    parser.add_argument("--smg", default=shutil.which("smg") or "smg", help="program")
    parser.add_argument("--proxy-pairs", type=int, default=100, help="answers through each")


def commands(
    arguments: argparse.Namespace, fleet: list[Server], where: Path
) -> dict[str, tuple[int, list[str]]]:
    """By name: port and command of each proxy that is there."""
    urls, found = [one.url for one in fleet], dict[str, tuple[int, list[str]]]()
    port = harness.free_port()
    found["pageturner"] = (
        port,
        [sys.executable, "-m", "pageturner", "route", *urls, "--port", str(port)],
    )
    if shutil.which(arguments.nginx):
        port = harness.free_port()
        servers = " ".join(f"server {url.removeprefix('http://')};" for url in urls)
        (where / "nginx.conf").write_text(NGINX.format(where=where, servers=servers, port=port))
        found["nginx"] = port, [arguments.nginx, "-c", str(where / "nginx.conf"), "-p", str(where)]
    if shutil.which(arguments.smg):
        port = harness.free_port()
        smg = [arguments.smg, "launch", "--worker-urls", *urls, "--policy", "cache_aware"]
        smg += [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--prometheus-port",
            str(harness.free_port()),
        ]
        found["smg"] = port, smg
    return found


def processor_time(pid: int) -> float:
    """Processor time of a proxy and its children."""
    return harness.processor_seconds(pid, *harness.children(pid))


def lines(arguments: argparse.Namespace) -> Iterator[Line]:
    """A line for each proxy."""
    body = {
        "model": "m",
        "prompt": "one more",
        "max_tokens": 16,
        "stream": True,
        "ignore_eos": True,
        "seed": 1,
    }
    with ExitStack() as stack:
        where = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = "--served-model-name", "m"
        fleet = [stack.enter_context(harness.server(*flags, model=str(TINY))) for _ in range(2)]
        there: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        for name, (port, command) in commands(arguments, fleet, where).items():
            log = stack.enter_context((where / f"{name}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(harness.end, process)
            url = f"http://127.0.0.1:{port}"
            harness.wait_ready(url, process, 120.0)
            there[name] = url, process
        times: dict[str, list[float]] = {name: [] for name in ("direct", *there)}
        wanted = stream(fleet[0].url, "/v1/completions", body)[0]
        before = {name: processor_time(process.pid) for name, (_, process) in there.items()}
        wrong = 0
        for i in range(arguments.proxy_pairs):
            times["direct"].append(stream(fleet[i % 2].url, "/v1/completions", body)[2])
            for name, (url, _) in there.items():
                text, ended, first = stream(url, "/v1/completions", body)
                times[name].append(first)
                wrong += text != wanted or not ended
        yield Line("answers through proxies", f"{wrong} changed or lost", wrong == 0)
        for name in ("pageturner", "nginx", "smg"):
            if name not in there:
                yield Line(name, f"not installed: --{name} names it", None)
                continue
            added = sorted(a - b for a, b in zip(times[name], times["direct"], strict=True))
            spent = processor_time(there[name][1].pid) - before[name]
            each = 1e3 * spent / arguments.proxy_pairs
            p50, p99 = 1e3 * statistics.median(added), 1e3 * added[int(0.99 * len(added))]
            figure = f"first byte {p50:+.1f} ms (p50), {p99:+.1f} ms (p99); {each:.2f} ms of a core an answer"
            yield Line(f"{name}: added to an answer of 16 tokens, in pairs", figure, None)
