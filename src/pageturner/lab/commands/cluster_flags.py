"""Flags of `simulate` that are about several replicas: roles, links, slower memory, failures, autoscaling.

Owns how they become what the lab simulates, and what is printed of it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner.errors import bad_setting

if TYPE_CHECKING:
    from pageturner.lab.simulation.replica_changes import Autoscaling, Failures

SECONDS = ("restart_seconds", "drain_seconds", "start_seconds", "upscale_delay", "downscale_delay")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags."""
    add_links(parser)
    add_turnover(parser)


def add_links(parser: argparse.ArgumentParser) -> None:
    """Roles, the link between them, and slower memory: `plan` has these too."""
    parser.add_argument(
        "--roles",
        metavar="prefill=N,decode=M",
        default="",
        help="replicas that compute prompts for others, and those that answer, in place of "
        "--replicas; with --search: search, which tries them apart too",
    )
    parser.add_argument(
        "--kv-link-gb-s",
        type=float,
        default=25.0,
        help="GB/s at which KV goes from one to the other (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-link-ms",
        type=float,
        default=1.0,
        help="milliseconds that this takes beside its bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-host-gb-s",
        type=float,
        default=25.0,
        help="GB/s at which KV comes back from --kv-host-memory (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-file-gb",
        type=float,
        default=0.0,
        help="GB of KV in a file behind it, for each replica (default: none)",
    )
    parser.add_argument(
        "--kv-file-gb-s",
        type=float,
        default=3.0,
        help="GB/s at which KV comes back from there (default: %(default)s)",
    )


def add_turnover(parser: argparse.ArgumentParser) -> None:
    """Replicas that end, and that come and go."""
    parser.add_argument(
        "--failures-per-hour",
        type=float,
        default=0.0,
        help="failures of each replica in an hour; it is back after --restart-seconds",
    )
    parser.add_argument(
        "--events",
        metavar="FILE",
        type=Path,
        help='JSONL file of what happens to replicas: {"at": 60, "replica": 0, "event": '
        '"end"}, or "drain", or "start"',
    )
    parser.add_argument(
        "--restart-seconds",
        type=float,
        default=60.0,
        help="seconds until a replica that failed is there again (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        help="seconds that a replica which is taken away has for what it is answering "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--streams",
        choices=("move", "restart"),
        default="move",
        help="what streams do whose replica ends: go on elsewhere, or begin again (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--autoscale",
        metavar="LEAST,MOST",
        default="",
        help="let the number of replicas follow goodput between these, as pageturner deploy "
        "does, in place of --replicas",
    )
    parser.add_argument(
        "--start-seconds",
        type=float,
        default=60.0,
        help="seconds until a replica that is added takes requests (default: %(default)s)",
    )
    parser.add_argument(
        "--upscale-delay",
        type=float,
        default=10.0,
        help="seconds for which one more must be asked for (default: %(default)s)",
    )
    parser.add_argument(
        "--downscale-delay",
        type=float,
        default=300.0,
        help="seconds for which one less must be asked for (default: %(default)s)",
    )


def check(arguments: argparse.Namespace) -> None:
    """EngineFault('bad_setting') for what does not go together."""
    if arguments.roles and arguments.search and arguments.roles != "search":
        raise bad_setting("--search counts replicas: give it --roles search, or leave --roles out")
    if arguments.roles and not arguments.search and arguments.replicas != 1:
        raise bad_setting("--roles says how many replicas there are: leave --replicas out")
    if arguments.roles == "search" and not arguments.search:
        raise bad_setting("--roles search goes with --search; else it is prefill=N,decode=M")
    failing = arguments.failures_per_hour or arguments.events
    for name in (*SECONDS, "failures_per_hour"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise bad_setting(
                f"--{name.replace('_', '-')} is 0 or more, not {getattr(arguments, name)}"
            )
    if arguments.autoscale and failing:
        raise bad_setting(
            "--autoscale is simulated without --failures-per-hour and --events: leave one out"
        )
    if arguments.autoscale and (arguments.search or arguments.roles or arguments.replicas != 1):
        raise bad_setting(
            "--autoscale says how many replicas there are: leave --search, --roles, --replicas out"
        )
    if arguments.search and failing:
        raise bad_setting(
            "--search counts replicas that do not fail: leave --failures-per-hour and --events out"
        )


def failures_of(arguments: argparse.Namespace, replicas: int) -> Failures | None:
    """What is to go wrong with so many replicas."""
    from pageturner.lab.simulation.replica_changes import Failures, read_events

    if not (arguments.failures_per_hour or arguments.events):
        return None
    return Failures(
        per_hour=arguments.failures_per_hour,
        events=read_events(arguments.events, replicas) if arguments.events else (),
        back=arguments.restart_seconds,
        grace=arguments.drain_seconds,
        move=arguments.streams == "move",
        seed=arguments.seed,
    )


def autoscaling_of(arguments: argparse.Namespace) -> Autoscaling | None:
    """Between which bounds the number of replicas follows the load; None: it does not."""
    from pageturner.lab.simulation.replica_changes import Autoscaling
    from pageturner.lab.simulation.scenario import MOST_REPLICAS

    if not arguments.autoscale:
        return None
    found = re.fullmatch(r"([1-9]\d{0,6}),([1-9]\d{0,6})", arguments.autoscale)
    least, most = (int(found[1]), int(found[2])) if found else (1, 0)
    if not least <= most <= MOST_REPLICAS:
        message = f"--autoscale is LEAST,MOST replicas, 1 to {MOST_REPLICAS:,}, such as 1,8"
        raise bad_setting(f"{message}, not {arguments.autoscale!r}")
    return Autoscaling(
        least,
        most,
        start=arguments.start_seconds,
        up=arguments.upscale_delay,
        down=arguments.downscale_delay,
        grace=arguments.drain_seconds,
        goal=arguments.goodput,
    )


def in_words(run: Mapping[str, Any]) -> str:
    """What came of replicas that end, or come and go."""
    found = run["turnover"]
    streams = f"{found['streams_moved']:,} streams moved, {found['tokens_recomputed']:,} tokens recomputed"
    if found["streams_restarted"]:
        streams = f"{found['streams_restarted']:,} streams began again, {found['tokens_lost']:,} tokens lost"
    if found["streams_moved"] or found["streams_restarted"]:
        streams += f", their longest gap p99 {found['longest_gap_ms']['p99']:,.0f} ms"
    if "replica_seconds" in found:
        return (
            f"autoscaled: {found['replicas_mean']:,.1f} replicas on average, {found['replicas_most']:,} at"
            f" most ({found['replica_seconds']:,.0f} s of replicas; {found['replicas_added']:,} added,"
            f" {found['replicas_removed']:,} taken away), {streams}"
        )
    return (
        f"failures: {found['replicas_failed']:,} replicas ended, {found['replicas_drained']:,} drained,"
        f" {streams}"
    )
