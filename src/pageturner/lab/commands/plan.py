"""`pageturner plan`: what a model takes and how many sequences fit, before anything is loaded.

Owns the flags, the tables and the picture. The arithmetic is in lab/planning/kv_planner.py, what is
known of the model in lab/planning/model_outline.py; both are imported when there is something to
plan.
"""

from __future__ import annotations

import argparse
import textwrap
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageturner.config import settings as configuration
from pageturner.config.flag_table import add_flags, check_range
from pageturner.config.setting_values import parse_size
from pageturner.config.settings import EngineConfig
from pageturner.errors import EngineFault, bad_setting
from pageturner.lab.commands import simulated_engines
from pageturner.lab.reporting.output import write_figures

if TYPE_CHECKING:
    from pageturner.executor.kv_memory import KVSizes
    from pageturner.lab.planning.kv_planner import ClusterPlan, Fit, KVPlanner
    from pageturner.lab.planning.model_outline import Outline
    from pageturner.lab.simulation.roofline import GPU

SETTINGS = (
    "max_model_len",
    "kv_cache_dtype",
    "block_size",
    "dtype",
    "quantization",
    "max_loras",
    "max_num_seqs",
    "speculation",
    "kv_host_memory",
)
USUAL_LENGTHS = (400, 1500, 6000, 24000)  # 3/4 of a power of two: rounding up costs its average
PROMPT_LENGTHS = (512, 2048, 8192, 32768)  # tokens, of prompts in a cluster
BAR, WIDTH = 40, 100  # characters
MODEL_FACTS = ("name", "arch", "context", "attention", "heads", "why_not")
NAMES = {"contiguous": "contiguous", "power_of_two": "powers of two", "paged": "paged"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_flags(parser, "plan", "links")
    others = tuple(f.name for f in fields(EngineConfig) if f.name not in SETTINGS)
    configuration.add_flags(parser, "engine", leave_out=others)


def main(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns 1 where nothing fits."""
    config = configuration.load(None, configuration.from_flags(arguments)).engine
    plan = make_plan(arguments, config)
    print(plan.render())
    if arguments.output:
        write_figures(arguments.output, plan.data())
    return int((plan.model.weights or 0) >= plan.memory)


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Sequences of one length, or of the lengths of a trace: how many fit, by scheme."""

    name: str
    requests: int
    tokens: float
    fits: dict[str, Fit]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model and its plan. `memory`: bytes, for weights, adapters and KV; `adapters`: of
    those in memory; `sizes`: what the engine makes of the rest, None: it cannot run."""

    model: Outline
    source: Path
    memory: int
    memory_from: str
    planner: KVPlanner
    rows: list[LengthRow]
    notes: list[str]
    adapters: int = 0
    gpu: GPU | None = None
    gpus: int = 1
    cluster: ClusterPlan | None = None
    sizes: KVSizes | None = None

    def render(self) -> str:
        """The plan for people: facts, a table, a picture, notes."""
        parts = [_facts(self)]
        if self.rows:
            parts += [_table(self), _picture(self)]
        if self.cluster:
            parts.append(_cluster_table(self.cluster))
        notes = "\n".join(
            textwrap.fill(f"note: {note}", WIDTH, subsequent_indent="      ") for note in self.notes
        )
        return "\n\n".join([*parts, notes] if notes else parts)

    def data(self) -> dict[str, Any]:
        """The same for programs."""
        planner, model = self.planner, self.model
        storage = model.recurrent(planner.dtype)
        kv = {
            "dtype": planner.dtype,
            "block_size": planner.block_size,
            "bytes_per_token": model.bytes_per_token(planner.dtype),
            "bytes_per_block": model.bytes_per_token(planner.dtype) * planner.block_size,
            "max_model_len": planner.longest,
            "bytes_per_sequence": planner.sequence_bytes(planner.longest),
            "bytes_per_state": storage.state_bytes if storage else 0,
        }
        return {
            "model": {name: getattr(model, name) for name in MODEL_FACTS}
            | {"source": str(self.source), "layers": [asdict(kind) for kind in model.kv]},
            "weights": {"bytes": model.weights, "from": model.weights_from},
            "adapters": {"bytes": self.adapters},
            "kv": kv,
            "engine": asdict(self.sizes) if self.sizes else None,
            "memory": {"bytes": self.memory, "from": self.memory_from, "kv_bytes": planner.memory},
            "rows": [asdict(row) for row in self.rows],
            "cluster": asdict(self.cluster) if self.cluster else None,
            "notes": self.notes,
        }


def make_plan(arguments: argparse.Namespace, config: EngineConfig) -> ModelPlan:
    """Everything that can be said without loading anything. EngineFault says what to do instead."""
    asked = None if arguments.memory is None else _number(arguments.memory, "--memory", 1)
    lengths = _lengths(arguments.lengths)
    source = simulated_engines.model_path(arguments.model)

    from pageturner.executor.kv_memory import available_memory
    from pageturner.lab.planning.kv_planner import KVPlanner
    from pageturner.lab.planning.model_outline import kv_share
    from pageturner.lab.simulation.roofline import between

    gpu, memory, memory_from = _gpu(arguments)
    model = replace(_outline(source, arguments.weights_bytes, config), gpu_kv=gpu is not None)
    if model.weights is None:
        raise _uncounted(model)
    if gpu is None:
        memory = available_memory() if asked is None else asked
        memory_from = "free on this machine" if asked is None else "--memory"
    dtype = simulated_engines.kv_dtype(config)
    adapters = sum(simulated_engines.hot_adapters(arguments.lora, config))
    gpus = max(arguments.gpus, 1)
    beside = model.weights + adapters + between(gpus)
    free = max(int((memory - beside) * kv_share(model, dtype, gpus)), 0)
    planner = KVPlanner(model, dtype, config.block_size, _longest(model, config), free)
    rows, notes = _rows(planner, lengths), _notes(model, memory)
    if arguments.trace:
        rows.append(_trace(arguments.trace, planner, notes))
    return ModelPlan(
        model,
        source,
        memory,
        memory_from,
        planner,
        rows=rows if free else [],
        notes=notes,
        adapters=adapters,
        gpu=gpu,
        gpus=gpus,
        cluster=_cluster(arguments, config, planner, gpu),
        sizes=_sizes(planner, config),
    )


def _sizes(planner: KVPlanner, config: EngineConfig) -> KVSizes | None:
    with suppress(EngineFault):
        return planner.sizes(config) if planner.memory else None
    return None


def _gpu(arguments: argparse.Namespace) -> tuple[GPU | None, int, str]:
    """The GPU that was asked about, if any, and the memory for weights and KV on so many of
    them."""
    if arguments.gpu is None:
        if arguments.gpus != 1:
            raise bad_setting("--gpus says how many of --gpu there are: give both")
        return None, 0, ""
    from pageturner.lab.simulation.roofline import MIB, Reach, gpu_named

    if arguments.memory is not None:
        raise bad_setting("--gpu has a memory of its own: give --gpu or --memory")
    check_range(arguments, "1 or more", "gpus")
    gpu, share = gpu_named(arguments.gpu), Reach().memory
    where = f"{share:.0%} of {arguments.gpus} x {gpu.name} with {gpu.memory / MIB:,.0f} MiB"
    return gpu, int(share * gpu.memory * arguments.gpus), where


def _cluster(
    arguments: argparse.Namespace, config: EngineConfig, planner: KVPlanner, gpu: GPU | None
) -> ClusterPlan | None:
    """The plan for several replicas; None where nothing was asked about them."""
    from pageturner.lab.planning.kv_planner import ClusterPlan, Links
    from pageturner.lab.simulation.fleet import Roles, TierSizes
    from pageturner.lab.simulation.roofline import Reach, roofline

    check_range(arguments, "0 or more", "kv_file_gb")
    nbytes, count = planner.model.bytes_per_token(planner.dtype), max(arguments.gpus, 1)
    roles = simulated_engines.roles_of(arguments, config, nbytes)
    tiers = simulated_engines.tiers_of(arguments, config, nbytes)
    if roles is None and tiers is None:
        return None
    prefill, decode = simulated_engines.role_counts(arguments.roles) if roles else (0, 1)
    link = nbytes / (1e9 * arguments.kv_link_gb_s)
    links = Links(
        roles or Roles(0, 0, link, arguments.kv_link_ms / 1e3),
        tiers or TierSizes(),
        roofline(planner.model, gpu, Reach(), count, planner.dtype) if gpu else None,
        budget=simulated_engines.GPU_SETTINGS["max_num_batched_tokens"],
    )
    lengths = [*(n for n in PROMPT_LENGTHS if n < planner.longest), planner.longest]
    return ClusterPlan(
        prefill=prefill,
        decode=decode,
        gpus=count,
        sequences=decode * (planner.memory // planner.sequence_bytes(planner.longest)),
        host_tokens=links.tiers.host_tokens,
        file_tokens=links.tiers.file_tokens,
        link=arguments.kv_link_gb_s,
        host=arguments.kv_host_gb_s,
        file=arguments.kv_file_gb_s,
        rows=[links.row(length, prefill) for length in lengths],
    )


def _uncounted(model: Outline) -> EngineFault:
    """Weights of unknown size leave an unknown rest for KV: what to do instead of planning around
    them."""
    reason = model.weights_from.removeprefix("not known: ")
    message = f"the weights of {model.name} cannot be counted: {reason}; say what they take with"
    example = "--weights-bytes (16GB for 8 billion parameters of 16 bits)"
    return bad_setting(f"{message} {example}, or give the folder with the weights")


def _outline(source: Path, weights: str | None, config: EngineConfig) -> Outline:
    from pageturner.lab.planning.model_outline import read_outline

    mtp = config.speculation == "mtp"
    if config.speculation == "draft":
        raise bad_setting("plan counts no draft model: leave --speculation draft out")
    if weights is None:
        return read_outline(source, config.dtype, config.quantization, mtp)
    known = _number(weights, "--weights-bytes", 0)
    found = read_outline(source, mtp=mtp)
    return replace(found, weights=known, weights_from="--weights-bytes")


def _notes(model: Outline, memory: int) -> list[str]:
    notes = []
    if model.why_not:
        notes.append(f"this engine does not run the model: {model.why_not}")
    if model.assumed:
        notes.append(model.assumed)
    weights = model.weights or 0
    if weights >= memory:
        notes.append(
            f"nothing fits: the weights alone take {_size(weights)} and there are"
            f" {_size(memory)}; ask about a larger machine with --memory or --gpu"
        )
    return notes


def _number(text: str, name: str, least: int) -> int:
    value = parse_size(text, name)
    if value < least:
        raise bad_setting(f"{name} is {least} or more, not {text}")
    return value


def _lengths(text: str | None) -> list[int]:
    """The lengths that were asked for; none: the usual ones."""
    if text is None:
        return []
    each = (_number(part.strip(), "each of --lengths", 1) for part in text.split(","))
    return list(dict.fromkeys(each))


def _longest(model: Outline, config: EngineConfig) -> int:
    longest = config.max_model_len or model.context
    if not longest:
        raise bad_setting(
            f"{model.name} does not say how long a sequence may be: give --max-model-len"
        )
    if model.context and longest > model.context:
        raise bad_setting(
            f"--max-model-len {longest:,} is over the model's context of {model.context:,} tokens"
        )
    return longest


def _rows(planner: KVPlanner, lengths: list[int]) -> list[LengthRow]:
    longest = planner.longest
    for length in lengths:
        if length > longest:
            raise bad_setting(
                f"--lengths {length:,} is over the longest sequence of {longest:,} tokens"
            )
    chosen = lengths or [*(n for n in USUAL_LENGTHS if n < longest), longest]
    return [LengthRow(f"{n:,} tokens", 1, n, planner.fits([n])) for n in chosen]


def _trace(path: Path, planner: KVPlanner, notes: list[str]) -> LengthRow:
    """The requests of a trace at their full lengths, as many of each as it holds."""
    from pageturner.lab.traffic.traffic_files import read_trace

    lengths = [row.prompt_tokens + row.output_tokens for row in read_trace(path)]
    short = [n for n in lengths if n <= planner.longest]
    if not short:
        raise bad_setting(
            f"every request of {path} is over the longest sequence of {planner.longest:,} tokens"
        )
    if len(short) < len(lengths):
        notes.append(
            f"left out as over {planner.longest:,} tokens: {len(lengths) - len(short):,} of"
            f" {len(lengths):,} requests of {path.name}"
        )
    return LengthRow(
        path.name.split(".")[0], len(short), sum(short) / len(short), planner.fits(short)
    )


# -- what is shown ---------------------------------------------------------------------------------


def _facts(plan: ModelPlan) -> str:
    model, planner = plan.model, plan.planner
    token = model.bytes_per_token(planner.dtype)
    storage, sizes = model.recurrent(planner.dtype), plan.sizes
    windows = ", ".join(
        f"{kind.count} see {kind.window:,} tokens" for kind in model.kv if kind.window
    )
    kv_heads = "/".join(dict.fromkeys(str(kind.heads) for kind in model.kv))
    heads = f"{model.heads} heads, {kv_heads} with KV, " if model.attention != "MLA" else ""
    dims = "/".join(dict.fromkeys(f"{kind.key_dim}" for kind in model.kv))
    seen = f"; {windows}" if windows else ""
    states = ""
    if sizes and sizes.states:
        from pageturner.lab.planning.kv_planner import states_in_words

        states = states_in_words(sizes)
    one = _size(planner.sequence_bytes(planner.longest))
    room = _size(planner.memory)
    rows = {
        "model": f"{model.name} ({model.arch})",
        "file": str(plan.source),
        "attention": f"{model.attention}: {model.layers} layers, {heads}of {dims} values{seen}",
        "weights": f"{_size(model.weights or 0)}: {model.weights_from}",
        "adapters": f"{_size(plan.adapters)}: those in memory at once" if plan.adapters else "",
        "KV, one token": f"{_size(token)} ({planner.dtype})",
        "one block": f"{_size(token * planner.block_size)}: {planner.block_size} tokens",
        "one state": f"{_size(storage.state_bytes)}, of recurrent layers" if storage else "",
        "states": states,
        "one sequence": f"{one}: {planner.longest:,} tokens",
        "memory": f"{_size(plan.memory)} ({plan.memory_from}), {room} of it for KV",
        "each rank": _rank(plan) if plan.gpus > 1 else "",
        "reading": _reading(plan) if plan.gpu else "",
    }
    return "\n".join(f"{name:14} {text}" for name, text in rows.items() if text)


def _rank(plan: ModelPlan) -> str:
    """The memory of one of several GPUs that share each layer."""
    from pageturner.lab.planning.model_outline import kv_share, rank_kv_bytes
    from pageturner.lab.simulation.roofline import between

    dtype, count = plan.planner.dtype, plan.gpus
    own = kv_share(plan.model, dtype, count)
    twice = "" if own == 1 else f"; {1 - own:.0%} of the KV is what another rank holds too"
    room = _size(plan.planner.memory / own / count)
    sums = _size(between(count) / count)
    return (
        f"{_size((plan.model.weights or 0) / count)} of weights, {sums} for sums over ranks, {room} for KV,"
        f" {_size(rank_kv_bytes(plan.model, dtype, count))} a token{twice}"
    )


def _reading(plan: ModelPlan) -> str:
    """The lower bound of a decode step on a GPU: all weights are read, but for experts not
    chosen."""
    gpu, weights = plan.gpu, plan.model.weights or 0
    assert gpu is not None
    milliseconds = 1e3 * weights / gpu.bandwidth / plan.gpus
    return (
        f"all weights once: {milliseconds:.2f} ms at {gpu.bandwidth / 1e12:g} TB/s ({gpu.source})"
    )


def _table(plan: ModelPlan) -> str:
    from pageturner.lab.reporting.summary import table

    head = [
        "sequences of",
        "KV of each",
        *(word for name in NAMES.values() for word in (name, "empty")),
    ]
    rows = [
        [_label(row), _size(row.fits["paged"].each)]
        + [text for name in NAMES for text in row.fits[name].cells]
        for row in plan.rows
    ]
    longest = f"contiguous: {plan.planner.longest:,} tokens each"
    return f"how many fit, and how much of what they reserve stays empty ({longest})\n{table(rows, head)}"


def _label(row: LengthRow) -> str:
    return row.name if row.requests == 1 else f"{row.name} (mean {row.tokens:,.0f})"


def _picture(plan: ModelPlan) -> str:
    """The KV memory when it is full, a bar for each row and scheme."""
    lines = [
        "the KV memory when no more fit:  # holds tokens  - reserved, empty  . too little for another"
    ]
    width = max(len(row.name) for row in plan.rows)
    for row in plan.rows:
        for i, (key, name) in enumerate(NAMES.items()):
            fit = row.fits[key]
            taken = fit.sequences * fit.each / plan.planner.memory
            full = round(BAR * taken * fit.used)
            bar = "#" * full + "-" * (round(BAR * taken) - full)
            lines.append(
                f"{row.name if not i else '':{width}}  {name:13} |{bar:.<{BAR}}| {fit.sequences:,}"
            )
    return "\n".join(lines)


def _cluster_table(plan: ClusterPlan) -> str:
    """The replicas, and a row for each length of prompt."""
    from pageturner.lab.reporting.summary import table

    lines = []
    if plan.prefill:
        total = plan.gpus * (plan.prefill + plan.decode)
        lines.append(
            f"{plan.prefill:,} replicas compute prompts, {plan.decode:,} answer and hold"
            f" {plan.sequences:,} of the longest sequences; {total:,} GPUs in all"
        )
    if plan.host_tokens or plan.file_tokens:
        lines.append(
            f"below the KV of each replica: {plan.host_tokens:,} tokens in host memory,"
            f" {plan.file_tokens:,} in a file"
        )
    lines.append(
        f"ms of a prompt: to compute it; over a link of {plan.link:g} GB/s, whole, and what is left of"
        f" that when it is computed; back from host memory ({plan.host:g} GB/s) and from a file"
        f" ({plan.file:g} GB/s)"
    )
    head = ["prompt of", "computed", "sent", "late", "from host", "from file"]
    cells = [
        [
            f"{row.tokens:,} tokens",
            *map(_ms, (row.computed, row.sent, row.late, row.host, row.file)),
        ]
        for row in plan.rows
    ]
    if plan.prefill:
        head.append("prompts/s")
        for cell, row in zip(cells, plan.rows, strict=True):
            cell.append("-" if row.per_second is None else f"{row.per_second:,.1f}")
    return "\n".join([*(textwrap.fill(line, WIDTH) for line in lines), table(cells, head)])


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f}"


def _size(nbytes: float) -> str:
    """A size in the unit that suits it."""
    power = min(max(int(nbytes).bit_length() - 1, 0) // 10, 4)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{nbytes / 1024**power:,.{2 if power else 0}f} {unit}"
