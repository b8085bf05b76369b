"""The step logs that commit 8cc2ebe wrote give the same plans, and a log that was changed does not."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "accept"))
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))  # goes first: both have a logs.py

import same_steps as logs

STEP, ITEMS = 4, 3  # the first field of a step's record, and which one its items are
LOGS = logs.recorded()
# Of all pairs of a policy and an order, seven in which each is there once are enough for every day.
DAILY = {
    "chunked-fcfs",
    "adaptive_chunk-priority",
    "prefill_first-sjf",
    "served_ratio-deadline",
    "orca-adaptive",
    "window-fair",
    "static-prefix",
}

SELDOM = {  # long ones whose like is replayed every day
    "admission-full-static",
    "admission-predicted-static",
    "admission-full-prefill_first",
    "static-of-4",
    "window-of-4",
    "preemption-served_ratio",
    "preemption-adaptive_chunk",
    "beams-prefill_first",
    "served_ratio-often",
    "drafts-served_ratio",
}


def often(name: str) -> bool:
    return name in DAILY or (logs.kind_of(name) != "policies x orders" and name not in SELDOM)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if often(name) else pytest.mark.slow)
        for name in LOGS
        if name not in logs.UNREPEATABLE
    ],
)
def test_the_plans_of_8cc2ebe_replay(name: str) -> None:
    told = logs.replayed(name, gzip.decompress(LOGS[name].read_bytes()), "--plans")
    assert told.same, told.problem


def test_every_policy_order_and_feature_is_recorded() -> None:
    assert {logs.kind_of(name) for name in LOGS} == {
        "policies x orders",
        "admission",
        "preemption",
        "beams",
        "drafts",
        "schema",
        "tiny",
        "windows",
        "others",
    }
    assert sum(logs.kind_of(name) == "policies x orders" for name in LOGS) == 49
    assert set(LOGS) >= DAILY | SELDOM | set(logs.UNREPEATABLE)


def test_a_changed_log_is_found_out() -> None:
    """One item of one step in the middle with a token more."""
    log = gzip.decompress(LOGS["chunked-fcfs"].read_bytes())
    records = [msgspec.msgpack.decode(body) for body in logs.frames(log)]
    steps = [record for record in records if record[0] == STEP and record[ITEMS]]
    steps[len(steps) // 2][ITEMS][0][2] += 1
    changed = [logs.MAGIC]
    for record in records:
        body = msgspec.msgpack.encode(record)
        changed += [struct.pack("<I", len(body)), body]
    told = logs.replayed("changed", b"".join(changed), "--plans")
    assert not told.same
    assert "step" in told.problem


def test_what_the_command_says_is_understood() -> None:
    same = logs.understood("a", "plans: 1,204 of 9,000 tokens; all the same\n", "plans")
    assert (same.compared, same.tokens, same.same) == (1204, 9000, True)
    other = logs.understood("b", "plans: 3 of 9 tokens; DIFFERENT: step 3: x\n", "plans")
    assert (other.same, other.problem) == (False, "DIFFERENT: step 3: x")
    assert not logs.understood("c", "plans: 0 of 0 tokens; all the same", "plans").same
    refused = logs.understood(
        "d", "plans: 1 of 1 tokens; all the same\npageturner: the bits differ", "answers"
    )
    assert not refused.same
    assert not refused.ran
    assert logs.understood("e", "Traceback\nValueError: x", "answers").ran
    assert logs.judged("all", [same]).passed
    assert not logs.judged("all", [same, other]).passed
    assert not logs.judged("none", []).passed


def test_times_are_taken_out_of_a_log() -> None:
    log = gzip.decompress(LOGS["static-deadline"].read_bytes())
    before, after = (
        [msgspec.msgpack.decode(body) for body in logs.frames(one)]
        for one in (log, logs.without_times(log))
    )
    assert (
        after[0][logs.CONFIG]["static_patience"] == 0.0 < before[0][logs.CONFIG]["static_patience"]
    )
    times = [
        sum(
            name in record[logs.MORE]
            for record in records
            if record[0] == logs.ARRIVED
            for name in logs.TIMES
        )
        for records in (before, after)
    ]
    assert times[0] > times[1] == 0
    assert [record for record in before if record[0] == STEP] == [
        record for record in after if record[0] == STEP
    ]


def test_kernels_of_another_build_are_asked_all_the_same() -> None:
    said = "pageturner: the log is of native-{}-kv_float16, this engine is native-{}-kv_float16: the bits differ"
    assert logs.another_build(said.format("avx2-aaa", "avx2-bbb")) == "native-avx2-bbb-kv_float16"
    assert logs.another_build(said.format("avx2-aaa", "avx512-bbb")) == ""
    assert logs.another_build("pageturner: the log holds digests") == ""
    log = gzip.decompress(LOGS["tiny-beams"].read_bytes())
    header = msgspec.msgpack.decode(next(iter(logs.frames(logs.without_times(log, "native-x")))))
    assert header[logs.FINGERPRINT] == "native-x"
