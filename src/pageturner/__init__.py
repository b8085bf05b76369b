"""Pageturner: an LLM inference and serving engine. Everything is lazy: importing the package costs
next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams", "__version__"]

if TYPE_CHECKING:
    from pageturner.llm import LLM
    from pageturner.params import SamplingParams
    from pageturner.text.structured_outputs import StructuredOutputsParams


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from pageturner.llm import LLM

        return LLM
    if name == "SamplingParams":
        from pageturner.params import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from pageturner.text.structured_outputs import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module 'pageturner' has no attribute {name!r}")
