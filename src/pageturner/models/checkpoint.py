"""Quantised Hugging Face folders as files of tensors that can be packed.

Owns the choice of the reader by `quantization_config`, and that what was read is let go of. Must
not know the formats themselves, models or backends. A matrix is read, checked and turned into
blocks when it is asked for, some rows at a time: no more than one of them is in memory as blocks,
and none in fp32.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pageturner.errors import EngineFault
from pageturner.formats.hf_config import read_json
from pageturner.formats.mapped import TensorInfo
from pageturner.models.checkpoint_tensors import CheckpointTensors
from pageturner.models.compressed_tensors import compressed_tensors
from pageturner.models.float_checkpoints import bitsandbytes, fp8, modelopt, mxfp4
from pageturner.models.gptq_awq import auto_round, awq, gptq, mlx
from pageturner.models.hf_values import HFConfig
from pageturner.models.quantised_matrix import QuantisedMatrix, Readers, invalid
from pageturner.models.spec import unsupported
from pageturner.models.weights import TensorFile

Json = dict[str, Any]

_METHODS: dict[str, Callable[[HFConfig, CheckpointTensors], Readers]] = {
    "gptq": gptq,
    "awq": awq,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "mlx": mlx,
    "modelopt": modelopt,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "fbgemm_fp8": fp8,
    "mxfp4": mxfp4,
    "bitsandbytes": bitsandbytes,
}
# Files beside config.json that say how weights are quantised, and the method that is meant.
_BESIDE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
# Of activations and of the KV cache, which are rounded in another way here; and of how scales were
# found.
_UNUSED = (
    *(f".{of}_{what}" for of in ("input", "output") for what in ("scale", "zero_point")),
    *(f".{of}_scale" for of in "kvq"),
    ".input_scale_ub",
    ".weight_format",
    ".weight_zero_point",
    ".input_global_scale",
)
_CHUNK = 1 << 20  # values that a thread turns into blocks at once


class QuantisedFolder:
    """The tensors of a folder as if its matrices were of kinds of formats/ggml.py.

    becomes  what matrices lose by that: a line for each way, with how many there are
    """

    def __init__(self, file: TensorFile, readers: Readers, used: set[str]) -> None:
        """`used`: where readers put the names of the tensors that they have read."""
        self.path = file.path
        self._file, self._readers = file, readers
        self._last: tuple[str, memoryview] = ("", memoryview(b""))
        found, ways = dict[str, TensorInfo](), list[str]()
        for name, read in readers.items():  # its scales are let go of again
            matrix = read()
            found[name] = TensorInfo(
                name, matrix.kind, matrix.shape, 0, matrix.nbytes, matrix.columns, matrix.rows
            )
            ways += [matrix.becomes] if matrix.becomes else []
        rest = {
            name: info
            for name, info in file.tensors.items()
            if name not in used and not name.endswith(_UNUSED)
        }
        self.tensors: Mapping[str, TensorInfo] = rest | found
        self.becomes = [f"{way}, in {ways.count(way)} matrices" for way in dict.fromkeys(ways)]

    def tensor(self, name: str) -> tuple[str, tuple[int, ...], memoryview]:
        """(kind, shape, bytes). A matrix that is cut into several is turned into blocks once."""
        if name not in self._readers:
            return self._file.tensor(name)
        if self._last[0] != name:
            self._last = ("", memoryview(b""))
            self._last = (name, _blocks(self._readers[name]()))
        info = self.tensors[name]
        return info.kind, info.shape, self._last[1]

    def advise(self, names: Iterable[str], *, needed: bool) -> None:
        """Pass the hint on for tensors that are in the files under their own names."""
        self._file.advise((name for name in names if name not in self._readers), needed=needed)


def _blocks(matrix: QuantisedMatrix) -> memoryview:
    """All of a matrix, by all threads. EngineFault('quantization_invalid') for values that are not
    finite."""
    rows = int(np.prod(matrix.shape[:-1]))
    out = np.empty((rows, matrix.nbytes // rows), np.uint8)
    step = max(16, _CHUNK // matrix.shape[-1] // 16 * 16)

    def convert(start: int) -> None:
        stop = min(start + step, rows)
        out[start:stop] = matrix.blocks(start, stop)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(convert, range(0, rows, step)))
    return out.reshape(-1).data


def _method_of(said: Any) -> str:
    """The name of the method, or "" if there is none; old files of bitsandbytes do not name
    theirs."""
    if not isinstance(said, dict):
        return ""
    return str(said.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in said else ""))


def with_quantization(values: Json, folder: Path) -> Json:
    """The config.json of a folder, with the quantization_config that older tools wrote in a file of
    its own, and MLX under another name."""
    if isinstance(said := values.get("quantization"), dict):
        rest = {key: value for key, value in values.items() if key != "quantization"}
        return rest | {"quantization_config": {"quant_method": "mlx"} | said}
    if _said(values) is not None:
        return values
    for name, method in _BESIDE.items():
        if (folder / name).is_file():
            said = read_json(folder / name)
            return values | {"quantization_config": {"quant_method": method} | said}
    return values


def _said(values: Json) -> Any:
    return values.get("quantization_config") or values.get("compression_config") or None


def why_not_read(said: Any) -> str:
    """Why weights with this quantization_config are not read; "": they may be."""
    method = _method_of(said)
    if method in _METHODS:
        return ""
    message = f"weights quantised by {method or 'an unknown method'} are not supported"
    hint = "use the unquantised model, with --quantization int8 or int4, or a GGUF file of it"
    return f"{message}, only by {', '.join(_METHODS)}; {hint}"


def open_checkpoint(values: Json, file: TensorFile, where: str) -> TensorFile:
    """The file itself, or as what its config.json says it is.

    values  of config.json
    where   that file, for messages
    EngineFault 'quantization_invalid' where it says what is not true of its tensors,
    'model_unsupported'
    names what is not read, 'tensor_missing', 'tensor_shape' or 'weight_kind' the tensor that is not
    right.
    """
    said = _said(values)
    if said is None:
        return file
    if not isinstance(said, dict):
        raise EngineFault("config_invalid", f"{where}: quantization_config should be an object")
    method = _method_of(said)
    read = _METHODS.get(method)
    if read is None:
        raise unsupported(f"{where}: {why_not_read(said)}")
    config = HFConfig(
        {key: value for key, value in said.items() if key != "quant_method"},
        f"{where}, quantization_config",
    )
    tensors = CheckpointTensors(file)
    message = f"{where}: the quantization_config does not fit the weights"
    try:
        readers = read(config, tensors)
        if not readers:
            raise invalid(f"no weights are as {method} has them")
        return QuantisedFolder(file, readers, tensors.used)
    except EngineFault as fault:
        if fault.code != "quantization_invalid":
            raise
        raise invalid(f"{message}: {fault.message}") from fault
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        why = f"something in it is of another type than it should be: {error!r}"
        raise invalid(f"{message}: {why}") from error
