"""The tokenizer of a model: text to token ids and back, exact.

Owns which kinds of tokenizer a GGUF file may carry and how it describes them; folders are read by
`folder`. Must not know requests, templates or sampling.

Special tokens are found in text only where the caller asks for it (`parse_special`). Rendered
templates need it, and raw prompts of /v1/completions get it in vLLM and in llama-server, so callers
should ask for both.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from pageturner import logs
from pageturner.errors import EngineFault, naming
from pageturner.formats.bpe import DEFAULT, PRE_TOKENIZERS, TABLE, ByteLevel, RawBPE
from pageturner.formats.generation_config import GenerationDefaults, read_generation
from pageturner.formats.gguf import GGUFFile, open_gguf
from pageturner.formats.hf_tokenizer import load_folder
from pageturner.formats.sentencepiece import CONTROL, HIDDEN, UNKNOWN, SentencePiece
from pageturner.formats.tokenizer import Codec, Marks, Tokenizer

__all__ = ["Tokenizer", "load_tokenizer", "load_with_defaults"]

_KEY = "tokenizer.ggml."
_KINDS = ("gpt2", "llama", "gemma4")
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# what a gap is filled by -> keys of a file
_FIM_KEYS = {
    "prefix": ("fim_pre_token_id", "prefix_token_id"),
    "suffix": ("fim_suf_token_id", "suffix_token_id"),
    "middle": ("fim_mid_token_id", "middle_token_id"),
    "pad": ("fim_pad_token_id",),
    "repo": ("fim_rep_token_id",),
    "file": ("fim_sep_token_id",),
}
# Files that name no end of turn still have the token. `<|endoftext|>` is not among them: it ends
# documents, and a file for which it ends answers names it.
_TURN_ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|return|>",
        "<|call|>",
    }
)


def load_tokenizer(path: str | os.PathLike[str], load_format: str = "auto") -> Tokenizer:
    """The tokenizer of a GGUF file, or of a folder as Hugging Face lays it out. load_format: as
    load_with_defaults.

    EngineFault: 'tokenizer_unsupported' for a kind that is not known, 'tokenizer_corrupt' for
    broken tables, 'tokenizer_missing' for a folder without one, and whatever reading the files
    raises.
    """
    return load_with_defaults(path, "none", load_format)[0]


def load_with_defaults(
    path: str | os.PathLike[str], generation_config: str = "auto", load_format: str = "auto"
) -> tuple[Tokenizer, GenerationDefaults]:
    """The tokenizer of a model and its sampling defaults (see `read_generation`), the file opened
    once. What an explicit generation_config.json says that ends an answer ends it too. load_format
    "dummy": one with a token a byte stands in where a folder has none."""
    model = Path(path) if os.path.isdir(path) else open_gguf(path)
    with naming(path):
        if isinstance(model, Path):
            tokenizer = load_folder(model, stand_in=load_format == "dummy")
        else:
            tokenizer = from_gguf(model)
    generation = read_generation(model, generation_config)
    ends = (i for i in generation.eos_ids if i < tokenizer.vocab_size)
    tokenizer.eos_ids = tuple(dict.fromkeys((*tokenizer.eos_ids, *ends)))
    return tokenizer, generation


def from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer inside a GGUF file."""
    kind, pre = file.get(_KEY + "model", str), file.get(_KEY + "pre", str, DEFAULT)
    if kind not in _KINDS:
        message = f"tokenizer model {kind!r} is not supported; known: {', '.join(_KINDS)}"
        raise EngineFault("tokenizer_unsupported", message)
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise EngineFault(
            "tokenizer_unsupported", f"pre-tokenizer {pre!r} is not supported; known: {known}"
        )
    tokens = file.array(_KEY + "tokens").strings()
    kinds = file.array(_KEY + "token_type").integers()
    if not tokens:
        raise EngineFault("tokenizer_corrupt", "the vocabulary of the model file is empty")
    if len(kinds) != len(tokens):
        raise EngineFault("tokenizer_corrupt", "the model file has not one type for each token")
    if kind == "gpt2" and pre == DEFAULT:
        pre = _recognised(file, tokens, kinds)
    codec = _codec(file, kind, pre, tokens, kinds)
    spm = kind == "llama"
    bos, eos = (number if spm and number < len(tokens) else None for number in (1, 2))
    add_bos = kind != "gpt2" or PRE_TOKENIZERS[pre].add_bos
    start = "tokenizer.chat_template."
    keys = [key for key in file.metadata if key.startswith(start)]
    named = {key.removeprefix(start): file.get(key, str) for key in keys}
    return Tokenizer(
        codec,
        Marks(
            bos_id=_id(file, "bos_token_id", len(tokens), bos),
            eos_ids=_end_ids(file, tokens, kinds) or (() if eos is None else (eos,)),
            special_ids=frozenset(i for i, kind in enumerate(kinds) if kind in HIDDEN),
            add_bos=file.get(_KEY + "add_bos_token", bool, add_bos),
            add_eos=file.get(_KEY + "add_eos_token", bool, False),
            space_prefix=spm and _space_prefix(file),
            chat_template=file.get("tokenizer.chat_template", str, "") or None,
            named_templates=named,
            rerank_template=named.pop("rerank", ""),
            fim_ids=_fim_ids(file, len(tokens)),
            architecture=file.get("general.architecture", str, ""),
            name=file.get("general.name", str, ""),
        ),
    )


def _recognised(file: GGUFFile, tokens: Sequence[str], kinds: Sequence[int]) -> str:
    """The pre-tokenizer of a file that names none, told as llama.cpp's converter tells them: by the
    tokens that a certain text has. That of llama.cpp, with a warning, where no text of ours has the
    tokens of a known model."""
    merges = file.array(_KEY + "merges").strings()
    bos = _id(file, "bos_token_id", len(tokens))
    for pre in dict.fromkeys(PRE_TOKENIZERS.values()):
        ids = ByteLevel(tokens, kinds, merges, pre).encode(TABLE["text"], True)
        for row in (ids, [bos, *ids]):
            name = TABLE["names"].get(hashlib.sha256(str(row).encode()).hexdigest()[:16])
            if name and PRE_TOKENIZERS[name] == pre:
                return str(name)
    message = "names no pre-tokenizer, and its vocabulary is none that is known: texts are split as"
    advice = "by llama.cpp, which may be wrong; a file converted by today's llama.cpp names it"
    logs.say(f"{file.path} {message} {advice}", "warning")
    return DEFAULT


def _codec(
    file: GGUFFile, kind: str, pre: str, tokens: Sequence[str], kinds: Sequence[int]
) -> Codec:
    if kind == "gpt2":
        merges = file.array(_KEY + "merges").strings()
        return ByteLevel(tokens, kinds, merges, PRE_TOKENIZERS[pre])
    if kind == "gemma4":
        return RawBPE(tokens, kinds, file.array(_KEY + "merges").strings())
    scores = file.array(_KEY + "scores").floats()
    rstrip = _rstrip(file.get("general.name", str, ""), tokens, kinds)
    return SentencePiece((tokens, scores, kinds), space_prefix=_space_prefix(file), rstrip=rstrip)


def _space_prefix(file: GGUFFile) -> bool:
    return file.get(_KEY + "add_space_prefix", bool, True)


def _rstrip(name: str, tokens: Sequence[str], kinds: Sequence[int]) -> frozenset[int]:
    """Phi-3's special tokens swallow the white space behind them. llama.cpp goes by the name
    too."""
    if "phi-3" not in name.lower() and "phi3" not in name.lower():
        return frozenset()
    kept = ("<unk>", "<s>", "<|endoftext|>")
    return frozenset(
        i
        for i, kind in enumerate(kinds)
        if (kind in (CONTROL, UNKNOWN) and tokens[i] not in kept) or tokens[i] == "</s>"
    )


def _end_ids(file: GGUFFile, tokens: Sequence[str], kinds: Sequence[int]) -> tuple[int, ...]:
    named = [_id(file, name, len(tokens)) for name in _ENDS]
    ends = {
        tokens[i]: i for i, kind in enumerate(kinds) if kind == CONTROL and tokens[i] in _TURN_ENDS
    }
    if (
        "<|return|>" in ends and "<|call|>" in ends
    ):  # gpt-oss: more messages of the same turn may follow
        ends.pop("<|end|>", None)
    turns = ends.values()
    return tuple(dict.fromkeys(i for i in [*named, *turns] if i is not None))


def _fim_ids(file: GGUFFile, size: int) -> dict[str, int]:
    """The tokens for filling gaps that the file names, under the newer name of each or the older
    one."""
    found = {}
    for role, keys in _FIM_KEYS.items():
        ids = (_id(file, key, size) for key in keys)
        if (id := next((id for id in ids if id is not None), None)) is not None:
            found[role] = id
    return found


def _id(file: GGUFFile, name: str, size: int, default: int | None = None) -> int | None:
    token = file.get(_KEY + name, int, -1)
    if token >= size:
        raise EngineFault("tokenizer_corrupt", f"{_KEY}{name} is {token}, beyond the vocabulary")
    return token if token >= 0 else default
