"""The tokenizer of a GGUF file as a folder for Transformers: benchmarks count tokens with it. For SmolLM2.

Owns nothing but the conversion. Not for other families: their files name other pre-tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from pageturner.formats.gguf import open_header
from pageturner.formats.load_tokenizer import load_tokenizer

CONTROL = 3  # a type of a token


def write(source: Path, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. RuntimeError where the result is not the file's own
    tokenizer."""
    file = open_header(source)
    tokens = file.array("tokenizer.ggml.tokens").strings()
    merges = [tuple(merge.split(" ", 1)) for merge in file.array("tokenizer.ggml.merges").strings()]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.array("tokenizer.ggml.token_type").integers()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    text = (
        "Four score and 7 years ago, our fathers'\n\tbrought forth <|im_start|> 1,024 naïve tokens."
    )
    if tokenizer.encode(text).ids != load_tokenizer(source).encode(
        text, add_special=False, parse_special=True
    ):
        raise RuntimeError(f"the tokenizer of {source} was not converted faithfully")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[file.get("tokenizer.ggml.eos_token_id", int)],
        "chat_template": file.get("tokenizer.chat_template", str),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
