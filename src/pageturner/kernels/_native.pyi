# What native.py uses of the compiled module. Arrays are C-contiguous; wrong shapes raise ValueError.
from typing import Any

build: str

def available_isas() -> list[str]: ...
def alloc_kv(layers: int, blocks: int, block_size: int, kv_heads: int, head_dim: int, elem: int) -> Any: ...
def make_layer(parts: dict[str, Any]) -> Any: ...

Batch: Any
Engine: Any
