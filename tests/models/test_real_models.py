"""The other real models answer sensibly on the reference backend. Skipped where their files are absent."""

from __future__ import annotations

import pytest

from pageturner.files.hub import cache_folder
from pageturner.files.tokenizer import load_tokenizer
from pageturner.models.load import load_model
from support.decoding import Decoding, backend


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "prompt", "answer"),
    [
        ("gemma3-270m-q4_k_m.gguf", "The capital of France is", " the capital of the country of France."),
        ("qwen2.5-coder-0.5b-instruct-q4_k_m.gguf", "def fibonacci(n):\n    ", " if n <= 0:\n"),
    ],
)
def test_it_goes_on_sensibly(file: str, prompt: str, answer: str) -> None:
    path = cache_folder() / file
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    ops, tokenizer = backend("reference"), load_tokenizer(path)
    runs = Decoding(load_model(path, ops, max_positions=600), ops, blocks=8)
    ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
    tokens, _ = runs.greedy("p", list(ids), 6 if "qwen" in file else 8)
    assert tokenizer.decode(tokens) == answer
