"""`pageturner bench sweep`: servers side by side over one load after another, up to their knees, as
a page.

Owns the flags, what is started and written, and what is shown meanwhile. Points and their order are
in lab/bench/sweep.py and lab/bench/sweep_load.py; all of the lab is imported when it is asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner.config.flag_table import add_flags, check_range
from pageturner.engine import machine
from pageturner.errors import EngineFault, bad_setting
from pageturner.lab.commands.flag_values import command_again, numbers
from pageturner.lab.reporting.output import write_figures, write_text, writing
from pageturner.lab.traffic import traffic_flags

if TYPE_CHECKING:
    from pageturner.lab.bench.sweep import LoadSweep, SweepResults, SweptServer
    from pageturner.lab.bench.sweep_load import PointBounds, SweepLoad

OWN = "pageturner"  # what our own server is called unless --own says otherwise
BUSY = 0.5  # load by cores, before anything was started, from which on it is said
EPILOG = """examples:
  pageturner bench sweep --model smollm2
      our own server, one client, two, four ... to the knee: sweep.html and sweep.json
  pageturner bench sweep --model smollm2 --server llama=http://127.0.0.1:8080 --concurrency 1,4,16
      beside another one, in turn
  pageturner bench sweep --model smollm2 --own default= --own static="--policy static" --rate auto
      two settings of ours, over requests a second

Keys of servers stand in the environment: PAGETURNER_SWEEP_KEY_NAME for --server NAME=URL."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_flags(parser, "bench sweep")
    load = parser.add_argument_group("load")
    traffic_flags.add_load_flags(load)
    add_flags(load, "sweep load")
    traffic_flags.add_trace_flags(parser.add_argument_group("traces"))


def main(arguments: argparse.Namespace) -> int:
    """Measure, write, print. 130 when it was interrupted, 1 when a server failed."""
    # imported now: minutes later an update may have replaced these files
    from pageturner.lab.bench.bench_serve import parse_targets
    from pageturner.lab.bench.sweep import SweepResults
    from pageturner.lab.bench.sweep_forecast import add_forecasts
    from pageturner.lab.bench.sweep_load import PointBounds
    from pageturner.lab.reporting import sweep_page

    _check(arguments)
    servers, sweeps = _servers(arguments), _sweeps(arguments)
    before, begun = machine.inspect(), time.time()
    found = SweepResults(
        servers, sweeps, {}, arguments.rounds, parse_targets(arguments.goodput), notes=[]
    )
    _make(arguments.output)
    _make(_json_path(arguments))
    try:
        with _terminated_like_interrupted():
            _measure(arguments, found)
    except KeyboardInterrupt:
        found.interrupted = True
    if not found.measured:
        if found.interrupted:
            return 130
        failed = [f"{one.name} {one.failed}" for one in servers if one.failed]
        raise EngineFault("no_answer", "; ".join(failed) or "no time was left to measure anything")
    found.notes += sweep_page.answers_differ(found)
    found.about = _about(arguments, found, before, begun)
    bounds = PointBounds(arguments.seconds, arguments.requests)

    def write() -> None:
        write_figures(_json_path(arguments), found.as_json())
        write_text(arguments.output, sweep_page.page(found))

    try:
        write()  # what took long to measure is there before anything is simulated
        try:
            with _terminated_like_interrupted():
                add_forecasts(found, arguments.calibration, arguments.model or "", bounds)
        except KeyboardInterrupt:
            found.interrupted = True
        write()
    finally:
        _show(found)
    stopped = "interrupted; what was measured until then: " if found.interrupted else ""
    print(f"{stopped}{arguments.output} and {_json_path(arguments)}")
    return 130 if found.interrupted else int(any(one.failed for one in servers))


def _check(arguments: argparse.Namespace) -> None:
    check_range(arguments, "more than 0", "seconds", "total_seconds", "rounds", "max_concurrency")
    check_range(arguments, "0 or more", "requests", "num_prompts")
    if _json_path(arguments) == arguments.output:
        raise bad_setting(
            "--output is the page, and the figures would have its name: end it with .html"
        )
    if arguments.own and not arguments.model:
        raise bad_setting(
            "--own says with which flags a server of --model is started: give --model too"
        )


def _servers(arguments: argparse.Namespace) -> list[SweptServer]:
    """Our own in front."""
    from pageturner.http.http_client import parse_address
    from pageturner.lab.bench.sweep import SweptServer
    from pageturner.lab.bench.sweep_servers import named

    own = (
        named(arguments.own, "--own", "FLAGS")
        if arguments.own
        else {OWN: ""}
        if arguments.model
        else {}
    )
    given, asked = (
        named(arguments.server, "--server", "URL"),
        named(arguments.ask, "--ask", "MODEL"),
    )
    if not own and not given:
        raise bad_setting("which servers? --server NAME=URL for each, or --model MODEL starts one")
    for name in asked:
        if name not in given:
            raise bad_setting(f"--ask {name}=...: there is no --server of this name")
    for name in own:
        if name in given:
            raise bad_setting(f"two servers are called {name!r}: give one of them another name")
    for url in given.values():
        parse_address(url, "--server")
    found = [SweptServer(name, started=flags) for name, flags in own.items()]
    return found + [SweptServer(name, url, asked.get(name, "")) for name, url in given.items()]


def _sweeps(arguments: argparse.Namespace) -> list[LoadSweep]:
    from pageturner.lab.bench.sweep import LoadSweep

    clients = arguments.concurrency or ("" if arguments.rate else "auto")
    found = []
    if clients:
        values = _values("--concurrency", clients)
        if values and any(value != int(value) for value in values):
            raise bad_setting(f"--concurrency is whole numbers, not {clients}")
        found.append(LoadSweep("concurrency", values, 1.0, arguments.max_concurrency))
    if arguments.rate:
        found.append(LoadSweep("rate", _values("--rate", arguments.rate), most=math.inf))
    return found


def _values(flag: str, text: str) -> list[float] | None:
    """The numbers, ascending; None for auto."""
    if text == "auto":
        return None
    return sorted(set(numbers(flag, text, "numbers with commas, or auto")))


# -- measuring -------------------------------------------------------------------------------------


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP like Ctrl-C: the user still gets what was measured, and the servers
    that we started end with this program."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {
        number: handler for number, handler in before.items() if handler is not signal.SIG_IGN
    }  # nohup
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _measure(arguments: argparse.Namespace, found: SweepResults) -> None:
    from pageturner.lab.bench.sweep import Sweeper
    from pageturner.lab.bench.sweep_load import PointBounds, load_from_flags

    bounds = PointBounds(arguments.seconds, arguments.requests)
    with ExitStack() as stack:
        for server in found.servers:
            _ready(arguments, server, stack, found.notes)
        live = [one for one in found.servers if not one.failed]
        if not live:
            return
        load = load_from_flags(
            arguments, min((one.context for one in live if one.context), default=0)
        )
        found.about["load"] = load.about
        runner = _Runner(arguments, load, bounds, found.targets)
        for server in live:
            runner.warm(server, found.notes)
        deadline = time.monotonic() + arguments.total_seconds
        sweeper = Sweeper(found.servers, runner.run, arguments.rounds, deadline, notes=found.notes)
        for number, sweep in enumerate(found.sweeps):
            runner.sweep = number
            alone = [one.alone for one in found.servers if not one.failed]
            if sweep.over == "rate" and sweep.values is None and alone:
                sweep.start = _round_number(0.5 / min(alone))
            sweeper.sweep(sweep)


def _ready(
    arguments: argparse.Namespace, server: SweptServer, stack: ExitStack, notes: list[str]
) -> None:
    """Start it if it is ours, and learn what it serves. A server that fails here is left out, and
    said."""
    from pageturner.lab.bench.sweep_servers import ask_models, own_server

    try:
        if server.started is not None:
            _say(f"starting our own server {server.name} of {arguments.model}")
            stack.enter_context(own_server(server, arguments.model))
        ask_models(server)
    except EngineFault as fault:
        server.failed = fault.message
        notes.append(f"{server.name} is left out: {fault.message}")
        _say(notes[-1])


def _round_number(value: float) -> float:
    """1, 2 or 5 times a power of ten, at most this."""
    power = 10.0 ** math.floor(math.log10(value))
    return power * max(factor for factor in (1, 2, 5) if power * factor <= value * 1.0001)


class _Runner:
    """Runs points and says so. sweep: the number of the one under way."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        load: SweepLoad,
        bounds: PointBounds,
        targets: dict[str, float],
    ) -> None:
        self._arguments, self._load, self._bounds, self._targets = arguments, load, bounds, targets
        self.sweep = 0

    def warm(self, server: SweptServer, notes: list[str]) -> None:
        """Two requests, one after the other: it is awake then, and we know how long one takes
        alone."""
        requests = self._load.make(999_999)
        for one in (next(requests), next(requests)):
            length = one.max_tokens or one.answer_length
            times = asyncio.run(self._client(server).complete(one.text, length, one.output))
            if server.ignores_eos and "ignore_eos" in (times.error or ""):
                server.ignores_eos = False
                notes.append(
                    f"{server.name} refuses ignore_eos: its answers may be shorter than asked"
                )
                _say(notes[-1])
                times = asyncio.run(self._client(server).complete(one.text, length, one.output))
            if times.error is not None:
                server.failed = times.error
                notes.append(f"{server.name} is left out, it does not answer: {times.error}")
                _say(notes[-1])
                return
            server.alone = times.end - times.begin

    def run(
        self, server: SweptServer, sweep: LoadSweep, at: float, number: int, turn: int
    ) -> dict[str, Any]:
        """The figures of one run."""
        from pageturner.lab.bench.sweep_load import (
            closed_point,
            open_point,
            point_figures,
            point_seed,
        )
        from pageturner.progress import Progress

        what = f"{server.name}, {at:g} {sweep.unit}, {turn + 1}/{self._arguments.rounds}"
        seed = point_seed(self.sweep, number, turn)
        client, requests, begin = self._client(server), self._load.make(seed), time.monotonic()
        with Progress(what, math.ceil(self._bounds.seconds)) as line:

            def told(answered: int) -> None:
                seconds = min(int(time.monotonic() - begin), line.total)
                line.update(seconds, f"{answered} answered")

            told(0)
            point = (
                closed_point(client, requests, int(at), self._bounds, told)
                if sweep.over == "concurrency"
                else open_point(client, requests, at, self._bounds, seed, told)
            )
            run = asyncio.run(point)
            figures = point_figures(run, self._targets)
            sent = [one for one in run.sent if one.answered]
            figures["lengths"] = [[one.times.prompt_tokens, one.tokens] for one in sent]
            line.update(line.total, f"{figures['output_tokens_per_s']:,.0f} tokens/s")
        if not sys.stderr.isatty():
            _say(f"{what}: {_in_short(figures)}")
        return figures

    def _client(self, server: SweptServer) -> Any:
        from pageturner.lab.bench.client import Client
        from pageturner.lab.bench.sweep_servers import key_of

        key = key_of(server.name)
        return Client(
            server.url,
            server.model,
            api_key=key,
            endpoint=self._arguments.endpoint,
            ignore_eos=server.ignores_eos,
        )


def _in_short(figures: dict[str, Any]) -> str:
    lost = figures["errors"] + figures["refused"] + figures["unanswered"]
    return (
        f"{figures['output_tokens_per_s']:,.1f} tokens/s, TTFT p50 {figures['ttft_ms_p50']:,.0f} p99"
        f" {figures['ttft_ms_p99']:,.0f} ms, {figures['answered']} answered, {lost} failed"
    )


# -- what is said and written ----------------------------------------------------------------------


def _about(
    arguments: argparse.Namespace, found: SweepResults, before: machine.Machine, begun: float
) -> dict[str, str]:
    """Machine, load, date and how to do it again. Notes what disturbed the measurement."""
    cores = len(before.usable)
    if before.load > BUSY * cores:
        note = f"The machine was busy before this began: load {before.load:.1f} on {cores} cores."
        found.notes.insert(0, note)
    runs = f"{arguments.rounds} rounds of {arguments.seconds:g} s"
    runs += f" or {arguments.requests} requests" if arguments.requests else ""
    date = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begun))
    return {
        "machine": f"{before.cpu}, {cores} cores; load {before.load:.1f} before",
        "load": f"{found.about.get('load', '')}; {arguments.endpoint}; {runs} at each point",
        "date": f"{date}, took {time.time() - begun:,.0f} s",
        "again": command_again("bench sweep", add_arguments, arguments),
    }


def _show(found: SweepResults) -> None:
    """Tables and sentences, on the terminal."""
    from pageturner.lab.reporting import sweep_page

    for number, sweep in enumerate(found.sweeps):
        if sweep.points:
            print(f"{sweep_page.table(found, number)}\n")
            print("\n".join(sweep_page.verdict(found, sweep)))
            for at, name in found.forecasts:
                if at == number:
                    rows = sweep_page.forecast_errors(found, number, name)
                    print(
                        "\n".join(
                            f"simulated {name}: {figure} off by {text}" for figure, text in rows
                        )
                    )
            print()
    for note in [*found.notes, found.forecast]:
        print(f"note: {note}")


def _json_path(arguments: argparse.Namespace) -> Path:
    given: Path | None = arguments.output_json
    return given or arguments.output.with_suffix(".json")


def _make(path: Path) -> None:
    """The folder of a file, before anything is measured; EngineFault if it could not be written
    then."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
