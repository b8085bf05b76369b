"""Stores, files and bounds: what one tenant's request costs others, destroys of theirs, or leaves to be read.

    python bench/accept/trust2_stores.py

Owns the lines of issue 34 about costs that are paid once, tenants, files, bounds by bytes and `verify`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import harness
import trust2_hunter
import trust_hostile
from harness import Line, Server

PROMPTS = 1000
WORDS = [f"{'word' * 25}{number:06}" for number in range(2000)]  # a grammar of some 220 KB
HELD = 0.1  # seconds
CHOICE_MB = 0.008  # what an open answer may take in the API process


def grammar_of_many(server: Server, other: Server) -> Iterator[Line]:
    """A thousand prompts that share one large grammar. other: a server that nobody asks, on the same machine."""
    watch, beside = trust_hostile.Watch(server), trust_hostile.Watch(other)
    body = json.dumps(
        {"prompt": ["a"] * PROMPTS, "max_tokens": 8, "structured_outputs": {"choice": WORDS}}
    ).encode()
    trust2_hunter.ask(
        server.url, "", "POST", "/v1/completions", body.replace(b'"a", ', b"", PROMPTS - 1)
    )
    time.sleep(2)
    rest, engine = trust_hostile.api_mb(server), harness.rss_mb(server.engine_pid())
    begin = time.monotonic()
    status, told = trust2_hunter.ask(server.url, "", "POST", "/v1/completions", body)
    end = time.monotonic()
    what = f"{PROMPTS} prompts, a grammar of {len(json.dumps(WORDS)) // 1000} KB"
    yield Line(
        f"{what}: status",
        f"{status} in {end - begin:.1f} s{told[:150].decode() * (status != 200)}",
        status == 200,
    )
    held, usual = (trust_hostile.most(one.health, begin, end) for one in (watch, beside))
    figure = f"{held:.3f} s, of a server that nobody asks {usual:.3f} s"
    yield Line(f"{what}: /health waits (before: 0.3 s)", figure, held < HELD + usual)
    peak = trust_hostile.most(watch.memory, begin, end) - rest
    most = 4 * len(body) / 2**20 + trust_hostile.SLACK_MB + PROMPTS * CHOICE_MB
    yield Line(
        f"{what}: API memory over rest (before: 6 times the body)",
        f"{peak:.0f} MB for a body of {len(body) / 2**20:.1f}",
        peak < most,
    )
    kept = harness.rss_mb(server.engine_pid()) - engine
    yield Line(f"{what}: engine keeps (before: 456 MB)", f"{kept:+.0f} MB", kept < 100)
    watch.close()
    beside.close()


def bounds(server: Server) -> Iterator[Line]:
    """Numbers beyond a machine word, and files of bad lines."""
    moved = {"path": "/v1/completions", "body": "{}", "tokens": [1]}
    moved |= {"begun": {"fingerprint": "x", "seed": 10**25, "created": 1}}
    status, _ = trust2_hunter.ask(server.url, "", "POST", "/v1/streams/resume", moved)
    yield Line("begun.seed of 10^25 (before: 500)", str(status), status == 400)


def disk(server: Server, folder: Path) -> Iterator[Line]:
    """600 KB of `{}` as a batch."""

    status, _ = trust2_hunter.upload(server.url, "", "{}\n" * 200_000)
    yield Line(
        "a file of 200,000 lines of {} (before: 131 MB on the disk)", str(status), status == 413
    )
    file = json.loads(trust2_hunter.upload(server.url, "", "{}\n" * 49_900)[1])["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/completions"}
    id = json.loads(trust2_hunter.ask(server.url, "", "POST", "/v1/batches", wanted)[1])["id"]
    told: dict[str, str] = {}
    while told.get("status") not in ("failed", "completed"):
        time.sleep(0.2)
        told = json.loads(trust2_hunter.ask(server.url, "", "GET", f"/v1/batches/{id}")[1])
    size = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
    figure = f"{told['status']}; {size / 1e6:.1f} MB on the disk for 0.15 MB"
    yield Line("a batch of 49,900 lines of {}", figure, size < 8e6)


def supply() -> Iterator[Line]:
    """A signature that is checked."""
    with tempfile.TemporaryDirectory() as folder:
        key, signed = f"{folder}/key", f"{folder}/SHA256SUMS"
        Path(signed).write_text("as docs/release.md says\n")
        steps = (
            f"ssh-keygen -q -t ed25519 -N '' -f {key}",
            f"ssh-keygen -q -Y sign -n file -f {key} {signed}",
            f"printf 'r@p %s' \"$(cat {key}.pub)\" > {folder}/allowed",
            f"ssh-keygen -Y verify -f {folder}/allowed -I r@p -n file -s {signed}.sig < {signed}",
        )
        done = harness.ran("sh", "-ec", "\n".join(steps))
        figure = (done.stdout + done.stderr).strip()[-200:]
        yield Line("a list of checksums is signed and checked", figure, done.returncode == 0)


def lines(_: argparse.Namespace) -> Iterator[Line]:
    """All of them."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--batch-dir", f"{folder}/kept", "--max-queue", str(2 * PROMPTS))
        with harness.server(*flags, "--max-prompts-per-request", str(PROMPTS)) as server:
            with harness.server("--backend", "fake") as other:
                yield from grammar_of_many(server, other)
            yield from bounds(server)
            yield from disk(server, Path(folder))
        yield trust2_hunter.files_line(Path(folder), "modes and owners of what it left")
    yield from harness.proved("trust2_stores")
    yield from supply()


if __name__ == "__main__":
    harness.alone(__file__, __doc__)
