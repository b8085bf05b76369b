"""`pageturner deploy`: a Serve application from a file, started here or written down for `serve
deploy`.

Owns the command. Where no Ray cluster is named or running, one is started on this machine and ends
with the command.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from typing import Any

from pageturner.config.flag_table import add_flags
from pageturner.errors import EngineFault, pip_install
from pageturner.private_files import write_private
from pageturner.router.ray import settings
from pageturner.router.ray.settings import AppSettings

# bytes of a cluster that is started here: only small pieces pass through it
OBJECT_STORE = 100 * 1024 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pageturner deploy`."""
    add_flags(parser, "deploy")


def main(arguments: argparse.Namespace) -> int:
    """Returns the exit code."""
    app = settings.read(arguments.app)
    if arguments.write:
        write_private(arguments.write, [serve_config(app).encode()])
        print(f"wrote {arguments.write}: start it with `serve deploy {arguments.write}`")
        return 0
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise EngineFault("no_ray", f"Ray is not installed: {pip_install('ray')}") from error
    from pageturner.router.ray.deployments import build

    _connect(ray, arguments.address, arguments.detach)
    stop = threading.Event()

    def end(*_: object) -> None:
        stop.set()
        if not up:
            raise KeyboardInterrupt

    up = False
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    serve.start(http_options={"host": app.host, "port": app.port})
    new = app.name not in serve.status().applications
    try:
        serve.run(build(app), name=app.name, route_prefix=app.route_prefix)
        up = True
    except KeyboardInterrupt:
        if new:
            serve.delete(app.name)
        return 130
    except RuntimeError as error:  # what Serve says of an application that does not come up
        told = serve.status().applications.get(app.name)
        messages = [one.message for one in told.deployments.values()] if told else []
        if new:  # replicas that did come up would keep their processors
            serve.delete(app.name)
        raise EngineFault("deploy_failed", _reason("\n".join([str(error), *messages]))) from error
    print(
        f"{', '.join(app.models)} at http://{app.host}:{app.port}{app.route_prefix.rstrip('/')}/v1",
        flush=True,
    )
    if arguments.detach:
        return 0
    stop.wait()
    serve.delete(app.name)
    return 0


def _reason(said: str) -> str:
    """The line of a long message that says why: that of our own fault, else the last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [
        "the application did not come up"
    ]
    ours = [line for line in lines if "EngineFault" in line]
    return (ours or lines)[-1].rpartition("EngineFault: ")[2][:500]


def _connect(ray: Any, address: str, detach: bool) -> None:
    """Connect to the cluster. EngineFault where there is none, and one of our own would end at
    once."""
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address=address or "auto", namespace="pageturner", **quiet)
    except ConnectionError as error:
        if address or detach:
            raise EngineFault(
                "no_cluster", f"no Ray cluster is there: start one with `ray start --head`: {error}"
            ) from error
        # else workers have the niceness 15: any other program would take the processor from them
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(
            address="local",
            namespace="pageturner",
            object_store_memory=OBJECT_STORE,
            include_dashboard=False,
            **quiet,
        )
        print(
            "no Ray cluster is running here: started one, which ends with this command",
            file=sys.stderr,
        )


def serve_config(app: AppSettings) -> str:
    """A Serve configuration that says the same. JSON, which is YAML too, and needs no package to
    write."""
    args = settings.table_of(app)
    config = {
        "http_options": {"host": app.host, "port": app.port},
        "applications": [
            {
                "name": app.name,
                "route_prefix": app.route_prefix,
                "import_path": "pageturner.ray:app",
                "args": args,
            }
        ],
    }
    return json.dumps(config, indent=2) + "\n"
