"""Fingerprints: what the bits of an answer depend on, by kernels and settings, and marks of a
model's weights.

Owns the form of a fingerprint, which receipts and step logs hold, so the form stays. Must not know
engines.
"""

from __future__ import annotations

import hashlib
import re

from pageturner.config.settings import EngineConfig
from pageturner.formats import hub
from pageturner.formats.gguf import parts_of
from pageturner.kernels.base import Ops
from pageturner.models.weights import AUTO

SAMPLES = 32  # of each file of a model
SAMPLE_BYTES = 16 << 10  # of one sample: half a megabyte a file is read in a millisecond


def fingerprint_of(ops: Ops, config: EngineConfig, kv_dtype: str, rope: str) -> str:
    """Return what the bits of an answer depend on. rope: which divisors longrope took; "": it had
    no choice."""
    weights = (
        config.dtype if config.quantization == "none" else f"{config.dtype}-{config.quantization}"
    )
    activations = AUTO if config.activation_bits == "auto" else config.activation_bits
    ending = f"-rope_{rope}" if rope else ""
    if config.tensor_parallel_size > 1:  # sums over ranks are rounded otherwise
        ending += f"-tp_{config.tensor_parallel_size}"
    return f"{ops.fingerprint}-{weights}-act_{activations}-kv_{kv_dtype}{ending}"


def settings_of(fingerprint: str) -> dict[str, str | int]:
    """Return the settings of EngineConfig that a fingerprint of `fingerprint_of` tells; {} where it
    is none."""
    found = re.fullmatch(
        r"(.+)-(auto|float32)(?:-(int8|int4))?-act_(\w+)-kv_([a-z0-9_]+?)(?:-rope_\w+?)?(?:-tp_(\d+))?",
        fingerprint,
    )
    if found is None:
        return {}
    ops, dtype, quantization, activations, kv_dtype, ranks = found.groups()
    return {
        "backend": "reference" if ops.startswith("reference") else "auto",
        "dtype": dtype,
        "quantization": quantization or "none",
        "activation_bits": activations if activations in ("8", "12", "15") else "auto",
        "kv_cache_dtype": kv_dtype,
        "tensor_parallel_size": int(ranks or 1),
    }


def model_mark(config: EngineConfig) -> str:
    """Size and digest of the beginning of the model's file or of its folder's config.json; ""
    without."""
    if config.backend in ("fake", "null"):
        return ""
    path = hub.resolve(config.model, offline=True).path
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        return ""
    with open(path, "rb") as file:
        return f"{path.stat().st_size}-{hashlib.sha256(file.read(1 << 20)).hexdigest()[:16]}"


def weights_digest(config: EngineConfig) -> str:
    """Tells the weights of one model from those of another, a fine-tune of it included: a digest of
    samples that lie evenly over its files. "" without a model."""
    if config.backend in ("fake", "null"):
        return ""
    path = hub.resolve(config.model, offline=True).path
    files = (
        [*sorted(path.glob("*.safetensors")), path / "config.json"]
        if path.is_dir()
        else parts_of(path)
    )
    files = [file for file in files if file.is_file()]
    digest = hashlib.blake2b(digest_size=16)
    if config.load_format == "dummy":
        files = [file for file in files if file.name == "config.json"]
        digest.update(f"dummy {config.load_seed} ".encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size} ".encode())
        with open(file, "rb") as opened:
            for sample in range(SAMPLES):
                opened.seek(sample * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()
