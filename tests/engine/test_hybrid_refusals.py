"""What states of recurrent layers do not go with yet is refused by name, before anything is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pageturner.config.settings import EngineConfig
from pageturner.engine.engine_factory import make_engine
from pageturner.errors import EngineFault
from pageturner.kernels.cpu import native_module
from pageturner.parallel import tensor_parallel
from support.engines import GOLDENS

pytestmark = pytest.mark.skipif(
    not native_module.available_isas(), reason="the kernels are not compiled"
)
HYBRID = GOLDENS / "families" / "qwen3_5"


def engine(**settings: Any) -> Any:
    settings = {"model": str(HYBRID), "backend": "native", "threads": 1} | settings
    return make_engine(EngineConfig(**settings)).engine


@pytest.mark.parametrize(
    ("settings", "code", "says"),
    [
        ({"kv_file": "kv"}, "bad_setting", "leave them out"),
        ({"tensor_parallel_size": 2}, "model_unsupported", "recurrent layers"),
        ({"pipeline_parallel_size": 2}, "model_unsupported", "recurrent layers"),
        ({"kv_cache_memory": 10_000}, "kv_memory", "recurrent states"),
    ],
)
def test_settings(tmp_path: Path, settings: dict[str, Any], code: str, says: str) -> None:
    if "kv_file" in settings:
        settings = {"kv_file": str(tmp_path / "kv")}
    with pytest.raises(EngineFault, match=says) as fault:
        engine(**settings)
    assert fault.value.code == code


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"kv_file": "kv"}, "bad_setting"),
        ({"speculation": "draft", "draft_model": str(HYBRID)}, "draft_model"),
    ],
)
def test_before_any_weight_is_read(
    settings: dict[str, Any], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "load", lambda *rest: pytest.fail("it was loaded"))
    with pytest.raises(EngineFault, match="recurrent") as fault:
        engine(**settings)
    assert fault.value.code == code
