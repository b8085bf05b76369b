"""Trains a tiny SentencePiece model and records what the library makes of random texts with it.

Run by hand in the `transformers` peer: python tests/tools/record_spm.py TEXT_FOLDER. Owns
tests/goldens/tiny_spm.model and tiny_spm.json (sha256 over the ids of 3,000 random texts).
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import texts

GOLDENS = Path(__file__).parents[1] / "goldens"


def main() -> None:
    folder = Path(sys.argv[1])
    lines = [
        line
        for name in ("en_alice.txt", "zh_classics.txt")
        for line in texts.pieces(folder / name)
        if line
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines[:1500] + lines[-60:]),
        model_writer=model,
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        user_defined_symbols=["<tool>", "▁▁"],
        control_symbols=["<|end|>"],
        split_digits=True,
    )
    (GOLDENS / "tiny_spm.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    rows = [processor.encode(text) for text in texts.random_texts(3000)]
    (GOLDENS / "tiny_spm.json").write_text(json.dumps({"random": texts.digest(rows)}) + "\n")


if __name__ == "__main__":
    main()
