"""`pageturner route`: from addresses and flags to a listening router, and from a signal to a clean
end.

Owns the router's process: port, event loop, signals, exit code. What it does with requests is in
proxy.py.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from pageturner import logs
from pageturner.config import settings as configuration
from pageturner.config.flag_table import add_flags
from pageturner.errors import bad_setting
from pageturner.http import lifecycle

if TYPE_CHECKING:
    import socket

    from pageturner.http.tls import Certificates
    from pageturner.router.members import Members
    from pageturner.router.proxy import Router


MAX_FILES = 65536


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `pageturner route`."""
    add_flags(parser, "route")
    configuration.add_flags(parser, "router")


def raise_file_limit() -> None:
    """Allow this process as many open files as it may have: each request takes two connections."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(arguments: argparse.Namespace) -> int:
    """Route until told to stop. Returns the exit code."""
    config = configuration.load(arguments.config, configuration.from_flags(arguments)).router
    logs.to_stderr(config.log_level, config.log_format)
    raise_file_limit()
    from pageturner.router.fleet import Fleet
    from pageturner.router.members import Members, listed, read_file
    from pageturner.router.proxy import Router

    config = replace(
        config, register_key=config.register_key or os.environ.get("PAGETURNER_REGISTER_KEY", "")
    )
    if not (arguments.replicas or config.replicas_file or config.register_key):
        raise bad_setting("no replicas: give their addresses, --replicas-file, or --register-key")
    if config.replicas_file:
        read_file(config.replicas_file, config.ssl_ca)
    given, fleet = listed(arguments.replicas, config.ssl_ca), Fleet((), config)
    members = Members(config, given, fleet.set_members)
    from pageturner.http.tls import certificates_of

    certificates = certificates_of(config)
    listener = lifecycle.bind(config.host, config.port)
    return lifecycle.run(_main(Router(fleet, config), members, listener, certificates))


async def _main(
    router: Router, members: Members, listener: socket.socket, certificates: Certificates | None
) -> int:
    """The event loop's whole life: look after the replicas, route until a signal, drain, leave."""
    import asyncio
    import logging

    from pageturner.http.api_keys import ApiKeys
    from pageturner.http.http_limits import limits_of
    from pageturner.http.middleware import OPEN_PATHS, RequestMiddleware
    from pageturner.http.origins import origin_rules, with_cors
    from pageturner.router.app import create_app

    log, loop = logging.getLogger("pageturner"), asyncio.get_running_loop()
    stop = lifecycle.drain_on_signals(router, router.config.shutdown_timeout)
    await members.begin()
    await router.fleet.check_health()
    config = router.config
    rules = origin_rules(config.host, config.allowed_hosts, config.allowed_origins)
    traces = None
    if config.otlp_traces_endpoint:
        from pageturner.http.tracing import start_traces

        traces = start_traces(
            config.otlp_traces_endpoint, "pageturner-router", OPEN_PATHS, hand_on=True
        )
    app = RequestMiddleware(
        create_app(router, members), ApiKeys(), config.max_body_size, rules, traces=traces
    )
    cors = with_cors(app, config.allowed_origins)
    lifecycle.reload_on_signal(*([certificates.reload] if certificates else []))
    server = lifecycle.http_server(
        cors, limits_of(config), router.rejected, certificates=certificates
    )
    serving = loop.create_task(server.serve(sockets=[listener]))
    watching = asyncio.gather(router.fleet.watch(), members.watch())
    for replica in router.fleet.replicas:
        if not replica.healthy:
            log.warning("replica %s does not answer yet: it is asked again", replica.address)
    there = sum(replica.healthy for replica in router.fleet.replicas)
    log.info(
        "listening on %s; placement %s, %d of %d replicas are up",
        lifecycle.url_of(listener, tls=bool(certificates)),
        router.config.placement,
        there,
        len(router.fleet.replicas),
    )
    await asyncio.wait({stop, serving, watching}, return_when=asyncio.FIRST_COMPLETED)
    if watching.done():
        watching.result()  # it only ends by an error of ours
    await lifecycle.drain(router, router.config.shutdown_timeout)
    watching.cancel()
    server.should_exit = True
    await serving
    if traces is not None:
        await traces.close()
    return 0
