"""`pageturner doctor`: what this machine can do, what would be used, and why. Loads no model.

Owns the report and its warnings. Fails only when nothing could run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pageturner
from pageturner.cli import doctor_device
from pageturner.config import settings as configuration
from pageturner.config.flag_table import add_flags
from pageturner.config.settings import EngineConfig
from pageturner.engine import machine, machine_limits
from pageturner.engine.machine import Machine
from pageturner.engine.step_sizes import STEP
from pageturner.errors import EngineFault, bad_setting
from pageturner.executor.draft_compatibility import check_draft, check_speculation, cost_of
from pageturner.executor.kv_memory import KVForm, available_memory, plan_kv
from pageturner.formats import hub
from pageturner.formats.generation_config import read_generation
from pageturner.formats.gguf import GGUFFile
from pageturner.formats.hf_config import read_json
from pageturner.kernels import peak
from pageturner.kernels.base import KVSpec
from pageturner.kernels.cpu import native_module
from pageturner.models.load import check_memory, open_model, what_becomes, with_mtp
from pageturner.models.spec import ModelSpec
from pageturner.models.weights import TensorFile

MIB = 1 << 20
NO_TEMPLATE = "none in its files: that of its family, if it is known"
CHAT_TOKENS = 1000  # of a typical conversation, for "how many fit"


@dataclass(slots=True)
class DoctorReport:
    """Sections of (name, value) for people, the same as data, warnings, and what makes all of it
    useless."""

    sections: dict[str, dict[str, str]] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, section: str, rows: dict[str, str]) -> None:
        self.sections.setdefault(section, {}).update(rows)

    def render(self) -> str:
        lines = []
        for section, rows in self.sections.items():
            lines += [section, *(f"  {name:16} {text}" for name, text in rows.items()), ""]
        lines += [f"warning: {text}" for text in self.warnings]
        lines += [f"problem: {text}" for text in self.problems]
        return "\n".join([*lines, "nothing can run" if self.problems else "ready to serve"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    add_flags(parser, "doctor")
    configuration.add_flags(parser, "engine", leave_out=("model",))


def main(arguments: argparse.Namespace) -> int:
    """Print the report. Returns 1 if nothing could run."""
    flags = configuration.from_flags(arguments)
    if arguments.model is not None:
        flags["engine"]["model"] = arguments.model
    config = configuration.load(arguments.config, flags).engine
    report = examine(config, arguments.measure)
    if arguments.json:
        told = {"warnings": report.warnings, "problems": report.problems}
        print(json.dumps(report.data | told, indent=2))
    else:
        print(report.render())
    return 1 if report.problems else 0


def examine(config: EngineConfig, measure: bool = True) -> DoctorReport:
    """The whole report for these settings."""
    report = DoctorReport()
    here = machine.inspect()
    _machine(report, here)
    runs_native = _kernels(report, config)
    threads = config.threads or len(here.usable)
    if measure:
        _speed(report, runs_native, threads, here)
    lines, data, problems = doctor_device.examine(config, measure)
    report.sections["device"], report.data["device"] = lines, data
    report.problems += problems
    _model(report, config)
    _choices(report, config, here, runs_native)
    return report


def _machine(report: DoctorReport, here: Machine) -> None:
    limit = (
        "" if here.memory_limit is None else f", cgroup limit {here.memory_limit / MIB:,.0f} MiB"
    )
    quota = "no limit" if here.quota is None else f"{here.quota:g} processors"
    free = available_memory()
    extensions = " ".join(here.flags) or "no known extensions"
    versions = f"pageturner {pageturner.__version__}, Python {platform.python_version()}"
    rows = {
        "processor": f"{here.cpu} ({extensions})",
        "cores": f"{here.cores}, usable {_ranges(here.usable)}; cgroup quota: {quota}",
        "memory": f"{here.memory / MIB:,.0f} MiB, free {free / MIB:,.0f} MiB{limit}",
        "huge pages": here.huge_pages,
        "software": f"{versions}, {platform.system()} {platform.release()}",
    }
    report.add("machine", rows)
    report.data["machine"] = {**asdict(here), "memory_free": free}
    if here.load > len(here.usable):
        report.warnings.append(
            f"the machine is busy (load {here.load:.1f} on {len(here.usable)} cores): figures come out low"
        )
    if here.huge_pages == "never":
        report.warnings.append(
            "transparent huge pages are off: reading weights is up to a fifth slower"
        )


def _kernels(report: DoctorReport, config: EngineConfig) -> bool:
    """Report on the native kernels, and return whether they would run."""
    isas = native_module.available_isas()
    usable, reason = native_module.supported()
    chosen = os.environ.get("PAGETURNER_ISA") or (isas[0] if isas else "")
    wanted = config.backend in ("auto", "native")
    if not usable:
        report.warnings.append(
            f"no native kernels: {reason}; the numpy reference is hundreds of times slower"
        )
        if config.backend == "native":
            report.problems.append(
                "--backend native was asked for, and the native kernels cannot run here"
            )
    if isas and chosen not in isas:
        report.problems.append(f"PAGETURNER_ISA={chosen} is not available here: {', '.join(isas)}")
    runs = usable and wanted and chosen in isas
    used = f"native, {chosen}"
    if not runs:
        used = "reference" if wanted else config.backend
    report.add("kernels", {"usable": ", ".join(isas) or "none", "chosen": used})
    report.data["kernels"] = {"available": isas, "native": runs, "isa": chosen if runs else None}
    return runs


def _speed(report: DoctorReport, runs_native: bool, threads: int, here: Machine) -> None:
    """The limits that kernels cannot pass; without native kernels what numpy reaches."""
    if not runs_native:
        read, product = machine.measure_numpy()
        rows = {
            "read": f"{read:.0f} GB/s from memory (numpy's sum, one thread)",
            "fp32 products": f"{product:.0f} GFLOP/s (numpy's BLAS)",
        }
        report.add("measured", rows)
        report.data["measured"] = {"read_gb_s": read, "fp32_gop_s": product, "load": here.load}
        return
    limits = peak.measure(report.data["kernels"]["isa"], threads)
    sources = ", ".join(f"{value:.0f} of {size}" for size, value in limits.read_gb_s.items())
    rows = {
        "threads": f"{threads} together; nothing that is computed here can be faster",
        "read": f"{sources}: GB/s by the bytes in use (the first for each thread)",
        "copy": f"{limits.copy_gb_s:.0f} GB/s in memory",
    }
    for name, limit, unit in (
        ("integer products", limits.integer_gop_s, "GOP/s of int8"),
        ("fp32 products", limits.fp32_gop_s, "GFLOP/s"),
    ):
        rows[name] = "not known" if limit is None else f"{limit:.0f} {unit} ({limits.isa})"
    if machine_limits.store_peak(limits):
        file = machine_limits.limits_file()
        rows["kept"] = f"in {file}, the best so far: /metrics has shares of it"
    report.add("measured", rows)
    report.data["measured"] = {**asdict(limits), "load": here.load}


def _model(report: DoctorReport, config: EngineConfig) -> None:
    if config.backend in ("fake", "null"):
        report.add("model", {"none": f"the {config.backend} backend has no model"})
        return
    try:
        model = hub.resolve(config.model, offline=True)
    except EngineFault as fault:
        if config.model not in hub.ALIASES:
            report.problems.append(fault.message)
            return
        size = hub.ALIASES[config.model].nbytes
        report.warnings.append(
            f"{config.model} is not here yet: the first start fetches it ({size / 1e6:.0f} MB)"
        )
        return
    try:
        opened = open_model(model.path, config.load_format, config.load_seed)
        if config.speculation == "mtp":
            opened = with_mtp(opened)
        file, spec, layout = opened
        weights = sum(tensor.nbytes for tensor in file.tensors.values())
        size = weights if model.path.is_dir() else os.path.getsize(model.path)
        _model_facts(report, file, spec, model, size)
        report.warnings += what_becomes(file)
        _defaults(report, config, file if isinstance(file, GGUFFile) else model.path)
        check_memory(file, layout, config.dtype, config.quantization, available_memory())
        beside, more = _draft_model(report, config, spec)
        _kv(report, config, spec, size + more, beside)
    except EngineFault as fault:
        report.problems.append(fault.message)


def _model_facts(
    report: DoctorReport, file: TensorFile, spec: ModelSpec, model: hub.ModelFile, size: int
) -> None:
    kinds = Counter[str]()
    for tensor in file.tensors.values():
        kinds[tensor.kind] += math.prod(tensor.shape)
    parameters = kinds.total()
    shares = ", ".join(f"{kind} {100 * n / parameters:.1f} %" for kind, n in kinds.most_common())
    kv = f"({spec.kv_heads} for KV) of {spec.head_dim}"
    kv = f"over a latent KV of {spec.head_dim}" if spec.latent else kv
    template = _has_template(file, model)
    rows = {
        "file": f"{model.path} ({size / MIB:,.1f} MiB)",
        "architecture": f"{spec.arch}: {spec.layers} layers of {spec.dim}, {spec.heads} heads"
        f" {kv}, vocabulary {spec.vocab:,}",
        "weights": f"{parameters / 1e6:,.1f} M in {shares}",
        "context": f"{spec.context:,} tokens",
        "chat template": "yes" if template else NO_TEMPLATE,
    }
    report.add("model", rows)
    report.data["model"] = {
        "name": model.name,
        "path": str(model.path),
        "bytes": size,
        "parameters": parameters,
        "kinds": kinds,
        "context": spec.context,
        "arch": spec.arch,
        "chat_template": template,
    }


def _defaults(report: DoctorReport, config: EngineConfig, model: GGUFFile | Path) -> None:
    generation = read_generation(model, config.generation_config)
    sampling = f"{generation}" if generation.sampling else "no defaults of its own"
    report.add("model", {"sampling": sampling})
    report.data["model"]["sampling"] = generation.sampling


def _has_template(file: TensorFile, model: hub.ModelFile) -> bool:
    if isinstance(file, GGUFFile):
        return "tokenizer.chat_template" in file.metadata
    named = model.path / "tokenizer_config.json"
    inside = named.is_file() and bool(read_json(named).get("chat_template"))
    return inside or any(model.path.glob("chat_template*"))


def _draft_model(report: DoctorReport, config: EngineConfig, target: ModelSpec) -> tuple[int, int]:
    """Bytes of its KV in a block, and of its weights; 0 where there is none, or where they are in
    the model's file. EngineFault as when it is loaded, but its tokenizer is not looked at."""
    check_speculation(config)
    if config.speculation == "mtp":
        one, cost = _block(config, target.mtp), cost_of(target.mtp, target)
        report.add("model", {"MTP head": _takes(one, cost)})
        report.data["mtp"] = {"cost": cost, "bytes_per_token": one.bytes_per_token}
        return one.nbytes, 0
    if not config.draft_model:
        return 0, 0
    model = hub.resolve(config.draft_model, offline=True)
    file, spec, layout = open_model(model.path)
    check_draft(spec)
    check_memory(file, layout, config.dtype, config.quantization, available_memory())
    one, cost = _block(config, spec), cost_of(spec, target)
    text = f"{model.path}: {spec.layers} layers of {spec.dim}, {_takes(one, cost)}"
    report.add("model", {"draft model": text})
    data = {"path": str(model.path), "cost": cost, "bytes_per_token": one.bytes_per_token}
    report.data["draft_model"] = data
    return one.nbytes, sum(tensor.nbytes for tensor in file.tensors.values())


def _takes(one: KVSpec, cost: float) -> str:
    return f"its KV takes {one.bytes_per_token:,} bytes a token, a step {cost:.0%} of the model's"


def _block(config: EngineConfig, spec: ModelSpec) -> KVSpec:
    dtype = "float16" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    return spec.kv_spec(1, config.block_size, dtype)


def _kv(
    report: DoctorReport, config: EngineConfig, spec: ModelSpec, size: int, beside: int
) -> None:
    """The plan of the KV cache, before anything is loaded. EngineFault when it cannot be had."""
    one = _block(config, spec)
    length = config.max_model_len or spec.context
    if length > spec.context:
        raise bad_setting(
            f"max_model_len {length} is over the model's context of {spec.context} tokens"
        )
    windowed, free = spec.hiding(length), max(available_memory() - size, 0)
    storage = spec.recurrent_spec(one.dtype)
    form = KVForm(one, windowed, spec.window, beside, storage)
    sizes = plan_kv(form, config, length, free)
    blocks, nbytes = sizes.blocks, sizes.blocks * one.nbytes
    tokens = blocks * config.block_size
    full, chats = tokens // length, tokens // CHAT_TOKENS
    text = f"{blocks:,} of {config.block_size} tokens"
    if sizes.window:
        whole, recent = one.split(windowed)
        nbytes = sizes.blocks * whole.nbytes + sizes.sliding * recent.nbytes
        text += (
            f" for {whole.layers} layers, {sizes.sliding:,} for the last {sizes.window:,} tokens"
        )
        text += f" in {windowed} layers"
    if storage is not None:
        text += f" for {one.layers} layers; {sizes.states:,} states of {storage.state_bytes / MIB:,.1f} MiB"
        nbytes += sizes.states * storage.state_bytes + sizes.tails * storage.tail_bytes
    at_once = min(config.max_num_seqs, sizes.tails // 2 or config.max_num_seqs)
    nbytes += blocks * beside
    rows = {
        "one token": f"{one.bytes_per_token:,} bytes ({one.dtype}, {spec.kv_layers} layers)",
        "blocks": f"{text}, {nbytes / MIB:,.0f} MiB",
        "what fits": f"{tokens:,} tokens: {full:,} sequences of {length:,} tokens, or"
        f" {chats:,} of {CHAT_TOKENS:,}; at most {at_once} run at once",
    }
    report.add("KV cache", rows)
    report.data["kv"] = {
        "bytes_per_token": one.bytes_per_token,
        "blocks": blocks,
        "tokens": tokens,
        "bytes": nbytes,
        "full_sequences": full,
        "dtype": one.dtype,
        "recent_blocks": sizes.sliding,
        "states": sizes.states,
    }
    if not full:
        report.warnings.append(
            f"the KV cache holds {tokens:,} tokens, less than one sequence of {length:,}: longer requests are"
            " refused; lower --max-model-len or raise --kv-cache-memory"
        )


def _choices(report: DoctorReport, config: EngineConfig, here: Machine, runs_native: bool) -> None:
    threads = config.threads or len(here.usable)
    why = "asked for" if config.threads else "one for each core that this process may use"
    if config.max_num_batched_tokens < 0:
        budget = f"as many tokens a step as take {STEP:g} s"
    else:
        budget = f"{config.max_num_batched_tokens or 'any number of'} tokens a step"
    rows = {
        "threads": f"{threads} ({why})" if runs_native else "1 (numpy reference)",
        "policy": f"{config.policy}, {budget}, at most {config.max_num_seqs} sequences",
        "prefix cache": "on" if config.enable_prefix_caching else "off",
    }
    report.add("would be used", rows)
    report.data["config"] = asdict(config) | {"threads": threads}
    if threads > len(here.usable):
        report.warnings.append(
            f"{threads} threads on {len(here.usable)} usable cores wait for each other"
        )
    if here.quota is not None and here.quota < threads:
        report.warnings.append(
            f"the cgroup allows {here.quota:g} processors, and {threads} threads would run: they will be"
            f" throttled; use --threads {max(int(here.quota), 1)}"
        )


def _ranges(numbers: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) as "0-2,5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
