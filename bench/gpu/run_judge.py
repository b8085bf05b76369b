"""What the figures of run.py must be: each wanted line with its figure, and whether it is enough.

Owns the targets. Reads the lines of JSON that the parts told; needs neither numpy nor a device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Told = list[dict[str, Any]]
SHARE_OF_COPY, SHARE_OF_MATRIX, COST = 0.75, 0.75, 0.05
SHARE_OF_LARGE = 0.70  # of 128 sequences of short context and more, where arithmetic weighs as much
BESIDE_CUBLAS = 0.10  # products of 65 rows and more
DECODE_TOK_S = {(64, 1024): 8_700, (256, 1024): 16_700}  # batch, context: of an H200
NANO_TOK_S, BURST_REQUESTS_S, IDLE, START_S = 18_000, 94.9, 0.02, 2.0  # of an H100; 94.9 is vLLM's
TIMES = {"continuous": 3.0, "static": 24.0}
BATCH_TIMES = 20.0
DRAFTS = 0.99
ERRORS = {
    "fp8": 0.05,
    "int4": 0.12,
    "kv": 0.08,
    "adapters": 0.02,
}  # relative, of products, attention
BESIDE_BF16 = {("int4 g32 low", 1): 2.5, ("int4 g32 low", 64): 1.6}  # products of a layer


class Verdict(NamedTuple):
    """passed None: a figure without a target. run False: the figure says why there is none."""

    what: str
    figure: str
    passed: bool | None
    run: bool = True


def read(path: Path) -> Told:
    """What was told; of lines that are no JSON, none."""
    found = []
    for line in path.read_text().splitlines():
        if line.startswith("{"):
            found.append(json.loads(line))
    return found


def latest(told: Told) -> Told:
    """Of a part that was run several times the last run: its lines, and the one that ends it. A call that had
    no time left for a part tells nothing of it."""
    runs: dict[str, Told] = {}
    mine: Told = []
    for one in told:
        mine.append(one)
        if one["part"] == "part":
            if len(mine) > 1 or one.get("done") or one["name"] not in runs:
                runs.pop(one["name"], None)
                runs[one["name"]] = mine
            mine = []
    return [one for run in runs.values() for one in run] + mine


def judge(told: Told) -> list[Verdict]:
    """Every line of what must be shown on a device, in its order."""
    told = latest(told)
    found = [verdict for one in JUDGES for verdict in one(told)]
    broken = [one for one in told if one["part"] == "part" and not one.get("done")]
    return found + [
        Verdict(f"part {one['name']}", str(one.get("why"))[-200:], False) for one in broken
    ]


def _of(told: Told, part: str, **wanted: Any) -> Told:
    return [
        one
        for one in told
        if one["part"] == part
        and one.get("run", True)
        and all(one.get(k) == v for k, v in wanted.items())
    ]


def _absent(told: Told, part: str, what: str) -> Verdict:
    why = [str(one.get("why")) for one in told if one["part"] == part and not one.get("run", True)]
    return Verdict(what, "; ".join(why)[-200:] or "not measured", None, run=False)


def _right(told: Told) -> Iterator[Verdict]:
    what = "right: every kernel against the numpy reference"
    grid = _of(told, "grid")
    yield (
        Verdict(what, str(grid[-1]["closing"]), grid[-1]["passed"])
        if grid
        else _absent(told, "grid", what)
    )
    what = "right: tiny and cut models against Transformers and the CPU"
    models = _of(told, "right")
    if not models:
        yield _absent(told, "right", what)
        return
    wrong = [one["model"] for one in models if not one["passed"]]
    worst = max(float(one.get("error_to_fp32", 0.0)) for one in models)
    figure = f"{len(models)} models, worst error to fp32 {worst:.1e}"
    yield Verdict(what, f"{figure}; wrong: {', '.join(wrong)}" if wrong else figure, not wrong)


def _proof(told: Told) -> Iterator[Verdict]:
    what, found = "right: what a first start compares", _of(told, "proof")
    if not found:
        yield _absent(told, "proof", what)
    for one in found:
        figure = f"{one['seconds']:.2f} s {one['why']}".strip()
        yield Verdict(f"{what}: weights {one['weights']}, KV {one['kv']}", figure, one["passed"])


def _bits(told: Told) -> Iterator[Verdict]:
    for name in ("products", "steps", "adapters", "answers"):
        what, found = f"bits of {name}: 0 differ", _of(told, "bits", what=name)
        if not found:
            yield _absent(told, "bits", what)
            continue
        differ, compared = (sum(one[key] for one in found) for key in ("differ", "compared"))
        wrong = "; ".join(
            str(one.get("case", "")) for one in found if one["differ"] and one.get("case")
        )
        yield Verdict(
            what, f"{differ} of {compared} differ {wrong}".strip(), differ == 0 and compared > 0
        )


def _decode(told: Told) -> Iterator[Verdict]:
    what = "decode of Llama-3.1-8B's shape, share of the copy's floor"
    found = _of(told, "decode")
    if not found:
        yield _absent(told, "decode", what)
    for one in found:
        least = SHARE_OF_LARGE if one["batch"] >= 128 and one["context"] < 1024 else SHARE_OF_COPY
        larger = max(one["floor_copy_ms"], one["floor_matrix_ms"]) / one["ms"]
        share = f"{one['share_of_copy']:.0%} ({larger:.0%} of the larger floor)"
        figure = f"{share}, {one['tok_s']:,.0f} tok/s, {one['ms']:.2f} ms"
        name = f"{what}, at least {least:.0%}: {one['batch']} x {one['context']}"
        yield Verdict(name, figure, one["share_of_copy"] >= least)
    for (batch, context), least in DECODE_TOK_S.items():
        what = f"decode {batch} x {context}: at least {least:,} tok/s (of an H200)"
        for one in _of(told, "decode", batch=batch, context=context):
            passed = one["tok_s"] >= least if "H200" in one["device"] else None
            yield Verdict(what, f"{one['tok_s']:,.0f} on {one['device']}", passed)


def _dependent(told: Told) -> Iterator[Verdict]:
    what = "kernels that begin beside the one in front: 0 bits differ"
    found = _of(told, "pdl")
    if not found:
        yield _absent(told, "pdl", what)
    for one in found:
        figure = (
            f"{one['off_ms']:.3f} to {one['on_ms']:.3f} ms, {one['off_ms'] / one['on_ms']:.2f}x"
        )
        size = f"{one['shape']}, {one['batch']} x {one['context']}"
        yield Verdict(f"{what}: {size}", f"{figure}, {one['differ']} differ", one["differ"] == 0)


def _sampling(told: Told) -> Iterator[Verdict]:
    what = "sampling: at most 60 us for 64 rows, a row's token in every crowd"
    found = _of(told, "sampling")
    if not found:
        yield _absent(told, "sampling", what)
    for one in found:
        wrong = f"{one['differ']} differ, {one['unlike_numpy']} unlike numpy's"
        name = f"{what}: {one['spread']} {one['draw']}, {one['rows']} rows"
        good = one["differ"] == 0 and (one["rows"] > 64 or one["us"] <= 60)
        yield Verdict(name, f"{one['us']:.1f} us, {wrong}", good)


def _attention(told: Told) -> Iterator[Verdict]:
    what = "attention: the same bits each time, and alone"
    found = _of(told, "attention")
    if not found:
        yield _absent(told, "attention", what)
    for one in found:
        floor = 1e3 * max(one["floor_copy_ms"], one["floor_matrix_ms"])
        figure = f"{one['us']:.1f} us, {floor / one['us']:.0%} of the floor"
        yield Verdict(f"{what}: {one['size']}, {one['kv']}", figure, one["stable"] and one["alone"])


def _drafts(told: Told) -> Iterator[Verdict]:
    what = f"drafts where they pay: at least {DRAFTS}x the pace of steps ahead"
    for one in _of(told, "drafts"):
        figure = (
            f"{one['ratio']:.2f}x of {one['off']:,.0f} tok/s, {one['a_step']:.2f} tokens a step"
        )
        name = f"{what}: {one['shape']}, {one['kind']}, {one['size']} at once"
        yield Verdict(name, figure, one["ratio"] >= DRAFTS)
    if not _of(told, "drafts"):
        yield _absent(told, "drafts", what)


def _ranks(told: Told) -> Iterator[Verdict]:
    for name in ("processes", "streams"):
        what = f"sums over two ranks as {name} of one device: right, 0 bits differ"
        found = _of(told, "ranks", what=name)
        if not found:
            yield _absent([one for one in told if one.get("what") == name], "ranks", what)
            continue
        wrong, differ, lost = (
            sum(one[key] for one in found) for key in ("wrong", "differ", "lost")
        )
        figure = f"{wrong} elements wrong, {differ} differ, {lost} given up, of {len(found)} cases"
        yield Verdict(what, figure, wrong == differ == lost == 0)
    for one in _of(told, "ranks", what="sum"):
        name = f"sum over two ranks of one device, {one['rows']} x {one['columns']}, {one['way']}"
        yield Verdict(name, f"{one['us']:.1f} us", None)
    what = "a tiny model on two ranks of one device: the tokens of one rank"
    model = _of(told, "ranks", what="model")
    if model:
        yield Verdict(what, str(model[-1]["tokens"]), model[-1]["passed"])
    else:
        yield _absent([one for one in told if one.get("what") == "model"], "ranks", what)


def _prefill(told: Told) -> Iterator[Verdict]:
    what, found = (
        f"prefill of 8k tokens: at least {SHARE_OF_MATRIX:.0%} of the bf16 rate",
        _of(told, "prefill"),
    )
    if not found:
        yield _absent(told, "prefill", what)
    for one in found:
        figure = (
            f"{one['share_of_matrix']:.0%}, {one['tflop_s']:.0f} TFLOP/s, chunks of {one['chunk']}"
        )
        yield Verdict(what, figure, one["share_of_matrix"] >= SHARE_OF_MATRIX)


def _invariance(told: Told) -> Iterator[Verdict]:
    what, found = "the cost of invariance", _of(told, "invariance")
    if not found:
        yield _absent(told, "invariance", f"{what}: at most {COST:.0%}")
    for one in found:
        most = COST
        size = f"{one['batch']} x {one['rows']} behind {one['context']}" if "batch" in one else ""
        if one["what"] == "products":
            most = BESIDE_CUBLAS if one["rows"] > 64 else COST
            size = f"{one['rows']} rows"
        name = f"{what}, at most {most:.0%}: {one['what']}, {size}"
        if one["cost"] is None:
            yield Verdict(name, f"{one['us']:.0f} us, and nothing to compare with", None, run=False)
            continue
        figure = f"{one['cost']:.1%} ({one['us']:.0f} us, best {one['best_us']:.0f})"
        yield Verdict(name, figure, one["cost"] <= most)
    yield from _end_to_end(told)


def _end_to_end(told: Told) -> Iterator[Verdict]:
    """Whole steps beside the same steps with the fastest free choice of each product and attention."""
    what = f"the cost of invariance end to end: at most {COST:.0%}"
    cases = [
        (
            f"{batch} x 1024",
            batch,
            {"batch": batch, "rows": 1},
            _of(told, "decode", batch=batch, context=1024),
        )
        for batch in (64, 256)
    ]
    cases.append(
        ("a prompt of 8192", 8192, {"batch": 1, "rows": 8192}, _of(told, "prefill", rows=8192))
    )
    for name, rows, size, steps in cases:
        parts = _of(told, "invariance", what="products", rows=rows)
        parts += _of(told, "invariance", what="attention", **size)
        if not steps or len(parts) < 2 or any(one["cost"] is None for one in parts):
            yield Verdict(f"{what}: {name}", "not measured", None, run=False)
            continue
        excess = 1e-3 * steps[-1]["layers"] * sum(one["us"] - one["best_us"] for one in parts)
        cost = excess / (steps[-1]["ms"] - excess)
        yield Verdict(f"{what}: {name}", f"{cost:.1%} of {steps[-1]['ms']:.2f} ms", cost <= COST)


class Best(NamedTuple):
    """A line whose figure is the best of several runs. key: its field, `sign` -1 where less is better."""

    part: str
    what: str
    key: str
    bound: float
    figure: str
    sign: int = 1

    def judge(self, told: Told) -> Iterator[Verdict]:
        found = _of(told, self.part)
        if not found:
            yield _absent(told, self.part, self.what)
            return
        best = max(found, key=lambda one: self.sign * float(one[self.key]))
        broken = "" if best.get("complete", True) else ", broken off"
        enough = self.sign * best[self.key] >= self.sign * self.bound
        yield Verdict(self.what, self.figure.format(**best) + broken, enough)


BESTS = (
    Best(
        "nano",
        f"nano-vllm's load on Qwen3-0.6B's shape: at least {NANO_TOK_S:,} tok/s",
        "tok_s",
        NANO_TOK_S,
        "{tok_s:,.0f}",
    ),
    Best(
        "burst",
        f"500 requests of 512 and 128 tokens at once: at least {BURST_REQUESTS_S} requests/s",
        "requests_s",
        BURST_REQUESTS_S,
        "{requests_s:.1f} ({tok_s:,.0f} tok/s)",
    ),
    Best(
        "idle",
        f"device idle at most {IDLE:.0%} at 64 sequences",
        "idle_share",
        IDLE,
        "{idle_share:.1%} of steps of {step_ms:.2f} ms, of the host {host_ms:.2f}; gaps {gaps}",
        -1,
    ),
    Best(
        "start",
        f"start to first token: at most {START_S:.0f} s",
        "seconds",
        START_S,
        "{seconds:.2f} s",
        -1,
    ),
    Best(
        "batch32",
        f"a batch of 32: at least {BATCH_TIMES:.0f}x one request",
        "ratio",
        BATCH_TIMES,
        "{ratio:.1f}x",
    ),
)


def _torch(told: Told) -> Iterator[Verdict]:
    """A plain PyTorch engine on the same card and the same loads."""
    for load in ("nano", "burst"):
        what = f"beside a plain PyTorch engine, {load}"
        theirs, ours = _of(told, "torch", load=load), _of(told, load)
        if not theirs or not ours or "tok_s" not in theirs[-1]:
            yield _absent(told, "torch", what)
            continue
        best, pace = max(float(one["tok_s"]) for one in ours), theirs[-1]["tok_s"]
        yield Verdict(what, f"{best / pace:.2f}x ({pace:,.0f} tok/s theirs)", best >= pace)


def _peers(told: Told) -> Iterator[Verdict]:
    for mode, least in TIMES.items():
        what = f"beside Transformers, {mode}: at least {least:.0f}x"
        found = [one for one in _of(told, "peers", mode=mode) if one.get("times")]
        if found:
            figure = f"{found[-1]['times']:.1f}x ({found[-1]['tok_s']:,.0f} tok/s theirs)"
            yield Verdict(what, figure, found[-1]["times"] >= least)
        else:
            yield _absent(told, "peers", what)


def _kinds(told: Told) -> Iterator[Verdict]:
    for group, base in (("weights", "bf16"), ("kv", "float16")):
        found = _of(told, "kinds", what=group)
        if not found:
            yield _absent(told, "kinds", f"{group} of fewer bits beside {base}: speed and error")
        for one in found:
            if one["kind"] == base:
                continue
            same = {"kind": base, "batch": one["batch"], "context": one["context"]}
            before = _of(found, "kinds", **same)
            faster = (
                f"{before[0]['ms'] / one['ms']:.2f}x of {base}" if before else f"{one['ms']:.2f} ms"
            )
            limit = ERRORS["kv" if group == "kv" else one["kind"]]
            what = f"{group} in {one['kind']}, {one['batch']} x {one['context']}: error below {limit:.0%}"
            yield Verdict(what, f"{faster}, error {one['error']:.2%}", one["error"] < limit)


def _forms(told: Told) -> Iterator[Verdict]:
    what = "every form of quantised weights: right, and the same bits at every height"
    found = _of(told, "forms", what="right")
    if not found:
        yield _absent(told, "forms", what)
        return
    bad = [one["kind"] for one in found if _is_wrong(one)]
    bad += [f"code {one:#x}" for line in _of(told, "forms", what="codes") for one in line["wrong"]]
    worst = max(one["worst"] for one in found)
    yield Verdict(what, f"wrong: {bad[:8]}, worst {worst:.2f} ulp of all terms", not bad)
    timed = _of(told, "forms", what="times")
    totals: dict[tuple[str, int], float] = {}
    for one in timed:
        totals[one["kind"], one["rows"]] = totals.get((one["kind"], one["rows"]), 0.0) + one["us"]
    for (kind, rows), us in totals.items():
        if kind != "bf16" and ("bf16", rows) in totals:
            times = totals["bf16", rows] / us
            least = (
                0.0 if kind.startswith("torch") or rows > 64 else BESIDE_BF16.get((kind, rows), 1.0)
            )
            what = f"{kind}, {rows} rows, an 8B layer: at least {least}x of bf16"
            yield Verdict(what, f"{times:.2f}x, {us:.0f} us", times >= least if least else None)


def _is_wrong(one: dict[str, Any]) -> bool:
    counted = one["wrong"] + one["embedded"] + one["gated"]
    return bool(counted or one["other_bits"] or not one["finite"])


def _mixtures(told: Told) -> Iterator[Verdict]:
    what = "experts, latent KV and blocks that travel: right, and a row's bits in every batch"
    found = [one for one in _of(told, "mixtures") if "same_bits" in one]
    if not found:
        yield _absent(told, "mixtures", what)
        return
    bad = [
        one.get("kind", one["what"])
        for one in found
        if one.get("worst", 0) > 1 or not one["same_bits"]
    ]
    yield Verdict(what, f"wrong: {bad[:8]} of {len(found)}", not bad)


def _adapters(told: Told) -> Iterator[Verdict]:
    what = f"what adapters add: error below {ERRORS['adapters']:.0%}"
    found = [one for one in _of(told, "kinds", what="adapters") if one["adapters"]]
    if not found:
        yield _absent(told, "kinds", what)
        return
    worst = max(one["error"] for one in found)
    yield Verdict(what, f"{worst:.2%}", worst < ERRORS["adapters"])
    for one in found:
        what = (
            f"{one['adapters']} adapters of rank {one['rank']}, {one['batch']} x {one['context']}"
        )
        yield Verdict(what, f"{one['pace']:.0%} of the pace without, {one['ms']:.2f} ms", None)


JUDGES: tuple[Callable[[Told], Iterator[Verdict]], ...] = (
    _right,
    _proof,
    _bits,
    _decode,
    _dependent,
    _sampling,
    _attention,
    _prefill,
    _invariance,
    *(line.judge for line in BESTS),
    _torch,
    _peers,
    _kinds,
    _forms,
    _mixtures,
    _adapters,
    _ranks,
    _drafts,
)


def table(told: Told) -> str:
    """A line for each verdict, short enough for a terminal."""
    words = {True: "PASS", False: "FAIL", None: "FIGURE"}
    rows = [
        f"{'NOT RUN' if not one.run else words[one.passed]:8} {one.what}: {one.figure}"[:170]
        for one in judge(told)
    ]
    for one in _of(told, "ceilings")[-1:]:
        copy, rate = one["copy_tb_s"], one["bf16_tflop_s"]
        rows.insert(
            0,
            f"{one['device']}: copy {copy:.2f} TB/s, bf16 {rate:.0f} TFLOP/s by {one['matrix_by']}",
        )
    return "\n".join(rows)
